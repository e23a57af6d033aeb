"""Does a fit without gradients between calibration and distillation save steps? MiniLM, converted to `t5`.

    python research/conversion_fit/least_squares.py --data DATA     # all runs that runs.jsonl lacks
    python tools/generate.py                                        # the table of them

Layer after layer, on the student's own inputs, linear layers get the weights under which they come nearest to the teacher's states at
the same point (ridge regression of the *change* of weight and bias). Only X'X and X'Y are accumulated. The ridge is the one of
[`RIDGES`] with the smallest error on a tenth of the training text that is left out of the sums; where none is better than no change,
the layer stays as it is. DATA has the texts in the layout that benchmarks/conversion.py describes: wikitext2/valid.txt is learned from,
wikitext2/test.txt is measured on, stsb/stsb-en-test.csv is reported.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, pad


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), *(str(HERE.parents[1] / name) for name in ("benchmarks", "examples"))]

from embedding_quality import sts_spearman  # noqa: E402
from minilm import packaged_minilm  # noqa: E402
from recorded import Runs  # noqa: E402

from hf_posenc.conversion import Distillation, calibrate, distill, start  # noqa: E402
from hf_posenc.conversion.calibration import Fit  # noqa: E402
from hf_posenc.conversion.converting import Conversion, ConversionArguments  # noqa: E402
from hf_posenc.conversion.measuring import Yardstick  # noqa: E402
from hf_posenc.conversion.observation import Batch, LayerByLayer, observe, undisturbed  # noqa: E402
from hf_posenc.conversion.texts import Windows, held_out_apart  # noqa: E402
from hf_posenc.parameters import position_parameters  # noqa: E402


LENGTH = 128
SHORTEST = 16
BATCH_TOKENS = 1024
RIDGES = tuple(10.0 ** (power / 2) for power in range(-8, 7))
SCORE_STEPS = 12


@dataclass(frozen=True)
class Fitted:
    """What is fitted in each layer, on how many tokens.

    Attributes:
        inputs: the projections of queries, keys and values, to the teacher's.
        scores: the position terms again, as calibration does.
        attention_output: to the state before the first LayerNorm.
        intermediate: the first feed-forward projection, to the teacher's.
        output: the second one, to the state before the second LayerNorm.
        norms: the biases of both LayerNorms.
    """

    tokens: int = 16_384
    attention_output: bool = True
    inputs: bool = False
    scores: bool = False
    intermediate: bool = False
    output: bool = False
    norms: bool = False


@dataclass(frozen=True)
class Trial:
    fitted: Fitted | None = None
    steps: int = 0
    seed: int = 0


OUTPUTS = Fitted()
EVERYTHING = Fitted(inputs=True, scores=True, intermediate=True, output=True, norms=True)
TRIALS = [
    Trial(),
    Trial(OUTPUTS),
    Trial(None, 50),
    *(Trial(fitted, steps, seed) for seed in (0, 1) for fitted, steps in ((OUTPUTS, 100), (None, 135))),
    Trial(None, 50, seed=1),
    Trial(EVERYTHING),
    Trial(Fitted(65_536)),
    Trial(Fitted(output=True)),
]


class NormalEquations:
    """Sums for the change of a linear layer, (outputs, inputs) and a bias, that comes nearest to what it lacks.

    Minimises Σ_t w_t |r_t - S x_t - c|² + λ |S|², the ridge λ in units of the mean variance of an input; c is free.
    """

    def __init__(self, inputs: int, outputs: int):
        self.gram = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
        self.products = torch.zeros(inputs + 1, outputs, dtype=torch.float64)
        self.squares = 0.0

    def add(self, inputs: torch.Tensor, residual: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Tokens of a batch: (tokens, inputs), (tokens, outputs) and (tokens,)."""
        inputs = pad(inputs, (0, 1), value=1.0)
        weights = torch.ones(len(inputs)) if weights is None else weights
        weighted = inputs * weights[:, None]
        self.gram += (weighted.T @ inputs).double()
        self.products += (weighted.T @ residual).double()
        self.squares += float((weights[:, None] * residual.square()).sum())

    def solutions(self, ridges: tuple[float, ...]):
        """By ridge, the change with the bias as its last row, (inputs + 1, outputs)."""
        total, sums = self.gram[-1, -1], self.gram[-1, :-1]
        covariance = self.gram[:-1, :-1] - torch.outer(sums, sums) / total
        strength, vectors = torch.linalg.eigh(covariance)
        along = vectors.T @ (self.products[:-1] - torch.outer(sums, self.products[-1]) / total)
        for ridge in ridges:
            change = vectors @ (along / (strength.clamp(min=0) + ridge * strength.mean())[:, None])
            yield ridge, torch.cat([change, ((self.products[-1] - sums @ change) / total)[None]])

    def error(self, change: torch.Tensor) -> float:
        """The weighted squared error of a change."""
        return self.squares + float((change * (self.gram @ change - 2 * self.products)).sum())


