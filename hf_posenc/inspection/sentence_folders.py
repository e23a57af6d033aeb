"""Folders of sentence-transformers: a transformer, and sub-folders for the modules that make embeddings of its output.

`modules.json` names them in order. The transformer's `path` is the folder itself ("") since sentence-transformers 2; each of
the others (pooling, dense, ...) has a sub-folder, which is part of the model. Checked against sentence-transformers 6.2.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME


MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
# What its transformer is given. The file's name tells the kind of model.
TRANSFORMER_SETTINGS = "sentence_*_config.json"
MAX_SEQ_LENGTH = "max_seq_length"
# Other settings of it that cut texts off, all of them or those of a task.
OTHER_LIMITS = ("query_length", "document_length", "processing_kwargs")
# The module that `in_chunks` puts first, as `modules.json` names it.
CHUNKED = "hf_posenc.sentence.ChunkedTransformer"
# How a text's vector is made of its tokens', by the flags of older folders.
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The Hub's name for the task of a class, where sentence-transformers' own cards have one for all its models.
PIPELINE_TAGS = {
    "SentenceTransformer": "sentence-similarity",
    "SparseEncoder": "feature-extraction",
    "MultiVectorEncoder": "feature-extraction",
}
# What modules save. Not: pickles, and code.
MODULE_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle"}
# Modules with weights: without them, nobody could load the model.
WEIGHTED = {
    *("Dense", "LayerNorm", "WeightedLayerPooling", "LSTM", "CNN", "WordEmbeddings", "WordWeights"),
    *("SparseAutoEncoder", "SparseStaticEmbedding"),
}
# Up to version 5 these saved nothing, and a folder without files does not survive git.
WITHOUT_FILES = {"Normalize"}


def model_class(folder: Path) -> str | None:
    """The class of sentence-transformers that loads a folder, such as "SentenceTransformer"; None if it is none of its folders."""
    if not (folder / MODULES).is_file():
        return None
    settings = _read(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    name = settings.get("model_type") if isinstance(settings, dict) else None
    return name if isinstance(name, str) and name.isidentifier() else "SentenceTransformer"


def module_paths(modules_file: Path) -> list[str]:
    """The sub-folders that a `modules.json` names, as they are written there.

    Raises:
        ValueError: it is not what sentence-transformers writes.
    """
    return [path for path, _ in _modules(modules_file) if path]


def module_files(folder: Path) -> dict[str, Path]:
    """What is shared of the sub-folders that `modules.json` names, by path in the repository; nothing if there is none.

    Raises:
        FileNotFoundError: a sub-folder, or the weights in it, are missing.
        ValueError: a path or a link leads out of the folder, or what is there would not load from the Hub as safetensors.
    """
    if not (folder / MODULES).is_file():
        return {}
    files: dict[str, Path] = {}
    for path, module in _modules(folder / MODULES):
        code = folder / f"{module.partition('.')[0]}.py"
        if code.is_file():
            raise ValueError(
                f"{folder / MODULES} names the module {module}, whose code is {code.name}: hf-posenc push uploads no "
                "custom modules; push this folder with `hf upload`"
            )
        if path:
            files |= _files_of(folder, path, module.rpartition(".")[2])
    return files


def module_settings(folder: Path) -> list[Path]:
    """The config files of the modules behind the transformer; none if it is no folder of sentence-transformers."""
    if not (folder / MODULES).is_file():
        return []
    files = [folder / path / CONFIG_NAME for path in module_paths(folder / MODULES)]
    return [file for file in files if file.is_file()]


def pooling(folder: Path) -> str:
    """The ways in which a text's vector is made of its tokens', joined by "+": "mean", "cls", "lasttoken"...; "mean" if it says none of them."""
    modes = [mode for file in module_settings(folder) for mode in _pooling_modes(_read(file))]
    return "+".join(modes or ["mean"])


def _pooling_modes(settings: Any) -> list[str]:
    """What the settings of a module say of it, in either form."""
    if not isinstance(settings, dict):
        return []
    given = settings.get("pooling_mode") or [mode for flag, mode in POOLING_FLAGS.items() if settings.get(flag)]
    modes = given.split("+") if isinstance(given, str) else given
    return [mode for mode in POOLING_FLAGS.values() if mode in modes] if isinstance(modes, list) else []


def text_length(folder: Path) -> int | None:
    """The number of tokens that texts are cut at, where the folder says one."""
    return _transformer_setting(folder, MAX_SEQ_LENGTH)


def check_only_limit(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if texts are cut off by [`OTHER_LIMITS`]: a greater maximum sequence length would change nothing then."""
    for name, length in other_limits(settings).items():
        raise ValueError(
            f"the model cuts texts off at {length} tokens by {name}, whatever its maximum sequence length: remove this setting of its "
            "Transformer module, and save the model again"
        )


