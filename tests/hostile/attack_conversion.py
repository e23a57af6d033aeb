"""Random attacks on conversion, export and FSDP2: `python tests/hostile/attack_conversion.py --cases 60 --seed 0`."""

import copy
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModel, AutoTokenizer


sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

import loop  # noqa: E402
import tiny  # noqa: E402
import tiny_checkpoints  # noqa: E402
from loop import note  # noqa: E402

import hf_posenc  # noqa: E402
from hf_posenc.modeling.kernels import packing  # noqa: E402
from hf_posenc.modeling.schemes.table import SCHEMES  # noqa: E402


SCHEME_NAMES = [*SCHEMES, "absolute+t5", "tupe+t5", "sinusoidal+deberta", "absolute+alibi"]
ERRORS = (OSError, ValueError, TypeError, ImportError)


class Wrong(AssertionError):
    """Something else than what was promised."""


def place(folder: Path, rng: random.Random, family=None, **overrides) -> Path:
    return tiny_checkpoints.save(folder / "in", family or rng.choice([*tiny.FAMILIES]), **overrides)


def check_written(output: Path, model) -> None:
    """What is written is whole, and computes what was returned."""
    loaded = AutoModel.from_pretrained(output).eval()
    family = getattr(loaded.config, "stock_model_type", loaded.config.model_type)
    batch = tiny.inputs(length=12, family=family, padding=None)
    with torch.no_grad():
        found, expected = loaded(**batch).last_hidden_state, model.base_model(**batch).last_hidden_state
    if not torch.allclose(found, expected, atol=1e-5) or not found.isfinite().all():
        raise Wrong(f"the saved model is off by {(found - expected).abs().max()}")
    AutoTokenizer.from_pretrained(output)
    json.loads((output / "conversion.json").read_text())


def nothing_left(folder: Path, but: set[str]) -> None:
    left = {file.name for file in folder.iterdir()} - but
    if left:
        raise Wrong(f"left behind: {sorted(left)}")


def attack_any_to_any(rng: random.Random, folder: Path) -> None:
    source, first, second = place(folder, rng), rng.choice(SCHEME_NAMES), rng.choice(SCHEME_NAMES)
    text = [folder / "in.txt"]
    for step, scheme in enumerate((first, second)):
        output = folder / f"out{step}"
        settings = {
            "max_length": rng.choice([None, None, 48, 200]),
            "train": rng.choice(["all", "positions", "none", "beyond"]),
            "extend": rng.choice(["tile", "interpolate", "mean"]),
        }
        try:
            model, report = hf_posenc.convert(source, scheme, output=output, text=text, max_steps=2, **settings)
        except ERRORS as error:
            if not str(error).strip() or "size mismatch" in str(error):
                raise
            nothing_left(folder, {"in", "in.txt", "out0"} - ({"out0"} if not step else set()))
            note(f"refused: {str(error)[:60]}")
            return
        check_written(output, model)
        source = output


