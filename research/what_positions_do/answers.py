"""Measure what docs/questions.md and docs/what-positions-do.md say of MiniLM beyond its report: with intervals, and arrays to measure it again from.

Called by what_positions_do.py, which has the numbers. The arrays are in arrays.npz; `ARRAYS` says what they are.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_posenc import analysis
from hf_posenc.analysis.averages import averages
from hf_posenc.analysis.bootstrap import interval
from hf_posenc.analysis.dimensions import movement
from hf_posenc.analysis.order import REVERSED, SHUFFLED
from hf_posenc.analysis.sentences import JOINED, MUTUAL, NAMED, NAMED_MUTUAL, ROLES
from hf_posenc.analysis.windows import cut
from hf_posenc.files import write_whole
from hf_posenc.modeling.schemes.sinusoidal import sinusoids


ROTATIONS, WINDOWS, LENGTH, GROUPS = 1000, 1024, 128, 10
# For the variance that layers have of words and positions: parts of the documents, each measured by itself.
PARTS = 5
STUDENT_4 = 2.776  # of Student's t with as many degrees of freedom less one, 97.5 %
MEASURES = ("positions_in_words", "words_in_positions", "angle")
ARRAYS = {
    "input_ids": "token ids (windows, length) that the means by layer are of",
    "document": "(windows,), the number of the chapter that each window is from",
    "word_covariances": "(layers, width · (width + 1) / 2), upper triangles by rows (`numpy.triu_indices`), of what goes into each layer: of the "
    "means of words, each counted once, between two halves of the windows; scaled to a trace of 1,000",
    "position_covariances": "the same of the means at each position",
    "shares": "(shares,), of the variance that the subspaces hold",
    **{
        f"{part}_{measure}": f"({'' if part == 'tables' else 'layers, '}queries and keys, shares, heads, 4): found, mean of the rotations, and the "
        "ends between which 95 % of them are; "
        + ("of the checkpoint's tables, in the first layer" if part == "tables" else "of the covariances")
        for part in ("tables", "layers")
        for measure in MEASURES
    },
    "sentence_kinds": "(kinds,), names",
    "sentence_changes": "(kinds, sentences), change of the text's vector, as a share of that between unrelated texts",
}

Numbers = dict[str, Any]


def measure(checkpoint: str) -> tuple[Numbers, dict[str, np.ndarray]]:
    """All of it: numbers, and arrays by the names of `ARRAYS`."""
    subject = analysis.study(checkpoint, name="MiniLM")
    read = averages(subject, None, LENGTH, WINDOWS)
    tables = analysis.shared_space(subject, rotations=ROTATIONS)
    layers = analysis.shared_space_by_layer(subject, None, LENGTH, WINDOWS, rotations=ROTATIONS)
    order = analysis.order_sensitivity(subject)
    numbers = {
        "subspaces": {
            "rotations": ROTATIONS,
            "largest_heads": _largest_heads(subject),
            "tables": _spaces(tables),
            "layers": _spaces(layers),
        },
        "survival": _survival(subject),
        "order": _order(order),
        "dimensions": _dimensions(subject),
        "terms": _terms(subject),
        "addressing": [found.to_dict() for found in analysis.addressing_of_all(subject.position_vectors(), 384)],
    }
    covariances = [read.covariances(layer) for layer in range(len(subject.layers))]
    arrays = {
        "input_ids": read.windows.input_ids.numpy().astype(np.int32),
        "document": read.windows.document.numpy().astype(np.int32),
        "word_covariances": _small([words for words, _ in covariances]),
        "position_covariances": _small([positions for _, positions in covariances]),
        "shares": np.array(analysis.spaces.SHARES),
        "sentence_kinds": np.array([*order.sentences]),
        "sentence_changes": np.array([found.texts for found in order.sentences.values()]),
    }
    for part, data in (("tables", tables), ("layers", layers)):
        for measure in MEASURES:
            arrays[f"{part}_{measure}"] = _by_head(data, measure)
    return numbers, arrays


def on_other_text(checkpoint: str, data: Path) -> Numbers:
    """What depends on the text, on WikiText-2's articles: to see whether an answer is one of the language reference's.

    Args:
        data: folder with wikitext2/valid.txt and test.txt.
    """
    from long_texts import read_articles

    files = (data / "wikitext2" / f"{part}.txt" for part in ("test", "valid"))
    texts = ["\n\n".join(article) for file in files for article in read_articles(file)]
    subject = analysis.study(checkpoint, name="MiniLM")
    layers = analysis.shared_space_by_layer(subject, texts, LENGTH, WINDOWS, rotations=ROTATIONS)
    probes = analysis.probes(subject, texts)
    shift = analysis.phase_shift(subject, texts, shifts=[1, 256])
    shuffled = analysis.order_sensitivity(subject, texts).reordered[SHUFFLED]
    return {
        "subspaces": _spaces(layers),
        "survival": analysis.survival(subject, texts, LENGTH, WINDOWS).to_dict(),
        "probes": {
            name: {"r2": probes.r2[name]["model"].tolist(), "interval": probes.interval[name]["model"].tolist()}
            for name in ("position", "signed distance")
        }
        | {"examples": probes.examples["test"], "documents": probes.documents["test"]},
        "shuffled": {"text": shuffled.text, "interval": list(shuffled.text_interval)},
        "by_1": {"text": shift.all[0].text, "interval": list(shift.all[0].text_interval)},
        "by_256": {"text": shift.all[1].text, "interval": list(shift.all[1].text_interval)},
    }


def _small(covariances: list[torch.Tensor]) -> np.ndarray:
    """Upper triangles as float16, each of a matrix with a trace of 1000: no share depends on that."""
    row, column = np.triu_indices(len(covariances[0]))
    return np.stack([(1000 * own / own.trace()).numpy()[row, column] for own in covariances]).astype(np.float16)


def _by_head(data: analysis.SharedSpace, measure: str) -> np.ndarray:
    """(spaces, shares, heads, 4) of queries and keys, with the layers before that where there are several."""
    spaces = [space for space in data.spaces if space.name in ("queries", "keys")]
    found = np.array(
        [
            [
                np.stack([own.found, own.chance, own.low, own.high], axis=-1)
                for own in (getattr(overlap, measure) for overlap in space.overlaps)
            ]
            for space in spaces
        ]
    ).astype(np.float32)
    return found if len(spaces) == 2 else found.reshape(-1, 2, *found.shape[1:])


def _spaces(data: analysis.SharedSpace) -> list[Numbers]:
    """By space and share, in how many heads positions lie in the words' subspace less, and more, than rotated ones do."""
    found = []
    for space in data.spaces:
        for overlap in space.overlaps:
            one: Numbers = {
                "space": space.name,
                "layer": space.layer + 1,
                "share": overlap.share,
                "width": space.width,
            }
            one |= {
                name: [int(getattr(overlap, name).min()), int(getattr(overlap, name).max())]
                for name in ("word_dimensions", "position_dimensions")
            }
            for measure in MEASURES:
                own = getattr(overlap, measure)
                one[measure] = {
                    "below": int(own.below.sum()),
                    "above": int(own.above.sum()),
                    "heads": len(own.found),
                    "median": float(np.median(own.found)),
                    "smallest": float(own.found.min()),
                    "largest": float(own.found.max()),
                    "chance": float(np.median(own.chance)),
                    "low": float(np.median(own.low)),
                    "high": float(np.median(own.high)),
                    "not_below": [1 + int(head) for head in np.flatnonzero(~own.below)],
                }
            found.append(one)
    return found


