"""What moves when words change places or all positions move, and what must not."""

import numpy as np
import pytest
import torch
from reading import documents, subject, tokenizer
from tiny import FAMILIES, build
from tokenizers.processors import Sequence

from hf_posenc.analysis import (
    describe_order_sensitivity,
    describe_phase_shift,
    order_sensitivity,
    phase_shift,
    plot_order_sensitivity,
    plot_phase_shift,
    study,
)
from hf_posenc.analysis.order import REVERSED, SHUFFLED, reorder
from hf_posenc.analysis.sentences import MUTUAL, NAMED, NAMED_MUTUAL, ROLES, SENTENCES, Reordering
from hf_posenc.analysis.windows import cut
from hf_posenc.modeling.schemes.base import AttentionScheme
from hf_posenc.modeling.schemes.table import SCHEMES


PURE = [name for name, scheme in SCHEMES.items() if issubclass(scheme, AttentionScheme) and scheme.pure_relative]
OTHERS = [name for name in SCHEMES if name not in (*PURE, "none")]


every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ("bert", "mpnet") else pytest.mark.slow) for name in FAMILIES],
)


def few_of(*schemes: str) -> list:
    """Of the attention's and of the embeddings' schemes some in the core."""
    return [
        pytest.param(name, marks=() if name in ("absolute", "t5", "rope", "none", "tupe") else pytest.mark.slow)
        for name in schemes
    ]


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """1 - cosine, in NumPy."""
    first, second = first.double().numpy(), second.double().numpy()
    return 1 - first @ second / np.sqrt((first @ first) * (second @ second))


class TestReorder:
    def test_words_move_with_all_their_tokens_and_special_tokens_stay(self):
        assert reorder([None, 0, 0, 1, 2, None], (2, 0, 1)).tolist() == [0, 4, 1, 2, 3, 5]
        assert reorder([None, 3, 4, 4, None, None], (1, 0)).tolist() == [0, 2, 3, 1, 4, 5]


