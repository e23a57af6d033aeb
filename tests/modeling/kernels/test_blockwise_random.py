"""Attention in blocks with random terms, masks and lengths, against the formula written out. Seeded."""

import random

import pytest
import torch
from test_blockwise import leaves, written_out

from hf_posenc.modeling.kernels.blockwise import blockwise_attention
from hf_posenc.modeling.schemes.terms import PairTerm, ProductTerm, RelativeTerm, SumTerm


EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 385]
LONG = [2047, 2048, 2049, 2111, 2176]


def random_terms(draw: random.Random, sizes: tuple[int, int, int, int], head_dim: int) -> list:
    batch, heads, queries, keys = sizes
    distances = torch.arange(queries + keys - 1) - (queries - 1) - (keys - queries)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64).requires_grad_(draw.random() < 0.8)

    terms = []
    for _ in range(draw.choice([1, 1, 2, 3])):
        match draw.choice(["table", "table", "table", "pair", "product", "sums"]):
            case "table":
                reach = draw.choice([0, 1, 8, 40, keys])
                rows = distances.clamp(-reach, reach) + reach
                if draw.random() < 0.2:
                    rows = torch.randint(2 * reach + 1, distances.shape)
                count, own = 2 * reach + 1, draw.choice([1, heads])
                names = draw.sample(["bias", "query_table", "key_table", "value_table"], draw.randint(1, 4))
                of_bias = draw.choice([(own, count), (own, count), (batch, own, count)])
                shapes = {"bias": of_bias, "value_table": (count, head_dim)}
                tables = {name: new(*shapes.get(name, (own, count, head_dim))) for name in names}
                if "query_table" in names and draw.random() < 0.5:
                    tables["query_bias"] = new(heads, head_dim)
                terms.append(RelativeTerm(rows, **tables))
            case "pair":
                terms.append(PairTerm(new(draw.choice([1, batch]), draw.choice([1, heads]), queries, keys)))
            case "sums":
                shared = draw.choice([1, batch])
                shapes = ((shared, heads, count) for count in (queries, queries, keys))
                terms.append(SumTerm(*(new(*shape) for shape in shapes), draw.choice([None, "left", "right"])))
            case "product":
                shared = draw.choice([1, batch])
                terms.append(ProductTerm(new(shared, heads, queries, 3), new(shared, heads, keys, 3)))
    return terms


def random_mask(draw: random.Random, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor | None:
    places = torch.arange(keys)
    stops = torch.tensor([draw.randint(1, keys) for _ in range(batch)])[:, None]
    starts = torch.tensor([draw.choice([0, 0, draw.randrange(keys)]) for _ in range(batch)])[:, None]
    ranges = ((places >= starts) & (places < stops))[:, None, None]
    match draw.choice(["none", "range", "range", "range of all", "holes", "pairs", "additive"]):
        case "none":
            return None
        case "range":
            return ranges
        case "range of all":
            return ranges.expand(-1, -1, queries, -1)
        case "holes":
            return ranges & (torch.rand(keys) < 0.8)
        case "pairs":
            return torch.rand(batch, draw.choice([1, heads]), queries, keys) < 0.7
        case "additive":
            mask = torch.randn(batch, 1, queries, keys, dtype=torch.float64)
            return mask.masked_fill(~ranges, torch.finfo(mask.dtype).min)


def check(seed: int, lengths: list[int]) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    keys = draw.choice(lengths)
    queries = draw.choice([keys, keys, draw.choice([length for length in EDGES if length <= keys])])
    heads, head_dim = draw.choice([1, 2, 5]), draw.choice([1, 3, 8])
    sizes = (draw.choice([1, 2]) if keys > 1000 else draw.choice([1, 2, 3])), heads, queries, keys
    terms, mask = random_terms(draw, sizes, head_dim), random_mask(draw, *sizes)
    query = torch.randn(*sizes[:3], head_dim, dtype=torch.float64, requires_grad=True)
    content_query = query if draw.random() < 0.5 else torch.randn_like(query).requires_grad_()
    key, value = (torch.randn(sizes[0], heads, keys, head_dim, dtype=torch.float64).requires_grad_() for _ in "kv")
    given = {id(tensor): tensor for tensor in (content_query, query, key, value, *leaves(terms))}
    upstream, results = torch.randn(sizes[0], queries, heads, head_dim, dtype=torch.float64), []
    for attend in (lambda *inputs: blockwise_attention(*inputs, 0.0), written_out):
        output = attend(content_query, query, key, value, terms, mask, 0.4)
        gradients = torch.autograd.grad(output, [*given.values()], upstream, allow_unused=True, materialize_grads=True)
        results.append([output, *gradients])
    for own, expected in zip(*results):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-9, msg=lambda text: f"seed {seed}: {text}")


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_cases_around_the_edges_of_blocks(first):
    for seed in range(first, first + 20):
        check(seed, EDGES)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1016, 4))
def test_random_cases_with_many_keys(first):
    for seed in range(first, first + 4):
        check(seed, LONG)
