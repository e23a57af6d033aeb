"""Tiny inputs are computed by whole matrices; what these fixtures do is what long ones have: blocks."""

import pytest
from tiny import PATHS

from hf_posenc.modeling.kernels import fast


def compute_in_blocks(monkeypatch) -> None:
    """Sequences of any length, with and without gradients."""
    for limit in ("FEWEST_SCORES", "FEWEST_SCORES_WITH_VIEWS"):
        monkeypatch.setattr(fast, limit, 0)


@pytest.fixture
def blocks_for_all_lengths(monkeypatch):
    """Tiny inputs take the way of long ones."""
    compute_in_blocks(monkeypatch)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch) -> str:
    """The way of short inputs, whole matrices, and that of long ones, blocks: a test is run with each, unless it is given one."""
    if request.param == "blocks":
        compute_in_blocks(monkeypatch)
    return request.param
