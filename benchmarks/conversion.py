"""What MiniLM keeps when its positions are changed: hf_posenc.convert, one scheme after the other, and longer, and with heads.

    python benchmarks/conversion.py --data DATA                      # all that results/conversion.json lacks
    python benchmarks/conversion.py --data DATA --only t5 rope --steps 1600
    python benchmarks/conversion.py --data DATA --only SST-2 CoLA    # these are fine-tuned first, in --work
    python benchmarks/conversion.py --data DATA --only t5--stock deberta--stock rope--stock --steps 1600
    python benchmarks/conversion.py --data DATA --mpnet FOLDER --only "all-mpnet-base-v2 to deberta"

DATA holds the texts in the layout of GLUE, WikiText and the STS benchmark: wikitext2/valid.txt and test.txt, sst2/train.tsv and
dev.tsv, cola/train.tsv and dev.tsv, stsb/stsb-en-test.csv. Converted with WikiText-2's validation text (SST-2 and CoLA: with the sentences of their training
text, too), measured on lines of its test text of up to 128 tokens, and on windows of it that are longer. Nothing is trained
or calibrated on text that is measured on. SST-2 and CoLA are fine-tuned by examples/run_classification.py, converted to `t5`,
and measured on their validation text. Embeddings are measured on STS-B, on long texts and on sentences whose words change places
(embedding_quality.py). What `--stock` writes is measured on texts longer than those that it was trained on, too, with the scalings
of rotary positions. FOLDER has all-mpnet-base-v2, which is converted only where it is given. Core minutes are the processor's time, all
stages of the conversion and its measurements counted in; the peak is that of the process's memory, with weights.

Writes results/conversion.json after each; what is there is left alone unless `--only` names it.
"""

import argparse
import copy
import csv
import io
import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import report
import torch
from embedding_quality import Embeddings
from minilm import packaged_minilm
from scheme_labels import FREQUENCIES, flags_of
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

import hf_posenc
from hf_posenc._utils import as_markdown
from hf_posenc.conversion.measuring import Yardstick
from hf_posenc.conversion.texts import Windows, read_documents
from hf_posenc.files import write_whole


NAME = "conversion"
TRAINED_LENGTH = 128
LONGEST = 2048
LENGTHS = (TRAINED_LENGTH, 512, 1024, LONGEST)  # that the report has
# Name -> what hf_posenc.convert is given.
SCHEMES: dict[str, dict[str, Any]] = {
    "t5": {"position_scheme": "t5"},
    "deberta": {"position_scheme": "deberta"},
    "transformer_xl": {"position_scheme": "transformer_xl"},
    "relative": {"position_scheme": "relative"},
    "relative_key": {"position_scheme": "relative_key"},
    "relative_key_query": {"position_scheme": "relative_key_query"},
    "sinusoidal, concat": {"position_scheme": "sinusoidal", "position_combine": "concat"},
    "tupe": {"position_scheme": "tupe"},
    "rope": {"position_scheme": "rope"},
    **{f"rope, {how}": flags_of(f"rope{flag}") for flag, how in FREQUENCIES.items()},
    "alibi": {"position_scheme": "alibi"},
    "kerple": {"position_scheme": "kerple"},
    "none": {"position_scheme": "none"},
}
# What `--stock` converts to: by the flags that it chooses, so that the model is the one that is exported.
STOCK: dict[str, dict[str, Any]] = {
    "t5--stock": {"position_scheme": "t5", "position_per_layer": False},
    "t5, a bias per layer": {"position_scheme": "t5"},  # which none computes: what one for all layers costs
    "deberta--stock": {"position_scheme": "deberta"},
    "rope--stock": {"position_scheme": "rope"},
}
LONG: dict[str, dict[str, Any]] = {
    "absolute, tile": {"position_scheme": "absolute", "train": "none"},
    "absolute, interpolate": {"position_scheme": "absolute", "extend": "interpolate", "train": "none"},
    "absolute, mean": {"position_scheme": "absolute", "extend": "mean", "train": "none"},
    "absolute+t5, beyond": {"position_scheme": "absolute+t5", "train": "beyond"},
    "absolute+t5": {"position_scheme": "absolute+t5"},
}
# Name -> its metric, its columns (SST-2's files have headers), and how long it is fine-tuned.
HEADS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "SST-2": ("accuracy", [], {"max_steps": 400}),
    "CoLA": ("matthews_correlation", ["source", "label", "mark", "sentence"], {"num_train_epochs": 2}),
}
# Its own scheme is `absolute+t5`.
MPNET: dict[str, dict[str, Any]] = {
    f"all-mpnet-base-v2 to {scheme}": {"position_scheme": scheme} for scheme in ("deberta", "rope")
}
EVERYTHING = (*SCHEMES, *STOCK, *LONG, *HEADS, *MPNET)


