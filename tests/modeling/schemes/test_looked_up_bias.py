"""Promise 7, sums over many pairs in any dtype: what is looked up for them has the sum of their gradients, in half precision too."""

import pytest
import torch

from hf_posenc.modeling.attention.backends import value_side
from hf_posenc.modeling.schemes.terms import RelativeTerm, gathered_products


LENGTH = 600


@pytest.mark.parametrize(("rows", "by_sequence"), [("distances", False), ("pairs", False), ("distances", True)])
def test_a_bias_has_the_gradients_of_all_pairs(rows, by_sequence):
    """Each of LENGTH · LENGTH pairs counts one; in bfloat16, a sum of ones would stop at 256."""
    dtype = torch.bfloat16
    distances = (torch.arange(2 * LENGTH - 1) - (LENGTH - 1)).clamp(-1, 1) + 1
    every = distances[torch.arange(LENGTH) - torch.arange(LENGTH)[:, None] + LENGTH - 1]
    bias = torch.zeros(2, 4, 3, dtype=dtype) if by_sequence else torch.zeros(4, 3, dtype=dtype)
    bias.requires_grad_()
    query = torch.zeros(2, 4, LENGTH, 8, dtype=dtype)
    term = RelativeTerm(distances if rows == "distances" else every[None], bias=bias)
    [scores] = term.scores(query, query, gathered_products)
    assert scores.dtype == dtype
    scores.expand(2, -1, -1, -1).float().sum().backward()
    number = every.flatten().bincount().float() * (1 if by_sequence else 2)
    torch.testing.assert_close(bias.grad.float(), number.expand(bias.shape), rtol=0.01, atol=0)


# PyTorch's own kernels for CPUs add up in float32; compiled code adds each number to memory of the tensor's dtype.
@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_value_side_sums_all_weights(dtype):
    """4,096 equal weights on one row of the table are 1 together; one by one, a sum in half precision stops before."""
    length = 4096
    weights, table = torch.full((1, 2, 1, length), 1 / length, dtype=dtype), torch.randn(3, 8).to(dtype)
    term = RelativeTerm(torch.ones(length, dtype=torch.long), value_table=table)
    found = torch.compile(lambda weights, table: value_side(weights, term), dynamic=False)(weights, table)
    torch.testing.assert_close(found, table[1].expand(found.shape))


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("side", ["query_table", "key_table"])
def test_products_with_a_table_have_the_gradients_of_all_pairs(side):
    """Where all pairs have one row, each query and each key gets the row as often as there are pairs."""
    length = 4096
    lengths = {"query_table": (1, length), "key_table": (length, 1)}[side]
    states = [torch.zeros(1, 2, number, 8, dtype=torch.bfloat16, requires_grad=True) for number in lengths]
    table = torch.randn(2, 3, 8).bfloat16()
    term = RelativeTerm(torch.ones(length, dtype=torch.long), **{side: table})

    def mean(query, key):
        [scores] = term.scores(query, key, gathered_products)
        return (scores / length).sum(dtype=torch.float32)

    torch.compile(mean, dynamic=False)(*states).backward()
    found = states[0 if side == "query_table" else 1].grad
    torch.testing.assert_close(found, table[None, :, 1:2])
