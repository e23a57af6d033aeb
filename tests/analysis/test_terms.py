"""The terms of the first layer sum to its score, and their shares are those of the variance over keys."""

import numpy as np
import pytest
import tiny
import torch

from hf_posenc import analysis
from hf_posenc.analysis.terms import CONSTANT, POSITION, WORD, inputs_by_source, nine_terms


FAMILIES = [*tiny.FAMILIES]


def words(family: str = "bert", **options) -> torch.Tensor:
    return tiny.inputs(family=family, padding=None, **options)["input_ids"]


def trained_like(family: str, **flags) -> torch.nn.Module:
    """A stock model whose norms and biases are not those that it starts with."""
    torch.manual_seed(0)
    model = next(cls for cls in tiny.heads(family) if cls.__name__.endswith("Model"))(tiny.stock_config(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_nine_terms_sum_to_the_score_of_the_stock_model(family):
    stock = trained_like(family)
    subject = analysis.study(stock)
    layer = subject.family.self_attention_of(subject.family.layers_of(subject.family.encoder_of(stock))[0])
    projected = {}
    for name in (subject.family.query, subject.family.key):
        getattr(layer, name).register_forward_hook(
            lambda module, given, output, name=name: projected.update({name: output})
        )
    with torch.no_grad():
        stock(words(family))
    shape = (3, 12, 4, 8)
    query, key = (projected[name].view(shape).transpose(1, 2) for name in (subject.family.query, subject.family.key))
    real = query @ key.transpose(-1, -2) / 8**0.5
    terms = nine_terms(subject, words(family))
    assert len(terms) == 9
    torch.testing.assert_close(sum(terms.values()), real, atol=1e-5, rtol=0)


def test_nine_terms_of_a_real_checkpoint(minilm):
    subject = analysis.study(minilm)
    [batch] = subject.batches(count=2, length=64)
    real = subject.observe(batch, [0], until=1).layers[0].parts["content"]
    error = (sum(nine_terms(subject, batch).values()) - real).abs().max()
    assert error < 1e-6 * real.abs().max()
    subject.model.double()
    real = subject.observe(batch, [0], until=1).layers[0].parts["content"]
    torch.testing.assert_close(sum(nine_terms(subject, batch).values()), real, atol=1e-10, rtol=0)


@pytest.mark.parametrize("flags", [{}, {"position_combine": "concat"}, {"position_stride": 4}])
def test_words_and_positions_are_told_apart(flags):
    model = tiny.build("absolute", **flags)
    subject = analysis.study(model)
    ids = words()
    parts = inputs_by_source(subject, ids)
    whole = subject.observe(ids).hidden_states[0]
    torch.testing.assert_close(sum(parts.values()), whole, atol=1e-5, rtol=0)
    for source in (WORD, POSITION):
        assert parts[source].mean((0, 1)).abs().max() < 1e-6
        assert parts[source].abs().max() > 0.1
    assert (parts[CONSTANT] - parts[CONSTANT][0, 0]).abs().max() == 0


def test_what_does_not_depend_on_the_key_drops_out_of_softmax():
    subject = analysis.study(tiny.build("absolute"))
    ids = words()
    terms = nine_terms(subject, ids)
    for name, term in terms.items():
        varies = (term - term.mean(-1, keepdim=True)).abs().max()
        assert (varies < 1e-5) == name.endswith(CONSTANT), name
    kept = sum(term for name, term in terms.items() if not name.endswith(CONSTANT))
    weights = subject.observe(ids, [0]).layers[0].weights
    torch.testing.assert_close(kept.softmax(-1), weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scheme", ["absolute", "absolute+t5", "absolute+rope+deberta", "none", "transformer_xl"])
def test_shares_are_those_of_the_variance_over_keys(scheme):
    subject = analysis.study(tiny.build(scheme))
    ids = words()
    data = analysis.score_terms(subject, ids)
    scores = subject.observe(ids, [0]).layers[0]
    named = {**nine_terms(subject, ids), **scores.parts}
    total = scores.scores.var(-1, correction=0).mean((0, 2))
    first = data.layers[0]
    for column, name in enumerate(first.terms):
        term = named[name].expand_as(scores.scores)
        expected = (term.var(-1, correction=0).mean((0, 2)) / total).numpy()
        np.testing.assert_allclose(first.shares[:, column], expected, atol=1e-4, rtol=1e-3)
    np.testing.assert_allclose(first.covariances.sum((1, 2)), 1, atol=1e-9)
    assert data.largest_error < 1e-5
    own = [name for name in scores.parts if name != "content"]
    assert [layer.layer for layer in data.layers] == ([0, 1] if own else [0])
    if own:
        assert data.layers[1].terms == ["content", *own]


@pytest.mark.parametrize(
    ("scheme", "own"),
    [("transformer_xl", ["c2p", "v"]), ("deberta", ["c2p", "p2c"]), ("rope", ["rotation"]), ("t5", ["bias"])],
)
def test_what_a_scheme_adds_by_the_keys_position_counts_as_positional(scheme, own):
    data = analysis.score_terms(tiny.build(scheme), words())
    for layer in data.layers:
        assert [name for name in layer.positional if "-" not in name] == own
        chosen = [layer.terms.index(name) for name in layer.positional]
        expected = layer.covariances[:, chosen][:, :, chosen].sum((1, 2))
        np.testing.assert_allclose(layer.position_share, expected)
    assert scheme != "transformer_xl" or "u" in data.layers[0].terms


def test_heads_that_look_at_positions_are_found():
    model = tiny.build("absolute")
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad():
        # The second head sees words alone: in a quarter of the dimensions where positions have nothing.
        model.embeddings.position_embeddings.weight[:, :16] = 0
        model.embeddings.word_embeddings.weight[:, 16:] = 0
        for projection in (attention.query, attention.key):
            projection.weight.normal_()
            projection.weight[8:16, 16:] = 0
            projection.weight[:8, :16] = 0
            projection.weight[16:, :16] = 0
    data = analysis.score_terms(model, words(batch=8))
    assert data.position_heads == [0, 2, 3]
    assert data.to_dict()["position_heads"] == [0, 2, 3]
    assert data.layers[0].positional == ["word-position", "position-position", "constant-position"]


def test_none_has_no_terms_of_positions():
    data = analysis.score_terms(tiny.build("none"), words())
    shares = dict(zip(data.layers[0].terms, data.layers[0].shares.max(0)))
    assert max(share for name, share in shares.items() if POSITION in name) == 0
    assert data.position_heads == [] and "In no head" in analysis.describe_score_terms(data)


@pytest.mark.parametrize("combine", ["gate", "attention"])
def test_what_is_no_sum_is_told(combine):
    model = tiny.build("absolute", position_combine=combine)
    with pytest.raises(
        ValueError, match=f"position_combine='{combine}' token embeddings and positions are not summed; with 'add'"
    ):
        analysis.score_terms(model, words())


def test_a_scheme_by_its_name_has_no_words():
    with pytest.raises(ValueError, match="needs a checkpoint, got the name of a scheme, 't5'"):
        analysis.score_terms("t5", words())
