"""Fetching transformers' tests: once, and whole or not at all."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from transformers_suite import loader


def archive(folder: Path, names: tuple[str, ...]) -> Path:
    """A source distribution of version 0.0 with some files in its tests/."""
    path = folder / "transformers-0.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(f"transformers-0.0/tests/{name}")
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    return path


def test_a_version_is_downloaded_once(tmp_path, monkeypatch):
    downloads = []

    def download(version, folder):
        downloads.append(version)
        return archive(folder, (*loader.FILES, "test_of_something_else.py"))

    monkeypatch.setattr(loader, "_download", download)
    folders = {loader.fetch("0.0", tmp_path), loader.fetch("0.0", tmp_path)}
    assert downloads == ["0.0"]
    (folder,) = folders
    assert sorted(path.name for path in folder.iterdir()) == sorted((*loader.FILES, "__init__.py"))
    for name in loader.FILES:
        assert (folder / name).read_text() == name
    assert {path.name for path in tmp_path.iterdir()} <= {folder.name, f"{folder.name}.lock"}


def test_an_archive_without_the_tests_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "_download", lambda version, folder: archive(folder, loader.FILES[:1]))
    with pytest.raises(loader.FetchError, match=rf"transformers-0.0.tar.gz carries no tests/{loader.FILES[1]}"):
        loader.fetch("0.0", tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_failed_download_says_what_pip_said_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(command, **kwargs):
        assert command[-1] == "transformers==0.0"
        raise subprocess.CalledProcessError(1, command, stderr="no network\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(loader.FetchError, match="pip cannot download transformers==0.0: no network"):
        loader.fetch("0.0", tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
