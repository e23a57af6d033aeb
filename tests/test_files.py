"""Nothing is lost: all that is written goes by one rule, whatever is at the path that it is written to."""

import ast
import contextlib
import errno
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import tiny
from transformers import AutoModel

from hf_posenc import files
from hf_posenc.checkpoint_code import code_files
from hf_posenc.files import check_file, whole_file, whole_folder, write_whole
from hf_posenc.hub.folders import checked_output, folder_of


ROOT = Path(__file__).parents[1]
NOBODY = 65534
is_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="it takes root")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder():
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


@contextlib.contextmanager
def unprivileged():
    """As a user whom permissions hold for; root is nobody meanwhile."""
    if os.getuid() != 0:
        yield
        return
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


class TestLinks:
    def test_are_followed_and_stay(self, folder):
        (folder / "deep").mkdir()
        target = folder / "deep" / "real.json"
        target.write_text("old")
        (folder / "first").symlink_to(Path("deep", "real.json"))
        (folder / "second").symlink_to("first")
        write_whole({folder / "second": "new"})
        assert target.read_text() == "new" and not target.is_symlink()
        assert (folder / "first").is_symlink() and (folder / "second").is_symlink()
        assert names(folder) == ["deep", "first", "second"] and names(folder / "deep") == ["real.json"]

    def test_that_dangle_are_followed_too(self, folder):
        (folder / "link").symlink_to("new.json")
        write_whole({folder / "link": "new"})
        assert (folder / "link").is_symlink() and names(folder) == ["link", "new.json"]
        assert (folder / "new.json").read_text() == "new"

    @pytest.mark.parametrize("kind", ["its own", "a folder", "a folder that is not there"])
    def test_that_lead_to_no_file_are_refused(self, kind, folder):
        (folder / "is").mkdir()
        leads = {"its own": "link", "a folder": "is", "a folder that is not there": "gone/x.json"}[kind]
        (folder / "link").symlink_to(leads)
        for write in (check_file, lambda path: write_whole({path: "new"})):
            with pytest.raises(OSError, match="link .*name a file|link is a folder: name a file"):
                write(folder / "link")
        assert names(folder) == ["is", "link"] and os.readlink(folder / "link") == leads


