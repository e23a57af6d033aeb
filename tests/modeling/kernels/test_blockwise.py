"""Attention in blocks against the formula written out."""

import math

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posenc.modeling.attention.backends import score_bias, value_side
from hf_posenc.modeling.kernels import block_terms, fast, passes, strategies
from hf_posenc.modeling.kernels.blockwise import blockwise_attention
from hf_posenc.modeling.masks import Window
from hf_posenc.modeling.schemes.positions import clip_distance, deberta_bucket, relative_distances, t5_bucket
from hf_posenc.modeling.schemes.terms import PairTerm, ProductTerm, RelativeTerm, SumTerm


BATCH, HEADS, HEAD_DIM = 3, 5, 5


# Queries and keys of a block, queries of one for PyTorch's kernel, from how many keys on there are many, and up to how many
# pairs weights are kept for the backward pass.
BLOCKS = {
    "small blocks": (6, 3, 6, 2048, 1 << 14),
    "blocks": (24, 12, 24, 2048, 0),
    "at length": (6, 6, 20, 30, 0),
    "one block": (64, 64, 64, 2048, 1 << 14),
}


@pytest.fixture
def block_sizes(blocks, monkeypatch):
    """Blocks that do not divide the lengths, a few heads at a time."""
    for name, value in zip(("ROWS", "KEYS", "KERNEL_ROWS", "MANY_KEYS", "KEPT_PAIRS"), BLOCKS[blocks], strict=True):
        monkeypatch.setattr(strategies, name, value)
    monkeypatch.setattr(strategies, "LOCAL_KERNEL_ROWS", strategies.ROWS)
    if strategies.ROWS < 64:  # two heads, two, and one
        for name, value in {"FEWEST_HEADS": 2, "BLOCK_SIZE": 1, "KERNEL_BLOCK_SIZE": 1}.items():
            monkeypatch.setattr(strategies, name, value)


pytestmark = pytest.mark.usefixtures("block_sizes")
in_all_blocks = pytest.mark.parametrize(
    "blocks", [name if name == "at length" else pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS]
)
at_length = pytest.mark.parametrize("blocks", ["at length"])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def random_sums(batch: int, query_length: int, key_length: int) -> tuple[torch.Tensor, ...]:
    """A scale, and numbers that do not rise, of queries and keys."""
    return random(batch, HEADS, query_length), random(batch, HEADS, query_length), random(batch, HEADS, key_length)


