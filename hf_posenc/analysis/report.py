"""One page about the positions of one or several models: every figure, with a sentence that says what it shows.

The page is one file that loads nothing from anywhere else. The numbers behind it are JSON.
"""

import base64
import html
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..files import check_file, write_whole
from .access import Subject, study
from .figures import FIGURES, figure_named
from .files import drawn
from .order import SHUFFLED
from .probes import MODEL, Probes
from .progress import told
from .records import SCHEME, Figure, Record
from .spaces import SharedSpace
from .windows import BLANK_LINES


# One number each of some figures, for the table at the top of the page: figure, what the number is, and how it reads.
GLANCE: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    (
        "similarity",
        "Rows of the position embedding matrix look different from",
        lambda data: f"row {data.edge.row}" if data.edge else "–",
    ),
    (
        "spaces",
        "Variance of positions in the subspace with half of the token embeddings' variance (by chance)",
        lambda data: _in_words(data),
    ),
    (
        "terms",
        "Attention heads of layer 1 with most of their variance from positions",
        lambda data: f"{len(data.position_heads)} of {len(data.layers[0].shares)}",
    ),
    ("probes", "Position, predicted by a linear probe before layer 1 (R²)", lambda data: _told(data, 0)),
    ("probes", "… and after the last layer", lambda data: _told(data, -1)),
    (
        "order",
        "Change of a text's vector if its words are shuffled",
        lambda data: f"{data.reordered[SHUFFLED].text:.0%}",
    ),
    ("phase-shift", "… if all positions are shifted by 1", lambda data: f"{data.all[0].text:.1%}"),
    (
        "phase-shift",
        "… if all positions except the first are shifted by 1",
        lambda data: f"{data.but_first[0].text:.1%}",
    ),
)
# What the JSON file of a report has.
KEYS = ("models", "figures", "text", "versions")
# Digits that matter of a number in it.
DIGITS = 5


def _in_words(data: SharedSpace) -> str:
    own = data.spaces[0].overlaps[0].positions_in_words
    return f"{own.found[0]:.1%} ({own.low[0]:.1%} to {own.high[0]:.1%})"


def _told(data: Probes, layer: int) -> str:
    return f"{data.r2['position'][MODEL][layer]:.2f}"


@dataclass(frozen=True)
class Finding:
    """The result of one figure for one model.

    Attributes:
        figure: the figure.
        model: the model's name.
        record: the numbers. None if the figure does not apply to the model.
        sentence: what the figure shows, or why it does not apply.
    """

    figure: Figure
    model: str
    record: Record | None
    sentence: str

    @cached_property
    def image(self) -> str:
        """The drawing as a `data:` URL of a PNG image."""
        return "data:image/png;base64," + base64.b64encode(drawn(self.figure, self.record)).decode()

    @property
    def alternative(self) -> str:
        """The alternative text of the image."""
        shown = (self.figure.plot.__doc__ or self.figure.question).strip().partition("\n")[0]
        return f"{self.model}. {shown} {self.sentence}"