class TestWhatIsNoFile:
    def test_a_device_stays_one(self, folder, device):
        node = device(3)
        (folder / "link").symlink_to(node)
        for path in (node, folder / "link"):
            write_whole({path: "new"})
        assert stat.S_ISCHR(os.lstat(node).st_mode) and (folder / "link").is_symlink()
        assert names(folder) == ["link"] and names(node.parent) == [node.name]

    def test_a_device_that_takes_nothing_is_said_in_words(self, device):
        node = device(7)
        with pytest.raises(OSError, match=f"{node} cannot be written: {os.strerror(errno.ENOSPC)}"):
            write_whole({node: "new"})

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="it takes named pipes")
    def test_a_pipe_gets_all_of_it(self, folder):
        os.mkfifo(folder / "pipe")
        content, read = "new" * 100_000, []
        reader = threading.Thread(target=lambda: read.append((folder / "pipe").read_text()))
        reader.start()
        write_whole({folder / "pipe": content})
        reader.join(timeout=10)
        assert read == [content] and stat.S_ISFIFO(os.lstat(folder / "pipe").st_mode) and names(folder) == ["pipe"]

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="it takes /proc")
    @pytest.mark.parametrize("to", ["a pipe", "a file"])
    def test_standard_output_gets_it_between_what_is_printed(self, to, folder):
        code = (
            "import pathlib, runpy, sys; files = runpy.run_path(sys.argv[2]); print('before'); "
            "files['write_whole']({pathlib.Path(sys.argv[1]): 'written\\n'}); print('after')"
        )
        (folder / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout, which a mistake would replace
        run = [sys.executable, "-c", code, str(folder / "stdout"), files.__file__]
        if to == "a pipe":
            said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        else:
            with open(folder / "said", "w") as opened:
                subprocess.run(run, stdout=opened, check=True)
            said = (folder / "said").read_text()
        assert said.split() == ["before", "written", "after"] and (folder / "stdout").is_symlink()

    @pytest.mark.parametrize("makes", [lambda path: write_whole({path: "new"}), check_file])
    def test_a_folder_is_refused(self, makes, folder):
        with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
            makes(folder)
        assert names(folder) == []


class TestOwnersAndPermissions:
    @pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
    def test_permissions_stay(self, mode, folder):
        (folder / "a").write_text("old")
        (folder / "a").chmod(mode)
        write_whole({folder / "a": "new"})
        assert stat.S_IMODE((folder / "a").stat().st_mode) == mode and (folder / "a").read_text() == "new"

    def test_a_new_file_has_those_of_any_new_file(self, folder):
        (folder / "other").write_text("")
        write_whole({folder / "a": "new"})
        assert (folder / "a").stat().st_mode == (folder / "other").stat().st_mode

    @is_root
    def test_the_owner_stays(self, folder):
        (folder / "a").write_text("old")
        os.chown(folder / "a", NOBODY, NOBODY)
        (folder / "a").chmod(0o640)
        write_whole({folder / "a": "new"})
        there = (folder / "a").stat()
        assert (there.st_uid, there.st_gid, stat.S_IMODE(there.st_mode)) == (NOBODY, NOBODY, 0o640)

    @is_root
    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o755])
    def test_somebody_elses_file_keeps_its_owner(self, mode, folder):
        """Also where the folder may not be written to, and the file may."""
        (folder / "a").write_text("old")
        (folder / "a").chmod(0o666)
        folder.chmod(mode)
        with unprivileged():
            write_whole({folder / "a": "new"})
        assert (folder / "a").read_text() == "new" and (folder / "a").stat().st_uid == 0 and names(folder) == ["a"]

    def test_a_read_only_file_is_refused(self, folder):
        folder.chmod(0o777)
        (folder / "a").write_text("old")
        (folder / "a").chmod(0o444)
        with unprivileged():
            for write in (check_file, lambda path: write_whole({path: "new"})):
                with pytest.raises(PermissionError, match="a exists and is read-only"):
                    write(folder / "a")
        assert (folder / "a").read_text() == "old" and names(folder) == ["a"]

    @pytest.mark.parametrize("below", ["a", "new/a"])
    def test_a_folder_that_may_not_be_written_to_is_refused(self, below, folder):
        folder.chmod(0o555)
        with unprivileged():
            for write in (check_file, lambda path: write_whole({path: "new"})):
                with pytest.raises(PermissionError, match=f"{below} cannot be written: {folder} is read-only"):
                    write(folder / below)
        folder.chmod(0o755)
        assert names(folder) == []

    @is_root
    def test_a_disk_that_is_read_only_is_refused_in_words(self, folder):
        mount = f"mount -t tmpfs none {folder} && touch {folder}/a && mount -o remount,ro {folder}"
        if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
            pytest.skip("no right to mount a disk")
        code = (
            "import pathlib, runpy, sys; files = runpy.run_path(sys.argv[2])\n"
            "for name in 'ab':\n"
            "    for write in (files['check_file'], lambda path: files['write_whole']({path: 'new'})):\n"
            "        try: write(pathlib.Path(sys.argv[1], name))\n"
            "        except PermissionError as error: print(error)"
        )
        command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1" {folder} "$2"', sys.executable, code]
        command.append(files.__file__)
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert len(said) == 4 and all(line.startswith(f"{folder}/a exists and is read-only") for line in said[:2])
        assert all(line.startswith(f"{folder}/b cannot be written: {folder} is read-only") for line in said[2:])

    def test_a_folder_keeps_them_as_it_is_filled(self, folder):
        (folder / "out").mkdir()
        (folder / "out").chmod(0o750)
        with whole_folder(folder / "out") as made:
            (made / "a").write_text("new")
        assert stat.S_IMODE((folder / "out").stat().st_mode) == 0o750 and names(folder) == ["out"]


class TestNothingStays:
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_of_a_folder_after_an_error(self, error, folder):
        (folder / "out").mkdir()
        with pytest.raises(error), whole_folder(folder / "out") as made:
            (made / "a").write_text("new")
            raise error
        assert names(folder) == ["out"] and names(folder / "out") == []

    def test_of_an_earlier_process_with_the_same_number_is_in_nobody_s_way(self, folder):
        """In a container, each run may be process 1; one that was killed leaves its unfinished folder."""
        with whole_folder(folder / "out") as made:
            shutil.copytree(made, folder / "left")
            name = made.name
        (folder / "left").rename(folder / name)
        (folder / "out").rmdir()
        with whole_folder(folder / "out") as made:
            (made / "file").write_text("whole")
        assert (folder / "out/file").read_text() == "whole"

    @pytest.mark.parametrize("there", ["nothing", "a file", "a link", "a link that dangles", "a device"])
    def test_after_an_error(self, there, folder, device):
        path = folder / "a"
        if there == "a file":
            path.write_text("old")
        elif there.startswith("a link"):
            path.symlink_to("b")
        if there == "a link":
            (folder / "b").write_text("old")
        if there == "a device":
            path.symlink_to(device(3))
        before = names(folder)
        with pytest.raises(RuntimeError, match="stopped"), whole_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("stopped")
        assert names(folder) == before and not temporary.exists()
        assert not path.is_file() or path.read_text() == "old"

    def test_after_an_error_in_another_file(self, folder):
        (folder / "a").write_text("old")
        (folder / "b").mkdir()
        with pytest.raises(OSError, match="b is a folder"):
            write_whole({folder / "a": "new", folder / "b": "new"})
        assert names(folder) == ["a", "b"] and (folder / "a").read_text() == "old"

    def test_of_a_path_below_a_file(self, folder):
        (folder / "a").write_text("old")
        for write in (check_file, lambda path: write_whole({path: "new"})):
            with pytest.raises(OSError, match="a/b cannot be written: .*a is not a folder"):
                write(folder / "a" / "b")

    def test_looking_makes_nothing(self, folder):
        assert check_file(folder / "new" / "a") == Path(os.path.realpath(folder), "new", "a")
        assert names(folder) == []


