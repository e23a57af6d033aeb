"""Which kernel and which blocks are chosen when."""

import pytest

from hf_posenc.modeling.kernels.block_terms import (
    DistanceBias,
    KeyTable,
    PairBias,
    PositionProduct,
    QueryTable,
    ValueTable,
)
from hf_posenc.modeling.kernels.blocks import AttentionShape
from hf_posenc.modeling.kernels.strategies import Kernel, Strategy, choose_strategy, may_clip


def choose(kinds: set, length: int, *, batch: int = 8, clipped: tuple[int, int] = (0, 0), **differently) -> Strategy:
    """Without dropout, with a range of keys for each sequence, unless something else is given."""
    facts = {"dropout": False, "has_ranges": True, "is_shared": True, "is_dense": True, "has_backward": False}
    return choose_strategy(AttentionShape(batch, 12, length, length), frozenset(kinds), clipped, **facts | differently)


@pytest.mark.parametrize(
    "kinds, length, facts, kernel",
    [
        ({DistanceBias}, 512, {}, Kernel.BIAS_BY_DISTANCE),
        ({DistanceBias}, 512, {"has_ranges": False}, Kernel.BIAS),
        ({DistanceBias}, 512, {"dropout": True}, Kernel.BLOCKS),
        ({PairBias}, 512, {"is_shared": False}, Kernel.BIAS),
        ({DistanceBias, PairBias}, 512, {}, Kernel.BIAS),
        ({PositionProduct}, 512, {}, Kernel.BIAS),
        ({PositionProduct}, 512, {"batch": 1}, Kernel.BLOCKS),
        ({PositionProduct}, 512, {"is_shared": False}, Kernel.BLOCKS),
        ({QueryTable}, 512, {}, Kernel.BLOCKS),
        ({QueryTable}, 2048, {}, Kernel.BIAS),
        ({QueryTable, PositionProduct}, 2048, {}, Kernel.BLOCKS),
        ({QueryTable}, 4096, {"clipped": (4000, 4000)}, Kernel.BLOCKS),
        ({QueryTable, KeyTable}, 4096, {}, Kernel.BLOCKS),
        ({QueryTable, ValueTable}, 4096, {}, Kernel.BLOCKS),
    ],
)
def test_the_kernel(kinds, length, facts, kernel):
    assert choose(kinds, length, **facts).kernel is kernel


def test_blocks_are_wide_where_many_keys_have_rows_of_their_own():
    short, long = choose({KeyTable}, 512), choose({KeyTable}, 4096)
    clipped = choose({KeyTable}, 4096, clipped=(3900, 3900))
    assert (short.rows, short.keys) == (clipped.rows, clipped.keys) == (128, 64)
    assert (long.rows, long.keys) == (512, 128)


def test_heads_of_a_block_are_as_many_as_fit():
    assert [choose({QueryTable}, length).heads for length in (128, 512, 1024, 4096)] == [12, 12, 6, 4]
    assert choose({QueryTable}, 16).rows == 16


@pytest.mark.parametrize(
    "facts, by_kernel",
    [({}, True), ({"dropout": True}, False), ({"has_ranges": False}, False), ({"is_dense": False}, False)],
)
def test_clipped_keys_are_left_to_the_kernel_where_it_can(facts, by_kernel):
    found = choose({QueryTable, KeyTable}, 4096, clipped=(3600, 3600), **facts)
    assert found.clipping and found.clipped_keys_by_kernel is by_kernel
    assert choose({QueryTable}, 1024, clipped=(900, 900), **facts).clipped_keys_by_kernel is False


def test_clipping_is_made_use_of_where_it_saves_enough():
    assert choose({QueryTable}, 512, clipped=(448, 448)).clipping
    assert not choose({QueryTable}, 512, clipped=(380, 380)).clipping
    assert not choose({QueryTable, PairBias}, 512, clipped=(448, 448)).clipping
    assert not may_clip(AttentionShape(1, 12, 128, 128), frozenset({QueryTable}))


@pytest.mark.parametrize(
    "kinds, length, facts, keeps",
    [
        ({QueryTable}, 512, {"has_backward": True}, True),
        ({QueryTable}, 512, {}, False),
        ({QueryTable}, 513, {"has_backward": True}, False),
        ({DistanceBias}, 512, {"has_backward": True, "dropout": True}, True),
        # PyTorch's kernel does not tell its weights.
        ({DistanceBias}, 128, {"has_backward": True}, False),
    ],
)
def test_weights_of_short_sequences_are_kept_for_the_backward_pass(kinds, length, facts, keeps):
    assert choose(kinds, length, **facts).keeps_weights is keeps


def test_weights_of_clipped_keys_are_not_kept_for_few_queries_with_a_long_cache():
    facts = {"dropout": False, "has_ranges": True, "is_shared": True, "is_dense": True, "has_backward": True}
    sizes = AttentionShape(1, 12, 4, 4096)
    found = choose_strategy(sizes, frozenset({QueryTable, KeyTable}), (3600, 100), **facts)
    assert found.clipped_keys_by_kernel and not found.keeps_weights
    assert choose_strategy(sizes, frozenset({QueryTable, KeyTable}), (0, 0), **facts).keeps_weights


def test_a_strategy_can_be_printed():
    text = str(choose({QueryTable, KeyTable}, 4096))
    assert "Kernel.BLOCKS" in text and "rows=512" in text and "clipped_keys_by_kernel=False" in text