@dataclass(frozen=True)
class Report:
    """The results of all figures for one or several models. A notebook displays it.

    Attributes:
        subjects: the models.
        findings: for each figure by its name, a [`Finding`] for each model, in the order of `subjects`.
        text: a description of the texts that the models were run on.
    """

    subjects: tuple[Subject, ...]
    findings: dict[str, tuple[Finding, ...]]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """All numbers and sentences, as a dictionary that JSON can represent."""
        figures = {
            name: {
                "question": row[0].figure.question,
                "models": {
                    finding.model: {
                        "sentence": finding.sentence,
                        "data": None if finding.record is None else finding.record.to_dict(),
                    }
                    for finding in row
                },
            }
            for name, row in self.findings.items()
        }
        models = [_facts(subject) for subject in self.subjects]
        return dict(zip(KEYS, (models, figures, self.text, _versions())))

    def glance(self) -> list[tuple[str, list[str]]]:
        """The rows of the table at the top of the page: a label, and a cell for each model."""
        models = [_facts(subject) for subject in self.subjects]
        rows = [
            ("Position scheme", [facts["position_scheme"] for facts in models]),
            ("Layers × heads, width", ["{layers} × {heads}, {hidden_size}".format(**facts) for facts in models]),
            (
                "Maximum sequence length",
                [f"{facts['longest']} tokens" if facts["longest"] else "no limit" for facts in models],
            ),
        ]
        for name, label, read in GLANCE:
            row = self.findings.get(name, ())
            if any(finding.record for finding in row):
                rows.append((label, ["–" if finding.record is None else read(finding.record) for finding in row]))
        return rows

    def to_html(self) -> str:
        """The report as an HTML page, which loads nothing from elsewhere."""
        environment = Environment(
            loader=PackageLoader("hf_posenc.analysis", "."),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return environment.get_template("report_template.html").render(
            models=[_facts(subject) for subject in self.subjects],
            glance=self.glance(),
            rows={name: row for name, row in self.findings.items() if any(finding.record for finding in row)},
            left_out={name: row for name, row in self.findings.items() if not any(finding.record for finding in row)},
            text=self.text,
            versions=_versions(),
        )

    def _repr_html_(self) -> str:
        """The page in a frame, so that a notebook's style and this one leave each other alone."""
        page = html.escape(self.to_html(), quote=True)
        return (
            f'<iframe srcdoc="{page}" title="Positions of {html.escape(_listed(self.subjects))}" '
            'style="width: 100%; height: 80vh; min-height: 500px; border: 0"></iframe>'
        )

    def save(self, path: str | Path) -> tuple[Path, Path]:
        """Write the page and its numbers. Both files are written atomically.

        Args:
            path: the page, such as `report.html`. The numbers are written to `report.html.json`.

        Returns:
            The paths of the page and of the numbers.

        Raises:
            FileExistsError: the file for the numbers exists and is not from a report.
            OSError: a file cannot be written.
            ValueError: `path` does not end in .html.
        """
        page, numbers = check_page(path)
        text = json.dumps(_rounded(self.to_dict()), ensure_ascii=False, allow_nan=False)
        write_whole({page: self.to_html().encode(), numbers: text.encode()})
        return page, numbers


def check_page(path: str | Path) -> tuple[Path, Path]:
    """Check, before anything is measured, that a report can be saved under a name.

    Args:
        path: the page, such as `report.html`.

    Returns:
        The paths of the page and of the numbers.

    Raises:
        FileExistsError: the file for the numbers exists and is not from a report.
        OSError: a file cannot be written.
        ValueError: `path` does not end in .html.
    """
    page = Path(path)
    if page.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{page}: the name of a report must end in .html")
    # The whole name and not only its stem: config.json next to config.html is somebody else's.
    numbers = page.with_name(f"{page.name}.json")
    check_file(page)
    check_file(numbers)
    if numbers.exists() and not _has_numbers_of_a_report(numbers):
        raise FileExistsError(
            f"{numbers}, the file for the numbers of {page}, exists and is not from a report: choose another name, or move the file"
        )
    return page, numbers


def _has_numbers_of_a_report(file: Path) -> bool:
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and {*KEYS} <= {*content} and "hf_posenc" in content["versions"]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _facts(subject: Subject) -> dict[str, Any]:
    """What a model is."""
    sizes = subject.sizes
    return {
        "name": subject.name,
        "family": subject.family.model_type,
        "position_scheme": subject.scheme,
        "layers": len(subject.layers),
        "heads": sizes.num_attention_heads,
        "hidden_size": sizes.hidden_size,
        "longest": subject.longest,
        "parameters": subject.model.num_parameters(),
    }


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("hf_posenc", "transformers", "torch")}


def _listed(subjects: Iterable[Subject]) -> str:
    return ", ".join(subject.name for subject in subjects)


