"""A learning rate of their own for the parameters that position schemes added."""

from transformers import Trainer

from hf_posenc import position_parameters


def set_position_learning_rate(trainer: Trainer, learning_rate: float) -> None:
    """Let the position parameters of the trainer's model learn at `learning_rate`, without weight decay.

    They start at zero and are few, so that a rate that suits a pretrained model would leave them where they are. The
    trainer's schedule applies to them as to everything else. Call it before `trainer.train()`.
    """
    optimizer = trainer.create_optimizer()
    positions = {id(parameter) for parameter in position_parameters(trainer.model).values()}
    fresh = []
    for group in optimizer.param_groups:
        fresh += [parameter for parameter in group["params"] if id(parameter) in positions]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in positions]
    if fresh:
        optimizer.add_param_group({"params": fresh, "lr": learning_rate, "weight_decay": 0.0})
