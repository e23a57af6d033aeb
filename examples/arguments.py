"""The command line that the scripts share: `position_*` flags, checkpoint, data, and mistakes told in one line."""

import difflib
import json
import os
import sys
from argparse import Action, ArgumentDefaultsHelpFormatter, ArgumentError, ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

import hf_posenc  # noqa: F401  the one import: from here on, position_scheme=... works
from hf_posenc.custom_schemes import register_files
from hf_posenc.inspection import flag_rows, longest_sequence, unpad_row
from hf_posenc.modeling.schemes.flags import UNPAD, Dictionary, Number, Subset
from hf_posenc.modeling.schemes.table import FLAGS, SCHEMES, kind_of, scheme_names


class HelpFormatter(ArgumentDefaultsHelpFormatter):
    """Help that shows defaults where there are some, and each option by one spelling."""

    def _get_help_string(self, action: Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spellings = [option for option in action.option_strings if "-" not in option.removeprefix("--")]
        metavar = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        return ", ".join(spellings or action.option_strings) + metavar


class ScriptParser(HfArgumentParser):
    """The command line of a script: position flags first in its help, and mistakes in one line.

    Abbreviated options are refused: with some 150 of them, what is short today is ambiguous or something else tomorrow.
    The files that `--scheme_file` names are read first: their schemes may have flags.

    Args:
        kinds: dataclasses, whose arguments it takes; their help stands in a group each, under `_argument_group_name`. With
            `PositionArguments` among them, there are those of registered schemes too.
        defaults: by name of an argument.
    """

    def __init__(self, kinds: Iterable[type], **defaults: Any):
        self._register_schemes()
        self.kinds = [with_registered_flags() if kind is PositionArguments else kind for kind in kinds]
        in_help = sorted(self.kinds, key=lambda kind: not issubclass(kind, PositionArguments))
        super().__init__(
            in_help, formatter_class=HelpFormatter, allow_abbrev=False, usage="%(prog)s [--argument value ...]"
        )
        self._given_defaults = defaults
        self.set_defaults(**defaults)

    def _register_schemes(self) -> None:
        first = ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--scheme_file", "--scheme-file", nargs="+", action="extend", default=[])
        first.error = self.error
        files = first.parse_known_args()[0].scheme_file
        if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
            with suppress(OSError, ValueError, AttributeError):  # whatever is wrong with it, `parse_file` says
                files = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).get("scheme_file") or []
        try:
            register_files(files)
        except (OSError, ValueError, TypeError) as error:
            self.error(f"--scheme_file: {error}")

    def parse(self) -> tuple[Any, ...]:
        """One object of each dataclass, in the order that they were given in."""
        _, unknown = self.parse_known_args()  # first: what is misspelt may be what another argument lacks
        if unknown:
            self.error(self._unknown(unknown[0]))
        parsed = self.parse_args_into_dataclasses(look_for_args_file=False)
        return tuple(next(one for one in parsed if type(one) is kind) for kind in self.kinds)

    def parse_file(self, file: Path) -> tuple[Any, ...]:
        """One object of each dataclass, from a JSON file; raises ValueError for a name that none has."""
        actions = {action.dest: action for action in reversed(self._actions)}
        entries = {**json.loads(file.read_text(encoding="utf-8"))}
        for name in entries.keys() & actions.keys():
            entries[name] = self._from_json(actions[name], entries[name])
        parsed = self.parse_dict(self._given_defaults | entries)
        return tuple(next(one for one in parsed if type(one) is kind) for kind in self.kinds)

    def _from_json(self, action: Action, value: Any) -> Any:
        """A value as the command line has it: of the argument's type, one of its choices, in a list where it takes several."""
        if value is None or isinstance(value, dict):
            return value
        values = value if isinstance(value, list) else [value]
        try:
            values = [self._get_value(action, one) if isinstance(one, str) else one for one in values]
        except ArgumentError as error:
            self.error(str(error))
        for one in values:
            self._check_value(action, one)
        return values if isinstance(value, list) or action.nargs in ("*", "+") else values[0]

    def _unknown(self, argument: str) -> str:
        name = argument.split("=")[0]
        nearest = difflib.get_close_matches(name, self._option_string_actions, n=1)
        if not name.startswith("--"):
            return f"unexpected {argument!r}; arguments are given as --name value"
        return f"unknown argument {name}" + (f"; did you mean {nearest[0]}?" if nearest else "; --help lists all")

    def _check_value(self, action: Action, value: Any) -> None:
        """As in argparse, with one spelling of the argument, and the nearest choice."""
        if action.choices is not None and value not in action.choices:
            nearest = difflib.get_close_matches(str(value), map(str, action.choices), n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            self.error(f"--{action.dest} {value}: must be one of {', '.join(map(str, action.choices))}{hint}")

    def error(self, message: str) -> NoReturn:
        """End the program with one line, as all other mistakes do."""
        sys.exit(f"error: {message}")


def _position_fields() -> list[tuple[str, Any, Any]]:
    """A field for every flag, as its schemes declare it, and for `unpad`; a dictionary is written as JSON."""
    fields = []
    for name, _, meaning in flag_rows():
        kind = kind_of(name)
        types = {Dictionary: str, Number: float, Subset: list[str]}
        annotation = types.get(type(kind), kind.annotation)
        fields.append((name, annotation | None, field(default=None, metadata={"help": meaning.replace("%", "%%")})))
    name, _, meaning = unpad_row()
    fields.append((name, UNPAD.kind.annotation | None, field(default=None, metadata={"help": meaning})))
    return fields


# `--scheme_file`, for a dataclass that has it; `ScriptParser` reads the files.
SCHEME_FILE = {
    "help": "Python files with custom position schemes (docs/custom-schemes.md): position_scheme then takes their names, and their "
    "options are arguments."
}


@dataclass
class SchemeArgument:
    _argument_group_name: ClassVar[str] = "positions"

    position_scheme: str = field(
        default="absolute+t5",
        metadata={
            "help": "A scheme's name, or several joined by '+'; the README lists them. Default: that of a saved model with a position scheme, and absolute+t5 for an original checkpoint."
        },
    )
    scheme_file: list[str] | None = field(default=None, metadata=SCHEME_FILE)


@dataclass
class PositionArguments(make_dataclass("Flags", _position_fields(), bases=(SchemeArgument,))):
    """For `ScriptParser`: `--position_scheme` and its companions; what is not given is left to the scheme."""

    def flags(self) -> dict[str, Any]:
        """The flags that were given, as `from_pretrained` takes them.

        Raises:
            ValueError: a dictionary is not written as JSON.
        """
        names = {*FLAGS, UNPAD.name}
        given = {flag: value for flag, value in asdict(self).items() if value is not None and flag in names}
        for flag, value in given.items():
            is_dictionary = flag in FLAGS and flag != "position_scheme" and isinstance(kind_of(flag), Dictionary)
            if is_dictionary and isinstance(value, str):  # a JSON file of arguments has it as it is
                try:
                    given[flag] = json.loads(value)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{flag} must be a JSON object, got {value!r}: {error}") from error
        return given


def with_registered_flags() -> type[PositionArguments]:
    """`PositionArguments` with a field for each flag of the schemes that were registered since."""
    new = [own for own in _position_fields() if own[0] not in PositionArguments.__dataclass_fields__]
    return make_dataclass("PositionArguments", new, bases=(PositionArguments,)) if new else PositionArguments


@dataclass
class ModelArguments:
    """For `ScriptParser`: which checkpoint to start from."""

    _argument_group_name: ClassVar[str] = "checkpoint"

    model_name_or_path: str = field(
        metadata={
            "help": "Checkpoint of a BERT-family model, with or without a position scheme: a folder or a name on the Hub."
        }
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer, if it is not the checkpoint's own: a folder or a name on the Hub."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a checkpoint on the Hub."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where to keep what is downloaded."})
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Run code that the checkpoint brings. Models that hf_posenc saved do not need it."},
    )
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Start a new head where the checkpoint has one of another size."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention backend: eager, sdpa, flex_attention, ..."}
    )

    @property
    def hub_options(self) -> dict[str, Any]:
        """Keywords that every `from_pretrained` takes."""
        return {
            "revision": self.model_revision,
            "cache_dir": self.cache_dir,
            "trust_remote_code": self.trust_remote_code,
        }

    @property
    def backend(self) -> dict[str, str]:
        """The attention backend, as `from_pretrained` and `from_config` take it."""
        return {} if self.attn_implementation is None else {"attn_implementation": self.attn_implementation}

    def load_config(self, positions: PositionArguments, **entries: Any) -> PreTrainedConfig:
        """The checkpoint's config with position flags and other entries; no weight is read.

        Where no scheme is given, a saved model keeps its scheme, and an original checkpoint gets the default one.

        Raises:
            OSError: there is no such checkpoint.
            ValueError, TypeError: a flag is wrong, or the family has no position schemes.
        """
        flags = positions.flags()
        if positions.position_scheme is None:
            stored = AutoConfig.from_pretrained(self.model_name_or_path, **self.hub_options)
            if getattr(stored, "position_scheme", None) is None:
                flags["position_scheme"] = PositionArguments.position_scheme
        return AutoConfig.from_pretrained(self.model_name_or_path, **self.hub_options, **flags, **entries)

    def load_model(self, auto_class: type, config: PreTrainedConfig, finished: str | None = None) -> PreTrainedModel:
        """The model: with the weights of the checkpoint, or with those of a folder where its training was finished.

        Raises:
            OSError: there are no weights.
            ValueError: the attention backend cannot carry the schemes.
        """
        return auto_class.from_pretrained(
            finished or self.model_name_or_path,
            config=config,
            ignore_mismatched_sizes=self.ignore_mismatched_sizes,
            **self.backend,
            **self.hub_options,
        )

    def load_tokenizer(self, **options: Any) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer; raises OSError if there is none."""
        return AutoTokenizer.from_pretrained(
            self.tokenizer_name or self.model_name_or_path, **self.hub_options, **options
        )


@dataclass
class DataArguments:
    """For `ScriptParser`: which data to train, evaluate and predict on, and how much of it."""

    _argument_group_name: ClassVar[str] = "data"

    dataset_name: str | None = field(default=None, metadata={"help": "Dataset: a folder or a name on the Hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    train_file: str | None = field(default=None, metadata={"help": "File to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "File to evaluate on."})
    test_file: str | None = field(default=None, metadata={"help": "File to predict on; labels are optional."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many examples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many examples."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict the first so many examples."})
    max_seq_length: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of an input, special tokens counted; longer text is cut. The model_max_length of the tokenizer "
            "that is saved is raised to it, and never lowered, except to the end of the model's table of positions."
        },
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})

    def __post_init__(self):
        for name in ("max_train_samples", "max_eval_samples", "max_predict_samples", "max_seq_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def files(self) -> dict[str, str]:
        """The files by split: train, validation, test."""
        named = {"train": self.train_file, "validation": self.validation_file, "test": self.test_file}
        return {split: file for split, file in named.items() if file is not None}


@dataclass
class TableArguments(DataArguments):
    """`DataArguments` for scripts that read tables: csv and tsv files, with or without a header."""

    column_names: list[str] | None = field(
        default=None, metadata={"help": "Names of the columns of csv and tsv files that have no header."}
    )
    has_header: bool | None = field(
        default=None,
        metadata={"help": "Whether csv and tsv files have a header, that --column_names then replaces."},
    )


def sequence_length(asked_for: int | None, default: int, config: PreTrainedConfig) -> int:
    """Tokens of an input: what was asked for, or the default as far as the model reads.

    Raises:
        ValueError: more tokens are asked for than the model has learned absolute positions.
    """
    ends = [name for name in scheme_names(config.position_scheme) if SCHEMES[name].ends_with_table]
    limit = config.max_position_embeddings - config.first_position
    if asked_for is None:
        return min(default, limit) if ends else default
    if ends and asked_for > limit:
        raise ValueError(
            f"max_seq_length={asked_for}: the position embedding matrix of {' and '.join(ends)} ends at {limit} tokens. A scheme "
            f"without a table reads on, for example --position_scheme t5, deberta or rope"
        )
    return asked_for


def fit_tokenizer(tokenizer: PreTrainedTokenizerBase, length: int, config: PreTrainedConfig) -> None:
    """Let a tokenizer that is saved with a model cut where the model was trained to, and not before.

    Its `model_max_length` says where pipelines cut, and from where on they warn. It is raised to the length of training,
    and never lowered for it: a model that reads 512 tokens is not to lose the rest because it was trained with 128. Where
    the model's table of absolute positions ends, it cannot read on, and that is as far as the tokenizer goes.

    Args:
        tokenizer: changed in place.
        length: tokens that training texts were cut to.
        config: the model's, with its schemes.
    """
    end = longest_sequence(config)
    reads = max(tokenizer.model_max_length, length)
    tokenizer.model_max_length = reads if end is None else min(reads, end)


def cut_nothing_by_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    """Forget how a tokenizer cut and padded last, before it is saved: the library `tokenizers` keeps that as its state.

    It would be part of tokenizer.json. transformers sets it anew in every call; others who read the file obey it, and cut
    to the length of training, or fail where one text stands alone and only the second of two was to be cut.
    """
    if getattr(tokenizer, "is_fast", False):
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()


def parse_arguments(*kinds: type, **defaults: Any) -> tuple[Any, ...]:
    """One object of each dataclass, from the command line or from a JSON file that is its only argument.

    `position_scheme` is None where it was not given. Of several processes on a machine, the first one speaks for all: from here on
    the others report errors only.
    """
    if int(os.environ.get("LOCAL_RANK", 0)):
        logging.set_verbosity_error()
    parser = ScriptParser(kinds, **{"position_scheme": None, **defaults})
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        return parser.parse_file(Path(sys.argv[1]))
    return parser.parse()


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """End the program with `error: ...` where its user made a mistake; around what happens before training only."""
    try:
        yield
    except (OSError, ValueError, TypeError, ImportError, DatasetsError, StrictDataclassError) as error:
        sys.exit("error: " + " ".join(str(error).split()))
