"""What the report says is what it means: agreement by the definitions, on text of which part is padding."""

import json
import math

import pytest
import tiny_checkpoints
import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from hf_posenc.conversion.measuring import POOLED, Yardstick
from hf_posenc.conversion.report import READS_LOCALLY, ConversionReport
from hf_posenc.conversion.targets import windowed_states
from hf_posenc.conversion.texts import Windows


@pytest.fixture(scope="module")
def models():
    return tiny_checkpoints.stock(), tiny_checkpoints.stock(seed=1)


@pytest.fixture(scope="module")
def text():
    return Windows([tiny_checkpoints.text(40)], tiny_checkpoints.tokenizer())


@torch.no_grad()
def tokens_of(model, batch):
    """Last states of each text's tokens, without padding: a list of (tokens, width)."""
    states = model(**batch).last_hidden_state
    return [row[mask] for row, mask in zip(states, batch["attention_mask"].bool())]


@pytest.mark.parametrize("pooling", [*POOLED, "mean+max", "cls+lasttoken+weightedmean"])
def test_texts_have_the_vectors_of_sentence_transformers(pooling, models, text):
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    pool = modules.Pooling(models[0].config.hidden_size, pooling_mode=pooling.split("+"))
    batch = text.lines(32, 64)
    assert not batch["attention_mask"].all()
    with torch.no_grad():
        states = [model(**batch).last_hidden_state for model in models]
    mask = {"attention_mask": batch["attention_mask"]}
    vectors = [pool({"token_embeddings": one} | mask)["sentence_embedding"] for one in states]
    yardstick = Yardstick(models[0], text, 32, 32, pooling)
    [row] = yardstick.measure(models[1], "some")
    assert row["sentence_cosine"] == pytest.approx(cosine_similarity(*vectors).mean().item(), abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_within_the_trained_length_texts_are_compared_without_their_padding(pooling, models, text):
    original, other = models
    [row] = Yardstick(original, text, 32, 32, pooling).measure(other, "some")
    batch = text.lines(32, 64)
    assert not batch["attention_mask"].all()
    found, aim = (tokens_of(model, batch) for model in (other, original))
    tokens = torch.cat([cosine_similarity(*pair, dim=-1) for pair in zip(found, aim)])
    assert (row["stage"], row["length"], row["tokens"]) == ("some", 32, len(tokens))
    assert row["token_cosine"] == row["token_cosine_by_layer"][-1] == pytest.approx(tokens.mean().item(), abs=1e-5)
    pool = (lambda states: states[0]) if pooling == "cls" else (lambda states: states.mean(0))
    own, wanted = (torch.stack([pool(states) for states in texts]) for texts in (found, aim))
    assert row["sentence_cosine"] == pytest.approx(cosine_similarity(own, wanted).mean().item(), abs=1e-5)
    kept = 0
    for index in range(len(own)):
        nearest = []
        for vectors in (own, wanted):
            others = [i for i in range(len(own)) if i != index]
            others.sort(key=lambda i: -float(cosine_similarity(vectors[index], vectors[i], dim=0)))
            nearest.append({*others[:5]})
        kept += len(nearest[0] & nearest[1]) / 5
    assert row["neighbours_kept"] == pytest.approx(kept / len(own), abs=0.02)


def test_beyond_it_the_target_are_the_original_s_windows(models, text):
    original, other = models
    yardstick = Yardstick(original, text, 16, 48)
    row = yardstick.measure(other, "some")[-1]
    assert row["length"] == 48
    batch = text.evenly_spaced(48, 170)
    aim = windowed_states(original, batch, 16)[-1].flatten(0, 1)
    shifted = windowed_states(original, batch, 16, shifted=True)[-1].flatten(0, 1)
    with torch.no_grad():
        found = other(**batch).last_hidden_state.flatten(0, 1)
    expected = {
        "token_cosine": cosine_similarity(found, aim, dim=-1).mean(),
        "other_tiling": cosine_similarity(shifted, aim, dim=-1).mean(),
        "centred_cosine": cosine_similarity(found - aim.mean(0), aim - aim.mean(0), dim=-1).mean(),
        # All pairs, in place of those that are drawn.
        "random_pairs": cosine_similarity(found[:, None], found[None], dim=-1).mean(),
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(value.item(), abs=0.02 if name == "random_pairs" else 1e-5), name
    assert "other_tiling" not in yardstick.measure(other, "some")[0]
    [same] = [row for row in yardstick.measure(original, "original") if row["length"] == 16]
    assert same["token_cosine"] == pytest.approx(1, abs=1e-5)


def test_lengths_that_the_text_does_not_have_are_left_out(models):
    short = Windows([tiny_checkpoints.text(14)], tiny_checkpoints.tokenizer())
    assert 260 < len(short.tokens) < 400
    yardstick = Yardstick(models[0], short, 16, 400)
    assert yardstick.left_out == [256, 400]
    with pytest.raises(ValueError, match="shorter than two lines"):
        Yardstick(models[0], Windows(["w5 w6"], tiny_checkpoints.tokenizer()), 16, 16)


def test_the_same_words_are_guessed_with_more_and_with_less_before_them(text):
    model = tiny_checkpoints.stock(head="ForMaskedLM")
    yardstick = Yardstick(model, text, 16, 48)
    rows = yardstick.losses(4, model)
    assert [row["length"] for row in rows] == [16, 48] * 2
    whole = text.evenly_spaced(48, 170)["input_ids"]
    generator = torch.Generator().manual_seed(0)
    asked = (torch.rand(whole.shape, generator=generator) < 0.15) & (torch.arange(48) >= 40)
    asked[:, -1] = False
    masked = whole.masked_fill(asked, 4)
    for row, seen in zip(rows, (slice(33, 48), slice(1, 48))):
        ids = torch.cat([masked[:, :1], masked[:, seen]], dim=1)
        with torch.no_grad():
            logits = model(ids).logits[:, 1:]
        loss = cross_entropy(logits[asked[:, seen]], whole[:, seen][asked[:, seen]])
        assert row["masked_lm_loss"] == pytest.approx(loss.item(), abs=1e-5)


@torch.no_grad()
def test_answers_in_a_text_are_tokens_and_no_padding(text):
    original, other = (tiny_checkpoints.stock(head="ForQuestionAnswering", seed=seed) for seed in (0, 1))
    [row] = Yardstick(original, text, 32, 32).measure(other, "some")
    batch = text.lines(32, 64)
    same, apart = [], []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool()):
        own, aim = (model(ids[mask][None]) for model in (other, original))
        for name in ("start_logits", "end_logits"):
            same.append(int(own[name].argmax()) == int(aim[name].argmax()))
            apart += (own[name] - aim[name]).abs().flatten().tolist()
    assert not batch["attention_mask"].all()
    assert row["same_answers"] == pytest.approx(sum(same) / len(same))
    assert row["logits_apart"] == pytest.approx(sum(apart) / len(apart), abs=1e-5)


@torch.no_grad()
def test_a_detector_of_replaced_tokens_answers_for_each_token(text):
    """google/electra-small-discriminator is one."""
    original, other = (tiny_checkpoints.stock("electra", "ForPreTraining", seed=seed) for seed in (0, 1))
    batch = text.lines(32, 64)
    for model in (original, other):  # either answer is given
        model.discriminator_predictions.dense_prediction.bias -= model(**batch).logits.mean()
    [row] = Yardstick(original, text, 32, 32).measure(other, "some")
    assert not batch["attention_mask"].all()
    logits = [
        torch.cat(
            [model(ids[mask][None]).logits[0] for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool())]
        )
        for model in (other, original)
    ]
    same = (logits[0].sign() == logits[1].sign()).double().mean().item()
    assert 0.1 < same < 0.9 and row["same_answers"] == pytest.approx(same)
    assert row["logits_apart"] == pytest.approx((logits[0] - logits[1]).abs().mean().item(), abs=1e-5)


