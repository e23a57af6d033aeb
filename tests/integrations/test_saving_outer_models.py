"""Promise 3: a scheme that was put into a part of a larger model is saved with the whole, or nothing is saved."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from fresh_process import run_fresh
from test_adapters import add_adapter
from tiny import build, fill_positions, inputs, stock_config
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BertPreTrainedModel,
    DistilBertModel,
    DistilBertPreTrainedModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaModel,
    RobertaPreTrainedModel,
    Trainer,
    TrainingArguments,
)

import hf_posenc
from hf_posenc import with_position_scheme
from hf_posenc.integrations import saving


class Joint(BertPreTrainedModel):
    """An encoder, and something for each token."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config)
        self.slots = nn.Linear(config.hidden_size, 5)
        self.post_init()

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.slots(self.bert(input_ids, attention_mask).last_hidden_state)
        return logits if labels is None else {"loss": logits.square().mean(), "logits": logits}


class JointByAuto(Joint):
    """`from_config` copies the config, so that the encoder's is never the model's own."""

    def __init__(self, config):
        BertPreTrainedModel.__init__(self, config)
        self.bert = AutoModel.from_config(config)
        self.slots = nn.Linear(config.hidden_size, 5)
        self.post_init()


class JointWithArguments(Joint):
    """As in JointBERT: a config is not all that it is built of."""

    def __init__(self, config, arguments):
        super().__init__(config)
        self.arguments = arguments


class Nested(BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.joint = Joint(config)
        self.post_init()

    def forward(self, **batch):
        return self.joint(**batch)


class Pair(BertPreTrainedModel):
    """Two encoders of one config."""

    def __init__(self, config):
        super().__init__(config)
        self.question, self.text = BertModel(config), BertModel(config)
        self.post_init()

    def forward(self, **batch):
        return self.question(**batch).last_hidden_state + 2 * self.text(**batch).last_hidden_state


class PairWithArguments(Pair):
    def __init__(self, config, arguments):
        super().__init__(config)


class WithTeacher(Pair):
    """A second encoder that has nothing to do with the config."""

    def __init__(self, config):
        BertPreTrainedModel.__init__(self, config)
        self.question, self.text = BertModel(config), BertModel(stock_config())
        self.post_init()


class TwoConfig(PreTrainedConfig):
    model_type = "two"
    sub_configs = {"text_config": AutoConfig, "code_config": AutoConfig}

    def __init__(self, text_config=None, code_config=None, **kwargs):
        self.text_config, self.code_config = (
            AutoConfig.for_model(**given) if isinstance(given, dict) else given or BertConfig()
            for given in (text_config, code_config)
        )
        super().__init__(**kwargs)


class Two(PreTrainedModel):
    """Two encoders, each of a config of its own."""

    config_class = TwoConfig

    def __init__(self, config):
        super().__init__(config)
        self.text_model, self.code = (
            AutoModel.from_config(config.text_config),
            AutoModel.from_config(config.code_config),
        )
        self.post_init()

    def forward(self, **batch):
        return self.text_model(**batch).last_hidden_state + 2 * self.code(**batch).last_hidden_state


class Wrapper(PreTrainedModel):
    """Its config names a scheme in its own way, and has no config of an encoder."""

    class Config(PreTrainedConfig):
        model_type = "wrapper"
        positions: str = "t5"

    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(stock_config(position_scheme=config.positions))
        self.post_init()

    def forward(self, **batch):
        return self.bert(**batch).last_hidden_state


class OwnConfig(BertConfig):
    model_type = "own_bert"


class JointOfOwnConfig(Joint):
    config_class = OwnConfig


class PosencConfig(hf_posenc.PosencBertConfig):
    model_type = "own_posenc_bert"


class JointOfPosencConfig(Joint):
    config_class = PosencConfig


def encoder_decoder(**decoder) -> EncoderDecoderModel:
    parts = stock_config(), stock_config(is_decoder=True, add_cross_attention=True, **decoder)
    return EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*parts))


