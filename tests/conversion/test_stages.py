"""The stages by themselves: longer tables, targets, distillation."""

import itertools
import math

import pytest
import tiny
import tiny_checkpoints
import torch

from hf_posenc import position_parameters
from hf_posenc.conversion import Distillation, Diverged, distill, distillation, lengthen, start
from hf_posenc.conversion.checkpoints import make_student
from hf_posenc.conversion.measuring import lengths_to_measure, spearman
from hf_posenc.conversion.targets import normalised_error, original_states, windowed_states
from hf_posenc.conversion.texts import Windows


def windows(seed: int = 0) -> Windows:
    return Windows([tiny_checkpoints.text(seed=seed)], tiny_checkpoints.tokenizer())


class TestExtend:
    @tiny.cross(method=["tile", "mean", "interpolate"], family=tiny.FAMILIES, strength=1)
    def test_rows_are_made_of_those_that_were_trained(self, family, method):
        model = tiny_checkpoints.stock(family)
        longer = lengthen(model, 50, 20, method)
        first = tiny.FAMILIES[family].family.first_position(model.config)
        old, new = (m.embeddings.position_embeddings.weight.detach()[first:] for m in (model, longer))
        assert len(new) == (60 if method == "interpolate" else 50)
        assert longer.config.max_position_embeddings == first + len(new)
        if method == "interpolate":
            assert torch.equal(new[::3], old[:20])
            torch.testing.assert_close(new[1], old[0] + (old[1] - old[0]) / 3)
            assert torch.equal(new[58], old[19])
        else:
            assert torch.equal(new[:20], old[:20])
            expected = old[1:20].repeat(2, 1)[:30] if method == "tile" else old[:20].mean(0).expand(30, -1)
            torch.testing.assert_close(new[20:], expected)
        ids = torch.randint(5, 99, (2, 50))
        with torch.no_grad():
            assert longer(ids).last_hidden_state.shape == (2, 50, 32)
            within = longer(ids[:, :20]).last_hidden_state - model(ids[:, :20]).last_hidden_state
        assert within.abs().max() < 1e-6

    def test_shorter_than_it_was(self):
        model = tiny_checkpoints.stock()
        assert lengthen(model, 10, 20).embeddings.position_embeddings.weight.shape == (10, 32)

    def test_a_method_that_there_is_not(self):
        with pytest.raises(ValueError, match="tile, interpolate, mean"):
            lengthen(tiny_checkpoints.stock(), 50, 20, "stretch")


class TestTargets:
    def test_each_token_has_the_states_of_its_most_central_window(self):
        model = tiny_checkpoints.stock()
        ids = torch.cat([torch.tensor([1]), torch.randint(5, 99, (38,)), torch.tensor([2])])
        found = windowed_states(model, {"input_ids": ids[None]}, window=12)[-1][0]
        # Ten words a window, five a step: 0, 5, ... 25, 28.
        for token, window in ((0, 0), (6, 0), (7, 0), (8, 5), (20, 15), (37, 28)):
            part = torch.cat([ids[:1], ids[1 + window : 11 + window], ids[-1:]])
            with torch.no_grad():
                expected = model(part[None]).last_hidden_state[0, token - window + 1]
            torch.testing.assert_close(found[token + 1], expected, atol=1e-5, rtol=1e-5)
        for place, window in ((0, 0), (-1, 28)):  # [CLS] of the first window, [SEP] of the last
            with torch.no_grad():
                part = torch.cat([ids[:1], ids[1 + window : 11 + window], ids[-1:]])
                expected = model(part[None]).last_hidden_state[0, place]
            torch.testing.assert_close(found[place], expected, atol=1e-5, rtol=1e-5)

    def test_another_tiling_is_another_one(self):
        model = tiny_checkpoints.stock()
        batch = windows().evenly_spaced(40, 2)
        first, second = (windowed_states(model, batch, 12, shifted)[-1] for shifted in (False, True))
        assert (first - second).abs().max() > 1e-2

    def test_within_the_window_it_is_the_original(self):
        model = tiny_checkpoints.stock()
        batch = windows().evenly_spaced(12, 2)
        with torch.no_grad():
            assert torch.equal(original_states(model, batch, 12)[-1], model(**batch).last_hidden_state)


