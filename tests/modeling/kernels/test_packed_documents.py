"""Promise 7: documents in a row, told apart by a mask of pairs, compute what each computes alone, wherever padding lies."""

import pytest
import tiny
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, StaticCache

from hf_posenc.modeling.schemes.table import SCHEMES


COMPOSITES = ["absolute+t5", "alibi+rope", "tupe+t5", "fire+cable"]
ALL = [*SCHEMES, *COMPOSITES]
BACKENDS = ["eager", "sdpa", "flex_attention"]
# What padding may attend to, in the masks that people make: nothing, itself, all padding, every token.
OF_PADDING = ["nothing", "itself", "padding", "tokens"]
LENGTH = 24
PADDING = -1
TOLERANCE = 1e-10


def random_documents(seed: int, batch: int = 3) -> torch.Tensor:
    """The document of each token, (batch, LENGTH), -1 at padding: documents of one to eight tokens, and padding inside and between.

    In the last row, tokens of two documents stand between each other.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (batch, LENGTH), generator=generator)
    documents = torch.stack([torch.arange(LENGTH).repeat_interleave(row)[:LENGTH] for row in lengths])
    documents[-1] = torch.randint(0, 2, (LENGTH,), generator=generator)
    documents[torch.rand(batch, LENGTH, generator=generator) < 0.3] = PADDING
    return documents


def pairs_of(documents: torch.Tensor, of_padding: str, is_causal: bool) -> torch.Tensor:
    """bool (batch, 1, query, key), which tokens may attend to which."""
    are_tokens = documents != PADDING
    pairs = (documents[:, :, None] == documents[:, None]) & are_tokens[:, None]
    padding = ~are_tokens[:, :, None]
    if of_padding == "itself":
        pairs = pairs | (padding & torch.eye(LENGTH, dtype=torch.bool))
    if of_padding == "padding":
        pairs = pairs | (padding & ~are_tokens[:, None])
    if of_padding == "tokens":
        pairs = pairs | (padding & are_tokens[:, None])
    return (pairs.tril() if is_causal else pairs)[:, None]


def as_taken_by(backend: str, pairs: torch.Tensor):
    if backend == "sdpa":
        return pairs
    if backend == "eager":
        return torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    return create_block_mask(lambda b, h, q, k: pairs[b, 0, q, k], len(pairs), None, LENGTH, LENGTH, device="cpu")


def alone(model, input_ids: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """What each document of a row computes by itself, (batch, LENGTH, hidden); zeros at padding."""
    output = torch.zeros(*documents.shape, tiny.SIZES["hidden_size"], dtype=torch.float64)
    for row, own in enumerate(documents):
        for document in own.unique():
            places = (own == document).nonzero()[:, 0]
            if document != PADDING:
                output[row, places] = model(input_ids[row : row + 1, places], use_cache=False).last_hidden_state[0]
    return output


def places_of(documents: torch.Tensor, first: int) -> torch.Tensor:
    """Position ids: what number a token is in its document, whatever stands between."""
    same = (documents[:, :, None] == documents[:, None]).tril()
    return same.sum(-1) - 1 + first


@tiny.cross(
    scheme=ALL,
    backend=BACKENDS,
    of_padding=OF_PADDING,
    family=["bert", "roberta"],
    decoder=[False, True],
    path=tiny.PATHS,
    strength=1,
    indirect=("path",),
)
@torch.no_grad()
def test_documents_with_padding_inside_and_between_compute_what_they_compute_alone(
    scheme, backend, of_padding, family, decoder, path
):
    model = tiny.build(scheme, family, attn_implementation=backend, is_decoder=decoder).double()
    documents, input_ids = random_documents(seed=0), tiny.inputs(length=LENGTH, padding=None)["input_ids"]
    mask = as_taken_by(backend, pairs_of(documents, of_padding, decoder))
    given = {"position_ids": places_of(documents, model.config.first_position), "attention_mask": mask}
    with torch.compiler.set_stance("force_eager"):
        packed = model(input_ids, **given, use_cache=False).last_hidden_state
    model.set_attn_implementation("eager")
    expected = alone(model, input_ids, documents)
    assert tiny.difference_where_attended(packed, expected, documents != PADDING) < TOLERANCE


# Schemes that look at what stands between tokens, or at how much there is.
@pytest.mark.parametrize("seed", range(5))
@tiny.cross(
    scheme=["cable", "fire"], of_padding=OF_PADDING, decoder=[False, True], path=tiny.PATHS, indirect=("path",)
)
def test_so_they_do_wherever_padding_lies_and_their_gradients_too(seed, scheme, of_padding, decoder, path):
    flags = {"position_two_sums": bool(seed % 2)} if scheme == "cable" else {}
    model = tiny.build(scheme, is_decoder=decoder, **flags).double()
    with torch.no_grad():
        for layer in model.encoder.layer:
            if scheme == "fire":
                layer.attention.self.fire_length.weight.fill_(0.004)  # so that most documents are longer
    documents, input_ids = random_documents(seed), tiny.inputs(length=LENGTH, padding=None, seed=seed)["input_ids"]
    are_tokens = (documents != PADDING)[..., None]
    weights = torch.randn(3, LENGTH, 32, dtype=torch.float64, generator=torch.manual_seed(seed)) * are_tokens
    given = {"position_ids": places_of(documents, 0), "attention_mask": pairs_of(documents, of_padding, decoder)}
    packed = model(input_ids, **given, use_cache=False).last_hidden_state
    expected = alone(model, input_ids, documents)
    assert ((packed - expected) * are_tokens).abs().max() < TOLERANCE
    parameters = [p for name, p in model.named_parameters() if not name.startswith("pooler")]
    found = torch.autograd.grad((packed * weights).sum(), parameters)
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-8)


@tiny.cross(scheme=ALL, backend=BACKENDS, decoder=[False, True], path=tiny.PATHS, strength=1, indirect=("path",))
@torch.no_grad()
def test_one_text_with_holes_computes_the_same_by_a_mask_of_pairs_and_by_token(scheme, backend, decoder, path):
    """Where no positions are given, a token's is its index, padding counted in, with either mask."""
    model = tiny.build(scheme, attn_implementation=backend, is_decoder=decoder).double()
    input_ids = tiny.inputs(length=LENGTH, padding=None)["input_ids"]
    kept = torch.rand(3, LENGTH, generator=torch.manual_seed(0)) < 0.7
    kept[:, 0] = torch.tensor([True, False, True])
    documents = torch.where(kept, 0, PADDING)
    with torch.compiler.set_stance("force_eager"):
        by_token = model(input_ids, attention_mask=kept.long(), use_cache=False).last_hidden_state
        for of_padding in OF_PADDING:
            mask = as_taken_by(backend, pairs_of(documents, of_padding, decoder))
            by_pairs = model(input_ids, attention_mask=mask, use_cache=False).last_hidden_state
            assert tiny.difference_where_attended(by_pairs, by_token, kept) < TOLERANCE, of_padding


