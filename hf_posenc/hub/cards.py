"""Model cards of models with position schemes: what the model is and what was measured, without what is not known.

    hf-posenc card outputs/absolute_t5 --results results.json --repo me/minilm-t5

Everything in a card comes from the model's config or from one results file. The file is a JSON object. Every entry is optional, and
the card leaves out what is missing:

    {
      "base_model": "sentence-transformers/all-MiniLM-L6-v2",
      "license": "apache-2.0",
      "language": "en",
      "datasets": ["nyu-mll/glue"],
      "data": "MRPC, the training split of 3,668 pairs",
      "command": "python examples/quickstart.py --position_scheme absolute+t5",
      "training": {"max_steps": 240, "learning_rate": 0.0005},
      "seeds": [42, 43],
      "versions": {"hf_posenc": "0.2.0", "torch": "2.13.0", "transformers": "5.23.0"},
      "machine": "2 CPU cores",
      "limits": ["Trained on technical English only."],
      "results": [
        {"model": "variant", "dataset": "MRPC", "dataset_id": "nyu-mll/glue", "split": "validation",
         "length": 512, "metrics": {"f1": [0.90, 0.91], "accuracy": [0.86, 0.87]}},
        {"model": "checkpoint", "dataset": "MRPC", "dataset_id": "nyu-mll/glue", "split": "validation",
         "length": 512, "metrics": {"f1": [0.90, 0.89], "accuracy": [0.86, 0.85]}}
      ]
    }

In `results`, `model` says which model was measured: "variant" is the card's own model, "checkpoint" is the model that it was trained from,
trained and measured in the same way, and any other name is another model to compare with. `length` is the number of tokens of
the sequences. A metric is a number, or a list of numbers, one per seed; the card then shows mean and standard deviation.
The first of the `seeds` belongs to the saved weights. `dataset_id` and `datasets` are names on the Hub, and `dataset` is a display name. Other
entries are ignored, unless they look like a misspelling of these.
"""

import json
import math
import os
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import TrainerCallback

from .. import inspection
from ..checkpoint_code import code_files
from ..inspection import sentence_folders
from ..modeling.models.configuration_posenc import PositionConfigMixin
from ..modeling.schemes.flags import did_you_mean
from ..modeling.schemes.table import SCHEMES, sources_of
from .card_files import BEGIN, END, begin_mark, check_card, save_card


if TYPE_CHECKING:
    from transformers import Trainer

TEMPLATE = Path(__file__).with_name("model_card_template.md")
# Of `hf-posenc card`, with a value.
OPTIONS = {"results", "repo", "out", "base_model", "license", "language"}
LIBRARIES = ("hf_posenc", "torch", "transformers", "accelerate", "datasets", "tokenizers")
# What an evaluation measures of itself, by the ends of names.
TIMES = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")

Metric = float | list[float]


def _check_keys(entries: Any, known: Iterable[str], where: str, strictly: bool) -> None:
    """Raise ValueError for a key that is unknown, or, unless `strictly`, only for one that looks like a misspelling."""
    if not isinstance(entries, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(entries).__name__}")
    for key in entries.keys() - {*known}:
        hint = did_you_mean(key, known, f"; the known entries are {', '.join(known)}" if strictly else "", cutoff=0.75)
        if hint:
            raise ValueError(f"{where}: unknown entry {key!r}{hint}")