def attack_bad_sources(rng: random.Random, folder: Path) -> None:
    source = place(folder, rng)
    text, settings = [folder / "in.txt"], {"max_steps": 2}
    output = folder / "out"
    kind = rng.choice(
        "nan length zero negative float tokenizer special empty binary link loop file cwd cut inf half encoding".split()
    )
    from safetensors.torch import load_file, save_file

    weights = source / "model.safetensors"
    match kind:
        case "nan" | "inf":
            state = load_file(weights)
            name = rng.choice(sorted(state))
            state[name].view(-1)[0] = float(kind)
            save_file(state, weights, metadata={"format": "pt"})
        case "length":
            settings["max_length"] = rng.choice([10**9, 10**30, 131073, 3])
        case "zero":
            settings["trained_length"] = rng.choice([0, -1, 15, 10**9])
        case "negative":
            settings["max_steps"] = rng.choice([-1, 0])
            settings["train"] = "all"
            if settings["max_steps"] == 0:
                settings["max_steps"] = -5
        case "float":
            settings[rng.choice(["max_length", "trained_length", "max_steps"])] = rng.choice(
                [33.5, "48", True, float("nan")]
            )
        case "tokenizer":
            other = tiny_checkpoints.tokenizer()
            other.add_tokens([f"new{number}" for number in range(40)])
            other.save_pretrained(source)
            text = [folder / "new.txt"]
            text[0].write_text("\n".join(" ".join(f"new{n}" for n in range(40)) for _ in range(200)))
        case "special":
            other = AutoTokenizer.from_pretrained(source)
            setattr(other, rng.choice(["cls_token", "sep_token", "pad_token"]), None)
            other.save_pretrained(source)
        case "empty":
            text = [folder / "empty.txt"]
            text[0].write_text(rng.choice(["", "\n\n\n", "w5", " "]))
        case "binary" | "encoding":
            text = [folder / "binary.txt"]
            text[0].write_bytes(bytes(rng.randrange(256) for _ in range(5000)))
        case "link":
            output.symlink_to(folder / "nowhere")
        case "loop":
            output.symlink_to(output)
        case "file":
            output.write_text("mine")
        case "cwd":
            output = source / rng.choice(["", "out", "../in"])
        case "cut":
            weights.write_bytes(weights.read_bytes()[: rng.randrange(weights.stat().st_size)])
        case "half":
            state = load_file(weights)
            state.pop(rng.choice(sorted(state)))
            save_file(state, weights, metadata={"format": "pt"})
    before = {f.name for f in folder.iterdir()}
    inside = {f.name: f.read_bytes() for f in source.iterdir() if f.is_file()}
    try:
        model, report = hf_posenc.convert(source, "t5", output=output, text=text, **settings)
    except ERRORS as error:
        if not str(error).strip():
            raise
        nothing_left(folder, before)
        now = {f.name: f.read_bytes() for f in source.iterdir() if f.is_file()}
        if now != inside:
            raise Wrong("the source was changed") from error
        return
    if kind in (
        "nan",
        "inf",
        "length",
        "zero",
        "negative",
        "tokenizer",
        "special",
        "empty",
        "link",
        "loop",
        "file",
        "cut",
    ):
        raise Wrong(f"{kind} {settings}: not refused")
    check_written(output, model)


CHILD = """
import sys, torch, hf_posenc
from transformers import logging
logging.set_verbosity_error()
torch.set_num_threads(1)
source, output, text, steps, resume = sys.argv[1:]
hf_posenc.convert(source, "deberta", output=output, text=[text], max_steps=int(steps), resume=resume == "1")
"""


def attack_killed(rng: random.Random, folder: Path) -> None:
    """Killed at a random moment; what resumes ends as what was never interrupted."""
    source, text = place(folder, rng, "bert"), folder / "in.txt"
    output = folder / "out"
    hard = rng.random() < 0.7
    command = [sys.executable, "-c", CHILD, source, output, text, "60"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    child = subprocess.Popen([*command, "0"], **quiet)
    state = folder / ".out.conversion" / "distillation.pt"
    until = time.monotonic() + 30
    if rng.random() < 0.7:
        while not state.exists() and child.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.8)
    else:
        time.sleep(rng.random() * 8)
    child.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
    child.wait()
    done = output.exists()
    if not done:
        result = subprocess.run([*command, "1"], **quiet, timeout=120, check=False)
        if result.returncode:
            raise Wrong(f"resume failed: {result.stderr.decode()[-300:]}")
    straight = folder / "straight"
    hf_posenc.convert(source, "deberta", output=straight, text=[text], max_steps=60)
    first, second = (AutoModel.from_pretrained(each).state_dict() for each in (output, straight))
    difference = max((first[name].float() - second[name].float()).abs().max().item() for name in first)
    note(f"killed: resumed={not done}")
    if difference > 1e-3:
        raise Wrong(f"resumed differs by {difference}")
    nothing_left(folder, {"in", "in.txt", "out", "straight"})


