"""Random attacks on pushing: `python tests/hostile/attack_push.py --cases 300 --seed 0`.

Folders that are broken or hold more than a model, repositories that hold something already, a Hub that fails, is slow or
answers nonsense, files that change meanwhile, and others who push at the same time. Whatever happens: what is reported as
pushed is there, whole, and computes what the folder does; what failed says so in one line, and leaves what was there.
"""

import contextlib
import io
import json
import os
import random
import shutil
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import huggingface_hub
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel


sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

import loop  # noqa: E402
import tiny  # noqa: E402
import tiny_checkpoints  # noqa: E402
from hub_server import Fault, File, LoopbackHub  # noqa: E402
from loop import note  # noqa: E402

import hf_posenc.hub.pushing  # noqa: E402
import hf_posenc_cli as cli  # noqa: E402


REPO = "me/model"
# Whatever holds this must not be sent.
SECRET = b"hf_SECRETSECRETSECRET"
KINDS = ["variant", "shards", "sentences", "adapter"]
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]


class Wrong(AssertionError):
    """Something else than what was promised."""


class Hub(LoopbackHub):
    """A Hub that calls `meanwhile` with the number of each request, which may return what goes wrong with it."""

    def __init__(self):
        super().__init__()
        self.meanwhile = lambda number, method, path: None

    def next_fault(self, method: str, path: str) -> Fault | None:
        return self.meanwhile(len(self.requests) - 1, method, path)


@contextlib.contextmanager
def a_hub() -> Iterator[Hub]:
    """A Hub that the client of this process talks to, which does not wait before it tries again."""
    with Hub() as hub, contextlib.ExitStack() as stack:
        for target, name, value in (
            (constants, "ENDPOINT", hub.url),
            (constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"),
            (constants, "HF_HUB_DISABLE_XET", True),
            (constants, "HF_HUB_OFFLINE", False),
            (constants, "DEFAULT_REQUEST_TIMEOUT", 0.3),
            (constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3),
            (huggingface_hub.hf_api.api, "endpoint", hub.url),
            (time, "sleep", lambda seconds: None),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        environment = {"HF_TOKEN": hub.token, "NO_PROXY": "127.0.0.1,localhost", "HF_ENDPOINT": hub.url}
        stack.enter_context(mock.patch.dict(os.environ, environment))
        # A client that goes away is none of the command's errors.
        stack.enter_context(mock.patch.object(socketserver.BaseServer, "handle_error", lambda *_: None))
        huggingface_hub.utils.disable_progress_bars()
        yield hub


# --- folders ------------------------------------------------------------------------------------------------------------


def make_folder(folder: Path, kind: str, seed: int = 0) -> Path:
    """What a run leaves: a model, and beside it what is nobody's business."""
    model = tiny.build("absolute+t5", seed=seed)
    if kind == "adapter":
        model.config._name_or_path = model.name_or_path = "me/base"
        model = get_peft_model(model, LoraConfig(init_lora_weights=False))
        model.save_pretrained(folder)
    else:
        model.save_pretrained(folder, max_shard_size="20KB" if kind == "shards" else "5GB")
        tiny_checkpoints.tokenizer().save_pretrained(folder)
    if kind == "sentences":
        (folder / "modules.json").write_text(json.dumps(MODULES))
        for name in ("1_Pooling", "2_Dense"):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text('{"in_features": 32}')
        save_file({"linear.weight": torch.ones(8, 32)}, folder / "2_Dense/model.safetensors")
    return folder


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Contents and links, by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = os.fsencode(path.relative_to(folder)).decode(errors="backslashreplace")
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return found


# --- what must hold -----------------------------------------------------------------------------------------------------


def push(*arguments: str) -> tuple[int, str, str]:
    """Exit code and output of the command; whatever else it raises is a failure of the case."""
    out, err = io.StringIO(), io.StringIO()
    before = {*os.listdir(tempfile.gettempdir())}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(["push", *map(str, arguments)])
            code = 0
        except SystemExit as error:
            code = error.code or 0
    left = [
        name
        for name in {*os.listdir(tempfile.gettempdir())} - before
        if name.startswith("tmp") and threading.active_count() < 3
    ]
    if left:
        raise Wrong(f"temporary files left: {left}")
    if code and (code != 2 or len(err.getvalue().strip().splitlines()) != 1 or len(err.getvalue()) < 30):
        raise Wrong(f"code {code}, said: {err.getvalue()!r}")
    if not code and (err.getvalue() or "/commit/" not in out.getvalue()):
        raise Wrong(f"pushed, and said: {out.getvalue()!r} {err.getvalue()!r}")
    note(
        f"refused: {' '.join(err.getvalue().replace(str(arguments[0]), 'FOLDER').split())[:90]}" if code else "pushed"
    )
    return code, out.getvalue(), err.getvalue()


def head(hub: Hub, revision: str = "main", repo: str = REPO) -> dict[str, bytes] | None:
    repository = hub.repositories.get(repo)
    return repository.files(revision) if repository and revision in repository.branches else None


def check_private(files: dict[str, bytes], folder: Path) -> None:
    """Nothing was sent that should not be."""
    for name, content in files.items():
        if SECRET in content or str(folder.parent).encode() in content:
            raise Wrong(f"{name} was sent, with {'a secret' if SECRET in content else 'a path of this machine'}")
        if name.startswith(".") or "/." in name or "\n" in name:
            raise Wrong(f"{name!r} was sent")


@torch.no_grad()
def hidden(folder: Path) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder).eval()
    return model(**tiny.inputs(length=9, padding=None)).last_hidden_state


def check_loads(files: dict[str, bytes], expected: torch.Tensor | None, kind: str) -> None:
    """What was pushed is whole, and computes what the folder does."""
    with tempfile.TemporaryDirectory(prefix="pulled") as temporary:
        pulled = Path(temporary)
        for name, content in files.items():
            (pulled / name).parent.mkdir(parents=True, exist_ok=True)
            (pulled / name).write_bytes(content)
        if kind == "adapter":
            json.loads(files["adapter_config.json"])
            load_file(pulled / "adapter_model.safetensors")
            return
        if expected is not None and not torch.allclose(hidden(pulled), expected, atol=1e-6):
            raise Wrong("what was pushed computes something else")
        if kind == "sentences":
            for module in MODULES[1:]:
                json.loads(files[f"{module['path']}/config.json"])
            load_file(pulled / "2_Dense/model.safetensors")


def computes(folder: Path, kind: str) -> torch.Tensor | None:
    return None if kind == "adapter" else hidden(folder)


# --- what is done to a folder -------------------------------------------------------------------------------------------


def some_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))