class TestCodeBesideACheckpoint:
    """Saving writes files that the user did not name."""

    def test_does_not_replace_somebody_elses(self, folder):
        (folder / "losses.py").write_text("mine = 1\n")
        for saved in (tiny.build("t5"), tiny.build("t5").config):
            with pytest.raises(FileExistsError, match="losses.py is there already and is not from hf_posenc"):
                saved.save_pretrained(folder)
            assert names(folder) == ["losses.py"] and (folder / "losses.py").read_text() == "mine = 1\n"

    def test_replaces_its_own(self, folder):
        model = tiny.build("t5")
        model.save_pretrained(folder)
        (folder / "losses.py").write_text("# of an earlier version\n")
        model.save_pretrained(folder)
        assert "earlier" not in (folder / "losses.py").read_text()
        assert type(AutoModel.from_pretrained(folder)) is type(model)

    def test_does_not_replace_somebody_elses_beside_a_checkpoint(self, folder):
        """The checkpoint that is there has other schemes, so that no file of it has this name."""
        tiny.build("t5").save_pretrained(folder)
        (folder / "deberta.py").write_text("mine = 1\n")
        with pytest.raises(FileExistsError, match="deberta.py is there already and is not from hf_posenc"):
            tiny.build("deberta").save_pretrained(folder)
        assert (folder / "deberta.py").read_text() == "mine = 1\n"

    def test_goes_on_with_what_was_broken_off(self, folder):
        model = tiny.build("t5")
        for name, text in code_files(model.config).items():
            (folder / name).write_bytes(text.encode()[: len(text) // 2])
        model.save_pretrained(folder)
        assert (folder / "losses.py").read_text(encoding="utf-8") == code_files(model.config)["losses.py"]


WRITERS = {
    "write_text",
    "write_bytes",
    "savefig",
    "savez",
    "savez_compressed",
    "save_file",
    "onnx.save_model",
    "to_csv",
}
WRITERS |= {"copyfile", "copy2", "copytree", "move", "torch.save", "json.dump", "os.replace"}
# What writes by itself, and why it may.
ALLOWED = {
    "hf_posenc/files.py": "the rule itself",
    "hf_posenc/conversion/converting.py:_keep_state": "a folder of its own, which it makes",
    "hf_posenc/conversion/report.py:save": "into a folder that is written as a whole",
    "hf_posenc/hub/folders.py:copy_files": "into a folder that is written as a whole",
    "hf_posenc/export/stock/folder.py:_name_for_all": "into a folder that is written as a whole",
    "hf_posenc/inspection/sentence_folders.py:cut_at": "into a folder that is written as a whole",
    "hf_posenc/testing.py:saves_and_loads": "a temporary folder",
    "benchmarks/report.py:forget_peak": "a switch of the kernel, in /proc",
}


def writers(tree: ast.AST):
    """The calls in a file that write to a path, with the name of the function around each."""
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
            named, given = ast.unparse(call.func), [ast.unparse(argument) for argument in call.args]
            opens = named.rpartition(".")[2] == "open" and any(
                re.fullmatch("'[rwaxbt+]*[wax+][bt+]*'", mode) for mode in given
            )
            if opens or {named, named.rpartition(".")[2]} & WRITERS:
                if not {*given} & lent(function):
                    yield function.name, named


def lent(function: ast.FunctionDef) -> set[str]:
    """Names of what is no path of the user's: the temporary files of `whole_file`, and memory."""
    names = {
        ast.unparse(item.optional_vars)
        for node in ast.walk(function)
        if isinstance(node, ast.With)
        for item in node.items
        if ast.unparse(item.context_expr).startswith("whole_file(")
    }
    return names | {
        ast.unparse(node.targets[0])
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in ("io.BytesIO()", "io.StringIO()")
    }


@pytest.mark.parametrize("place", ["hf_posenc", "hf_posenc_cli", "examples", "benchmarks", "research"])
def test_whatever_is_written_goes_through_files(place):
    found = set()
    for file in sorted(
        file for file in (ROOT / place).rglob("*.py") if not file.is_relative_to(ROOT / place / "tests")
    ):
        for function, named in writers(ast.parse(file.read_text(encoding="utf-8"))):
            name = str(file.relative_to(ROOT))
            if not {name, f"{name}:{function}"} & {*ALLOWED}:
                found.add(f"{name}:{function} {named}")
    assert found == set()


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    """Of which a shell leaves "~" as it is in `--out=~/file`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    write_whole({Path("~/new/file.txt"): "text"})
    assert (tmp_path / "home" / "new" / "file.txt").read_text() == "text"
    assert checked_output(Path("~/model")) == tmp_path / "home" / "model"
    assert folder_of("~/new") == tmp_path / "home" / "new"
    assert names(tmp_path) == ["home"]