def make_terms(kind: str, query_length: int, key_length: int) -> list:
    distance = relative_distances(query_length, key_length, key_length - query_length, torch.device("cpu"))
    every = torch.arange(len(distance))
    match kind:
        case "bias":
            return [RelativeTerm(rows=t5_bucket(distance, 8, 10), bias=random(HEADS, 8))]
        case "bias per sequence":
            rows = t5_bucket(distance, 8, 10)
            own, shared = random(BATCH, HEADS, len(every)), random(BATCH, 1, 8)
            return [RelativeTerm(rows=every, bias=own), RelativeTerm(rows=rows, bias=shared)]
        case "bias per sequence beside a table":
            tables = {"query_table": random(HEADS, 8, HEAD_DIM), "bias": random(BATCH, HEADS, 8)}
            term = RelativeTerm(rows=t5_bucket(distance, 8, 10), query_bias=random(HEADS, HEAD_DIM), **tables)
            return [term, *make_terms("bias", query_length, key_length)]
        case "query table":
            return [RelativeTerm(rows=every, query_table=random(1, len(every), HEAD_DIM))]
        case "query table and bias":
            tables = {"query_table": random(HEADS, len(every), HEAD_DIM), "bias": random(HEADS, len(every))}
            return [RelativeTerm(rows=every, **tables)]
        case "query table and query bias":
            tables = {"query_table": random(HEADS, len(every), HEAD_DIM), "query_bias": random(HEADS, HEAD_DIM)}
            return [RelativeTerm(rows=every, **tables)]
        case "both tables":
            rows = (deberta_bucket(-distance, 4, 6) + 4).clamp(0, 7)
            tables = {"query_table": random(HEADS, 8, HEAD_DIM), "key_table": random(HEADS, 8, HEAD_DIM)}
            return [RelativeTerm(rows=rows, **tables)]
        case "key table":
            return [RelativeTerm(rows=every, key_table=random(1, len(every), HEAD_DIM))]
        case "values":
            tables = {"query_table": random(1, 7, HEAD_DIM), "value_table": random(7, HEAD_DIM)}
            return [RelativeTerm(rows=clip_distance(distance, 3), **tables)]
        case "product":
            return [ProductTerm(random(1, HEADS, query_length, 6), random(1, HEADS, key_length, 6))]
        case "product per sequence":
            return [ProductTerm(random(BATCH, HEADS, query_length, 6), random(BATCH, HEADS, key_length, 6))]
        case "sums":
            one = SumTerm(*random_sums(BATCH, query_length, key_length))
            return [one, SumTerm(*random_sums(1, query_length, key_length))]
        case "sums on one side":
            sides = [SumTerm(*random_sums(BATCH, query_length, key_length), side) for side in ("left", "right")]
            return [*sides, SumTerm(*random_sums(1, query_length, key_length), "left")]
        case "pairs":
            return [PairTerm(random(1, HEADS, query_length, key_length)), PairTerm(random(BATCH, 1, 1, key_length))]
        case "shared ends":
            return [
                term
                for kind in ("bias", "both tables", "values")
                for term in make_terms(kind, query_length, key_length)
            ]
        case "everything":
            kinds = ("bias", "both tables", "values", "product", "pairs", "query table and query bias")
            kinds += ("sums", "sums on one side")
            return [term for kind in kinds for term in make_terms(kind, query_length, key_length)]


KINDS = [
    "bias",
    "bias per sequence",
    "bias per sequence beside a table",
    "query table",
    "query table and bias",
    "query table and query bias",
    "both tables",
    "key table",
    "values",
    "product",
]
KINDS += ["product per sequence", "sums", "sums on one side", "pairs", "everything"]


def make_mask(kind: str, query_length: int, key_length: int) -> torch.Tensor | None:
    keys = torch.arange(key_length)
    lengths = torch.tensor([key_length, key_length - 5, 2])
    right = keys < lengths[:, None]
    match kind:
        case "none":
            return None
        case "right padding":
            return right[:, None, None].expand(BATCH, 1, query_length, key_length)
        case "left padding, per key":
            return right.flip(-1)[:, None, None]
        case "holes":
            return (right & (keys % 3 != 1))[:, None, None].expand(BATCH, 1, query_length, key_length)
        case "one sequence all masked":
            return (right & torch.tensor([True, False, True])[:, None])[:, None, None]
        case "causal":
            return torch.ones(query_length, key_length, dtype=torch.bool).tril(key_length - query_length)[None, None]
        case "per head":
            return torch.rand(BATCH, HEADS, query_length, key_length) < 0.6
        case "per head and key":
            seen = key_length - 3 * torch.arange(HEADS)[:, None, None]
            return (keys < seen).expand(BATCH, HEADS, 1, key_length)
        case "additive":
            mask = torch.randn(BATCH, 1, query_length, key_length, dtype=torch.float64)
            return mask.masked_fill(~right[:, None, None], torch.finfo(torch.float64).min)


MASKS = ["none", "right padding", "left padding, per key", "holes", "one sequence all masked", "causal", "per head"]
MASKS += ["per head and key", "additive"]


def written_out(content_query, query, key, value, terms, mask, scaling) -> torch.Tensor:
    """The formula by whole matrices."""
    bias = score_bias(query, key, terms)
    scores = content_query @ key.transpose(2, 3) * scaling + (0 if bias is None else bias)
    lowest = torch.finfo(scores.dtype).min
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, lowest)
    elif mask is not None:
        scores = torch.where(mask <= lowest, lowest, scores + mask)
    weights = scores.softmax(-1)
    output = weights @ value
    for term in terms:
        if isinstance(term, RelativeTerm) and term.value_table is not None:
            output = output + value_side(weights, term)
    return output.transpose(1, 2)


