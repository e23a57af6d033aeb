"""What two processes on the CPU do for test_distributed.py; one pair runs all cases, to start only once."""

import copy
import datetime
import faulthandler
import json
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tiny
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_posenc import position_parameters
from hf_posenc.modeling.kernels import packing
from hf_posenc.modeling.models.embeddings import COMBINE
from hf_posenc.modeling.schemes.table import SCHEMES


FSDP2_CONFIG = Path(__file__).resolve().parents[2] / "examples" / "accelerate_fsdp2.yaml"


@dataclass(frozen=True)
class Case:
    """A tiny model with its position parameters filled."""

    scheme: str
    flags: dict = field(default_factory=dict)
    family: str = "bert"
    head: str = "ForTokenClassification"

    def build(self) -> nn.Module:
        return tiny.build(self.scheme, self.family, self.head, **self.flags).train()

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """Inputs with labels, as many in every batch: the mean over two batches is then the mean of their means."""
        inputs = tiny.inputs(batch=2, length=9, family=self.family, seed=seed)
        classes = tiny.SIZES["vocab_size"] if self.head == "ForMaskedLM" else 2
        labels = torch.randint(classes, (2, 9), generator=torch.Generator().manual_seed(seed))
        return {**inputs, "labels": labels.masked_fill(inputs["attention_mask"] == 0, -100)}


def again(scheme: str, combine: str, **keywords) -> Case:
    """The embedding-level positions before every layer."""
    return Case(scheme, {"position_every_layer": True, "position_combine": combine}, **keywords)


EVERY_SCHEME = {name: Case(name) for name in SCHEMES}
EVERY_COMBINE = {f"absolute+t5, {combine}": again("absolute+t5", combine) for combine in COMBINE}
DDP = EVERY_SCHEME | EVERY_COMBINE
DDP_CHECKPOINTED = {name: DDP[name] for name in ("tupe", "transformer_xl", "absolute+t5, gate")}
# What several layers share stops DDP there; what a layer has for itself, and constants, do not.
DDP_STOPPED = {
    **{name: EVERY_SCHEME[name] for name in ("t5", "deberta", "tupe")},
    "fire for all layers": Case("fire", {"position_per_layer": False}),
    "absolute, again": again("absolute", "add"),
    "learned sinusoids, again": Case("sinusoidal", {"position_every_layer": True, "position_learn_amplitude": True}),
}
DDP_NOT_STOPPED = {
    **{name: EVERY_SCHEME[name] for name in ("relative", "cable")},
    "t5 by layer": Case("t5", {"position_per_layer": True}),
    "sinusoidal, again": again("sinusoidal", "add"),
}
# Parameters of the encoder, of a layer, and of both; what is computed from the word embeddings' width.
SHARDED = {name: EVERY_SCHEME[name] for name in ("absolute", "t5", "relative", "kerple", "tupe", "deberta")}
FSDP = (
    SHARDED
    | {name: EVERY_SCHEME[name] for name in ("none", "transformer_xl")}
    | {name: EVERY_COMBINE[name] for name in ("absolute+t5, gate", "absolute+t5, attention")}
    | {
        "sinusoidal, again": again("sinusoidal", "attention"),
        "absolute+tupe, roberta": Case("absolute+tupe", family="roberta"),
        "tupe+t5, electra": Case("tupe+t5", family="electra"),
        "absolute, again, electra": again("absolute", "add", family="electra"),
        "t5 per layer": Case("t5", {"position_per_layer": True}),
        "deberta with norm": Case("deberta", {"position_norm": True}),
    }
)
FSDP_CHECKPOINTED = {name: FSDP[name] for name in ("tupe", "deberta", "absolute+t5, gate")}
FSDP_APART = {"transformer_xl": FSDP["transformer_xl"], "sinusoidal+tupe, again": again("sinusoidal+tupe", "add")}
LEARNED_ROTARY = {
    name: Case("rope", {"position_learn_frequencies": name, "position_init": "paper"}) for name in ("shared", "layer")
}
DDP_PACKED = {name: Case(name, {"unpad": False}) for name in ("absolute", "t5", "relative", "tupe")}
# What two processes have of padding: different widths, none in one of them, a whole sequence of it, and the other side.
PADDINGS = [("some", "most"), ("none", "some"), ("all", "some"), ("left", "none")]
FSDP_PACKED = {name: (case, PADDINGS) for name, case in EVERY_SCHEME.items()} | {
    "tupe+t5, masked language model": (Case("tupe+t5", head="ForMaskedLM"), PADDINGS[:2]),
    "absolute+t5, again": (again("absolute+t5", "add"), PADDINGS[:2]),
}
# accelerate puts the output embeddings into a group of their own, away from the bias that is tied to theirs, which fails
# for stock's masked language models too; so these are wrapped by hand.
FSDP_BY_HAND = {
    f"{name}, masked language model": Case(case.scheme, case.flags, head="ForMaskedLM")
    for name in ("tupe", "absolute+t5, gate")
    for case in (FSDP[name],)
}


