"""The building blocks of a custom position scheme: base classes, score terms, parameters, config options and helpers.

The file of a scheme may import from here, from `hf_posenc.modeling`, torch, numpy, transformers and the standard library only. It is saved with
every checkpoint that has the scheme, and its imports of hf_posenc become imports of the other saved files.
docs/custom-schemes.md builds four schemes from scratch.
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
