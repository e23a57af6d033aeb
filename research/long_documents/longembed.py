"""LongEmbed and NanoBEIR with models of sentence-transformers: does a model find in long documents, and still in short ones?

    python research/long_documents/longembed.py --model sentence-transformers/all-MiniLM-L6-v2 path/to/converted --download

LongEmbed (Zhu et al. 2024, arXiv:2404.12096; data set dwzhu/LongEmbed) asks for pass keys and facts in texts of 256 to 32,768
tokens, scored by nDCG@1 at each length, and for documents of four real data sets, by nDCG@10. NanoBEIR has 13 small retrieval tasks of
short passages, scored by nDCG@10 (data set sentence-transformers/NanoBEIR-en). `--longembed` and `--nanobeir` name local copies.

A finished task of a model is a file of its own in the output folder: the same command goes on where it was stopped.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator, NanoBEIREvaluator

from hf_posenc._utils import as_markdown
from hf_posenc.files import write_whole


# What the example scripts are made of.
sys.path += [str(Path(__file__).parents[2] / name) for name in ("examples")]

from arguments import ScriptParser  # noqa: E402
from records import check_writable, write_json  # noqa: E402


SYNTHETIC = ("passkey", "needle")
REAL = ("narrativeqa", "summ_screen_fd", "qmsum", "2wikimqa")
HUB = {"longembed": "dwzhu/LongEmbed", "nanobeir": "sentence-transformers/NanoBEIR-en"}
NANO = (
    "climatefever dbpedia fever fiqa2018 hotpotqa msmarco nfcorpus nq quoraretrieval scidocs arguana scifact touche2020"
).split()


@dataclass
class LongEmbedArguments:
    """What is measured, and where the data are."""

    model: list[str] = field(metadata={"help": "Models of sentence-transformers: folders, or names on the Hub."})
    download: bool = field(default=False, metadata={"help": "Load the data sets from the Hub, some 500 MB."})
    longembed: str | None = field(default=None, metadata={"help": "A local copy of dwzhu/LongEmbed."})
    nanobeir: str | None = field(default=None, metadata={"help": "A local copy of sentence-transformers/NanoBEIR-en."})
    tasks: list[str] = field(
        default_factory=lambda: [*SYNTHETIC, *REAL, *NANO],
        metadata={"help": f"Of LongEmbed {', '.join((*SYNTHETIC, *REAL))}; of NanoBEIR {', '.join(NANO)}."},
    )
    lengths: list[int] = field(
        default_factory=lambda: [256, 512, 1024, 2048, 4096], metadata={"help": "Of passkey and needle, in tokens."}
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Tokens at which texts are cut. Default: what each model says."}
    )
    batch_size: int = field(default=8, metadata={"help": "Texts at once."})
    output_dir: str = field(default="outputs/longembed", metadata={"help": "Folder for all results."})

    def __post_init__(self):
        known = (*SYNTHETIC, *REAL, *NANO)
        if unknown := [task for task in self.tasks if task not in known]:
            raise ValueError(f"unknown tasks {', '.join(unknown)}; there are {', '.join(known)}")
        for name, own in (("longembed", (*SYNTHETIC, *REAL)), ("nanobeir", NANO)):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_dir():
                raise FileNotFoundError(f"--{name} {folder} is no folder")
            if folder is None and not self.download and {*own} & {*self.tasks}:
                raise ValueError(f"pass --download, or name a local copy of {HUB[name]} with --{name}")

    def source(self, name: str) -> str:
        return getattr(self, name) or HUB[name]


def read_longembed(
    source: str, task: str, length: int | None = None
) -> tuple[dict[str, str], dict[str, str], dict[str, set[str]]]:
    """Queries, documents and which of them each query asks for, by identifier.

    Args:
        source: the data set on the Hub, or a folder like it.
        length: of `passkey` and `needle`, the `context_length`.

    Raises:
        ValueError: nothing of that length is there, or a query asks for what is not.
    """

    def rows(split: str) -> Dataset:
        # By file: the splits of one task have different columns.
        place = source if Path(source).is_dir() else f"hf://datasets/{source}"
        found = load_dataset("json", data_files=f"{place}/{task}/{split}.jsonl", split="train")
        return found if length is None else found.filter(lambda row: row["context_length"] == length)

    queries = {row["qid"]: row["text"] for row in rows("queries")}
    documents = {row["doc_id"]: row["text"] for row in rows("corpus")}
    relevant: dict[str, set[str]] = {}
    for row in rows("qrels"):
        relevant.setdefault(row["qid"], set()).add(row["doc_id"])
    if not queries or not documents:
        raise ValueError(f"{source} has no {task}" + (f" of {length} tokens" if length else ""))
    if missing := {*relevant} - {*queries} | set().union(*relevant.values()) - {*documents}:
        raise ValueError(f"{task} asks for {', '.join(sorted(missing)[:3])}, which are not there")
    return queries, documents, relevant


def measures(arguments: LongEmbedArguments) -> Iterator[tuple[str, int | None]]:
    """Tasks, with the lengths of those that have some."""
    for task in arguments.tasks:
        for length in arguments.lengths if task in SYNTHETIC else [None]:
            yield task, length


def ndcg(model: SentenceTransformer, arguments: LongEmbedArguments, task: str, length: int | None) -> float:
    """nDCG of a model, @1 for passkey and needle, else @10."""
    cut_off = 1 if task in SYNTHETIC else 10
    usual: dict[str, Any] = {"batch_size": arguments.batch_size, "ndcg_at_k": [cut_off], "write_csv": False}
    if task in NANO:
        evaluator = NanoBEIREvaluator([task], dataset_id=arguments.source("nanobeir"), **usual)
    else:
        evaluator = InformationRetrievalEvaluator(
            *read_longembed(arguments.source("longembed"), task, length), **usual
        )
    found = [value for name, value in evaluator(model).items() if name.endswith(f"_ndcg@{cut_off}")]
    return float(found[0])


def run_file(folder: Path, model: str, task: str, length: int | None, max_seq_length: int | None) -> Path:
    """Where a score is kept: the model by its last name and a digest of the whole, so that two folders `model` are two models."""
    digest = sha256(f"{model} {max_seq_length}".encode()).hexdigest()[:8]
    return folder / "runs" / f"{Path(model).name}-{digest}-{task}{f'-{length}' if length else ''}.json"


def table(scores: list[dict[str, Any]]) -> str:
    """Markdown: a row for each task and length, and the means of LongEmbed's real tasks and of NanoBEIR's; a column for each model."""
    models = [*dict.fromkeys(one["model"] for one in scores)]
    found = {(one["model"], one["task"], one["length"]): one["ndcg"] for one in scores}
    rows = []
    for task, length in dict.fromkeys((one["task"], one["length"]) for one in scores):
        cells = [found.get((model, task, length)) for model in models]
        rows.append(
            [task, f"{length:,}" if length else "", *(f"{cell:.3f}" if cell is not None else "" for cell in cells)]
        )
    for name, own in (("LongEmbed, real, mean", REAL), ("NanoBEIR, mean", NANO)):
        means = [[found.get((model, task, None)) for task in own] for model in models]
        if any(None not in mean for mean in means):
            rows.append([name, "", *(f"{statistics.fmean(mean):.3f}" if None not in mean else "" for mean in means)])
    return as_markdown(["task", "tokens", *(f"`{Path(model).name}`" for model in models)], rows)


def main() -> None:
    try:
        [arguments] = ScriptParser((LongEmbedArguments,)).parse()
        folder = Path(arguments.output_dir)
        check_writable(folder)
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"error: {error}")
    scores = []
    for name in arguments.model:
        model = None
        for task, length in measures(arguments):
            file = run_file(folder, name, task, length, arguments.max_seq_length)
            if not file.exists():
                if model is None:
                    model = SentenceTransformer(name)
                    model.max_seq_length = arguments.max_seq_length or model.max_seq_length
                score = ndcg(model, arguments, task, length)
                cut = model.max_seq_length
                write_json(file, {"model": name, "task": task, "length": length, "max_seq_length": cut, "ndcg": score})
                print(f"{name}, {task}{f', {length} tokens' if length else ''}: {score:.3f}", flush=True)
            scores.append(json.loads(file.read_text(encoding="utf-8")))
    write_json(folder / "results.json", {"settings": asdict(arguments), "scores": scores})
    write_whole({folder / "results.md": table(scores) + "\n"})
    print(f"\n{table(scores)}\n\nwritten to {folder}")


if __name__ == "__main__":
    main()
