"""Each term of an attention in blocks alone, against loops in float64: scores, and gradients by autograd of the loops."""

import itertools

import pytest
import torch

from hf_posenc.modeling.attention.backends import score_bias
from hf_posenc.modeling.kernels.block_terms import (
    KINDS,
    Content,
    DistanceBias,
    Inputs,
    KeyTable,
    OneSidedDifference,
    PairBias,
    PairwiseTerm,
    Part,
    PositionProduct,
    QueryTable,
    Setting,
    SumDifference,
    ValueTable,
    bias_as_matrix,
    block_terms,
)
from hf_posenc.modeling.kernels.blocks import AttentionShape, Block, clipping_of
from hf_posenc.modeling.schemes.terms import PairTerm, ProductTerm, RelativeTerm, SumTerm


BATCH, HEADS, QUERIES, KEYS, HEAD_DIM, ROWS = 2, 3, 7, 11, 4, 5
SIZES = AttentionShape(BATCH, HEADS, QUERIES, KEYS)
BLOCK = Block(1, slice(1, 3), slice(2, 6), slice(3, 10))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def inputs() -> Inputs:
    content_query, query = draw(BATCH, HEADS, QUERIES, HEAD_DIM), draw(BATCH, HEADS, QUERIES, HEAD_DIM)
    return Inputs(content_query, query, draw(BATCH, HEADS, KEYS, HEAD_DIM), draw(BATCH, HEADS, KEYS, HEAD_DIM))


def make_parts(kind: type) -> list[Part]:
    """Two terms' parts, one with heads of its own and one without; one of each sequence and one for all."""
    rows = torch.randint(ROWS, (SIZES.distances,))
    if kind is DistanceBias:
        tensors = [(draw(HEADS, ROWS),), (draw(1, ROWS),), (draw(BATCH, HEADS, ROWS),), (draw(BATCH, 1, ROWS),)]
    elif kind is ValueTable:
        tensors = [(draw(ROWS, HEAD_DIM),), (draw(ROWS, HEAD_DIM),)]
    elif kind in (QueryTable, KeyTable):
        tensors = [(draw(HEADS, ROWS, HEAD_DIM),), (draw(1, ROWS, HEAD_DIM),)]
    elif kind is PositionProduct:
        tensors = [(draw(batch, HEADS, QUERIES, 6), draw(batch, HEADS, KEYS, 6)) for batch in (1, BATCH)]
        rows = None
    elif kind in (SumDifference, OneSidedDifference):
        tensors = [tuple(draw(batch, HEADS, count) for count in (QUERIES, QUERIES, KEYS)) for batch in (1, BATCH)]
        rows = None
    else:
        tensors = [(draw(BATCH, 1, QUERIES, KEYS),), (draw(1, HEADS, 1, KEYS),)]
        rows = None
    return [
        Part(kind, own, rows if rows is None else rows.roll(n), (True,) * len(own)) for n, own in enumerate(tensors)
    ]


def at(tensor: torch.Tensor, *place: int) -> torch.Tensor:
    """An entry, where dimensions of size 1 are shared."""
    return tensor[tuple(index if size > 1 else 0 for index, size in zip(place, tensor.shape))]


def score(part: Part, given: Inputs, sequence: int, head: int, query: int, key: int) -> torch.Tensor:
    """What a part adds to the score of one pair."""
    if part.kind is PairBias:
        return at(part.tensors[0], sequence, head, query, key)
    if part.kind is PositionProduct:
        return at(part.tensors[0], sequence, head, query) @ at(part.tensors[1], sequence, head, key)
    if part.kind in (SumDifference, OneSidedDifference):
        scale, of_query, of_key = part.tensors
        difference = at(of_query, sequence, head, query) - at(of_key, sequence, head, key)
        length = abs(difference) if part.kind is SumDifference else max(difference, 0 * difference)
        return -at(scale, sequence, head, query) * length
    row = part.rows[key - query + QUERIES - 1]
    if part.kind is DistanceBias:
        place = (head, row) if part.tensors[0].dim() == 2 else (sequence, head, row)
        return at(part.tensors[0], *place)
    vector = given.query[sequence, head, query] if part.kind is QueryTable else given.key[sequence, head, key]
    return vector @ at(part.tensors[0], head, row)


def as_term(part: Part) -> PairTerm | ProductTerm | RelativeTerm:
    """The term that a part is computed for."""
    if part.kind is PairBias:
        return PairTerm(*part.tensors)
    if part.kind is PositionProduct:
        return ProductTerm(*part.tensors)
    if part.kind in (SumDifference, OneSidedDifference):
        return SumTerm(*part.tensors, None if part.kind is SumDifference else "left")
    names = {DistanceBias: "bias", QueryTable: "query_table", KeyTable: "key_table"}
    return RelativeTerm(part.rows, **{names[part.kind]: part.tensors[0]})


def span(part: slice) -> range:
    return range(part.start, part.stop)