def of_family(base: type, model: type) -> PreTrainedModel:
    """A class around the base model of another family."""
    family = model.config_class.model_type

    class Own(base):
        def __init__(self, config):
            super().__init__(config)
            setattr(self, self.base_model_prefix, model(config))
            self.post_init()

        def forward(self, **batch):
            return self.base_model(**batch).last_hidden_state

    return Own(tiny.stock_config(family))


def change(path: str, scheme: str | None = "absolute+t5", **flags):
    return lambda model: with_position_scheme(model.get_submodule(path), scheme, **flags)


def several(*changes):
    return lambda model: [each(model) for each in changes]


def replace(path: str, make):
    """As users do it: `model.bert = ...`."""
    return lambda model: setattr(model, path, make(getattr(model, path)))


def save(folder: str):
    return lambda model: model.save_pretrained(folder)


@torch.no_grad()
def output(model: nn.Module, family: str = "bert") -> torch.Tensor:
    more = {"decoder_input_ids": inputs(seed=1)["input_ids"]} if isinstance(model, EncoderDecoderModel) else {}
    result = model.eval()(**inputs(family=family), **more)
    return result if isinstance(result, torch.Tensor) else result[0]


def loaded_again(model: PreTrainedModel, folder: Path, *arguments, cls: type | None = None) -> PreTrainedModel:
    return (cls or type(model)).from_pretrained(folder, *arguments)


def check_saved(
    model: PreTrainedModel, folder: Path, *arguments, cls: type | None = None, family: str = "bert"
) -> dict:
    """A model, its position parameters filled, computes the same when it is saved and loaded; the entries of its config.json."""
    plain = output(fill_positions(model, std=0.0), family)
    filled = output(fill_positions(model), family)
    if hf_posenc.position_parameters(model):
        assert (filled - plain).abs().max() > 1e-3
    model.save_pretrained(folder)
    again = loaded_again(model, folder, *arguments, cls=cls)
    torch.testing.assert_close(output(again, family), filled, rtol=0, atol=1e-5)
    assert hf_posenc.position_parameters(again).keys() == hf_posenc.position_parameters(model).keys()
    return json.loads((folder / "config.json").read_text())