class Solver:
    """Normal equations of some layers with one input, of text to fit on and of text to choose the ridge on."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        outputs = sum(layer.out_features for layer in layers)
        self.sums = [NormalEquations(layers[0].in_features, outputs) for _ in range(2)]

    def now(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(inputs) for layer in self.layers], dim=-1)

    def add(self, is_left_out: bool, inputs, aim, weights=None) -> None:
        self.sums[is_left_out].add(inputs, aim - self.now(inputs), weights)

    def apply(self) -> None:
        fitted, left_out = self.sums
        least, best = left_out.squares, None
        for _, change in fitted.solutions(RIDGES) if fitted.squares else ():
            if (error := left_out.error(change)) < least:
                least, best = error, change
        if best is None:
            return
        for layer, part in zip(self.layers, best.split([layer.out_features for layer in self.layers], dim=1)):
            layer.weight += part[:-1].T.to(layer.weight)
            layer.bias += part[-1].to(layer.bias)


@dataclass
class Seen:
    """Of the teacher in a layer, by batch, at real tokens: its input, states before the LayerNorms, and after the first."""

    inputs: list[torch.Tensor]
    first: list[torch.Tensor]
    middle: list[torch.Tensor]
    second: list[torch.Tensor]


class LayerFit:
    """Both models on the same text, the layers of the student fitted one after another."""

    def __init__(
        self, student: nn.Module, teacher: nn.Module, fitted: Fitted, text: list[Batch], left_out: list[Batch]
    ):
        self.fitted = fitted
        batches = text + left_out
        self.is_left_out = [False] * len(text) + [True] * len(left_out)
        self.masks = [batch["attention_mask"].bool() for batch in batches]
        family = student.config.family
        self.own, self.original = (LayerByLayer(model, family, batches) for model in (student, teacher))

    def run(self, before_outputs: Callable[[int], None]) -> None:
        for number in range(len(self.own.layers)):
            self._layer(number, before_outputs)

    def _layer(self, number: int, before_outputs: Callable[[int], None]) -> None:
        layer, teacher, fitted = self.own.layers[number], self.original.layers[number], self.fitted
        states = [h[mask] for h, mask in zip(self.own.hidden_states, self.masks)]
        seen = self._teacher(number)
        if fitted.inputs:
            names = ("query", "key", "value")
            own, aim = ([getattr(part.attention.self, name) for name in names] for part in (layer, teacher))
            self._solve(own, states, [torch.cat([each(x) for each in aim], dim=-1) for x in seen.inputs])
        before_outputs(number)
        contexts = [self._context(number, index)[mask] for index, mask in enumerate(self.masks)]
        dense, norm = layer.attention.output.dense, layer.attention.output.LayerNorm
        if fitted.attention_output:
            aims = [first - state for first, state in zip(seen.first, states)]
            self._solve([dense], contexts, aims, [1 / first.var(-1) for first in seen.first])
        middle = [norm(state + dense(context)) for state, context in zip(states, contexts)]
        if fitted.norms:
            middle = self._moved(norm, seen.middle, middle)
        if fitted.intermediate:
            self._solve([layer.intermediate.dense], middle, [teacher.intermediate.dense(h) for h in seen.middle])
        features = [gelu(layer.intermediate.dense(state)) for state in middle]
        dense, norm = layer.output.dense, layer.output.LayerNorm
        if fitted.output:
            aims = [second - state for second, state in zip(seen.second, middle)]
            self._solve([dense], features, aims, [1 / second.var(-1) for second in seen.second])
        last = [norm(state + dense(feature)) for state, feature in zip(middle, features)]
        if fitted.norms:
            aims = [h[mask] for h, mask in zip(self.original.hidden_states, self.masks)]
            last = self._moved(norm, aims, last)
        for whole, mask, state in zip(self.own.hidden_states, self.masks, last):
            whole[mask] = state

    def _teacher(self, number: int) -> Seen:
        layer = self.original.layers[number]
        points = layer.attention.output.LayerNorm, layer.intermediate.dense, layer.output.LayerNorm
        parts = []
        for index, mask in enumerate(self.masks):
            found = [self.original.hidden_states[index][mask]]
            hooks = [
                point.register_forward_pre_hook(lambda _, given, found=found, mask=mask: found.append(given[0][mask]))
                for point in points
            ]
            self.original.run(number, index)
            for hook in hooks:
                hook.remove()
            parts.append(found)
        return Seen(*map(list, zip(*parts)))

    def _context(self, number: int, index: int) -> torch.Tensor:
        """What the attention heads of the student give, side by side."""
        arguments, keywords = self.own.arguments(number, index)
        attention = self.own.attention(number)
        context = attention(self.own.hidden_states[index], *arguments, **keywords)[0]
        return context.reshape(*context.shape[:2], -1)

    def _solve(self, layers: list[nn.Linear], inputs, aims, weights=None) -> None:
        solver = Solver(layers)
        for index, (given, aim) in enumerate(zip(inputs, aims)):
            solver.add(self.is_left_out[index], given, aim, None if weights is None else weights[index])
        solver.apply()

    def _moved(self, norm: nn.LayerNorm, aims: list[torch.Tensor], states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move a bias such that states have the teacher's mean, and return the states that it then gives."""
        used = [index for index, is_left_out in enumerate(self.is_left_out) if not is_left_out]
        shift = sum((aims[i] - states[i]).sum(0) for i in used) / sum(len(states[i]) for i in used)
        norm.bias += shift
        return [state + shift for state in states]


