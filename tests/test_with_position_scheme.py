"""`with_position_scheme`: a model in memory becomes what `from_pretrained` makes of the same model saved."""

import copy

import pytest
import tiny
import torch
from tiny import FAMILIES, fill_positions, inputs
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers import BertModel, BertPreTrainedModel, GPT2Config, GPT2Model

import hf_posenc
from hf_posenc import variants, with_position_scheme
from hf_posenc.modeling.schemes.table import SCHEMES


SOME = ("t5", "absolute+t5", "absolute+deberta", "sinusoidal", "tupe", "relative_key", "absolute+rope", "kerple+alibi")


def stock(family: str = "bert", head: str = "Model", **overrides) -> nn.Module:
    torch.manual_seed(0)
    name = variants.STOCK_MODELS[tiny.variant_class(family, head)]
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
    assert type(variant) is variants.VARIANT_MODELS[type(model)]
    torch.testing.assert_close(output(variant, family), expected, rtol=0, atol=2e-6)
    again = with_position_scheme(variant, None)
    assert again is variant and type(again) is type(model) and again.config.to_dict() == config
    assert not any("osenc" in type(part).__name__ for part in again.modules())
    assert not any(name.startswith("position_s") for part in again.modules() for name in vars(part))
    assert torch.equal(output(again, family), expected)


@pytest.mark.parametrize("flags", [{"position_scheme": "t5"}, {"position_combine": "concat"}, {"position_stride": 2}])
def test_only_the_native_scheme_is_stock(flags):
    model = tiny.build(**{"position_scheme": "absolute", **flags})
    with pytest.raises(ValueError, match="position_scheme='absolute' without other config options"):
        with_position_scheme(model, None)


def test_a_copy_leaves_the_model():
    model = stock()
    before, expected = values(model), output(model)
    other = with_position_scheme(model, "t5", copy=True)
    fill_positions(other)
    assert type(model) is variants.STOCK_MODELS[type(other)] and not hasattr(model.config, "position_scheme")
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
    yield "instead of a BertSelfAttention", replaced(stock(), "attention", nn.Identity())
    longer = stock()
    longer.encoder.layer.append(copy.deepcopy(longer.encoder.layer[0]))
    yield "encoder.layer.2.attention.self is not a module", longer
    yield "GPT2Model cannot", GPT2Model(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=9))
    yield "Own cannot .*derive it from PosencBertModel", type("Own", (BertModel,), {})(tiny.stock_config())
    yield "change the BertModel inside it, .*model.encoder, ", Around(tiny.stock_config())
    yield "wrapped by torch's DataParallel", nn.DataParallel(stock())
    yield "holds 2 models of transformers \\(0, 1\\)", nn.Sequential(stock(), stock())
    longer = stock()
    longer.encoder.layer[1] = Wrapped(longer.encoder.layer[1])
    yield "encoder.layer.1.inner.attention.self is not a module", longer
    named = stock()
    named.encoder.relative_attention_bias = nn.Linear(2, 2)
    yield "encoder already has an attribute 'relative_attention_bias'", named


class Wrapped(nn.Module):
    """What people put around a layer."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Around(BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.encoder = BertModel(config)


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
        classes = [type(part) for part in model.modules()]
        with pytest.raises(ValueError, match=message):
            with_position_scheme(model, "t5")
        assert vars(model) == before and [type(part) for part in model.modules()] == classes
    for nothing in (nn.Linear(2, 2), "bert-base-uncased", None):
        with pytest.raises(TypeError, match="needed.*got"):
            with_position_scheme(nothing, "t5")
    model = stock()
    for flags, message in (
        ({"position_scheme": "t4"}, "did you mean 't5'"),
        ({"position_scheme": "t5", "position_x": 1}, "position_x"),
    ):
        with pytest.raises(ValueError, match=message):
            with_position_scheme(model, **flags)
    assert type(model) in variants.VARIANT_MODELS and "position_embeddings" in vars(model.embeddings)["_modules"]


class Tripled(nn.Linear):
    def forward(self, input):
        return 3 * super().forward(input)


class Doubled(nn.LayerNorm):
    def forward(self, input):
        return 2 * super().forward(input)


class Halved(nn.Dropout):
    """Not what a Dropout does, so that it shows."""

    def forward(self, input):
        return 0.5 * super().forward(input)


class Times(nn.Module):
    def forward(self, weight):
        return 3 * weight


class Adapted(nn.Module):
    """LoRA as people write it themselves: it has the layer."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.lora = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, states):
        return self.base(states) + self.lora(states)