def attack_full_disk(rng: random.Random, folder: Path) -> None:
    """Files may not grow beyond a random size."""
    source, text = place(folder, rng, "bert"), folder / "in.txt"
    output = folder / "out"
    limit = rng.choice([100, 5_000, 50_000, 100_000, 200_000, 400_000])
    command = [sys.executable, "-c", CHILD, source, output, text, rng.choice(["3", "60"])]
    result = subprocess.run(
        [*command, "0"],
        capture_output=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: (
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        ),
    )
    if result.returncode == 0:
        check_written(output, AutoModel.from_pretrained(output))
        return
    if output.exists():
        raise Wrong(f"limit {limit}: half an output: {sorted(f.name for f in output.iterdir())}")
    last = result.stderr.decode().strip().splitlines()[-1]
    if not last.startswith(("OSError", "PermissionError", "ValueError")):
        raise Wrong(f"limit {limit}: {last[:200]}")
    left = {f.name for f in folder.iterdir()} - {"in", "in.txt", ".out.conversion"}
    if left:
        raise Wrong(f"limit {limit}: left {left}")
    if (folder / ".out.conversion").exists():
        again = subprocess.run([*command, "1"], capture_output=True, check=False, timeout=120)
        if again.returncode:
            raise Wrong(f"limit {limit}: resume failed {again.stderr.decode()[-300:]}")
        check_written(output, AutoModel.from_pretrained(output))


def attack_resume(rng: random.Random, folder: Path) -> None:
    """Resume with something else than what was interrupted."""
    from hf_posenc.conversion import converting

    source, text = place(folder, rng, "bert"), folder / "in.txt"
    output = folder / "out"

    class Stop(BaseException):
        pass

    def stop(*_, **__):
        raise Stop

    write, converting.write_converted = converting.write_converted, stop
    try:
        hf_posenc.convert(source, "t5", output=output, text=[text], max_steps=30)
    except Stop:
        pass
    finally:
        converting.write_converted = write
    if not (folder / ".out.conversion" / "distillation.pt").is_file():
        raise Wrong("no state is left")
    kind = rng.choice(
        ["weights", "config", "text", "flags", "steps", "seed", "cut", "gone", "report", "tokenizer", "held"]
    )
    keywords = {"max_steps": 30}
    scheme = "t5"
    match kind:
        case "weights":
            tiny_checkpoints.stock("bert", seed=7).save_pretrained(source)
        case "config":
            config = json.loads((source / "config.json").read_text())
            config |= rng.choice([{"layer_norm_eps": 0.1}, {"hidden_act": "relu"}])
            (source / "config.json").write_text(json.dumps(config))
        case "text":
            text.write_text(tiny_checkpoints.text(seed=9))
        case "flags":
            keywords |= {"position_buckets": 16}
        case "steps":
            keywords["max_steps"] = 31
        case "seed":
            keywords["seed"] = 4
        case "cut":
            state = folder / ".out.conversion" / "distillation.pt"
            state.write_bytes(state.read_bytes()[: rng.randrange(state.stat().st_size)])
        case "gone":
            (folder / ".out.conversion" / "report.json").unlink()
        case "report":
            file = folder / ".out.conversion" / "report.json"
            file.write_text(file.read_text()[: rng.randrange(len(file.read_text()))])
        case "tokenizer":
            # The same words under other numbers.
            tokenizer = json.loads((source / "tokenizer.json").read_text())
            vocabulary = tokenizer["model"]["vocab"]
            vocabulary["w5"], vocabulary["w6"] = vocabulary["w6"], vocabulary["w5"]
            (source / "tokenizer.json").write_text(json.dumps(tokenizer))
        case "held":
            (folder / "held.txt").write_text(tiny_checkpoints.text(seed=11))
            keywords["held_out"] = [folder / "held.txt"]
    try:
        hf_posenc.convert(source, scheme, output=output, text=[text], resume=True, **keywords)
    except ERRORS:
        note(f"resume, {kind}: refused")
        return
    raise Wrong(f"resume with another {kind} goes on in silence")


