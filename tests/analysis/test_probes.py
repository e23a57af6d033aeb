"""Linear probes find the positions that are there, and none where there are none."""

import numpy as np
import pytest
import torch
from reading import documents, subject, tokenizer
from tiny import FAMILIES, build, inputs, stock_config
from transformers import BertModel

from hf_posenc.analysis import Probes, describe_probes, plot_probes, probes, study
from hf_posenc.analysis.probes import MODEL, SHUFFLED, TARGETS, WITHOUT, Sample, split_by_document, without_positions
from hf_posenc.analysis.ridge import PENALTIES, Split, fit_ridge
from hf_posenc.analysis.windows import cut


def planted(noise: float = 1.0, count: int = 900) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Split]:
    """Features in which a target lies along one direction: features, target, direction, split."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(12, generator=generator).double()
    target = torch.randint(0, 100, (count, 1), generator=generator).double()
    features = noise * torch.randn(count, 12, generator=generator).double() + target * direction
    part = torch.arange(count) % 3
    return features, target, direction, Split(part == 0, part == 1, part == 2)


class TestRidge:
    def test_finds_a_planted_direction(self):
        features, target, direction, split = planted()
        fit = fit_ridge(features, target, target, split)
        assert fit.r2.item() > 0.999 and fit.error.item() < 1
        assert torch.cosine_similarity(fit.weights[:, 0], direction, dim=0) > 0.98

    def test_is_scikit_learns_ridge_with_the_penalty_that_it_chose(self):
        from sklearn.linear_model import Ridge

        features, target, _, split = planted(noise=200.0)
        targets = torch.cat([target, target[torch.randperm(len(target))]], dim=1)
        fit = fit_ridge(features, targets, targets, split)
        assert fit.penalty[0] != fit.penalty[1]
        train, test = (part.numpy() for part in (split.train, split.test))
        scale = features[split.train].std(0)
        scaled = (features / scale).numpy()
        for column, penalty in enumerate(fit.penalty):
            reference = Ridge(alpha=float(penalty) * train.sum()).fit(scaled[train], targets[train, column])
            assert np.allclose(reference.coef_, (fit.weights[:, column] * scale).numpy(), rtol=1e-8)
            assert np.isclose(reference.score(scaled[test], targets[test, column]), fit.r2[column].item())
            error = np.abs(reference.predict(scaled[test]) - targets[test, column].numpy()).mean()
            assert np.isclose(error, fit.error[column].item())

    def test_chooses_the_penalty_that_is_best_on_the_validation_part(self, monkeypatch):
        features, target, _, split = planted(noise=200.0, count=60)
        best = fit_ridge(features, target, target, split)
        scores = {}
        for penalty in PENALTIES:
            monkeypatch.setattr("hf_posenc.analysis.ridge.PENALTIES", (penalty,))
            on_validation = Split(split.train, split.validation, split.validation)
            scores[penalty] = fit_ridge(features, target, target, on_validation).r2.item()
        assert best.penalty.item() == max(scores, key=scores.get) and len({*scores.values()}) > 1

    def test_shuffled_labels_are_measured_against_the_true_ones(self):
        features, target, _, split = planted()
        assert fit_ridge(features, target[torch.randperm(len(target))], target, split).r2.item() < 0.05

    def test_the_parts_of_its_r2_are_those_of_the_examples(self):
        features, target, _, split = planted(noise=200.0)
        fit = fit_ridge(features, target, target, split)
        assert torch.isclose(1 - fit.squares.sum() / fit.around.sum(), fit.r2[0])
        assert fit.squares.shape == fit.around.shape == (int(split.test.sum()), 1)

    def test_features_that_never_vary_do_no_harm(self):
        features, target, _, split = planted()
        features[:, 3] = 7.0
        fit = fit_ridge(features, target, target, split)
        assert fit.r2.item() > 0.99 and fit.weights[3].item() == 0


def with_planted_positions(scheme: str = "absolute"):
    """A tiny model whose table of positions is a straight line."""
    model = build(scheme)
    with torch.no_grad():
        rows = torch.arange(model.embeddings.table.weight.shape[0])[:, None] - 16
        model.embeddings.table.weight.copy_(rows / 80 * torch.randn(model.embeddings.table.weight.shape[1]))
    return study(model, tokenizer(), name="planted")


class TestProbes:
    def test_find_positions_that_are_planted_and_none_without_them(self):
        found = probes(with_planted_positions(), documents(40), length=32, windows=150)
        assert found.layers == [0, 1, 2] and set(found.r2) == set(TARGETS)
        for target in ("position", "signed distance"):
            assert found.r2[target][MODEL][0] > 0.8
            assert max(found.r2[target][WITHOUT]) < 0.1 and max(found.r2[target][SHUFFLED]) < 0.1
        assert found.r2["distance"][MODEL][0] > 0.2 and max(found.r2["distance"][WITHOUT]) < 0.1
        assert found.error["position"][MODEL][0] < found.chance["position"] / 3

    @pytest.mark.parametrize(
        "family", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "bert")]
    )
    def test_are_at_chance_where_there_are_no_positions(self, family):
        found = probes(subject("none", family), documents(40), length=32, windows=150)
        assert all(np.abs(values).max() < 0.1 for series in found.r2.values() for values in series.values())
        assert np.allclose(found.error["position"][MODEL], found.chance["position"], rtol=0.1)

    def test_the_interval_is_around_r2(self):
        found = probes(subject("absolute"), documents(40), length=24)
        for target in TARGETS:
            low, high = found.interval[target][MODEL].T
            assert (low <= found.r2[target][MODEL]).all() and (found.r2[target][MODEL] <= high).all()
            assert (low < high).all()

    def test_parts_have_no_document_in_common(self):
        document = torch.arange(23).repeat_interleave(5)
        split = split_by_document(document, torch.Generator().manual_seed(0))
        parts = [set(document[part].tolist()) for part in vars(split).values()]
        assert sum(map(len, parts)) == 23 == len(set.union(*parts))
        assert [len(part) for part in parts] == [15, 4, 4]

    def test_no_document_holds_a_paragraph_of_another(self):
        first, second = documents(2, length=300)
        shared = documents(1, length=300, seed=7)[0]
        texts = [f"{first}\n\n{shared}", f"{shared}\n \n{second}"]
        windows = cut(subject("none"), texts, 32, 100, torch.Generator().manual_seed(0))
        ids = {0: set(), 1: set()}
        for row, number in zip(windows.input_ids.tolist(), windows.document.tolist()):
            ids[number] |= {*zip(row[1:], row[2:-1], row[3:-1])}
        assert ids[0] and ids[1] and len(ids[0] & ids[1]) < 10

    def test_long_documents_are_read_from_a_random_place_on(self):
        """Where a word stands in its window has nothing to do with where it stands in its document."""

        def starts(length: int) -> list[int]:
            texts, model = documents(12, length=length), subject("none")
            windows = cut(model, texts, 32, 12, torch.Generator().manual_seed(0))
            assert windows.document.tolist() == [*range(12)]
            found = []
            for text, row in zip(texts, windows.input_ids.tolist()):
                tokens, words = model.tokenizer.convert_ids_to_tokens(row)[1:-1], text.split()
                [start] = [place for place in range(len(words)) if words[place : place + 30] == tokens]
                found.append(start)
            return found

        assert len({*starts(200)}) > 6 and max(starts(200)) < 32
        assert starts(60) == [0] * 12, "so short a document would lose too much"

    def test_the_error_by_chance_is_that_of_the_median_of_what_was_trained_on(self):
        model, texts = subject("none"), documents(10)
        found = probes(model, texts, length=32, windows=20, tokens=8)
        generator = torch.Generator().manual_seed(0)
        pieces = cut(model, texts, 32, 20, generator)
        targets = (sample := Sample.draw(pieces, 8, generator)).targets().numpy()
        split = split_by_document(pieces.document.repeat_interleave(sample.tokens.shape[1]), generator)
        train, test = targets[split.train], targets[split.test]
        middle = np.quantile(train, 0.5, axis=0, method="inverted_cdf")
        assert np.allclose([*found.chance.values()], np.abs(test - middle).mean(0))

    @pytest.mark.parametrize(
        ("r2", "said"),
        [
            ([0.98, 0.97, 0.95], "the position survives the layers"),
            ([0.98, 0.97, 0.5], "the position fades in the layers"),
            ([0.98, 0.5, 0.05], "the position does not survive the layers"),
            ([0.02, 0.05, 0.01], "the position is not known in any of the layers"),
        ],
    )
    def test_the_sentence_says_whether_it_survives(self, r2, said):
        series = {MODEL: np.array(r2), WITHOUT: np.zeros(3), SHUFFLED: np.zeros(3)}
        by_target = dict.fromkeys(TARGETS, series)
        chance = dict.fromkeys(TARGETS, 9.0)
        assert said in describe_probes(Probes("m", [0, 1, 2], by_target, by_target, by_target, chance, 32, {}, {}))

    def test_what_they_are_compared_with_is_the_same_model_without_positions(self, tmp_path):
        BertModel(stock_config()).save_pretrained(tmp_path)
        bare = without_positions(study(tmp_path))
        expected = BertModel.from_pretrained(tmp_path, position_scheme="none")
        batch = {"input_ids": inputs(padding=None)["input_ids"]}
        with torch.no_grad():
            assert torch.allclose(
                bare.model(**batch).last_hidden_state, expected(**batch).last_hidden_state, atol=1e-6
            )

    def test_it_computes_in_float32_too_where_weights_are_in_half_precision(self, tmp_path):
        BertModel(stock_config()).to(torch.bfloat16).save_pretrained(tmp_path)
        subject = study(tmp_path)
        assert subject.model.dtype == without_positions(subject).model.dtype == torch.float32

    def test_say_and_draw_what_they_found(self):
        found = probes(with_planted_positions(), documents(20), length=32, windows=60)
        sentence = describe_probes(found)
        assert "planted" in sentence and f"R² {found.r2['position'][MODEL][0]:.2f}" in sentence
        lines = plot_probes(found).axes[0].lines
        assert any(np.array_equal(line.get_ydata(), found.r2["position"][MODEL]) for line in lines)
        assert found.to_dict()["r2"]["position"][MODEL] == found.r2["position"][MODEL].tolist()


class TestErrors:
    def test_few_documents(self):
        with pytest.raises(ValueError, match="at least 5 long enough documents are needed, got 4"):
            probes(subject("absolute"), [*documents(4), "tom bit a dog"], length=32)

    def test_short_texts(self):
        with pytest.raises(ValueError, match="too short: no document has the 30 tokens"):
            probes(subject("absolute"), ["tom bit a dog"], length=32)

    def test_no_tokenizer(self):
        with pytest.raises(ValueError, match="has no tokenizer to read"):
            probes(study(build("absolute")), documents())

    def test_a_window_without_room_for_words(self):
        with pytest.raises(ValueError, match="length must be at least 4"):
            probes(subject("absolute"), documents(), length=3)