def _check_type(entries: dict[str, Any], key: str, types: tuple[type, ...], possible: str, where: str) -> None:
    value = entries.get(key)
    if value is not None and (not isinstance(value, types) or isinstance(value, bool)):
        raise ValueError(f"{where}: {key!r} must be {possible}, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Measurement:
    """What one model reached on one data set.

    Attributes:
        model: "variant", "checkpoint", or another name.
        metrics: a number per metric, or a list with one per seed.
        dataset, split: what it was measured on, in words; without `dataset` it is no part of the card's `model-index`.
        dataset_id: the data set's name on the Hub.
        length: number of tokens of the sequences.
    """

    model: str
    metrics: Mapping[str, Metric]
    dataset: str | None = None
    dataset_id: str | None = None
    split: str | None = None
    length: int | None = None

    @classmethod
    def from_json(cls, row: Any, where: str, seeds: int | None) -> "Measurement":
        """Read a row; ValueError says what is wrong with it and `where` it is."""
        _check_keys(row, [f.name for f in fields(cls)], where, strictly=True)
        for key in ("model", "metrics"):
            if row.get(key) is None:
                raise ValueError(f"{where} lacks {key!r}")
        for key in ("model", "dataset", "dataset_id", "split"):
            _check_type(row, key, (str,), "a string", where)
        _check_type(row, "length", (int,), "an integer", where)
        _check_type(row, "metrics", (dict,), "an object", where)
        metrics = {name: value for name, value in row["metrics"].items() if value is not None and value != []}
        for name, value in metrics.items():
            for number in value if isinstance(value, list) else [value]:
                if not _is_number(number):
                    raise ValueError(
                        f"{where}: metric {name!r} must be a finite number or a list of them, got {value!r}"
                    )
            if isinstance(value, list) and seeds is not None and len(value) != seeds:
                raise ValueError(f"{where}: metric {name!r} has {len(value)} values for {seeds} seeds")
        return cls(**{**row, "metrics": metrics})


@dataclass(frozen=True)
class Results:
    """What is known of a model in addition to its config: the entries of a results file, see the module."""

    base_model: str | None = None
    license: str | None = None
    language: str | list[str] | None = None
    datasets: list[str] = field(default_factory=list)
    data: str | None = None
    command: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    machine: str | None = None
    limits: list[str] = field(default_factory=list)
    results: list[Measurement] = field(default_factory=list)

    @classmethod
    def from_json(cls, entries: Any, where: str = "results", strictly: bool = False) -> "Results":
        """Read the entries of a results file.

        Args:
            where: what to call them in errors.
            strictly: refuse every unknown entry, not only what looks like a misspelling.

        Raises:
            ValueError: an entry is misspelt, of a wrong type, or no finite number; names it and `where`.
        """
        names = [f.name for f in fields(cls)]
        _check_keys(entries, names, where, strictly)
        for key in ("base_model", "license", "data", "command", "machine"):
            _check_type(entries, key, (str,), "a string", where)
        for key in ("training", "versions"):
            _check_type(entries, key, (dict,), "an object", where)
        for key in ("datasets", "seeds", "limits", "results"):
            _check_type(entries, key, (list,), "a list", where)
        _check_type(entries, "language", (str, list), "a string or a list of strings", where)
        known = {name: entries[name] for name in names if entries.get(name)}
        if "base_model" in known and not REPO_ID.fullmatch(known["base_model"]):
            raise ValueError(f"{where}: 'base_model' must be a name on the Hub, got {known['base_model']!r}")
        seeds = len(known["seeds"]) if "seeds" in known else None
        rows = [
            Measurement.from_json(row, f"{where}: results[{index}]", seeds)
            for index, row in enumerate(known.get("results", []))
        ]
        return cls(**{**known, "results": rows})

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Results":
        """Read a results file; OSError and ValueError name it."""
        try:
            entries = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        return cls.from_json(entries, str(path))

    def known(self) -> dict[str, Any]:
        """The entries that there are."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}


def mean(value: Metric) -> float:
    """A metric over its seeds."""
    return statistics.fmean(value) if isinstance(value, list) else value


def written(value: Metric) -> str:
    """A metric for people: four decimals (three digits if it is small), and the sample standard deviation over seeds."""

    def number(value: float) -> str:
        return str(value) if isinstance(value, int) else f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.3g}"

    spread = f" ± {number(statistics.stdev(value))}" if isinstance(value, list) and len(value) > 1 else ""
    return number(mean(value)) + spread


def eval_results(results: Results, task: str) -> list[EvalResult]:
    """The measurements of the card's own model, in the form of the Hub's `model-index`, grouped by data set.

    Raises:
        ValueError: one name on the Hub stands for data sets of different names.
    """
    found: dict[tuple, list[EvalResult]] = {}
    for row in results.results:
        if row.model != "variant" or row.dataset is None:
            continue
        identity = row.dataset_id or re.sub(r"[^\w]+", "-", row.dataset.lower()).strip("-")
        same = found.setdefault((identity, row.split), [])
        if same and same[0].dataset_name != row.dataset:
            raise ValueError(
                f"the data set {identity!r} has two names, {same[0].dataset_name!r} and {row.dataset!r}: use one"
            )
        length = {} if row.length is None else {"length": row.length}
        for name, value in row.metrics.items():
            count = len(value) if isinstance(value, list) else 1
            same.append(
                EvalResult(
                    task_type=task,
                    dataset_type=identity,
                    dataset_name=row.dataset,
                    dataset_split=row.split,
                    metric_type=name,
                    metric_name=name
                    + f" at {row.length} tokens" * bool(length)
                    + f", mean of {count} seeds" * (count > 1),
                    metric_value=mean(value),
                    metric_args=length or None,
                )
            )
    return [result for group in found.values() for result in group]


def card_data(
    config: PositionConfigMixin,
    results: Results,
    name: str,
    tags: Iterable[str] = (),
    sentence_class: str | None = None,
) -> ModelCardData:
    """The metadata of a card; what is not known is not there."""
    task, library = inspection.pipeline_tag(config), "transformers"
    if sentence_class is not None:
        task, library = sentence_folders.PIPELINE_TAGS.get(sentence_class, task), "sentence-transformers"
        tags = [library, *tags]
    evaluated = eval_results(results, task or "other")
    schemes = [scheme.name for scheme in inspection.schemes_of(config)]
    return ModelCardData(
        base_model=results.base_model,
        datasets=results.datasets or None,
        language=results.language,
        library_name=library,
        license=results.license,
        metrics=list(dict.fromkeys(result.metric_type for result in evaluated)) or None,
        model_name=name if evaluated else None,
        pipeline_tag=task,
        tags=["hf_posenc", "position-encoding", config.stock_model_type, *schemes, *tags],
        eval_results=evaluated or None,
    )


def _tables(results: Results) -> list[dict[str, Any]]:
    """A table per data set: its title, its columns, and a row per length and model, shortest first."""
    groups: dict[tuple, list[Measurement]] = {}
    for row in results.results:
        groups.setdefault((row.dataset, row.split), []).append(row)
    tables = []
    for (dataset, split), rows in groups.items():
        metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
        tables.append(
            {
                "title": ", ".join(part for part in (dataset, split) if part),
                "columns": ["tokens", "model", *metrics],
                "rows": [
                    [
                        "" if row.length is None else f"{row.length:,}",
                        {"variant": "**this model**", "checkpoint": "the checkpoint"}.get(row.model, row.model),
                        *(written(row.metrics[name]) if name in row.metrics else "" for name in metrics),
                    ]
                    for row in sorted(rows, key=lambda row: row.length or 0)
                ],
            }
        )
    return tables


def make_card(
    config: PositionConfigMixin,
    results: Results | None = None,
    repo_id: str = "model",
    command: str | None = None,
    tags: Iterable[str] = (),
    sentence_class: str | None = None,
    chunk_size: int | None = None,
) -> ModelCard:
    """The card of a model with a position scheme, its text between the marks of [`card_files`].

    Args:
        config: the model's config.
        results: what is known in addition.
        repo_id: where the model is, or will be, on the Hub; its last part is the title.
        command: the command line that writes this card again.
        tags: more of them.
        sentence_class: the class of sentence-transformers that loads it, if it is such a model, as "SentenceTransformer".
        chunk_size: number of tokens of a chunk, if that reads texts in chunks.

    Raises:
        ValueError: `results` contradict themselves.
    """
    results = results or Results()
    name = repo_id.rstrip("/").rpartition("/")[2]
    shapes, total = inspection.parameter_shapes(config)
    schemes = inspection.schemes_of(config)
    meanings = {flag: meaning for flag, _, meaning in inspection.flag_rows(scheme.name for scheme in schemes)}
    lengths = [row.length for row in results.results if row.model == "variant" and row.length is not None]
    repeated = [len(value) for row in results.results for value in row.metrics.values() if isinstance(value, list)]
    data = card_data(config, results, name, tags, sentence_class)
    own_schemes: dict[str, list[str]] = {}
    for scheme, source in sources_of(config.schemes).items():
        own_schemes.setdefault(source.module, []).append(SCHEMES[scheme].__qualname__)
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        begin=begin_mark(data.to_dict()),
        end=END,
        title=" ".join(name.split()),
        fenced=fenced,
        repo_id=repo_id,
        known=results,
        config=config,
        schemes=schemes,
        flags=[(flag, value, meanings[flag]) for flag, value in inspection.flags_of(config).items()],
        parameters=inspection.per_layer(shapes),
        added=sum(math.prod(shape) for shape in shapes.values()),
        total=total,
        tables=_tables(results),
        repeated=max(repeated, default=1),
        longest=inspection.longest_sequence(config),
        longest_measured=max(lengths, default=None),
        auto_class=inspection.auto_class(config),
        sentence_class=sentence_class,
        chunk_size=chunk_size,
        code=[*code_files(config)],
        own_schemes=own_schemes,
        regenerate=command,
    )
    if card.content.count(BEGIN) != 1 or card.content.count(END) != 1:
        raise ValueError(f"the results contain a comment that marks cards, {END}: remove it")
    return card


def fenced(command: str) -> str:
    """A command as a block of code that nothing in it ends: its fence is longer than any backticks there."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return f"{fence}bash\n{command}\n{fence}"


def write_card(
    folder: str | os.PathLike,
    results: str | os.PathLike | None = None,
    repo_id: str | None = None,
    output: str | os.PathLike | None = None,
    force: bool = False,
    **known: Any,
) -> Path:
    """Write the card of a saved model with a position scheme.

    In an existing card, what others wrote (a person, sentence-transformers, ...) stays: their text, and their metadata
    except for the entries in `known`. What hf_posenc wrote before is replaced.

    Args:
        folder: the folder of the saved model.
        results: a results file.
        repo_id: the model's name on the Hub. Default: the folder's name.
        output: the file to write. Default: README.md in the folder.
        force: replace the whole card.
        known: entries of [`Results`] that override those of the file.

    Returns:
        The file that was written.

    Raises:
        OSError: a file is missing or cannot be written.
        ValueError: the folder holds no model with a position scheme, the results are wrong, or the existing card cannot be read.
    """
    for place, what in ((folder, "the folder"), (results, "the file of results"), (output, "the file to write")):
        if place is not None:
            inspection.check_named(place, what)
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    config = inspection.load_config(str(folder))
    if not isinstance(config, PositionConfigMixin):
        raise ValueError(
            f"{folder} holds a {config.model_type} model without a position scheme, which this card would describe"
        )
    known = Results.from_json(known, "the arguments", strictly=True).known()
    contents = replace(Results() if results is None else Results.read(results), **known)
    command = _command(config, str(folder), {"results": results, "repo": repo_id, "out": output, **known})
    output = Path(folder) / "README.md" if output is None else Path(output)
    repo_id = repo_id or Path(folder).resolve().name
    known_of_folder = {
        "sentence_class": sentence_folders.model_class(Path(folder)),
        "chunk_size": sentence_folders.chunk_size(Path(folder)),
    }
    card = make_card(config, contents, repo_id, command, **known_of_folder)
    return save_card(card, output, given=known, force=force)


def _command(config: PositionConfigMixin, folder: str, options: dict[str, Any]) -> str | None:
    """The command line that writes a card with these options again; None if it has no such option, or none for such a value."""
    given = {name: value for name, value in options.items() if value is not None}
    if not OPTIONS.issuperset(given) or isinstance(given.get("language"), list):
        return None
    command = ["hf-posenc", "card", folder]
    for file in dict.fromkeys(source.path.name for source in sources_of(config.schemes).values()):
        command += ["--scheme-file", file]
    for name, value in given.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(command)


def installed_versions() -> dict[str, str]:
    """Versions of the libraries that training depends on, so far as they are installed."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    return versions


class ModelCardCallback(TrainerCallback):
    """Writes the model card of the model that a `Trainer` trains. `Trainer.push_to_hub` then pushes this card.

        trainer = Trainer(model, ...)
        trainer.add_callback(ModelCardCallback(trainer, dataset="MRPC", split="validation", license="apache-2.0"))
        trainer.train()
        trainer.push_to_hub()

    The card is written to `output_dir` at the end of training, and after each later evaluation. Your text in an existing card stays. Command,
    settings, seed and versions in the card are those of the run. Its results are those of `Trainer.evaluate` for the current weights (numbers
    whose names begin with `eval_`), and those of a results file, for example at other lengths or of the original checkpoint.

    Whenever the Trainer pushes during training, the callback writes the modeling code first, so that this push can be loaded too.

    Args:
        trainer: the trainer that the callback is added to.
        results: a results file, as for `hf-posenc card`.
        dataset: display name of the evaluation data.
        split: display name of the split.
        dataset_id: name of the data set on the Hub.
        length: number of tokens to which its sequences are truncated.
        known: entries of a results file, such as `license`. They override those of the file and of the run.

    Raises:
        TypeError: the trainer's model has no position scheme, or it is an adapter. PEFT writes the card of an adapter.
        OSError: the results file or the existing card cannot be read.
        ValueError: an entry is wrong, or a file has the wrong form.
    """

    def __init__(
        self,
        trainer: "Trainer",
        results: str | os.PathLike | None = None,
        dataset: str | None = None,
        split: str | None = None,
        dataset_id: str | None = None,
        length: int | None = None,
        **known: Any,
    ):
        self.trainer = trainer
        self._config()
        self.file = {} if results is None else Results.read(results).known()
        self.known = Results.from_json(known, "ModelCardCallback", strictly=True).known()
        self.path = Path(trainer.args.output_dir) / "README.md"
        check_card(self.path)  # now, and not after hours of training
        self.measured_on = {"dataset": dataset, "dataset_id": dataset_id, "split": split, "length": length}
        self.metrics: dict[int, dict[str, float]] = {}
        self.trained = False
        # `Trainer.push_to_hub` writes README.md by this method right before it uploads; Trainer's own overwrites what is there.
        trainer.create_model_card = self.write

    def _config(self) -> PositionConfigMixin:
        """The config of the trainer's model, which is a new one in each run with `model_init`."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if not isinstance(model.config, PositionConfigMixin) or getattr(model, "peft_config", None):
            raise TypeError(
                f"ModelCardCallback writes cards of models with a position scheme, got a {type(model).__name__}"
            )
        model.config.architectures = [type(model).__name__]  # as saving does
        return model.config

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.trained, self.metrics = False, {}

    def on_evaluate(self, args, state, control, metrics=None, **kwargs) -> None:
        # One evaluation of several data sets is several of these, each with names of its own.
        self.metrics.setdefault(self._step(), {}).update(
            (name.removeprefix("eval_"), value)
            for name, value in (metrics or {}).items()
            if name.startswith("eval_") and not name.endswith(TIMES) and _is_number(value)
        )
        if self.trained:
            self.write()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.trained = True
        self.write()

    def on_push_begin(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            self._config().save_pretrained(args.output_dir)

    def write(self, **asked: Any) -> None:
        """Write README.md; takes what `Trainer.create_model_card` takes, and uses what a card has a place for."""
        trainer = self.trainer
        if not trainer.is_world_process_zero():
            return
        names = {"language": "language", "license": "license", "finetuned_from": "base_model"}
        asked_for = {entry: asked[name] for name, entry in names.items() if asked.get(name)}
        run = self._run()
        entries = {**self.file, **run, **self.known, **asked_for}
        sources = (self.file, run, self.known)
        entries["training"] = {name: value for s in sources for name, value in s.get("training", {}).items()}
        # The first seed is that of these weights.
        entries["seeds"] = list(dict.fromkeys(run["seeds"] + self.file.get("seeds", []) + self.known.get("seeds", [])))
        entries["results"] = self._measured() + [row for s in (self.file, self.known) for row in s.get("results", [])]
        repo_id = trainer.hub_model_id or trainer.args.hub_model_id or Path(trainer.args.output_dir).resolve().name
        tags = asked.get("tags") or []
        tags = ["generated_from_trainer", *([tags] if isinstance(tags, str) else tags)]
        sentence_class = sentence_folders.model_class(self.path.parent)
        card = make_card(self._config(), Results(**entries), repo_id, tags=tags, sentence_class=sentence_class)
        save_card(card, self.path, given={*self.known, *asked_for})

    def _run(self) -> dict[str, Any]:
        """What the run itself tells."""
        args, state = self.trainer.args, self.trainer.state
        training = {
            "steps": state.global_step,
            **self._batch_size(),
            "learning_rate": args.learning_rate,
            "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "weight_decay": args.weight_decay,
            "optimizer": str(getattr(args.optim, "value", args.optim)),
        }
        training |= {name: True for name in ("bf16", "fp16") if getattr(args, name)}
        rate = getattr(self.trainer, "position_learning_rate", None)
        training |= {} if rate is None else {"position_learning_rate": rate}
        script = Path(sys.argv[0])
        is_script = script.suffix == ".py"  # and not a notebook's kernel, whose run no command can repeat
        run = {
            "command": shlex.join(["python", script.name, *sys.argv[1:]]) if is_script else None,
            "training": training,
            "seeds": [args.seed],
            "versions": installed_versions(),
        }
        origin = self._config()._name_or_path
        if REPO_ID.fullmatch(origin or "") and not os.path.exists(origin):
            run["base_model"] = origin
        return run

    def _batch_size(self) -> dict[str, Any]:
        """The size of the batch of an optimizer step: a number of texts, or the limit of [`PositionTrainer`]."""
        args, state = self.trainer.args, self.trainer.state
        batches = args.gradient_accumulation_steps * args.world_size
        most = getattr(self.trainer, "max_tokens_per_batch", None)
        if most is not None:
            return {"tokens per step": f"at most {most * batches:,}"}
        return {"batch size": (state.train_batch_size or args.train_batch_size) * batches}

    def _measured(self) -> list[Measurement]:
        """The evaluation of the weights that the model has now, if there was one."""
        metrics = self.metrics.get(self._step())
        return [Measurement("variant", metrics, **self.measured_on)] if metrics else []

    def _step(self) -> int:
        """The step after which the model had the weights that it has now."""
        state = self.trainer.state
        loads_best = self.trained and self.trainer.args.load_best_model_at_end
        return (state.best_global_step if loads_best else None) or state.global_step
