"""`with_position_scheme`: a model in memory becomes what `from_pretrained` makes of the same model saved."""

import copy

import pytest
import tiny
import torch
from tiny import FAMILIES, fill_positions, inputs
from torch import nn

import hf_posenc
from hf_posenc import registry, with_position_scheme
from hf_posenc.modeling.schemes import SCHEMES


SOME = ("t5", "absolute+t5", "absolute+deberta", "sinusoidal", "tupe", "relative_key", "absolute+rope", "kerple+alibi")


def stock(family: str = "bert", head: str = "Model", **overrides) -> nn.Module:
    torch.manual_seed(0)
    name = registry.STOCK_MODELS[tiny.variant_class(family, head)]
    return name(tiny.stock_config(family, **overrides)).eval()


def output(model: nn.Module, family: str = "bert") -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(family=family))[0]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@tiny.cross(family=FAMILIES, scheme=SOME, rest=pytest.mark.slow)
def test_equals_what_is_loaded(family, scheme, tmp_path):
    model = stock(family, "ForSequenceClassification")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, position_scheme=scheme)
    [weight, *_] = model.parameters()
    assert with_position_scheme(model, scheme) is model
    assert type(model) is type(loaded) and type(model.config) is type(loaded.config)
    assert next(model.parameters()) is weight
    own, there = values(model), values(loaded)
    assert [*own] == [*there] and all(own[name].shape == there[name].shape for name in own)
    fill_positions(model)
    fill_positions(loaded.eval())
    torch.testing.assert_close(output(model, family), output(loaded, family), rtol=0, atol=2e-5)