@torch.no_grad()
def _largest_heads(subject: analysis.Subject) -> Numbers:
    """The head of the first layer with most of what its queries, and its keys, have of the positions' variance, from 1, and its share."""
    positions, attention = subject.into_attention(subject.added_positions()), subject.attentions[0]
    found = {}
    for name, projection in (("queries", attention.query_projection), ("keys", attention.key_projection)):
        heads = projection(positions).unflatten(-1, (subject.sizes.num_attention_heads, -1))
        variances = heads.var(0, correction=0).sum(-1)
        found[name] = {"head": 1 + int(variances.argmax()), "share": float(variances.max() / variances.sum())}
    return found


def _survival(subject: analysis.Subject) -> Numbers:
    found = analysis.survival(subject, None, LENGTH, WINDOWS)
    texts = analysis.access.chapters()
    parts = [averages(subject, texts[part::PARTS], LENGTH, WINDOWS).shares() for part in range(PARTS)]
    own = found.to_dict()
    for index, name in enumerate(("word_share", "position_share")):
        values = np.array([part[index] for part in parts])
        error = STUDENT_4 * values.std(0, ddof=1) / PARTS**0.5
        own[f"{name}_parts"] = {"mean": values.mean(0).tolist(), "error": error.tolist()}
    return own


def _order(found: analysis.OrderSensitivity) -> Numbers:
    def of(change: analysis.order.Change) -> Numbers:
        return {"text": change.text, "interval": list(change.text_interval)}

    def beyond(kind: str, control: str) -> Numbers:
        """How much more a kind changes than its control, sentence by sentence."""
        differences = found.sentences[kind].texts - found.sentences[control].texts
        return {"text": float(differences.mean()), "interval": list(interval(differences))}

    return {
        "texts": found.texts,
        "tokens": found.length,
        "shuffled": of(found.reordered[SHUFFLED]),
        "reversed": of(found.reordered[REVERSED]),
        "sentences": {
            kind: {"count": own.count, "example": list(own.example), "unrelated": own.unrelated, **of(own.change)}
            for kind, own in found.sentences.items()
        },
        "beyond": {
            "roles": beyond(ROLES, MUTUAL),
            "roles_and": beyond(ROLES, JOINED),
            "named": beyond(NAMED, NAMED_MUTUAL),
        },
    }


def _dimensions(subject: analysis.Subject) -> Numbers:
    wide = movement("", sinusoids(torch.arange(512), 512, 10000.0, "interleaved", torch.float64), [(0, 128), (0, 512)])
    return analysis.words_beside_positions(subject).to_dict() | {"moving_512_over_128": float(wide.moving[0])}


def _terms(subject: analysis.Subject) -> Numbers:
    """Shares of the first layer's terms in groups of texts, mean over the heads, and of the key's position by head."""
    count = 100
    windows = cut(subject, None, LENGTH, count, torch.Generator().manual_seed(0))
    first = [analysis.score_terms(subject, ids).layers[0] for ids in windows.input_ids.split(count // GROUPS)]
    shares = np.array([layer.shares.mean(0) for layer in first])
    by_head = np.array([layer.position_share for layer in first])
    return {
        "texts": len(windows.input_ids),
        "groups": GROUPS,
        "terms": {
            name: {"share": float(own.mean()), "interval": list(interval(own))}
            for name, own in zip(first[0].terms, shares.T)
        },
        "position_share": [{"share": float(own.mean()), "interval": list(interval(own))} for own in by_head.T],
    }


def save(arrays: dict[str, np.ndarray], file: Path) -> None:
    """The arrays, compressed."""
    written = io.BytesIO()
    np.savez_compressed(written, **arrays)
    write_whole({file: written.getvalue()})
