"""Pipelines for long texts: windows against loops, a single pass where a text fits, and no token lost or moved."""

import random

import pytest
import tiny
import tiny_checkpoints
import torch
from transformers import (
    AutoModel,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DebertaV2Config,
    DebertaV2ForTokenClassification,
    pipeline,
)

import hf_posenc
from hf_posenc import inspection
from hf_posenc.pipelines import LongFeatureExtractionPipeline, LongTokenClassificationPipeline
from hf_posenc.pipelines.windows import most_central, windows_of


WORDS = tiny_checkpoints.WORDS
LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}


def word_ids(draw: random.Random, number: int, longest: int) -> list[int | None]:
    found: list[int | None] = []
    word = 0
    while len(found) < number:
        found += [None] if draw.random() < 0.1 else [word] * draw.randint(1, longest)
        word += 1
    return found[:number]


@pytest.mark.parametrize("longest", [1, 3, 9, 30])
@pytest.mark.parametrize("overlap", [0, 5, 10, 19])
def test_windows_divide_no_word_and_answer_where_they_are_most_central(longest, overlap):
    draw, size = random.Random(longest * 100 + overlap), 20
    for _ in range(60):
        words = word_ids(draw, draw.randint(1, 120), longest)
        windows = windows_of(words, size, overlap)
        assert windows[0][0] == 0 and windows[-1][1] == len(words)
        assert all(0 < end - start <= size for start, end in windows)
        for (start, end), (begin, stop) in zip(windows, windows[1:]):
            assert start < begin <= end < stop  # all is read, and each window reads something new
        if 2 * longest <= size - overlap:
            assert all(end - begin >= overlap for (_, end), (begin, _) in zip(windows, windows[1:]))
        if longest <= size:
            for edge in {edge for window in windows for edge in window} - {0, len(words)}:
                assert words[edge] is None or words[edge] != words[edge - 1]
        owners = most_central(words, windows)
        for token, (word, owner) in enumerate(zip(words, owners, strict=True)):
            assert windows[owner][0] <= token < windows[owner][1]
            own = [token] if word is None else [n for n, one in enumerate(words) if one == word]
            if longest > size:
                continue
            assert {owners[n] for n in own} == {owner}
            context = [
                min(own[0] - start, end - 1 - own[-1]) if start <= own[0] and own[-1] < end else -1
                for start, end in windows
            ]
            assert context[owner] == max(context) and context.index(max(context)) == owner


@pytest.fixture(params=["bert", "roberta"])
def tagger(request, tmp_path):
    """A folder with a tagger of random weights that reads 32 tokens."""
    torch.manual_seed(0)
    entries = {"num_labels": 5, "id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}
    return tiny_checkpoints.save(tmp_path / "tagger", request.param, "ForTokenClassification", **entries)


def text(number: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=number))


def loaded(folder, kind=LongTokenClassificationPipeline, task="token-classification", **options):
    return pipeline(task, str(folder), pipeline_class=kind, device="cpu", **options)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_a_text_that_fits_gets_what_transformers_gives_it(strategy, tagger):
    usual = pipeline("token-classification", str(tagger), aggregation_strategy=strategy, device="cpu")
    long = loaded(tagger, aggregation_strategy=strategy)
    texts = [text(number, number) for number in (1, 5, 17, 29)] + [""]
    for own, expected in zip(long(texts), usual(texts), strict=True):
        assert own == expected or all(
            {**a, "score": None} == {**b, "score": None} and a["score"] == pytest.approx(b["score"], abs=1e-6)
            for a, b in zip(own, expected, strict=True)
        )
    assert any(usual(texts))


@torch.no_grad()
def scores_by_hand(folder, ids: list[int], size: int, overlap: int) -> list[list[float]]:
    """Of each inner token, by a pass over each window alone."""
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    inner = ids[1:-1]
    windows = windows_of([*range(len(inner))], size - 2, overlap)
    by_window = [model(torch.tensor([[ids[0], *inner[a:b], ids[-1]]])).logits[0, 1:-1].softmax(-1) for a, b in windows]
    found = []
    for token in range(len(inner)):
        context = [min(token - a, b - 1 - token) for a, b in windows]
        best = context.index(max(context))
        found.append(by_window[best][token - windows[best][0]].tolist())
    return found