def some_weights(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.rglob("*.safetensors")))


def secrets(rng, folder):
    names = [
        ".env",
        ".netrc",
        "token",
        "credentials.json",
        ".git/config",
        "id_rsa",
        ".cache/huggingface/token",
        "run.log",
    ]
    names += [".tokenizer.json", ".secret.safetensors", "training_args.bin", "checkpoint-1/README.md", "optimizer.pt"]
    names += [".ipynb_checkpoints/config.json", "wandb/run.json", "my.model/x", "trainer_state.json", "LICENSES/x"]
    if (folder / "1_Pooling").is_dir():
        names += [
            "1_Pooling/.env",
            "1_Pooling/.secret.json",
            "1_Pooling/.ipynb_checkpoints/config.json",
            "1_Pooling/x.py",
        ]
        names += ["1_Pooling/.git/a.txt"]
    for name in rng.sample(names, 4):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(SECRET)


def dangling(rng, folder):
    file = some_file(rng, folder)
    file.unlink()
    file.symlink_to(rng.choice(["nowhere", file.name, "/nowhere/at/all", "../../../../nowhere"]))


def outside(rng, folder):
    """A file that is a link to another outside, whether one that would do or a secret."""
    names = [
        "README.md",
        "LICENSE",
        "NOTICE.txt",
        "results.json",
        "tokenizer_config.json",
        "vocab.txt",
        "dict.txt",
        "x.model",
    ]
    names += ["1_Pooling/x.txt"] if (folder / "1_Pooling").is_dir() else []
    name, target = rng.choice(names), folder.parent / "outside.txt"
    target.write_bytes(SECRET)
    (folder / name).unlink(missing_ok=True)
    if rng.random() < 0.3:
        (folder.parent / "between").symlink_to(target)
        target = folder.parent / "between"
    (folder / name).symlink_to(target)


