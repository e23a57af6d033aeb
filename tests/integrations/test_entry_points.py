"""Promise 2: every entry point gives the same variant."""

import json

import pytest
import tiny
import torch
from tiny import (
    FAMILIES,
    STOCK_CONFIGS,
    aligned,
    difference_where_attended,
    fill_positions,
    heads,
    inputs,
    stock_config,
    variant_class,
    variant_config,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BertPreTrainedModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedModel,
    pipeline,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

import hf_posenc
from hf_posenc import position_parameters, variants


FLAGS = {"position_scheme": "absolute+t5", "position_buckets": 8}
# A table that checkpoints have cannot get other buckets.
OTHER_FLAGS = {"mpnet": {"position_scheme": "absolute+t5+deberta", "position_norm": True}}
HEADS = [
    pytest.param(family, stock, id=stock.__name__, marks=[] if index < 2 else pytest.mark.slow)
    for family in FAMILIES
    for index, stock in enumerate(heads(family))
]
# All entry points of all heads of BERT, and of the base model and a head elsewhere: the way to a head is the same in all families.
EVERY_WAY = [
    pytest.param(
        family, stock, id=stock.__name__, marks=[] if index < (3 if family == "bert" else 1) else pytest.mark.slow
    )
    for family in FAMILIES
    for index, stock in enumerate(heads(family)[: None if family == "bert" else 2])
]
AUTO_CLASSES = {
    name: auto
    for name, auto in vars(modeling_auto).items()
    if name.startswith("AutoModel") and getattr(auto, "_model_mapping", None) is not None
}


def batch_for(stock: type, family: str) -> dict[str, torch.Tensor]:
    batch = inputs(family=family)
    if "MultipleChoice" in stock.__name__:
        batch = {name: value[None].repeat(2, 1, 1) for name, value in batch.items()}
    return batch


@torch.no_grad()
def outputs(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first output, flat."""
    return aligned(model).eval()(**batch).to_tuple()[0].flatten()


def set_by_hand(config, flags: dict):
    for name, value in flags.items():
        setattr(config, name, value)
    return config


def auto_classes(family: str, stock: type) -> list[type]:
    """The Auto classes that are said to lead to a stock class's variant."""
    variant = variants.VARIANT_MODELS[stock].__name__
    return [AUTO_CLASSES[auto] for auto, name in FAMILIES[family].auto_classes.items() if name == variant]


def entry_points_of_checkpoints(family: str, stock: type, folder: str, saved: str, flags: dict):
    """(name, model) of every way from a checkpoint to the variant.

    `folder` has the stock model, `saved` a variant with the same weights whose scheme has no parameters.
    """
    config_class, variant = STOCK_CONFIGS[family], variants.VARIANT_MODELS[stock]
    for cls in (stock, *auto_classes(family, stock)):
        name = cls.__name__
        yield f"{name} with flags", cls.from_pretrained(folder, **flags)
        yield f"{name}, AutoConfig", cls.from_pretrained(folder, config=AutoConfig.from_pretrained(folder, **flags))
        by_hand = set_by_hand(AutoConfig.from_pretrained(folder), flags)
        yield f"{name}, hand-set config", cls.from_pretrained(folder, config=by_hand)
        plain = AutoConfig.from_pretrained(folder)
        yield f"{name}, plain config and flags", cls.from_pretrained(folder, config=plain, **flags)
        yield f"{name} over another scheme", cls.from_pretrained(saved, **flags)
    read = config_class.from_pretrained(folder, **flags)
    yield "config read by its class", stock.from_pretrained(folder, config=read)
    yield "config made by its class", stock.from_pretrained(folder, config=stock_config(family, **flags))
    yield "the variant's config", stock.from_pretrained(folder, config=variant_config(family, **flags))
    yield "a config's folder", stock.from_pretrained(folder, config=folder, **flags)
    yield "the variant itself", variant.from_pretrained(folder, **flags)


def entry_points_of_configs(family: str, stock: type, folder: str, flags: dict):
    """(name, model) of every way from a config to the variant: models with new weights."""
    for auto in auto_classes(family, stock):
        yield f"{auto.__name__}, AutoConfig", auto.from_config(AutoConfig.from_pretrained(folder, **flags))
        yield f"{auto.__name__}, stock config", auto.from_config(stock_config(family, **flags))
        yield f"{auto.__name__}, hand-set config", auto.from_config(set_by_hand(stock_config(family), flags))
    yield "config", stock(stock_config(family, **flags))
    yield "config by keyword", stock(config=stock_config(family, **flags))
    yield "hand-set config", stock(set_by_hand(stock_config(family), flags))
    yield "config and flags", stock(stock_config(family), **flags)
    yield "the variant itself", variants.VARIANT_MODELS[stock](variant_config(family, **flags))


@pytest.mark.parametrize("family, stock", EVERY_WAY)
def test_every_entry_point_gives_the_same_variant(family, stock, tmp_path):
    folder, saved = str(tmp_path / "stock"), str(tmp_path / "rope")
    flags = OTHER_FLAGS.get(family, FLAGS)
    torch.manual_seed(0)
    original = stock(stock_config(family))
    original.save_pretrained(folder)
    stock.from_pretrained(folder, position_scheme="absolute+rope").save_pretrained(saved)

    opened = list(entry_points_of_checkpoints(family, stock, folder, saved, flags))
    for name, model in entry_points_of_configs(family, stock, folder, flags):
        left_out, unknown = model.load_state_dict(original.state_dict(), strict=False)
        assert not unknown and {*left_out} <= position_parameters(model).keys(), name
        opened.append((name, model))
    assert len(opened) >= 15

    batch = batch_for(stock, family)
    expected = outputs(fill_positions(opened[0][1]), batch)
    assert (expected - outputs(original, batch)).abs().max() > 1e-3
    for name, model in opened:
        assert type(model) is variants.VARIANT_MODELS[stock], name
        assert isinstance(model, stock), name
        assert type(model.config) is FAMILIES[family], name
        assert {flag: getattr(model.config, flag) for flag in flags} == flags, name
        assert torch.equal(outputs(fill_positions(model), batch), expected), name


@pytest.mark.parametrize("family, stock", HEADS)
def test_the_native_scheme_is_a_variant_that_computes_what_stock_computes(family, stock, tmp_path):
    torch.manual_seed(0)
    original = stock(stock_config(family))
    original.save_pretrained(tmp_path)
    native = FAMILIES[family].family.native_scheme
    model = stock.from_pretrained(tmp_path, position_scheme=native)
    assert type(model) is variants.VARIANT_MODELS[stock]
    assert model.state_dict().keys() == original.state_dict().keys()
    batch = batch_for(stock, family)
    if native == "absolute":
        assert torch.equal(outputs(model, batch), outputs(original, batch))
    else:  # other kernels
        assert (outputs(model, batch) - outputs(original, batch)).abs().max() < 1e-5


# What checkpoints of a family were trained with, where it is more than a table of positions.
NATIVE = {"mpnet": "absolute+t5"}


ANY_FLAG = {
    "position_combine": ("gate", "embeddings.position_gate.weight"),
    "position_every_layer": (True, "{encoder}.layer.1.position_scale.weight"),
}


@tiny.cross(flag=ANY_FLAG, family=FAMILIES, strength=1)
def test_any_flag_selects_the_variant_and_position_scheme_defaults_to_what_was_trained(family, flag, tmp_path):
    value, key = ANY_FLAG[flag]
    stock = next(cls for cls in heads(family) if variants.VARIANT_MODELS[cls] is variant_class(family))
    original = stock(stock_config(family))
    original.save_pretrained(tmp_path)
    flags = {flag: value}
    opened = [
        AutoModel.from_pretrained(tmp_path, **flags),
        stock.from_pretrained(tmp_path, **flags),
        AutoModel.from_config(AutoConfig.from_pretrained(tmp_path, **flags)),
        stock(stock_config(family, **flags)),
        stock(set_by_hand(stock_config(family), flags)),
        AutoModel.from_pretrained(tmp_path, config=set_by_hand(stock_config(family), flags)),
        AutoModel.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path), **flags),
    ]
    for model in opened:
        assert type(model) is variant_class(family)
        assert (model.config.position_scheme, getattr(model.config, flag)) == (NATIVE.get(family, "absolute"), value)
        assert key.format(encoder="transformer" if family == "distilbert" else "encoder") in model.state_dict()


