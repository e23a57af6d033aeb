"""Files and folders that are written whole or not at all."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of `path` at the end, with the rights that this has; after an error nothing of it stays.

    Raises:
        OSError: it cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(contents: Mapping[Path, str | bytes]) -> None:
    """Write files, each whole; none is touched where one of them cannot be written. Text is UTF-8, its ends of lines stay.

    Raises:
        OSError: one cannot be written.
    """
    with ExitStack() as files:
        for path, content in contents.items():
            temporary = files.enter_context(whole_file(path))
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write to, which takes the place of `folder` at the end; after an error nothing of it stays.

    Raises:
        OSError: it cannot be written (no space, no right to), or it is whole and cannot take its place: it then stays where it is.
    """
    temporary = _beside(folder.absolute())
    try:
        temporary.mkdir()
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        if folder.is_dir():
            folder.rmdir()  # it is empty
        os.replace(temporary, folder)
    except OSError as error:
        raise OSError(f"{folder} cannot be made: {error}; all that belongs there is in {temporary}") from error


def _beside(path: Path) -> Path:
    """Where a process writes what is to take a place: on the same disk, under a name of its own."""
    return path.with_name(f".{path.name}.{os.getpid()}")