def other_limits(settings: Mapping[str, Any]) -> dict[str, int]:
    """The lengths that texts are cut off at by [`OTHER_LIMITS`], of each the lowest."""
    found = {}
    for name in OTHER_LIMITS:
        value = settings.get(name)
        kinds = value.values() if isinstance(value, Mapping) else [{"max_length": value}]
        lengths = [kind["max_length"] for kind in kinds if isinstance(kind, Mapping) and kind.get("max_length")]
        found |= {name: min(lengths)} if lengths else {}
    return found


def check_only_limit_of(folder: Path) -> None:
    """[`check_only_limit`] of a folder; of one that is none of sentence-transformers nothing is asked."""
    for entries in map(_read, sorted(folder.glob(TRANSFORMER_SETTINGS))):
        if isinstance(entries, dict):
            check_only_limit(entries)


def task_lengths(folder: Path) -> dict[str, int]:
    """The lengths that texts of a task are cut at whatever the maximum sequence length is, by the setting that says so."""
    entries = map(_read, sorted(folder.glob(TRANSFORMER_SETTINGS)))
    return {
        name: length for found in entries if isinstance(found, dict) for name, length in other_limits(found).items()
    }


def chunk_size(folder: Path) -> int | None:
    """The number of tokens of a chunk, where texts are read in chunks by hf_posenc; None where they are not."""
    is_chunked = (folder / MODULES).is_file() and _modules(folder / MODULES)[0][1] == CHUNKED
    return _transformer_setting(folder, "chunk_size") if is_chunked else None


def _transformer_setting(folder: Path, name: str) -> Any:
    """What the transformer is given under a name; None where that is nothing."""
    entries = map(_read, sorted(folder.glob(TRANSFORMER_SETTINGS)))
    return next((found[name] for found in entries if isinstance(found, dict) and found.get(name)), None)


def cut_at(length: int, folder: Path) -> None:
    """Texts are cut at so many tokens, where the folder says a number."""
    for settings in folder.glob(TRANSFORMER_SETTINGS):
        entries = json.loads(settings.read_text(encoding="utf-8"))
        if entries.get(MAX_SEQ_LENGTH):
            settings.write_text(json.dumps(entries | {MAX_SEQ_LENGTH: length}, indent=2), encoding="utf-8")


def check_inside(folder: Path, files: Iterable[Path]) -> None:
    """Raise ValueError for a file that is a link out of a folder; in the cache of the Hub, all files are links to its blobs."""
    places = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        places.append((folder.absolute().parent.parent / "blobs").resolve())
    for file in files:
        if not any(file.resolve().is_relative_to(place) for place in places):
            raise ValueError(
                f"{file} is a link that leads out of the folder: put the file itself there, or remove the link"
            )


def _files_of(folder: Path, path: str, module: str) -> dict[str, Path]:
    place = folder / path
    outside = PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts
    if outside or not place.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder / MODULES} names {path!r}, which leads out of the folder")
    if not place.is_dir():
        if module in WITHOUT_FILES:
            return {}
        raise FileNotFoundError(f"{folder / MODULES} names {path}, which does not exist: save the model again")
    files = sorted(file for file in place.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(place)))
    found = {file for file in files if any(file.match(pattern) for pattern in MODULE_FILES)}
    check_inside(folder, found)
    for file in sorted(found):
        if file.name == CONFIG_NAME and _is_transformer(file):
            raise ValueError(
                f"{folder / MODULES} has the transformer in {file.parent}, where Transformers would not find its code: load the folder with "
                "sentence-transformers and save it again, which puts it into the folder itself"
            )
    for file in files:
        if file.suffix in PICKLES and file.with_name(SAFE_WEIGHTS_NAME) not in found:
            raise ValueError(
                f"{file} is a pickle, which is not uploaded: load the folder with sentence-transformers and save it again, which "
                "writes safetensors"
            )
    if module in WEIGHTED and place / SAFE_WEIGHTS_NAME not in found:
        raise FileNotFoundError(f"{place / SAFE_WEIGHTS_NAME} is missing: save the model again")
    if not found and module not in WITHOUT_FILES:
        raise FileNotFoundError(f"{place} has no settings: save the model again")
    return {file.relative_to(folder).as_posix(): file for file in found}


def _is_hidden(path: Path) -> bool:
    """Whether a file, or a folder that it is in, is one that tools keep for themselves."""
    return any(part.startswith(".") for part in path.parts)


def _is_transformer(config: Path) -> bool:
    entries = _read(config)
    return isinstance(entries, dict) and "model_type" in entries


def _modules(modules_file: Path) -> list[tuple[str, str]]:
    """Path and type of every module."""
    entries = _read(modules_file)
    try:
        if not isinstance(entries, list) or not entries:
            raise TypeError
        return [(_path(entry["path"]), str(entry["type"])) for entry in entries]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{modules_file} must be a list of modules with 'path' and 'type'") from error


def _path(path: str) -> str:
    """Without a dot or a slash too many; empty where it is the folder itself."""
    if not isinstance(path, str):
        raise TypeError
    return "" if PurePosixPath(path) == PurePosixPath() else str(PurePosixPath(path))


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
