"""hf_posenc.sentence: what a model of sentence-transformers makes of long texts in chunks is what a loop makes of them."""

import copy
import json
import math

import pytest
import tiny
import torch
from sklearn import neighbors
from tokenizers import processors
from transformers import AutoModel, AutoTokenizer

import hf_posenc


library = pytest.importorskip("sentence_transformers", minversion="6.0")
from sentence_transformers import models  # noqa: E402

from hf_posenc import sentence  # noqa: E402


WORDS = "the old river ran past a small house where nobody had been for years and its doors were open".split()
TEXTS = [
    "a house",
    " ".join(WORDS * 2),
    "",
    " ".join(WORDS * 9 + ["river"] * 20),
    " ".join(WORDS[::-1] * 5),
]


@pytest.fixture
def model(minilm):
    return library.SentenceTransformer(minilm, device="cpu")


def pieces_of(ids, size, overlap):
    """Chunks in a loop."""
    room = size - 2
    if len(ids) <= size:
        return [ids]
    inner = ids[1:-1]
    if overlap:
        number = math.ceil(2 * len(inner) / room)
        edges = [len(inner) * part // number for part in range(number + 1)]
        return [[ids[0], *inner[edges[i] : edges[i + 2]], ids[-1]] for i in range(number - 1)]
    number = math.ceil(len(inner) / room)
    edges = [len(inner) * part // number for part in range(number + 1)]
    return [[ids[0], *inner[edges[i] : edges[i + 1]], ids[-1]] for i in range(number)]


@torch.no_grad()
def expected(folder, text, size, overlap):
    """The normalised embedding of a text, pooled in float64 loops."""
    encoder = AutoModel.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text, truncation=False, verbose=False)["input_ids"]
    means = [
        encoder(torch.tensor([piece])).last_hidden_state[0].double().mean(dim=0).tolist()
        for piece in pieces_of(ids, size, overlap)
    ]
    width = len(means[0])
    pooled = [sum(own[i] for own in means) / len(means) for i in range(width)]
    return torch.tensor(pooled, dtype=torch.float64) / math.sqrt(sum(one * one for one in pooled))


@tiny.cross(size=[16, 33, 64], overlap=[False, True], strength=2)
def test_embeddings_are_those_of_loops_whatever_is_in_the_batch(model, minilm, size, overlap, monkeypatch):
    monkeypatch.setattr(sentence, "PASS_TOKENS", 200)  # several passes
    found = sentence.in_chunks(model, size, overlap).encode(TEXTS, convert_to_tensor=True)
    for text, own in zip(TEXTS, found, strict=True):
        wanted = expected(minilm, text, size, overlap)
        torch.testing.assert_close(own.double(), wanted, atol=2e-5, rtol=0)


def test_texts_that_fit_keep_their_embeddings_and_the_end_of_long_ones_counts(model):
    short = ["a house", "the old river"]
    long = " ".join(WORDS * 40)
    before = model.encode([*short, long, f"{long} river of gold"])
    assert (before[2] == before[3]).all()  # cut off
    after = sentence.in_chunks(model).encode([*short, long, f"{long} river of gold"])
    assert after[:2] == pytest.approx(before[:2], abs=1e-6)
    assert abs(after[2] - after[3]).max() > 1e-3


def test_saved_and_loaded_it_reads_as_far(model, tmp_path):
    text = " ".join(WORDS * 60)
    chunked = sentence.in_chunks(model, 48, overlap=False)
    before = chunked.encode([text, "a house"])
    chunked.save(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "modules.json").read_text())
    assert saved[0]["type"] == "hf_posenc.sentence.ChunkedTransformer"
    loaded = library.SentenceTransformer(str(tmp_path / "saved"), trust_remote_code=True, device="cpu")
    assert type(loaded[0]) is sentence.ChunkedTransformer
    assert (loaded[0].chunk_size, loaded[0].overlap, loaded.max_seq_length) == (48, False, sentence.UNCUT)
    assert loaded.encode([text, "a house"]) == pytest.approx(before, abs=1e-6)
    assert loaded.get_embedding_dimension() == len(before[0])
    said = str(hf_posenc.inspect(loaded))
    assert "reads chunks of 48" in said and "a longer text is an error" not in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_texts_that_fit_keep_their_embeddings_in_half_precision(dtype, minilm):
    model = library.SentenceTransformer(minilm, device="cpu", model_kwargs={"dtype": dtype})
    texts = [" ".join(WORDS[:number]) for number in range(1, len(WORDS))]
    before = [model.encode(text, convert_to_tensor=True) for text in texts]
    sentence.in_chunks(model)
    assert all(torch.equal(model.encode(text, convert_to_tensor=True), own) for text, own in zip(texts, before))