def _named_apart(subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    """Models with different names: a number stands behind one that an earlier model has."""
    named: list[Subject] = []
    for subject in subjects:
        name, number = subject.name, 1
        while name in {other.name for other in named}:
            number += 1
            name = f"{subject.name} ({number})"
        named.append(study(subject, name=name))
    return tuple(named)


def finding(figure: Figure, subject: Subject, **options) -> Finding:
    """Measure one figure for one model; where it does not apply, the finding says why.

    Args:
        options: of the figure's own function.
    """
    if figure.needs != SCHEME and not subject.trained:
        return Finding(figure, subject.name, None, f"Needs a checkpoint, and {subject.name} is only a scheme.")
    try:
        record = figure.measure(subject, **options)
    except ValueError as error:
        return Finding(figure, subject.name, None, f"Does not apply: {error}.")
    return Finding(figure, subject.name, record, figure.describe(record))


def report(
    *models: str | Path | PreTrainedModel | Subject,
    texts: Iterable[str] | None = None,
    figures: Iterable[str] | None = None,
    progress: bool = True,
) -> Report:
    """Measure all figures for one or several models.

    Args:
        models: what [`study`] takes. "NAME=MODEL" gives a model a name, as `study(model, name="NAME")` does.
        texts: documents, as strings, to run the models on. Default: the Python language reference.
        figures: names in [`FIGURES`]. Default: all.
        progress: show a progress bar.

    Returns:
        A report. A notebook displays it, and `save` writes it to a file.

    Raises:
        OSError: there is no such model.
        TypeError: a model is not a model of Transformers.
        ValueError: no model is given, a figure is unknown, or a text is empty.
    """
    if not models:
        raise ValueError("a report needs at least one model: pass a folder, a name on the Hub, or a model")
    chosen = [*dict.fromkeys(map(figure_named, FIGURES if figures is None else figures))]
    options = {} if texts is None else {"texts": check_texts(texts)}
    subjects = _named_apart([_study_named(model) for model in models])
    rows: dict[str, list[Finding]] = {figure.name: [] for figure in chosen}
    pairs = [(subject, figure) for figure in chosen for subject in subjects]
    with tqdm(total=len(pairs), disable=not progress, unit="figure", miniters=0) as bar:
        for number, (subject, figure) in enumerate(pairs):
            bar.set_description(f"{subject.name}: {figure.name}")
            reads = "texts" in signature(figure.measure).parameters
            with told(partial(_show, bar, number)):
                rows[figure.name].append(finding(figure, subject, **(options if reads else {})))
            _show(bar, number + 1, "", 0.0)
    text = f"{len(options['texts'])} given texts" if options else "the Python language reference"
    return Report(subjects, {name: tuple(row) for name, row in rows.items()}, text)


def _show(bar: tqdm, figures: int, step: str, share: float) -> None:
    """Move the bar on: figures that are done, and the share of the next one."""
    bar.set_postfix_str(step, refresh=False)
    done = round(figures + share, 2)
    bar.n = int(done) if done == int(done) else done
    bar.update(0)


def _study_named(model: str | Path | PreTrainedModel | Subject) -> Subject:
    """A model for study; "NAME=MODEL" gives it a name."""
    if isinstance(model, str) and "=" in model and not Path(model).exists():
        name, _, model = model.partition("=")
        return study(model, name=name)
    return study(model)


def check_texts(texts: Iterable[str]) -> list[str]:
    """Documents as a list; a single string is one.

    Raises:
        TypeError: one is not a string.
        ValueError: there is none, or one has no word in it.
    """
    texts = [texts] if isinstance(texts, str) else [*texts]
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"a text must be a string, got {text!r} of type {type(text).__name__}")
        if not text.strip():
            raise ValueError(f"text {number} of {len(texts)} is empty: it contains no words")
    if not texts:
        raise ValueError("no text was given: pass at least one")
    return texts


def read_texts(*sources: str | Path, size: int = 4000) -> list[str]:
    """Read texts for [`report`] from files.

    Paragraphs, which blank lines separate, are joined to texts of at least `size` characters.

    Args:
        sources: files, folders or names of data sets, as conversion takes them for `text`.
        size: smallest number of characters of a text. The last text may be shorter.

    Raises:
        OSError: a source cannot be read.
        ValueError: a source is not UTF-8, or contains no words.
    """
    from ..conversion.texts import read_documents  # only here: nothing else needs conversion

    documents, gathered = [], ""
    paragraphs = [paragraph for document in read_documents(sources) for paragraph in BLANK_LINES.split(document)]
    for paragraph in filter(str.strip, paragraphs):
        gathered += paragraph + "\n\n"
        if len(gathered) >= size:
            documents.append(gathered)
            gathered = ""
    if gathered:
        documents.append(gathered)
    return documents
