"""Sharing: a saved variant, or an adapter of one, pushed to the Hub in a form that anyone can load."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from .inspection import load_config
from .modeling.configuration_posenc import PositionConfigMixin
from .sentence_folders import MODULES, SETTINGS, model_class, module_files, module_paths


CARD = "README.md"
# What belongs to a model: weights, settings, tokenizers, the card and the file of results that it was made of. Not: what else
# a run leaves in its folder (optimizers, checkpoints, metrics, predictions, data), and anything pickled.
SHARED = (
    *("*.safetensors", "*.safetensors.index.json", CONFIG_NAME, "generation_config.json", ADAPTER_CONFIG_NAME),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "*.model", "*.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "dict.txt", "bpe.codes"),
    *(MODULES, SETTINGS, "sentence_*_config.json"),
    *(CARD, "LICENSE*", "NOTICE*", "results.json"),
)
# What a push replaces: of the weights and the code that are there already, nothing else may stay.
REPLACED = (".safetensors", ".safetensors.index.json", ".py")

# The common base of the client's errors, of answers and of connections; its module differs between versions.
HTTPError = HfHubHTTPError.__bases__[0]
ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
    403: "the token may not write there",
    404: "there is no such repository or revision",
    409: "it exists already",
}


class HubError(OSError):
    """The Hub refused, or was not reached; says why and what to do."""


@contextmanager
def _explained(action: str) -> Iterator[None]:
    """Turn the client's errors, many lines long and of many types, into a [`HubError`] of one line."""
    try:
        yield
    # Uploads of large files raise RuntimeErrors from what went wrong.
    except (HTTPError, OSError, RuntimeError) as error:
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        reason = getattr(cause, "server_message", None) or str(cause) or type(cause).__name__
        number = f" ({status})" if status else ""
        advice = ADVICE.get(status, "what is sent is wrong" if status and status < 429 else "try again")
        raise HubError(f"{action} failed: {' '.join(reason.split())}{number}; {advice}") from error


def check_weights(folder: Path, name: str = SAFE_WEIGHTS_NAME) -> None:
    """Raise OSError or ValueError unless the folder has all its weights, whole, as safetensors."""
    files, index = [folder / name], folder / SAFE_WEIGHTS_INDEX_NAME
    if name == SAFE_WEIGHTS_NAME and not files[0].is_file() and index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / shard for shard in sorted({*shards})]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing: save the model with save_pretrained, which writes safetensors"
            )
        check_whole(file)


def check_whole(file: Path) -> None:
    """Raise ValueError for a file of safetensors that is cut off or otherwise damaged."""
    try:
        with safe_open(file, framework="pt") as weights:
            weights.keys()
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): save the model again") from error


def adapter_base(adapter_config: Path) -> str | None:
    """The base model that an adapter's config leads to."""
    entries = json.loads(adapter_config.read_text(encoding="utf-8"))
    if not isinstance(entries, dict):
        raise ValueError(f"{adapter_config} must hold a JSON object, and holds {type(entries).__name__}")
    return entries.get("base_model_name_or_path")


def check_adapter(folder: Path) -> None:
    """Raise OSError or ValueError unless an adapter is whole and names a base model that others can load."""
    check_weights(folder, ADAPTER_SAFE_WEIGHTS_NAME)
    base = adapter_base(folder / ADAPTER_CONFIG_NAME)
    if not base or base.count("/") > 1 or Path(base).exists():
        raise ValueError(
            f"the adapter's base model, {base!r}, is none on the Hub: push the variant first, and name its repository as "
            f"base_model_name_or_path in {folder / ADAPTER_CONFIG_NAME}"
        )


def shared_files(folder: Path, written: Path, repo_id: str) -> dict[str, Path]:
    """What is pushed of a folder, by path in the repository.

    A variant's config and code are written anew to `written`, so that they fit each other and this version; so is a card
    if the folder has none. A folder of sentence-transformers also has the sub-folders of its modules.

    Raises:
        OSError, ValueError: the folder holds no variant and no adapter, or not all of it.
    """
    files = {path.name: path for pattern in SHARED for path in sorted(folder.glob(pattern)) if path.is_file()}
    modules = module_files(folder)
    for file in modules.values():
        if file.suffix == ".safetensors":
            check_whole(file)
    files |= modules
    if (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / CONFIG_NAME).is_file():
        check_adapter(folder)
        return files
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    config = load_config(str(folder))
    if not isinstance(config, PositionConfigMixin):
        raise ValueError(
            f"{folder} holds a stock {config.model_type} model, which needs nothing from here: push it as usual"
        )
    check_weights(folder)
    config.save_pretrained(written)
    if CARD not in files:
        from .cards import make_card  # only here: it brings the template engine along

        make_card(config, repo_id=repo_id, sentence_class=model_class(folder)).save(written / CARD)
    return {**files, **{path.name: path for path in written.iterdir()}}


def outdated_files(present: list[str], files: Iterable[str], module_folders: Iterable[str]) -> list[str]:
    """What a push removes of what is there: weights and code beside the model's, and all else in the folders of modules."""
    folders = tuple(f"{folder}/" for folder in module_folders)
    old = [name for name in present if name.startswith(folders) or (name.endswith(REPLACED) and "/" not in name)]
    return sorted({*old} - {*files})


def _module_folders(
    api: HfApi, repo_id: str, revision: str | None, files: dict[str, Path], present: list[str]
) -> set[str]:
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
    """Push a saved variant, or an adapter of one, in a single commit: all of it arrives, or nothing.

    The repository is made if there is none. Weights and code that were there before and are not part of this push are
    removed: transformers would prefer an old `model.safetensors` to new shards. So are files in the sub-folders of
    sentence-transformers' modules, those of before and those of now.

    Args:
        folder: what `save_pretrained`, a `Trainer` or sentence-transformers wrote. What is no part of the model (optimizers,
            checkpoints, metrics and data of a run, pickled files) is left behind, see `SHARED`.
        repo_id: the repository, as "me/minilm-t5"; without a name in front, it is the token's owner's.
        private: visibility of a new repository.
        revision: a branch, made if there is none.
        message: of the commit.
        exist_ok: push to a repository that exists already.
        api: the client to push with, by default one that reads HF_ENDPOINT and HF_TOKEN or the saved login.

    Returns:
        The commit's address.

    Raises:
        FileNotFoundError, ValueError: the folder holds no variant and no adapter, or not all of it; nothing was sent.
        HubError: the Hub refused or was not reached.
    """
    api = api or HfApi(library_name=__package__)
    with tempfile.TemporaryDirectory() as temporary:
        files = shared_files(Path(folder), Path(temporary), repo_id)
        with _explained(f"pushing {folder} to {repo_id}"):
            repo_id = api.create_repo(repo_id, private=private, exist_ok=exist_ok).repo_id
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            present = api.list_repo_files(repo_id, revision=revision)
            if CARD in present and not (Path(folder) / CARD).is_file():
                files.pop(CARD, None)  # that of the repository knows more than one made of the config
            folders = _module_folders(api, repo_id, revision, files, present)
            operations = [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
            operations += [CommitOperationDelete(name) for name in outdated_files(present, files, folders)]
            commit = api.create_commit(
                repo_id, operations, commit_message=message or "Push with hf_posenc", revision=revision
            )
    return commit.commit_url
