"""The report of a conversion: what was done, what agrees with the original after each stage, and what was not measured."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .._utils import as_markdown
from ..hub.folders import REPORT


# Columns of the table: key of a row, heading.
COLUMNS = (
    ("stage", "stage"),
    ("length", "tokens"),
    ("token_cosine", "token cosine"),
    ("sentence_cosine", "sentence cosine"),
    ("spearman", "Spearman"),
    ("neighbours_kept", "neighbours kept"),
    ("same_answers", "same answers"),
    ("other_tiling", "another tiling"),
    ("random_pairs", "random pairs"),
    ("centred_cosine", "centred cosine"),
)
LOSSES = (("model", "model"), ("length", "visible tokens"), ("masked_lm_loss", "masked-LM loss"))
READS_LOCALLY = (
    "Reads locally: beyond the training length it agrees with the original's own windows, and no gain from what lies further "
    "away was measured."
)


@dataclass
class ConversionReport:
    """The settings and measurements of a conversion.

    Attributes:
        original: name of the original.
        position_scheme: scheme of the converted model.
        flags: its config options.
        trained_length: training length of the original, in tokens.
        max_length: maximum sequence length of the converted model, in tokens.
        inputs: SHA-256 of the original weights, the config and the texts. Empty if nothing was written.
        settings: settings of the conversion, such as limits, what was trained, text and seed.
        rows: the metrics, for each stage and length: the cosine between hidden states of converted and original model, also by layer; the
            cosine between sentence embeddings; Spearman's correlation between similarities of sentences; the share of nearest neighbors that
            stay; the share of equal outputs of a task head. Beyond the training length, the original reads overlapping windows.
        losses: masked-LM losses, by the number of visible tokens.
        distillation: steps with learning rate, error and cosine on held-out text.
        seconds: time of each stage.
        versions: versions of the libraries.
        conclusion: a sentence about the metrics beyond the training length.
        not_measured: what was not measured.
    """

    original: str
    position_scheme: str
    flags: dict[str, Any]
    trained_length: int
    max_length: int
    inputs: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    losses: list[dict[str, Any]] = field(default_factory=list)
    distillation: list[dict[str, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    conclusion: str | None = None
    not_measured: list[str] = field(default_factory=list)

    def conclude(self, left_out: list[int]) -> None:
        """Set `conclusion` and `not_measured`, from the lengths for which there was too little text."""
        beyond = [row for row in self.rows if row["length"] > self.trained_length]
        losses = [row for row in self.losses if math.isfinite(row["masked_lm_loss"])]
        own = {row["length"]: row["masked_lm_loss"] for row in losses if row["model"] == "converted"}
        gains = len(own) > 1 and min(loss for length, loss in own.items() if length > min(own)) < own[min(own)]
        self.conclusion = None
        if beyond and not gains:
            self.conclusion = READS_LOCALLY
        elif beyond:
            self.conclusion = "Masked words are guessed better with more context than the training length."
        self.not_measured = ["finding things in long texts"] if self.max_length > self.trained_length else []
        if not self.losses:
            self.not_measured.append("the loss on masked words (there is no masked-LM head)")
        if not any("logits_apart" in row for row in self.rows):
            self.not_measured.append("outputs of a task head (there is none)")
        elif not any("same_answers" in row for row in self.rows):
            self.not_measured.append(
                f"equal answers of the task head (it gives one number; {REPORT} has its mean change)"
            )
        self.not_measured += [f"{length} tokens (the held-out text is too short)" for length in left_out]
        self.not_measured.append("the task that the model is used for")

    def table(self) -> str:
        """The metrics of all stages as a Markdown table, with the conclusion."""
        parts = [_markdown(self.rows, COLUMNS)] if self.rows else []
        if self.losses:
            parts.append(_markdown(self.losses, LOSSES))
        if self.conclusion:
            parts.append(self.conclusion)
        parts.append(self.said_not_measured())
        return "\n\n".join(parts)

    __str__ = table

    def said_not_measured(self) -> str:
        return f"Not measured: {'; '.join(self.not_measured)}."

    @property
    def name(self) -> str:
        """The default name of the converted model: that of the original and of the scheme."""
        return f"{Path(self.original).name}-{self.position_scheme}"

    def final(self) -> list[dict[str, Any]]:
        """The rows of the last stage, one for each length. Empty if nothing was measured."""
        return [row for row in self.rows if row["stage"] == self.rows[-1]["stage"]]

    @staticmethod
    def metrics(row: dict[str, Any]) -> dict[str, float]:
        """The metrics of a row that are single, finite numbers."""
        return {key: row[key] for key, _ in COLUMNS[2:] if math.isfinite(row.get(key, math.nan))}

    def last(self, length: int) -> dict[str, Any]:
        """The row of the last stage for a length."""
        return [row for row in self.rows if row["length"] == length][-1]

    def to_json(self) -> str:
        """The report as JSON. Infinite numbers and NaN are written as null."""
        return json.dumps(_finite(asdict(self)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, folder: Path) -> None:
        (folder / REPORT).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_json(cls, text: str) -> "ConversionReport":
        """Read a report from the text of a `conversion.json`, also of another version: fields that are unknown are left out.

        Raises:
            TypeError, ValueError: it is none.
        """
        entries = json.loads(text)
        if not isinstance(entries, dict):
            raise ValueError("it holds no JSON object")
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in entries.items() if name in known})


def _finite(value: Any) -> Any:
    """Entries with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _markdown(rows: list[dict[str, Any]], columns: tuple[tuple[str, str], ...]) -> str:
    """Rows as a table of Markdown that also reads well as text; columns without a value are left out."""
    columns = tuple((key, heading) for key, heading in columns if any(key in row for row in rows))
    header, cells = (
        [heading for _, heading in columns],
        [[_written(row.get(key)) for key, _ in columns] for row in rows],
    )
    return as_markdown(header, cells, for_terminals=True)


def _written(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) and math.isfinite(value) else str(value)
