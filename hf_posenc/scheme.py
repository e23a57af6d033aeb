"""What the file of a position scheme is written with: the base classes, score terms, parameters, flags and helpers.

A scheme's file imports from here, from `hf_posenc.modeling`, torch, numpy, transformers and the standard library, and from nothing
else: it lies beside every checkpoint with the scheme, where these imports become imports of the files beside it.
docs/custom-schemes.md builds four schemes from nothing.
"""

from .custom_schemes import register_scheme
from .modeling.schemes.base import AttentionContext, AttentionScheme, EmbeddingScheme, PositionScheme
from .modeling.schemes.flags import Boolean, Choice, Dictionary, Flag, Integer, Kind, Number, Subset, init
from .modeling.schemes.parameters import (
    Constant,
    Identity,
    Initial,
    Normal,
    PositionConstant,
    PositionLayerNorm,
    PositionLinear,
    PositionParameter,
    PositionTable,
    SmallPositionLinear,
    Uniform,
    ones,
    whole_table,
    without_bias,
    xavier,
    zeros,
)
from .modeling.schemes.positions import Positions, deberta_bucket, expand_to_pairs, relative_distances, t5_bucket
from .modeling.schemes.terms import PairTerm, ProductTerm, RelativeTerm, SumTerm
from .modeling.torch_state import is_traced


__all__ = [
    "AttentionContext",
    "AttentionScheme",
    "Boolean",
    "Choice",
    "Constant",
    "Dictionary",
    "EmbeddingScheme",
    "Flag",
    "Identity",
    "Initial",
    "Integer",
    "Kind",
    "Normal",
    "Number",
    "PairTerm",
    "PositionConstant",
    "PositionLayerNorm",
    "PositionLinear",
    "PositionParameter",
    "PositionScheme",
    "PositionTable",
    "Positions",
    "ProductTerm",
    "RelativeTerm",
    "SmallPositionLinear",
    "SumTerm",
    "Uniform",
    "Subset",
    "deberta_bucket",
    "expand_to_pairs",
    "init",
    "is_traced",
    "ones",
    "register_scheme",
    "relative_distances",
    "t5_bucket",
    "whole_table",
    "without_bias",
    "xavier",
    "zeros",
]
