"""Calibration finds the position parameters under which a student looks where its original looks."""

import math

import pytest
import tiny
import torch
from pairs import PARAMETERS, beside, every_family, original, student_of, text, token_cosine
from transformers import AutoModel

from hf_posenc import position_parameters
from hf_posenc.conversion import calibration
from hf_posenc.conversion.calibration import calibrate
from hf_posenc.conversion.observation import LayerByLayer, undisturbed
from hf_posenc.conversion.start import start


def emptied(teacher, folder, position_scheme, **flags):
    """A variant as another one was before its position parameters were learned."""
    teacher.save_pretrained(folder)
    student = type(teacher).from_pretrained(folder, position_scheme=position_scheme, **flags).eval()
    with torch.no_grad():
        for parameter in position_parameters(student).values():
            parameter.zero_()
    return student


@torch.no_grad()
def difference(student, teacher, batches) -> float:
    """Mean squared difference of the outputs where there are tokens, beside the variance of the original's."""
    total = variance = 0.0
    for batch in batches:
        mask = batch["attention_mask"].bool()
        found, wanted = (model(**batch)[0][mask] for model in (student, teacher))
        total, variance = total + (found - wanted).square().sum(), variance + wanted.var(0).sum() * len(wanted)
    return float(total / variance)


@every_family
def test_a_bias_per_distance_is_found_again(family, tmp_path):
    teacher = tiny.build("t5", family, position_per_layer=family != "mpnet")
    student = emptied(teacher, tmp_path, "t5")
    batches = text(family=family)
    assert difference(student, teacher, batches) > 0.01
    calibrate(student, teacher, batches, steps=20)
    found, wanted = (position_parameters(model) for model in (student, teacher))
    reached = slice(0, 4)  # near distances, which all batches have; a constant per head is of no matter
    for name, table in wanted.items():
        centred = [part[reached] - part[reached].mean(0) for part in (found[name], table)]
        torch.testing.assert_close(*centred, atol=0.05, rtol=0)
    assert difference(student, teacher, batches) < 1e-4


def test_with_a_window_the_bias_is_fitted_to_what_is_seen(tmp_path):
    teacher = tiny.build("t5", position_per_layer=True)
    student = emptied(teacher, tmp_path, "t5", position_window=5, position_global_every=0)
    calibrate(student, teacher, text(), steps=20)
    [name, *_] = position_parameters(student)
    found, wanted = (position_parameters(model)[name] for model in (student, teacher))
    seen = torch.tensor([0, 1, 2, 17, 18])  # up to two places before, and behind
    centred = [table[seen] - table[seen].mean(0) for table in (found, wanted)]
    torch.testing.assert_close(*centred, atol=0.05, rtol=0)
    assert not found[[3, 4, 19, 20]].any()


FACTORS = ("fire_hidden", "fire_c", "fire_length", "cable_step", "cable_scale")


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(name, marks=() if name in ("t5", "deberta", "tupe") else pytest.mark.slow) for name in PARAMETERS],
)
@pytest.mark.slow
def test_every_scheme_with_parameters_comes_near_the_original(scheme, tmp_path):
    flags = {"position_on_values": False} if scheme == "relative" else {}
    teacher = tiny.build(scheme, **flags)
    tiny.fill_positions(teacher, std=0.2)
    student = emptied(teacher, tmp_path, scheme)
    wanted = position_parameters(teacher)
    with torch.no_grad():
        for name, parameter in position_parameters(student).items():
            # Of two factors one must not be zero; it is another than the original's.
            if any(part in name for part in ("pos_bias_v", "kerple_r2", "encoder.pos_", *FACTORS)):
                parameter.copy_(0.5 * wanted[name])
    batches = text()
    before = difference(student, teacher, batches)
    calibrate(student, teacher, batches, steps=20)
    assert difference(student, teacher, batches) < 0.4 * before


def test_what_softmax_does_not_see_is_left_as_it_is(tmp_path):
    """A row at one value: a fit after what rounding leaves of its curvature ends at tens of thousands, too much for half precision."""
    teacher = original("bert")
    student = student_of(teacher, tmp_path, "tupe")
    start(student, teacher, text())
    others = student.encoder.others_to_cls.weight.clone()
    calibrate(student, teacher, text())
    assert not student.encoder.cls_to_others.weight.any()
    assert not torch.equal(student.encoder.others_to_cls.weight, others)


def test_several_schemes_are_fitted_together(tmp_path):
    teacher = tiny.build("t5+relative_key", position_per_layer=True)
    student = emptied(teacher, tmp_path, "t5+relative_key")
    batches = text()
    before = difference(student, teacher, batches)
    calibrate(student, teacher, batches, steps=20)
    assert difference(student, teacher, batches) < 0.05 * before