@pytest.mark.parametrize(("window", "overlap"), [(32, 16), (32, 0), (20, 12)])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_long_texts_are_tagged_as_by_hand_whatever_is_in_the_batch(window, overlap, batch_size, tagger):
    long = loaded(tagger, window=window, overlap=overlap, ignore_labels=[], batch_size=batch_size)
    tokenizer = AutoTokenizer.from_pretrained(tagger)
    texts = [text(number, number) for number in (100, 3, 31, 250)]
    for one, tokens in zip(texts, long(texts), strict=True):
        expected = scores_by_hand(
            tagger, tokenizer(one, truncation=False, verbose=False)["input_ids"], window, overlap
        )
        assert [token["index"] for token in tokens] == [*range(1, len(expected) + 1)]
        assert "".join(one[token["start"] : token["end"]] for token in tokens) == one.replace(" ", "")
        for token, scores in zip(tokens, expected):
            assert token["score"] == pytest.approx(max(scores), abs=1e-5)
            assert token["entity"] == LABELS[scores.index(max(scores))]


@pytest.mark.parametrize("kind", [LongTokenClassificationPipeline, LongFeatureExtractionPipeline])
def test_a_batch_that_is_padded_on_the_left_gives_what_its_texts_give(kind, tmp_path):
    folder = tiny_checkpoints.save(tmp_path / "bert", "bert", "ForTokenClassification", num_labels=5)
    auto = AutoModelForTokenClassification if kind is LongTokenClassificationPipeline else AutoModel
    model = auto.from_pretrained(folder, position_scheme="t5").eval()
    tiny.fill_positions(model)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    long, texts = kind(model=model, tokenizer=tokenizer, window=24), [text(n, n) for n in (70, 5, 33)]
    options = {"return_tensors": True} if auto is AutoModel else {"ignore_labels": []}
    for own, expected in zip(long(texts, batch_size=4, **options), long(texts, **options), strict=True):
        if auto is AutoModel:
            torch.testing.assert_close(own, expected, atol=1e-5, rtol=0)
        else:
            assert [{**token, "score": None} for token in own] == [{**token, "score": None} for token in expected]
            assert [token["score"] for token in own] == pytest.approx([token["score"] for token in expected], abs=1e-5)


def test_tokens_far_from_edges_get_what_a_window_around_them_gives(tagger):
    """With windows that move by a token, each is in the middle of one."""
    long = loaded(tagger, window=21, overlap=18, ignore_labels=[])
    one = text(60)
    ids = AutoTokenizer.from_pretrained(tagger)(one, truncation=False, verbose=False)["input_ids"]
    model = AutoModelForTokenClassification.from_pretrained(tagger).eval()
    tokens = long(one)
    for token in range(9, 50):
        with torch.no_grad():
            logits = model(torch.tensor([[ids[0], *ids[1 + token - 9 : 1 + token + 10], ids[-1]]])).logits[0, 10]
        assert tokens[token]["score"] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)


def test_no_offset_is_lost_or_moved_in_texts_with_odd_characters(minilm):
    """1,000 texts, the tokens of which are those of the tokenizer."""
    model = AutoModelForTokenClassification.from_pretrained(minilm, num_labels=3)
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = type(model)(tiny.stock_config("bert", vocab_size=len(tokenizer), num_labels=3)).eval()
    long = LongTokenClassificationPipeline(
        model=model, tokenizer=tokenizer, device="cpu", window=24, ignore_labels=[], batch_size=64
    )
    draw = random.Random(0)
    odd = [
        "é",
        "ß",
        "漢字",
        "👩‍👩‍👧",
        "\u200b",
        "\n\n",
        "\t",
        "…",
        "—",
        "[SEP]",
        "[MASK]",
        "\x00",
        "İ",
        "ﬁ",
        "e\u0301",
        "donaudampf",
        "١٢",
        "\u202e",
        " ",
        ".",
        "'s",
    ]
    texts = ["".join(draw.choices([*odd, "word ", "the ", " in "], k=draw.randint(0, 90))) for _ in range(1000)]
    for one, tokens in zip(texts, long(texts), strict=True):
        encoding = tokenizer(one, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
        inner = [n for n, special in enumerate(encoding["special_tokens_mask"]) if not special]
        assert [token["index"] for token in tokens] == inner
        assert [(token["start"], token["end"]) for token in tokens] == [encoding["offset_mapping"][n] for n in inner]


def test_words_may_be_given(tagger):
    words = text(80).split()
    long = loaded(tagger, aggregation_strategy="simple")
    joined, split = long(" ".join(words)), long(words, is_split_into_words=True)
    split = split[0] if split and isinstance(split[0], list) else split
    assert split == joined and len(joined) > 5
    comma = long(words, is_split_into_words=True, delimiter=", ")
    comma = comma[0] if isinstance(comma[0], list) else comma
    whole = ", ".join(words)
    assert [whole[one["start"] : one["end"]].split(", ")[0] for one in comma] == [
        one["word"].split()[0] for one in joined
    ]


def test_a_generator_is_streamed_and_a_scheme_reads_further(tagger, tmp_path):
    model = AutoModelForTokenClassification.from_pretrained(tagger, position_scheme="alibi").eval()
    model.save_pretrained(tmp_path / "alibi")
    AutoTokenizer.from_pretrained(tagger, model_max_length=200).save_pretrained(tmp_path / "alibi")
    long = loaded(tmp_path / "alibi", ignore_labels=[])
    read = []

    def texts():
        for number in (150, 500):
            read.append(number)
            yield text(number)

    first = next(iter(long(texts())))
    assert read[:1] == [150] and len(first) == 150
    with torch.no_grad():
        ids = long.tokenizer(text(150), return_tensors="pt")
        expected = model(**ids).logits[0, 1:-1].softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor([float(token["score"]) for token in first]), expected, atol=1e-5, rtol=0)