def two_steps(case: Case, rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict:
    """Train the wrapped model on half a batch, as each of two processes does, and an unwrapped one on the whole.

    Returns:
        Largest differences over two steps, `logits` and `gradients`; what they are measured against, `own_half` (how far
        the gradients are from those of this process's half alone) and `positions` (the largest gradient of a position
        parameter, None if there is none); and `units`, the classes of what FSDP gathers as one.
    """
    model = case.build()
    reference, alone = copy.deepcopy(model), copy.deepcopy(model)
    alone(**case.batch(rank)).loss.backward()
    wrapped = wrap(model)
    # Checkpointing as accelerate does it wraps the layers.
    parameters = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    assert parameters.keys() == dict(reference.named_parameters()).keys()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (wrapped, reference)]
    measured = {"logits": 0.0, "gradients": 0.0, "own_half": 0.0, "positions": None}
    for step in range(2):
        halves = [case.batch(2 * step + half) for half in range(2)]
        output = wrapped(**halves[rank])
        expected = reference(**{name: torch.cat([half[name] for half in halves]) for name in halves[0]})
        output.loss.backward()
        expected.loss.backward()
        logits = expected.logits[2 * rank : 2 * rank + 2]
        measured["logits"] = max(measured["logits"], largest(output.logits - logits))
        for name, parameter in reference.named_parameters():
            gradient = whole(parameters[name].grad)
            measured["gradients"] = max(measured["gradients"], largest(gradient - parameter.grad))
            if step == 0:
                own = alone.get_parameter(name).grad
                measured["own_half"] = max(measured["own_half"], largest(own - parameter.grad))
        if step == 0:
            own = [largest(parameter.grad) for parameter in position_parameters(reference).values()]
            measured["positions"] = max(own, default=None)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    measured["units"] = sorted(type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule))
    return measured


def largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together from both processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def replicate(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=False)


def replicate_packed(model: nn.Module) -> nn.Module:
    """A replica that leaves padding out, of a batch as small as these too; the model that it is compared with does not."""
    packing.FEWEST_PLACES = 1
    model.config.unpad = True
    return replicate(model)


def replicate_checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return replicate(model)


def replicate_checkpointed_reentrantly(model: nn.Module, static_graph: bool = False) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return DistributedDataParallel(model, static_graph=static_graph)


def shard(model: nn.Module, mixed_precision: str = "no", **settings) -> nn.Module:
    """What `Accelerator.prepare` does under the example's config file, FSDP2."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # Of processes on the CPU it would make replicas. A state that is made later copies the type from `PartialState`.
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    sharded, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return sharded


def shard_checkpointed(model: nn.Module) -> nn.Module:
    return shard(model, activation_checkpointing=True)


def shard_frequencies_apart(model: nn.Module, **settings) -> nn.Module:
    """As docs/processes.md has it."""
    for name, module in model.named_modules():
        if name.endswith("rotary_frequencies"):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    return shard(model, **settings)


def shard_by_hand(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module)
    return fully_shard(model)


def shard_positions_apart(model: nn.Module) -> nn.Module:
    """A unit for every module of a scheme, as PEFT's policy makes one for every module that is trained."""
    for module in model.modules():
        if hasattr(module, "position_initial"):
            fully_shard(module)
    return shard_by_hand(model)


