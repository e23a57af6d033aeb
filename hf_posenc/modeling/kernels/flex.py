"""FlexAttention with score terms."""

import functools

import torch

from ..attention.backends import Attention, Output
from ..masks import allowed, is_tensor


@functools.cache
def _compiled_flex_attention(dynamic: bool | None):
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic)


def flex_attention(attention: Attention) -> Output:
    """FlexAttention with the score terms as its score modification.

    Raises:
        ValueError: attention dropout, which FlexAttention does not have.
    """
    from torch.nn.attention.flex_attention import flex_attention as attend

    if attention.dropout > 0:
        raise ValueError(
            "flex_attention has no dropout: use it in eval mode, or set attention_probs_dropout_prob=0 in the config"
        )
    query, key, value = attention.content_query, attention.key, attention.value
    modifications = [term.modification(attention.query, key) for term in attention.terms_by_distance()]
    block_mask = mask = attention.mask.for_flex_attention()
    if is_tensor(mask):
        block_mask, lowest = None, torch.finfo(query.dtype).min
        mask = mask[..., : key.shape[2]].expand(*query.shape[:3], key.shape[2])
        attended = allowed(mask)
    else:
        mask = None

    def modify(score, *indices):
        for modification in modifications:
            score = modification(score, *indices)
        if mask is None:
            return score
        if mask.dtype != torch.bool:
            score = score + mask[indices].to(score.dtype)
        return torch.where(attended[indices], score, lowest)

    if not torch.compiler.is_compiling():
        # With symbolic shapes, the code that inductor writes for CPUs does not always compile (torch 2.13).
        attend = _compiled_flex_attention(False if query.device.type == "cpu" else None)
    options = attention.settings.get("kernel_options")
    output = attend(
        query, key, value, score_mod=modify, block_mask=block_mask, scale=attention.scaling, kernel_options=options
    )
    return output.transpose(1, 2).contiguous(), None
