"""The arrays of answers.py give the numbers again, with NumPy alone and the checkpoint's weights."""

import json

import answers
import numpy as np
import pytest
import what_positions_do
from fresh_process import ROOT
from safetensors.numpy import load_file


FOUND = json.loads(what_positions_do.NUMBERS.read_text(encoding="utf-8"))
SHARES = (0.5, 0.8, 0.9, 0.95)


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(what_positions_do.ARRAYS) as file:
        return dict(file)


def rows(part: str, *spaces: str, layer: int = 1) -> list[dict]:
    found = FOUND["answers"]["subspaces"][part]
    return [row for row in found if row["space"] in spaces and row["layer"] == layer]


def test_the_arrays_are_those_that_the_page_names(arrays):
    page = (ROOT / "research" / "what_positions_do" / "README.md").read_text(encoding="utf-8")
    assert {*arrays} == {*answers.ARRAYS}
    assert all(f"- `{name}`: " in page for name in arrays)


@pytest.mark.slow
class TestFiguresAgain:
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