def test_lines_of_a_few_words_are_measured_on():
    """As those of subtitles."""
    words = tiny_checkpoints.text(40).split()
    lines = "\n".join(" ".join(words[start : start + 4]) for start in range(0, len(words), 4))
    text = Windows([lines], tiny_checkpoints.tokenizer())
    original, other = tiny_checkpoints.stock(), tiny_checkpoints.stock(seed=1)
    rows = Yardstick(original, text, 32, 48).measure(other, "some")
    assert [(row["length"], row["tokens"]) for row in rows] == [(32, 64 * 6), (48, rows[1]["tokens"])]


def test_one_number_is_no_choice(text):
    """A score, as CrossEncoder gives it, has no answer that could be the same."""
    original, other = (
        tiny_checkpoints.stock(head="ForSequenceClassification", num_labels=1, seed=seed) for seed in (0, 1)
    )
    report = ConversionReport("some", "t5", {}, trained_length=32, max_length=32)
    report.rows = Yardstick(original, text, 32, 32).measure(other, "some")
    report.conclude([])
    assert "same_answers" not in report.rows[0] and report.rows[0]["logits_apart"] > 1e-3
    assert any("gives one number" in said for said in report.not_measured)


def test_a_report_has_no_numbers_that_json_has_not():
    report = ConversionReport("some", "t5", {}, trained_length=16, max_length=48)
    report.rows = [{"stage": "distill", "length": 16, "token_cosine": 0.9, "spearman": math.nan}]
    report.losses = [{"model": "converted", "length": n, "masked_lm_loss": x} for n, x in ((16, math.inf), (48, 2.0))]
    report.distillation = [{"step": 1, "error": -math.inf}]
    report.conclude([])

    def refuse(constant):
        raise AssertionError(constant)

    entries = json.loads(report.to_json(), parse_constant=refuse)
    assert (
        entries["rows"][0]["spearman"]
        is entries["losses"][0]["masked_lm_loss"]
        is entries["distillation"][0]["error"]
        is None
    )
    assert ConversionReport.metrics(report.rows[0]) == {"token_cosine": 0.9}


@pytest.mark.parametrize(
    "losses, said", [([2.0, 1.9], "guessed better"), ([2.0, 2.1], READS_LOCALLY), ([], READS_LOCALLY)]
)
def test_only_a_loss_that_falls_with_more_context_says_that_it_is_used(losses, said):
    report = ConversionReport("some", "t5", {}, trained_length=16, max_length=48)
    report.rows = [{"stage": "distill", "length": length, "token_cosine": 0.9} for length in (16, 48)]
    for model in ("original", "converted"):
        values = losses if model == "converted" else [3.0, 1.0][: len(losses)]
        report.losses += [{"model": model, "length": n, "masked_lm_loss": loss} for n, loss in zip((16, 48), values)]
    report.conclude([])
    assert said in report.conclusion
    assert "finding things in long texts" in report.not_measured