def in_loops(parts: list[Part], given: Inputs, block: Block) -> torch.Tensor:
    """What all parts add to the scores of a block, (heads, queries, keys)."""
    pairs = itertools.product(span(block.heads), span(block.queries), span(block.keys))
    return torch.stack([sum(score(part, given, block.sequence, *pair) for part in parts) for pair in pairs]).view(
        block.shape
    )


def of_all(given: Inputs, parts: list[Part]) -> list[torch.Tensor]:
    return [given.content_query, given.query, given.key, given.value, *(t for part in parts for t in part.tensors)]


def agree(parts: list[Part], setting: Setting, term, loops: torch.Tensor, upstream: torch.Tensor) -> None:
    """The gradients that a term has added up are those of the loops, and zero where these read nothing."""
    gradients = setting.gradients
    found = [gradients.content_query, gradients.query, gradients.key, gradients.value, *term.gradients()]
    expected = torch.autograd.grad(loops, of_all(setting.inputs, parts), upstream, materialize_grads=True)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)
    assert any(wanted.any() for wanted in expected)


def make_setting(step: int = 3) -> Setting:
    given = inputs()
    detached = Inputs(*(tensor.detach() for tensor in vars(given).values()))
    return Setting(SIZES, clipping_of(0, 0, SIZES, 2, step), step, given, detached.zeros())


def make_term(kind: type, setting: Setting, parts: list[Part]):
    """A term that computes with numbers alone: autograd is left to the loops."""
    detached = Inputs(*(tensor.detach() for tensor in vars(setting.inputs).values()))
    own = Setting(setting.sizes, setting.clipping, setting.keys, detached, setting.gradients)
    return kind(own, [Part(kind, tuple(t.detach() for t in p.tensors), p.rows, p.needs_gradient) for p in parts])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(kind, PairwiseTerm)])
def test_terms_of_pairs(kind, keep):
    setting, parts = make_setting(), make_parts(kind)
    term, loops = make_term(kind, setting, parts), in_loops(parts, setting.inputs, BLOCK)
    before, upstream = (torch.randn(BLOCK.shape, dtype=torch.float64) for _ in range(2))
    out = before.clone()
    term.add_scores(BLOCK, out, keep)
    torch.testing.assert_close(out, loops.detach() + (before if keep else 0), rtol=0, atol=1e-12)
    term.accumulate_gradient(BLOCK, upstream)
    agree(parts, setting, term, loops, upstream)


@pytest.mark.parametrize("start", [0, 4, SIZES.distances - 1])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", [DistanceBias, QueryTable])
def test_terms_by_distance(kind, keep, start):
    """From a distance on, as many as a block has, or one; those read past the last one are those of the last."""
    setting, parts = make_setting(), make_parts(kind)
    term = make_term(kind, setting, parts)
    heads, queries, _ = BLOCK.shape
    width = 1 if start == SIZES.distances - 1 else 9
    # The key that is at a distance of the query may be before the first or behind the last.
    rows = [
        sum(score(part, setting.inputs, 1, head, query, start + column + query - (QUERIES - 1)) for part in parts)
        for head in span(BLOCK.heads)
        for query in span(BLOCK.queries)
        for column in range(width)
    ]
    loops = torch.stack(rows).view(heads, queries, width)
    before, upstream = (torch.randn(loops.shape, dtype=torch.float64) for _ in range(2))
    out = before.clone()
    term.add_scores(BLOCK, start, out, keep)
    torch.testing.assert_close(out, loops.detach() + (before if keep else 0), rtol=0, atol=1e-12)
    term.accumulate_gradient(BLOCK, start, upstream)
    agree(parts, setting, term, loops, upstream)


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("step", [1, 3, 64])
def test_key_table(step, added):
    setting, parts = make_setting(step), make_parts(KeyTable)
    term, loops = make_term(KeyTable, setting, parts), in_loops(parts, setting.inputs, BLOCK)
    also, out, upstream = (torch.randn(BLOCK.shape, dtype=torch.float64) for _ in range(3))
    term.put_scores(BLOCK, out, also if added else None)
    torch.testing.assert_close(out, loops.detach() + (also if added else 0), rtol=0, atol=1e-12)
    term.accumulate_gradient(BLOCK, upstream)
    agree(parts, setting, term, loops, upstream)


@pytest.mark.parametrize("distance", [0, 8, SIZES.distances - 1])
def test_key_table_at_a_clipped_distance(distance):
    """All pairs of a block look up one vector."""
    setting, parts = make_setting(), make_parts(KeyTable)
    parts = [
        Part(KeyTable, p.tensors, p.rows[distance].expand(SIZES.distances).clone(), p.needs_gradient) for p in parts
    ]
    term, loops = make_term(KeyTable, setting, parts), in_loops(parts, setting.inputs, BLOCK)
    vectors = term.vector(BLOCK, distance).expand(2, 1, HEAD_DIM)
    keys = setting.inputs.key.detach()[BLOCK.key_place]
    torch.testing.assert_close((vectors @ keys.mT).expand(BLOCK.shape), loops.detach(), rtol=0, atol=1e-12)
    upstream = torch.randn(BLOCK.shape, dtype=torch.float64)
    term.accumulate_clipped_gradient(BLOCK, distance, upstream)
    agree(parts, setting, term, loops, upstream)


