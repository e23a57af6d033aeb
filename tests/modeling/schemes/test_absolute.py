"""absolute is the stock class to the bit, and says so where its table ends; none does not know where tokens are."""

import pytest
import tiny
import torch
from torch import nn

from hf_posenc import position_parameters


# Those whose checkpoints have absolute positions and no others; and those that write text.
FAMILIES = [name for name, config in tiny.FAMILIES.items() if config.family.native_scheme == "absolute"]
DECODERS = [name for name in FAMILIES if "AutoModelForCausalLM" in tiny.FAMILIES[name].auto_classes]


def pair(stock: type[nn.Module], family: str, **overrides) -> tuple[nn.Module, nn.Module]:
    """A stock model, and the variant `absolute` of its class with the same weights."""
    torch.manual_seed(0)
    reference = stock(tiny.stock_config(family, **overrides)).eval()
    assert type(reference) is stock
    head = stock.__name__.removeprefix(tiny.stock_config(family).__class__.__name__.removesuffix("Config"))
    model = tiny.variant_class(family, head)(tiny.variant_config(family, position_scheme="absolute", **overrides))
    assert isinstance(model, stock) and type(model) is not stock
    model.load_state_dict(reference.state_dict())
    return reference, model.eval()


def tensors(output) -> list[torch.Tensor]:
    """All tensors of a model's output; hidden states and attentions come as tuples of them."""
    found = []
    for value in output.values():
        found.extend([value] if isinstance(value, torch.Tensor) else value)
    assert found
    return found


