"""What earlier versions saved: the checkpoints in reference/, unpacked while tests run."""

import atexit
import functools
import shutil
import tempfile
import zipfile
from pathlib import Path


REFERENCE = Path(__file__).parents[1] / "reference"


@functools.cache
def unpacked(name: str) -> Path:
    """The folder of what reference/<name>.zip holds; reference/make_<name>_outputs.py made it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with zipfile.ZipFile(REFERENCE / f"{name}.zip") as archive:
        archive.extractall(folder)
    return folder