class Study:
    """MiniLM and the student that a conversion has calibrated, of one seed."""

    def __init__(self, data: Path, seed: int):
        text, held_out = (data / "wikitext2" / name for name in ("valid.txt", "test.txt"))
        settings = {"trained_length": LENGTH, "train": "none", "seed": seed}
        arguments = ConversionArguments(text=[text], held_out=[held_out], **settings)
        conversion = Conversion.of(packaged_minilm(), None, "t5", {}, arguments)
        self.seed, self.original = seed, conversion.original
        self.windows, self.held_out = conversion.windows()
        self.tokenizer = conversion.checkpoint.tokenizer
        self.parts = [Windows(part, self.tokenizer) for part in held_out_apart(conversion.documents)]
        self.student = conversion.student().eval()
        self.batches = conversion._calibration_batches(self.windows)
        start(self.student, self.original, self.batches, LENGTH)
        calibrate(self.student, self.original, self.batches)
        self.state = {name: value.clone() for name, value in self.student.state_dict().items()}
        self.yardstick = Yardstick(self.original, self.held_out, LENGTH, LENGTH)
        self.sts_file = data / "stsb" / "stsb-en-test.csv"

    def _text(self, windows: Windows, tokens: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(self.seed)
        batches: list[Batch] = []
        while sum(batch["input_ids"].numel() for batch in batches) < tokens:
            length = int(torch.randint(SHORTEST, LENGTH + 1, (), generator=generator))
            batches.append(windows.draw(length, BATCH_TOKENS // length, generator))
        return batches

    @torch.no_grad()
    def fit(self, fitted: Fitted) -> None:
        text, left_out = (
            self._text(part, tokens) for part, tokens in zip(self.parts, (fitted.tokens, fitted.tokens // 8))
        )
        student, teacher = self.student.base_model, self.original.base_model
        with undisturbed(student), undisturbed(teacher):
            again = self._scores(student, teacher) if fitted.scores else lambda layer: None
            LayerFit(student, teacher, fitted, text, left_out).run(again)

    def _scores(self, student: nn.Module, teacher: nn.Module) -> Callable[[int], None]:
        """Fits the score terms of a layer anew, once all layers below are fitted."""
        family = student.config.family
        own, original = (LayerByLayer(model, family, self.batches) for model in (student, teacher))

        def fit(layer: int) -> None:
            for index in range(len(self.batches)) if layer else ():
                own.run(layer - 1, index)
            with undisturbed(teacher, "eager"):
                weights = [original.run_for_weights(layer, index) for index in range(len(self.batches))]
            seen = [observe(own, layer, i, w, batch) for i, (w, batch) in enumerate(zip(weights, self.batches))]
            Fit([*position_parameters(own.attention(layer)).values()], seen).run(SCORE_STEPS)

        return fit

    def run(self, trial: Trial) -> dict[str, Any]:
        """Core seconds after calibration, and what the student keeps."""
        self.student.load_state_dict(self.state)
        began = time.process_time()
        if trial.fitted is not None:
            self.fit(trial.fitted)
        fitted = time.process_time() - began
        after_fit = self.yardstick.measure(self.student, "fit")[0]["token_cosine"]
        began = time.process_time()
        if trial.steps:
            budget = Distillation(LENGTH, LENGTH, max_steps=trial.steps, seed=self.seed)
            distill(self.student, self.original, self.windows, self.held_out, budget)
        seconds = {"fit": round(fitted, 1), "distill": round(time.process_time() - began, 1)}
        [row] = self.yardstick.measure(self.student, "end")
        kept = {name: round(row[name], 4) for name in ("token_cosine", "spearman")}
        kept["sts"] = round(sts_spearman(self.student.base_model, self.tokenizer, self.sts_file), 4)
        return {**asdict(trial), "core_seconds": seconds, "cosine_fitted": round(after_fit, 4), **kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, default=HERE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(arguments.output_dir / "runs.jsonl", {"model": "all-MiniLM-L6-v2", "scheme": "t5", "length": LENGTH})
    studies: dict[int, Study] = {}
    for trial in TRIALS:
        asked = asdict(trial)
        if any({name: run[name] for name in asked} == asked for run in runs.read()):
            continue
        if trial.seed not in studies:
            studies[trial.seed] = Study(arguments.data, trial.seed)
        runs.add(studies[trial.seed].run(trial))


if __name__ == "__main__":
    main()
