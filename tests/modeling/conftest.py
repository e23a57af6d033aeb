"""Tiny inputs are computed by whole matrices; what these fixtures do is what long ones have: blocks."""

import pytest
from tiny import PATHS

from hf_posenc.modeling import attention


FEWEST_SCORES = attention.FEWEST_SCORES


@pytest.fixture
def blocks_for_all_lengths(monkeypatch):
    """Tiny inputs take the way of long ones."""
    monkeypatch.setattr(attention, "FEWEST_SCORES", 0)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch) -> str:
    """The way of short inputs, whole matrices, and that of long ones, blocks: a test is run with each, unless it is given one."""
    monkeypatch.setattr(attention, "FEWEST_SCORES", 0 if request.param == "blocks" else FEWEST_SCORES)
    return request.param