class TestOrderSensitivity:
    @every_family
    def test_is_nothing_without_positions(self, family):
        """Token vectors of `none` permute with the input, to 1e-5."""
        found = order_sensitivity(subject("none", family), documents())
        changes = [*found.reordered.values(), *(kind.change for kind in found.sentences.values())]
        assert all(change.largest < 1e-5 and change.tokens < 1e-6 and change.text < 1e-6 for change in changes)
        assert max(*found.swapped, *found.others, *found.text) < 1e-6
        assert "does not know the order of words" in describe_order_sensitivity(found)

    def test_is_nothing_where_all_positions_are_alike(self):
        model = build("absolute")
        with torch.no_grad():
            model.embeddings.table.weight.copy_(model.embeddings.table.weight[:1].clone())
        found = order_sensitivity(study(model, tokenizer()), documents())
        assert all(change.largest < 1e-5 for change in found.reordered.values())

    @pytest.mark.parametrize("scheme", few_of(*PURE, *OTHERS))
    def test_is_something_with_any_scheme(self, scheme):
        found = order_sensitivity(subject(scheme), documents())
        assert all(change.largest > 1e-3 and change.tokens > 1e-5 for change in found.reordered.values())
        assert max(found.swapped) > 1e-5 and max(found.text) > 1e-6
        assert "Shuffling" in describe_order_sensitivity(found)

    def test_a_swap_is_what_it_says(self):
        """Of two words a given number of words apart, by a forward pass on the words written the other way round."""
        model = subject("absolute")
        text = documents(2, length=60)
        found = order_sensitivity(model, text, length=16, count=2, seed=3)
        draw = torch.Generator().manual_seed(3)
        windows = cut(model, text, 16, 2, torch.Generator().manual_seed(3))
        torch.randperm(14, generator=draw), torch.randperm(14, generator=draw)  # those of the shuffled words
        states = model.observe(windows.input_ids).hidden_states[-1]
        unrelated = np.mean(
            [distance(states[row, 1 + i], states[1 - row, 1 + (i - 1) % 14]) for row in (0, 1) for i in range(14)]
        )
        assert np.isclose(unrelated, found.unrelated_tokens)
        assert found.distances == [1, 2, 4, 8]
        for index, apart in enumerate(found.distances):
            swapped, others = [], []
            for row, ids in enumerate(windows.input_ids):
                first = 1 + int(torch.randint(0, 14 - apart, (1,), generator=draw))
                second, ids = first + apart, ids.clone()
                ids[first], ids[second] = ids[second].clone(), ids[first].clone()
                after = model.observe(ids[None]).hidden_states[-1][0]
                swapped += [distance(states[row, first], after[second]), distance(states[row, second], after[first])]
                others += [distance(states[row, i], after[i]) for i in range(1, 15) if i not in (first, second)]
            assert np.isclose(np.mean(swapped) / unrelated, found.swapped[index], rtol=1e-4)
            assert np.isclose(np.mean(others) / unrelated, found.others[index], rtol=1e-4)

    def test_sentences_are_read_as_they_are_written(self, monkeypatch):
        """And their change is the mean over them, with an interval around it."""
        model = subject("absolute")
        texts = [Reordering("Tom bit a dog", (2, 3, 1, 0)), Reordering("dog bit a a Tom", (4, 1, 2, 3, 0))]
        monkeypatch.setattr("hf_posenc.analysis.order.SENTENCES", {ROLES: texts, MUTUAL: texts[1:]})
        found = order_sensitivity(model, documents())
        one = found.sentences[ROLES]
        assert one.example == ("Tom bit a dog", "a dog bit Tom") and one.count == 2
        tom, dog = (
            model.observe(torch.tensor(model.tokenizer([text])["input_ids"])).hidden_states[-1][0]
            for text in one.example
        )
        text = distance(tom.mean(0), dog.mean(0)) / found.unrelated_texts
        assert np.isclose(text, one.texts[0], rtol=1e-4)
        assert np.isclose(one.change.text, one.texts.mean()) and one.texts[1] == found.sentences[MUTUAL].texts[0]
        low, high = one.change.text_interval
        assert low <= one.change.text <= high
        tokens = np.mean([distance(tom[i], dog[j]) for i, j in ((1, 4), (2, 3), (3, 1), (4, 2))])
        other = found.sentences[MUTUAL].change.tokens
        assert np.isclose((tokens / found.unrelated_tokens + other) / 2, one.change.tokens, rtol=1e-4)

    def test_sentences_come_with_controls_that_say_the_same(self):
        """As many as sixty of each; where a role changes hands and where it does not, the same words move to the same places."""
        assert {len(kind) for kind in SENTENCES.values()} == {60}
        for kind, control in ((ROLES, MUTUAL), (NAMED, NAMED_MUTUAL)):
            for own, other in zip(SENTENCES[kind], SENTENCES[control]):
                assert own.order == other.order
                differing = [(a, b) for a, b in zip(own.text.split(), other.text.split()) if a != b]
                assert len(differing) == 1
        for kind in SENTENCES.values():
            assert len({sentence.text for sentence in kind}) == 60
            for sentence in kind:
                assert sorted(sentence.reordered.split()) == sorted(sentence.text.split())
                assert sentence.reordered != sentence.text

    def test_intervals_narrow_with_the_number_of_texts(self):
        few, many = (order_sensitivity(subject("absolute"), documents(40), count=count) for count in (5, 40))
        widths = [np.diff(found.reordered[SHUFFLED].text_interval)[0] for found in (few, many)]
        assert widths[1] < widths[0]
        assert all(low <= own <= high for own, (low, high) in zip(many.swapped, many.swapped_interval))

    def test_is_drawn_as_it_is(self):
        found = order_sensitivity(subject("absolute"), documents())
        left, right = plot_order_sensitivity(found).axes
        assert np.array_equal(left.lines[0].get_ydata(), found.swapped)
        heights = [bar.get_height() for bar in right.patches]
        kinds = len(found.sentences)
        assert heights[kinds : kinds + 2] == [found.reordered[name].tokens for name in (REVERSED, SHUFFLED)]
        assert heights[:kinds] == [kind.change.tokens for kind in found.sentences.values()]

    def test_one_text_is_an_error(self):
        with pytest.raises(ValueError, match="only one text is long enough"):
            order_sensitivity(subject("absolute"), documents(1, length=50), length=48)


