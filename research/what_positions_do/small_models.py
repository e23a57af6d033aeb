"""Train small models from scratch with a part of a scheme left out, for docs/questions.md: Shaw's values, Transformer-XL's u and v, clipping,
and mixing by attention.

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
from intervals import of_mean, paired  # noqa: E402
from quickstart import DEFAULTS  # noqa: E402
from recorded import Runs  # noqa: E402
from scheme_labels import flags_of  # noqa: E402
from training import PositionTrainingArguments, ScriptTrainer  # noqa: E402

from hf_posenc.modeling.models.embeddings import Attention  # noqa: E402


RUNS = ROOT / "outputs" / "positions" / "small_models.jsonl"
SEEDS = [42, 43, 44, 45, 46]
POSITION_RATE = 0.1
STEPS, TOKENS = FLOAT32["max_steps"], FLOAT32["per_device_train_batch_size"] * FLOAT32["length"]
KEYS, VALUES, U, V, QUERY_BIAS, MIXING = (
    "relative_key_embeddings.weight",
    "relative_value_embeddings.weight",
    "pos_bias_u.weight",
    "pos_bias_v.weight",
    "attention.self.query.bias",
    "position_query",
)
# Distances from which on all have one vector. 127 is every distance there is at 128 tokens.
CLIPS, ALL = (1, 2, 4, 8, 16, 32, 64), 127
LONG = 128


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        scheme: its name, with options as compare_schemes.py reads them.
        frozen: endings of the names of parameters that are not trained, and so stay zero.
        until: the step from which on these are trained, too; None: they never are.
        length: tokens of a training example.
        zeroed: by name, endings of the parameters that are set to zero in the trained model, to see what it loses.
    """

    scheme: str
    frozen: tuple[str, ...] = ()
    until: int | None = None
    length: int = FLOAT32["length"]
    zeroed: tuple[str, ...] = ()


def _relative(clip: int) -> Model:
    return Model(f"relative:position_max_distance={clip}", length=LONG)


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
            "absolute:position_combine=attention", frozen=(f"{MIXING}.weight", f"{MIXING}.bias"), until=STEPS // 2
        ),
    },
    "biases": {
        "u and v, no query bias": Model("transformer_xl", frozen=(QUERY_BIAS,), zeroed=(U, V)),
        "v alone, no query bias": Model("transformer_xl", frozen=(QUERY_BIAS, U)),
        "u alone, no query bias": Model("transformer_xl", frozen=(QUERY_BIAS, V)),
        "nothing, no query bias": Model("transformer_xl", frozen=(QUERY_BIAS, U, V)),
        "u and v": Model("transformer_xl", zeroed=(U, V)),
        "neither": Model("transformer_xl", frozen=(U, V)),
    },
    "clipping": {str(clip): _relative(clip) for clip in (ALL, 2, 8, 32)},
}
# The seeds of a part, where not all.
FEWER = {"mixing": SEEDS[:3], "clipping": SEEDS[:3], "biases": SEEDS[:3]}


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


def settings(data: Path, length: int) -> tuple[Task, PositionTrainingArguments]:
    """The task and the training of the comparison from scratch, in examples of some length and batches of as many tokens."""
    names = ("task", "max_eval_tokens", "mask_share", "config_overrides")
    files = {"train_file": str(data / "wikitext2" / "valid.txt"), "eval_file": str(data / "wikitext2" / "test.txt")}
    arguments = CompareArguments(**{name: FLOAT32[name] for name in names}, **files, length=length)
    training = PositionTrainingArguments(
        **DEFAULTS
        | {name: FLOAT32[name] for name in ("max_steps", "learning_rate", "adam_beta2")}
        | {
            "use_cpu": True,
            "output_dir": str(RUNS.parent / "small_models"),
            "position_learning_rate": POSITION_RATE,
            "per_device_train_batch_size": TOKENS // length,
            "disable_tqdm": True,
            "logging_strategy": "no",
        }
    )
    return masked_lm_task(arguments), training


def run(model: Model, seed: int, data: Path) -> dict[str, Any]:
    """Train a model, and measure its loss on the masked tokens of the test text: as it is, and without what `zeroed` names."""
    task, training = settings(data, model.length)
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
        batch = collator(task.evaluate_on[model.length][:64])
        callbacks.append(Watch(batch))
    trainer = ScriptTrainer(
        model=trained, args=training, train_dataset=task.train, callbacks=callbacks, **task.trainer
    )
    trainer.train()

    def loss() -> float:
        return trainer.predict(task.evaluate_on[model.length]).metrics["test_masked_loss"]

    found: dict[str, Any] = {"loss": loss()}
    for ending in model.zeroed:
        with changed(trained, ending, torch.zeros_like):
            found.setdefault("without", {})[ending] = loss()
    if model == _relative(ALL):
        for clip in CLIPS:
            with (
                changed(trained, KEYS, lambda rows, k=clip: clipped(rows, k)),
                changed(trained, VALUES, lambda rows, k=clip: clipped(rows, k)),
            ):
                found.setdefault("clipped", {})[str(clip)] = loss()
    if batch is not None:
        found["watched"] = callbacks[-1].found
    return found


def clipped(rows: torch.Tensor, clip: int) -> torch.Tensor:
    """Vectors (2 · largest distance + 1, width), those beyond a distance replaced by its."""
    middle = len(rows) // 2
    distances = torch.arange(len(rows)) - middle
    return rows[distances.clamp(-clip, clip) + middle]


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
    runs = Runs(RUNS, {"comparison": FLOAT32, "position_learning_rate": POSITION_RATE}).read()
    found: dict[str, Any] = {}
    for part, models in PARTS.items():
        by_name = {
            name: {own["seed"]: own for own in runs if own["part"] == part and own["name"] == name} for name in models
        }
        seeds = sorted(set.intersection(*({*own} for own in by_name.values())))
        if len(seeds) > 1:
            found[part] = {"seeds": seeds, "models": _compared(by_name, seeds)}
    return found


def _compared(by_name: dict[str, dict[int, dict]], seeds: list[int]) -> dict[str, Any]:
    first, found = next(iter(by_name.values())), {}
    reference = [first[seed]["loss"] for seed in seeds]
    for name, own in by_name.items():
        losses = [own[seed]["loss"] for seed in seeds]
        found[name] = {"loss": losses, "mean": asdict(of_mean(losses))}
        if own is not first:
            found[name]["less_first"] = asdict(paired(losses, reference))
        for kind in ("without", "clipped"):
            for key in own[seeds[0]].get(kind, {}):
                changed_losses = [own[seed][kind][key] for seed in seeds]
                found[name].setdefault(kind, {})[key] = asdict(paired(changed_losses, losses))
        if "watched" in own[seeds[0]]:
            found[name]["watched"] = {str(seed): own[seed]["watched"] for seed in seeds}
    return found


def make(data: Path, parts: list[str], seeds: list[int]) -> None:
    """Make the runs that are not there."""
    runs = Runs(RUNS, {"comparison": FLOAT32, "position_learning_rate": POSITION_RATE})
    for part in parts:
        for seed in (seed for seed in seeds if seed in FEWER.get(part, SEEDS)):
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
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    options = parser.parse_args()
    make(options.data, options.parts, options.seeds)


if __name__ == "__main__":
    main()
