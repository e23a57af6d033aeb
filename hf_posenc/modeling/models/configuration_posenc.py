"""The `position_*` options: one validated mixin over the config class of each family."""

import copy
import functools
import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.utils import logging

from ..attention.window import check_window, has_both_kinds
from ..schemes.base import PositionScheme
from ..schemes.flags import (
    GLOBAL_BASE,
    GLOBAL_EVERY,
    GLOBAL_SCHEME,
    NEWEST_TABLE,
    TABLE_VERSION,
    UNPAD,
    WINDOW,
    did_you_mean,
    require,
)
from ..schemes.table import (
    ALL,
    FLAGS,
    SCHEMES,
    all_names,
    build_global_schemes,
    build_schemes,
    global_names,
    kind_of,
    scheme_names,
    sources_of,
)
from .family import Family, Sizes


logger = logging.get_logger(__name__)

# v4 spelled its two relative schemes with this key; nearly every old config.json has it, as "absolute".
LEGACY_KEY = "position_embedding_type"
LEGACY_SCHEMES = ("relative_key", "relative_key_query")

# What the names of all classes here and in the families' files begin with.
CLASS_PREFIX = "Posenc"

# Keyword by which `get_config_dict` tells `from_dict` where it has read.
READ_FROM = "_read_from"

# Options that may leave others without use.
OVERRIDES = ("position_scheme", WINDOW.name, GLOBAL_EVERY.name, GLOBAL_SCHEME.name)

# Entry of a config.json: registered scheme -> "module.Class" of the file saved with it.
SCHEME_FILES = "scheme_files"

# Configs that were found valid last, by all that this depends on.
_VALID: deque[tuple] = deque(maxlen=8)
# What Transformers sets in a config when a model is built or saved, apart from private entries.
_SET_BY_MODELS = ("architectures", "dtype")


def _edit_distance(first: str, second: str) -> int:
    """Number of insertions, deletions, substitutions and swaps of neighbours that lead from one to the other.

    Not difflib's ratio: with a cutoff that finds every second error, it takes `position_bins`, of another model's config, for one.
    """
    rows = [list(range(len(second) + 1))]
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and a == second[j - 2] and first[i - 2] == b:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


@functools.cache
def _nearest_flag(name: str, flags: tuple[str, ...]) -> str | None:
    """The option that `name` probably is a misspelling of: within two edits, or with `position` shortened."""
    for flag in flags:
        if abs(len(flag) - len(name)) <= 2 and _edit_distance(name, flag) <= 2:
            return flag
    tail = name.removeprefix("pos_")
    return f"position_{tail}" if tail != name and f"position_{tail}" in flags else None


def check_names(names, strictly: bool = True) -> None:
    """Raise ValueError for the first name that looks like a `position_*` option but is none.

    Args:
        names: keywords or config entries.
        strictly: refuse every unknown name that begins with `position_`; otherwise only probable misspellings.
    """
    for name in names:
        if name in FLAGS or name in (LEGACY_KEY, TABLE_VERSION):
            continue
        nearest = _nearest_flag(name, tuple(FLAGS))
        if nearest is not None or (strictly and name.startswith("position_")):
            hint = did_you_mean(name, FLAGS if nearest is None else [nearest], cutoff=0)
            raise ValueError(f"unknown config option {name!r}{hint} The options are {', '.join(FLAGS)}")


def legacy_scheme(entries: dict[str, Any]) -> str | None:
    """The scheme that v4's key asks for, if any."""
    return entries[LEGACY_KEY] if entries.get(LEGACY_KEY) in LEGACY_SCHEMES else None


def carries_flags(entries: dict[str, Any]) -> bool:
    """Whether a config's entries or keywords need a position scheme: an option that is given, or v4's name for a scheme."""
    return any(entries.get(flag) is not None for flag in FLAGS) or legacy_scheme(entries) is not None


def stored_flags(entries: dict[str, Any]) -> dict[str, Any]:
    """The options among the entries of a checkpoint's config.json, v4's name for a scheme included."""
    stored = {flag: entries[flag] for flag in FLAGS if entries.get(flag) is not None}
    scheme = entries.get("position_scheme") or legacy_scheme(entries)
    return stored | ({"position_scheme": scheme} if scheme else {})


