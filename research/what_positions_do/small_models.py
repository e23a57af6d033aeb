"""Train small models from scratch with a part of a scheme left out, for docs/questions.md: Shaw's values, Transformer-XL's u and v, and
mixing by attention.

    python research/what_positions_do/small_models.py --data FOLDER [--parts values biases] [--seeds 42 43]

The task, the sizes and the learning rates are those of the comparison from scratch in float32 (research/comparison): masked language modelling of
WikiText-2, a BERT of two layers and width 128. A part is left out by not training it: it starts at zero. The runs are in
outputs/positions/small_models.jsonl, a line each; a run that is there is not made again, so processes may share the work.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, set_seed


ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / name) for name in ("examples", "benchmarks", "research", "research/comparison")]

from compare_schemes import CompareArguments, MaskedLMCollator, Task, masked_lm_task  # noqa: E402
from comparison import FLOAT32  # noqa: E402
from intervals import of_mean  # noqa: E402
from quickstart import DEFAULTS  # noqa: E402
from recorded import Runs  # noqa: E402
from scheme_labels import flags_of  # noqa: E402
from training import PositionTrainingArguments, ScriptTrainer  # noqa: E402

from hf_posenc.modeling.models.embeddings import Attention  # noqa: E402


RUNS = ROOT / "outputs" / "positions" / "small_models.jsonl"
POSITION_RATE = 0.1
SETTINGS = {"comparison": FLOAT32, "position_learning_rate": POSITION_RATE}
KEYS, VALUES, U, V, QUERY_BIAS, MIXING = (
    "relative_key_embeddings.weight",
    "relative_value_embeddings.weight",
    "pos_bias_u.weight",
    "pos_bias_v.weight",
    "attention.self.query.bias",
    "position_query",
)


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        scheme: its name, with options as compare_schemes.py reads them.
        frozen: endings of the names of parameters that are not trained, and so stay zero.
        until: the step from which on these are trained, too; None: they never are.
        zeroed: by name, endings of the parameters that are set to zero in the trained model, to see what it loses.
    """

    scheme: str
    frozen: tuple[str, ...] = ()
    until: int | None = None
    zeroed: tuple[str, ...] = ()


# Question -> name -> model. The first is what others are compared with.
PARTS: dict[str, dict[str, Model]] = {
    "values": {
        "keys and values": Model("relative", zeroed=(VALUES, KEYS)),
        "keys": Model("relative:position_on_values=false"),
        "values": Model("relative", frozen=(KEYS,)),
    },
    "mixing": {
        "attention": Model("absolute:position_combine=attention"),
        "weights fixed": Model("absolute:position_combine=attention", frozen=(f"{MIXING}.weight", f"{MIXING}.bias")),
        "weights learned from step 400": Model(
            "absolute:position_combine=attention",
            frozen=(f"{MIXING}.weight", f"{MIXING}.bias"),
            until=FLOAT32["max_steps"] // 2,
        ),
    },
    # Without a query bias, which could do what u does, as Transformer-XL itself is; and with it, as BERT is.
    "biases": {
        "u and v": Model("transformer_xl", frozen=(QUERY_BIAS,), zeroed=(U, V)),
        "v alone": Model("transformer_xl", frozen=(QUERY_BIAS, U)),
        "u alone": Model("transformer_xl", frozen=(QUERY_BIAS, V)),
        "neither": Model("transformer_xl", frozen=(QUERY_BIAS, U, V)),
    },
    "biases_of_bert": {
        "u and v": Model("transformer_xl", zeroed=(U, V)),
        "neither": Model("transformer_xl", frozen=(U, V)),
    },
}
SEEDS = {"values": [42, 43, 44], "mixing": [42, 43], "biases": [42, 43], "biases_of_bert": [42]}


class Train(TrainerCallback):
    """Trains what was left out from a step on."""

    def __init__(self, parameters: list[torch.nn.Parameter], step: int):
        self.parameters, self.step = parameters, step
        for parameter in parameters:
            parameter.register_hook(self._gradient)
        self.now = 0

    def _gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.now >= self.step else torch.zeros_like(gradient)

    def on_step_begin(self, args, state, control, **kwargs):
        self.now = state.global_step


