"""Data sets from files (csv, tsv, json, jsonl) or by name, with mistakes found before anything is trained."""

import csv
import glob
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from arguments import DataArguments
from datasets import Dataset, DatasetDict, Features, Value, load_dataset
from datasets.exceptions import DatasetsError
from pyarrow import compute
from transformers import TrainingArguments


logger = logging.getLogger(__name__)

# GLUE's TSV files have quotation marks that nothing closes: there, they are text.
DIALECTS = {
    ".csv": {"delimiter": ",", "quoting": csv.QUOTE_MINIMAL},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
csv.field_size_limit(2**31 - 1)  # a text may be long
JSON = (".json", ".jsonl")
TABLES = (*DIALECTS, *JSON)


def load_splits(arguments: DataArguments, needed: Iterable[str], read: Callable[[str], Dataset]) -> DatasetDict:
    """The splits that are needed, of train, validation and test.

    Args:
        arguments: files, or the name of a dataset.
        needed: the splits.
        read: reads one file.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a file cannot be understood or is empty, or a split is missing.
    """
    if arguments.dataset_name is not None:
        if arguments.files:
            raise ValueError(f"name files or --dataset_name, not both: {arguments.dataset_name}, {arguments.files}")
        splits = load_dataset(arguments.dataset_name, arguments.dataset_config_name)
    else:
        splits = {split: read(file) for split, file in arguments.files.items() if split in needed}
    for split in needed:
        if split not in splits:
            raise ValueError(
                f"there are no {split} data: name a file with --{split}_file, or a dataset that has them with --dataset_name"
            )
    return DatasetDict({split: splits[split] for split in needed})


def read_table(file: str, column_names: list[str] | None = None, has_header: bool | None = None) -> Dataset:
    """The rows of a csv, tsv, json or jsonl file; the cells of csv and tsv are strings.

    Args:
        file: its name's ending says what it is.
        column_names: names of the columns of a csv or tsv file.
        has_header: whether the first row of a csv or tsv file names the columns; by default, if `column_names` does not.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: its ending is unknown, it is empty, or its content is not what the ending says.
    """
    path = check_file(file, TABLES)
    kind = "json" if path.suffix in JSON else "csv"
    options = csv_options(path, column_names, has_header) if kind == "csv" else {}
    try:
        return load_dataset(kind, data_files=glob.escape(file), split="train", **options)
    except (DatasetsError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as {path.suffix[1:]}: {error.__cause__ or error}") from error


def check_file(file: str, endings: Iterable[str]) -> Path:
    """The path of a file that is there, is not empty and has one of the endings; OSError or ValueError otherwise."""
    path = Path(file)
    if path.suffix not in endings:
        raise ValueError(f"{file}: the name of a data file must end in one of {', '.join(endings)}")
    if not path.is_file():
        raise FileNotFoundError(f"{file} does not exist" if not path.exists() else f"{file} is not a file")
    if path.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    return path


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; ValueError if it is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def csv_options(path: Path, column_names: list[str] | None, has_header: bool | None) -> dict[str, Any]:
    """How to read a csv or tsv file; ValueError where it has no rows, or the names of its columns do not fit."""
    dialect = DIALECTS[path.suffix]
    if has_header is None:
        has_header = column_names is None
    try:
        with path.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.reader(opened, **dialect)
            first, second = next(reader), next(filter(None, reader), None)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from error
    if has_header and second is None:
        raise ValueError(f"{path} has no rows")
    if has_header and len(second) > len(first):  # pandas would take the first cells for names of rows
        raise ValueError(f"{path} has {len(first)} columns, and its first row {len(second)}: {', '.join(second)}")
    names = check_width(column_names or first, len(first), path)
    return {
        "sep": dialect["delimiter"],
        "quoting": dialect["quoting"],
        "column_names": names,
        "header": 0 if has_header else None,
        # As strings: a sentence "null" is a sentence, and a column of numbers does not change its type midway.
        "features": Features({name: Value("string") for name in names}),
        "na_filter": False,
        "lineterminator": line_end_of(path),
    }


def line_end_of(path: Path) -> str | None:
    """The end of a file's lines as pandas takes it; None for its default where any line ends as on Windows.

    Where none does, a carriage return by itself is part of a text, and does not end a row as by default.
    """
    with path.open("rb") as opened:
        return None if any(line.endswith(b"\r\n") for line in opened) else "\n"


def check_width(column_names: list[str], width: int, path: Path) -> list[str]:
    """The names of a file's columns; ValueError unless each column has one of its own."""
    if len(column_names) != width:
        raise ValueError(
            f"{path} has {width} columns, and {len(column_names)} names for them: {', '.join(column_names)}"
        )
    if len({*column_names}) != width:
        raise ValueError(f"{path} has two columns of the same name: {', '.join(column_names)}")
    return column_names


def looks_like_data(name: str) -> bool:
    """Whether a column's name is a number, or has two words at least with a space between them."""
    return len(name.split()) > 1 or name.replace(".", "", 1).lstrip("-").isdigit()


def check_columns(splits: dict[str, Dataset], wanted: Iterable[str], option: str | None = None) -> None:
    """Raise ValueError unless every split has the columns, with a value in every row; warn of empty text.

    Args:
        option: the argument that names them.
    """
    for split, rows in splits.items():
        for column in wanted:
            if column not in rows.column_names:
                raise ValueError(
                    f"the {split} data have no column {column!r}; their columns are {', '.join(rows.column_names)}"
                    + (f"; {option} names another" if option else "")
                    + "; if that is the first row of a csv or tsv file without a header, name its columns with --column_names"
                    * any(looks_like_data(name) for name in rows.column_names)
                )
            values = rows.data.column(column)
            if values.null_count:
                raise ValueError(f"the {split} data have no {column} in row {rows[column].index(None) + 1}")
            if rows.features[column] == Value("string"):
                empty = compute.sum(compute.equal(values, "")).as_py()
                if empty:
                    logger.warning(f"warning: {empty} of {len(rows)} rows of the {split} data have an empty {column}")


def check_single(splits: dict[str, Dataset], wanted: Iterable[str]) -> None:
    """Raise ValueError where a column has lists or objects instead of texts or numbers."""
    for split, rows in splits.items():
        # A column that has single values by its type need not be read.
        for column in (name for name in wanted if not isinstance(rows.features.get(name, Value("null")), Value)):
            for number, value in enumerate(rows[column], start=1):
                if isinstance(value, (list, dict)):
                    raise ValueError(
                        f"the {split} data have {value!r} as {column} in row {number}: it must be a text or a number"
                    )


def limit_rows(splits: dict[str, Dataset], arguments: DataArguments) -> dict[str, Dataset]:
    """The first rows of each split, as many as were asked for."""
    limits = {
        "train": arguments.max_train_samples,
        "validation": arguments.max_eval_samples,
        "test": arguments.max_predict_samples,
    }
    numbers = {split: limits[split.removesuffix("_mm")] or len(rows) for split, rows in splits.items()}
    return {split: rows.select(range(min(numbers[split], len(rows)))) for split, rows in splits.items()}


def preprocess(
    splits: dict[str, Dataset],
    function: Callable,
    arguments: DataArguments,
    training: TrainingArguments,
    **options: Any,
) -> dict[str, Dataset]:
    """What a function makes of each split's rows.

    Args:
        splits: the data.
        function: from columns of a batch of rows to columns of the rows that replace them, as `Dataset.map` has it.
        arguments: in how many processes.
        training: knows the process that goes first; the others read from the cache what it wrote.
        options: keywords of the function.
    """
    with training.main_process_first(desc="preprocessing"):
        return mapped(splits, function, arguments, **options)


def mapped(
    splits: dict[str, Dataset], function: Callable, arguments: DataArguments, **options: Any
) -> dict[str, Dataset]:
    """As [`preprocess`], in each process at once."""
    return {
        split: rows.map(
            function,
            batched=True,
            fn_kwargs=options,
            remove_columns=rows.column_names,
            num_proc=arguments.preprocessing_num_workers,
            desc=f"preprocessing {split} data",
        )
        for split, rows in splits.items()
    }


def needed_splits(training: TrainingArguments) -> list[str]:
    """The splits that cannot be missing; ValueError if there is nothing to do."""
    wanted = {"train": training.do_train, "validation": training.do_eval, "test": training.do_predict}
    if not any(wanted.values()):
        raise ValueError("nothing to do: give --do_train, --do_eval or --do_predict")
    return [split for split, is_needed in wanted.items() if is_needed]
