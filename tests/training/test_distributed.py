"""Several processes: DDP and FSDP2 train every scheme as one process does.

The two processes are started once (distributed_worker.py) and run every case; the tests look at what they measured.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import distributed_worker as worker
import pytest
import tiny
from torch import multiprocessing


pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOLERANCE = 1e-5


def run_both(folder: Path) -> None:
    """Run both processes; RuntimeError says where a process was that a signal ended."""
    try:
        multiprocessing.spawn(worker.run, (str(folder),), nprocs=2)
    except multiprocessing.ProcessExitedException as crash:
        if crash.signal_name is None:
            raise
        log = folder / f"{crash.error_index}.log"
        text = log.read_text() if log.exists() else "no case"
        last = text.rpartition("case ")[2].partition("Extension modules")[0]
        raise RuntimeError(f"{crash} at {last}") from crash


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What both processes measured in a job: name -> [of process 0, of process 1]."""
    folder = tmp_path_factory.mktemp("processes")
    try:
        run_both(folder)
    except RuntimeError as crash:
        # gloo has aborted a process where none of the cases failed: said, and tried once more.
        warnings.warn(f"started again: {crash}", stacklevel=1)
        folder = tmp_path_factory.mktemp("processes")
        run_both(folder)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [result[name] for result in results] for name in results[0]}


def succeeded(results: list[dict]) -> list[dict]:
    for result in results:
        assert "error" not in result, result["error"]
    return results


def assert_trained_as_one(results: list[dict]) -> None:
    """Both processes computed what one computes on the whole batch, and the comparison would have seen another result."""
    for result in succeeded(results):
        assert result["logits"] < TOLERANCE
        assert result["gradients"] < TOLERANCE
        assert result["own_half"] > 100 * TOLERANCE
        assert result["positions"] is None or result["positions"] > 100 * TOLERANCE


def test_only_schemes_without_parameters_are_compared_without_theirs(measured):
    without = {name for name in worker.EVERY_SCHEME if measured[f"ddp: {name}"][0]["positions"] is None}
    assert without == {"absolute", "sinusoidal", "none", "rope", "alibi"}


@pytest.mark.parametrize("name", worker.DDP)
def test_replicas_train_as_one_process_and_use_every_parameter(name, measured):
    assert_trained_as_one(measured[f"ddp: {name}"])


@pytest.mark.parametrize("name", worker.DDP_PACKED)
def test_replicas_that_leave_padding_out_train_as_one_process_that_does_not(name, measured):
    for result in succeeded(measured[f"ddp, packed: {name}"]):
        assert result["gradients"] < TOLERANCE
        assert result["own_half"] > 100 * TOLERANCE
        assert result["logits"] > 100 * TOLERANCE  # at padding, which stands for zeros here


@pytest.mark.parametrize("name", worker.DDP_CHECKPOINTED)
def test_replicas_train_with_gradient_checkpointing(name, measured):
    assert_trained_as_one(measured[f"ddp, checkpointed: {name}"])


@pytest.mark.parametrize("name", worker.DDP_NOT_STOPPED)
def test_replicas_train_with_reentrant_checkpointing(name, measured):
    assert_trained_as_one(measured[f"ddp, reentrant: {name}"])


@pytest.mark.parametrize("name", worker.DDP_STOPPED)
def test_replicas_that_reentrant_checkpointing_would_stop_say_so_and_train_with_a_static_graph(name, measured):
    for result in measured[f"ddp, reentrant: {name}"]:
        assert "ValueError" in result["error"] and "use_reentrant=False" in result["error"]
    assert_trained_as_one(measured[f"ddp, reentrant, static: {name}"])


def test_an_unused_parameter_would_have_been_noticed(measured):
    for result in measured["ddp, unused parameter: t5"]:
        assert "parameters that were not used" in result["error"]


@pytest.mark.parametrize("name", worker.FSDP)
def test_shards_train_as_one_process(name, measured):
    assert_trained_as_one(measured[f"fsdp: {name}"])
    for result in measured[f"fsdp: {name}"]:
        layers = [unit for unit in result["units"] if unit.endswith("Layer")]
        assert len(layers) == tiny.SIZES["num_hidden_layers"], result["units"]


@pytest.mark.parametrize("name", worker.FSDP_CHECKPOINTED)
def test_shards_train_with_activation_checkpointing(name, measured):
    assert_trained_as_one(measured[f"fsdp, checkpointed: {name}"])


