"""The classes that a model tells apart, and what the data call them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from datasets import ClassLabel
from transformers import PreTrainedConfig


class Labels(Protocol):
    """What a model predicts."""

    def encode(self, value: Any) -> int | float:
        """A label of the data as the model has it; ValueError or TypeError if it is none."""

    def decode(self, logits: np.ndarray) -> list[str]:
        """Predictions as text, from logits of shape (examples, outputs)."""

    @property
    def config_entries(self) -> dict[str, Any]:
        """What the model's config says of them."""


@dataclass
class Classes:
    """One of several classes.

    Args:
        names: in the order of the model's logits.
        spelled: the name that a label of the data stands for, where it is not the label itself.
    """

    names: list[str]
    spelled: dict[str, str]

    def encode(self, value: Any) -> int:
        return self.names.index(self.spelled.get(str(value), str(value)))

    def decode(self, logits: np.ndarray) -> list[str]:
        return [self.names[index] for index in logits.argmax(-1)]

    @property
    def config_entries(self) -> dict[str, Any]:
        return {"id2label": dict(enumerate(self.names)), "label2id": {name: i for i, name in enumerate(self.names)}}


def find_classes(seen: dict[str, set], feature: Any, stored: PreTrainedConfig, is_trained: bool) -> Classes:
    """The classes of the training data or, where nothing is trained, those of the model.

    Args:
        seen: the labels that occur in each split.
        feature: the type of their column, which may name them (`datasets.ClassLabel`).
        stored: the checkpoint's config.
        is_trained: whether there are training data, split "train".

    Raises:
        ValueError: there is only one class, or a split has labels that are none of them.
    """
    data_names = feature.names if isinstance(feature, ClassLabel) else []
    if is_trained:
        names = data_names or in_order({str(label) for label in seen["train"]})
    else:
        names = [stored.id2label[index] for index in sorted(stored.id2label)]
        if all(name == f"LABEL_{index}" for index, name in enumerate(names)):  # a model that was told no names
            names = data_names or [str(index) for index in range(len(names))]
    if len(names) < 2:
        raise ValueError(f"it takes two classes to tell apart, and there is only {', '.join(names)}")
    classes = Classes(names, {str(index): name for index, name in enumerate(data_names)})
    check_labels(seen, classes, f"{'the training data have' if is_trained else 'the model knows'} {', '.join(names)}")
    return classes


def in_order(names: set[str]) -> list[str]:
    """Names in the order of the alphabet, or of the numbers if that is what they are."""
    return sorted(names, key=int) if all(name.removeprefix("-").isdecimal() for name in names) else sorted(names)


def check_labels(seen: dict[str, Iterable[Any]], labels: Labels, known: str) -> None:
    """Raise ValueError if a split has labels that cannot be predicted; `known` says which can."""
    for split, values in seen.items():
        unknown = []
        for value in values:
            try:
                labels.encode(value)
            except (ValueError, TypeError):
                unknown.append(repr(value))
        if unknown:
            some = ", ".join(sorted(unknown)[:5]) + ", ..." * (len(unknown) > 5)
            raise ValueError(f"the {split} data have labels that cannot be predicted: {some}; {known}")