T5 = {"position_scheme": "t5"}
KEPT = {
    "in place": (lambda: Joint(stock_config()), change("bert")),
    "a copy": (
        lambda: Joint(stock_config()),
        replace("bert", lambda bert: with_position_scheme(bert, "t5", copy=True)),
    ),
    "another model": (lambda: Joint(stock_config()), replace("bert", lambda bert: build("tupe+t5"))),
    "with flags": (
        lambda: Joint(stock_config()),
        change("bert", "deberta", position_buckets=4, position_max_distance=8),
    ),
    "another scheme than the config has": (lambda: Joint(stock_config(**T5)), change("bert", "rope")),
    "of a config that was copied": (lambda: JointByAuto(stock_config()), change("bert")),
    "two levels deep": (lambda: Nested(stock_config()), change("joint.bert")),
    "both of one config": (lambda: Pair(stock_config()), several(change("question", "t5"), change("text", "t5"))),
    "the one that the config is for": (lambda: WithTeacher(stock_config()), change("question")),
    "a config that derives from ours": (lambda: JointOfPosencConfig(PosencConfig(**tiny.SIZES)), change("bert")),
    "first of two configs": (lambda: Two(TwoConfig(stock_config(), stock_config())), change("text_model")),
    "second of two configs": (lambda: Two(TwoConfig(stock_config(), stock_config())), change("code", "rope")),
    "two configs": (
        lambda: Two(TwoConfig(stock_config(), stock_config())),
        several(change("text_model", "t5"), change("code", "absolute+kerple")),
    ),
    "base model of a head": (lambda: BertForSequenceClassification(stock_config()), change("bert")),
    "encoder": (encoder_decoder, change("encoder")),
    "encoder, a copy": (encoder_decoder, replace("encoder", lambda part: with_position_scheme(part, "t5", copy=True))),
    "decoder": (encoder_decoder, change("decoder", "t5")),
    "base model of a decoder": (encoder_decoder, change("decoder.bert", "t5")),
    "encoder and decoder": (encoder_decoder, several(change("encoder", "rope"), change("decoder", "t5"))),
    "DistilBERT": (lambda: of_family(DistilBertPreTrainedModel, DistilBertModel), change("distilbert", "absolute+t5")),
    "RoBERTa": (lambda: of_family(RobertaPreTrainedModel, RobertaModel), change("roberta", "tupe")),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_scheme_that_was_put_into_a_part_is_saved_with_the_whole(case, tmp_path):
    make, put = KEPT[case]
    model = make()
    put(model)
    family = {"DistilBERT": "distilbert", "RoBERTa": "roberta"}.get(case, "bert")
    check_saved(model, tmp_path / "once", family=family)
    check_saved(model, tmp_path / "twice", family=family)


@pytest.mark.parametrize(
    "make, put",
    [
        (lambda: Joint(stock_config(num_labels=7)), change("bert")),
        (lambda: BertForSequenceClassification(stock_config(num_labels=7)), change("bert")),
    ],
    ids=["own", "head"],
)
def test_the_folder_is_that_of_a_variant(make, put, tmp_path):
    """Its own entries stay, its type is the variant's, and its code lies beside it."""
    model = make()
    model.config.mine = [3]
    put(model)
    saved = check_saved(model, tmp_path)
    assert saved["model_type"] == "posenc_bert" and saved["position_scheme"] == "absolute+t5"
    assert saved["mine"] == [3] and len(saved["id2label"]) == 7 and saved["architectures"] == [type(model).__name__]
    assert (tmp_path / "modeling_bert.py").is_file()
    assert type(model.config) is hf_posenc.PosencBertConfig and model.config.mine == [3]
    assert torch.equal(output(AutoModel.from_pretrained(tmp_path)), output(model.bert))


def test_a_head_with_a_variant_in_it_is_the_variants_head_when_it_is_loaded(tmp_path):
    model = BertForSequenceClassification(stock_config())
    change("bert")(model)
    check_saved(model, tmp_path, cls=AutoModelForSequenceClassification)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is hf_posenc.PosencBertForSequenceClassification
    assert "PosencBertForSequenceClassification" in str(hf_posenc.inspect(tmp_path))


def test_flags_of_the_scheme_before_are_not_kept(tmp_path):
    model = Joint(stock_config())
    several(change("bert", "t5", position_buckets=8), save(tmp_path / "t5"), change("bert", "rope"))(model)
    several(save(tmp_path / "rope"), change("bert", "t5", position_buckets=16))(model)
    saved = check_saved(model, tmp_path / "again")
    assert saved["position_buckets"] == 16 and model.config is not model.bert.config
    several(change("bert", "rope"), change("bert", "t5"))(model)  # without buckets
    assert "position_buckets" not in check_saved(model, tmp_path / "last")


@pytest.mark.parametrize(
    "config", [stock_config, lambda: stock_config(position_scheme="absolute")], ids=["bert", "posenc"]
)
def test_back_to_stock_is_saved_as_stock(config, tmp_path):
    model = Joint(config())
    several(change("bert"), save(tmp_path / "variant"), change("bert", "absolute"), change("bert", None))(model)
    saved = check_saved(model, tmp_path / "stock")
    assert saved["model_type"] == "bert" and not any(name.startswith("position_s") for name in saved)
    assert "auto_map" not in saved and type(model.config) is BertConfig


def test_padding_that_is_computed_stays_computed(tmp_path):
    """A module beside the encoder may read what stands at padding."""
    model = Joint(stock_config())
    change("bert")(model)
    model.bert.config.unpad = False
    assert check_saved(model, tmp_path)["unpad"] is False


def test_the_attention_implementation_stays():
    model = Joint._from_config(stock_config(), attn_implementation="eager")
    change("bert")(model)
    saving.keep_schemes(model)
    assert model.config._attn_implementation == "eager" and model.config.position_scheme == "absolute+t5"


@pytest.mark.parametrize(
    "model, put, arguments",
    [
        (lambda: JointWithArguments(stock_config(), 1), change("bert"), (1,)),
        (lambda: JointWithArguments(stock_config(**T5), 1), lambda model: None, (1,)),
        (lambda: PairWithArguments(stock_config(), 1), several(change("question", "t5"), change("text", "t5")), (1,)),
    ],
    ids=["changed", "built so", "both"],
)
def test_a_class_that_wants_more_than_a_config(model, put, arguments, tmp_path):
    model = model()
    put(model)
    check_saved(model, tmp_path, *arguments)


def by_hand(model: nn.Module) -> None:
    model.config.position_scheme = "t5"


REFUSED = {
    "one of two of one config": (
        lambda: Pair(stock_config()),
        change("question"),
        "question has position_scheme='absolute\\+t5'",
    ),
    "two schemes, one config": (
        lambda: Pair(stock_config()),
        several(change("question", "t5"), change("text", "rope")),
        "question has position_scheme='t5' .* text has position_scheme='rope'",
    ),
    "the other of two of one config": (
        lambda: Pair(stock_config(**T5)),
        change("text", "rope"),
        "text has position_scheme='rope'",
    ),
    "two flags, one config": (
        lambda: Pair(stock_config(**T5)),
        change("text", "t5", position_buckets=8),
        "text has position_scheme='t5', position_buckets=8 and would be loaded with position_scheme='t5'",
    ),
    "padding that one of two computes": (
        lambda: Pair(stock_config(**T5)),
        several(change("text", "t5"), lambda model: setattr(model.text.config, "unpad", False)),
        "text has position_scheme='t5', unpad=False and would be loaded with position_scheme='t5'\\)",
    ),
    "one of two, and arguments": (
        lambda: PairWithArguments(stock_config(), 1),
        change("text"),
        "text has position_scheme=",
    ),
    "two schemes, and arguments": (
        lambda: PairWithArguments(stock_config(), 1),
        several(change("question", "t5"), change("text", "rope")),
        "question has position_scheme='t5'",
    ),
    "built by __init__ itself": (lambda: WithTeacher(stock_config()), change("text"), "text has position_scheme="),
    "a wrapper's own": (
        lambda: Wrapper(Wrapper.Config()),
        change("bert", "rope"),
        "would be loaded with position_scheme='t5'",
    ),
    "a config class of one's own": (
        lambda: JointOfOwnConfig(OwnConfig(**tiny.SIZES)),
        replace("bert", lambda bert: build("t5")),
        "a OwnConfig, does not describe .*derives from a family's Posenc",
    ),
    "a flag set by hand": (
        lambda: BertModel(stock_config()),
        by_hand,
        "it has no position_scheme and would be loaded with",
    ),
    "a flag of a head set by hand": (lambda: BertForMaskedLM(stock_config()), by_hand, "bert has no position_scheme"),
    "a flag of the inner config": (
        lambda: Joint(stock_config(**T5)),
        lambda model: by_hand(model) or setattr(model.bert.config, "position_scheme", "rope"),
        "the config was changed after the model was built",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_loaded_with_other_positions_is_not_saved(case, tmp_path):
    make, put, message = REFUSED[case]
    model = make()
    put(model)
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=message) as error:
        model.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists() and model.config.to_dict() == before
    if "was changed" not in message:
        assert "save_pretrained(folder)" in str(error.value) and "EncoderDecoderConfig" in str(error.value)


def test_what_is_built_by_other_means_is_left_alone(tmp_path):
    for model in (Wrapper(Wrapper.Config()), WithTeacher(stock_config(**T5)), Joint(stock_config(**T5))):
        config = model.config
        check_saved(model, tmp_path / type(model).__name__)
        assert model.config is config


def test_what_cannot_be_seen_is_said(said, tmp_path):
    class Given(Wrapper):
        def __init__(self, config, encoder):
            PreTrainedModel.__init__(self, config)
            self.bert = encoder
            self.post_init()

    Given(Wrapper.Config(), build("t5")).save_pretrained(tmp_path)
    assert [line for line in said if "Given is not built of its config alone" in line and "bert" in line]


def test_stock_models_are_not_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_lost", None)
    for model in (
        Joint(stock_config()),
        BertModel(stock_config()),
        encoder_decoder(),
        build("t5", head="ForMaskedLM"),
    ):
        model.save_pretrained(tmp_path)


def test_random_numbers_are_not_drawn(tmp_path):
    model = Joint(stock_config())
    change("bert")(model)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model.save_pretrained(tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_a_trainer_saves_it(tmp_path):
    model = Joint(stock_config())
    change("bert")(model)
    settings = TrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_steps=1, disable_tqdm=True, logging_strategy="no"
    )
    Trainer(model, settings, train_dataset=tiny.Sentences()).train()
    fill_positions(model).save_pretrained(tmp_path / "saved")
    for folder in (tmp_path / "checkpoint-1", tmp_path / "saved"):
        again = Joint.from_pretrained(folder)
        assert type(again.bert) is hf_posenc.PosencBertModel
    assert torch.equal(output(tiny.aligned(again)), output(model))


def test_peft_around_it(tmp_path):
    import peft

    def wrapped():
        model = Joint(stock_config())
        change("bert")(model)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))

    check_saved(wrapped().merge_and_unload(), tmp_path / "merged")