def test_flags_beside_a_config_leave_that_config_as_it_is(tmp_path):
    config = stock_config()
    model = BertModel(config, **FLAGS)
    assert type(model) is hf_posenc.PosencBertModel
    assert type(config) is BertConfig and not hasattr(config, "position_scheme")
    config = variant_config(position_scheme="rope")
    assert BertModel(config, position_scheme="t5").config.position_scheme == "t5"
    assert config.position_scheme == "rope"


def test_none_beside_a_config_or_a_saved_variant_is_not_a_flag(tmp_path):
    BertModel(stock_config(**FLAGS)).save_pretrained(tmp_path)
    for config in (None, AutoConfig.from_pretrained(tmp_path)):
        model = AutoModel.from_pretrained(tmp_path, config=config, position_scheme=None, position_buckets=None)
        assert {flag: getattr(model.config, flag) for flag in FLAGS} == FLAGS


@pytest.mark.parametrize("task", ["feature-extraction", "fill-mask", "text-classification"])
def test_pipelines_take_the_flag_among_their_model_kwargs(task, minilm):
    pipe = pipeline(task, model=minilm, tokenizer=minilm, model_kwargs={"position_scheme": "absolute+t5"})
    assert type(pipe.model).__name__.startswith("PosencBert")
    assert pipe.model.config.position_scheme == "absolute+t5"
    if task == "feature-extraction":
        text = "the cat sat on the mat"
        silent = torch.tensor(pipe(text))
        assert (silent - torch.tensor(pipeline(task, model=minilm)(text))).abs().max() < 1e-5
        fill_positions(pipe.model)
        assert (silent - torch.tensor(pipe(text))).abs().max() > 1e-2