def test_states_of_long_texts(tagger):
    long = loaded(tagger, LongFeatureExtractionPipeline, "feature-extraction")
    model, tokenizer = AutoModel.from_pretrained(tagger).eval(), AutoTokenizer.from_pretrained(tagger)
    short = tokenizer(text(12), return_tensors="pt")
    with torch.no_grad():
        expected = model(**short).last_hidden_state
    torch.testing.assert_close(long(text(12), return_tensors=True), expected, atol=1e-5, rtol=0)
    states = long([text(100), text(12)], return_tensors=True, batch_size=3)
    assert states[0].shape == (1, 102, expected.shape[-1]) and states[0].abs().sum(-1).min() > 0
    torch.testing.assert_close(states[1], expected, atol=1e-5, rtol=0)
    assert torch.tensor(long(text(12))).shape == expected.shape
    # The special tokens are those of the first window and of the last.
    ids = tokenizer(text(100), truncation=False, verbose=False)["input_ids"]
    with torch.no_grad():
        first, last = (
            model(torch.tensor([part])).last_hidden_state[0] for part in (ids[:31] + ids[-1:], ids[:1] + ids[-31:])
        )
    torch.testing.assert_close(states[0][0, 0], first[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(states[0][0, -1], last[-1], atol=1e-5, rtol=0)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"stride": 5}, ValueError, "stride belongs to the windows of Transformers: set overlap"),
            ({"window": 3}, ValueError, "window must be at least 4 tokens and at most"),
            ({"window": 5000}, ValueError, "the model's maximum, got 5000"),
            ({"window": 16, "overlap": 14}, ValueError, "overlap must be at least 0 and less than the 14 tokens"),
            ({"window": 8.0}, TypeError, "window must be a number of tokens, got 8.0"),
            ({"overlap": True}, TypeError, "overlap must be a number of tokens, got True"),
        ],
    )
    def test_wrong_sizes_are_said_when_the_pipeline_is_made_and_when_it_is_called(
        self, options, error, message, tagger
    ):
        with pytest.raises(error, match=message):
            loaded(tagger, **options)
        with pytest.raises(error, match=message):
            loaded(tagger)("w5 w6", **options)

    def test_words_are_said_to_be_words(self, tagger):
        with pytest.raises(ValueError, match="with is_split_into_words=False, a text must be a string, got list"):
            list(loaded(tagger)(one for one in [["w5", "w6"]]))


def test_a_model_that_leaves_padding_out(tagger):
    texts = [text(number, number) for number in (100, 3, 31, 250)]
    usual = loaded(tagger, ignore_labels=[], batch_size=8)(texts)
    model = AutoModelForTokenClassification.from_pretrained(tagger).eval()
    hf_posenc.unpad(model)
    packed = LongTokenClassificationPipeline(
        model=model, tokenizer=AutoTokenizer.from_pretrained(tagger), device="cpu", ignore_labels=[], batch_size=8
    )(texts)
    for own, expected in zip(packed, usual, strict=True):
        assert [one["entity"] for one in own] == [one["entity"] for one in expected]
        assert [one["score"] for one in own] == pytest.approx([one["score"] for one in expected], abs=1e-5)


def test_a_model_of_a_family_without_schemes_reads_long_texts_too():
    """Nothing is known here of where its positions end: the tokenizer says how long windows are."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = DebertaV2Config(
        vocab_size=tiny.SIZES["vocab_size"],
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        num_labels=3,
        **sizes,
    )
    model = DebertaV2ForTokenClassification(config).eval()
    long = LongTokenClassificationPipeline(
        model=model, tokenizer=tiny_checkpoints.tokenizer(), device="cpu", ignore_labels=[]
    )
    assert len(long(text(200))) == 200
    with pytest.raises(ValueError, match="window must be at least 4 tokens, got 3"):
        long(text(200), window=3)


def test_where_positions_end_is_asked_once(tagger, monkeypatch):
    asked = []
    longest = inspection.longest_sequence
    monkeypatch.setattr(inspection, "longest_sequence", lambda config: asked.append(config) or longest(config))
    long = loaded(tagger)
    long([text(number) for number in (100, 3, 31)], window=20)
    assert len(asked) == 1