def unused_parameter(case: Case, rank: int) -> dict:
    """What comes of a parameter that no gradient reaches."""
    model = case.build()
    model.unused = nn.Linear(1, 1)
    replica = replicate(model)
    for _ in range(2):
        replica(**case.batch(rank)).loss.backward()
    return {}


def padded(case: Case, padding: tuple[str, ...]) -> list[dict[str, torch.Tensor]]:
    """A batch for each process, with sequences of these lengths and as many labels, so that losses have the same weight."""
    halves = []
    for seed, kind in enumerate(padding):
        batch = case.batch(seed)
        mask = torch.ones_like(batch["attention_mask"])
        lengths = {"none": (9, 9), "some": (9, 4), "left": (9, 4), "all": (9, 0), "most": (5, 3)}[kind]
        for row, length in enumerate(lengths):
            mask[row, : 9 - length if kind == "left" else None] = 0
            mask[row, slice(9 - length, 9) if kind == "left" else slice(0, length)] = 1
        labels = torch.full_like(batch["labels"], -100)
        places = mask.flatten().nonzero().flatten()[:8]
        labels.view(-1)[places] = torch.arange(8) % 2
        halves.append(batch | {"attention_mask": mask, "labels": labels})
    return halves


def packed_step(case: Case, rank: int, padding: tuple[str, ...], wrap: Callable[[nn.Module], nn.Module]) -> dict:
    """A step of shards that leave padding out, with batches of different padding, beside one process that does not.

    Returns:
        Largest differences of `loss` and `gradients`, of the gradients from those of this process's batch alone
        (`own_half`), and whether this process `packed`.
    """
    packing.FEWEST_PLACES = 1
    model = case.build()
    model.config.unpad = True
    reference, alone = copy.deepcopy(model), copy.deepcopy(model)
    for each in (reference, alone):
        each.config.unpad = False
    halves = padded(case, padding)
    alone(**halves[rank]).loss.backward()
    packed, of = [], packing.Packing.of
    packing.Packing.of = lambda *arguments: packed.append(True) or of(*arguments)
    try:
        loss = wrap(model)(**halves[rank]).loss
    finally:
        packing.Packing.of = of
    loss.backward()
    expected = [reference(**half).loss for half in halves]
    (sum(expected) / 2).backward()
    measured = {"loss": largest(loss - expected[rank]), "gradients": 0.0, "own_half": 0.0, "packed": bool(packed)}
    for name, parameter in reference.named_parameters():
        gradient = model.get_parameter(name).grad
        right = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        off = largest(right if gradient is None else whole(gradient) - right)
        measured["gradients"] = max(measured["gradients"], off)
        own = alone.get_parameter(name).grad
        measured["own_half"] = max(measured["own_half"], largest(right if own is None else own - right))
    return measured


def in_bfloat16(case: Case, rank: int) -> dict:
    """One step under FSDP2 in bfloat16, beside float32."""
    model = case.build()
    reference = copy.deepcopy(model)
    sharded = shard(model, mixed_precision="bf16")
    output, expected = sharded(**case.batch(rank)), reference(**case.batch(rank))
    output.loss.backward()
    return {
        "dtype": str(output.logits.dtype),
        "logits": largest(output.logits.float() - expected.logits),
        "size": largest(expected.logits),
        "finite": all(bool(whole(parameter.grad).isfinite().all()) for parameter in model.parameters()),
    }