def leaves(terms: list) -> list[torch.Tensor]:
    found = [value for term in terms for value in vars(term).values()]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor) and tensor.requires_grad]


def in_window(mask: torch.Tensor | None, window: Window, query_length: int, key_length: int) -> torch.Tensor:
    """A mask with a window, pair by pair; a query that would see nothing sees what it would see without."""
    if mask is None:
        mask = torch.ones(1, 1, query_length, key_length, dtype=torch.bool)
    mask = mask.expand(-1, -1, query_length, key_length).clone()
    lowest = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    for row in mask.flatten(0, 1):
        for query, keys in enumerate(row):
            far = [key for key in range(key_length) if abs(key - (query + window.offset)) > window.reach]
            seen = keys.clone()
            seen[far] = lowest
            if (seen != lowest).any():
                keys.copy_(seen)
    return mask


def compare(kind: str, mask_kind: str, query_length: int, key_length: int, window: Window | None = None) -> None:
    torch.manual_seed(0)
    terms = make_terms(kind, query_length, key_length) if kind else []
    mask = given = make_mask(mask_kind, query_length, key_length)
    if window is not None:
        mask = in_window(given, window, query_length, key_length)
    content_query, query = (random(BATCH, HEADS, query_length, HEAD_DIM) for _ in range(2))
    key, value = (random(BATCH, HEADS, key_length, HEAD_DIM) for _ in range(2))
    inputs = [content_query, query, key, value, *leaves(terms)]
    upstream = torch.randn(BATCH, query_length, HEADS, HEAD_DIM, dtype=torch.float64)
    results = []
    attentions = (lambda *given: blockwise_attention(*given, 0.0, window=window), given), (written_out, mask)
    for attend, seen in attentions:
        output = attend(content_query, query, key, value, terms, seen, 0.4)
        gradients = torch.autograd.grad(output, inputs, upstream, allow_unused=True)
        results.append([output, *gradients])
    own, expected = results
    torch.testing.assert_close(own[0], expected[0], rtol=0, atol=1e-12)
    for found, wanted in zip(own[1:], expected[1:]):
        if wanted is None:
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    if window is not None and mask_kind != "one sequence all masked":
        whole = written_out(content_query, query, key, value, terms, given, 0.4)
        assert (whole - expected[0]).abs().max() > 1e-3
    if not kind:
        return
    # Without the terms, another result.
    nothing = [PairTerm(torch.zeros(1, 1, 1, 1, dtype=torch.float64))]
    assert (written_out(content_query, query, key, value, nothing, mask, 0.4) - expected[0]).abs().max() > 1e-3


@tiny.cross(kind=KINDS, mask=MASKS, blocks=BLOCKS)
def test_outputs_and_gradients_are_those_of_the_formula(kind, mask):
    compare(kind, mask, 17, 17)


@tiny.cross(
    kind=KINDS,
    sizes=[("right padding", 9, 21), ("none", 1, 21), ("left padding, per key", 1, 40), ("none", 61, 77)],
    blocks=BLOCKS,
)
def test_queries_may_be_fewer_than_keys_as_with_a_cache(kind, sizes):
    compare(kind, *sizes)


@tiny.cross(kind=["", *KINDS], mask=MASKS, reach=[1, 3, 7], blocks=BLOCKS)
def test_a_window_leaves_far_keys_out(kind, mask, reach):
    compare(kind, mask, 37, 37, Window(reach))


@tiny.cross(
    kind=["", *KINDS],
    sizes=[("right padding", 9, 41), ("none", 1, 40), ("left padding, per key", 30, 40), ("causal", 25, 37)],
    blocks=BLOCKS,
)
def test_a_window_counts_places_from_the_cache_on(kind, sizes):
    mask, query_length, key_length = sizes
    compare(kind, mask, query_length, key_length, Window(5, key_length - query_length))