@pytest.mark.parametrize("name", worker.FSDP_BY_HAND)
def test_shards_of_a_masked_language_model_train_as_one_process(name, measured):
    assert_trained_as_one(measured[f"fsdp by hand: {name}"])


@pytest.mark.parametrize("name", worker.FSDP_APART)
def test_positions_may_be_shards_of_their_own(name, measured):
    assert_trained_as_one(measured[f"fsdp, positions apart: {name}"])
    for result in measured[f"fsdp, positions apart: {name}"]:
        assert any(unit.endswith("PositionParameter") for unit in result["units"])


@pytest.mark.parametrize("name", worker.SHARDED)
def test_shards_compute_in_bfloat16(name, measured):
    for result in succeeded(measured[f"fsdp, bfloat16: {name}"]):
        assert result["dtype"] == "torch.bfloat16"
        assert result["finite"]
        assert result["logits"] < 0.05 * result["size"]


@pytest.mark.parametrize("name", worker.LEARNED_ROTARY)
def test_frequencies_that_are_rounded_to_bfloat16_are_an_error(name, measured):
    for result in measured[f"fsdp, bfloat16: {name}"]:
        assert "ValueError" in result["error"] and "cast to torch.bfloat16" in result["error"]


@pytest.mark.parametrize("name", worker.LEARNED_ROTARY)
def test_frequencies_that_are_shards_of_their_own_stay_in_single_precision(name, measured):
    assert_trained_as_one(measured[f"fsdp, frequencies apart: {name}"])
    for result in succeeded(measured[f"fsdp, frequencies apart, bfloat16: {name}"]):
        assert result["logits"] < 0.1 * result["rounded"]
        assert result["gradient"] > 0


@pytest.mark.parametrize("name", worker.FSDP_CHECKPOINTED)
def test_shards_can_be_loaded_by_the_first_process_alone(name, measured):
    for result in succeeded(measured[f"fsdp, loaded by the first: {name}"]):
        assert result["logits"] < TOLERANCE


@pytest.mark.parametrize("units", ["fsdp", "fsdp, layers"])
@pytest.mark.parametrize("name, padding", [(n, p) for n, (_, some) in worker.FSDP_PACKED.items() for p in some])
def test_shards_train_as_one_process_whatever_padding_each_has(name, padding, units, measured):
    """Both gather the same units in the same order, though one leaves padding out; of layers by themselves neither does."""
    results = succeeded(measured[f"{units}, packed: {name}, {'/'.join(padding)}"])
    for result, kind in zip(results, padding):
        # A sequence of padding alone attends to it, and so it is computed.
        assert result["packed"] == (units == "fsdp" and kind in ("some", "most", "left"))
        assert result["loss"] < TOLERANCE
        assert result["gradients"] < TOLERANCE
        assert result["own_half"] > 100 * TOLERANCE


def test_the_example_for_fsdp_asks_for_what_was_tested():
    environment = worker.fsdp2_environment()
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "true"


TRAIN_ON_TWO = """
import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForTokenClassification
import hf_posenc

accelerator = Accelerator(cpu=True)
torch.manual_seed(accelerator.process_index)  # replicas start from the weights of the first process
sizes = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37)
model = BertForTokenClassification(BertConfig(**sizes, position_scheme="absolute+t5", position_every_layer=True))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
for _ in range(2):
    ids = torch.randint(5, 99, (2, 8))
    accelerator.backward(model(input_ids=ids, labels=ids % 2).loss)
    optimizer.step()
    optimizer.zero_grad()
table = accelerator.unwrap_model(model).bert.encoder.relative_attention_bias.weight.detach()
tables = accelerator.gather(table[None])
same = bool(torch.equal(tables[0], tables[-1]) and tables.abs().max() > 0)
accelerator.print(type(model).__name__, accelerator.num_processes, len(tables), same)
# Without this a thread of gloo may still hold a tensor at exit, and torch aborts (no fault of the model).
model, optimizer = accelerator.free_memory(model, optimizer)
accelerator.end_training()
"""


def test_the_example_for_two_processes_on_the_cpu_launches_them(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_ON_TWO)
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(EXAMPLES / "accelerate_ddp_cpu.yaml"), str(script)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": worker.loopback(), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "DistributedDataParallel 2 2 True"