def test_an_adapter_is_saved_without_a_config(tmp_path):
    model = Pair(stock_config())
    change("text")(model)
    add_adapter(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").is_file() and not (tmp_path / "config.json").exists()


@pytest.mark.slow
def test_uninstalled_it_saves_as_transformers_does(tmp_path):
    run_fresh(
        f"""
import hf_posenc
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel
ours = PreTrainedModel.save_pretrained
hf_posenc.install()
assert PreTrainedModel.save_pretrained is ours
model = BertForMaskedLM(BertConfig(**{tiny.SIZES!r}))
hf_posenc.with_position_scheme(model.bert, "t5")
hf_posenc.uninstall()
assert PreTrainedModel.save_pretrained is not ours and PreTrainedModel.save_pretrained.__module__.startswith("transformers.")
model.save_pretrained({str(tmp_path)!r})
assert model.config.model_type == "bert"
""",
        tmp_path / "cache",
        plugin=True,
    )


@pytest.mark.slow
def test_an_encoder_decoder_is_refused_without_the_package(tmp_path):
    """Its class is transformers' own, and makes its parts by what this transformers knows; it runs no code beside it."""
    model = encoder_decoder()
    several(change("encoder", "t5"), change("decoder", "rope"))(model)
    saved = check_saved(model, tmp_path / "folder")
    assert [saved[part]["model_type"] for part in ("encoder", "decoder")] == ["posenc_bert", "posenc_bert"]
    assert not [*(tmp_path / "folder").glob("*.py")]
    run_fresh(
        f"""
from transformers import AutoModelForSeq2SeqLM, EncoderDecoderModel
for cls in (EncoderDecoderModel, AutoModelForSeq2SeqLM):
    for trust in (True, False):
        try:
            cls.from_pretrained({str(tmp_path / "folder")!r}, trust_remote_code=trust)
        except (ValueError, KeyError) as error:
            assert "posenc_bert" in str(error), error
        else:
            raise AssertionError("it was loaded")
""",
        tmp_path / "cache",
        plugin=False,
    )
