"""Tiny models of every family, inputs for them, and position parameters that are not zero."""

import ast
import collections
import functools
import itertools
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertModel

import hf_posenc  # noqa: F401
from hf_posenc import position_parameters, variants
from hf_posenc.integrations import hooks as plugin
from hf_posenc.modeling.schemes.base import AttentionScheme
from hf_posenc.modeling.schemes.flags import Boolean, Choice, Dictionary, Flag, Integer, Names, Subset
from hf_posenc.modeling.schemes.table import SCHEMES


# Stock model type -> sizes; ELECTRA's embeddings are narrower than its layers, as in its checkpoints.
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    # Large weights, so that positions matter and mistakes show.
    "initializer_range": 0.2,
}
# The keyword of a cache, and the output's name for it: "cache" since transformers 5.24.
CACHE = next(name for name, parameter in signature(BertModel.forward).parameters.items() if "Cache" in str(parameter))
FAMILIES = {config.stock_model_type: config for config in plugin.CONFIGS}
STOCK_CONFIGS = {variant.stock_model_type: stock for stock, variant in variants.VARIANT_CONFIGS.items()}


def settings(family: str, **overrides) -> dict:
    """The sizes of a tiny model, and `overrides`, by the names that a family's config has for them."""
    extra = {"embedding_size": 24} if family == "electra" else {}
    names = FAMILIES[family].family.config_names
    return {names.get(name, name): value for name, value in {**SIZES, **extra, **overrides}.items()}


def stock_config(family: str = "bert", **overrides):
    """A tiny stock config of a family (no flags); flags among `overrides` make it a variant's."""
    return STOCK_CONFIGS[family](**settings(family, **overrides))


def variant_config(family: str = "bert", **overrides):
    """A tiny config of a family's variant."""
    return FAMILIES[family](**settings(family, **overrides))


def variant_class(family: str, head: str = "Model"):
    """The variant of a family with a head, by the end of the class's name: "Model", "ForMaskedLM", ..."""
    name = _stock_prefix(family) + head
    return next(variants.VARIANT_MODELS[stock] for stock in heads(family) if stock.__name__ == name)


def _stock_prefix(family: str) -> str:
    return STOCK_CONFIGS[family].__name__.removesuffix("Config")


def heads(family: str) -> list[type]:
    """All stock classes of a family that have a variant."""
    return [stock for stock, variant in variants.VARIANT_MODELS.items() if variant.config_class is FAMILIES[family]]


@functools.cache
def stock_computes(stock: type) -> bool:
    """Whether a stock class can be called: up to 5.13, two heads for multiple choice are built without the pooler they read."""
    if "MultipleChoice" not in stock.__name__:
        return True
    [family] = [name for name in FAMILIES if stock in heads(name)]
    return getattr(stock(stock_config(family)).base_model, "pooler", True) is not None


def heads_that_compute(family: str) -> list[type]:
    return [stock for stock in heads(family) if stock_computes(stock)]


@torch.no_grad()
def fill_positions(model: nn.Module, seed: int = 0, std: float = 0.5) -> nn.Module:
    """Fill the position parameters with random values: they start at zero, where a test proves nothing."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in position_parameters(model).values():
        noise = torch.randn(parameter.shape, generator=generator) * std
        parameter.copy_(noise.to(parameter))
    return model


def aligned(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model's parameters and buffers to where torch allocates, on multiples of 64 bytes.

    Loaded weights stay where they lie in the file. What a matrix product rounds to may depend on that (MKL's does on AMD
    processors), so that two stock models of the same weights, one built and one loaded, differ in the last bit. Bits are
    compared between models that both lie as new ones do.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def inputs(
    batch: int = 3, length: int = 12, family: str = "bert", padding: str | None = "right", seed: int = 0
) -> dict:
    """Token ids and an attention mask; every row but the first is padded, on the side asked for, or not at all."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(5, SIZES["vocab_size"], (batch, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    pad_token_id = STOCK_CONFIGS[family]().pad_token_id
    if padding is not None:
        for row in range(1, batch):
            width = min(row * 2, length - 2)
            columns = slice(length - width, length) if padding == "right" else slice(0, width)
            attention_mask[row, columns] = 0
            input_ids[row, columns] = pad_token_id
    return {"input_ids": input_ids, "attention_mask": attention_mask}


# The ways of attention: of short sequences and of long ones; values of the fixture `path` in modeling/conftest.py.
PATHS = ["whole", "blocks"]
# `pytest --full`: every combination, in place of every pair.
FULL = False