@tiny.cross(scheme=["cable", "fire", "t5", "rope"], kind=["dynamic", "static"], backend=["eager", "sdpa"])
@torch.no_grad()
def test_a_cache_goes_on_with_either_mask(scheme, kind, backend):
    model = tiny.build(scheme, attn_implementation=backend, is_decoder=True).double()
    input_ids = tiny.inputs(length=LENGTH, padding=None)["input_ids"]
    kept = torch.rand(3, LENGTH, generator=torch.manual_seed(1)) < 0.7
    whole = model(input_ids, attention_mask=kept.long(), use_cache=False).last_hidden_state
    pairs, found = pairs_of(torch.where(kept, 0, PADDING), "nothing", is_causal=True), []
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=LENGTH)
    for start, stop in ((0, 9), (9, 20), (20, 21), (21, LENGTH)):
        mask = pairs[:, :, start:stop, : stop if kind == "dynamic" else LENGTH]
        given = {"attention_mask": as_taken_by(backend, mask), tiny.CACHE: cache, "use_cache": True}
        found.append(model(input_ids[:, start:stop], **given).last_hidden_state)
    assert tiny.difference_where_attended(torch.cat(found, 1), whole, kept) < TOLERANCE


@torch.no_grad()
def test_a_window_in_the_mask_leaves_a_text_one_document():
    """Pairs far from each other do not see each other there, and belong together all the same."""
    kept = torch.rand(1, LENGTH, generator=torch.manual_seed(2)) < 0.8
    places = torch.arange(LENGTH)
    near = (places[:, None] - places).abs() <= 3
    pairs = (kept[:, None] & kept[:, :, None] & near)[:, None]
    model = tiny.build("cable", attn_implementation="eager").double()
    input_ids = tiny.inputs(batch=1, length=LENGTH, padding=None)["input_ids"]
    found = model(input_ids, attention_mask=pairs).last_hidden_state
    windowed = tiny.build("cable", attn_implementation="eager", position_window=7, position_global_every=0).double()
    windowed.load_state_dict(model.state_dict())
    expected = windowed(input_ids, attention_mask=kept.long()).last_hidden_state
    assert tiny.difference_where_attended(found, expected, kept) < TOLERANCE


@torch.no_grad()
def test_a_mask_that_differs_from_head_to_head_has_the_tokens_of_all():
    heads = torch.ones(1, 4, LENGTH, LENGTH, dtype=torch.bool)
    heads[:, 0, :, 5] = False
    heads[..., 9] = False
    model = tiny.build("cable", attn_implementation="eager").double()
    input_ids = tiny.inputs(batch=1, length=LENGTH, padding=None)["input_ids"]
    kept = heads.any(1).any(1)
    by_head = model(input_ids, attention_mask=heads, output_attentions=True).attentions[0]
    by_token = model(input_ids, attention_mask=kept.long(), output_attentions=True).attentions[0]
    torch.testing.assert_close(by_head[:, 1:], by_token[:, 1:], atol=TOLERANCE, rtol=0)