class TestPhaseShift:
    def test_texts_of_unknown_words_alone_are_an_error(self):
        with pytest.raises(ValueError, match="are all words unknown"):
            phase_shift(subject("absolute"), ["unheard " * 200] * 4, length=24)

    @pytest.mark.parametrize("scheme", few_of(*PURE, "none"))
    def test_is_nothing_in_schemes_of_distances_alone(self, scheme):
        """To 1e-5; [CLS] alone staying behind is a change of distances."""
        found = phase_shift(subject(scheme), documents(), length=24)
        assert found.shifts == [1, 4, 16, 64, 256, 488]
        assert all(change.largest < 1e-5 and change.tokens < 1e-6 for change in found.all)
        assert (max(change.tokens for change in found.but_first) > 1e-5) == SCHEMES[scheme].reads_positions
        assert "wherever it begins" in describe_phase_shift(found)

    @every_family
    def test_is_nothing_for_distances_in_every_family(self, family):
        found = phase_shift(subject("t5+rope", family), documents(), length=24)
        assert all(change.largest < 1e-5 for change in found.all)

    @pytest.mark.parametrize("scheme", few_of(*OTHERS))
    def test_is_something_in_the_others(self, scheme):
        found = phase_shift(subject(scheme), documents(), length=24)
        assert min(change.tokens for change in found.all) > 1e-5
        assert "matters" in describe_phase_shift(found)

    @every_family
    def test_is_what_other_position_ids_change(self, family):
        model = subject("absolute", family)
        found = phase_shift(model, documents(), shifts=[3], length=24, count=4)
        ids = cut(model, documents(), 24, 4, torch.Generator().manual_seed(0)).input_ids
        first = model.sizes.first_position
        moved = torch.arange(24) + first + 3
        stays = moved.clone()
        stays[0] = first
        before = model.observe(ids).hidden_states[-1]
        for position_ids, [change] in ((moved, found.all), (stays, found.but_first)):
            after = model.observe(ids, position_ids=position_ids[None]).hidden_states[-1]
            tokens = np.mean([distance(before[row, i], after[row, i]) for row in range(4) for i in range(1, 23)])
            assert np.isclose(tokens / found.unrelated_tokens, change.tokens, rtol=1e-4)
            assert np.isclose((after - before).abs().max().item(), change.largest)

    @pytest.mark.parametrize("names", [{}, {"cls_token": "<s>", "sep_token": "</s>"}])
    def test_the_first_token_has_the_name_that_the_tokenizer_has_for_it(self, names):
        found = phase_shift(study(build("absolute"), tokenizer(**names), name="it"), documents(), length=24)
        first = names.get("cls_token", "[CLS]")
        assert found.first == first and f"If {first} stays" in describe_phase_shift(found)
        legend = [text.get_text() for text in plot_phase_shift(found).axes[0].get_legend().get_texts()]
        assert legend == [f"{first} is shifted too", f"{first} stays"]

    def test_a_first_token_that_is_a_word_has_none(self):
        words = tokenizer()
        words.backend_tokenizer.post_processor = Sequence([])
        found = phase_shift(study(build("absolute"), words, name="it"), documents(), length=24)
        assert found.first == "the first token" and "[CLS]" not in describe_phase_shift(found)

    def test_says_its_sample_and_its_intervals(self):
        found = phase_shift(subject("absolute"), documents(), length=24)
        worst = max(found.all, key=lambda change: change.tokens)
        low, high = worst.tokens_interval
        said = describe_phase_shift(found)
        assert f"{worst.tokens:.1%} ({low:.1%} to {high:.1%})" in said and f"{found.texts} texts of 24 tokens" in said

    def test_one_document_has_no_interval(self):
        found = phase_shift(subject("absolute"), ["\n".join(documents())], length=24)
        said = describe_phase_shift(found)
        assert np.isnan(found.all[0].tokens_interval).all()
        assert found.to_dict()["all"][0]["tokens_interval"] == [None, None]
        assert "interval" not in said and "% to" not in said
        assert f"({found.texts} texts of 24 tokens of one document)" in said
        plot_phase_shift(found).canvas.draw()

    def test_a_shift_beyond_the_table_is_an_error(self):
        with pytest.raises(ValueError, match="a shift of 41 leads beyond the 64 positions"):
            phase_shift(subject("absolute"), documents(), shifts=[1, 41], length=24)

    def test_is_drawn_as_it_is(self):
        found = phase_shift(subject("absolute"), documents(), length=24)
        axis = plot_phase_shift(found).axes[0]
        assert list(axis.lines[0].get_ydata()) == [change.tokens for change in found.all]
        assert list(axis.lines[1].get_ydata()) == [change.tokens for change in found.but_first]
