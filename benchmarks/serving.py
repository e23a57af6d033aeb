"""Requests as rerankers, embedders and taggers get them, end to end on CPUs: latency and throughput beside stock models.

    python benchmarks/serving.py --data DATA                           # everything
    python benchmarks/serving.py --data DATA --shapes MiniLM-L6 --tasks rerank --lists 20 --candidates 100

A request is a query and 20, 50 or 100 paragraphs of WikiText-2 (`wikitext2/valid.txt` and `test.txt` in DATA), whole and cut at 512 tokens, with BERT's
tokenizer: a few dozen tokens to 512, in no order. `rerank` is `CrossEncoder.predict` of sentence-transformers on the pairs, `embed` is
`SentenceTransformer.encode` of the paragraphs, `tag` a model for token classification in batches that are sorted by length. Contestants, in turns for each request:

- stock, as people run it: sorted by length by sentence-transformers, in batches of 32; DeBERTa with its only attention, eager;
- a second copy of it, which shows how far equal models come out apart;
- stock after `hf_posenc.unpad` (DeBERTa with `attn_implementation="sdpa"` too), in the same batches of 32, and in one batch.

"padded" is how many places stock computes for each token in its sorted batches. Weights are random, which speed does not depend on; scores are compared
with stock's. Writes results/serving.json.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import report
import torch
from minilm import packaged_minilm
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    PreTrainedConfig,
    XLMRobertaConfig,
)
from transformers.utils import logging

import hf_posenc
from hf_posenc._utils import as_markdown


LONGEST, BATCH = 512, 32
TASKS = ("rerank", "embed", "tag")
STOCK, AGAIN, SAME, ONE = "stock", "stock, a second copy", "unpad, batches of 32", "unpad, one batch"
ORIGINAL_AGAIN = "original, a second copy"
# Of the table.
COLUMNS = [
    "requests",
    "padded",
    ORIGINAL_AGAIN,
    SAME,
    ONE,
    *(f"{what}, {whose}" for what in ("p50 / p95 in ms", "tokens a second") for whose in ("original", "unpad")),
    "largest difference",
]


def shapes() -> dict[str, PreTrainedConfig]:
    """Configs by the models that they have the sizes of; vocabularies are BERT's, since rows that no token asks for take no time."""
    small = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": 30522}
    base = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30522}
    deberta = {
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["c2p", "p2c"],
        "share_att_key": True,
    }
    deberta |= {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "pad_token_id": 0, "type_vocab_size": 0}
    found: dict[str, PreTrainedConfig] = {}
    for layers in (6, 12):
        found[f"MiniLM-L{layers}"] = BertConfig(**small, num_hidden_layers=layers)
        found[f"bert-base, {layers} layers"] = BertConfig(**base, num_hidden_layers=layers)
        sizes = {**base, "num_hidden_layers": layers, "max_position_embeddings": LONGEST + 2, "pad_token_id": 0}
        found[f"xlm-roberta-base, {layers} layers"] = XLMRobertaConfig(**sizes)
        found[f"deberta-v3-xsmall, {layers} layers"] = DebertaV2Config(
            **{**small, "num_attention_heads": 6}, **deberta, num_hidden_layers=layers
        )
        found[f"deberta-v3-base, {layers} layers"] = DebertaV2Config(**base, **deberta, num_hidden_layers=layers)
    return found


def paragraphs(data: Path) -> list[str]:
    """Paragraphs of WikiText-2, headings left out."""
    texts = [(data / "wikitext2" / name).read_text(encoding="utf-8") for name in ("valid.txt", "test.txt")]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("=")]


def requests(data: Path, candidates: int, count: int) -> list[tuple[str, list[str]]]:
    """Queries with their candidates, the same with every call: the beginning of a sentence, and paragraphs at random."""
    found, generator = paragraphs(data), random.Random(0)
    return [(" ".join(generator.choice(found).split()[:8]), generator.sample(found, candidates)) for _ in range(count)]


