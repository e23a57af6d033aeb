"""pretrained.py and small_models.py: what they leave out, clip, split and watch, against loops and known shares."""

import json

import numpy as np
import pretrained
import pytest
import small_models
import torch
import what_positions_do
from fresh_process import ROOT
from transformers import AutoModelForMaskedLM, BertConfig

from hf_posenc import analysis
from hf_posenc.modeling.models.embeddings import Attention
from hf_posenc.modeling.schemes.positions import t5_bucket


FOUND = json.loads(what_positions_do.NUMBERS.read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


class TestThePageHasTheNumbers:
    def test_every_part_is_there(self):
        assert {name for name in what_positions_do.PARTS if not FOUND.get(name)} == set()

    @pytest.mark.parametrize(
        "model, label, width, positions, span",
        [
            ("MiniLM", "sinusoids, 384 dimensions, first 64 positions", 384, 512, 64),
            ("MiniLM", "sinusoids, 384 dimensions, 512 positions", 384, 512, 512),
            ("MiniLM", "sinusoids, 512 dimensions, first 128 positions", 512, 512, 128),
            ("MiniLM", "sinusoids, 512 dimensions, a model of 128 positions", 512, 128, 128),
            ("MiniLM", "MiniLM, first 64 positions", 384, 512, 64),
            ("MiniLM", "MiniLM, 512 positions", 384, 512, 512),
            ("mpnet", "all-mpnet-base-v2, first 64 positions", 768, 512, 64),
        ],
    )
    def test_dimensions_that_move(self, model, label, width, positions, span):
        of = "sinusoids" if label.startswith("sinusoids") else model
        figures = FOUND["mpnet" if model == "mpnet" else "pretrained"]
        [found] = [
            own["moving"]
            for own in (figures if model == "mpnet" else figures[model])["thresholds"]
            if (own["of"], own["width"], own["positions"], own["span"]) == (of, width, positions, span)
        ]
        thresholds = ("0.02", "0.05", "0.1", "0.25", "0.5", "0.8", "1.0")
        assert row(label, *(f"{found[one]:.0%}".replace("%", " %") for one in thresholds)) in PAGE

    def test_heads_and_variance_by_layer(self):
        own = FOUND["pretrained"]["MiniLM"]["layers"]["MiniLM"]
        heads = [str(sum(share > 0.5 for share in layer)) for layer in own["scores"]]
        label = "heads, of 12, in which positions alone explain more than half of the variance of scores"
        assert row(label, "", *heads).replace("|  |", "| |") in PAGE
        labels = {
            "position": "variance of the hidden states after the layer: position, %",
            "word": "token, %",
            "document": "which text it is from, %",
        }
        for name, text in labels.items():
            assert row(text, *(f"{100 * share:.0f}" for share in own["shares"][name])) in PAGE
        of_mpnet = [sum(share > 0.5 for share in layer) for layer in FOUND["mpnet"]["layers"]["mpnet"]["scores"]]
        assert f"{', '.join(map(str, of_mpnet[:-1]))} and {of_mpnet[-1]} of 12 heads" in PAGE

    def test_clipped_distances(self):
        rows = FOUND["pretrained"]["t5"]["clipped"]
        cosines = [f"{own['cosine']:.3f}" for own in rows if own["length"] == 128]
        assert row("the same model, cosine to the unclipped vectors", *cosines) in PAGE

    def test_losses_of_small_models(self):
        for name, own in FOUND["small_models"]["values"]["models"].items():
            mean, losses = own["loss"]["mean"], own["losses"]
            assert f"| {name} | {mean:.3f} ± {np.std(losses, ddof=1):.3f} |" in PAGE
        for name, own in FOUND["small_models"]["biases"]["models"].items():
            assert row(name, *(f"{loss:.3f}" for loss in own["losses"])) in PAGE


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
        return model(**batch).loss.item()

    assert loss(0.0) == pytest.approx(found["loss"])
    assert found["slope"] == pytest.approx((loss(0.05) - loss(-0.05)) / 0.1, rel=0.01)
    assert 0 < found["share"] < 1 and found["deviation"] > 0


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