def attack_onnx(rng: random.Random, folder: Path) -> None:
    import onnxruntime

    source, scheme = place(folder, rng), rng.choice(SCHEME_NAMES)
    try:
        model, _ = hf_posenc.convert(
            source, scheme, output=folder / "out", text=[folder / "in.txt"], max_steps=2, onnx=True
        )
    except ERRORS as error:
        if "already" in str(error):
            return
        raise
    session = onnxruntime.InferenceSession(folder / "out" / "onnx" / "model.onnx")
    family = json.loads((source / "config.json").read_text())["model_type"]
    for _ in range(4):
        batch = tiny.inputs(batch=rng.choice([1, 3]), length=rng.choice([3, 11, 30]), family=family, padding="right")
        if batch["input_ids"].shape[1] < 3:
            continue
        fed = {"token_type_ids": torch.zeros_like(batch["input_ids"]), **batch}
        [found] = session.run(None, {one.name: fed[one.name].numpy() for one in session.get_inputs()})
        with torch.no_grad():
            expected = model.base_model(**batch).last_hidden_state
        off = tiny.difference_where_attended(torch.tensor(found), expected, batch["attention_mask"])
        if not off < 1e-3:
            raise Wrong(f"{scheme}: ONNX is off by {off}")


def attack_fsdp(rng: random.Random, folder: Path) -> None:
    """`fully_shard` on one process, packing on, beside the same model unwrapped and unpacked."""
    from torch.distributed.fsdp import fully_shard

    if not distributed.is_initialized():
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    packing.FEWEST_PLACES, packing.SMALLEST_SHARE = 1, 0.01
    family = rng.choice([*tiny.FAMILIES])
    kind = rng.choice(["variant", "variant", "stock"])
    head = "ForTokenClassification"
    if kind == "variant":
        model = tiny.build(rng.choice(SCHEME_NAMES), family, head)
        reference = copy.deepcopy(model)
        reference.config.unpad = False
        reference.base_model.config.unpad = False
    else:
        model = tiny_checkpoints.stock(family, head)
        reference = copy.deepcopy(model)
        hf_posenc.unpad(model)
    inner = model.base_model
    layers = (inner.transformer if family == "distilbert" else inner.encoder).layer
    units = rng.choice(["layers", "whole", "both", "embeddings"])
    if units in ("layers", "both"):
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    if units == "embeddings":
        fully_shard(inner.embeddings, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = tiny.inputs(batch=4, length=30, family=family, padding=rng.choice(["right", "left"]))
    batch["labels"] = torch.randint(0, 2, (4, 30)).masked_fill(batch["attention_mask"] == 0, -100)
    for part in (model, reference):
        part.eval()
    found, expected = model(**batch), reference(**batch)
    off = tiny.difference_where_attended(found.logits, expected.logits, batch["attention_mask"])
    if not off < 1e-4:
        raise Wrong(f"{family} {units} {kind}: logits off by {off}")
    found.loss.backward(), expected.loss.backward()
    for (name, left), right in zip(model.named_parameters(), reference.parameters()):
        if left.grad is None or right.grad is None:
            continue
        off = (left.grad.full_tensor() - right.grad).abs().max().item()
        if not off < 1e-4:
            raise Wrong(f"{family} {units} {kind}: gradient of {name} off by {off}")


AREAS = {
    "bad_sources": (attack_bad_sources, 6),
    "any_to_any": (attack_any_to_any, 6),
    "resume": (attack_resume, 4),
    "fsdp": (attack_fsdp, 6),
    "onnx": (attack_onnx, 1),
    "full_disk": (attack_full_disk, 1),
    "killed": (attack_killed, 1),
}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    loop.main(__doc__, loop.with_folders(AREAS), cases=60)
