"""Sharing: a saved variant, or an adapter of one, pushed to the Hub in a form that anyone can load."""

import json
import tempfile
from collections.abc import Iterator
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


CARD = "README.md"
# What belongs to a model: weights, settings, tokenizers, the card and the results it came from. Not: checkpoints of a
# training run, optimizers, anything pickled.
SHARED = ("*.safetensors", "*.json", "*.jsonl", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*", "NOTICE*")
NOT_SHARED = ("trainer_state.json",)
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
        try:
            with safe_open(file, framework="pt") as weights:
                weights.keys()
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): save the model again") from error


def adapter_base(adapter_config: Path) -> str | None:
    """The base model that an adapter's config leads to."""
    return json.loads(adapter_config.read_text(encoding="utf-8")).get("base_model_name_or_path")


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
    if the folder has none.

    Raises:
        OSError, ValueError: the folder holds no variant and no adapter, or not all of it.
    """
    files = {path.name: path for pattern in SHARED for path in sorted(folder.glob(pattern)) if path.is_file()}
    files = {name: path for name, path in files.items() if name not in NOT_SHARED}
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

        make_card(config, repo_id=repo_id).save(written / CARD)
    return {**files, **{path.name: path for path in written.iterdir()}}


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
    removed: transformers would prefer an old `model.safetensors` to new shards.

    Args:
        folder: what `save_pretrained` or a `Trainer` wrote. Optimizers, checkpoints of the run and pickled files are left behind.
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
            stale = [name for name in present if name.endswith(REPLACED) and "/" not in name and name not in files]
            operations = [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
            operations += [CommitOperationDelete(name) for name in stale]
            commit = api.create_commit(
                repo_id, operations, commit_message=message or "Push with hf_posenc", revision=revision
            )
    return commit.commit_url
