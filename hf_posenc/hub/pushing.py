"""Sharing: a model with a position scheme, its adapter, or a model exported from it, pushed to the Hub so that anyone can load it."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from ..change_scheme import EXPORTED
from ..inspection import adapter_base, check_named, load_config, read_config, read_entries
from ..inspection.sentence_folders import (
    MODULES,
    SETTINGS,
    TRANSFORMER_SETTINGS,
    check_inside,
    chunk_size,
    model_class,
    module_files,
    module_paths,
)
from ..modeling.models.configuration_posenc import SCHEME_FILES, PositionConfigMixin
from ..variants import CONFIG_CLASSES


CARD = "README.md"
# An index of shards of a variant, such as fp16, has its name in the middle.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.safetensors.index.*.json")
# What belongs to a model: weights, settings, tokenizers, the card and the file of results that it was made of. Not: what else
# a run leaves in its folder (optimizers, checkpoints, metrics, predictions, data), and anything pickled.
SHARED = (
    *(*WEIGHTS, CONFIG_NAME, "generation_config.json", ADAPTER_CONFIG_NAME),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "*.model", "*.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "dict.txt", "bpe.codes"),
    *(MODULES, SETTINGS, TRANSFORMER_SETTINGS),
    *(CARD, "LICENSE*", "NOTICE*", "results.json"),
)
# What a push replaces: of the weights and the code that are there already, nothing else may stay.
REPLACED = (*WEIGHTS, "*.py")
# Next to these the other kind, model or adapter, would be loaded.
REPLACED_CONFIGS = {CONFIG_NAME, ADAPTER_CONFIG_NAME}

# The common base of the client's errors, of answers and of connections; its module differs between versions.
HTTPError = HfHubHTTPError.__bases__[0]
ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token with write access",
    403: "the token has no write access to this repository",
    404: "there is no such repository or revision",
    409: "it already exists",
    412: "somebody else pushed in the meantime: look at the repository, and try again",
}


class HubError(OSError):
    """The Hub refused a request or could not be reached. The message says why and what to do."""


@contextmanager
def _explained(action: str) -> Iterator[None]:
    """Turn the client's errors, many lines long and of many types, into a [`HubError`] of one line."""
    try:
        yield
    except (LookupError, json.JSONDecodeError) as error:
        raise HubError(
            f"{action} failed: the server does not answer like a Hub ({type(error).__name__}: {error}); try again"
        ) from error
    # Uploads of large files raise RuntimeErrors from what went wrong.
    except (HTTPError, OSError, RuntimeError) as error:
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        reason = getattr(cause, "server_message", None) or str(cause) or type(cause).__name__
        number = f" ({status})" if status else ""
        advice = ADVICE.get(status, "the request is invalid" if status and status < 429 else "try again")
        raise HubError(f"{action} failed: {' '.join(reason.split())}{number}; {advice}") from error


def check_weights(folder: Path, name: str = SAFE_WEIGHTS_NAME) -> None:
    """Raise OSError or ValueError unless the folder has all its weights, whole, as safetensors."""
    names: dict[str, set[str]] = {name: set()}
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if name == SAFE_WEIGHTS_NAME and (folder / name).is_file() and index.is_file():
        if any((folder / shard).is_file() for shard in indexed_tensors(index)):
            raise ValueError(
                f"{folder} has {name}, which Transformers loads, and shards, which {index.name} names: one of them is from an earlier save; "
                "remove that one"
            )
    if name == SAFE_WEIGHTS_NAME and not (folder / name).is_file() and index.is_file():
        names = indexed_tensors(index)
    for file, tensors in sorted(names.items()):
        if not (folder / file).is_file():
            raise FileNotFoundError(
                f"{folder / file} is missing: save the model with save_pretrained, which writes safetensors"
            )
        if lost := tensors - check_whole(folder / file):
            raise ValueError(
                f"{folder / file} lacks {min(lost)}, which {index.name} lists there: save the model again"
            )


