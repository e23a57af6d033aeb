"""What algebra keeps of an original's absolute positions, and that it changes nothing else."""

import importlib.util
import itertools

import pytest
import tiny
import tiny_checkpoints
import torch
from pairs import FAMILIES, PARAMETERS, beside, every_family, original, positionless, student_of, text, token_cosine
from transformers import AutoModel, PreTrainedModel

from hf_posenc import convert
from hf_posenc.conversion.checkpoints import make_student
from hf_posenc.conversion.observation import LayerByLayer, undisturbed
from hf_posenc.conversion.start import (
    agreeing_heads,
    balanced_basis,
    best_assignment,
    best_sinusoids,
    fit_sinusoids,
    joined_positions,
    missing_scores,
    order_heads,
    project_positions,
    standardize_table,
    start,
    table_rows,
)
from hf_posenc.modeling.schemes.alibi import alibi_slopes
from hf_posenc.modeling.schemes.sinusoidal import sinusoids
from hf_posenc.training import tables_and_biases


def family_of(name: str):
    return tiny.FAMILIES[name].family


@torch.no_grad()
def outputs(model, family: str, **others) -> torch.Tensor:
    """Of all tokens that are not padding, (tokens, hidden)."""
    batch = tiny.inputs(family=family, length=24)
    return model(**batch, **others)[0][batch["attention_mask"].bool()]


@torch.no_grad()
def at_one_place(model, family: str) -> torch.Tensor:
    """Outputs with all tokens at the family's first position: no distances are left."""
    first = model.config.first_position
    return outputs(model, family, position_ids=torch.full((3, 24), first))


@tiny.cross(trained_length=[None, 16], family=FAMILIES, strength=1)
def test_the_mean_position_stays(family, trained_length, tmp_path):
    teacher = original(family)
    student = student_of(teacher, tmp_path, positionless(family))
    start(student, teacher, trained_length=trained_length)
    with torch.no_grad():
        rows = table_rows(teacher, family_of(family))
        rows[:] = rows[:trained_length].mean(0)
    torch.testing.assert_close(outputs(student, family), outputs(teacher, family), atol=1e-5, rtol=1e-5)


@tiny.cross(alike=[True, False], family=FAMILIES, strength=1)
def test_the_word_that_begins_all_texts_has_the_first_position(family, alike, tmp_path):
    teacher = original(family)
    student = student_of(teacher, tmp_path, positionless(family))
    batches = text(family=family)
    for batch in batches:
        batch["input_ids"][batch["input_ids"] == 7] = 8
        batch["input_ids"][:, 0] = 7
    if not alike:
        batches[1]["input_ids"][3, 2] = 7
    start(student, teacher, batches)
    with torch.no_grad():
        rows = table_rows(teacher, family_of(family))
        rows[int(alike) :] = rows.mean(0)
        found, wanted = (model(**batches[0])[0][batches[0]["attention_mask"].bool()] for model in (student, teacher))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@every_family
def test_what_joins_absolute_is_left_alone(family, tmp_path):
    teacher = original(family)
    native = family_of(family).native_scheme
    student = student_of(teacher, tmp_path, f"{native}+deberta")
    before = {name: value.clone() for name, value in student.state_dict().items()}
    start(student, teacher)
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


@tiny.cross(layout=["halves", "interleaved"], family=FAMILIES, strength=1)
def test_rope_s_basis_changes_nothing_where_nothing_turns(family, layout, tmp_path):
    teacher = original(family)
    plain = student_of(teacher, tmp_path, positionless(family))
    start(plain, teacher)
    student = student_of(teacher, tmp_path, beside(family, "rope"), position_layout=layout)
    weights = student.state_dict()[query_key(student)].clone()
    start(student, teacher, text(family=family))
    assert not torch.allclose(weights, student.state_dict()[query_key(student)], atol=0.1)
    torch.testing.assert_close(at_one_place(student, family), at_one_place(plain, family), atol=1e-4, rtol=1e-4)


def test_rope_s_keys_have_no_mean(tmp_path):
    teacher = original("bert")
    batches = text()
    student = student_of(teacher, tmp_path, "rope")
    start(student, teacher, batches)
    means = []
    for model in (teacher, student):
        run = LayerByLayer(model, student.config.family, batches)
        states = torch.cat([h[b["attention_mask"].bool()] for h, b in zip(run.hidden_states, batches)])
        means.append(run.attention(0).key(states).mean(0).abs().max())
    assert means[0] > 0.1 and means[1] < 1e-4


