"""benchmarks/gpu.py, all of whose code runs on CPUs with tiny sizes."""

import subprocess
import sys
from pathlib import Path

import gpu
import pretended
import pytest


pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True)


def test_parity_training_and_costs_on_the_cpu():
    process = run("--device", "cpu", "--quick")
    assert process.returncode == 0, process.stderr[-2000:]
    for row in (
        "| deberta | sdpa |",
        "| DeBERTa-v3 | unpad |",
        "| rope | unpad, bfloat16 |",
        "| rope | jina_embeddings_v3 |",
    ):
        assert row in process.stdout
    for row in (
        "| XLM-RoBERTa | padding-free |",
        "| BERT | padding-free, dropout 0.0 |",
        "| t5, sdpa | forward |",
        "| BERT | t5 |",
    ):
        assert row in process.stdout
    assert "Error" not in process.stdout and "'passed': False" not in process.stdout


def test_what_the_limit_leaves_no_time_for_is_listed():
    process = run("--device", "cpu", "--quick", "--minutes", "0")
    assert process.returncode == 0, process.stderr[-2000:]
    assert "No time was left for: parity of absolute, sdpa;" in process.stdout


def test_a_backend_that_is_wrong_is_told(tmp_path):
    """With a backend that leaves positions out."""
    code = f"""
import sys
sys.argv = ["gpu.py", "--device", "cpu", "--quick", "--parts", "parity"]
sys.path.insert(0, {str(BENCHMARK.parent)!r})
import gpu
from hf_posenc.modeling.attention.backends import BACKENDS, Backend
gpu.SCHEMES = ["t5", "none"]
gpu.STOCK_FAMILIES = ()
BACKENDS["sdpa"] = Backend(lambda attention: (attention.query.transpose(1, 2), None))
gpu.main()
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 1 and "not passed: parity: t5, sdpa" in process.stderr


@pretended.needed
@pytest.mark.parametrize("part", ["parity", "exports", "rerankers"])
def test_models_and_batches_are_moved_to_the_device(part, monkeypatch):
    pretended.skip_padding_there(monkeypatch)
    with pretended.there():
        for setting, function in gpu.PARTS[part](gpu.Run(pretended.NAME, quick=True)):
            found = gpu.measured(function, part != "rerankers")
            assert "error" not in found and found.get("passed", True), (setting, found)