def far_in_bfloat16(case: Case, rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict:
    """A pass at positions that bfloat16 does not have, under FSDP2 in bfloat16, and in one process, where the frequencies stay in float32."""
    model = case.build()
    reference = copy.deepcopy(model).bfloat16()
    batch = case.batch(rank) | {"position_ids": torch.arange(9)[None] * 123 + 1001}
    output, expected = wrap(model)(**batch), reference(**batch)
    # What shards would compute if positions and frequencies were rounded too.
    moved = reference(**batch | {"position_ids": batch["position_ids"].bfloat16().long()})
    output.loss.backward()
    frequencies = [p for name, p in model.named_parameters() if name.endswith("rotary_frequencies.weight")]
    return {
        "logits": largest(output.logits.float() - expected.logits.float()),
        "rounded": largest(moved.logits.float() - expected.logits.float()),
        "gradient": min(float(whole(frequency.grad).abs().max()) for frequency in frequencies),
    }


def loaded_by_the_first(case: Case, rank: int) -> dict:
    """Sharded where only the first process has the weights (`fsdp_cpu_ram_efficient_loading`)."""
    model = case.build()
    reference = copy.deepcopy(model)
    if rank != 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    sharded = shard(model, cpu_ram_efficient_loading=True)
    return {"logits": largest(sharded(**case.batch(rank)).logits - reference(**case.batch(rank)).logits)}


def jobs(rank: int) -> dict[str, Callable[[], dict]]:
    """All cases, in the order in which both processes run them."""

    def steps(prefix: str, cases: dict[str, Case], wrap: Callable) -> dict:
        return {f"{prefix}: {name}": lambda case=case: two_steps(case, rank, wrap) for name, case in cases.items()}

    def other(prefix: str, cases: dict[str, Case], run: Callable) -> dict:
        return {f"{prefix}: {name}": lambda case=case: run(case, rank) for name, case in cases.items()}

    def packed(prefix: str, wrap: Callable) -> dict:
        return {
            f"{prefix}: {name}, {'/'.join(padding)}": partial(packed_step, case, rank, padding, wrap)
            for name, (case, paddings) in FSDP_PACKED.items()
            for padding in paddings
        }

    return {
        **steps("ddp", DDP, replicate),
        **steps("ddp, checkpointed", DDP_CHECKPOINTED, replicate_checkpointed),
        **steps("ddp, reentrant", DDP_STOPPED | DDP_NOT_STOPPED, replicate_checkpointed_reentrantly),
        **steps("ddp, reentrant, static", DDP_STOPPED, partial(replicate_checkpointed_reentrantly, static_graph=True)),
        **other("ddp, unused parameter", {"t5": EVERY_SCHEME["t5"]}, unused_parameter),
        **steps("fsdp", FSDP, shard),
        **steps("fsdp, checkpointed", FSDP_CHECKPOINTED, shard_checkpointed),
        **steps("fsdp by hand", FSDP_BY_HAND, shard_by_hand),
        **steps("fsdp, positions apart", FSDP_APART, shard_positions_apart),
        **other("fsdp, bfloat16", SHARDED, in_bfloat16),
        **other("fsdp, bfloat16", LEARNED_ROTARY, in_bfloat16),
        **steps("fsdp, frequencies apart", LEARNED_ROTARY, shard_frequencies_apart),
        **other(
            "fsdp, frequencies apart, bfloat16",
            LEARNED_ROTARY,
            partial(far_in_bfloat16, wrap=partial(shard_frequencies_apart, mixed_precision="bf16")),
        ),
        **other("fsdp, loaded by the first", FSDP_CHECKPOINTED, loaded_by_the_first),
        **steps(
            "ddp, packed", DDP_PACKED, replicate_packed
        ),  # from here on packing pays for batches as small as these
        **packed("fsdp, packed", fully_shard),
        **packed("fsdp, layers, packed", shard_by_hand),
    }


def fsdp2_environment() -> dict[str, str]:
    """What `accelerate launch --config_file examples/accelerate_fsdp2.yaml` tells its processes about FSDP."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = ["--config_file", str(FSDP2_CONFIG), "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    environment = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in environment.items() if name.startswith("FSDP_")}


def loopback() -> str:
    """The network interface of this machine alone, which gloo is to use."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def run(rank: int, folder: str) -> None:
    """One of the two processes: its results are {case: measurements or {"error": traceback}} in `folder`/`rank`.json.

    The cases that it has begun are in `folder`/`rank`.log, and after them the stack if a signal ends it.
    """
    log = open(Path(folder, f"{rank}.log"), "w")  # open as long as the process runs
    faulthandler.enable(log)
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback(), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", **fsdp2_environment()}
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    results = {}
    for name, job in jobs(rank).items():
        print("case", name, file=log, flush=True)
        try:
            results[name] = job()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()
    # Without the interpreter's finalization: gloo's threads may hold tensors still, and to free them then is an abort.
    os._exit(0)