def query_key(model) -> str:
    """Key of the first query projection's weight."""
    family = model.config.family
    return next(key for key in model.state_dict() if key.endswith(f".{family.query}.weight"))


def test_rope_s_weakest_directions_turn_fastest():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 500, 8, generator=generator, dtype=torch.float64)
    mixing = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    query, key = query @ mixing[0], key @ mixing[1]
    forward, backward = balanced_basis(query, key)
    torch.testing.assert_close(forward.mT @ backward, torch.eye(8, dtype=torch.float64).expand(3, 8, 8))
    strengths = []
    for states, basis in ((query, forward), (key, backward)):
        states = states @ basis.mT
        moments = states.mT @ states / 500
        strengths.append(moments.diagonal(dim1=1, dim2=2))
        assert (moments - torch.diag_embed(strengths[-1])).abs().max() < 1e-4 * strengths[-1].max()
    torch.testing.assert_close(*strengths, rtol=1e-3, atol=1e-3)
    assert (strengths[0].diff() >= 0).all()


@every_family
def test_alibi_s_heads_change_places_and_nothing_else(family, tmp_path):
    teacher = original(family)
    plain = student_of(teacher, tmp_path, positionless(family))
    start(plain, teacher)
    student = student_of(teacher, tmp_path, beside(family, "alibi"))
    weights = student.state_dict()[query_key(student)].clone()
    start(student, teacher, text(family=family))
    torch.testing.assert_close(at_one_place(student, family), at_one_place(plain, family), atol=1e-5, rtol=1e-5)
    # A bias per head of the original's own holds them where they are.
    stays = torch.equal(weights, student.state_dict()[query_key(student)])
    assert stays == (family_of(family).native_scheme != "absolute")


def test_alibi_s_heads_find_their_slopes_again(tmp_path):
    """The original has the slopes in another order: the student's heads are put in the usual one."""
    teacher = tiny.build("alibi")
    teacher.save_pretrained(tmp_path)
    student = type(teacher).from_pretrained(tmp_path).eval()
    [scheme] = teacher.encoder.position_schemes
    scheme.slopes = [scheme.slopes[place] for place in (2, 0, 3, 1)]
    assert (outputs(student, "bert") - outputs(teacher, "bert")).abs().max() > 0.1
    with torch.no_grad(), undisturbed(teacher, "eager"):
        [own] = student.encoder.position_schemes
        order_heads(student, teacher, family_of("bert"), text(), own.slopes)
    torch.testing.assert_close(outputs(student, "bert"), outputs(teacher, "bert"), atol=1e-4, rtol=1e-4)


class TestBestAssignment:
    @staticmethod
    def cheapest(cost: torch.Tensor) -> float:
        """The smallest sum over all orders, tried one by one."""
        orders = torch.tensor([*itertools.permutations(range(len(cost)))])
        return float(cost[orders, torch.arange(len(cost))].sum(1).min())

    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize("shape", ["random", "slopes", "ties"])
    def test_is_the_cheapest_of_all(self, shape, seed):
        generator = torch.Generator().manual_seed(seed)
        cost = torch.rand(7, 7, generator=generator, dtype=torch.float64)
        if shape == "ties":
            cost = (3 * cost).round()
        if shape == "slopes":
            slopes = torch.tensor(alibi_slopes(7), dtype=torch.float64)
            wanted = slopes[torch.randperm(7, generator=generator)]
            cost = cost[:, :1] * (wanted[:, None] - slopes).square()
        rows = best_assignment(cost)
        assert sorted(rows) == [*range(7)]
        assert float(cost[rows, range(7)].sum()) == pytest.approx(self.cheapest(cost), abs=1e-12)

    @pytest.mark.parametrize("scheme", ["alibi", "tupe"])
    def test_scipy_is_asked_for_before_weights_are_read(self, scheme, tmp_path, monkeypatch):
        checkpoint = tiny_checkpoints.save(tmp_path / "bert")
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else find(name))
        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
        with pytest.raises(ImportError, match=r"needs scipy: pip install 'hf_posenc\[train\]'"):
            convert(checkpoint, scheme, text=tmp_path / "bert.txt", train="none")


@torch.no_grad()
def plant(teacher, family: str, rows: torch.Tensor) -> None:
    """Give a model's table these rows, from the first position on."""
    table_rows(teacher, family_of(family)).copy_(rows)


