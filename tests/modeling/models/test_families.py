"""A family's description is complete and true: every name leads to a part of its stock model, or to a size of its config."""

import inspect
from dataclasses import fields

import pytest
import torch
import transformers
from packaging.version import Version
from tiny import FAMILIES, SIZES, heads, inputs, stock_computes, stock_config, variant_class, variant_config
from torch import nn

from hf_posenc import variants
from hf_posenc.modeling.models.family import Family, Sizes
from hf_posenc.modeling.schemes.table import scheme_names
from hf_posenc.modeling.stock_interface import MULTIPLE_CHOICE_POOLS


@pytest.fixture(params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param].family


def stock_model(family: Family) -> nn.Module:
    return next(
        cls for cls in heads(family.model_type) if variants.VARIANT_MODELS[cls] is variant_class(family.model_type)
    )(stock_config(family.model_type))


def test_every_name_of_a_module_leads_to_that_part_of_the_stock_model(family):
    model = stock_model(family)
    embeddings, encoder = family.embeddings_of(model), family.encoder_of(model)
    layers = family.layers_of(encoder)
    width = getattr(embeddings, family.words).embedding_dim
    assert getattr(embeddings, family.words) is model.get_input_embeddings()
    assert getattr(embeddings, family.table).weight.shape == (SIZES["max_position_embeddings"], width)
    assert isinstance(layers, nn.ModuleList) and len(layers) == SIZES["num_hidden_layers"]
    if family.projection:
        projection = getattr(model, family.projection)
        assert (projection.in_features, projection.out_features) == (width, SIZES["hidden_size"])
    for layer in layers:
        attention = family.self_attention_of(layer)
        assert getattr(attention, family.heads_count) == SIZES["num_attention_heads"]
        assert getattr(attention, family.head_dim) == SIZES["hidden_size"] // SIZES["num_attention_heads"]
        names = {family.query, family.key, family.value} | ({family.output} if family.output else set())
        assert names == {name for name, module in attention.named_modules() if isinstance(module, nn.Linear)}
    assert family.table_key in model.state_dict()


def test_query_key_and_value_are_told_apart(family):
    """A key projection of zeros weighs all tokens alike; values of zeros leave nothing but biases, which are zero here."""
    model = stock_model(family).eval()
    attention = family.self_attention_of(family.layers_of(family.encoder_of(model))[0])
    hidden_states = torch.randn(1, 5, SIZES["hidden_size"])
    if family.output:
        nn.init.eye_(getattr(attention, family.output).weight)
    with torch.no_grad():
        value = getattr(attention, family.value)(hidden_states)
        for name in (family.query, family.key):
            weight = getattr(attention, name).weight
            kept = weight.clone()
            weight.zero_()
            assert (attention(hidden_states)[0] - value.mean(1, keepdim=True)).abs().max() < 1e-5
            weight.copy_(kept)
        assert (attention(hidden_states)[0] - value.mean(1, keepdim=True)).abs().max() > 1e-2


def test_the_parts_turn_into_subclasses_of_the_stock_modules(family):
    parts, stock = variant_class(family.model_type).position_classes, stock_model(family)
    encoder = family.encoder_of(stock)
    layer = family.layers_of(encoder)[0]
    modules = {
        "model": stock,
        "embeddings": family.embeddings_of(stock),
        "encoder": encoder,
        "layer": layer,
        "self_attention": family.self_attention_of(layer),
    }
    for part, module in modules.items():
        assert issubclass(getattr(parts, part), type(module))
    assert parts.family is family
    for part in ("embeddings", "encoder", "self_attention"):
        assert getattr(parts, part).family is family
    assert parts.model.__name__ == f"Posenc{family.prefix}Model"


def test_sizes_are_those_of_the_config_by_whatever_name(family):
    """Each size differs from every default and from each other, so that no two names can be mixed up."""
    sizes = {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "max_position_embeddings": 77,
        "initializer_range": 0.03,
        "layer_norm_eps": 1e-7,
        "hidden_dropout_prob": 0.07,
        "attention_probs_dropout_prob": 0.03,
    }
    given = {
        family.config_names.get(name, name): value for name, value in sizes.items() if name not in family.constants
    }
    width = family.config_names.get("table_width")
    given |= {width: 24} if width else {}
    config = FAMILIES[family.model_type](**given)
    got = config.sizes
    for size in fields(Sizes):
        if size.name in sizes:
            assert getattr(got, size.name) == family.constants.get(size.name, sizes[size.name])
    assert got.head_dim == 12 and got.table_width == (24 if width else 36)
    assert got.first_position == (config.pad_token_id + 1 if family.positions_follow_padding else 0)
    # The names are real: a config swallows a keyword that it does not know.
    known = inspect.signature(type(stock_config(family.model_type)).__init__).parameters
    assert {*given} <= {*known}
    model = variant_class(family.model_type)(config)
    assert family.self_attention_of(family.layers_of(family.encoder_of(model))[0]).dropout.p == pytest.approx(0.03)
    assert family.embeddings_of(model).dropout.p == pytest.approx(0.07)
    assert family.embeddings_of(model).LayerNorm.eps == pytest.approx(got.layer_norm_eps)


def test_positions_follow_padding_where_it_is_said(family):
    """Padding in front moves the other positions only where they count words."""
    model = stock_model(family).eval()
    rows = []
    getattr(family.embeddings_of(model), family.table).register_forward_hook(
        lambda module, arguments, output: rows.append(arguments[0])
    )
    batch = inputs(batch=2, padding="left", family=family.model_type)
    model(**batch)
    first = batch["attention_mask"][1].argmax()
    moved = rows[0].expand(2, -1)[1, first] - rows[0].expand(2, -1)[0, 0]
    assert moved == (0 if family.positions_follow_padding else first)
    assert rows[0].expand(2, -1)[0, 0] == family.first_position(model.config)


def test_the_native_scheme_computes_what_stock_computes_and_is_the_default(family):
    config = variant_config(family.model_type)
    assert config.position_scheme == family.native_scheme and scheme_names(family.native_scheme)
    stock = stock_model(family).eval()
    variant = variant_class(family.model_type)(config).eval()
    assert not any(variant.load_state_dict(stock.state_dict()))
    batch = inputs(family=family.model_type)
    with torch.no_grad():
        difference = variant(**batch).last_hidden_state - stock(**batch).last_hidden_state
    assert difference[batch["attention_mask"].bool()].abs().max() < 1e-5


def test_a_head_that_stock_built_without_what_it_reads_says_which_version_it_needs(family):
    for stock in heads(family.model_type):
        if stock_computes(stock):
            continue
        model = variants.VARIANT_MODELS[stock](variant_config(family.model_type, position_scheme="t5")).eval()
        batch = {name: value[None] for name, value in inputs(family=family.model_type).items()}
        with pytest.raises(
            ImportError, match=f"{type(model).__name__} needs transformers {MULTIPLE_CHOICE_POOLS} or newer"
        ):
            model(**batch)
    is_older = Version(transformers.__version__) < Version(MULTIPLE_CHOICE_POOLS)
    lacking = [stock for stock in heads(family.model_type) if not stock_computes(stock)]
    assert len(lacking) == (is_older and family.model_type in ("xlm-roberta", "camembert"))