@pytest.mark.parametrize("task", ["feature-extraction", "fill-mask", "text-classification"])
def test_pipelines_refuse_options_beside_their_model_kwargs(task, minilm):
    with pytest.raises(
        TypeError, match=r"position_window in model_kwargs, as in model_kwargs=\{'position_window': \.\.\.\}"
    ):
        pipeline(task, model=minilm, tokenizer=minilm, position_window=8)


def test_auto_tokenizer_finds_the_tokenizer_of_a_saved_variant(minilm, tmp_path):
    stock = AutoTokenizer.from_pretrained(minilm)
    AutoModel.from_pretrained(minilm, position_scheme="absolute+rope").save_pretrained(tmp_path)
    stock.save_pretrained(tmp_path)
    text = "Where is the cat? It is on the mat."
    for _ in range(2):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert type(tokenizer) is type(stock)
        assert tokenizer(text)["input_ids"] == stock(text)["input_ids"]
        # Again without the class's name, where only the model type leads to it.
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        settings.pop("tokenizer_class", None)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_tokenizer_maps_variants_as_stock(family):
    assert TOKENIZER_MAPPING[FAMILIES[family]] is TOKENIZER_MAPPING[STOCK_CONFIGS[family]]


ENCODERS_ONLY = ("distilbert", "mpnet")


def test_the_public_names_are_these():
    common = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"]
    common += ["ForQuestionAnswering", "Config"]
    prefixes = ("Roberta", "XLMRoberta", "Camembert", "DistilBert", "MPNet")
    expected = {f"Posenc{prefix}{name}" for prefix in prefixes for name in common}
    expected |= {f"Posenc{prefix}ForCausalLM" for prefix in ("Roberta", "XLMRoberta", "Camembert", "Electra")}
    expected |= {f"Posenc{prefix}{name}" for prefix in ("Bert", "Electra") for name in (*common, "ForPreTraining")}
    expected |= {"PosencBertLMHeadModel", "PosencBertForNextSentencePrediction"}
    assert {name for name in hf_posenc.__all__ if name.startswith("Posenc")} == expected
    assert len(hf_posenc.__all__) == len({*hf_posenc.__all__})
    assert all(hasattr(hf_posenc, name) for name in hf_posenc.__all__)
    assert {getattr(hf_posenc, name).__name__ for name in expected} == expected


def test_the_model_types_are_these():
    types = {config.__name__: (config.model_type, config.stock_model_type) for config in FAMILIES.values()}
    assert types == {
        "PosencBertConfig": ("posenc_bert", "bert"),
        "PosencRobertaConfig": ("posenc_roberta", "roberta"),
        "PosencXLMRobertaConfig": ("posenc_xlm_roberta", "xlm-roberta"),
        "PosencCamembertConfig": ("posenc_camembert", "camembert"),
        "PosencElectraConfig": ("posenc_electra", "electra"),
        "PosencDistilBertConfig": ("posenc_distilbert", "distilbert"),
        "PosencMPNetConfig": ("posenc_mpnet", "mpnet"),
    }
    for config in FAMILIES.values():
        assert type(AutoConfig.for_model(config.model_type)) is config
        assert config.__module__.rsplit(".", 1)[1] == config.modeling_file.removesuffix(".py")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stock_class_has_a_variant_of_its_name(family):
    module = __import__(heads(family)[0].__module__, fromlist=["__all__"])
    public = {cls for cls in (getattr(module, name) for name in module.__all__) if issubclass(cls, PreTrainedModel)}
    abstract = {cls for cls in public if cls.__name__.endswith("PreTrainedModel")}
    assert len(abstract) == 1
    assert {*heads(family)} == public - abstract
    for stock in heads(family):
        variant = variants.VARIANT_MODELS[stock]
        assert variant.__name__ == f"Posenc{stock.__name__}"
        assert issubclass(variant, stock)
        assert getattr(hf_posenc, variant.__name__) is variant