def as_class(cls: type):
    def change(module: nn.Module) -> nn.Module:
        module.__class__ = cls
        return module

    return change


def quantized(model: nn.Module) -> None:
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)


def with_attributes(layer: nn.Module) -> nn.Module:
    layer.output.dropout.mine = [3]
    layer.output.LayerNorm.eps = 0.5
    return layer


def each_layer(change, *names: str):
    """A change to modules of every layer, by their names."""

    def apply(model: nn.Module) -> None:
        torch.manual_seed(1)
        for layer in model.encoder.layer:
            for name in names:
                path, _, last = name.rpartition(".")
                parent = layer.get_submodule(path)
                setattr(parent, last, change(getattr(parent, last)))

    return apply


DENSE = "attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"
OF_ONES_OWN = {
    "subclasses of Linear": each_layer(as_class(Tripled), *DENSE),
    "subclasses of LayerNorm": each_layer(as_class(Doubled), "attention.output.LayerNorm", "output.LayerNorm"),
    "subclasses of Dropout": each_layer(as_class(Halved), "attention.output.dropout", "output.dropout"),
    "spectral_norm": each_layer(parametrizations.spectral_norm, *DENSE),
    "weight_norm": each_layer(parametrizations.weight_norm, *DENSE),
    "weight_norm by hooks": each_layer(nn.utils.weight_norm, *DENSE),
    "LoRA": each_layer(Adapted, *DENSE),
    "no dropout": each_layer(lambda dropout: nn.Identity(), "attention.output.dropout", "output.dropout"),
    "a layer's class": lambda model: [
        as_class(type("Own", (type(layer),), {}))(layer) for layer in model.encoder.layer
    ],
    "an activation": each_layer(lambda activation: nn.SiLU(), "intermediate.intermediate_act_fn"),
    "attributes": lambda model: [with_attributes(layer) for layer in model.encoder.layer],
    "quantize_dynamic": quantized,
    "a parametrization of words": lambda model: parametrize.register_parametrization(
        model.embeddings.word_embeddings, "weight", Times()
    ),
}
# What computes the same at first.
SAME = "weight_norm", "weight_norm by hooks", "no dropout", "a layer's class"
WAY = ("absolute+t5", "tupe+deberta", "absolute+relative_key", "rope", "absolute", None)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*", "ignore:.*weight_norm.*", "ignore:torch.quantize")
@pytest.mark.parametrize("name", OF_ONES_OWN)
def test_what_need_not_change_is_not_touched(name):
    """From stock through several schemes and back: as if the scheme had been there first."""
    change = OF_ONES_OWN[name]
    model, first = stock(), stock()
    plain = output(model)
    change(model)
    assert ((output(model) - plain).abs().max() > 1e-3) == (name not in SAME)
    own = [(path, part, type(part)) for path, part in model.named_modules() if not is_of_positions(path, part)]
    attributes = [{n: v for n, v in vars(part).items() if n not in ("config", "_modules")} for _, part, _ in own]
    for scheme in WAY:
        with_position_scheme(model, scheme)
        with_position_scheme(first, scheme)
        there_first = copy.deepcopy(fill_positions(first))
        fill_positions(model)
        change(there_first)
        torch.testing.assert_close(output(model), output(there_first), rtol=0, atol=2e-5)
        for path, part, cls in own:
            assert model.get_submodule(path) is part and type(part) is cls, path
    for (path, part, _), before in zip(own, attributes):
        now = vars(part)
        assert now.keys() - {"config", "_modules"} == before.keys(), path
        assert all(now[name] is value for name, value in before.items() if not isinstance(value, torch.Tensor)), path


def is_of_positions(path: str, part: nn.Module) -> bool:
    """Whether a module of a stock BERT becomes another, or is left out, in some schemes."""
    return path.endswith(("embeddings", "encoder", "attention.self", "position_embeddings")) or not path