@pytest.mark.parametrize("before", [name for name in SCHEMES if name != "none"])
def test_between_variants(before, tmp_path):
    """From every scheme to another, as through a folder; parameters of schemes that both have stay."""
    model = tiny.build(f"{before}+alibi" if before != "alibi" else "alibi+t5", head="ForMaskedLM")
    model.save_pretrained(tmp_path)
    after = "t5+rope" if before != "rope" else "rope+kerple"
    loaded = type(model).from_pretrained(tmp_path, position_scheme=after)
    other = with_position_scheme(model, after, copy=True)
    assert [*values(other)] == [*values(loaded)]
    for name, value in values(loaded).items():
        if name in values(model):
            assert torch.equal(value, values(other)[name]), name
    fill_positions(other)
    fill_positions(loaded.eval())
    torch.testing.assert_close(output(other), output(loaded), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_back_to_stock(family):
    model = stock(family, "ForTokenClassification")
    expected, config = output(model, family), model.config.to_dict()
    variant = with_position_scheme(model, FAMILIES[family].family.native_scheme, copy=True)
    assert type(variant) is registry.VARIANT_MODELS[type(model)]
    torch.testing.assert_close(output(variant, family), expected, rtol=0, atol=2e-6)
    again = with_position_scheme(variant, None)
    assert again is variant and type(again) is type(model) and again.config.to_dict() == config
    assert not any("osenc" in type(part).__name__ for part in again.modules())
    assert not any(name.startswith("position_s") for part in again.modules() for name in vars(part))
    assert torch.equal(output(again, family), expected)


@pytest.mark.parametrize("flags", [{"position_scheme": "t5"}, {"position_combine": "concat"}, {"position_stride": 2}])
def test_only_the_native_scheme_is_stock(flags):
    model = tiny.build(**{"position_scheme": "absolute", **flags})
    with pytest.raises(ValueError, match="position_scheme='absolute' without other flags"):
        with_position_scheme(model, None)


def test_a_copy_leaves_the_model():
    model = stock()
    before, expected = values(model), output(model)
    other = with_position_scheme(model, "t5", copy=True)
    fill_positions(other)
    assert type(model) is registry.STOCK_MODELS[type(other)] and not hasattr(model.config, "position_scheme")
    assert torch.equal(output(model), expected) and all(torch.equal(before[n], v) for n, v in values(model).items())
    assert not any(a is b for a in model.parameters() for b in other.parameters())


def test_what_stays(said):
    """Dtype, mode, frozen parameters, hooks, an optimizer's parameters, ties, settings of modules, another size of vocabulary."""
    model = stock(head="ForMaskedLM").to(torch.bfloat16).train()
    model.resize_token_embeddings(105)
    model.gradient_checkpointing_enable()
    model.bert.encoder.layer[0].requires_grad_(False)
    model.bert.encoder.layer[1].attention.self.dropout.p = 0.3
    seen = []
    model.bert.encoder.register_forward_hook(lambda module, args, result: seen.append(type(module).__name__))
    names = {name: parameter for name, parameter in model.named_parameters() if "position_embeddings" not in name}
    with_position_scheme(model, "deberta", position_buckets=4, position_max_distance=8)
    assert model.training and {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in names.items())
    assert {*after} - {*names} == {*hf_posenc.position_parameters(model)}
    assert not model.bert.encoder.layer[0].output.dense.weight.requires_grad
    assert model.bert.encoder.layer[1].attention.self.dropout.p == 0.3
    assert model.is_gradient_checkpointing
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model(**inputs()).logits.shape[-1] == 105 and seen == ["PosencBertEncoder"]
    assert any("leaves out the absolute positions" in line for line in said)
    assert not any("loaded" in line for line in said)


def test_a_model_that_leaves_padding_out():
    model = stock()
    hf_posenc.unpad(model)
    expected = with_position_scheme(stock(), "absolute+t5")
    with_position_scheme(model, "absolute+t5")
    mask = inputs()["attention_mask"].bool()
    torch.testing.assert_close(output(model)[mask], output(expected)[mask], rtol=0, atol=2e-5)


def test_a_module_of_ones_own_stays():
    """A plain torch.nn module is no sign of a layer that the config does not tell of, even where MPNet's bias is another one."""
    model = stock("mpnet")
    model.own = nn.Embedding(3, 4)
    assert with_position_scheme(model, "t5").own is model.own


def refused_models():
    import peft

    lora = {"r": 2, "target_modules": ["query"]}
    yield "PEFT", peft.get_peft_model(stock(), peft.LoraConfig(**lora))
    yield "PEFT", peft.get_peft_model(stock(), peft.LoraConfig(**lora)).base_model.model
    yield "replaced", replaced(stock(), "forward", lambda *args, **kwargs: None)
    yield "in place of the BertSelfAttention", replaced(stock(), "attention", nn.Identity())
    longer = stock()
    longer.encoder.layer.append(copy.deepcopy(longer.encoder.layer[0]))
    yield "encoder.layer.2.attention.self is none of the modules", longer
    from transformers import BertModel, GPT2Config, GPT2Model

    yield "GPT2Model cannot", GPT2Model(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=9))
    yield "the BertModel inside", type("Own", (BertModel,), {})(tiny.stock_config())


def replaced(model: nn.Module, what: str, value) -> nn.Module:
    layer = model.encoder.layer[1].attention
    if what == "forward":
        layer.self.forward = value
    else:
        layer.self = value
    return model


def test_refused():
    for message, model in refused_models():
        before = copy.copy(vars(model))
        with pytest.raises(ValueError, match=message):
            with_position_scheme(model, "t5")
        assert vars(model) == before
    with pytest.raises(TypeError, match="model of transformers"):
        with_position_scheme(nn.Linear(2, 2), "t5")
    model = stock()
    for flags, message in (
        ({"position_scheme": "t4"}, "did you mean 't5'"),
        ({"position_scheme": "t5", "position_x": 1}, "position_x"),
    ):
        with pytest.raises(ValueError, match=message):
            with_position_scheme(model, **flags)
    assert type(model) in registry.VARIANT_MODELS and "position_embeddings" in vars(model.embeddings)["_modules"]