def cross(
    strength: int = 2,
    where: Callable[..., bool] = lambda **case: True,
    rest: pytest.MarkDecorator | None = None,
    indirect: tuple[str, ...] = (),
    **values: Iterable,
) -> pytest.MarkDecorator:
    """Parametrize a test over a covering array: every pair of values of two parameters is in some case.

    Most faults that combinations show are faults of two values, and the pairs of five parameters need hardly more cases than those
    of two.

    Args:
        strength: 2 for pairs, 1 for every value once, 3 for triples. `pytest --full` takes the whole product instead.
        where: which combinations exist, called with a case's values by name.
        rest: marks the cases beyond those that have every value once; `pytest.mark.slow` leaves them to `pytest --all`.
        indirect: parameters whose values are given to the fixtures of their names.
        values: for each parameter of the test its values.
    """
    product = [case for case in itertools.product(*values.values()) if where(**dict(zip(values, case, strict=True)))]
    order = min(strength, len(values))
    cases = list(range(len(product))) if FULL else _covering(product, order)
    few = set(_covering([product[case] for case in cases], 1)) if rest is not None else range(len(cases))
    marks = {True: (), False: (rest,)}
    return pytest.mark.parametrize(
        ",".join(values),
        [pytest.param(*product[case], marks=marks[i in few]) for i, case in enumerate(cases)],
        indirect=list(indirect),
    )


def _covering(product: list[tuple], strength: int) -> list[int]:
    """Places of the cases that are taken, one after the other: each time the one with the most combinations still missing.

    Of several that have as many, the one whose pairs of values were taken least: where every value is taken once, they meet others
    each time.
    """
    # Values need not be hashable: they stand for themselves by where they were first seen.
    seen: list[list] = [[] for _ in product[0]]
    for case in product:
        for known, value in zip(seen, case, strict=True):
            if value not in known:
                known.append(value)
    numbers = [tuple(known.index(value) for known, value in zip(seen, case, strict=True)) for case in product]

    def combinations(size: int) -> list[list[tuple]]:
        places = list(itertools.combinations(range(len(product[0])), size))
        return [[(at, tuple(case[place] for place in at)) for at in places] for case in numbers]

    wanted, pairs = combinations(strength), combinations(min(2, len(product[0])))
    missing, used, taken = {each for case in wanted for each in case}, collections.Counter(), []
    while missing:
        new = [sum(each in missing for each in case) for case in wanted]
        most = max(new)
        best = min(
            (case for case in range(len(product)) if new[case] == most),
            key=lambda case: sum(used[pair] for pair in pairs[case]),
        )
        taken.append(best)
        missing.difference_update(wanted[best])
        used.update(pairs[best])
    return sorted(taken)


class Sentences(Dataset):
    """Eight inputs without padding, of one class and the other in turns, to train on."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        batch = inputs(batch=1, seed=index, padding=None)
        return {**{name: value[0] for name, value in batch.items()}, "labels": index % 2}


def build(position_scheme: str, family: str = "bert", head: str = "Model", seed: int = 0, **overrides) -> nn.Module:
    """A tiny variant in eval mode with its position parameters filled, and biases as a trained model has them."""
    torch.manual_seed(seed)
    model = variant_class(family, head)(variant_config(family, position_scheme=position_scheme, **overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.bias", "key.bias", "value.bias")):
                parameter.normal_(std=0.2)
    return fill_positions(model, seed).eval()


def another_value(flag: Flag) -> Any:
    """A value of a flag that is not its default."""
    kind = flag.kind
    if isinstance(kind, Choice):
        return next(choice for choice in kind.choices if choice != flag.default)
    if isinstance(kind, Boolean):
        return not flag.default
    if isinstance(kind, Dictionary):
        return ast.literal_eval(kind.example)
    if isinstance(kind, Subset):
        return [kind.choices[1]]
    if isinstance(kind, Names):
        return "none"
    return 8 if isinstance(kind, Integer) else max(0.5, kind.low * 500.0)


def schemes_beside(composites: Iterable[str]) -> list[str]:
    """The schemes of the table that are in none of the composites."""
    named = {name for composite in composites for name in composite.split("+")}
    return [name for name in SCHEMES if name not in named]


def schemes_with_terms() -> list[str]:
    """The schemes of the table that add to attention scores: no FlashAttention carries them."""
    attention = {name: scheme for name, scheme in SCHEMES.items() if issubclass(scheme, AttentionScheme)}
    return [name for name, scheme in attention.items() if scheme.adds_scores]


def difference_where_attended(first: torch.Tensor, second: torch.Tensor, attention_mask: torch.Tensor) -> float:
    """Largest difference over the tokens that are not padding."""
    return (first - second)[attention_mask.bool()].abs().max().item()