class TestHeal:
    def student(self):
        original = tiny_checkpoints.stock()
        student = make_student(original, "t5", {"position_per_layer": True})
        start(student, original)
        return original, student

    def test_words_and_pooler_stay_and_all_else_moves(self):
        original, student = self.student()
        before = {name: value.clone() for name, value in student.state_dict().items()}
        distill(student, original, windows(), windows(1), Distillation(32, 32, max_steps=3))
        after = student.state_dict()
        still = {name for name, value in before.items() if torch.equal(value, after[name])}
        assert still == {"embeddings.word_embeddings.weight", "pooler.dense.weight", "pooler.dense.bias"}

    def test_positions_alone(self):
        original, student = self.student()
        before = {name: value.clone() for name, value in student.state_dict().items()}
        distill(student, original, windows(), windows(1), Distillation(32, 32, train="positions", max_steps=3))
        after = student.state_dict()
        assert {name for name in before if not torch.equal(before[name], after[name])} == {
            *position_parameters(student)
        }

    @pytest.mark.slow
    def test_the_original_stays_as_it_is(self):
        original, student = self.student()
        before = {name: value.clone() for name, value in original.state_dict().items()}
        distill(student, original, windows(), windows(1), Distillation(32, 64, max_steps=3))
        assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())

    @pytest.mark.slow
    def test_text_of_a_step_is_long_every_second_time(self):
        distillation = Distillation(32, 128, max_steps=3)
        lengths = [distillation.draw(windows(), step)["input_ids"].shape[1] for step in range(40)]
        assert all(16 <= length <= 32 for length in lengths[::2])
        assert all(32 < length <= 128 for length in lengths[1::2])
        assert torch.equal(distillation.draw(windows(), 5)["input_ids"], distillation.draw(windows(), 5)["input_ids"])
        others = [
            Distillation(32, 128, max_steps=3, seed=1).draw(windows(), step)["input_ids"].shape[1]
            for step in range(40)
        ]
        assert others != lengths
        assert not torch.equal(
            distillation.draw(windows(), 4)["input_ids"][0, :16],
            distillation.draw(windows(), 4, number=1)["input_ids"][0, :16],
        )

    @pytest.mark.slow
    def test_minutes_end_it_too(self):
        original, student = self.student()
        history = distill(student, original, windows(), windows(1), Distillation(32, 32, max_minutes=0.01))
        assert history[-1]["seconds"] >= 0.6
        assert Distillation(32, 32, max_minutes=1, max_steps=100).spent(50, 6.0) == 0.5
        assert Distillation(32, 32, max_minutes=1, max_steps=100).spent(5, 54.0) == pytest.approx(0.9)

    @pytest.mark.slow
    def test_rates_rise_over_twenty_steps_and_fall_to_nothing(self, monkeypatch):
        rates = []
        one_step = distillation._Run._step

        def step(run, model, optimizer, *arguments):
            rates.append({group["highest"]: group["lr"] for group in optimizer.param_groups})
            return one_step(run, model, optimizer, *arguments)

        monkeypatch.setattr(distillation._Run, "_step", step)
        original, student = self.student()
        distill(student, original, windows(), windows(1), Distillation(32, 32, max_steps=40, learning_rate=0.002))
        assert len(rates) == 40 and {*rates[0]} == {0.002, 0.05}
        for highest in rates[0]:
            found = [entry[highest] / highest for entry in rates]
            expected = [(1 - step / 40) * min(1, (step + 1) / 20) for step in range(40)]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))

    @pytest.mark.parametrize(
        "scheme, part, rate",
        [
            ("t5", "relative_attention_bias", 0.05),
            ("deberta", "rel_embeddings", 0.01),
            ("relative", "relative_value_embeddings", 0.02),
            ("relative_key", "distance_embedding", 0.02),
            ("transformer_xl", "pos_bias_u", 0.01),
            ("transformer_xl", "linear_pos", 0.003),
            ("tupe", "others_to_cls", 0.05),
        ],
    )
    def test_positions_have_rates_of_their_own(self, scheme, part, rate):
        student = make_student(tiny_checkpoints.stock(), scheme, {})
        names = {parameter: name for name, parameter in student.named_parameters()}
        [group] = [
            g for g in distillation.parameter_groups(student, 0.003) if any(part in names[p] for p in g["params"])
        ]
        assert group["lr"] == group["highest"] == rate
        assert sum(len(g["params"]) for g in distillation.parameter_groups(student, 0.003)) == len(names)

    @pytest.mark.parametrize(
        "steps, looked_at", [(3, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((49, 0), (60, 50)))]
    )
    def test_a_model_that_diverges_is_put_back(self, steps, looked_at, tmp_path, monkeypatch):
        """To where it was last looked at, or to its start: after `steps` of them the error is no number."""
        seen, errors = {}, itertools.count()
        look = distillation._Run._cosine

        def note(run, model, checked):
            seen.update({name: value.clone() for name, value in model.state_dict().items()})
            return look(run, model, checked)

        def error(states, aim):
            return normalised_error(states, aim) * (math.nan if next(errors) == steps else 1)

        original, student = self.student()
        seen.update({name: value.clone() for name, value in student.state_dict().items()})
        monkeypatch.setattr(distillation._Run, "_cosine", note)
        arguments = (
            student,
            original,
            windows(),
            windows(1),
            Distillation(32, 32, max_steps=100),
            tmp_path / "distillation.pt",
        )
        with pytest.raises(
            Diverged, match=f"at step {steps} the error .* to step {looked_at}; .*learning_rate .*0.00015"
        ):
            distill(*arguments, error=error)
        assert next(errors) == steps + 1
        assert all(torch.equal(value, seen[name]) for name, value in student.state_dict().items())
        assert (tmp_path / "distillation.pt").is_file() == (looked_at > 0)

    def test_a_last_step_that_leads_to_no_numbers_is_seen_too(self, monkeypatch):
        original, student = self.student()
        before = {name: value.clone() for name, value in student.state_dict().items()}
        one_step = distillation._Run._step

        def step(run, model, *arguments):
            error = one_step(run, model, *arguments)
            if arguments[-1] == 4:
                model.encoder.layer[0].output.dense.bias.data.fill_(math.nan)
            return error

        monkeypatch.setattr(distillation._Run, "_step", step)
        with pytest.raises(Diverged, match="at step 5 the cosine is no finite number"):
            distill(student, original, windows(), windows(1), Distillation(32, 32, max_steps=5))
        assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())

    def test_no_time_at_all_is_one_step(self):
        original, student = self.student()
        [entry] = distill(student, original, windows(), windows(1), Distillation(32, 32, max_minutes=1e-9))
        assert entry["step"] == 1 and math.isfinite(entry["error"])

    def test_it_goes_on_where_nothing_is_gained(self, monkeypatch):
        monkeypatch.setattr(distillation, "CHECK_EVERY", 1)
        monkeypatch.setattr(distillation._Run, "_cosine", lambda *_: 0.9)
        original, student = self.student()
        entries = distill(student, original, windows(), windows(1), Distillation(32, 32, max_steps=12))
        assert [entry["step"] for entry in entries] == [*range(1, 13)]


def test_lengths_that_are_measured():
    assert lengths_to_measure(128, 128) == [128]
    assert lengths_to_measure(128, 300) == [128, 300]
    assert lengths_to_measure(128, 2048) == [128, 512, 1024, 2048]


def test_spearman_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    first = torch.randn(50, generator=torch.Generator().manual_seed(0))
    second = first + torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-9)