def inside(rng, folder):
    """A file that is a link to another in the folder."""
    file = some_file(rng, folder)
    file.rename(folder / "the real one")
    file.symlink_to(
        folder / "the real one" if rng.random() < 0.5 else os.path.relpath(folder / "the real one", file.parent)
    )


def outside_folder(rng, folder):
    place = rng.choice(sorted(path for path in folder.iterdir() if path.is_dir()) or [folder / "1_Pooling"])
    if place.exists():
        shutil.move(place, folder.parent / "elsewhere")
    else:
        (folder.parent / "elsewhere").mkdir()
    place.symlink_to(folder.parent / "elsewhere")


def cut(rng, folder):
    file = some_weights(rng, folder)
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def stray_cut(rng, folder):
    """Half-written weights beside whole ones."""
    data = some_weights(rng, folder).read_bytes()
    name = rng.choice(
        ["model-00001-of-00002.safetensors", "other.safetensors", "model.safetensors.tmp", ".model.safetensors"]
    )
    (folder / name).write_bytes(data[: len(data) // 2])


def zeros(rng, folder):
    file = some_weights(rng, folder)
    file.write_bytes(rng.choice([b"", b"\0" * file.stat().st_size, b"\xff" * 100]))


def gone(rng, folder):
    some_file(rng, folder).unlink()


def index(rng, folder):
    """The index of shards says something else."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    entries = json.loads(path.read_text())
    weights = entries["weight_map"]
    name = rng.choice(sorted(weights))
    match rng.choice("none list empty number outside below text lost other null".split()):
        case "none":
            entries = rng.choice([{}, [], 3, None, "x", {"metadata": {}}])
        case "list":
            entries["weight_map"] = rng.choice([[], [name], 3, None, "x"])
        case "empty":
            path.write_bytes(b"")
            return
        case "number":
            weights[name] = 3
        case "null":
            weights[name] = None
        case "outside":
            shutil.copy(folder / weights[name], folder.parent / "shard.safetensors")
            weights[name] = rng.choice(["../shard.safetensors", str(folder.parent / "shard.safetensors")])
        case "below":
            (folder / "below").mkdir(exist_ok=True)
            shutil.copy(folder / weights[name], folder / "below/shard.safetensors")
            weights[name] = "below/shard.safetensors"
        case "text":
            path.write_bytes(path.read_bytes()[: rng.randrange(200)])
            return
        case "lost":
            weights.pop(name)
        case "other":
            weights[name] = rng.choice(sorted({*weights.values()} - {weights[name]}) or [weights[name]])
    path.write_text(json.dumps(entries))


def old_shards(rng, folder):
    """Shards of another model beside a whole file, or the other way round."""
    other = make_folder(
        folder.parent / "other", "variant" if (folder / "model.safetensors.index.json").exists() else "shards", seed=7
    )
    for file in other.glob("*.safetensors*"):
        shutil.move(file, folder / file.name)


def half_a_shard_save(rng, folder):
    """A shard that lacks a tensor."""
    file = some_weights(rng, folder)
    state = load_file(file)
    if len(state) > 1:
        state.pop(rng.choice(sorted(state)))
        save_file(state, file, metadata={"format": "pt"})


def json_file(rng, folder):
    """JSON that is none, or of another kind."""
    file = rng.choice(sorted(folder.rglob("*.json")))
    wrong = [
        b"",
        b"[]",
        b"3",
        b"null",
        b'"x"',
        b"{",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b"{}",
        b"[" * 5000,
        b'{"a": NaN}',
        b"[[]]",
        b"[{}]",
    ]
    file.write_bytes(rng.choice([*wrong, file.read_bytes()[: rng.randrange(1 + file.stat().st_size)]]))


def entry(rng, folder):
    """An entry of a config that is of another kind."""
    file = rng.choice(
        [
            file
            for file in (folder / "config.json", folder / "adapter_config.json", folder / "modules.json")
            if file.is_file()
        ]
    )
    entries = json.loads(file.read_text())
    target = rng.choice(entries) if isinstance(entries, list) else entries
    name = rng.choice(sorted(target))
    target[name] = rng.choice([None, [], {}, 3, -1, "x", "../..", "/etc", True, 1e400, "\0", "a\nb", ["x"], {"x": []}])
    file.write_text(json.dumps(entries))


def base(rng, folder):
    """The base of an adapter, which is none on the Hub."""
    file = folder / "adapter_config.json"
    if file.is_file():
        entries = json.loads(file.read_text())
        wrong = [
            None,
            "",
            3,
            ["me/base"],
            {},
            "./base",
            "../base",
            "/base",
            "~/base",
            "a b/c",
            "C:\\models\\t5",
            "me/",
            "/",
            "me/base\n",
            "\0",
            REPO,
        ]
        entries["base_model_name_or_path"] = rng.choice(wrong)
        file.write_text(json.dumps(entries))


def names(rng, folder):
    """Files with odd names."""
    odd = [
        b"a\nb",
        b"a b",
        b"a#b?c%20",
        b"\xff\xfe",
        "ü漢".encode(),
        b"-rf",
        b"..a",
        b"a\\b",
        b"CON",
        b"con:",
        b"x" * 200,
        b"[a]",
        b"*",
    ]
    suffix = rng.choice([b".safetensors", b".model", b".jinja", b".txt", b".json"])
    place = folder / "1_Pooling" if (folder / "1_Pooling").is_dir() and rng.random() < 0.5 else folder
    path = os.path.join(os.fsencode(place), rng.choice(odd) + suffix)
    if suffix == b".safetensors":
        save_file({"x": torch.zeros(1)}, place / "x.safetensors")
        os.rename(place / "x.safetensors", path)
    else:
        with open(path, "wb") as file:
            file.write(b"{}")


def collisions(rng, folder):
    """Names that differ by case alone."""
    file = some_file(rng, folder)
    file.with_name(file.name.swapcase()).write_bytes(SECRET)


def kinds_of_files(rng, folder):
    """Folders, pipes and devices under the names of files."""
    name = rng.choice(
        ["README.md", "config.json", "model.safetensors", "LICENSE", "results.json", "modules.json", "tokenizer.json"]
    )
    (folder / name).unlink(missing_ok=True)
    if rng.random() < 0.4:
        os.mkfifo(folder / name)
    elif rng.random() < 0.6:
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(rng.choice(["/dev/null", "/dev/zero", "/proc/self/environ"]))


def card(rng, folder):
    texts = [
        "",
        "x",
        "---\n",
        "---\n---\n",
        "---\n- a\n---\n",
        "---\nlicense: [\n---\n",
        "---\nlicense: 3\n---\n",
        "---\nbase_model: a b/c d\n---\n",
    ]
    texts += [
        "---\nmodel-index: 3\n---\n",
        "---\ntags: {a: b}\n---\n",
        "---\nx: !!python/object:os.system 3\n---\n",
        "\ufeff---\nlicense: mit\n---\n",
    ]
    (folder / "README.md").write_bytes(
        rng.choice([*(text.encode() for text in texts), b"\xff\xfe", b"---\nlicense: \xff\n---\n"])
    )


def large(rng, folder):
    """A file that is large, of holes."""
    with open(folder / rng.choice(["LICENSE", "x.model", "results.json", "vocab.txt"]), "wb") as file:
        file.truncate(30 << 20)


def unreadable(rng, folder):
    """Files that cannot be read: the owner of all may, so that reading itself is made to fail."""
    file = some_file(rng, folder)
    file.chmod(0)


def pickles(rng, folder):
    name = rng.choice(["pytorch_model.bin", "2_Dense/pytorch_model.bin", "1_Pooling/x.pkl", "evil.pt"])
    if (folder / name).parent.is_dir():
        (folder / name).write_bytes(b"\x80\x04" + SECRET)


def code(rng, folder):
    """Code that is nobody's, and code of this package that somebody changed."""
    name = rng.choice(
        [
            "evil.py",
            *(path.name for path in folder.glob("*.py")),
            "setup.py",
            "1_Pooling.py",
            "sentence_transformers.py",
        ]
    )
    (folder / name).write_bytes(b"# " + SECRET)


CHANGES = [
    secrets, secrets, dangling, outside, outside, inside, outside_folder, cut, stray_cut, zeros, gone, index, index, old_shards,
    half_a_shard_save, json_file, json_file, entry, entry, base, base, names, collisions, kinds_of_files, card, large, pickles,
    code,
]  # fmt: skip
# After these a folder must be refused, where they change anything that is shared.
REFUSED = {cut, zeros, outside}
# After these what is pushed may compute something else, or lack what is not its weights.
OTHER = {json_file, entry, half_a_shard_save, old_shards, index, gone, dangling, kinds_of_files, outside_folder}


def attack_folders(rng: random.Random, folder: Path) -> None:
    """Folders that are broken, or hold more than a model."""
    kind = rng.choice(KINDS)
    made = make_folder(folder / "in", kind)
    expected = computes(made, kind)
    changes = rng.sample(CHANGES, rng.choice([1, 1, 1, 2]))
    with contextlib.suppress(
        FileNotFoundError, FileExistsError, IndexError, ValueError, NotADirectoryError, IsADirectoryError
    ):
        for change in changes:
            if (
                change in (base, index)
                and not (made / {base: "adapter_config.json", index: "model.safetensors.index.json"}[change]).is_file()
            ):
                change = secrets
            change(rng, made)
    for path in made.iterdir():
        if path.is_fifo():
            break
    else:
        before = snapshot(made) if not any(os.path.realpath(path) == "/dev/zero" for path in made.iterdir()) else None
    given = made
    if rng.random() < 0.15:
        given = folder / "link"
        given.symlink_to(made)
    with a_hub() as hub:
        code, _, _ = push(given, REPO)
        files = head(hub)
        said = "+".join(change.__name__ for change in changes)
        if code:
            if files:
                raise Wrong(f"{said}: refused, and pushed {sorted(files)}")
        else:
            check_private(files, folder / "in")
            if {*changes} & REFUSED and len(changes) == 1 and kind != "sentences":
                raise Wrong(f"{kind} {said}: not refused")
            for name, content in files.items():
                if name.endswith(".safetensors"):
                    (folder / "one.safetensors").write_bytes(content)
                    load_file(folder / "one.safetensors")
            check_loads(files, None if {*changes} & OTHER else expected, kind)
            if {*changes} & OTHER and kind in ("variant", "shards"):
                check_loads(files, hidden(made), kind)
                if kind == "shards" and "model.safetensors" not in files:
                    weights = json.loads(files["model.safetensors.index.json"])["weight_map"]
                    lost = {*weights.values()} - files.keys()
                    if lost:
                        raise Wrong(f"{said}: shards lost: {lost}")
    if not any(path.is_fifo() for path in made.iterdir()) and before is not None and snapshot(made) != before:
        raise Wrong("the folder was changed")


# --- what is done to requests -------------------------------------------------------------------------------------------


def attack_requests(rng: random.Random, folder: Path) -> None:
    """One request, or all from it on, fails; then nothing is pushed, or all, and a second push succeeds."""
    kind = rng.choice(KINDS)
    made = make_folder(folder / "in", kind)
    expected = computes(made, kind)
    options = rng.choice([[], [], ["--revision", "trial"], ["--private"], ["--new"]])
    revision = "trial" if "--revision" in options else "main"
    with a_hub() as hub:
        first = rng.random() < 0.5 and "--new" not in options
        if first:
            push(make_folder(folder / "old", rng.choice(KINDS), seed=3), REPO, *options)
        before = head(hub, revision)
        start, broken, times = len(hub.requests), rng.randrange(14), rng.choice([1, 1, 2, 1000])
        status = rng.choice([None, None, 200, 400, 401, 403, 404, 409, 412, 413, 429, 500, 502, 503, 504, "slow"])
        shot = []

        def meanwhile(number, method, path):
            if start + broken <= number < start + broken + times:
                shot.append(f"{method} {path}")
                if status == "slow":
                    threading.Event().wait(1)
                    return None
                return Fault(method, path, status, rng.choice([0, 1, 1000]), 1)
            return None

        hub.meanwhile = meanwhile
        code, _, said = push(made, REPO, *options)
        after = head(hub, revision)
        hub.meanwhile = lambda *_: None
        what = f"{kind} {status} at {shot[:1]} x{len(shot)}"
        if not code:
            check_loads(after, expected, kind)
            check_private(after, folder / "in")
        elif (after or {}) != (before or {}):
            if "/commit/" not in shot[0]:
                raise Wrong(f"{what}: failed, and changed {sorted({*after} ^ {*(before or {})})}")
            check_loads(after, expected, kind)
        if shot:
            note(f"{status} {'survived' if not code else 'said'}")
        options = [option for option in options if option != "--new"]
        code, _, said = push(made, REPO, *options)
        if code:
            raise Wrong(f"{what}: a second push failed: {said}")
        check_loads(head(hub, revision), expected, kind)
        if "--private" in options and not first and not hub.repositories[REPO].private:
            raise Wrong(f"{what}: not private")


# --- what is there already ----------------------------------------------------------------------------------------------


def attack_beside(rng: random.Random, folder: Path) -> None:
    """A repository that holds something else."""
    kind, old_kind = rng.choice(KINDS), rng.choice(KINDS)
    made = make_folder(folder / "in", kind)
    expected = computes(made, kind)
    if rng.random() < 0.3:
        (made / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
    with a_hub() as hub:
        public = rng.random() < 0.5
        revision = rng.choice([None, None, "trial", "v1.0", "ü x"])
        if rng.random() < 0.7:
            push(make_folder(folder / "old", old_kind, seed=3), REPO, "--public" if public else "--private")
        else:
            huggingface_hub.HfApi(token=hub.token, endpoint=hub.url).create_repo(REPO, private=not public)
            old_kind = None
        repository = hub.repositories[REPO]
        present = dict(repository.commits[repository.sha()])
        others = {
            **{
                "plots/x.svg": b"<svg/>",
                ".gitattributes": b"x",
                "onnx/model.onnx": b"-",
                "README.md": b"theirs",
                "notes.txt": b"-",
            },
            **{
                "model.safetensors": b"-",
                "model-00009-of-00009.safetensors": b"-",
                "evil.py": b"-",
                "pytorch_model.bin": b"-",
            },
            **{
                "README.MD": b"-",
                "Config.json": b"-",
                "1_Pooling/old.json": b"-",
                "1_pooling/config.json": b"-",
                "a b/ü.txt": b"-",
            },
            **{
                "3_Old/config.json": b"-",
                "modules.json": json.dumps([*MODULES, {"path": "3_Old", "type": "x"}]).encode(),
            },
            **{"adapter_config.json": b'{"base_model_name_or_path": "me/none", "peft_type": "LORA"}'},
            **{"adapter_model.safetensors": b"-", ".gitignore": b"*.safetensors"},
        }
        extra = {name: others[name] for name in rng.sample(sorted(others), rng.randrange(7))}
        repository.commit("main", present | {name: File(data, False) for name, data in extra.items()}, "theirs")
        before = repository.files()
        options = rng.choice([[], [], ["--private"], ["--public"], ["--new"]])
        options += ["--revision", revision] if revision else []
        code, _, said = push(made, REPO, *options)
        after = repository.files()
        if "--new" in options and not code:
            raise Wrong("pushed, though it was there")
        if code:
            if after != before:
                raise Wrong(f"failed ({said}), and changed what was there")
            if "--new" not in options and not ("--private" in options and public):
                raise Wrong(f"failed beside {sorted(extra)}: {said}")
            return
        if "--private" in options and not repository.private:
            raise Wrong("asked for a private repository, and pushed to a public one")
        if revision:
            if after != before:
                raise Wrong("the main branch was changed")
            after = repository.files(revision)
        check_loads(after, expected, kind)
        check_private({name: data for name, data in after.items() if name not in before}, folder / "in")
        replaced = (".safetensors", ".index.json", ".py")
        modules = ("1_Pooling/", "2_Dense/", "3_Old/")
        for name, data in before.items():
            gone = name not in after
            if gone and not name.endswith(replaced) and not (kind == "sentences" and name.startswith(modules)):
                if name == "adapter_config.json" and kind != "adapter":
                    continue
                raise Wrong(f"{name} was lost")
            if not gone and after[name] != data and not (made / name).is_file() and not name.endswith(".py"):
                if not (name == "README.md" and name in before):
                    raise Wrong(f"{name} was changed")
        if "README.md" in before and not (made / "README.md").is_file() and after["README.md"] != before["README.md"]:
            raise Wrong("their card was replaced by one that was made")


def attack_races(rng: random.Random, folder: Path) -> None:
    """Another push arrives between two requests of this one."""
    kinds = rng.choice(KINDS), rng.choice(KINDS)
    made = [make_folder(folder / name, kind, seed) for seed, (name, kind) in enumerate(zip(("mine", "theirs"), kinds))]
    expected = [computes(each, kind) for each, kind in zip(made, kinds)]
    with a_hub() as hub:
        if rng.random() < 0.5:
            push(make_folder(folder / "old", rng.choice(KINDS), seed=3), REPO)
        start, moment, codes = len(hub.requests), rng.randrange(9), []
        running = []

        def meanwhile(number, method, path):
            if number >= start + moment and not running:
                running.append(path)
                codes.append(their_push(made[1]))
            return None

        hub.meanwhile = meanwhile
        code, _, said = push(made[0], REPO)
        hub.meanwhile = lambda *_: None
        if not running:
            return
        files = head(hub)
        if codes[0]:
            raise Wrong(f"theirs failed: {codes[0]}")
        order = [1, 0] if not code else [1]
        last = order[-1]
        check_loads(files, expected[last], kinds[last])
        present = {name for name in files if name.endswith((".safetensors", ".index.json")) and "/" not in name}
        own = {path.name for path in made[last].iterdir() if path.name.endswith((".safetensors", ".index.json"))}
        if present != own:
            raise Wrong(f"{kinds} at {running}: a mixture of two pushes: {sorted(present ^ own)}")
        note(f"race {'refused' if code else 'won'}")
        if code and push(made[0], REPO)[0]:
            raise Wrong("trying again failed")


def their_push(folder: Path) -> str | None:
    """A push by somebody else, without the command."""
    try:
        hf_posenc.hub.push(folder, REPO)
    except Exception as error:  # noqa: BLE001
        return repr(error)
    return None


def attack_changing(rng: random.Random, folder: Path) -> None:
    """A file of the folder changes between two requests."""
    kind = rng.choice(KINDS)
    made = make_folder(folder / "in", kind)
    expected = [computes(made, kind)]
    with a_hub() as hub:
        moment, done = rng.randrange(9), []
        file = some_file(rng, made)
        how = rng.choice(["gone", "cut", "grown", "other", "link", "folder gone"])
        (folder / "secret").write_bytes(SECRET)

        def meanwhile(number, method, path):
            if number >= moment and not done:
                done.append(f"{method} {path}")
                if how == "gone":
                    file.unlink()
                elif how == "cut":
                    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
                elif how == "grown":
                    file.write_bytes(file.read_bytes() + b" " * 100)
                elif how == "link":
                    file.unlink()
                    file.symlink_to(folder / "secret")
                elif how == "folder gone":
                    shutil.rmtree(made)
                else:
                    shutil.rmtree(made)
                    make_folder(made, kind, seed=4)
                    expected.append(computes(made, kind))
            return None

        hub.meanwhile = meanwhile
        code, _, _ = push(made, REPO)
        hub.meanwhile = lambda *_: None
        files = head(hub)
        if code:
            if files:
                raise Wrong(f"{how} {file.name} at {done}: failed, and pushed {sorted(files)}")
            return
        check_private(files, folder / "in")
        for value in expected:
            try:
                return check_loads(files, value, kind)
            except (Wrong, OSError, ValueError) as error:
                last = error
        raise Wrong(f"{kind} {how} {file.name} at {done}: half of it was pushed: {last!r}")


AREAS = {
    "folders": (attack_folders, 10),
    "requests": (attack_requests, 6),
    "beside": (attack_beside, 4),
    "races": (attack_races, 3),
    "changing": (attack_changing, 3),
}


if __name__ == "__main__":
    loop.main(__doc__, loop.with_folders(AREAS), cases=300)