@every_family
def test_a_table_of_projected_sinusoids_is_found_again(family, tmp_path):
    teacher = original(family)
    length, width = table_rows(teacher, family_of(family)).shape
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64) * 0.1
    sines = sinusoids(torch.arange(length), width, 30.0, "interleaved", torch.float64)
    plant(teacher, family, sines[:, ::4] @ mixing[::4] + 0.3)
    flags = {"position_combine": "concat", "position_base": 30}
    student = student_of(teacher, tmp_path, beside(family, "sinusoidal"), **flags)
    before = (outputs(student, family) - outputs(teacher, family)).abs().max()
    start(student, teacher)
    after = (outputs(student, family) - outputs(teacher, family)).abs().max()
    assert after < 0.02 < 0.1 * before


@pytest.mark.parametrize("frequency", [1.0, 2.0])
def test_base_and_frequency_are_those_that_the_table_was_made_with(frequency):
    sines = sinusoids(torch.arange(200), 32, 100.0, "interleaved", torch.float64, frequency)
    mixing = torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = sines @ mixing + 0.5
    assert best_sinusoids(table, 200) == {"position_base": 100.0, "position_frequency": frequency}
    assert fit_sinusoids(table, sines, 200)[2] < 1e-2
    assert fit_sinusoids(table, sines.flip(0)[:, :4], 200)[2] > 0.1


def smooth_table(length: int, width: int) -> torch.Tensor:
    """A table as training leaves it: slow and fast waves, of the RMS of BERT's, and a little noise in each row."""
    generator = torch.Generator().manual_seed(0)
    waves = sinusoids(torch.arange(length), 16, 300.0, "halves", torch.float64, 1.1)
    table = waves @ torch.randn(16, width, generator=generator, dtype=torch.float64)
    table += 0.3 * table.std() * torch.randn(table.shape, generator=generator, dtype=torch.float64)
    return 0.025 * table / table.square().mean().sqrt()


@pytest.mark.parametrize("unit", [1.0, 0.03])
def test_fitted_weights_cancel_no_more_than_bfloat16_can_say(unit):
    """Slow sinusoids are nearly collinear; a fit that is exact to the last digit has weights of many times the size."""
    table, sines = (
        smooth_table(256, 96),
        unit * sinusoids(torch.arange(256), 96, 10000.0, "interleaved", torch.float64),
    )
    matrix, constant, lost = fit_sinusoids(table, sines, 256)
    exact = sines @ matrix.T + constant
    rounded = (sines.bfloat16() @ matrix.T.bfloat16()).double() + constant
    centred = table - table.mean(0)
    assert (rounded - exact).square().mean().sqrt() < 0.05 * centred.square().mean().sqrt()
    with_constant = torch.cat([sines, torch.ones(256, 1, dtype=torch.float64)], dim=1)
    rest = centred - with_constant @ torch.linalg.lstsq(with_constant, centred).solution
    assert lost < rest.square().sum() / centred.square().sum() + 0.05


def test_the_constant_is_not_penalised():
    table, sines = smooth_table(64, 32), sinusoids(torch.arange(64), 32, 50.0, "interleaved", torch.float64)
    (matrix, constant, lost), moved = fit_sinusoids(table, sines, 64), fit_sinusoids(table + 100, sines, 64)
    torch.testing.assert_close(moved[0], matrix)
    torch.testing.assert_close(moved[1], constant + 100)
    assert moved[2] == pytest.approx(lost)


def test_a_step_of_fine_tuning_keeps_positions_where_the_fit_has_put_them(tmp_path):
    """With the rates of the quick start: 5e-4, and 0.1 for tables and biases, among which a learned amplitude would be."""
    teacher = original("bert", initializer_range=0.02)
    plant(teacher, "bert", smooth_table(*table_rows(teacher, family_of("bert")).shape))
    student = student_of(teacher, tmp_path, "sinusoidal", position_combine="concat")
    start(student, teacher)
    with torch.no_grad():
        before = joined_positions(student, family_of("bert"), 64)
    apart = {id(parameter) for parameter in tables_and_biases(student).values()}
    groups = [[p for p in student.parameters() if (id(p) in apart) == is_apart] for is_apart in (True, False)]
    optimizer = torch.optim.AdamW([{"params": own, "lr": rate} for own, rate in zip(groups, (0.1, 5e-4))])
    student(**tiny.inputs())[0].pow(3).sum().backward()
    optimizer.step()
    with torch.no_grad():
        moved = joined_positions(student, family_of("bert"), 64) - before
    assert 0 < moved.square().mean().sqrt() < 0.1 * (before - before.mean(0)).square().mean().sqrt()


