"""docs/questions.md is what was measured, its verdicts are what the numbers say, and its arrays give its figures again."""

import json
import re
import runpy
import sys

import numpy as np
import pytest
from fresh_process import ROOT
from safetensors.numpy import load_file


PAGE = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "docs" / "what-positions-do.json").read_text(encoding="utf-8"))
SHARES = (0.5, 0.8, 0.9, 0.95)


@pytest.fixture(scope="module")
def script() -> dict:
    """docs/questions.py."""
    sys.path.insert(0, str(ROOT / "docs"))
    yield runpy.run_path(str(ROOT / "docs" / "questions.py"))
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(ROOT / "docs" / "what-positions-do.npz") as file:
        return dict(file)


def rows(part: str, *spaces: str, layer: int = 1) -> list[dict]:
    found = FOUND["answers"]["subspaces"][part]
    return [row for row in found if row["space"] in spaces and row["layer"] == layer]


def test_the_page_is_what_is_made_of_the_numbers(script):
    assert script["page"](FOUND) == PAGE


def test_every_question_has_an_answer_a_figure_a_sample_and_limits(script):
    for make in script["QUESTIONS"]:
        question = make(FOUND)
        assert question.question.endswith("?") and f"## {question.question}\n" in PAGE
        assert len(re.split(r"\. (?=[A-Z])", " ".join(question.answer.split()))) == 2, question.question
        for text in (question.figure, question.sample, question.limits):
            assert len(text) > 60
        assert any(sign in question.sample for sign in (" to ", "±", "nothing is sampled")), question.question


