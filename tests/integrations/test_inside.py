"""What people have in hand, a pipeline or a SentenceTransformer or a model, is taken where it is clear which model is meant."""

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from tiny import build, fill_positions, stock_config
from torch import nn
from transformers import (
    AutoTokenizer,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hf_posenc
from hf_posenc import freeze_all_but_positions, inspect, position_parameters, train_positions, unpad
from hf_posenc._utils import model_inside


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, minilm) -> str:
    """A tiny BERT with MiniLM's tokenizer."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    BertModel(stock_config(vocab_size=30522)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm, model_max_length=50).save_pretrained(folder)
    return folder


def features(checkpoint: str, **flags):
    return pipeline("feature-extraction", checkpoint, device="cpu", model_kwargs=flags)


def sentences(checkpoint: str, **flags) -> SentenceTransformer:
    return SentenceTransformer(checkpoint, device="cpu", model_kwargs=flags)


def trainer(checkpoint: str, **flags) -> Trainer:
    model = BertModel.from_pretrained(checkpoint, **flags)
    return Trainer(model, TrainingArguments("unused", use_cpu=True, report_to=[]))


holding = pytest.mark.parametrize("hold", [features, sentences, trainer])


@holding
def test_position_parameters(hold, checkpoint):
    held = hold(checkpoint, position_scheme="absolute+t5")
    [parameter] = position_parameters(held).values()
    assert parameter is model_inside(held).encoder.relative_attention_bias.weight
    assert position_parameters(hold(checkpoint)) == {}
    assert freeze_all_but_positions(held) == parameter.numel()
    assert [p for p in model_inside(held).parameters() if p.requires_grad] == [parameter]


@holding
def test_unpad(hold, checkpoint):
    held = hold(checkpoint)
    assert unpad(held) == 1 and model_inside(held)._forward_pre_hooks
    assert unpad(held, False) == 1 and not model_inside(held)._forward_pre_hooks


def test_unpad_of_a_pipeline_leaves_padding_out(checkpoint):
    held, texts = features(checkpoint), ["It rains all day in the valley and on the hills", "No"] * 8
    expected = torch.tensor(held(texts, batch_size=16))[:, 0]
    unpad(held)
    got = torch.tensor(held(texts, batch_size=16))[:, 0]
    tokens = len(held.tokenizer("No")["input_ids"])
    assert expected[1, tokens:].all() and not got[1, tokens:].any()  # padding, computed and left out
    torch.testing.assert_close(got[::2], expected[::2], rtol=0, atol=1e-5)
    torch.testing.assert_close(got[1::2, :tokens], expected[1::2, :tokens], rtol=0, atol=1e-5)


def test_train_positions_of_what_holds_a_model_with_an_adapter(checkpoint):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = get_peft_model(build("absolute+t5"), LoraConfig(r=2, target_modules=["query"]))

    held = sentences(checkpoint, position_scheme="absolute+t5")
    held[0].model = get_peft_model(held[0].model, LoraConfig(r=2, target_modules=["query"]))
    for each in (Own(), held):
        [before] = position_parameters(each).values()
        assert train_positions(each) == before.numel()
        [name] = position_parameters(each)
        assert "modules_to_save.default" in name and position_parameters(each)[name].requires_grad
    with pytest.raises(TypeError, match="got SentenceTransformer: call get_peft_model, or the model's add_adapter"):
        train_positions(sentences(checkpoint, position_scheme="absolute+t5"))
    with pytest.raises(ValueError, match="0.encoder, 1.encoder have adapters: give one"):
        train_positions(nn.Sequential(Own(), Own()))


def rows(description) -> dict[str, str]:
    """The rows of a description; those without a name belong to the one before."""
    return dict(row for table in description.parts for row in table if row[0])


class TestInspect:
    def test_a_model_in_memory(self):
        model = fill_positions(build("absolute+t5", head="ForSequenceClassification", position_buckets=8))
        said = rows(inspect(model))
        assert said["model"] == "PosencBertModel, bert of this PosencBertForSequenceClassification"
        assert said["position_scheme"] == "absolute+t5" and said["config options"] == "position_buckets=8"
        total = model.bert.num_parameters()
        assert said["parameters"] == f"32 of {total:,} belong to the scheme" and "at most 64" in said["tokens"]
        assert "encoder.relative_attention_bias.weight (8, 4)" in str(inspect(model))
        assert rows(inspect(build("rope")))["model"] == "PosencBertModel"
        assert "not set: Transformers' own model" in rows(inspect(BertModel(stock_config())))["position_scheme"]

    @pytest.mark.parametrize("hold", [features, sentences])
    def test_what_holds_one_and_its_tokenizer(self, hold, checkpoint):
        said = rows(inspect(hold(checkpoint, position_scheme="absolute+t5")))
        assert said["position_scheme"] == "absolute+t5" and said["model"].startswith("PosencBertModel")
        assert "truncates at 50 tokens (model_max_length); the model accepts 64" in said["tokenizer"]

    def test_all_that_are_in_a_model(self):
        decoding = stock_config(is_decoder=True, add_cross_attention=True, position_scheme="rope")
        config = EncoderDecoderConfig.from_encoder_decoder_configs(stock_config(position_scheme="t5"), decoding)
        said = inspect(EncoderDecoderModel(config))
        assert [rows(type(said)([table]))["position_scheme"] for table in said.parts] == ["t5", "rope"]
        assert "decoder.bert of this EncoderDecoderModel" in str(said) and "<table>" in said._repr_html_()

    @pytest.mark.parametrize("config", [tiny.variant_config(position_scheme="t5"), stock_config()])
    def test_a_config(self, config):
        said = rows(inspect(config))
        assert (
            said["model"] == f"{type(config).__name__} ({config.model_type})"
            and "any" in said["tokens"]
            or "64" in said["tokens"]
        )
        assert ("t5" in said["position_scheme"]) == hasattr(config, "position_scheme")

    def test_what_has_no_positions_of_ours(self):
        config = DebertaV2Config(
            **{name: tiny.SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        )
        config.num_attention_heads = 4
        with pytest.raises(
            ValueError, match="'deberta-v2' has no position schemes; the families that have some are bert"
        ):
            inspect(config)
        with pytest.raises(ValueError, match="this DebertaV2Model contains no model of a family .*: bert"):
            inspect(DebertaV2Model(config))
        for nothing in (None, 3, ["folder"]):
            with pytest.raises(TypeError, match="torch module is needed.*such as a pipeline, got"):
                inspect(nothing)


@pytest.mark.parametrize(
    "call",
    [
        position_parameters,
        freeze_all_but_positions,
        unpad,
        train_positions,
        lambda given: hf_posenc.set_attn_implementation(given, "sdpa"),
    ],
    ids=["position_parameters", "freeze_all_but_positions", "unpad", "train_positions", "set_attn_implementation"],
)
def test_what_has_no_module_is_refused_in_words(call):
    for nothing in (None, "bert-base-uncased", {"model": "bert"}, BertModel):
        with pytest.raises(
            TypeError, match=r"torch module is needed, or an object whose `model` is one.*got .* of type"
        ):
            call(nothing)


def test_the_one_model_is_meant():
    model = BertModel(stock_config())
    assert model_inside(model) is model_inside(nn.Sequential(nn.Linear(2, 2), model)) is model
    with pytest.raises(ValueError, match=r"this ModuleDict holds 2 models of transformers \(a, b\): give one of them"):
        model_inside(nn.ModuleDict({"a": model, "b": BertModel(stock_config())}))
    with pytest.raises(TypeError, match="a model of transformers is needed, or something that holds one, got Linear"):
        model_inside(nn.Linear(2, 2))