def padded(lengths: list[int], size: int) -> float:
    """Places per token in batches of `size` that are sorted by length, as sentence-transformers makes them."""
    ordered = sorted(lengths, reverse=True)
    batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return sum(len(batch) * batch[0] for batch in batches) / sum(ordered)


class Contestants:
    """A task with a shape: what answers a request, by contestant."""

    def __init__(self, task: str, config: PreTrainedConfig, folder: Path):
        self.task, self.folder = task, folder / task
        self.tokenizer = AutoTokenizer.from_pretrained(packaged_minilm(), model_max_length=LONGEST)
        classes = {
            "rerank": AutoModelForSequenceClassification,
            "embed": AutoModel,
            "tag": AutoModelForTokenClassification,
        }
        torch.manual_seed(0)
        config.num_labels = {"rerank": 1, "embed": 2, "tag": 9}[task]
        classes[task].from_config(config).save_pretrained(self.folder)
        self.tokenizer.save_pretrained(self.folder)
        self.model_class, self.is_deberta = classes[task], config.model_type == "deberta-v2"
        stock, again, unpadded = (self._load() for _ in range(3))
        if self.is_deberta:
            hf_posenc.set_attn_implementation(unpadded, "sdpa")
        hf_posenc.unpad(unpadded)
        self.calls: dict[str, Callable[[str, list[str]], torch.Tensor]] = {
            STOCK: partial(self._answer, stock, BATCH),
            AGAIN: partial(self._answer, again, BATCH),
            SAME: partial(self._answer, unpadded, BATCH),
            ONE: partial(self._answer, unpadded, 1 << 16),
        }

    def _load(self) -> torch.nn.Module:
        # Here, so that a page can have the table where it is not installed.
        from sentence_transformers import CrossEncoder, SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        if self.task == "rerank":
            return CrossEncoder(str(self.folder), device="cpu", max_length=LONGEST)
        if self.task == "embed":
            words = Transformer(str(self.folder), max_seq_length=LONGEST)
            return SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())], device="cpu")
        return self.model_class.from_pretrained(self.folder).eval()

    @torch.no_grad()
    def _answer(self, model: torch.nn.Module, size: int, query: str, texts: list[str]) -> torch.Tensor:
        if self.task == "rerank":
            return model.predict(
                [(query, text) for text in texts], batch_size=size, convert_to_tensor=True, show_progress_bar=False
            )
        if self.task == "embed":
            return model.encode(texts, batch_size=size, convert_to_tensor=True, show_progress_bar=False)
        encoded = self.tokenizer(texts, truncation=True)["input_ids"]
        order, found = sorted(range(len(texts)), key=lambda at: -len(encoded[at])), {}
        for start in range(0, len(order), size):
            places = order[start : start + size]
            batch = self.tokenizer.pad({"input_ids": [encoded[place] for place in places]}, return_tensors="pt")
            for place, logits in zip(places, model(**batch).logits, strict=True):
                found[place] = logits[: len(encoded[place])]
        return torch.cat([found[place] for place in range(len(texts))])

    def lengths(self, query: str, texts: list[str]) -> list[int]:
        queries = [query] * len(texts) if self.task == "rerank" else None
        given = (queries, texts) if queries else (texts,)
        return [len(ids) for ids in self.tokenizer(*given, truncation=True, max_length=LONGEST)["input_ids"]]


@dataclass
class Row:
    """A contestant's answers to all requests of a kind.

    Attributes:
        seconds: of each request.
        speed: by request, the mean of the times of stock and its second copy divided by its own; of the second copy, stock's.
        padded: places that stock computes for each token.
        tokens: of all requests.
        error: the largest difference of its scores from stock's.
    """

    shape: str
    task: str
    candidates: int
    contestant: str
    seconds: list[float]
    speed: list[float]
    padded: float
    tokens: int
    error: float


