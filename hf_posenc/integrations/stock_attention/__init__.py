"""Attention backends for models that transformers computes in eager mode only: DeBERTa v1, v2 and v3, and MPNet.

`attn_implementation="sdpa"` or `"flex_attention"` is set as for other models. Classes, configs and checkpoints stay
transformers' own; what is computed too, up to rounding. On CPUs, "sdpa" is this package's blockwise attention.
"""

from .backends import FAMILIES, install, set_attn_implementation


__all__ = ["FAMILIES", "install", "set_attn_implementation"]