def test_a_module_that_changes_must_be_as_it_was_made():
    """Between variants too, whose classes stay: a self-attention, a table, what has another size."""
    for change, message in (
        (
            lambda model: as_class(type("Own", (type(model.encoder),), {}))(model.encoder),
            "encoder is a Own instead of",
        ),
        (
            lambda model: parametrizations.weight_norm(model.encoder.relative_attention_bias),
            "relative_attention_bias is a ParametrizedPositionTable instead of",
        ),
        (
            lambda model: replaced(model, "forward", model.encoder.layer[1].attention.self.forward),
            "forward of encoder.layer.1.attention.self was replaced",
        ),
        (
            lambda model: model.encoder.layer.__setitem__(0, Wrapped(model.encoder.layer[0])),
            "encoder.layer.0.inner.attention.self is not a module",
        ),
    ):
        model = tiny.build("absolute+t5")
        change(model)
        classes, before = [type(part) for part in model.modules()], output(model)
        with pytest.raises(ValueError, match=message):
            with_position_scheme(model, "absolute+t5", position_buckets=8)
        assert [type(part) for part in model.modules()] == classes and torch.equal(output(model), before)
    model = tiny.build("absolute+t5")
    parametrizations.weight_norm(model.encoder.relative_attention_bias)
    expected = output(model)
    with_position_scheme(model, "absolute+t5+alibi")  # the table stays what it is
    assert (output(model) - expected).abs().max() > 1e-3
    torch.testing.assert_close(output(with_position_scheme(model, "absolute+t5")), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shared", ["layer", "self"])
def test_layers_that_are_there_twice(shared):
    """What they become is one module still; where two layers would differ, it cannot be."""

    def share(model):
        first, second = model.encoder.layer
        if shared == "layer":
            model.encoder.layer[1] = first
        else:
            second.attention.self = first.attention.self
        return model

    for scheme in ("absolute+t5", "relative_key", "transformer_xl", "absolute"):
        model, copied = share(stock()), stock()
        copied.load_state_dict(model.state_dict())
        with_position_scheme(model, scheme)
        with_position_scheme(copied, scheme)
        assert model.encoder.layer[0].attention.self is model.encoder.layer[1].attention.self
        copied.load_state_dict(fill_positions(model).state_dict())
        torch.testing.assert_close(output(model), output(copied), rtol=0, atol=2e-5)
        assert {*vars(model.encoder.layer[0].attention.self)} == {*vars(copied.encoder.layer[0].attention.self)}
    for flags in (
        {"position_scheme": "t5", "position_window": 4},
        {"position_scheme": "sinusoidal", "position_every_layer": True},
    ):
        model = share(stock())
        if "position_window" in flags or shared == "layer":
            with pytest.raises(ValueError, match=r"encoder.layer.1\S* and encoder.layer.0\S* are the same module"):
                with_position_scheme(model, **flags)
            assert type(model) is BertModel
        else:
            with_position_scheme(model, **flags)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_module_of_ones_own_has_the_models_config_or_its_own(keeps):
    model = stock("electra", "ForPreTraining")
    head = model.discriminator_predictions
    as_class(type("Own", (type(head),), {}))(head)
    if keeps:
        head.config = copy.deepcopy(model.config)
    before = head.config
    with_position_scheme(model, "t5")
    assert type(head).__name__ == "Own" and head.config is (before if keeps else model.config)
    assert hasattr(model.config, "position_scheme")


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("what", ["the model", "around it", "layers", "a Linear"])
def test_what_is_compiled_is_compiled_again(what):
    model, plain = stock(), stock()
    given = torch.compile(model, backend="aot_eager") if what == "around it" else model
    parts = {"the model": [model], "layers": model.encoder.layer, "a Linear": [model.encoder.layer[0].output.dense]}
    for part in parts.get(what, ()):
        part.compile(backend="aot_eager")
    mask = inputs()["attention_mask"].bool()
    for scheme in ("native", "absolute+t5", "deberta", "absolute", None):
        if scheme != "native":
            assert with_position_scheme(given, scheme) is given
            fill_positions(with_position_scheme(plain, scheme))
            fill_positions(model)
        torch.testing.assert_close(output(given)[mask], output(plain)[mask], rtol=0, atol=2e-5)


def test_what_holds_a_model(minilm, tmp_path):
    """A pipeline and a SentenceTransformer are changed and returned, saved and loaded."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer, pipeline

    model = BertModel.from_pretrained(minilm)
    features = pipeline(
        "feature-extraction", model=model, tokenizer=AutoTokenizer.from_pretrained(minilm), device="cpu"
    )
    before = torch.tensor(features("It rains."))
    assert with_position_scheme(features, "absolute+t5") is features and type(model) is hf_posenc.PosencBertModel
    torch.testing.assert_close(torch.tensor(features("It rains.")), before, rtol=0, atol=1e-5)

    sentences = SentenceTransformer(minilm, device="cpu")
    start = sentences.encode("It rains.", convert_to_tensor=True)
    other = with_position_scheme(sentences, "absolute+t5", copy=True)
    assert hf_posenc.position_parameters(other) and not hf_posenc.position_parameters(sentences)
    fill_positions(other).save(str(tmp_path))
    expected = other.encode("It rains.", convert_to_tensor=True)
    assert (expected - start).abs().max() > 1e-3
    again = SentenceTransformer(str(tmp_path), device="cpu").encode("It rains.", convert_to_tensor=True)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-6)


def test_a_config_class_of_ones_own_has_no_stock_one_to_go_back_to():
    config = type("OwnConfig", (hf_posenc.PosencBertConfig,), {})(**tiny.SIZES)
    with pytest.raises(
        ValueError, match="no original for your own config class OwnConfig: .*position_scheme='absolute'"
    ):
        with_position_scheme(hf_posenc.PosencBertModel(config), None)


def test_an_amplitude_stays_when_it_is_no_longer_trained(tmp_path):
    """A tensor that is a parameter with one option and a constant with another; as through a folder."""
    for before, after in (
        ({"position_learn_amplitude": True}, {"position_learn_amplitude": False}),
        ({"position_amplitude": 0.0}, {"position_amplitude": 0.5}),
        ({"position_learn_amplitude": False}, {"position_learn_amplitude": True}),
    ):
        model = tiny.build("sinusoidal", **before)
        with torch.no_grad():
            model.embeddings.position_scale.weight.fill_(0.7)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, **after).eval()
        expected = output(model)
        with_position_scheme(model, "sinusoidal", **after)
        assert torch.equal(output(model), expected) and torch.equal(output(loaded), expected)
        assert [*values(model)] == [*values(loaded)]
        assert [*hf_posenc.position_parameters(model)] == [*hf_posenc.position_parameters(loaded)]


@pytest.mark.parametrize(
    ("scheme", "before", "after", "told"),
    [
        ("sinusoidal", {"position_amplitude": 0.1}, {"position_amplitude": 0.5}, "position_amplitude=0.5"),
        ("sinusoidal", {}, {"position_amplitude": 0.0}, "position_amplitude=0.0"),
        ("sinusoidal", {"position_amplitude": 0.1}, {"position_amplitude": 0.1}, None),
        ("sinusoidal", {"position_amplitude": 0.1}, {"position_frequency": 0.5}, None),
        (
            "absolute",
            {"position_every_layer": True},
            {"position_every_layer_weight": 0.5},
            "position_every_layer_weight=0.5",
        ),
    ],
)
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_number_among_the_weights_that_an_option_does_not_change_is_reported(
    is_loaded, scheme, before, after, told, tmp_path, said
):
    model = tiny.build(scheme, **before)
    if is_loaded:
        model.save_pretrained(tmp_path)
        type(model).from_pretrained(tmp_path, **after)
    else:
        with_position_scheme(model, scheme, **after)
    lines = [line for line in said if "which is kept" in line]
    assert len(lines) == (told is not None) and all(line.startswith(f"{told}: ") for line in lines)


@pytest.mark.parametrize(
    ("scheme", "before", "after", "lost"),
    [
        ("absolute+t5", {}, {"position_buckets": 8}, "encoder.relative_attention_bias.weight"),
        ("absolute+t5", {}, {"position_per_layer": True}, "encoder.relative_attention_bias.weight"),
        (
            "absolute",
            {"position_combine": "concat"},
            {"position_combine": "add"},
            "embeddings.position_projection.weight and 1",
        ),
        ("absolute+t5", {}, {"position_max_distance": 64}, None),
    ],
)
def test_values_that_other_options_drop_are_reported(scheme, before, after, lost, said):
    model = tiny.build(scheme, **before)
    with_position_scheme(model, scheme, **after)
    told = [line for line in said if "are not kept" in line]
    assert len(told) == (lost is not None) and all(lost in line for line in told)


def test_schemes_that_are_taken_away_are_not_reported(said):
    with_position_scheme(tiny.build("absolute+t5"), "absolute+deberta")
    assert not any("are not kept" in line for line in said)
