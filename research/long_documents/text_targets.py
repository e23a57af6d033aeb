"""Training towards the vectors of whole texts: does a model that reads 1,024 tokens at once then find more than the mean of chunks?

    python research/long_documents/text_targets.py --data DATA                 # tries learning rates, on held-out text
    python research/long_documents/qmsum.py --data DATA --parts units-1024 --converted "longer table, trained on texts"

`extend --method trained` trains the new rows of a longer table towards the states that tokens have in windows. Here, the target is the mean
of the vectors of a text's chunks, or both. Nothing else differs: only new rows change, and texts are longer than the old ones. They are
WikiText-2's validation text, of which every tenth article is held out.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from long_documents import Encoder, chunks
from long_texts import wikitext_files
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hf_posenc._utils import as_markdown
from hf_posenc.conversion import lengthen
from hf_posenc.conversion.distillation import Distillation, distill
from hf_posenc.conversion.targets import Batch, normalised_error, original_states
from hf_posenc.conversion.texts import Windows, held_out_apart, read_documents
from hf_posenc.files import whole_folder, write_whole


sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from minilm import packaged_minilm  # noqa: E402
from report import circumstances  # noqa: E402


RESULTS = Path(__file__).parent / "results" / "text_targets" / "results.json"
# Where the package's MiniLM cuts, and how far the trained models read.
CUT, LENGTH = 256, 1024
States = tuple[torch.Tensor, ...]


@torch.no_grad()
def text_vectors(original: PreTrainedModel, input_ids: torch.Tensor, window: int) -> torch.Tensor:
    """The mean of the vectors of each row's chunks, which do not overlap, (rows, width)."""
    pieces = [chunks(row, window) for row in input_ids.tolist()]
    vectors = iter(Encoder(original.base_model).computed([piece for own in pieces for piece in own]))
    return torch.stack([torch.stack([next(vectors) for _ in own]).mean(dim=0) for own in pieces])


def target(original: PreTrainedModel, batch: Batch, window: int) -> States:
    """States of tokens as [`original_states`] has them; in the place of the embeddings, which no error reads, the texts' vectors."""
    states = original_states(original, batch, window)
    return (text_vectors(original, batch["input_ids"], window), *states[1:])


def of_texts(states: States, aim: States) -> torch.Tensor:
    """One minus the cosine of texts' vectors: about 1, as the error of tokens, for texts that have nothing in common."""
    return (1 - cosine_similarity(states[-1].float().mean(dim=1), aim[0].float(), dim=-1)).mean()


def of_both(states: States, aim: States) -> torch.Tensor:
    return normalised_error(states, aim) + of_texts(states, aim)


# Name -> error; steps and rate are those that `extend --method trained` has. The first is what that makes.
TRAINED: dict[str, Callable[[States, States], torch.Tensor]] = {
    "longer table, trained": normalised_error,
    "longer table, trained on texts": of_texts,
    "longer table, trained on both": of_both,
}
# What is tried, in how many steps, and on how many held-out texts.
RATES, SEARCH_STEPS, HELD_OUT = (1.5e-4, 6e-4, 2.4e-3, 9.6e-3), 150, 24


class Trials:
    """A checkpoint, the text to train on, and the models that are trained from it."""

    def __init__(self, source: str, data: Path, work: Path):
        self.original = AutoModel.from_pretrained(source)
        self.tokenizer = AutoTokenizer.from_pretrained(source, model_max_length=LENGTH)
        documents = held_out_apart(read_documents([wikitext_files(data, self.tokenizer, work / "texts")]))
        self.windows, self.held_out = (Windows(part, self.tokenizer) for part in documents)

    def start(self) -> PreTrainedModel:
        """The model before it is trained."""
        return lengthen(self.original, LENGTH, CUT)

    def trained(self, name: str, rate: float | None = None, steps: int | None = None) -> PreTrainedModel:
        """One of [`TRAINED`], perhaps at another rate and in another number of steps."""
        student, settings = self.start(), Distillation(CUT, LENGTH, "beyond", max_steps=steps, learning_rate=rate)
        distill(student, self.original, self.windows, self.held_out, settings, target=target, error=TRAINED[name])
        return student

    def write(self, name: str, output: Path) -> None:
        student = self.trained(name)
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(output) as place:
            student.save_pretrained(place)
            self.tokenizer.save_pretrained(place)

    @cached_property
    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Held-out texts of 1,024 tokens, and the means of their chunks."""
        ids = self.held_out.evenly_spaced(LENGTH, HELD_OUT)["input_ids"]
        return ids, text_vectors(self.original, ids, CUT)

    def agreement(self, student: PreTrainedModel) -> float:
        """Mean cosine of the vectors of held-out texts with the means of their chunks."""
        ids, aim = self.wanted
        vectors = torch.stack(Encoder(student.base_model).computed(ids.tolist()))
        return float(cosine_similarity(vectors, aim, dim=-1).mean())


def table(results: dict[str, Any]) -> str:
    """Cosines by learning rate, those before training first; the highest of a row is bold."""
    rates = sorted({*itertools.chain.from_iterable(one["cosine"] for one in results.values())}, key=float)
    rows = []
    for name, one in results.items():
        best = max(one["cosine"].values())
        cells = {
            rate: f"**{value:.3f}**" if value == best else f"{value:.3f}" for rate, value in one["cosine"].items()
        }
        rows.append([name, *(cells.get(rate, "") for rate in rates)])
    return as_markdown(["trained", "not trained", *(f"rate {rate}" for rate in rates[1:])], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--names", nargs="+", choices=TRAINED, default=[*TRAINED])
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="learning rates to try")
    parser.add_argument("--steps", type=int, default=SEARCH_STEPS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(options.output.read_text(encoding="utf-8")) if options.output.is_file() else {}
    with TemporaryDirectory() as folder:
        trials = Trials(packaged_minilm(), options.data, Path(folder))
        untrained = round(trials.agreement(trials.start()), 4)
        for name in options.names:
            before = results.get(name, {})
            found = before["cosine"] if before.get("steps") == options.steps else {}
            found["0"] = untrained
            for rate in options.rates:
                student = trials.trained(name, rate, options.steps)
                found[f"{rate:g}"] = round(trials.agreement(student), 4)
            results[name] = {"steps": options.steps, "cosine": found, "circumstances": circumstances()}
            print(name, found, flush=True)
            write_whole({options.output: json.dumps(results, indent=1) + "\n"})


if __name__ == "__main__":
    main()