@torch.no_grad()
def test_a_variant_reads_chunks_with_its_scheme(minilm, tmp_path):
    variant = AutoModel.from_pretrained(minilm, position_scheme="t5")
    tiny.fill_positions(variant)
    variant.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path)
    modules = [sentence.Transformer(str(tmp_path)), sentence.Pooling(384), models.Normalize()]
    model = library.SentenceTransformer(modules=modules, device="cpu")
    assert hf_posenc.position_parameters(model[0].model)
    found = sentence.in_chunks(model, 32, overlap=False).encode(TEXTS[3], convert_to_tensor=True).double()
    torch.testing.assert_close(found, expected(tmp_path, TEXTS[3], 32, False), atol=2e-5, rtol=0)
    without = expected(minilm, TEXTS[3], 32, False)
    assert (found - without).abs().max() > 100 * 2e-5


@torch.no_grad()
def completed(folder, text, length, normalizes=True):
    """The stored embedding of the first tokens and the mean of the rest's chunks, in float64 loops."""
    encoder = AutoModel.from_pretrained(folder).eval()
    start, *inner, end = AutoTokenizer.from_pretrained(folder)(text, truncation=False, verbose=False)["input_ids"]

    def mean(ids):
        return encoder(torch.tensor([ids])).last_hidden_state[0].double().mean(dim=0)

    def unit(vector):
        return vector / vector.square().sum().sqrt() if normalizes else vector

    begun, rest = inner[: length - 2], inner[length - 2 :]
    stored = unit(mean([start, *begun, end]))
    if not rest:
        return stored
    chunks = [mean(piece) for piece in pieces_of([start, *rest, end], length, False)]
    own = unit(sum(chunks) / len(chunks))
    return unit((len(begun) * stored + len(rest) * own) / len(inner))


@pytest.mark.parametrize("normalizes", [True, False])
def test_stored_embeddings_are_completed_by_what_was_cut_off(model, minilm, normalizes):
    if not normalizes:
        model = library.SentenceTransformer(modules=[*model.children()][:2], device="cpu")
    model.max_seq_length = 40
    stored = model.encode(TEXTS)
    before = stored.copy()
    found = sentence.complete_embeddings(model, TEXTS, stored, batch_size=2)
    assert found.dtype == stored.dtype and (stored == before).all()
    longer = [number for number, text in enumerate(TEXTS) if len(model.tokenizer(text)["input_ids"]) > 40]
    assert longer == [3, 4]
    for number, text in enumerate(TEXTS):
        wanted = completed(minilm, text, 40, normalizes)
        torch.testing.assert_close(torch.tensor(found[number]).double(), wanted, atol=2e-5, rtol=0)
        assert (found[number] == before[number]).all() == (number not in longer)
    # The model reads as before, and tensors in half precision stay so.
    assert (model.encode(TEXTS) == before).all() and model.max_seq_length == 40
    half = sentence.complete_embeddings(model, TEXTS, torch.tensor(stored).half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), torch.tensor(found), atol=3e-3, rtol=0)


def test_where_beginnings_are_cut_off_these_are_read(model, minilm):
    model.max_seq_length = 40
    model.tokenizer.truncation_side = "left"
    start, *inner, end = AutoTokenizer.from_pretrained(minilm)(TEXTS[3], truncation=False, verbose=False)["input_ids"]
    encoder = model[0].model.eval()

    @torch.no_grad()
    def unit(pieces):
        means = [
            encoder(torch.tensor([[start, *piece, end]])).last_hidden_state[0].double().mean(0) for piece in pieces
        ]
        return torch.nn.functional.normalize(sum(means) / len(means), dim=0)

    rest = [[*piece] for piece in pieces_of([start, *inner[:-38], end], 40, False)]
    merged = 38 * unit([inner[-38:]]) + (len(inner) - 38) * unit([piece[1:-1] for piece in rest])
    found = sentence.complete_embeddings(model, TEXTS[3:4], model.encode(TEXTS[3:4]))
    wanted = torch.nn.functional.normalize(merged, dim=0)
    torch.testing.assert_close(torch.tensor(found[0]).double(), wanted, atol=2e-5, rtol=0)