@every_family
def test_an_original_with_absolute_positions_is_seen_in_every_family(family, tmp_path):
    teacher = original(family)
    student = student_of(teacher, tmp_path, beside(family, "relative_key"))
    start(student, teacher)
    batches = text(family=family)
    first = divergence(student, teacher, batches)
    calibrate(student, teacher, batches)
    assert divergence(student, teacher, batches) < 0.95 * first


@torch.no_grad()
def divergence(student, teacher, batches) -> float:
    """Of the attention of a first layer, by the definition."""
    total = 0.0
    with undisturbed(student, "eager"), undisturbed(teacher, "eager"):
        for index, batch in enumerate(batches):
            runs = [LayerByLayer(model.base_model, student.config.family, batches) for model in (student, teacher)]
            found, wanted = (run.run_for_weights(0, index) for run in runs)
            rows = (wanted * (wanted / found).log().nan_to_num(0.0, 0.0, 0.0)).sum(-1)
            total += float(rows.transpose(1, 2)[batch["attention_mask"].bool()].sum())
    return total


def test_what_is_padding_does_not_matter(tmp_path):
    teacher = original("bert")
    batches, others = text(), text()
    for batch in others:
        batch["input_ids"][batch["attention_mask"] == 0] = 7
    tables = []
    for given in (batches, others):
        student = student_of(teacher, tmp_path, "t5", position_per_layer=True)
        calibrate(student, teacher, given)
        tables.append(torch.cat([p.detach() for p in position_parameters(student).values()]))
    assert tables[0].abs().max() > 0.1
    torch.testing.assert_close(*tables)


@every_family
def test_what_the_original_had_beside_the_student_is_left_as_it_is(family, tmp_path):
    teacher = original(family)
    scheme = tiny.FAMILIES[family].family.native_scheme + "+transformer_xl"
    student = student_of(teacher, tmp_path, scheme)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    calibrate(student, teacher, text(family=family))
    for name, value in student.state_dict().items():
        assert torch.equal(value, before[name]), name


@every_family
def test_projections_of_queries_and_keys_are_what_rope_has_for_parameters(family, tmp_path):
    teacher = original(family)
    student = student_of(teacher, tmp_path, "rope")
    before = {name: value.clone() for name, value in student.state_dict().items()}
    batches = text(family=family)
    first = divergence(student, teacher, batches)
    calibrate(student, teacher, batches)
    assert divergence(student, teacher, batches) < 0.6 * first
    changed = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    description = student.config.family
    layers = description.layers_of(description.encoder_of(student.base_model))
    projections = {
        parameter.data_ptr()
        for layer in layers
        for part in ("query_projection", "key_projection")
        for parameter in getattr(description.self_attention_of(layer), part).parameters()
    }
    assert {value.data_ptr() for name, value in student.state_dict().items() if name in changed} == projections


@pytest.mark.parametrize("scheme", ["t5", "deberta", "rope"])
def test_time_that_is_enough_changes_nothing_and_none_fits_nothing(scheme, tmp_path):
    teacher = original("bert")
    found = []
    for seconds in (math.inf, 1e6, 0.0):
        student = student_of(teacher, tmp_path, scheme)
        calibrate(student, teacher, text(), seconds=seconds)
        found.append(student.state_dict())
    unlimited, enough, none = found
    fitted = {name for name, value in unlimited.items() if not torch.equal(value, none[name])}
    assert fitted and all(torch.equal(value, enough[name]) for name, value in unlimited.items())
    start = student_of(teacher, tmp_path, scheme).state_dict()
    assert all(torch.equal(value, start[name]) for name, value in none.items())


def test_in_a_limited_time_projections_are_not_fitted_to_a_few_tokens(tmp_path):
    teacher = original("bert")
    batches = [{name: value[:4] for name, value in text(1)[0].items()}]
    width = teacher.config.hidden_size
    assert batches[0]["attention_mask"].sum() < calibration.LEAST_TOKENS * width
    for seconds, changes in ((math.inf, True), (1e6, False)):
        student = student_of(teacher, tmp_path, "rope")
        before = {name: value.clone() for name, value in student.state_dict().items()}
        calibrate(student, teacher, batches, seconds=seconds)
        assert changes != all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