@every_family
def test_a_table_of_sinusoids_gives_their_amplitude(family, tmp_path):
    teacher = original(family)
    length, width = table_rows(teacher, family_of(family)).shape
    plant(teacher, family, 0.7 * sinusoids(torch.arange(length), width, 10000.0, "interleaved", torch.float32) + 0.2)
    student = student_of(teacher, tmp_path, beside(family, "sinusoidal"))
    start(student, teacher)
    torch.testing.assert_close(outputs(student, family), outputs(teacher, family), atol=1e-4, rtol=1e-4)


@every_family
def test_tupe_starts_nearer_than_without_positions(family, tmp_path):
    """One layer, in which positions ask for positions as they do in the original."""
    teacher = original(family, num_hidden_layers=1)
    plain, student = (student_of(teacher, tmp_path, beside(family, scheme)) for scheme in ("none", "tupe"))
    for model in (plain, student):
        start(model, teacher)
    far, near = (attention_difference(model, teacher, family) for model in (plain, student))
    assert near < 0.9 * far


@every_family
def test_tupe_s_positions_score_what_is_missing(family, tmp_path):
    """Of the first layer, as far as a head's width allows: nothing is missing afterwards, counted from what [CLS] scores."""
    teacher = original(family, num_hidden_layers=1)
    batches = text(family=family)
    student = student_of(teacher, tmp_path, beside(family, "tupe"))
    with torch.no_grad(), undisturbed(student), undisturbed(teacher, "eager"):
        wanted, _ = missing_scores(student, teacher, family_of(family), batches)
        encoder = family_of(family).encoder_of(student.base_model)
        modules = encoder.pos_ln, encoder.pos_q_linear, encoder.pos_k_linear, encoder.others_to_cls
        project_positions(student, teacher, family_of(family), batches, modules)
        places = encoder.pos_ln(table_rows(teacher, family_of(family))[: wanted.shape[-1]])
        query, key = (linear(places) for linear in (encoder.pos_q_linear, encoder.pos_k_linear))
        heads = student.config.sizes.num_attention_heads
        query, key = (one.unflatten(-1, (heads, -1)).transpose(0, 1).double() for one in (query, key))
        scores = query @ key.mT * query.shape[-1] ** -0.5
    wanted = wanted[0, :, 1:]
    column = encoder.others_to_cls.weight.detach()[:, None, None]
    # Heads may have changed places: every head's scores are one of those wanted.
    wanted = wanted[:, :, 1:] - wanted[:, :, :1]
    found = scores[:, 1:, 1:] - column
    width = query.shape[-1]
    for one in wanted:
        rest = torch.linalg.svdvals(one)[width:].square().sum().sqrt()
        nearest = min(float((one - other).norm()) for other in found)
        assert nearest <= 1.5 * rest + 0.05 * one.norm()


@every_family
def test_tupe_s_table_is_as_its_norm_leaves_it(family, tmp_path):
    """Rows of variance 1 give the same scores, and a step of an optimizer does not turn them around."""
    teacher = original(family)
    table = table_rows(teacher, family_of(family))
    with torch.no_grad():
        table[3] = 0.0
    student = student_of(teacher, tmp_path, beside(family, "tupe"))
    tiny.fill_positions(student)
    before = outputs(student, family)
    with torch.no_grad():
        standardize_table(student, family_of(family))
    own = table_rows(student, family_of(family))
    deviations = own.std(dim=1, correction=0)
    assert not own[3].any() and deviations[deviations > 0].min() > 0.95
    torch.testing.assert_close(outputs(student, family), before, atol=1e-4, rtol=1e-3)
    start(student, teacher)
    torch.testing.assert_close(table_rows(student, family_of(family)), own)


def test_agreeing_heads_are_found_again():
    generator = torch.Generator().manual_seed(0)
    places = 3 * torch.randn(4, 9, 9, generator=generator, dtype=torch.float64)
    layers = [torch.randperm(4, generator=generator).tolist() for _ in range(3)]
    scores = torch.stack([places[order] for order in layers])
    scores = scores + 0.1 * torch.randn(scores.shape, generator=generator, dtype=torch.float64)
    scores = scores + 5 * torch.randn(3, 4, 9, 1, generator=generator, dtype=torch.float64)  # a constant of each query
    weights = torch.rand(scores.shape, generator=generator, dtype=torch.float64)
    found = agreeing_heads(scores, weights)
    at_places = torch.tensor([[layer[head] for head in order] for layer, order in zip(layers, found)])
    assert (at_places == at_places[0]).all() and sorted(at_places[0].tolist()) == [0, 1, 2, 3]