def test_words_that_are_unknown_are_no_special_tokens(minilm):
    """Of a tokenizer that puts nothing around a text."""
    model = library.SentenceTransformer(minilm, device="cpu")
    model.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    text = f"☃ {' '.join(WORDS * 2)} ☃"
    ids = model.tokenizer(text)["input_ids"]
    assert ids[0] == ids[-1] == model.tokenizer.unk_token_id
    edges = [len(ids) * part // 3 for part in range(4)]
    assert 10 < len(ids) / 3 <= 16
    with torch.no_grad():
        means = [
            model[0].model.eval()(torch.tensor([ids[one:two]]))[0][0].mean(0) for one, two in zip(edges, edges[1:])
        ]
    found = sentence.in_chunks(model, 16, overlap=False).encode(text, convert_to_tensor=True)
    torch.testing.assert_close(found, torch.nn.functional.normalize(sum(means), dim=0), atol=2e-5, rtol=0)


def test_an_empty_text_has_an_embedding_where_the_tokenizer_adds_nothing(minilm):
    """It has no tokens then."""
    model = library.SentenceTransformer(minilm, device="cpu")
    model.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    texts = ["a house", "", "the old river"]
    before = model.encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(sentence.complete_embeddings(model, texts, before), before)
    torch.testing.assert_close(sentence.in_chunks(model, 16).encode(texts, convert_to_tensor=True), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("query_length", 40), ("document_length", 40), ("processing_kwargs", {"text": {"max_length": 40}})],
)
def test_other_settings_that_cut_texts_off_are_refused(name, value, model):
    setattr(model[0], name, value)
    for refused in (sentence.in_chunks, lambda one: sentence.complete_embeddings(one, TEXTS, one.encode(TEXTS))):
        with pytest.raises(ValueError, match=f"cuts texts off at 40 tokens by {name}"):
            refused(model)
    setattr(model[0], name, {"text": {"padding": True}} if name == "processing_kwargs" else None)
    sentence.in_chunks(model)


def test_pairs_are_refused(model):
    pair = [("a small house", "the river")]
    model.encode(pair)
    with pytest.raises(ValueError, match="reads single texts, not pairs"):
        sentence.in_chunks(model).encode(pair)


def test_the_prompt_is_a_part_of_what_was_read(model, minilm):
    model.max_seq_length = 40
    model.prompts, model.default_prompt_name = {"query": "the doors of "}, "query"
    found = sentence.complete_embeddings(model, TEXTS[3:4], model.encode(TEXTS[3:4]))
    wanted = completed(minilm, f"the doors of {TEXTS[3]}", 40)
    torch.testing.assert_close(torch.tensor(found[0]).double(), wanted, atol=2e-5, rtol=0)
    without = sentence.complete_embeddings(model, TEXTS[3:4], model.encode(TEXTS[3:4], prompt=""), prompt="")
    torch.testing.assert_close(torch.tensor(without[0]).double(), completed(minilm, TEXTS[3], 40), atol=2e-5, rtol=0)


@pytest.mark.parametrize("normalizes", [True, False])
def test_embeddings_that_encode_has_cut_or_normalized_are_completed_alike(model, minilm, normalizes):
    """With a module that normalizes, and without one: `encode` normalizes what is left of a vector."""
    modules = [*model.children()] if normalizes else [*model.children()][:2]
    model = library.SentenceTransformer(modules=modules, device="cpu", truncate_dim=64)
    model.max_seq_length = 40
    if not normalizes:
        with torch.no_grad():  # far from a length of 1
            for parameter in model[0].model.encoder.layer[-1].output.LayerNorm.parameters():
                parameter *= 50
    whole = sentence.in_chunks(library.SentenceTransformer(minilm, device="cpu"), 40, overlap=False).encode(TEXTS[3:4])
    stored = model.encode(TEXTS, normalize_embeddings=True)
    found = sentence.complete_embeddings(model, TEXTS, stored)
    assert found.shape == (5, 64) and (found[:3] == stored[:3]).all()
    assert (found**2).sum(axis=1) == pytest.approx(1, abs=1e-5)
    before, after = (own[3] @ whole[0, :64] / math.sqrt((whole[0, :64] ** 2).sum()) for own in (stored, found))
    assert after > 0.99 > before
    plain = model.encode(TEXTS)
    assert sentence.complete_embeddings(model, TEXTS, plain).shape == (5, 64)