@torch.no_grad()
def test_the_gradient_of_a_fit_of_projections_is_that_of_its_divergence(tmp_path):
    """In its coordinates, by differences; the divergence is computed in float64."""
    teacher = original("bert").double()
    student = student_of(teacher, tmp_path, "rope").double()
    batches, [layer, *_] = text(), student.encoder.layer
    attention = layer.attention.self
    with undisturbed(teacher, "eager"):
        runs = [LayerByLayer(model, student.config.family, batches) for model in (student, teacher)]
        states = torch.cat([h[b["attention_mask"].bool()] for h, b in zip(runs[0].hidden_states, batches)])
        observations = [
            calibration.observe(runs[0], 0, index, runs[1].run_for_weights(0, index), batch, again=True)
            for index, batch in enumerate(batches)
        ]
    fit = calibration.ProjectionFit(attention, observations, states)
    change = fit.coordinates()
    generator = torch.Generator().manual_seed(0)
    here, towards, other = (torch.randn(fit.start.shape, generator=generator, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(change(towards) @ other, towards @ change(other))  # it is symmetric
    here, towards = 0.1 * here, towards / towards.norm()
    gradient = change(fit.divergence(fit.start + change(here))[1])
    values = [fit.divergence(fit.start + change(here + step * towards))[0] for step in (1e-5, -1e-5)]
    torch.testing.assert_close((values[0] - values[1]) / 2e-5, float(gradient @ towards), rtol=1e-4, atol=1e-8)


def test_parameters_stay_where_a_fit_finds_no_numbers(tmp_path, monkeypatch):
    teacher = original("bert")
    student = student_of(teacher, tmp_path, "t5", position_per_layer=True)
    tiny.fill_positions(student)
    before = [parameter.clone() for parameter in position_parameters(student).values()]
    monkeypatch.setattr(calibration.Fit, "scale", lambda fit: torch.full_like(fit.start, 1e300))
    calibrate(student, teacher, text())
    assert all(map(torch.equal, position_parameters(student).values(), before))


def test_models_are_left_as_they_were_found(tmp_path):
    teacher = original("bert")
    student = student_of(teacher, tmp_path, "t5")
    student.train()
    implementation = teacher.config._attn_implementation
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    calibrate(student, teacher, text())
    assert student.training and not teacher.training
    assert teacher.config._attn_implementation == implementation != "eager"
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in teacher.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in student.parameters())


def test_no_more_text_is_read_than_there_is_room_for(tmp_path, monkeypatch):
    teacher = original("bert")
    tables = []
    for most, batches in ((10**9, text(1)), (4 * 8 * 20**2, text(3)), (1, text(3)), (10**9, text(3))):
        monkeypatch.setattr(calibration, "MOST_PAIRS", most)
        student = student_of(teacher, tmp_path, "t5", position_per_layer=True)
        calibrate(student, teacher, batches)
        tables.append(torch.cat([p.detach() for p in position_parameters(student).values()]))
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])
    assert not torch.allclose(tables[0], tables[3])


@pytest.mark.parametrize("scheme", ["t5", "deberta", "rope"])
def test_rows_may_be_computed_one_by_one(scheme, tmp_path, monkeypatch):
    teacher = original("bert")
    states = []
    for most in (calibration.PAIRS_AT_ONCE, 1):
        monkeypatch.setattr(calibration, "PAIRS_AT_ONCE", most)
        student = student_of(teacher, tmp_path, scheme)
        calibrate(student, teacher, text(2))
        states.append(torch.cat([p.detach().flatten() for p in student.parameters()]))
    torch.testing.assert_close(*states, atol=1e-3, rtol=1e-3)
    # One row alone is another text.
    monkeypatch.setattr(calibration, "MOST_PAIRS", 1)
    student = student_of(teacher, tmp_path, scheme)
    calibrate(student, teacher, text(2))
    assert not torch.allclose(states[1], torch.cat([p.detach().flatten() for p in student.parameters()]), atol=1e-3)


def test_a_head_s_base_model_is_what_is_calibrated(tmp_path):
    teacher = original("distilbert", "ForSequenceClassification")
    student = student_of(teacher, tmp_path, "t5", position_per_layer=True)
    batches = text(family="distilbert")
    first = divergence(student, teacher, batches)
    calibrate(student, teacher, batches)
    assert divergence(student, teacher, batches) < first


@pytest.mark.slow
def test_minilm_is_near_to_itself_by_calibration_alone(minilm, python_text):
    teacher = AutoModel.from_pretrained(minilm).eval()
    student = AutoModel.from_pretrained(minilm, position_scheme="t5", position_per_layer=True).eval()
    calibration_text, held_out = python_text
    start(student, teacher, trained_length=128)
    calibrate(student, teacher, calibration_text)
    assert token_cosine(student, teacher, held_out) > 0.88