def assert_same_bits(reference: nn.Module, model: nn.Module, inputs: dict) -> None:
    with torch.no_grad():
        theirs, ours = reference(**inputs), model(**inputs)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(a, b) for a, b in zip(tensors(theirs), tensors(ours), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_of_a_family_computes_the_bits_of_stock(family):
    for stock in tiny.heads_that_compute(family):
        reference, model = pair(stock, family)
        inputs = tiny.inputs(family=family)
        if "MultipleChoice" in stock.__name__:
            inputs = {name: value[None] for name, value in inputs.items()}
        assert_same_bits(reference, model, inputs)
        assert not position_parameters(model)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_input_gives_the_bits_of_stock(family, backend):
    stock = next(c for c in tiny.heads(family) if c.__name__.endswith("Model") and "LMHead" not in c.__name__)
    reference, model = pair(stock, family, type_vocab_size=2, attn_implementation=backend)
    full = 64 - model.config.first_position
    everything = tiny.inputs(family=family, padding="left") | {
        "token_type_ids": torch.arange(12).expand(3, -1) % 2,
        "position_ids": torch.arange(12).flip(0).expand(3, -1) + 7,
        "output_hidden_states": True,
        "output_attentions": backend == "eager",
    }
    width = model.embeddings.word_embeddings.embedding_dim
    for inputs in (
        tiny.inputs(family=family, padding=None),
        tiny.inputs(family=family, padding="left"),
        tiny.inputs(family=family, length=full),
        {"input_ids": tiny.inputs(family=family)["input_ids"]},
        {"inputs_embeds": torch.randn(2, 9, width)},
        everything,
    ):
        assert_same_bits(reference, model, inputs)


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_with_a_cache_gives_the_bits_of_stock(family):
    head = "LMHeadModel" if family == "bert" else "ForCausalLM"
    stock = next(c for c in tiny.heads(family) if c.__name__.endswith(head))
    reference, model = pair(stock, family, is_decoder=True)
    input_ids = tiny.inputs(family=family, padding=None)["input_ids"]
    outputs = []
    for each in (reference, model):
        with torch.no_grad():
            prompt = each(input_ids[:, :7], use_cache=True)
            outputs.append(each(input_ids[:, 7:], **{tiny.CACHE: getattr(prompt, tiny.CACHE)}).logits)
    assert torch.equal(*outputs)


def test_a_cache_does_not_lead_past_the_table():
    model = tiny.build("absolute", head="LMHeadModel", is_decoder=True)
    input_ids = tiny.inputs(batch=1, length=64)["input_ids"]
    with torch.no_grad():
        cache = getattr(model(input_ids, use_cache=True), tiny.CACHE)
        with pytest.raises(ValueError, match="65 tokens"):
            model(input_ids[:, :1], **{tiny.CACHE: cache})


@pytest.mark.parametrize("family", FAMILIES)
def test_none_commutes_with_every_permutation(family):
    inputs = tiny.inputs(family=family, length=20) | {"token_type_ids": torch.arange(20).expand(3, -1) // 10}
    overrides = {"type_vocab_size": 2}
    for seed in range(4):
        order = torch.randperm(20, generator=torch.manual_seed(seed))
        permuted = {name: value[:, order] for name, value in inputs.items()}
        differences = {}
        for scheme in ("none", "absolute"):
            model = tiny.build(scheme, family=family, **overrides)
            with torch.no_grad():
                straight = model(**inputs).last_hidden_state[:, order]
                differences[scheme] = tiny.difference_where_attended(
                    straight, model(**permuted).last_hidden_state, permuted["attention_mask"]
                )
        assert differences["none"] < 1e-5
        assert differences["absolute"] > 1e-3


def test_none_has_neither_parameters_nor_the_stock_table():
    model, stock = tiny.build("none"), tiny.build("absolute")
    gone = set(stock.state_dict()) - set(model.state_dict())
    assert gone == {"embeddings.position_embeddings.weight"}
    assert set(model.state_dict()) <= set(stock.state_dict())
    assert not position_parameters(model)


def strided(family: str, scheme: str = "absolute", stride: int = 4, rows: int = 60) -> nn.Module:
    """A variant whose table has so many rows and positions a stride."""
    first = tiny.variant_config(family).first_position
    return tiny.build(scheme, family, max_position_embeddings=rows + first, position_stride=stride)


def with_every_row(model: nn.Module, stride: int) -> nn.Module:
    """The same model without a stride, of its table every so many rows."""
    config, state = model.config, model.state_dict()
    first, key = config.first_position, config.family.table_key
    state[key] = torch.cat([state[key][:first], state[key][first::stride]])
    sizes = {"max_position_embeddings": len(state[key])}
    plain = type(model)(tiny.variant_config(config.stock_model_type, position_scheme=config.position_scheme, **sizes))
    plain.load_state_dict(state)
    return plain.eval()


@tiny.cross(
    sizes=[(3, 4), (15, 4), (16, 3), (20, 3), (21, 2), (31, 1), (60, 1)],
    family=tiny.FAMILIES,
    where=lambda sizes, family: family in ("bert", "roberta", "mpnet") or sizes in ((16, 3), (21, 2)),
)
def test_positions_are_a_stride_apart_as_long_as_the_table_reaches(sizes, family):
    length, stride = sizes
    model = strided(family, tiny.FAMILIES[family].family.native_scheme)
    plain = with_every_row(model, stride)
    for inputs in (
        tiny.inputs(family=family, length=length, padding=None),
        {"inputs_embeds": torch.randn(2, length, model.embeddings.word_embeddings.embedding_dim)},
        {
            "input_ids": tiny.inputs(2, length, family, padding=None)["input_ids"],
            "position_ids": torch.arange(length).flip(0)[None] + model.config.first_position,
        },
    ):
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs)[0], plain(**inputs)[0], atol=1e-5, rtol=0)
    ids = torch.arange(length)[None]
    if stride > 1:
        other = with_every_row(model, 1)
        with torch.no_grad():
            assert (model(ids + 5)[0] - other(ids + 5)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_stride_of_embedded_tokens_does_not_depend_on_others_in_their_batch(family):
    model = strided(family, tiny.FAMILIES[family].family.native_scheme)
    batch = tiny.inputs(4, 17, family)
    with torch.no_grad():
        expected = model(**batch)[0]
        embedded = model.get_input_embeddings()(batch["input_ids"])
        found = model(inputs_embeds=embedded, attention_mask=batch["attention_mask"])[0]
    assert tiny.difference_where_attended(found, expected, batch["attention_mask"]) < 1e-5


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_stride_of_a_sequence_does_not_depend_on_others_in_its_batch(family, padding):
    model = strided(family, tiny.FAMILIES[family].family.native_scheme)
    batch = tiny.inputs(4, 17, family, padding)  # with 17, 15, 13 and 11 tokens
    follows = model.config.family.positions_follow_padding
    with torch.no_grad():
        together = model(**batch)[0]
        for row, mask in enumerate(batch["attention_mask"].bool()):
            if padding == "left" and not follows:  # positions are slots, as in stock: to its last one each has 17
                alone = {name: value[row : row + 1] for name, value in batch.items()}
            else:
                alone = {"input_ids": batch["input_ids"][row, mask][None]}
            expected = model(**alone)[0][0][-int(mask.sum()) :] if padding == "left" else model(**alone)[0][0]
            torch.testing.assert_close(together[row, mask], expected[: int(mask.sum())], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_stride_is_traced_with_any_length():
    model = strided("bert")
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=60)}
    example = tiny.inputs(3, 12)
    program = torch.export.export(model, (), example, dynamic_shapes=dict.fromkeys(example, shape)).module()
    for length in (5, 17, 60):
        inputs = tiny.inputs(2, length)
        torch.testing.assert_close(program(**inputs)[0], model(**inputs)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"is_decoder": True}, "decoder"),
        ({"position_every_layer": True}, "position_every_layer"),
        ({"position_scheme": "absolute+tupe"}, "tupe"),
        ({"position_stride": 65}, "rows of the position embedding matrix"),
    ],
)
def test_what_cannot_have_a_stride_says_so(flags, said):
    with pytest.raises(ValueError, match=f"position_stride.*{said}"):
        tiny.variant_config(**{"position_scheme": "absolute", "position_stride": 4} | flags)