class Watched(Attention):
    """`position_combine="attention"` that tells the weights it gave positions, and takes a number that is added to every position's score."""

    def __init__(self) -> None:
        self.offset = torch.zeros((), requires_grad=True)
        self.weights = torch.empty(0)

    def combine(self, embeddings: torch.nn.Module, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        sources = torch.stack([words, positions.expand_as(words)], dim=-2)
        query = embeddings.position_query(words)[..., None]
        scores = embeddings.position_key(sources) @ query / words.shape[-1] ** 0.5
        weights = (scores + self.offset * scores.new_tensor([0.0, 1.0])[:, None]).softmax(dim=-2)
        self.weights = weights[..., 1, 0].detach()
        return (weights * embeddings.position_value(sources)).sum(dim=-2)


class Watch(TrainerCallback):
    """What the mixture does on a batch that is the same each time, every few steps."""

    EVERY = 40

    def __init__(self, batch: dict[str, torch.Tensor]):
        self.batch, self.found = batch, []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.EVERY == 0:
            self.found.append({"step": state.global_step, **watched(model, self.batch)})

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.found.append({"step": state.global_step, **watched(model, self.batch)})


def watched(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of a batch: loss, the weight of positions over its tokens, and how the loss changes with the score of all positions.

    Returns:
        `weight` and `deviation`, mean and standard deviation over tokens; `slope`, the derivative of the loss with respect to a number that is
        added to every position's score, above zero where less of the positions is better; `share` of the variance over tokens of what is put in
        that is the positions'.
    """
    embeddings, training = model.base_model.embeddings, model.training
    combination = embeddings.position_combine
    embeddings.position_combine = own = Watched()
    model.eval()
    loss = model(**batch).loss
    [slope] = torch.autograd.grad(loss, own.offset)
    embeddings.position_combine = combination
    model.train(training)
    with torch.no_grad():
        weights = own.weights[..., None]
        words = embeddings.words(batch["input_ids"])
        positions = embeddings.position_vectors(None, words.shape[1], 0, words.device).expand_as(words)
        parts = [
            embeddings.position_value(source) * weight
            for source, weight in ((words, 1 - weights), (positions, weights))
        ]
        variances = [float(part.flatten(0, 1).var(0).sum()) for part in parts]
    return {
        "loss": loss.item(),
        "weight": float(weights.mean()),
        "deviation": float(weights.std()),
        "slope": slope.item(),
        "share": variances[1] / sum(variances),
    }


def settings(data: Path) -> tuple[Task, PositionTrainingArguments]:
    """The task and the training of the comparison from scratch."""
    names = ("task", "length", "max_eval_tokens", "mask_share", "config_overrides")
    files = {"train_file": str(data / "wikitext2" / "valid.txt"), "eval_file": str(data / "wikitext2" / "test.txt")}
    arguments = CompareArguments(**{name: FLOAT32[name] for name in names}, **files)
    training = PositionTrainingArguments(
        **DEFAULTS
        | {name: FLOAT32[name] for name in ("max_steps", "learning_rate", "adam_beta2", "per_device_train_batch_size")}
        | {
            "use_cpu": True,
            "output_dir": str(RUNS.parent / "small_models"),
            "position_learning_rate": POSITION_RATE,
            "disable_tqdm": True,
            "logging_strategy": "no",
        }
    )
    return masked_lm_task(arguments), training


def run(model: Model, seed: int, data: Path) -> dict[str, Any]:
    """Train a model, and measure its loss on the masked tokens of the test text: as it is, and without what `zeroed` names."""
    task, training = settings(data)
    training.seed = seed
    set_seed(seed)
    trained = task.model(task.config(None, **flags_of(model.scheme)))
    frozen = [
        parameter for name, parameter in trained.named_parameters() if name.endswith(model.frozen) and model.frozen
    ]
    assert len(frozen) >= len(model.frozen) and all(not parameter.any() for parameter in frozen)
    if model.until is None:
        for parameter in frozen:
            parameter.requires_grad_(False)
    callbacks: list[TrainerCallback] = [] if model.until is None else [Train(frozen, model.until)]
    batch = None
    if "attention" in model.scheme:
        collator: MaskedLMCollator = task.trainer["data_collator"]
        batch = collator(task.evaluate_on[FLOAT32["length"]][:64])
        callbacks.append(Watch(batch))
    trainer = ScriptTrainer(
        model=trained, args=training, train_dataset=task.train, callbacks=callbacks, **task.trainer
    )
    trainer.train()

    def loss() -> float:
        return trainer.predict(task.evaluate_on[FLOAT32["length"]]).metrics["test_masked_loss"]

    found: dict[str, Any] = {"loss": loss()}
    for ending in model.zeroed:
        with changed(trained, ending, torch.zeros_like):
            found.setdefault("without", {})[ending] = loss()
    if batch is not None:
        found["watched"] = callbacks[-1].found
    return found


@contextmanager
def changed(model: PreTrainedModel, ending: str, change: Any) -> Iterator[None]:
    """A model whose parameters of a name are changed for a while."""
    parameters = [parameter for name, parameter in model.named_parameters() if name.endswith(ending)]
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(change(parameter))
    yield
    with torch.no_grad():
        for parameter, value in zip(parameters, before):
            parameter.copy_(value)


def summary() -> dict[str, Any]:
    """By part: the losses of each model by seed, their mean and interval, and differences to the first, seed by seed."""
    runs = Runs(RUNS, SETTINGS).read()
    found: dict[str, Any] = {}
    for part, models in PARTS.items():
        by_name = {
            name: {own["seed"]: own for own in runs if (own["part"], own["name"]) == (part, name)} for name in models
        }
        seeds = sorted(set.intersection(*({*own} for own in by_name.values())))
        found[part] = {"seeds": seeds, "models": _compared(by_name, seeds)}
    return found


def _compared(by_name: dict[str, dict[int, Any]], seeds: list[int]) -> dict[str, Any]:
    """Of runs by name and seed; differences are to the first of the names."""
    found: dict[str, Any] = {}
    reference = [own["loss"] for seed, own in next(iter(by_name.values())).items() if seed in seeds]
    for name, of_seed in by_name.items():
        runs = [of_seed[seed] for seed in seeds]
        losses = [own["loss"] for own in runs]
        found[name] = {"losses": losses, "loss": _interval(losses), "less_first": _less(losses, reference)}
        for ending in runs[0].get("without", {}):
            without = [own["without"][ending] for own in runs]
            found[name].setdefault("without", {})[ending] = _less(without, losses)
        if "watched" in runs[0]:
            found[name]["watched"] = {str(own["seed"]): own["watched"] for own in runs}
    return found


def _interval(values: list[float]) -> dict[str, float]:
    """Mean, and Student's interval where there are several seeds."""
    return asdict(of_mean(values)) if len(values) > 1 else {"mean": values[0]}


def _less(values: list[float], others: list[float]) -> dict[str, float]:
    return _interval([own - other for own, other in zip(values, others, strict=True)])


def make(data: Path, parts: list[str], seeds: list[int] | None = None) -> None:
    """Make the runs that are not there, of all seeds of each part unless some are named."""
    runs = Runs(RUNS, SETTINGS)
    for part in parts:
        for seed in seeds or SEEDS[part]:
            for name, model in PARTS[part].items():
                key = {"part": part, "name": name, "seed": seed}
                if any(key.items() <= own.items() for own in runs.read()):
                    continue
                found = run(model, seed, data)
                runs.add({**key, **found})
                print(part, name, seed, round(found["loss"], 3), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext2")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--seeds", nargs="+", type=int)
    options = parser.parse_args()
    make(options.data, options.parts, options.seeds)


if __name__ == "__main__":
    main()