def converted(arguments: argparse.Namespace, name: str, source: str, texts: list[Path], **asked: Any) -> dict:
    """The record of a conversion, and the model."""
    budget = {} if asked.get("train") == "none" else {"max_steps": arguments.steps}
    began = time.process_time()
    report.forget_peak()
    model, found = hf_posenc.convert(
        source,
        text=texts,
        held_out=[arguments.data / "wikitext2" / "test.txt"],
        trained_length=TRAINED_LENGTH,
        **budget,
        **asked,
    )
    record = {
        "name": name,
        "asked": {**asked, **budget},
        "flags": found.flags,
        "seconds": found.seconds,
        "core_seconds": round(time.process_time() - began, 1),
        "steps": found.distillation[-1]["step"] if found.distillation else 0,
        "peak_bytes": report.resident("VmHWM"),
        "threads": torch.get_num_threads(),
        "versions": found.versions,
        "rows": [{key: value for key, value in row.items() if key != "token_cosine_by_layer"} for row in found.rows],
        "distillation": [{"step": entry["step"], "cosine": round(entry["cosine"], 5)} for entry in found.distillation],
    }
    return record | {"model": model}


def scalings(head_dim: int, length: int) -> dict[str, dict[str, Any]]:
    """Flags of `rope` for texts that are longer than those it was trained on, by name; NTK-aware by its base, as bloc97 published it."""
    factor = length / TRAINED_LENGTH
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": TRAINED_LENGTH}
    return {
        "none": {},
        "linear": {"position_rope_scaling": {"rope_type": "linear", "factor": factor}},
        "NTK": {"position_base": 10000.0 * factor ** (head_dim / (head_dim - 2))},
        "YaRN": {"position_rope_scaling": yarn},
    }


def measure_longer(arguments: argparse.Namespace, model: torch.nn.Module) -> dict[str, dict[int, dict]]:
    """What a converted model keeps of its original's windows beyond the trained length, by scaling and length."""
    original = AutoModel.from_pretrained(packaged_minilm()).eval()
    documents = read_documents([arguments.data / "wikitext2" / "test.txt"])
    yardstick = Yardstick(
        original, Windows(documents, AutoTokenizer.from_pretrained(packaged_minilm())), TRAINED_LENGTH, LONGEST
    )
    found: dict[str, dict[int, dict]] = {}
    rope = model.config.position_scheme == "rope"
    for text in yardstick.texts[1:]:
        length, alone = text.length, copy.copy(yardstick)
        alone.texts = [text]  # each scaling is of one length
        for name, flags in (scalings(model.config.sizes.head_dim, length) if rope else {"none": {}}).items():
            scaled = hf_posenc.with_position_scheme(model, model.config.position_scheme, copy=True, **flags)
            [row] = alone.measure(scaled.eval(), name)
            found.setdefault(name, {})[length] = {
                key: row[key]
                for key in ("token_cosine", "centred_cosine", "spearman", "neighbours_kept")
                if key in row
            }
    return found


@cache
def embeddings(source: str, data: Path) -> Embeddings:
    return Embeddings(AutoModel.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source), data)


def measure(arguments: argparse.Namespace, name: str) -> dict:
    """The record of a conversion, with what embeddings keep."""
    asked = {"max_length": LONGEST, **LONG[name]} if name in LONG else (SCHEMES | STOCK | MPNET)[name]
    source = arguments.mpnet if name in MPNET else packaged_minilm()
    record = converted(arguments, name, source, [arguments.data / "wikitext2" / "valid.txt"], **asked)
    record |= embeddings(source, arguments.data).kept(record["model"])
    if name in STOCK:
        fits = not getattr(record["model"].config, "position_per_layer", False)
        record["architecture"] = hf_posenc.to_stock(record["model"]).config.model_type if fits else None
        record["longer"] = measure_longer(arguments, record["model"])
    return record


def measure_head(arguments: argparse.Namespace, name: str) -> dict:
    """The record of a classifier: fine-tuned, converted, and measured before and after."""
    metric, columns, training = HEADS[name]
    folder = arguments.data / name.lower().replace("-", "")
    tables = {part: read_table(folder / f"{part}.tsv", columns) for part in ("train", "dev")}
    work = arguments.work / name
    for part, rows in tables.items():
        written = io.StringIO()
        csv.writer(written, delimiter="\t").writerows([("label", "sentence"), *rows])
        write_whole({work / f"{part}.tsv": written.getvalue()})
    write_whole({work / "sentences.txt": "\n".join(sentence for _, sentence in tables["train"])})
    tuned = work / "tuned"
    if not (tuned / "config.json").is_file():
        fine_tune(work, tuned, metric, training)
    texts = [arguments.data / "wikitext2" / "valid.txt", work / "sentences.txt"]
    record = converted(arguments, name, str(tuned), texts, position_scheme="t5")
    original = AutoModelForSequenceClassification.from_pretrained(tuned)
    answers = [answers_of(model, tuned, tables["dev"]) for model in (original, record["model"])]
    labels = [int(label) for label, _ in tables["dev"]]
    record["metric"] = metric
    record["before"], record["after"] = (score(metric, found, labels) for found in answers)
    record["same_answers"] = sum(a == b for a, b in zip(*answers)) / len(labels)
    longer = AutoTokenizer.from_pretrained(tuned)(" ".join(s for _, s in tables["dev"][:150]), return_tensors="pt")
    with torch.no_grad():
        assert record["model"](**longer).logits.isfinite().all()
    record["reads_tokens"] = longer["input_ids"].shape[1]
    return record


