"""Decoders: what `generate` finds with a cache is what the model says of whole sequences, without cache and padding."""

import functools
import warnings

import pytest
import torch
from tiny import CACHE, SIZES, aligned, build, cross, inputs, stock_config
from transformers import BertModel, DynamicCache, EncoderDecoderConfig, EncoderDecoderModel, StaticCache

import hf_posenc
from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.table import SCHEMES


COMPOSITES = ["absolute+relative", "alibi+rope", "tupe+t5"]
TOLERANCE = 2e-5  # on logits of standard deviation 1
NEW_TOKENS = 5

EVERY_SCHEME = [*SCHEMES, *COMPOSITES]


def decoder(scheme: str, family: str = "bert", **overrides) -> torch.nn.Module:
    """A tiny decoder with a language modeling head, its position parameters filled."""
    head = "LMHeadModel" if family == "bert" else "ForCausalLM"
    return build(scheme, family, head, is_decoder=True, **overrides)


def generate(model: torch.nn.Module, **settings):
    return model.generate(
        **{
            "max_new_tokens": NEW_TOKENS,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
            "return_dict_in_generate": True,
            "output_logits": True,
            **settings,
        }
    )


@torch.no_grad()
def choose_by_hand(model: torch.nn.Module, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest next token, time and again, the whole sequence read anew for each; the tokens and their logits."""
    logits = []
    for _ in range(NEW_TOKENS):
        logits.append(model(input_ids, use_cache=False).logits[:, -1])
        input_ids = torch.cat([input_ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
    return input_ids[:, -NEW_TOKENS:], torch.stack(logits, dim=1)


@torch.no_grad()
def read_in_pieces(model: torch.nn.Module, batch: dict, cache, lengths: list[int]) -> torch.Tensor:
    """Logits of a batch that is read piece by piece, what was read being in the cache."""
    logits, start = [], 0
    for length in lengths:
        end = start + length
        output = model(
            batch["input_ids"][:, start:end],
            attention_mask=batch["attention_mask"][:, :end],
            **{CACHE: cache},
            use_cache=True,
        )
        logits.append(output.logits)
        start = end
    return torch.cat(logits, dim=1)


@functools.cache
@torch.no_grad()
def assert_positions_are_felt(scheme: str, family: str = "bert") -> None:
    """Without positions the logits would be off by more than 100 times what the comparisons allow."""
    if scheme == "none":
        return
    model, without = decoder(scheme, family), decoder("none", family)
    assert not without.load_state_dict(model.state_dict(), strict=False).missing_keys
    batch = inputs(padding=None, family=family)
    assert (model(**batch).logits - without(**batch).logits).abs().max() > 100 * TOLERANCE


@cross(scheme=EVERY_SCHEME, use_cache=[True, False], rest=pytest.mark.slow)
@pytest.mark.slow
def test_greedy_search_of_a_left_padded_batch_is_what_one_would_choose_by_hand(scheme, use_cache):
    assert_positions_are_felt(scheme)
    model, batch = decoder(scheme), inputs(padding="left")
    output = generate(model, **batch, use_cache=use_cache)
    logits = torch.stack(output.logits, dim=1)
    for row, mask in enumerate(batch["attention_mask"]):
        tokens, expected = choose_by_hand(model, batch["input_ids"][row, mask.bool()][None])
        assert output.sequences[row, -NEW_TOKENS:].tolist() == tokens[0].tolist()
        torch.testing.assert_close(logits[row], expected[0], atol=TOLERANCE, rtol=0)


@cross(
    scheme=["sinusoidal", "t5", "tupe", "absolute+rope"],
    family=["roberta", "xlm-roberta", "camembert", "electra"],
    strength=1,
)
def test_families_that_count_positions_from_elsewhere_generate_alike(scheme, family):
    assert_positions_are_felt(scheme, family)
    model, batch = decoder(scheme, family), inputs(padding="left", family=family)
    output = generate(model, **batch, pad_token_id=1)
    logits = torch.stack(output.logits, dim=1)
    for row, mask in enumerate(batch["attention_mask"]):
        tokens, expected = choose_by_hand(model, batch["input_ids"][row, mask.bool()][None])
        assert output.sequences[row, -NEW_TOKENS:].tolist() == tokens[0].tolist()
        torch.testing.assert_close(logits[row], expected[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "flags",
    [{"position_window": 4}, {"position_combine": "gate"}, {"position_every_layer": True}],
    ids=lambda flags: "-".join(flags),
)
def test_absolute_with_other_options_generates_what_its_own_forward_computes(flags):
    model, input_ids = decoder("absolute", "roberta", **flags), inputs(padding=None, family="roberta")["input_ids"]
    output = generate(model, input_ids=input_ids, pad_token_id=1)
    tokens, expected = choose_by_hand(model, input_ids)
    assert torch.equal(output.sequences[:, -NEW_TOKENS:], tokens)
    torch.testing.assert_close(torch.stack(output.logits, dim=1), expected, atol=TOLERANCE, rtol=0)


def test_absolute_generates_what_stock_generates():
    # transformers counts from 0 here, where RoBERTa's own forward counts from padding_idx + 1.
    model = decoder("absolute", "roberta")
    stock = type(model).__mro__[2](stock_config("roberta", is_decoder=True)).eval()
    stock.load_state_dict(model.state_dict())
    batch = inputs(padding="left", family="roberta")
    output, expected = (generate(m, **batch, pad_token_id=1) for m in (model, stock))
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", EVERY_SCHEME)
def test_beam_search_finds_the_same_with_and_without_cache(scheme):
    model, batch = decoder(scheme), inputs(padding="left")
    settings = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
    cached, plain = (generate(model, **batch, **settings, use_cache=use_cache) for use_cache in (True, False))
    assert cached.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores, atol=TOLERANCE, rtol=0)
    # Beams are reordered in the cache on the way: the second best of a row is no continuation of the best.
    assert any(first != second for first, second in cached.sequences.view(3, 2, -1).tolist())


@cross(scheme=EVERY_SCHEME, lengths=[[1] * 12, [5, 1, 4, 2]], kind=["dynamic", "static"], rest=pytest.mark.slow)
def test_reading_through_a_cache_gives_what_the_whole_sequence_gives(scheme, lengths, kind):
    model, batch = decoder(scheme), inputs(padding=None)
    assert_positions_are_felt(scheme)
    # A static cache is longer than what is read: its empty slots are keys, too.
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=20)
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
    torch.testing.assert_close(read_in_pieces(model, batch, cache, lengths), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", EVERY_SCHEME)
def test_generating_with_a_static_cache_gives_the_same_tokens(scheme):
    model, batch = decoder(scheme), inputs(padding="left")
    static, dynamic = (generate(model, **batch, cache_implementation=kind) for kind in ("static", "dynamic"))
    assert isinstance(getattr(static, CACHE), StaticCache)
    assert static.sequences.tolist() == dynamic.sequences.tolist()
    torch.testing.assert_close(torch.stack(static.logits), torch.stack(dynamic.logits), atol=TOLERANCE, rtol=0)


def encoder_decoder(encoder_scheme: str, decoder_scheme: str) -> EncoderDecoderModel:
    """A tiny encoder and a decoder that attends to it, their position parameters filled."""
    encoder = build(encoder_scheme)
    decoding = decoder(decoder_scheme, add_cross_attention=True, seed=1)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder.config, decoding.config, decoder_start_token_id=2, pad_token_id=0
    )
    return EncoderDecoderModel(config=config, encoder=encoder, decoder=decoding).eval()


pairs = pytest.mark.parametrize(
    "schemes", [("t5", "t5"), ("rope", "relative_key"), ("absolute+deberta", "alibi"), ("tupe", "absolute+relative")]
)


@pairs
def test_an_encoder_decoder_of_two_variants_trains_every_position_parameter(schemes):
    model, batch = encoder_decoder(*schemes).train(), inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(**batch, labels=batch["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    for name, parameter in position_parameters(model).items():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pairs
def test_an_encoder_decoder_of_two_variants_generates_and_comes_back_from_disk(schemes, tmp_path):
    model, batch = encoder_decoder(*schemes), inputs()
    cached, plain = (generate(model, **batch, use_cache=use_cache) for use_cache in (True, False))
    assert cached.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits), atol=TOLERANCE, rtol=0)

    model.save_pretrained(tmp_path)
    reloaded = EncoderDecoderModel.from_pretrained(tmp_path).eval()
    assert type(reloaded.encoder) is hf_posenc.PosencBertModel
    assert type(reloaded.decoder) is hf_posenc.PosencBertLMHeadModel
    assert (reloaded.encoder.config.position_scheme, reloaded.decoder.config.position_scheme) == schemes
    state, expected = reloaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected)
    again = generate(aligned(reloaded), **batch)
    assert torch.equal(torch.stack(again.logits), torch.stack(cached.logits))


@pytest.mark.parametrize("scheme", ["t5", "relative", "alibi", "rope"])
@torch.no_grad()
def test_positions_stay_out_of_cross_attention(scheme):
    """What the encoder says may come in any order: the decoder's schemes know only the decoder's own tokens."""
    model = decoder(scheme, add_cross_attention=True)
    batch = inputs(padding=None)
    states = torch.randn(3, 9, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    expected = model(**batch, encoder_hidden_states=states).logits
    permuted = model(**batch, encoder_hidden_states=states[:, order]).logits
    torch.testing.assert_close(permuted, expected, atol=TOLERANCE, rtol=0)
    assert (model(**batch, encoder_hidden_states=states.flip(0)).logits - expected).abs().max() > 100 * TOLERANCE


def test_an_encoder_decoder_is_made_of_stock_checkpoints_with_a_flag_for_each(tmp_path):
    BertModel(stock_config()).save_pretrained(tmp_path)
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(
        tmp_path, tmp_path, encoder_position_scheme="t5", decoder_position_scheme="absolute+rope"
    )
    assert type(model.encoder) is hf_posenc.PosencBertModel
    assert model.encoder.config.position_scheme == "t5"
    assert type(model.decoder) is hf_posenc.PosencBertLMHeadModel
    assert model.decoder.config.position_scheme == "absolute+rope"
    assert model.decoder.config.is_decoder and model.decoder.config.add_cross_attention


@cross(
    scheme=["absolute", "absolute+t5", "rope"],
    family=["bert", "roberta", "xlm-roberta", "camembert", "electra"],
    strength=1,
)
def test_a_cache_is_taken_by_every_name_that_stock_takes_it_by_and_none_is_swallowed(family, scheme):
    model = decoder(scheme, family)
    ids = inputs(batch=2, length=9, family=family, padding=None)["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits
        for name in {"past_key_values", CACHE}:
            output = model(ids[:, :5], use_cache=True)
            assert output.keys() >= {CACHE}
            with warnings.catch_warnings():
                if name == CACHE:
                    warnings.simplefilter("error", FutureWarning)
                rest = model(ids[:, 5:], **{name: getattr(output, CACHE)}, use_cache=True)
            torch.testing.assert_close(rest.logits, whole[:, 5:], rtol=1e-4, atol=1e-4)
            assert (model(ids[:, 5:]).logits - whole[:, 5:]).abs().max() > 0.01


@pytest.mark.parametrize("scheme", ["absolute+t5", "tupe"])
def test_another_padding_id_of_the_config_moves_no_positions(scheme):
    model, ids = decoder(scheme, "roberta"), inputs(padding=None, family="roberta")["input_ids"]
    ids = ids.where(ids > 2, 3)  # none of them padding
    expected = generate(model, input_ids=ids, pad_token_id=1)
    model.config.pad_token_id = 2
    found = generate(model, input_ids=ids, pad_token_id=2)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


def test_nor_of_embeddings_that_are_given():
    model = build("absolute", family="roberta", position_stride=4)
    given = {"inputs_embeds": torch.randn(2, 8, model.config.hidden_size), "attention_mask": torch.ones(2, 8)}
    expected = model(**given)[0]
    model.config.pad_token_id = 2
    assert torch.equal(model(**given)[0], expected)
