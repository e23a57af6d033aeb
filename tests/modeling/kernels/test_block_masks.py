"""Dropout of blocks: a function of the seed and of the block, whatever came before."""

import torch

from hf_posenc.modeling.kernels import passes
from hf_posenc.modeling.kernels.block_masks import Dropout
from hf_posenc.modeling.kernels.blocks import Block
from hf_posenc.modeling.kernels.blockwise import blockwise_attention
from hf_posenc.modeling.kernels.distance_products import Buffer
from hf_posenc.modeling.schemes.terms import RelativeTerm


def test_a_block_is_dropped_alike_whatever_was_drawn_before():
    blocks = [Block(s, slice(h, h + 2), slice(q, q + 5), slice(0, 9)) for s in (0, 1) for h in (0, 2) for q in (0, 5)]
    dropout, like = Dropout(0.4, seed=7), torch.zeros(())
    first = [dropout.mask(block, Buffer(like)).clone() for block in blocks]
    again = [dropout.mask(block, Buffer(like)).clone() for block in blocks[::-1]][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not any(torch.equal(a, b) for index, a in enumerate(first) for b in first[:index])
    assert not torch.equal(first[0], Dropout(0.4, seed=8).mask(blocks[0], Buffer(like)))


def test_blocks_in_another_order_backward_give_the_same_gradients(monkeypatch):
    terms = [RelativeTerm(torch.arange(599), query_table=torch.randn(1, 599, 8))]
    inputs = [torch.randn(2, 4, 300, 8, requires_grad=True) for _ in range(3)]
    small_blocks, found = passes.Pass.small_blocks, []
    for is_reversed in (False, True):
        torch.manual_seed(0)
        output = blockwise_attention(inputs[0], *inputs, terms, None, 0.4, 0.3)
        if is_reversed:
            monkeypatch.setattr(passes.BackwardPass, "small_blocks", lambda own: [*small_blocks(own)][::-1])
        found.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for own, other in zip(*found):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
