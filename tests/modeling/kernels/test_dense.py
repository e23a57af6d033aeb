"""Whole matrices, as `sdpa` computes on GPUs and where blocks do not fit, against blocks: outputs and all gradients."""

import pytest
import tiny
import torch

from hf_posenc import position_parameters
from hf_posenc.modeling.kernels import fast


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


BATCH, LENGTH = 3, 12
KEYS = torch.arange(LENGTH)
LENGTHS = torch.tensor([LENGTH, 9, 4])[:, None]
PAIRS = torch.Generator().manual_seed(1)
RANDOM = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=PAIRS) < 0.6
LOWEST = torch.finfo(torch.float64).min
MASKS = {
    "none": None,
    "right padding": (KEYS < LENGTHS).long(),
    "left padding": (KEYS < LENGTHS).long().flip(-1),
    "holes": ((KEYS < LENGTHS) & (KEYS % 3 != 1)).long(),
    "nothing to attend to": (KEYS < torch.tensor([LENGTH, 0, 4])[:, None]).long(),
    "causal": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1),
    "pairs": RANDOM,
    "additive": torch.randn(BATCH, 1, LENGTH, LENGTH, generator=PAIRS).double().masked_fill(~RANDOM, LOWEST),
}


def run(model, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = model(tiny.inputs(padding=None)["input_ids"], attention_mask=mask).last_hidden_state
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **gradients}


@tiny.cross(mask=MASKS, scheme=[*tiny.schemes_with_terms(), "tupe+t5", "absolute+deberta+t5"], rest=pytest.mark.slow)
def test_whole_matrices_give_what_blocks_give(scheme, mask, monkeypatch):
    model = tiny.build(scheme, attn_implementation="sdpa").double()
    calls = []
    attend = fast.blockwise_attention
    monkeypatch.setattr(fast, "blockwise_attention", lambda *given: calls.append(1) or attend(*given))
    blocks = run(model, MASKS[mask])
    # The untied [CLS] of TUPE's bias by distance is known per pair: these layers have other terms in blocks or none.
    used = len(calls)
    monkeypatch.setattr(fast, "choose", lambda _: None)
    dense = run(model, MASKS[mask])
    assert len(calls) == used and (used == 2 or scheme == "tupe+t5")
    torch.testing.assert_close(dense, blocks, rtol=1e-8, atol=1e-8)
    for name in position_parameters(model):
        if not name.endswith("cls_to_others.weight"):
            assert dense[name].abs().max() > 1e-7, name
