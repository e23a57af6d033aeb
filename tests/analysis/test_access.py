"""A model under study computes what the model that was handed in does, and its scores are the sum of their parts."""

import copy

import pytest
import tiny
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from hf_posenc import analysis
from hf_posenc.modeling.schemes.table import SCHEMES


LAYERS = range(tiny.SIZES["num_hidden_layers"])


def words(family: str = "bert") -> torch.Tensor:
    return tiny.inputs(family=family, padding=None)["input_ids"]


def is_encoder(head: type) -> bool:
    return not head.__name__.endswith(("CausalLM", "LMHeadModel"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_stock_model_of_any_head_is_studied_as_what_it_is(family):
    for head in filter(is_encoder, tiny.heads(family)):
        torch.manual_seed(0)
        stock = head(tiny.stock_config(family)).eval()
        subject = analysis.study(stock)
        with torch.no_grad():
            expected = stock.base_model(words(family)).last_hidden_state
        observed = subject.observe(words(family), LAYERS)
        torch.testing.assert_close(observed.hidden_states[-1], expected, atol=1e-5, rtol=0)
        assert len(observed.hidden_states) == len(LAYERS) + 1
        assert subject.scheme == subject.family.native_scheme
        for scores in observed.layers.values():
            torch.testing.assert_close(scores.scores.softmax(-1), scores.weights, atol=1e-6, rtol=0)


@tiny.cross(
    scheme=[*SCHEMES, "absolute+t5", "tupe+t5", "absolute+transformer_xl+rope", "alibi+deberta"],
    family=tiny.FAMILIES,
    # All of them in BERT and in a family with a bias of its own, and one of each kind in the others.
    where=lambda scheme, family: (
        family in ("bert", "mpnet") or scheme in ("absolute+t5", "absolute+transformer_xl+rope", "alibi+deberta")
    ),
    rest=pytest.mark.slow,
)
def test_the_parts_of_a_score_sum_to_it(family, scheme):
    model = tiny.build(scheme, family)
    observed = analysis.study(model).observe(words(family), LAYERS)
    with torch.no_grad():
        expected = model(words(family)).last_hidden_state
    torch.testing.assert_close(observed.hidden_states[-1], expected, atol=1e-5, rtol=0)
    for scores in observed.layers.values():
        torch.testing.assert_close(scores.scores.softmax(-1), scores.weights, atol=2e-6, rtol=0)
        assert all(part.abs().max() > 0 for part in scores.parts.values())


def test_deberta_has_its_terms_by_their_names():
    model = tiny.build("deberta", position_attention_types=["c2p", "p2c", "p2p"])
    assert [*analysis.study(model).observe(words(), [1]).layers[1].parts] == ["content", "c2p", "p2c", "p2p"]


def test_the_model_that_was_handed_in_stays_as_it_is():
    model = tiny.build("absolute+t5", head="ForMaskedLM").train().to(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    subject = analysis.study(model)
    with torch.no_grad():
        subject.word_vectors.add_(1)
    assert model.training and model.dtype == torch.bfloat16 and model.config._attn_implementation == "sdpa"
    assert subject.model.dtype == torch.float32 and not subject.model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_only_as_many_layers_run_as_are_wanted():
    subject = analysis.study(tiny.build("absolute", num_hidden_layers=4))
    whole = subject.observe(words())
    part = subject.observe(words(), [1], until=2)
    assert len(part.hidden_states) == 3
    for one, other in zip(whole.hidden_states, part.hidden_states):
        assert torch.equal(one, other)
    assert not subject.model._forward_hooks and not subject.encoder._forward_pre_hooks


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_position_vectors_are_the_rows_that_the_family_uses(family):
    torch.manual_seed(0)
    model = tiny.build("absolute", family)
    first = model.config.first_position
    subject = analysis.study(model)
    table = model.embeddings.position_embeddings.weight.detach()
    assert torch.equal(subject.position_vectors(), table[first:])
    assert torch.equal(subject.position_vectors(5), table[first : first + 5])
    assert subject.longest == 64 - first


def test_position_vectors_of_other_schemes():
    sinusoidal = tiny.build("sinusoidal")
    scale = sinusoidal.embeddings.position_scale().item()
    vectors = analysis.study(sinusoidal).position_vectors(3)
    assert vectors[2, 0].item() == pytest.approx(scale * torch.tensor(2.0).sin().item(), abs=1e-6)
    tupe = tiny.build("tupe")
    assert torch.equal(analysis.study(tupe).position_vectors(), tupe.embeddings.position_embeddings.weight)
    for scheme in ("none", "t5", "rope"):
        with pytest.raises(ValueError, match=r"has no absolute position vectors: position_scheme is '" + scheme):
            analysis.study(tiny.build(scheme)).position_vectors()


def test_texts_of_one_length_come_together_and_none_is_padded(minilm):
    subject = analysis.study(minilm)
    texts = ["Tom bit a dog.", "A dog bit Tom.", "It rains."]
    batches = subject.batches(texts)
    assert [tuple(batch.shape) for batch in batches] == [(2, 7), (1, 5)]
    [batch] = subject.batches(count=4, length=32)
    assert batch.shape == (4, 32) and (batch[:, 0] == 101).all() and (batch[:, -1] == 102).all()
    [long] = subject.batches("word " * 1000, length=10_000)
    assert long.shape == (1, 512)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("", "the text '' is empty"),
        (["a", "  \n"], "is empty: it contains no words"),
        ([], "no text was given: pass at least one"),
    ],
)
def test_empty_texts_are_told_in_a_line(minilm, texts, message):
    with pytest.raises(ValueError, match=message) as told:
        analysis.study(minilm).batches(texts)
    assert "\n" not in str(told.value)


def test_what_cannot_be_studied_is_told_in_a_line(tmp_path):
    small = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)
    decoder = tiny.variant_class("bert", "LMHeadModel")(tiny.variant_config(is_decoder=True))
    cases = [
        (GPT2Model(small), ValueError, "'gpt2' has no position schemes; the families that have some are bert"),
        (nn.Linear(2, 2), TypeError, "expected a model of Transformers or its name, got Linear"),
        (decoder, ValueError, "this model is a decoder"),
        (str(tmp_path / "nothing"), OSError, "nothing"),
    ]
    for model, error, message in cases:
        with pytest.raises(error, match=message):
            analysis.study(model)
    subject = analysis.study(tiny.build("absolute"))
    with pytest.raises(ValueError, match="has no tokenizer to read a text with: pass one with tokenizer="):
        subject.batches("a text")
    with pytest.raises(ValueError, match="has 64 positions, got length=65"):
        subject.position_vectors(65)
    with pytest.raises(
        ValueError, match=r"token ids must be int64 \(batch, length\), got torch.float32 of shape \(3,\)"
    ):
        subject.batches(torch.zeros(3))


def test_a_scheme_by_its_name_is_a_small_model_of_it():
    assert analysis.study("alibi").scheme == "alibi" and analysis.study("alibi").name == "alibi"
    assert analysis.study("deberta").name == "untrained deberta"
    state = torch.random.get_rng_state()
    one, other = (analysis.study("t5").encoder.relative_attention_bias.weight for _ in range(2))
    assert torch.equal(one, other) and one.abs().max() > 0
    assert torch.equal(torch.random.get_rng_state(), state)
