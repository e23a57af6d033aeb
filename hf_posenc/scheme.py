"""What the file of a position scheme is written with: the base classes, score terms, parameters, flags and helpers.

A scheme's file imports from here, from `hf_posenc.modeling`, torch, numpy, transformers and the standard library, and from nothing
else: it lies beside every checkpoint with the scheme, where these imports become imports of the files beside it.
docs/own-scheme.md builds three schemes from nothing.
"""

from .modeling.flags import Boolean, Choice, Dictionary, Flag, Integer, Kind, Number, Subset, init
from .modeling.relative_positions import deberta_bucket, expand_to_pairs, relative_distances, t5_bucket
from .modeling.scheme import (
    AttentionContext,
    AttentionScheme,
    Constant,
    EmbeddingScheme,
    Identity,
    Initial,
    Normal,
    PairTerm,
    PositionConstant,
    PositionLayerNorm,
    PositionLinear,
    PositionParameter,
    Positions,
    PositionScheme,
    PositionTable,
    ProductTerm,
    RelativeTerm,
    SmallPositionLinear,
    SumTerm,
    Uniform,
    is_traced,
    ones,
    whole_table,
    without_bias,
    xavier,
    zeros,
)
from .registration import register_scheme


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