def read_table(file: Path, columns: list[str]) -> list[tuple[str, str]]:
    """Labels and sentences of a file, which has a header unless its columns are given."""
    with file.open(encoding="utf-8", newline="") as opened:
        rows = [*csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE)]
    if columns:
        return [(row[columns.index("label")], row[columns.index("sentence")]) for row in rows]
    return [(row[0], row[1]) for row in rows[1:]]


def fine_tune(work: Path, output: Path, metric: str, training: dict[str, Any]) -> None:
    given = {
        "model_name_or_path": packaged_minilm(),
        "position_scheme": "absolute",
        "train_file": work / "train.tsv",
        "validation_file": work / "dev.tsv",
        "metric": metric,
        "max_seq_length": TRAINED_LENGTH,
        "per_device_train_batch_size": 32,
        "learning_rate": 1e-4,
        "warmup_steps": 0.1,
        "save_strategy": "no",
        "load_best_model_at_end": "false",
        "output_dir": output,
        **training,
    }
    script = Path(__file__).parents[1] / "examples" / "run_classification.py"
    flags = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    subprocess.run([sys.executable, script, "--do_train", "--do_eval", *flags], check=True)


@torch.no_grad()
def answers_of(model: torch.nn.Module, folder: Path, rows: list[tuple[str, str]]) -> list[int]:
    """The classes that a model finds, those of a few sentences at a time."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for start in range(0, len(rows), 32):
        sentences = [sentence for _, sentence in rows[start : start + 32]]
        batch = tokenizer(sentences, padding=True, truncation=True, max_length=TRAINED_LENGTH, return_tensors="pt")
        found += model(**batch).logits.argmax(-1).tolist()
    return [int(model.config.id2label[answer]) for answer in found]


def score(metric: str, answers: list[int], labels: list[int]) -> float:
    pairs = torch.tensor([answers, labels], dtype=torch.float64)
    if metric == "accuracy":
        return (pairs[0] == pairs[1]).double().mean().item()
    return torch.corrcoef(pairs)[0, 1].item()  # of two classes it is Matthews'


def decimals(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def row_of(record: dict, stage: str, length: int) -> dict:
    found = [row for row in record["rows"] if row["stage"] == stage and row["length"] == length]
    return found[-1] if found else {}


def named(record: dict) -> list[str]:
    """The first cells of a row: the scheme as code, steps and the processor's minutes."""
    scheme, comma, how = record["name"].partition(",")
    steps = f"{record['steps']:,}" if record["steps"] else "none"
    return [
        record["name"] if record["name"] in HEADS else f"`{scheme}`{comma}{how}",
        steps,
        decimals(record["core_seconds"] / 60, 1),
    ]


def within_row(record: dict) -> list[str]:
    start, calibrated = (row_of(record, stage, TRAINED_LENGTH).get("token_cosine") for stage in ("start", "calibrate"))
    final = row_of(record, record["rows"][-1]["stage"], TRAINED_LENGTH)
    figures = [decimals(final.get(key)) for key in ("sentence_cosine", "spearman", "neighbours_kept")]
    return [*named(record), decimals(start), decimals(calibrated), decimals(final["token_cosine"], 4), *figures]


def label_of(record: dict) -> str:
    """The scheme as code, and what is said of it after a comma."""
    _, comma, how = record["name"].partition(",")
    return f"`{record['asked']['position_scheme']}`{comma}{how}"


def stock_row(record: dict) -> list[str]:
    final = row_of(record, record["rows"][-1]["stage"], TRAINED_LENGTH)
    figures = [decimals(final.get(key)) for key in ("spearman", "neighbours_kept")]
    _, *budget = named(record)
    architecture = record["architecture"]
    return [
        label_of(record),
        f"`{architecture}`" if architecture else "none",
        *budget,
        decimals(final["token_cosine"], 4),
        *figures,
        *map(decimals, record["sts"].values()),
    ]


