"""Files and folders that are written atomically. Whatever is written for a user goes through here, by one rule:

- Symbolic links are followed, also one to a file that is not there yet.
- A regular file is replaced as a whole, and keeps its owner and its permissions. One that cannot be replaced (somebody else's, a mount
  point, in a folder that may not be written to) gets the new content.
- What is no regular file (a device, a pipe, standard output) is written to and never replaced.
- Folders, and places that may not be written to, are refused before anything is made.
"""

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write to, whose content is at `path` at the end; after an error nothing of it stays.

    Raises:
        OSError: it cannot be written.
    """
    target = check_file(path)
    with _in_words(path):
        target.parent.mkdir(parents=True, exist_ok=True)
    is_beside = _is_replaceable(target) and os.access(target.parent, os.W_OK)
    temporary = _beside(target if is_beside else Path(tempfile.gettempdir(), target.name))
    try:
        yield temporary
        with _in_words(path):
            _put(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(contents: Mapping[Path, str | bytes]) -> None:
    """Write files, each atomically; none is touched where one of them cannot be written. Text is UTF-8, its ends of lines stay.

    Raises:
        OSError: one cannot be written.
    """
    with ExitStack() as files:
        for path, content in contents.items():
            temporary = files.enter_context(whole_file(path))
            with _in_words(path):
                temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def check_file(path: Path) -> Path:
    """Where a file is written, links followed, with the home folder for "~". Called by itself before work that takes long; it makes nothing.

    Raises:
        OSError: no file can be written here.
    """
    path = path.expanduser()
    with _in_words(path):
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: name a file")
        if path.exists():
            if not os.access(path, os.W_OK):
                raise PermissionError(f"{path} exists and is read-only: name another file")
            return Path(os.path.realpath(path)) if path.is_file() else path
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise OSError(f"{path} is a link to itself: name a file")
        folder = target.parent
        if path.is_symlink() and not folder.is_dir():
            raise FileNotFoundError(
                f"{path} is a link to {target}, whose folder does not exist: name a file, or create the folder"
            )
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(f"{path} cannot be written: {folder} is not a folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} cannot be written: {folder} is read-only: name a file in another folder")
    return target


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
            with suppress(PermissionError):
                _make_alike(temporary, folder)
            folder.rmdir()  # it is empty
        os.replace(temporary, folder)
    except OSError as error:
        raise OSError(f"{folder} cannot be created: {error}; its complete content is in {temporary}") from error


def _is_replaceable(target: Path) -> bool:
    """Whether a new file may take the place of what is there, if anything is."""
    return not target.exists() or (target.is_file() and _stream(target) is None)


def _put(temporary: Path, target: Path) -> None:
    """The content of a file at its target: as the file itself, or else written into what is there."""
    if _is_replaceable(target):
        with suppress(OSError):
            if target.exists():
                _make_alike(temporary, target)
            os.replace(temporary, target)
            return
    stream = _stream(target)
    if stream is not None:
        for text in filter(None, (sys.stdout, sys.stderr)):
            text.flush()
    # A stream is not closed: more is written to it.
    with (
        temporary.open("rb") as content,
        open(target if stream is None else stream, "wb", closefd=stream is None) as to,
    ):
        shutil.copyfileobj(content, to)


def _stream(path: Path) -> int | None:
    """Standard output or error, where a path leads to it: opened anew, what is written next would overwrite what is written here."""
    for stream in (1, 2):
        with suppress(OSError):  # it is closed
            if os.path.samestat(os.fstat(stream), path.stat()):
                return stream
    return None


def _make_alike(new: Path, there: Path) -> None:
    """Give a file or folder owner and permissions of another.

    Raises:
        PermissionError: the owner may not be given.
    """
    is_own, owned = new.stat(), there.stat()
    if (is_own.st_uid, is_own.st_gid) != (owned.st_uid, owned.st_gid):
        os.chown(new, owned.st_uid, owned.st_gid)
    shutil.copymode(there, new)


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Errors of the system name the file that was asked for, not one that stands for it for a while."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(f"{path} cannot be written: {error.strerror}") from error


def _beside(path: Path) -> Path:
    """Where is written what is to take a place: on the same disk, under a new name. (In containers, all processes have the same number.)"""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")