def reads_buckets(flags: dict[str, Any]) -> bool:
    """Whether a model with these options has the table of `deberta` with buckets."""
    return _default_buckets(flags) is not None and flags.get("position_buckets") != 0


def _default_buckets(flags: dict[str, Any]) -> int | None:
    """The default of `position_buckets` in the scheme, of those that the options name, whose table has versions; None if none has."""
    for name in all_names(flags.get("position_scheme") or "none", flags.get(GLOBAL_SCHEME.name)):
        if getattr(SCHEMES[name], "table_has_versions", False):
            return FLAGS["position_buckets"][name].default
    return None


def table_version(entries: dict[str, Any], given: dict[str, Any] | None = None) -> int:
    """How the table of `deberta` is read in a model with these config entries, see there.

    Args:
        given: options that override those among the entries. With another number of buckets, the table is another.
    """
    if entries.get(TABLE_VERSION) is not None:
        return entries[TABLE_VERSION]
    # What was saved names the code that it was saved with.
    was_saved = CLASS_PREFIX in str(entries.get("auto_map"))
    stored = stored_flags(entries)
    if not was_saved or not reads_buckets(stored):
        return NEWEST_TABLE
    buckets = stored.get("position_buckets", _default_buckets(stored))
    return 1 if (given or {}).get("position_buckets", buckets) == buckets else NEWEST_TABLE


def version_to_read(stored: int, given: int | None) -> int:
    """How the table of `deberta` is read, by what is stored and what is given.

    Raises:
        ValueError: as it never was: rows that were not trained would be read.
    """
    if stored == 1 and given == NEWEST_TABLE:
        raise ValueError(
            f"{TABLE_VERSION}={given}: this checkpoint was saved by hf_posenc 0.3.0 or earlier, which did not read row 0 of the "
            f"relative position embeddings: leave {TABLE_VERSION} out"
        )
    return stored if given is None else given


def version_beside_weights(config: "PositionConfigMixin") -> int:
    """How the table of `deberta` is read by the model that a model's weights are from; by the config's own where nothing tells."""
    own, flags = config.position_table_version or NEWEST_TABLE, stored_flags(vars(config))
    if not config.name_or_path or config.name_or_path == config._read_from or not reads_buckets(flags):
        return own
    try:
        entries, _ = config.get_config_dict(config.name_or_path, local_files_only=True)
    except (OSError, ValueError):
        return own
    return table_version(entries, flags) if reads_buckets(stored_flags(entries)) else own


def check_version(version: Any) -> None:
    """Raise TypeError or ValueError for what no table has as its version."""
    if version is not None:
        possible = f"1 or {NEWEST_TABLE}"
        require(TABLE_VERSION, version, isinstance(version, int), version in (1, NEWEST_TABLE), possible)


def flags_in_use(position_scheme: str, position_global_scheme: str | None = None) -> set[str]:
    """The options that apply to a composite of schemes, and to that of global layers if it is another."""
    names = {ALL, *all_names(position_scheme, position_global_scheme)}
    in_use = {"position_scheme", *(flag for flag, users in FLAGS.items() if names & {*users})}
    if not {*global_names(position_scheme, position_global_scheme)} & {*FLAGS.get(GLOBAL_BASE.name, ())}:
        in_use.discard(GLOBAL_BASE.name)
    return in_use