def scaled_rows(records: list[dict]) -> list[list[str]]:
    """By scheme and scaling, cosines at each length beyond the trained one, and those with the mean token taken off."""
    rows = []
    for record in records:
        for name, lengths in record["longer"].items():
            each = [*lengths.values()]
            rows.append(
                [label_of(record) + (f", {name}" if name != "none" else "")]
                + [decimals(row["token_cosine"]) for row in each]
                + [decimals(row["centred_cosine"]) for row in each]
            )
    return rows


def quality_row(record: dict) -> list[str]:
    order = record["order"]
    figures = [*record["sts"].values(), record["long_neighbours"], order["original"], order["converted"]]
    return [label_of(record), *map(decimals, figures), decimals(order.get("spearman"))]


def mpnet_row(record: dict) -> list[str]:
    """Memory, and what is kept, within the training length and beyond."""
    calibrated, final = (row_of(record, stage, TRAINED_LENGTH) for stage in ("calibrate", "distill"))
    _, *budget = named(record)
    figures = [final["spearman"], final["neighbours_kept"], *record["sts"].values(), record["long_neighbours"]]
    return [
        label_of(record),
        *budget,
        decimals(record["peak_bytes"] / 2**30, 1),
        decimals(calibrated["token_cosine"]),
        decimals(final["token_cosine"], 4),
        *map(decimals, [*figures, record["order"]["spearman"]]),
    ]


def longer_row(record: dict) -> list[str]:
    rows = [row_of(record, record["rows"][-1]["stage"], length) for length in LENGTHS]
    first, *others = (row["token_cosine"] for row in rows)
    return [*named(record), decimals(first, 4), *map(decimals, others), decimals(rows[-1]["centred_cosine"])]


def head_row(record: dict) -> list[str]:
    name, *others = named(record)
    figures = [decimals(record[key]) for key in ("before", "after", "same_answers")]
    return [f"{name} ({record['metric'].replace('_', ' ')})", *others, *figures]


def tables(records: list[dict]) -> list[str]:
    """What was measured, as Markdown: of schemes within the training length, and what embeddings keep; of what `--stock` writes, on longer texts
    too; of longer models, of a larger model, and of task heads."""
    budget = ["steps", "core minutes"]
    within = ["scheme", *budget, "start", "calibrated", "distilled", "sentence cosine", "Spearman", "neighbours kept"]
    vectors = ["embeddings of", "STS-B before", "after", "neighbours kept, long", "moved before", "after", "order"]
    kept = ["distilled", "Spearman", "neighbours kept", "STS-B before", "after"]
    stock = ["scheme", "architecture", *budget, *kept]
    scaled = ["longer texts", *(f"{length:,}{what}" for what in ("", ", centred") for length in LENGTHS[1:])]
    longer = ["longer model", *budget, *(f"{length:,}" for length in LENGTHS), "2,048, centred"]
    mpnet = ["all-mpnet-base-v2 to", *budget, "peak, GiB", "calibrated", *kept, "neighbours kept, long", "order"]
    heads = ["task head, to `t5`", *budget, "before", "after", "same answers"]

    def of(names: dict[str, Any]) -> list[dict]:
        return [record for record in records if record["name"] in names]

    return [
        as_markdown(within, [within_row(record) for record in of(SCHEMES)]),
        as_markdown(vectors, [quality_row(record) for record in of(SCHEMES | LONG) if "order" in record]),
        as_markdown(stock, [stock_row(record) for record in of(STOCK)]),
        as_markdown(scaled, scaled_rows(of(STOCK))),
        as_markdown(longer, [longer_row(record) for record in of(LONG)]),
        as_markdown(mpnet, [mpnet_row(record) for record in of(MPNET)]),
        as_markdown(heads, [head_row(record) for record in of(HEADS)]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext2, sst2 and cola")
    parser.add_argument("--only", nargs="+", choices=EVERYTHING, help="measure these, anew if need be")
    parser.add_argument("--mpnet", help="folder of all-mpnet-base-v2")
    parser.add_argument("--steps", type=int, default=800, help="of distillation")
    parser.add_argument("--work", type=Path, default=Path("outputs/conversion"), help="where heads are fine-tuned")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    there = {record["name"] for record in report.records_of(NAME)}
    missing = [name for name in EVERYTHING if name not in there and (arguments.mpnet or name not in MPNET)]
    if not arguments.mpnet and set(arguments.only or ()) & set(MPNET):
        parser.error("--mpnet is missing")
    for name in arguments.only or missing:
        if name in HEADS:
            record = measure_head(arguments, name)
        else:
            record = measure(arguments, name)
        del record["model"]
        report.keep_record(NAME, record, EVERYTHING)
        print(f"{name}: {json.dumps(record['rows'][-1])}", flush=True)
    print("\n\n".join(tables(report.records_of(NAME))))


if __name__ == "__main__":
    main()