def measure(
    shape: str, task: str, candidates: int, found: Contestants, given: list[tuple[str, list[str]]]
) -> list[Row]:
    """Every contestant on every request, in turns: stock first and its second copy last, or the other way round."""
    seconds: dict[str, list[float]] = {name: [] for name in found.calls}
    speed: dict[str, list[float]] = {name: [] for name in found.calls}
    errors = dict.fromkeys(found.calls, 0.0)
    for name in found.calls:
        found.calls[name](*given[0])

    order = [STOCK, *(name for name in found.calls if name not in (STOCK, AGAIN)), AGAIN]
    for turn, request in enumerate(given):
        answers = {}
        for name in order if turn % 2 == 0 else reversed(order):
            start = time.perf_counter()
            answers[name] = found.calls[name](*request)
            seconds[name].append(time.perf_counter() - start)
        for name, answer in answers.items():
            errors[name] = max(errors[name], float((answer - answers[STOCK]).abs().max()))
            of_stock = (seconds[STOCK][-1] + seconds[AGAIN][-1]) / 2 if name != AGAIN else seconds[STOCK][-1]
            speed[name].append(of_stock / seconds[name][-1])
    lengths = [found.lengths(*request) for request in given]
    factor = statistics.fmean(padded(one, BATCH) for one in lengths)
    tokens = sum(map(sum, lengths))
    return [
        Row(shape, task, candidates, name, seconds[name], speed[name], factor, tokens, errors[name])
        for name in found.calls
    ]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def table(rows: list[Row], columns: Sequence[str] = COLUMNS) -> str:
    """A row for requests of a kind: how many times as fast as stock, latency and throughput of stock and of `SAME`, and the error."""
    kinds: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        kinds.setdefault((row.shape, row.task, row.candidates), {})[row.contestant] = row
    lines = []
    for (shape, task, candidates), found in kinds.items():
        stock, own = found[STOCK], found[SAME]
        speeds = [f"{statistics.median(found[name].speed):.2f}" for name in (AGAIN, SAME, ONE)]
        latency = [
            " / ".join(f"{1000 * percentile(row.seconds, share):,.0f}" for share in (0.5, 0.95))
            for row in (stock, own)
        ]
        rates = [f"{row.tokens / sum(row.seconds):,.0f}" for row in (stock, own)]
        error = f"{max(row.error for row in found.values()):.0e}"
        cells = [str(len(stock.seconds)), f"{stock.padded:.2f}", *speeds, *latency, *rates, error]
        cell_of = dict(zip(COLUMNS, cells, strict=True))
        lines.append([f"{shape}, {task}, {candidates}", *(cell_of[column] for column in columns)])
    return as_markdown(["model, task, candidates", *columns], lines)


def main() -> None:
    known = shapes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext2/valid.txt and test.txt")
    parser.add_argument("--shapes", nargs="+", choices=[*known], default=[*known], help="sizes of which model")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--candidates", nargs="+", type=int, default=[20, 50, 100], help="texts of a request")
    parser.add_argument("--lists", type=int, default=20, help="requests of each kind")
    parser.add_argument("--name", default="serving", help="name of the results")
    parser.add_argument("--resume", action="store_true", help="keep what was measured before")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    settings = {"longest": LONGEST}
    before = report.stopped_at(arguments.name, settings) if arguments.resume else {}
    rows = [Row(**row) for row in before.get("rows", [])]
    done = {(row.shape, row.task, row.candidates) for row in rows}
    for shape in arguments.shapes:
        for task in arguments.tasks:
            wanted = [candidates for candidates in arguments.candidates if (shape, task, candidates) not in done]
            if not wanted:
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = Contestants(task, known[shape], Path(folder))
                for candidates in wanted:
                    given = requests(arguments.data, candidates, arguments.lists)
                    rows += measure(shape, task, candidates, found, given)
                    print(table(rows[-len(found.calls) :]), flush=True)
                    entries = [asdict(row) for row in rows]
                    report.write(arguments.name, {"settings": settings, "rows": entries})


if __name__ == "__main__":
    main()
