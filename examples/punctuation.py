"""Punctuation restoration: a task that needs the order of words, made of any text.

Commas and full stops are taken out of the text, and a token classifier puts them back: every word is labelled with what
followed it. Words are in lower case, so that capital letters do not give sentences away. A model without positions
sees only which words are there and cannot do it.
"""

import random
import re
from pathlib import Path

import numpy as np
from sklearn.metrics import f1_score
from transformers import EvalPrediction, PreTrainedTokenizerBase


LABELS = ("none", "comma", "full stop")
IGNORED = -100  # the label that the loss leaves out

# A word, the punctuation after it, and what closes around both.
WORD = re.compile(r"(?P<word>.*?)(?P<marks>[.,]+)(?P<closing>['”’)\]]*)")
# Quotation marks and markup of emphasis say little about sentences and cost tokens.
QUOTES = str.maketrans("", "", '"“”*`')
LIST_MARKER = re.compile(r"^([*•-]|\d+\.)\s+")


def read_documents(file: str | Path) -> list[str]:
    """The documents of a UTF-8 text file: its blocks of prose, which blank lines separate.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, or has fewer than two documents.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    # Repeated blocks count once, so that none is both trained on and held out.
    documents = list(dict.fromkeys(prose(text)))
    if len(documents) < 2:
        raise ValueError(
            f"{file} has {len(documents)} documents, and it takes two: one to train on, one to hold out. A document is a "
            "block of text of at least six words, among them a full stop; blank lines separate documents"
        )
    return documents


def chapters() -> list[str]:
    """The topics of CPython's own language reference, as documents: real English that every Python carries.

    Topics quote each other. A paragraph that several of them have counts for the shortest only, so that no document
    holds a paragraph of another.
    """
    from pydoc_data.topics import topics  # only here: half a megabyte

    seen: set[str] = set()
    documents = []
    for topic in sorted(topics, key=lambda topic: (len(topics[topic]), topic)):
        own = [paragraph for paragraph in dict.fromkeys(prose(topics[topic])) if paragraph not in seen]
        seen.update(own)
        if own:
            documents.append(" ".join(own))
    return documents


def prose(text: str) -> list[str]:
    """The paragraphs of a text that are sentences, on one line each; code, grammar and headings are left out."""
    paragraphs = (LIST_MARKER.sub("", " ".join(block.split())) for block in re.split(r"\n\s*\n", text))
    return [paragraph for paragraph in paragraphs if is_prose(paragraph)]


def is_prose(paragraph: str) -> bool:
    """At least six words, three quarters of them made of letters, and a full stop after one of them."""
    words, labels = take_punctuation(paragraph)
    letters = sum(bool(re.fullmatch(r"\W*[^\W\d_]+(['’-][^\W\d_]+)*\W*", word)) for word in words)
    return len(words) >= 6 and letters >= 0.75 * len(words) and LABELS.index("full stop") in labels


def take_punctuation(text: str) -> tuple[list[str], list[int]]:
    """The words of a text in lower case, without commas, full stops and quotes, and what followed each, as a label.

    Where several follow, the first one counts ("etc.," is a full stop); a mark that stands alone belongs to the word before.
    """
    words: list[str] = []
    labels: list[int] = []
    for chunk in text.lower().translate(QUOTES).split():
        match = WORD.fullmatch(chunk)
        if match is None:
            words.append(chunk)
            labels.append(LABELS.index("none"))
            continue
        label = LABELS.index("comma" if match["marks"].startswith(",") else "full stop")
        if match["word"]:
            words.append(match["word"] + match["closing"])
            labels.append(label)
        elif labels:
            labels[-1] = label
    return words, labels


def hold_out(documents: list[str], share: float) -> tuple[list[str], list[str]]:
    """Documents to train on, and others, chosen at random but always the same, that hold about `share` of the text.

    Both have at least one document.
    """
    shuffled = sorted(documents)
    random.Random(0).shuffle(shuffled)
    wanted = share * sum(map(len, documents))
    held_out = [shuffled.pop()]
    while len(shuffled) > 1 and sum(map(len, held_out)) < wanted:
        held_out.append(shuffled.pop())
    return shuffled, held_out


def windows(documents: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[dict[str, list[int]]]:
    """Token ids, attention mask and labels of windows of at most `length` tokens, special tokens counted.

    The label of a word is on its last token; all other tokens are ignored by the loss.
    """
    features = []
    for document in documents:
        words, labels = take_punctuation(document)
        label_at_end, end = {}, -1
        for word, label in zip(words, labels):
            end += 1 + len(word)
            label_at_end[end] = label
        encoded = tokenizer(
            " ".join(words),
            max_length=length,
            truncation=True,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for input_ids, mask, offsets in zip(
            encoded["input_ids"], encoded["attention_mask"], encoded["offset_mapping"]
        ):
            token_labels = [label_at_end.get(stop, IGNORED) for _, stop in offsets]
            features.append({"input_ids": input_ids, "attention_mask": mask, "labels": token_labels})
    return features


def f1_scores(prediction: EvalPrediction) -> dict[str, float]:
    """F1 of comma and of full stop on words, and micro-F1 over both; for `Trainer(compute_metrics=...)`."""
    is_word = prediction.label_ids != IGNORED
    labels = prediction.label_ids[is_word]
    predicted = np.argmax(prediction.predictions, axis=-1)[is_word]
    marks = [LABELS.index("comma"), LABELS.index("full stop")]
    comma, full_stop = f1_score(labels, predicted, labels=marks, average=None, zero_division=0.0)
    both = f1_score(labels, predicted, labels=marks, average="micro", zero_division=0.0)
    return {"f1_comma": float(comma), "f1_full_stop": float(full_stop), "f1": float(both)}