def test_the_arrays_are_those_that_the_page_names(script, arrays, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import answers

    assert {*arrays} == {*answers.ARRAYS}
    assert all(f"- `{name}`: " in PAGE for name in arrays)
    assert (ROOT / "docs" / "what-positions-do.npz").stat().st_size < 2_500_000


class TestVerdicts:
    """What the sentences say without a number."""

    def test_words_and_positions_overlap_less_than_by_chance_in_the_embeddings_at_every_share(self):
        for row in rows("tables", "embeddings"):
            for measure in ("positions_in_words", "words_in_positions"):
                assert row[measure]["high"] > row[measure]["low"] > 3 * row[measure]["median"]

    def test_head_by_head_too_but_for_head_3(self):
        for row in rows("tables", "queries", "keys"):
            assert row["positions_in_words"]["above"] == row["words_in_positions"]["above"] == 0
            assert {*row["positions_in_words"]["not_below"]} <= {3}

    @pytest.mark.parametrize("text", ["language reference", "WikiText-2"])
    def test_depth_mixes_them_in_the_last_layer_only(self, text):
        subspaces = FOUND["answers"]["subspaces"]["layers"] if "language" in text else FOUND["other_text"]["subspaces"]

        def heads(layer: int, share: float, side: str) -> int:
            own = [row for row in subspaces if (row["layer"], row["share"]) == (layer, share)]
            return sum(row["positions_in_words"][side] for row in own if row["space"] in ("queries", "keys"))

        for layer in range(1, 6):
            for share in SHARES:
                assert heads(layer, share, "below") > 12 and heads(layer, share, "above") <= 1
        assert heads(6, 0.5, "below") < 12 and heads(6, 0.5, "above") > 1
        [half] = [row for row in subspaces if (row["layer"], row["share"], row["space"]) == (6, 0.5, "states")]
        half = half["positions_in_words"]
        assert (half["low"] < half["median"] < half["high"]) == ("language" in text)

    def test_words_are_told_through_layer_3_and_fade_like_positions(self):
        near, position = FOUND["answers"]["survival"]["nearest"], FOUND["models"]["MiniLM"]["probes"]["position"]
        assert min(near[:4]) > 0.97 and min(position[:4]) > 0.95 and near[-1] < 0.6 and position[-1] < 0.6

    def test_the_three_seeds_cannot_tell_concatenating_or_every_layer_from_adding_once(self, script):
        for part, length, metric in (("scratch", 32, "masked_loss"), ("punctuation", 64, "f1")):
            once = script["seeds"](part, "absolute", length, metric)
            for how in (":position_combine=concat", ":position_every_layer=true"):
                _, low, high = script["apart"](script["seeds"](part, f"absolute{how}", length, metric), once)
                assert low < 0 < high

    def test_sinusoids_with_a_learned_amplitude_stay_with_none_and_others_do_not(self, script):
        learned, constant, table, none = (
            script["seeds"]("scratch", scheme, 32, "masked_loss")
            for scheme in (script["LEARNED"], "sinusoidal", "absolute", "none")
        )
        assert script["apart"](table, none)[2] < 0 and abs(script["apart"](learned, none)[0]) < 0.01
        assert script["apart"](constant, none)[2] < 0 < script["apart"](constant, table)[1]
        assert script["apart"](constant, none)[0] < script["apart"](table, none)[0] / 2, "more than half of the way"
        own, nothing = (script["seeds"]("punctuation", scheme, 64, "f1") for scheme in ("sinusoidal", "none"))
        assert abs(script["apart"](own, nothing)[0]) < 0.01, "nor by fine-tuning"

    def test_a_swap_that_changes_the_meaning_moves_hardly_more_than_its_control(self):
        order = FOUND["answers"]["order"]
        said = order["sentences"]
        for kind, control, name in (
            ("who does it", "met, married, resembled", "roles"),
            ("who does it, name and article", "met, resembled, name and article", "named"),
        ):
            assert said[kind]["count"] >= 50
            assert order["beyond"][name]["text"] < said[control]["text"] / 2


@pytest.mark.slow
class TestFiguresAgain:
    """With NumPy alone, from the arrays and the checkpoint's weights."""

    @staticmethod
    def square(triangle: np.ndarray) -> np.ndarray:
        width = int((2 * len(triangle)) ** 0.5)
        matrix = np.zeros((width, width))
        matrix[np.triu_indices(width)] = triangle
        return matrix + np.triu(matrix, 1).T

    @staticmethod
    def inside(words: np.ndarray, positions: np.ndarray, share: float) -> float:
        """Of the positions' variance, what lies where a share of the words' does, by covariances."""
        variances, axes = np.linalg.eigh(words)
        variances, axes = variances[::-1].clip(min=0), axes[:, ::-1]
        kept = np.searchsorted(np.cumsum(variances) / variances.sum(), share) + 1
        span = axes[:, :kept]
        return np.trace(span.T @ positions @ span) / np.trace(positions)

    @staticmethod
    def rotation(width: int, random: np.random.Generator) -> np.ndarray:
        q, r = np.linalg.qr(random.normal(size=(width, width)))
        return q * np.sign(np.diag(r))

    @pytest.mark.parametrize("layer", [0, 3, 5])
    def test_of_each_head_of_a_layer(self, layer, arrays, minilm):
        weights = load_file(f"{minilm}/model.safetensors")
        words, positions = (
            self.square(arrays[name][layer].astype(float)) for name in ("word_covariances", "position_covariances")
        )
        random = np.random.default_rng(0)
        turned = [turn.T @ positions @ turn for turn in (self.rotation(384, random) for _ in range(30))]
        for side, name in enumerate(("query", "key")):
            rows = weights[f"encoder.layer.{layer}.attention.self.{name}.weight"].astype(float)
            for head in (0, 2, 11):
                own = rows[32 * head : 32 * (head + 1)]
                for index, share in enumerate(SHARES):
                    found, chance, low, high = arrays["layers_positions_in_words"][layer, side, index, head]
                    again = self.inside(own @ words @ own.T, own @ positions @ own.T, share)
                    assert again == pytest.approx(found, abs=0.01)
                    drawn = [self.inside(own @ words @ own.T, own @ one @ own.T, share) for one in turned]
                    assert np.mean(drawn) == pytest.approx(chance, abs=0.03)
                    assert np.mean((np.array(drawn) > low) & (np.array(drawn) < high)) > 0.8

    def test_of_the_tables_in_the_embeddings(self, minilm):
        weights = load_file(f"{minilm}/model.safetensors")
        words, positions = (
            np.cov(weights[f"embeddings.{name}_embeddings.weight"].astype(float), rowvar=False, bias=True)
            for name in ("word", "position")
        )
        for row in rows("tables", "embeddings"):
            again = self.inside(words, positions, row["share"])
            assert again == pytest.approx(row["positions_in_words"]["median"], abs=1e-3)

    def test_of_the_sentences(self, arrays):
        random = np.random.default_rng(1)
        changes = dict(zip(arrays["sentence_kinds"], arrays["sentence_changes"]))
        for kind, own in FOUND["answers"]["order"]["sentences"].items():
            drawn = changes[kind][random.integers(60, size=(4000, 60))].mean(1)
            assert changes[kind].mean() == pytest.approx(own["text"], rel=1e-4)
            assert np.quantile(drawn, [0.025, 0.975]) == pytest.approx(own["interval"], rel=0.05)