@tiny.cross(kind=KINDS, mask=["right padding", "left padding, per key"], blocks=BLOCKS)
def test_ranges_of_keys_and_last_blocks_of_any_size(kind, mask):
    compare(kind, mask, 61, 61)


@tiny.cross(
    kind=["both tables", "values", "shared ends"],
    sizes=[
        ("none", 160, 160),
        ("left padding, per key", 163, 163),
        ("right padding", 90, 171),
        ("holes", 171, 171),
        ("causal", 90, 131),
        ("additive", 160, 160),
        ("right padding", 1, 150),
    ],
    blocks=BLOCKS,
    rest=pytest.mark.slow,
)
def test_distances_that_share_vectors_need_no_rows_of_their_own(kind, sizes, monkeypatch):
    tables, clipped = [], []
    mask, query_length, key_length = sizes
    attend = passes.ForwardPass._attend_to_clipped_keys

    class Recorded(block_terms.Table):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            tables.append(self)

    def recorded(*arguments):
        clipped.append(attend(*arguments))
        return clipped[-1]

    monkeypatch.setattr(block_terms, "Table", Recorded)
    monkeypatch.setattr(passes.ForwardPass, "_attend_to_clipped_keys", recorded)
    compare(kind, mask, query_length, key_length)
    assert tables
    assert bool(clipped) == (
        strategies.MANY_KEYS < key_length and mask in ("none", "left padding, per key", "right padding")
    )
    if strategies.ROWS < 64:
        assert all(table.distances < 90 for table in tables)