@torch.no_grad()
def attention_difference(student, teacher, family: str) -> float:
    """Squared difference of the attention in the first layer, for texts without padding."""
    batches = [tiny.inputs(8, 24, family, padding=None)]
    with undisturbed(student, "eager"), undisturbed(teacher, "eager"):
        runs = [LayerByLayer(model.base_model, family_of(family), batches) for model in (student, teacher)]
        found, wanted = (run.run_for_weights(0, 0) for run in runs)
    return float((found - wanted).square().sum())


class TestOriginalsWithoutTheirTable:
    """Saved variants as originals: there may be a table, other vectors or nothing in the words, and schemes that stay."""

    @tiny.cross(
        before=[name for name in PARAMETERS if name != "t5"],
        after=["absolute", "sinusoidal", "rope", "t5+alibi"],
        where=lambda before, after: after == "absolute" or before in ("deberta", "relative"),
        rest=pytest.mark.slow,
    )
    def test_nothing_joins_words_that_nothing_joined(self, before, after):
        teacher = tiny.build(before)
        student, plain = (make_student(teacher, scheme, {}) for scheme in (after, "none"))
        start(student, teacher, text())
        assert not torch.allclose(outputs(teacher, "bert"), outputs(plain, "bert"), atol=0.01)
        # Where all tokens are at one place, nothing is rotated and nothing is at a distance.
        of_words = outputs if after in ("absolute", "sinusoidal") else at_one_place
        torch.testing.assert_close(of_words(student, "bert"), of_words(plain, "bert"), atol=1e-4, rtol=1e-4)

    @tiny.cross(combine=["add", "concat"], family=FAMILIES, strength=1)
    def test_sinusoids_become_the_rows_of_a_table(self, combine, family):
        teacher = tiny.build("sinusoidal", family, position_combine=combine)
        student = make_student(teacher, "absolute", {"position_combine": "add"})
        if combine == "concat":  # what it makes of words is not asked for here
            with torch.no_grad():
                width = teacher.embeddings.words.embedding_dim
                teacher.embeddings.position_projection.weight[:, :width] = torch.eye(width)
        start(student, teacher)
        torch.testing.assert_close(outputs(student, family), outputs(teacher, family), atol=1e-4, rtol=1e-4)

    def test_the_mean_of_sinusoids_stays(self):
        teacher = tiny.build("sinusoidal")
        student = make_student(teacher, "none", {})
        start(student, teacher, trained_length=24)
        flat = make_student(teacher, "absolute", {})
        start(flat, teacher)
        with torch.no_grad():
            rows = table_rows(flat, family_of("bert"))
            rows[:] = rows[:24].mean(0)
        torch.testing.assert_close(outputs(student, "bert"), outputs(flat, "bert"), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("before", ["t5", "tupe", "kerple", "transformer_xl"])
    def test_heads_stay_with_what_they_have_of_their_own(self, before):
        teacher = tiny.build(before)
        student = make_student(teacher, f"{before}+alibi", {})
        start(student, teacher, text())
        for name, value in teacher.state_dict().items():
            assert torch.equal(value, student.state_dict()[name]), name

    @pytest.mark.parametrize("before", ["relative", "relative_key", "transformer_xl"])
    def test_queries_and_keys_stay_where_vectors_of_distances_are_multiplied_with_them(self, before):
        teacher = tiny.build(before)
        student = make_student(teacher, f"{before}+rope", {})
        start(student, teacher, text())
        at_one = (at_one_place(model, "bert") for model in (student, teacher))
        torch.testing.assert_close(*at_one, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_minilm_s_table_is_kept_by_sinusoids(minilm, python_text):
    teacher = AutoModel.from_pretrained(minilm).eval()
    flags = best_sinusoids(table_rows(teacher, family_of("bert")), 128)
    flags |= {"position_scheme": "sinusoidal", "position_combine": "concat"}
    student = AutoModel.from_pretrained(minilm, **flags).eval()
    start(student, teacher, trained_length=128)
    assert token_cosine(student, teacher, python_text[1]) > 0.988


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "least"), [("none", 0.0), ("rope", 0.05), ("alibi", 0.1)])
def test_minilm_is_nearer_to_itself_after_a_start(scheme, least, minilm, python_text):
    teacher = AutoModel.from_pretrained(minilm).eval()
    student = AutoModel.from_pretrained(minilm, position_scheme=scheme).eval()
    calibration_text, held_out = python_text
    before = token_cosine(student, teacher, held_out)
    start(student, teacher, calibration_text, trained_length=128)
    assert token_cosine(student, teacher, held_out) > before + least
