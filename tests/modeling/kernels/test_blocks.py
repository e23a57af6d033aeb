"""Integers of the attention in blocks, against counting, for all small cases."""

import functools
import itertools
import random

import pytest

from hf_posenc.modeling.kernels.blocks import (
    LINE,
    AttentionShape,
    Block,
    aligned,
    block_seed,
    clipping_of,
    equal_parts,
    first_distance,
    slices,
    split_at_clipping,
    whole_lines,
)


LENGTHS = [(1, 1), (1, 6), (4, 4), (3, 6)]


def parts(length: int) -> list[slice]:
    """All parts of a length that are not empty."""
    return [slice(start, stop) for start in range(length) for stop in range(start + 1, length + 1)]


def indices(part: slice) -> list[int]:
    return list(range(part.start, part.stop))


@functools.cache
def distance(query: int, key: int, query_length: int) -> int:
    """The index of a pair's distance, found by its place in the sorted list of all."""
    return sorted({j - i for i in range(query_length) for j in range(key + 1)}).index(key - query)


def test_lengths_are_rounded_up_to_lines():
    for length in range(5 * LINE):
        assert aligned(length) % LINE == 0 and 0 <= aligned(length) - length < LINE


@pytest.mark.parametrize("length", range(1, 12))
def test_slices_and_equal_parts_cover_a_length_once(length):
    for most in range(1, 14):
        size = equal_parts(length, most)
        for step in (most, size):
            assert [index for part in slices(length, step) for index in indices(part)] == list(range(length))
        # As few parts as with the greatest size; and no smaller size that would make as few.
        assert 1 <= size <= most and len([*slices(length, size)]) == len([*slices(length, most)])
        assert size == 1 or len([*slices(length, size - 1)]) > len([*slices(length, size)])


def test_whole_lines_hold_the_keys_and_end_with_the_length():
    for length in (1, LINE, 3 * LINE + 5):
        for keys in parts(length):
            lines = whole_lines(keys.start, keys.stop, length)
            assert {*indices(keys)} <= {*indices(lines)} <= {*range(length)}
            assert lines.start % LINE == 0 and keys.start - lines.start < LINE
            assert lines.stop == length or (lines.stop % LINE == 0 and lines.stop - keys.stop < LINE)


@pytest.mark.parametrize("query_length, key_length", LENGTHS)
def test_the_first_distance_is_the_smallest_of_all_pairs(query_length, key_length):
    assert AttentionShape(1, 1, query_length, key_length).distances == query_length + key_length - 1
    for queries, keys in itertools.product(parts(query_length), parts(key_length)):
        found = [distance(i, j, query_length) for i in indices(queries) for j in indices(keys)]
        assert first_distance(queries, keys, query_length) == min(found)
        # With the roles exchanged, the index counts from the other end.
        opposite = query_length + key_length - 2 - max(found)
        assert first_distance(keys, queries, key_length) == opposite


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("query_length, key_length", LENGTHS)
def test_the_split_puts_every_key_where_its_distances_are(query_length, key_length, step):
    sizes = AttentionShape(1, 1, query_length, key_length)
    count = sizes.distances
    for first, last in itertools.product(range(count), repeat=2):
        if first + last > count:
            continue
        for queries, keys in itertools.product(parts(query_length), parts(key_length)):
            clipping = clipping_of(first, last, sizes, queries.stop - queries.start, step)
            before, near, behind = split_at_clipping(queries, keys, clipping, sizes, step)
            assert indices(before) + indices(near) + indices(behind) == indices(keys)
            for key in indices(before):
                assert all(distance(i, key, query_length) < first for i in indices(queries))
            for key in indices(behind):
                assert all(distance(i, key, query_length) >= count - last for i in indices(queries))
            # Rounded to steps, no more keys are called near than must be.
            if near.start < near.stop:
                clipped_before = [k for k in indices(keys) if distance(queries.start, k, query_length) < first]
                clipped_behind = [
                    k for k in indices(keys) if distance(queries.stop - 1, k, query_length) >= count - last
                ]
                assert len(clipped_before) - len(indices(before)) < step
                assert len([k for k in clipped_behind if k >= near.start]) - len(indices(behind)) < step
            # All that near pairs look up is laid out, and so is one clipped distance at each end that has some.
            for i, j in itertools.product(indices(queries), indices(near)):
                assert clipping.laid_out.start <= distance(i, j, query_length) < clipping.laid_out.stop
            if before.start < before.stop:
                assert clipping.laid_out.start < first
            if behind.start < behind.stop:
                assert clipping.laid_out.stop > count - last


def test_clipping_is_true_where_something_is_clipped():
    sizes = AttentionShape(1, 1, 4, 4)
    assert not clipping_of(0, 0, sizes, 2, 2)
    assert clipping_of(0, 0, sizes, 2, 2).laid_out == slice(0, 7)
    assert clipping_of(1, 0, sizes, 2, 2) and clipping_of(0, 1, sizes, 2, 2)


def test_a_block_knows_its_shape_and_its_columns():
    block = Block(2, slice(1, 4), slice(5, 7), slice(16, 48))
    assert block.shape == (3, 2, 32)
    assert block.columns(slice(20, 24)) == slice(4, 8)
    assert block.with_keys(slice(20, 24)).key_place == (2, slice(1, 4), slice(20, 24))
    assert block.with_keys(slice(20, 24)).query_place == block.query_place


def test_seeds_of_blocks_differ_in_the_bits_that_generators_read():
    """PyTorch's generator on CPUs is seeded with the lowest 32 bits."""
    draw = random.Random(0)
    places = [
        (sequence, heads, queries, keys)
        for sequence in range(4)
        for heads in (0, 4, 8)
        for queries in range(0, 512, 128)
        for keys in (0, 16)
    ]
    for _ in range(20):
        seed = draw.getrandbits(62)
        blocks = [Block(s, slice(h, h + 4), slice(q, q + 128), slice(k, k + 64)) for s, h, q, k in places]
        seeds = [block_seed(seed, block) for block in blocks]
        assert seeds == [block_seed(seed, block) for block in blocks]
        assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(places)
        assert all(0 <= seed < 1 << 64 for seed in seeds)
        assert not {*seeds} & {block_seed(seed + 1, block) for block in blocks}