@in_all_blocks
def test_causal_without_a_mask_is_causal():
    torch.manual_seed(0)
    terms = make_terms("everything", 40, 40)
    query, key, value = (random(BATCH, HEADS, 40, HEAD_DIM) for _ in range(3))
    causal = make_mask("causal", 40, 40)
    found, expected = (
        torch.autograd.grad(output.square().sum(), [query, key, value, *leaves(terms)])
        for output in (
            blockwise_attention(query, query, key, value, terms, None, 0.4, 0.0, is_causal=True),
            blockwise_attention(query, query, key, value, terms, causal, 0.4, 0.0),
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@tiny.cross(kind=KINDS, mask_kind=["left padding, per key", "holes"], blocks=BLOCKS, rest=pytest.mark.slow)
def test_gradients_with_dropout_are_those_of_what_was_computed(kind, mask_kind):
    torch.manual_seed(0)
    terms, mask = make_terms(kind, 17, 17), make_mask(mask_kind, 17, 17)
    inputs = [random(BATCH, HEADS, 17, HEAD_DIM) for _ in range(3)]
    tables = leaves(terms)

    def attend(query, key, value, *_):
        torch.manual_seed(1)  # the same weights are dropped in every call
        return blockwise_attention(query, query, key, value, terms, mask, 0.4, 0.3)

    undropped = blockwise_attention(inputs[0], *inputs, terms, mask, 0.4, 0.0)
    assert (attend(*inputs) - undropped).abs().max() > 1e-2
    assert torch.autograd.gradcheck(attend, (*inputs, *tables), fast_mode=True, atol=1e-6)


@tiny.cross(kind=["", *KINDS], mask_kind=["left padding, per key", "holes"], blocks=BLOCKS, strength=1)
def test_gradients_with_dropout_and_a_window_are_those_of_what_was_computed(kind, mask_kind):
    torch.manual_seed(0)
    terms, mask = make_terms(kind, 33, 33) if kind else [], make_mask(mask_kind, 33, 33)
    inputs, tables = [random(BATCH, HEADS, 33, HEAD_DIM) for _ in range(3)], leaves(terms)

    def attend(query, key, value, *_):
        torch.manual_seed(1)  # the same weights are dropped in every call
        return blockwise_attention(query, query, key, value, terms, mask, 0.4, 0.3, window=Window(6))

    assert torch.autograd.gradcheck(attend, (*inputs, *tables), fast_mode=True, atol=1e-6)


@at_length
@pytest.mark.parametrize("kind", ["", "bias", "query table"])
@pytest.mark.parametrize("mask_kind", ["none", "packed"])
def test_keys_out_of_the_window_are_not_computed(kind, mask_kind):
    """Beyond the blocks that a query is in, values that are no numbers do no harm: whole matrices would spread them."""
    length = 60
    terms = make_terms(kind, length, length) if kind else []
    documents = torch.arange(length) // 40
    mask = None if mask_kind == "none" else (documents[:, None] == documents)[None, None]
    query, key, value = (random(BATCH, HEADS, length, HEAD_DIM).detach() for _ in range(3))
    value[:, :, length // 2 :] = math.nan
    output = blockwise_attention(query, query, key, value, terms, mask, 0.4, 0.0, window=Window(2))
    assert output[:, :12].isfinite().all() and output[:, length // 2].isnan().all()


@tiny.cross(kind=KINDS, mask_kind=["left padding, per key", "holes"], blocks=BLOCKS, rest=pytest.mark.slow)
def test_kept_weights_are_those_that_would_be_computed_again(kind, mask_kind, monkeypatch):
    torch.manual_seed(0)
    terms, mask = make_terms(kind, 17, 17), make_mask(mask_kind, 17, 17)
    inputs = [random(BATCH, HEADS, 17, HEAD_DIM) for _ in range(3)]
    results, kept = [], []
    for pairs in (0, 17 * 17):
        monkeypatch.setattr(strategies, "KEPT_PAIRS", pairs)
        torch.manual_seed(1)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: sizes.append(tensor.shape) or tensor, lambda tensor: tensor
        ):
            output = blockwise_attention(inputs[0], *inputs, terms, mask, 0.4, 0.3)
        kept.append((BATCH, HEADS, 17, 17) in sizes)
        results.append(torch.autograd.grad(output.sin().sum(), [*inputs, *leaves(terms)]))
    assert kept == [False, True]
    for again, given in zip(*results):
        torch.testing.assert_close(given, again, rtol=0, atol=1e-12)


@in_all_blocks
@pytest.mark.slow
def test_far_keys_whose_distances_share_vectors_are_dropped_too():
    torch.manual_seed(0)
    terms = make_terms("shared ends", 160, 160)
    inputs, directions = ([random(BATCH, HEADS, 160, HEAD_DIM) for _ in range(3)] for _ in range(2))

    def attend(step: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)  # the same weights are dropped in every call
        query, key, value = (tensor + step * direction for tensor, direction in zip(inputs, directions))
        return blockwise_attention(query, query, key, value, terms, None, 0.4, 0.3)

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    output = attend(step)
    undropped = blockwise_attention(inputs[0], *inputs, terms, None, 0.4, 0.0)
    assert (output - undropped).abs().max() > 1e-2
    upstream = torch.randn_like(output)
    assert torch.autograd.gradcheck(lambda step: (attend(step) * upstream).sum(), step)


@tiny.cross(other=range(3), blocks=BLOCKS, rest=pytest.mark.slow)
def test_vectors_may_lie_in_memory_in_any_way(other):
    torch.manual_seed(0)
    terms = make_terms("shared ends", 160, 160)
    inputs = [random(BATCH, HEADS, 160, HEAD_DIM) for _ in range(3)]
    inputs[other] = inputs[other].mT.contiguous().mT
    expected = written_out(inputs[0], *inputs, terms, None, 0.4)
    torch.testing.assert_close(blockwise_attention(inputs[0], *inputs, terms, None, 0.4, 0.0), expected)


@at_length
def test_dropout_drops_as_many_weights_as_it_should_and_keeps_the_mean():
    torch.manual_seed(0)
    length = 50
    query = key = torch.zeros(4, HEADS, length, length)
    value = torch.eye(length).expand(4, HEADS, length, length)
    terms = [RelativeTerm(rows=torch.arange(2 * length - 1), bias=torch.zeros(HEADS, 2 * length - 1))]
    weights = blockwise_attention(query, query, key, value, terms, None, 1.0, 0.1)
    share = (weights == 0).double().mean().item()
    # 40,000 draws: four standard deviations
    assert abs(share - 0.1) < 4 * math.sqrt(0.09 / 40_000)
    torch.testing.assert_close(weights.max(), torch.tensor(1 / length / (1 - 6554 / 65536)))
    other = blockwise_attention(query, query, key, value, terms, None, 1.0, 0.1)
    assert (other == 0).ne(weights == 0).any()


@in_all_blocks
def test_where_every_weight_is_dropped_nothing_is_left():
    terms = make_terms("both tables", 6, 6)
    query, key, value = (random(1, HEADS, 6, HEAD_DIM) for _ in range(3))
    output = blockwise_attention(query, query, key, value, terms, None, 0.4, 1.0)
    assert not output.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum(), [query, key, value]))


@in_all_blocks
@pytest.mark.parametrize("kind", ["bias", "sums"])
def test_a_steep_bias_leaves_no_numbers_that_are_slow_to_multiply_with(kind):
    """Losses are means over thousands of numbers, so gradients are small before the weights make them smaller."""
    torch.manual_seed(0)
    length, slow = 400, {"softmax": [], "products": []}

    def is_slow(tensor: torch.Tensor) -> bool:
        return bool(((tensor != 0) & (tensor.abs() < torch.finfo(torch.float32).tiny)).any())

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm_):
                slow["products"] += map(is_slow, args[-2:])
            elif function.overloadpacket in (torch.ops.aten.softmax, torch.ops.aten._softmax):
                slow["softmax"].append(is_slow(result))
            return result

    distances = torch.arange(2 * length - 1)
    bias = -0.5 * (distances - (length - 1)).abs().float().expand(HEADS, -1)
    terms = [RelativeTerm(rows=distances, bias=bias.clone().requires_grad_())]
    if kind == "sums":
        sums = torch.arange(length).float().expand(1, HEADS, -1)
        terms = [SumTerm(torch.full((1, HEADS, length), 0.5).requires_grad_(), sums, sums)]
    inputs = [torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3)]
    with Recorded():
        output = blockwise_attention(inputs[0], *inputs, terms, None, 0.4, 0.1)
        output.backward(1e-8 * torch.randn_like(output))
    assert any(slow["softmax"]) and slow["products"] and not any(slow["products"])