def override_flags(entries: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Config entries with options overridden; options that a change of schemes or layers leaves without use become None.

    What is set to None is logged, once. Raises ValueError or TypeError for a wrong value of [`OVERRIDES`].
    """
    new = {flag: given[flag] for flag in OVERRIDES if given.get(flag) is not None and given[flag] != entries.get(flag)}
    changed = {**entries, **given}
    if not new:
        return changed
    for flag in OVERRIDES:
        if changed.get(flag) is not None:
            check_flag(flag, changed[flag])
    if not has_both_kinds(SimpleNamespace(**changed)):
        changed |= dict.fromkeys({GLOBAL_SCHEME.name, GLOBAL_BASE.name} & {*entries} - {*given})
    if changed.get("position_scheme") is not None:
        in_use = flags_in_use(changed["position_scheme"], changed.get(GLOBAL_SCHEME.name))
        changed |= dict.fromkeys(
            flag for flag in FLAGS if flag in entries and flag not in in_use and flag not in given
        )
    useless = sorted(flag for flag in FLAGS if entries.get(flag) is not None and changed.get(flag) is None)
    if useless:
        told = ", ".join(f"{flag}={value!r}" for flag, value in new.items())
        logger.warning_once(f"{told} has no use for the stored {', '.join(useless)}: dropped.")
    return changed


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError or ValueError, naming the option, for a value that it cannot have in any scheme."""
    if name == "position_scheme":
        scheme_names(value)
    else:
        kind_of(name).check(name, value)


def _annotation(name: str) -> Any:
    return str if name == "position_scheme" else kind_of(name).annotation


def check_native_flags(config: "PositionConfigMixin") -> None:
    """Raise ValueError for an option that does not fit the parameters that an original checkpoint has."""
    native = {*scheme_names(config.family.native_scheme)} & {*config.schemes}
    for flag, value in config.family.native_flags.items():
        given = getattr(config, flag)
        users = [name for name in native if name in FLAGS[flag]]
        if users and given is not None and given != value:
            raise ValueError(
                f"{flag}={given!r} does not fit the {' and '.join(users)} that {config.stock_model_type} checkpoints were trained "
                f"with, which has {value!r}: leave the option out, or leave {' and '.join(users)} out of position_scheme"
            )


# The options as fields of a config.
PositionFlags = make_dataclass(
    "PositionFlags",
    [(name, _annotation(name) | None, field(default=None)) for name in FLAGS],
    kw_only=True,
    repr=False,
)


@dataclass(kw_only=True, repr=False)
class PositionConfigMixin(PositionFlags):
    """Adds the config options of position schemes to the config class of a family.

    An option that is not given is None, and its scheme uses its default. Options are checked when the config is made, and again when a model
    is built from it. The options of single schemes are not listed here: see `hf-posenc schemes`.

    Attributes:
        position_scheme: the name of a scheme, or several joined by "+". At most one of them may be combined with the token embeddings
            (`absolute`, `sinusoidal`, `none`). Default: the scheme of the family's checkpoints.
        position_window: width of the window of local layers, in tokens. A query there attends to keys up to half of it away. Default: no local
            layers.
        position_global_every: with `position_window`, layers 0, n, 2n, ... are global. Default: 3.
        position_global_scheme: with `position_window`, the schemes inside the attention of global layers. Default: those of
            `position_scheme`.
        position_global_base: with `position_window`, `position_base` of global layers. Default: `position_base`.
        unpad: False turns padding-free layers off. It does not make a model with a position scheme by itself. Default: True.
        position_table_version: which row of the relative position embeddings of `deberta` each distance uses, if it has buckets: 2 in new
            models, 1 in models that older versions saved. It is set for you.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is misspelled, out of range, or not used by the chosen schemes.
    """

    unpad: bool = UNPAD.default
    position_table_version: int | None = None

    # The family's description; of it the original model type, the file of the classes, and which of them serves each Auto class.
    family: ClassVar[Family]
    stock_model_type: ClassVar[str]
    modeling_file: ClassVar[str]
    auto_classes: ClassVar[dict[str, str]]
    # Where the config was read from, a folder or a name on the Hub, and the options that were stored there. Never saved.
    _read_from: ClassVar[str | None] = None
    _stored_flags: ClassVar[dict[str, Any]] = {}
    # Writes the code that `auto_map` names, given a config and the folder that it is saved in; None where this file is such code itself.
    write_code: ClassVar[Callable[["PositionConfigMixin", str | os.PathLike], None] | None] = None

    def __init_subclass__(cls, **kwargs):
        if "family" in vars(cls):
            family = cls.family
            cls.stock_model_type, cls.modeling_file = family.model_type, family.modeling_file
            cls.auto_classes = family.auto_classes
        super().__init_subclass__(**kwargs)

    def __post_init__(self, **kwargs):
        check_names(kwargs)
        # A stored model type, an original one perhaps, must not end up on the instance.
        kwargs.pop("model_type", None)
        if self.position_scheme is None:
            self.position_scheme = legacy_scheme(kwargs) or self.family.native_scheme
        kwargs.pop(LEGACY_KEY, None)
        kwargs.pop(SCHEME_FILES, None)
        if table_version({**kwargs, **vars(self)}) == 1:
            self.position_table_version = 1
        super().__post_init__(**kwargs)
        self.check_positions()

    def __getattr__(self, name: str) -> None:
        """An option of a registered scheme that was not given is None, as all others are."""
        if name in FLAGS:
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def check_positions(self) -> None:
        """Validate every option by itself, with its scheme, and with the model's sizes; see the class for what is raised.

        Loading and saving ask for it several times. A config with the same entries and schemes is validated once.
        """
        state = self._state()
        if state is not None and state in _VALID:
            return
        check_names(self.__dict__)
        for flag in FLAGS:
            value = getattr(self, flag)
            if value is not None or flag == "position_scheme":
                check_flag(flag, value)
        UNPAD.kind.check(UNPAD.name, self.unpad)
        check_version(self.position_table_version)
        check_window(self)
        in_use = flags_in_use(self.position_scheme, self.position_global_scheme)
        for flag in FLAGS:
            if flag not in in_use and getattr(self, flag) is not None:
                raise ValueError(self._explain_useless(flag))
        _, schemes = build_schemes(self)
        build_global_schemes(self, schemes)
        if state is not None:
            _VALID.append(state)

    def _state(self) -> tuple | None:
        """All that validation depends on; None if an entry is not plain data, so that nobody knows whether it has changed."""
        entries = {
            name: v for name, v in vars(self).items() if not name.startswith("_") and name not in _SET_BY_MODELS
        }
        try:
            return type(self), *SCHEMES.values(), json.dumps(entries)
        except (TypeError, ValueError):
            return None

    def _explain_useless(self, flag: str) -> str:
        start = f"{flag}={getattr(self, flag)!r} has no use with position_scheme={self.position_scheme!r}"
        if self.position_global_scheme is not None:
            start += f" and {GLOBAL_SCHEME.name}={self.position_global_scheme!r}"
        where = " in global layers" if flag == GLOBAL_BASE.name else ""
        return f"{start}: it belongs to {', '.join(FLAGS[flag])}{where}"

    @property
    def schemes(self) -> dict[str, type[PositionScheme]]:
        """The schemes of the model by name: those that `position_scheme` names, in its order, and what only global layers have."""
        return {name: SCHEMES[name] for name in all_names(self.position_scheme, self.position_global_scheme)}

    @property
    def schemes_of_layer(self) -> dict[str, type[PositionScheme]]:
        """Those that `position_scheme` names. A scheme is built with a config in which they are the schemes of its layers."""
        return {name: SCHEMES[name] for name in scheme_names(self.position_scheme)}

    @property
    def first_position(self) -> int:
        """Position id of a sequence's first token."""
        return self.family.first_position(self)

    @property
    def sizes(self) -> Sizes:
        """Sizes by the names that schemes know them by."""
        return self.family.sizes(self)

    @property
    def trained_schemes(self) -> set[str]:
        """Names of the schemes that the weights of a loaded config were trained with: the family's, if nothing says others."""
        stored = self._stored_flags
        return {*all_names(stored.get("position_scheme") or self.family.native_scheme, stored.get(GLOBAL_SCHEME.name))}

    def flags_beside_weights(self) -> dict[str, Any] | None:
        """The options in the config.json where a model's weights are from, a folder or the cache of the Hub.

        `name_or_path` is that folder once transformers has read them. None where there is no config, or it is of another family.
        """
        if self.name_or_path and self.name_or_path == self._read_from:
            return self._stored_flags
        if not self.name_or_path:
            return None
        try:
            entries, _ = self.get_config_dict(self.name_or_path, local_files_only=True)
        except (OSError, ValueError):
            return None
        return stored_flags(entries) if entries.get("model_type") == self.model_type else None

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs):
        """As in transformers; an original checkpoint of the family is one to read, which transformers would warn of.

        `from_dict` is told where it was read.
        """
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        kwargs[READ_FROM] = str(pretrained_model_name_or_path)
        if config_dict.get("model_type") == cls.stock_model_type:
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers; options among the keywords override stored ones before anything is validated.

        Where `position_scheme` is overridden, stored options that the new schemes do not use are dropped, with one log line.
        """
        stored = stored_flags(config_dict)
        place = kwargs.pop(READ_FROM, None) or kwargs.get("name_or_path")  # which Auto classes give
        given = {flag: value for flag in FLAGS if (value := kwargs.pop(flag, None)) is not None}
        check_names(kwargs)
        if legacy_scheme(kwargs) is not None:
            given.setdefault("position_scheme", legacy_scheme(kwargs))
        kwargs.pop(LEGACY_KEY, None)
        version = version_to_read(table_version(config_dict, given), kwargs.pop(TABLE_VERSION, None))
        result = super().from_dict({**override_flags(config_dict, given), TABLE_VERSION: version}, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        if not stored:
            check_native_flags(config)
        # They tell a loaded model which schemes the weights of this config were trained with.
        config._stored_flags = stored
        config._read_from = str(place) if place else None
        return result

    @classmethod
    def adopt(cls, config, **flags):
        """Any config of the family as this class, validated, with `flags` set: for options set by hand or given with it.

        An original config becomes one of this class in place, so that what else holds it (a class around the model, the
        config of an encoder-decoder) saves what the model is. It is copied first if `flags` are given, or if it is of a
        class that has nothing to do with this one. One that is refused stays as it was.

        Raises:
            TypeError: not a config, or as for the class.
            ValueError: as for the class.
        """
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a {cls.__name__}, got {config!r} of type {type(config).__name__}")
        check_names(flags)
        given = {flag: value for flag, value in flags.items() if value is not None}
        if given or not (isinstance(config, cls) or issubclass(cls, type(config))):
            config = copy.deepcopy(config)
        if isinstance(config, cls):
            vars(config).update(override_flags(vars(config), given))
            config.check_positions()
            return config
        adopted = copy.copy(config)
        adopted.__class__ = cls
        entries = vars(adopted)
        entries.pop("model_type", None)
        entries.update({flag: entries.get(flag) for flag in FLAGS})
        if entries["position_scheme"] is None:
            entries["position_scheme"] = legacy_scheme(entries) or cls.family.native_scheme
        entries.pop(LEGACY_KEY, None)
        if table_version(entries) == 1:
            entries[TABLE_VERSION] = 1
        entries.update(override_flags(entries, given))
        adopted.check_positions()
        # Only what is valid changes the config of the caller.
        config.__class__ = cls
        vars(config).clear()
        vars(config).update(entries)
        return config

    def to_dict(self) -> dict[str, Any]:
        """As in transformers; options that were not given are left out, and `auto_map` names the code to load with."""
        output = super().to_dict()
        output.pop("_read_from", None)
        output.pop("_stored_flags", None)
        for flag in FLAGS:
            if output.get(flag) is None:
                output.pop(flag, None)
        if output.get(UNPAD.name) == UNPAD.default:
            output.pop(UNPAD.name)
        if output.pop(TABLE_VERSION, None) != 1 and reads_buckets(output):
            output[TABLE_VERSION] = NEWEST_TABLE
        if files := sources_of(self.schemes):
            output[SCHEME_FILES] = {
                name: f"{source.module}.{SCHEMES[name].__qualname__}" for name, source in files.items()
            }
        module = Path(self.modeling_file).stem
        output["auto_map"] = {"AutoConfig": f"{module}.{type(self).__name__}"}
        output["auto_map"].update({auto: f"{module}.{name}" for auto, name in self.auto_classes.items()})
        return output

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """As in transformers; the code that `auto_map` names is written next to the config."""
        self.check_positions()
        if self.write_code is not None:
            self.write_code(self, save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