def test_an_index_of_nearest_neighbours_before_and_after(model):
    model.max_seq_length = 32
    beginning = " ".join(WORDS * 2)
    ends = ["a recipe for bread with salt and flour", "the planets of the sun and their moons", "rules of football"]
    texts = [f"{beginning} {end} {end}" for end in ends]
    stored, queries = model.encode(texts), model.encode(["how to bake bread", "Jupiter's moons", "a football match"])
    assert abs(stored - stored[0]).max() < 1e-6  # nothing of the ends is in the index
    index = neighbors.NearestNeighbors(n_neighbors=1, metric="cosine")
    found = index.fit(sentence.complete_embeddings(model, texts, stored)).kneighbors(queries, return_distance=False)
    assert found[:, 0].tolist() == [0, 1, 2]


def test_embeddings_of_others_are_not_completed(model):
    stored = model.encode(TEXTS[:2])
    for other in (stored[:1], stored[:, :5], stored.astype(int)):
        with pytest.raises(ValueError, match=r"embeddings must be numbers of \(2, 384\)"):
            sentence.complete_embeddings(model, TEXTS[:2], other)
    with pytest.raises(ValueError, match="mean Pooling that includes prompts"):
        sentence.complete_embeddings(sentence.in_chunks(model), TEXTS[:2], stored)


def test_lists_of_embeddings_are_taken_and_single_texts_are_not(model):
    texts = [TEXTS[0], TEXTS[3]]
    model.max_seq_length = 64
    stored = model.encode(texts, convert_to_numpy=False)
    assert isinstance(stored, list)
    found = sentence.complete_embeddings(model, texts, stored)
    torch.testing.assert_close(found, sentence.complete_embeddings(model, texts, torch.stack(stored)), atol=0, rtol=0)
    with pytest.raises(TypeError, match="texts must be a list of strings, got a string"):
        sentence.complete_embeddings(model, texts[0], stored[:1])


def test_what_is_given_stays_as_it_is(model):
    """A teacher, or a loss, may read the same texts again."""
    chunked = sentence.in_chunks(copy.deepcopy(model), 16)
    features = model.tokenize(TEXTS[:4])
    before = copy.deepcopy(features)
    first, second = (chunked(features)["sentence_embedding"] for _ in range(2))
    assert features.keys() == before.keys() and all(
        torch.equal(features[name], before[name]) for name in ("input_ids", "attention_mask")
    )
    assert torch.equal(first, second)
    torch.testing.assert_close(model(features)["sentence_embedding"], model(before)["sentence_embedding"])


def test_gradients_reach_every_chunk(model):
    chunked = sentence.in_chunks(model, 16).train()
    features = chunked.tokenize([TEXTS[1], TEXTS[3]])
    chunked(features)["sentence_embedding"].sum().backward()
    words = chunked[0].model.embeddings.word_embeddings.weight.grad
    used = torch.unique(chunked.tokenize([TEXTS[3]])["input_ids"])
    assert (words[used].abs().sum(dim=1) > 0).all()


def test_what_cannot_be_read_in_chunks_is_refused(model, minilm):
    with pytest.raises(TypeError, match="must be a SentenceTransformer, got BertModel"):
        sentence.in_chunks(model[0].model)
    for size in (7, 513, True, 12.5):
        with pytest.raises(ValueError, match="chunk_size must be"):
            sentence.in_chunks(model, size)
    for length in (None, 0, -1, 7, True, 64.5, "64"):
        with pytest.raises(ValueError, match="max_seq_length must be"):
            sentence.in_chunks(model, max_seq_length=length)
    first = library.SentenceTransformer(modules=[sentence.Transformer(minilm), sentence.Pooling(384, "cls")])
    apart = library.SentenceTransformer(
        modules=[sentence.Transformer(minilm), sentence.Pooling(384, include_prompt=False)]
    )
    for other in (first, apart, sentence.in_chunks(model)):
        with pytest.raises(ValueError, match="mean Pooling that includes prompts"):
            sentence.in_chunks(other)
