"""pretrained.py and small_models.py: what they leave out, clip, split and watch, against loops and known shares."""

import json

import numpy as np
import pretrained
import pytest
import small_models
import torch
import what_positions_do
from transformers import AutoModelForMaskedLM, BertConfig

from hf_posenc import analysis
from hf_posenc.modeling.models.embeddings import Attention
from hf_posenc.modeling.schemes.positions import t5_bucket


def test_every_part_has_numbers():
    found = json.loads(what_positions_do.NUMBERS.read_text(encoding="utf-8"))
    assert {name for name in what_positions_do.PARTS if not found.get(name)} == set()


@pytest.mark.parametrize("clip", pretrained.CLIPS)
def test_a_clipped_table_gives_far_distances_the_bias_of_the_clip(clip):
    subject = analysis.study("t5")
    rows = pretrained._bucket_of_clipped(subject, clip)
    for distance in range(-300, 301):
        nearer = max(-clip, min(clip, distance))
        own, expected = (int(t5_bucket(torch.tensor(one), 32, 128)) for one in (distance, nearer))
        assert rows[own] == expected


def test_the_variance_of_groups_is_that_of_their_means_without_noise():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (20_000,), generator=generator)
    means = torch.randn(5, 3, generator=generator)
    values = (means[labels] + 2 * torch.randn(20_000, 3, generator=generator)).double()
    own, dealt = pretrained.Groups(5), pretrained.Groups(5)
    for half, some in enumerate(torch.arange(20_000).chunk(2)):
        own.add(half, labels[some], values[some])
        dealt.add(half, labels[some].roll(1), values[some])
    expected = np.mean([(means[label] - means[labels].mean(0)).square().sum() for label in labels[:2000]])
    assert own.common() == pytest.approx(expected, rel=0.05)
    assert abs(dealt.common()) < 0.01 * expected


@pytest.fixture
def mixing() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    flags = {"position_scheme": "absolute", "position_combine": "attention"}
    config = BertConfig(**sizes, intermediate_size=16, initializer_range=0.5, **flags)
    model = AutoModelForMaskedLM.from_config(config).eval()
    torch.nn.init.normal_(model.bert.embeddings.position_query.weight)
    ids = torch.randint(5, 20, (3, 8))
    return model, {"input_ids": ids, "labels": ids}


def test_a_watched_mixture_is_the_same_mixture(mixing):
    model, _ = mixing
    embeddings, watched = model.bert.embeddings, small_models.Watched()
    words, positions = torch.randn(2, 4, 16), torch.randn(1, 4, 16)
    expected = Attention().combine(embeddings, words, positions)
    torch.testing.assert_close(watched.combine(embeddings, words, positions), expected)
    assert watched.weights.std() > 0.01


def test_the_slope_is_that_of_the_loss(mixing, monkeypatch):
    model, batch = mixing
    found = small_models.watched(model, batch)
    assert type(model.bert.embeddings.position_combine) is Attention, "as before"

    def loss(offset: float) -> float:
        own = small_models.Watched()
        own.offset = torch.tensor(offset)
        monkeypatch.setattr(model.bert.embeddings, "position_combine", own)
        return float(model(**batch).loss)

    assert loss(0.0) == pytest.approx(found["loss"])
    assert found["slope"] == pytest.approx((loss(0.05) - loss(-0.05)) / 0.1, rel=0.01)
    assert 0 < found["share"] < 1 and found["deviation"] > 0


def test_vectors_beyond_a_clip_are_that_of_the_clip():
    rows = torch.arange(7.0)[:, None]
    assert small_models.clipped(rows, 1)[:, 0].tolist() == [2, 2, 2, 3, 4, 4, 4]


def test_what_is_changed_comes_back(mixing):
    model, _ = mixing
    before = model.bert.embeddings.position_query.weight.clone()
    with small_models.changed(model, "position_query.weight", torch.zeros_like):
        assert not model.bert.embeddings.position_query.weight.any()
    assert torch.equal(model.bert.embeddings.position_query.weight, before)


def test_what_is_learned_later_is_not_learned_before():
    parameter = torch.nn.Parameter(torch.zeros(2))
    later = small_models.Train([parameter], 3)
    for step in range(5):
        later.now = step
        parameter.grad = None
        (parameter.sum()).backward()
        assert bool(parameter.grad.any()) == (step >= 3)


@pytest.mark.parametrize("part", small_models.PARTS)
def test_each_part_leaves_out_what_the_models_have(part):
    """Endings of names that no parameter has would leave out nothing."""
    for model in small_models.PARTS[part].values():
        sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(**sizes, intermediate_size=16, **small_models.flags_of(model.scheme))
        parameters = dict(AutoModelForMaskedLM.from_config(config).named_parameters())
        for ending in (*model.frozen, *model.zeroed):
            named = [parameter for name, parameter in parameters.items() if name.endswith(ending)]
            assert named and (ending in model.zeroed or not any(parameter.any() for parameter in named))