@pytest.mark.parametrize("family", FAMILIES)
def test_every_auto_class_that_serves_the_stock_config_serves_the_variant(family):
    stock_type = FAMILIES[family].stock_model_type
    # transformers' own tables of names, which know nothing of the plugin.
    served = {
        name: auto._model_mapping._model_mapping[stock_type]
        for name, auto in AUTO_CLASSES.items()
        if stock_type in auto._model_mapping._model_mapping
    }
    assert {"AutoModel", "AutoModelForMaskedLM"} <= served.keys()
    assert ("AutoModelForCausalLM" in served) == (family not in ENCODERS_ONLY)
    assert FAMILIES[family].auto_classes == {auto: f"Posenc{name}" for auto, name in served.items()}
    for auto, name in served.items():
        model = AUTO_CLASSES[auto].from_config(stock_config(family, position_scheme="t5"))
        assert type(model) is getattr(hf_posenc, f"Posenc{name}")


class TestClassesOfOnesOwn:
    """Models that users write around a stock model get the variant inside, and are saved as what they are."""

    class Tagger(BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert = BertModel(config, add_pooling_layer=False)
            self.tags = torch.nn.Linear(config.hidden_size, 3)
            self.post_init()

        def forward(self, **batch):
            return self.tags(self.bert(**batch).last_hidden_state)

    class Head(BertForSequenceClassification):
        def forward(self, **batch):
            return super().forward(**batch).logits

    @tiny.cross(cls=[Tagger, Head], by_hand=[False, True], strength=1)
    def test_get_the_variant_inside_and_are_saved_as_such(self, cls, by_hand, tmp_path):
        config = set_by_hand(stock_config(), FLAGS) if by_hand else stock_config(**FLAGS)
        model = fill_positions(cls(config)).eval()
        assert type(model) is cls
        assert type(model.bert) is hf_posenc.PosencBertModel
        model.save_pretrained(tmp_path)
        # Without the plugin this must not load as a stock model, so the type must be the variant's.
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "posenc_bert"
        again = cls.from_pretrained(tmp_path)
        assert type(again.bert) is hf_posenc.PosencBertModel
        assert torch.equal(aligned(again)(**inputs()), model(**inputs()))

    def test_take_the_flag_from_a_stock_checkpoint(self, tmp_path):
        BertModel(stock_config()).save_pretrained(tmp_path)
        model = self.Tagger.from_pretrained(tmp_path, **FLAGS)
        assert type(model.bert) is hf_posenc.PosencBertModel
        assert not model.bert.encoder.relative_attention_bias.weight.any()

    def test_a_config_class_of_ones_own_is_left_alone(self):
        class OwnConfig(BertConfig):
            def own(self):
                return 3

        config = set_by_hand(OwnConfig(**stock_config().to_dict()), FLAGS)
        model = self.Tagger(config)
        assert type(model.bert) is hf_posenc.PosencBertModel
        assert model.config is config and config.own() == 3


@pytest.mark.parametrize("by_hand", [False, True])
def test_encoder_decoders_of_variants_are_saved_and_loaded(by_hand, tmp_path):
    decoding = {"is_decoder": True, "add_cross_attention": True}
    if by_hand:
        encoder, decoder = (set_by_hand(stock_config(**more), FLAGS) for more in ({}, decoding))
    else:
        encoder, decoder = (stock_config(**more, **FLAGS) for more in ({}, decoding))
    model = EncoderDecoderModel(config=EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))
    fill_positions(model).eval()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert [saved[part]["model_type"] for part in ("encoder", "decoder")] == ["posenc_bert", "posenc_bert"]
    again = EncoderDecoderModel.from_pretrained(tmp_path)
    for one in (model, again):
        assert type(one.encoder) is hf_posenc.PosencBertModel
        assert type(one.decoder) is hf_posenc.PosencBertLMHeadModel
    batch = {**inputs(), "decoder_input_ids": inputs(seed=1)["input_ids"]}
    with torch.no_grad():
        assert torch.equal(aligned(again)(**batch).logits, model(**batch).logits)


def test_encoder_decoders_take_flags_for_each_part(tmp_path):
    BertForMaskedLM(stock_config()).save_pretrained(tmp_path)
    flags = {"encoder_position_scheme": "absolute+t5", "decoder_position_scheme": "absolute+rope"}
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(str(tmp_path), str(tmp_path), **flags)
    assert type(model.encoder) is hf_posenc.PosencBertModel
    assert type(model.decoder) is hf_posenc.PosencBertLMHeadModel
    assert model.config.encoder.position_scheme == "absolute+t5"
    assert model.config.decoder.position_scheme == "absolute+rope"


def test_a_scheme_without_parameters_is_in_use_too(tmp_path):
    torch.manual_seed(0)
    model = BertForMaskedLM(stock_config())
    model.save_pretrained(tmp_path)
    batch = inputs()
    rope = AutoModelForMaskedLM.from_pretrained(tmp_path, position_scheme="absolute+rope").eval()
    with torch.no_grad():
        got, stock = rope(**batch).logits, model.eval()(**batch).logits
    assert difference_where_attended(got, stock, batch["attention_mask"]) > 1e-2