@pytest.mark.parametrize("start, width", [(0, 1), (2, 9), (SIZES.distances - 1, 1)])
def test_value_table(start, width):
    setting, parts = make_setting(), make_parts(ValueTable)
    term = make_term(ValueTable, setting, parts)
    heads, queries, _ = BLOCK.shape
    weights, upstream = draw(heads, queries, width), torch.randn(heads, queries, HEAD_DIM, dtype=torch.float64)
    vectors = [sum(part.tensors[0][part.rows[start + column]] for part in parts) for column in range(width)]
    loops = sum(weights[..., column, None] * vector for column, vector in enumerate(vectors))
    before = torch.randn(loops.shape, dtype=torch.float64)
    out = before.clone()
    term.add_output(BLOCK, start, weights.detach(), out)
    torch.testing.assert_close(out, before + loops.detach(), rtol=0, atol=1e-12)
    of_weights = torch.empty_like(weights)
    term.weight_gradient(BLOCK, start, upstream, of_weights)
    (expected,) = torch.autograd.grad(loops, weights, upstream, retain_graph=True)
    torch.testing.assert_close(of_weights, expected, rtol=0, atol=1e-12)
    term.accumulate_gradient(BLOCK, start, weights.detach(), upstream)
    agree(parts, setting, term, loops, upstream)


@pytest.mark.parametrize("keep", [True, False])
def test_content(keep):
    setting = make_setting()
    given, place = setting.inputs, (BLOCK.sequence, BLOCK.heads)
    content_query, key = given.content_query[(*place, BLOCK.queries)], given.key[(*place, BLOCK.keys)]
    loops = torch.stack(
        [0.3 * (content_query[h, i] @ key[h, j]) for h, i, j in itertools.product(*map(range, BLOCK.shape))]
    ).view(BLOCK.shape)
    detached = Inputs(*(tensor.detach() for tensor in vars(given).values()))
    term = Content(Setting(SIZES, setting.clipping, 3, detached, setting.gradients), 0.3)
    before, upstream = (torch.randn(BLOCK.shape, dtype=torch.float64) for _ in range(2))
    out = before.clone()
    term.add_scores(BLOCK, out, keep)
    torch.testing.assert_close(out, loops.detach() + (before if keep else 0), rtol=0, atol=1e-12)
    term.accumulate_gradient(BLOCK, upstream)
    term.gradients = list
    agree([], setting, term, loops, upstream)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not ValueTable])
def test_what_needs_no_gradient_has_none(kind):
    """The inputs' gradients are added to all the same."""
    setting, parts = make_setting(), make_parts(kind)
    frozen = [Part(kind, part.tensors, part.rows, (False,) * len(part.tensors)) for part in parts]
    term = make_term(kind, setting, frozen)
    upstream = torch.randn(BLOCK.shape, dtype=torch.float64)
    if issubclass(kind, (PairwiseTerm, KeyTable)):
        term.accumulate_gradient(BLOCK, upstream)
    else:
        term.accumulate_gradient(BLOCK, 0, upstream)
    assert term.needs_gradient is False
    assert all(gradient is None or not gradient.any() for gradient in term.gradients())
    assert setting.gradients.query.any() == (kind is QueryTable)
    assert setting.gradients.key.any() == (kind is KeyTable)


def test_biases_as_a_matrix_have_the_last_query_first():
    setting, parts = make_setting(), make_parts(DistanceBias)
    block = Block(0, slice(0, HEADS), BLOCK.queries, BLOCK.keys)
    bias = make_term(DistanceBias, setting, parts).bias
    matrix = bias_as_matrix(bias, block, setting.sizes.query_length)
    expected = in_loops(parts, setting.inputs, block).detach().flip(1)
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-12)


def test_parts_of_a_kind_are_one_term():
    parts = [part for kind in KINDS for part in make_parts(kind)]
    terms = block_terms(make_setting(), parts)
    assert [type(term) for term in terms] == list(KINDS)
    assert [part for term in terms for part in term.parts] == parts


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not ValueTable])
def test_whole_matrices_of_biases_are_those_of_the_loops_too(kind):
    """What other backends add to the scores, forward and backward."""
    given, parts = inputs(), make_parts(kind)
    terms = [as_term(part) for part in parts]
    every = [Block(s, slice(0, HEADS), slice(0, QUERIES), slice(0, KEYS)) for s in range(BATCH)]
    loops = torch.stack([in_loops(parts, given, block) for block in every])
    bias = score_bias(given.query, given.key, terms).expand(loops.shape)
    torch.testing.assert_close(bias, loops, rtol=0, atol=1e-12)
    upstream = torch.randn_like(loops)
    found, expected = (
        torch.autograd.grad(result, of_all(given, parts), upstream, materialize_grads=True) for result in (bias, loops)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