@at_length
def test_a_gradient_of_a_gradient_is_refused():
    terms = make_terms("bias", 4, 4)
    query, key, value = (random(1, HEADS, 4, HEAD_DIM) for _ in range(3))
    output = blockwise_attention(query, query, key, value, terms, None, 0.4, 0.0)
    with pytest.raises(RuntimeError, match="no second derivative: use attn_implementation='eager'"):
        torch.autograd.grad(output.sum(), query, create_graph=True)


@at_length
@pytest.mark.parametrize("scheme", tiny.schemes_with_terms())
def test_short_sequences_by_whole_matrices_give_the_same(scheme, monkeypatch):
    model = tiny.build(scheme).double()
    used = []
    monkeypatch.setattr(fast, "blockwise_attention", lambda *given: used.append(1) or blockwise_attention(*given))
    found = []  # with gradients, by gathering
    # Values by distance have no other way, but by way of `eager`.
    for fewest, count in ((0, 2), (1 << 15, 4 if scheme == "relative" else 2)):
        monkeypatch.setattr(fast, "FEWEST_SCORES", fewest)
        found.append(model(**tiny.inputs()).last_hidden_state)
        assert len(used) == count
    assert tiny.difference_where_attended(*found, tiny.inputs()["attention_mask"]) < 1e-12
