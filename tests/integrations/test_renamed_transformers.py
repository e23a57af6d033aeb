"""Keywords inside transformers' models are found by what they are for: another version's names change nothing.

One process computes with transformers as it is installed, others with its modeling files rewritten (`renamed_transformers.py`), and
all compute the same, bit for bit.
"""

import inspect
from pathlib import Path

import pytest
import renamed_transformers
import torch
from fresh_process import ROOT, run_fresh
from transformers.models.bert import modeling_bert


def computed(kind: str | None, folder: Path) -> dict:
    """What `renamed_checks.py` computes in a process with a kind of transformers."""
    file = folder / "found.pt"
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests/support')!r}); import renamed_checks\n"
    run_fresh(f"{code}renamed_checks.compute({kind!r}, {str(file)!r})", folder, plugin=True)
    return torch.load(file)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict:
    return computed(None, tmp_path_factory.mktemp("as_it_is"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", renamed_transformers.KINDS)
def test_other_names_compute_the_same(kind, expected, tmp_path):
    if kind == "strict" and "@deprecate_kwarg" not in inspect.getsource(modeling_bert):
        pytest.skip("this version of transformers has one name for each of them")
    found = computed(kind, tmp_path)
    left_out = {key for key in expected if key[0] == "generated"} if kind == "public" else set()
    assert found.keys() == expected.keys() - left_out
    different = [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])]
    assert not different