def indexed_tensors(index: Path) -> dict[str, set[str]]:
    """Names of tensors by the shards that an index has them in.

    Raises:
        ValueError: it is no index, or has shards in another folder.
    """
    names: dict[str, set[str]] = {}
    try:
        for tensor, shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            names.setdefault(shard, set()).add(tensor)
        fits = bool(names) and all(Path(shard).name == shard and shard.endswith(".safetensors") for shard in names)
    except (ValueError, LookupError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise ValueError(
            f"{index} must name shards in the same folder, as save_pretrained writes them: save the model again"
        )
    return names


def check_whole(file: Path) -> set[str]:
    """The names of the tensors in a file of safetensors; ValueError if it is cut off or otherwise damaged."""
    try:
        with safe_open(file, framework="pt") as weights:
            return {*weights.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): save the model again") from error


def check_adapter(folder: Path) -> None:
    """Raise OSError or ValueError unless an adapter is whole and names a base model that others can load."""
    check_weights(folder, ADAPTER_SAFE_WEIGHTS_NAME)
    base = adapter_base(folder / ADAPTER_CONFIG_NAME)
    if not _is_on_hub(base):
        raise ValueError(
            f"the adapter's base model, {base!r}, is not on the Hub: push the base model first, and name its repository as "
            f"base_model_name_or_path in {folder / ADAPTER_CONFIG_NAME}"
        )


def _is_on_hub(base: Any) -> bool:
    """Whether what an adapter names as its base can be a repository, and is no folder of this machine."""
    try:
        validate_repo_id(base)
    except HFValidationError:
        return False
    # A name that ends in a line break passes the check of huggingface_hub 1.20.
    return base == base.strip() and not Path(base).exists()


def shared_files(folder: Path, written: Path, repo_id: str) -> dict[str, Path]:
    """What is pushed of a folder, by path in the repository.

    A model's config and code are written again to `written`, so that they fit each other and this version; so is a card
    if the folder has none. The files of custom schemes are those of the folder. A folder of sentence-transformers also has the sub-folders of its modules.

    Raises:
        OSError, ValueError: the folder holds no complete model with a position scheme and no complete adapter, or links that lead out of it.
    """
    found = {path for pattern in SHARED for path in folder.glob(pattern) if path.is_file()}
    files = {path.name: path for path in sorted(found) if not path.name.startswith(".")}
    check_inside(folder, files.values())
    files |= module_files(folder)
    for file in files.values():
        if file.suffix == ".safetensors":
            check_whole(file)
    if (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / CONFIG_NAME).is_file():
        check_adapter(folder)
        return files
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if _is_exported(read_entries(str(folder))):
        check_weights(folder)
        return files
    config = load_config(str(folder))
    if not isinstance(config, PositionConfigMixin):
        raise ValueError(
            f"{folder} holds a {config.model_type} model without a position scheme: push it with push_to_hub"
        )
    check_weights(folder)
    config.save_pretrained(written)
    if CARD not in files:
        from .cards import make_card  # only here: it brings the template engine along

        sentences = {"sentence_class": model_class(folder), "chunk_size": chunk_size(folder)}
        make_card(config, repo_id=repo_id, **sentences).save(written / CARD)
    return {**files, **{path.name: path for path in written.iterdir()}, **scheme_files(folder, config)}


def _is_exported(entries: dict[str, Any]) -> bool:
    """Whether a config is what `to_stock` made; one with a position scheme may have the entry from a model that it was loaded from."""
    cls = CONFIG_CLASSES.get(str(entries.get("model_type")))
    has_scheme = cls is not None and issubclass(cls, PositionConfigMixin)
    return not has_scheme and isinstance(entries.get(EXPORTED), dict)


def scheme_files(folder: Path, config: PositionConfigMixin) -> dict[str, Path]:
    """The files of custom schemes that were saved with a model, by name: the registered files may have changed since.

    Raises:
        ValueError: a scheme is registered from a file of another name, or one is a link out of the folder.
    """
    there = read_config(str(folder)).get(SCHEME_FILES)
    there = there if isinstance(there, dict) else {}
    files = {}
    for name, reference in config.to_dict().get(SCHEME_FILES, {}).items():
        if there.get(name, reference) != reference:
            raise ValueError(
                f"{folder} has position_scheme {name!r} as {there[name]}, but it is registered as {reference}: register the file that the "
                "model was saved with"
            )
        file = folder / f"{reference.rpartition('.')[0]}.py"
        if file.is_file():
            files[file.name] = file
    check_inside(folder, files.values())
    return files


def outdated_files(present: list[str], files: Iterable[str], module_folders: Iterable[str]) -> list[str]:
    """What a push removes of what is there.

    Weights, code and configs of a model or an adapter other than those that are pushed, and all else in the folders of modules.
    """
    folders = tuple(f"{folder}/" for folder in module_folders)
    old = [name for name in present if name.startswith(folders) or ("/" not in name and _is_replaced(name))]
    return sorted({*old} - {*files})


def _is_replaced(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in REPLACED) or name in REPLACED_CONFIGS


def _module_folders(api: HfApi, repo_id: str, revision: str, files: dict[str, Path], present: list[str]) -> set[str]:
    """The sub-folders of modules that a push brings, and those of the `modules.json` that it replaces."""
    if MODULES not in files:
        return set()
    folders = {*module_paths(files[MODULES])}
    if MODULES in present:
        with tempfile.TemporaryDirectory() as temporary:
            old = api.hf_hub_download(repo_id, MODULES, revision=revision, local_dir=temporary)
            try:
                folders |= {*module_paths(Path(old))}
            except ValueError:  # broken before, so nothing was read from any folder
                pass
    return folders


def _addition(name: str, path: Path) -> CommitOperationAdd:
    """A file as it is now: weights go by their digest, so that others are refused, and all else is read at once."""
    return CommitOperationAdd(name, str(path) if path.suffix == ".safetensors" else path.read_bytes())


def _check_is_not_base(files: dict[str, Path], repo_id: str, revision: str | None) -> None:
    """Raise ValueError for an adapter that would replace the weights of its base."""
    if CONFIG_NAME in files or revision not in (None, "main"):
        return
    if adapter_base(files[ADAPTER_CONFIG_NAME]) == repo_id:
        raise ValueError(
            f"{repo_id} is the adapter's base model, whose weights the adapter would replace: push to another repository"
        )


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    exist_ok: bool = True,
    api: HfApi | None = None,
) -> str:
    """Push a saved model with a position scheme, an adapter of one, or what `hf-posenc export stock` made of one, in a single commit.

    Not what it made of a model with the original positions of its family, which is an original model: `hf upload` pushes it.

    The repository is created if it does not exist. Old weights and code that are not part of this push are removed, because Transformers
    would load an old `model.safetensors` instead of new shards, and an adapter instead of a model. Old files in the sub-folders of
    sentence-transformers' modules are removed too.

    Args:
        folder: a folder that `save_pretrained`, a `Trainer` or sentence-transformers wrote. Only the files of the model are uploaded:
            safetensors, configs, tokenizer, code, card, license and `results.json`.
        repo_id: the repository, such as "me/minilm-t5". Without a namespace, it belongs to the token's owner.
        private: visibility of a new repository. With True, an existing public repository is refused.
        revision: a branch, which is created if it does not exist.
        message: the commit message.
        exist_ok: allow pushing to an existing repository.
        api: the client to push with. Default: one that reads HF_ENDPOINT, and HF_TOKEN or the saved login.

    Returns:
        The URL of the commit.

    Raises:
        FileNotFoundError: the folder has no complete model with a position scheme and no complete adapter. Nothing was uploaded.
        ValueError: the same, or the repository cannot take this push: it is public and `private` is True, or it is the base model of the
            adapter. Nothing was uploaded.
        HubError: the Hub refused the push or could not be reached, or somebody else pushed in the meantime.
    """
    check_named(folder, "the folder to push")
    api = api or HfApi(library_name="hf_posenc")
    with tempfile.TemporaryDirectory() as temporary:
        files = shared_files(Path(folder), Path(temporary), repo_id)
        additions = {name: _addition(name, path) for name, path in files.items()}
        with _explained(f"pushing {folder} to {repo_id}"):
            repo_id = api.create_repo(repo_id, private=private, exist_ok=exist_ok).repo_id
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            there = api.repo_info(repo_id, revision=revision)
            if private and not there.private:
                raise ValueError(
                    f"{repo_id} is already public: make it private first, or push without private=True (--private)"
                )
            _check_is_not_base(files, repo_id, revision)
            present = api.list_repo_files(repo_id, revision=there.sha)
            if CARD in present and not (Path(folder) / CARD).is_file():
                additions.pop(CARD, None)  # that of the repository knows more than one made of the config
            folders = _module_folders(api, repo_id, there.sha, files, present)
            added = [addition for _, addition in sorted(additions.items())]
            removed = [CommitOperationDelete(name) for name in outdated_files(present, additions, folders)]
            # A .gitignore that is there would have the client leave out what it names, without a word.
            ignore = "# nothing\n"
            api.preupload_lfs_files(repo_id, added, revision=revision, free_memory=False, gitignore_content=ignore)
            commit = api.create_commit(
                repo_id,
                added + removed,
                commit_message=message or "Push with hf_posenc",
                revision=revision,
                parent_commit=there.sha,
            )
    return commit.commit_url
