"""transformer_xl: equal to XLNet's attention and to the formula in loops, silent at the start, relative throughout."""

import math

import pytest
import tiny
import torch
from torch import nn
from transformers import BertModel, XLNetConfig, XLNetModel
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.table import build_schemes


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


TOLERANCE = 1e-5
# Room for the lengths that XLNet is compared at, and scores that do not saturate the softmax.
LONG = {"max_position_embeddings": 128, "initializer_range": 0.1}


def without_positions(model: nn.Module, inputs: dict) -> torch.Tensor:
    """The model's output with the scheme's parameters at zero."""
    zeros = {name: torch.zeros_like(parameter) for name, parameter in position_parameters(model).items()}
    with torch.no_grad():
        return torch.func.functional_call(model, zeros, kwargs=inputs).last_hidden_state


def first_attention(model: nn.Module, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the first self-attention, (batch, length, hidden), and what comes out of it."""
    attention, seen = model.encoder.layer[0].attention.self, []
    handle = attention.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen[0]


def as_xlnet(attention: nn.Module) -> XLNetRelativeAttention:
    """transformers' XLNet attention with the weights of a variant's, whose biases become 0: XLNet has none."""
    heads, head_dim = attention.num_attention_heads, attention.attention_head_size
    width = heads * head_dim
    reference = XLNetRelativeAttention(XLNetConfig(d_model=width, n_head=heads, dropout=0.0))
    pairs = {"q": attention.query, "k": attention.key, "v": attention.value, "r": attention.linear_pos}
    with torch.no_grad():
        for name, linear in pairs.items():
            # (out, in) -> (in, heads, head_dim)
            getattr(reference, name).copy_(linear.weight.t().reshape(width, heads, head_dim))
            if linear.bias is not None:
                linear.bias.zero_()
        reference.r_w_bias.copy_(attention.pos_bias_u.weight)
        reference.r_r_bias.copy_(attention.pos_bias_v.weight)
    return reference.eval()


@torch.no_grad()
def xlnet_output(attention: nn.Module, hidden_states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Output (batch, length, hidden) of XLNet's attention, before its output projection."""
    reference = as_xlnet(attention)
    model = XLNetModel(XLNetConfig(d_model=hidden_states.shape[-1], n_head=4, n_layer=1, vocab_size=9, d_inner=8))
    length = hidden_states.shape[1]
    hidden_states = hidden_states.transpose(0, 1)  # (length, batch, hidden)
    encoding = model.relative_positional_encoding(length, length, hidden_states.shape[1])
    query, key, value = (
        torch.einsum("ibh,hnd->ibnd", hidden_states, weight) for weight in (reference.q, reference.k, reference.v)
    )
    masked = (1 - mask.t()).float()[None, :, :, None].expand(length, -1, -1, -1)
    output = reference.rel_attn_core(
        query, key, value, torch.einsum("ibh,hnd->ibnd", encoding, reference.r), attn_mask=masked
    )
    return output.flatten(-2).transpose(0, 1)


@tiny.cross(padding=["right", "left"], length=[3, 17, 128], path=tiny.PATHS, indirect=("path",))
def test_attention_equals_xlnets(length, padding, path):
    model = tiny.build("transformer_xl", **LONG)
    attention = model.encoder.layer[0].attention.self
    tiny.fill_positions(model, std=0.2)
    as_xlnet(attention)
    inputs = tiny.inputs(length=length, padding=padding)
    hidden_states, ours = first_attention(model, inputs)
    mask = inputs["attention_mask"]
    assert tiny.difference_where_attended(ours, xlnet_output(attention, hidden_states, mask), mask) < TOLERANCE
    for name in ("linear_pos.weight", "pos_bias_u.weight", "pos_bias_v.weight"):
        parameter = attention.get_parameter(name)
        kept = parameter.detach().clone()
        nn.init.zeros_(parameter)
        assert tiny.difference_where_attended(first_attention(model, inputs)[1], ours, mask) > 100 * TOLERANCE, name
        parameter.data.copy_(kept)


@torch.no_grad()
def loops(attention: nn.Module, hidden_states: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """The formula, pair by pair: output (batch, length, hidden)."""
    heads, head_dim = attention.num_attention_heads, attention.attention_head_size
    width = heads * head_dim
    batch, length, _ = hidden_states.shape
    query, key, value = (
        linear(hidden_states).view(batch, length, heads, head_dim)
        for linear in (attention.query, attention.key, attention.value)
    )
    output = torch.zeros_like(value)
    for b in range(batch):
        for h in range(heads):
            scores = torch.zeros(length, length, dtype=torch.float64)
            rows = slice(h * head_dim, (h + 1) * head_dim)
            for i in range(length):
                for j in range(length):
                    distance = int(positions[b, i] - positions[b, j])
                    angles = [distance / base ** (2 * k / width) for k in range(width // 2)]
                    s = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
                    relative = attention.linear_pos.weight[rows] @ s
                    content = (query[b, i, h] + attention.pos_bias_u.weight[h]) @ key[b, j, h]
                    scores[i, j] = (
                        content + (query[b, i, h] + attention.pos_bias_v.weight[h]) @ relative
                    ) / head_dim**0.5
            output[b, :, h] = scores.softmax(-1) @ value[b, :, h]
    return output.flatten(-2)


@tiny.cross(
    base=[10000.0, 50.0],
    # In a row, packed and odd, shifted and far.
    position_ids=[None, [[0, 1, 2, 0, 1], [3, 3, 900, 7, -4]], [[5, 6, 7, 8, 9], [100000, 3, 2, 1, 0]]],
    path=tiny.PATHS,
    indirect=("path",),
)
def test_scores_equal_the_formula_in_loops(position_ids, base, path):
    model = tiny.build("transformer_xl", position_base=base).double()
    inputs = tiny.inputs(batch=2, length=5, padding=None)
    positions = torch.arange(5).expand(2, 5)
    if position_ids is not None:
        positions = inputs["position_ids"] = torch.tensor(position_ids)
    hidden_states, ours = first_attention(model, inputs)
    expected = loops(model.encoder.layer[0].attention.self, hidden_states, positions, base)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("given", [False, True], ids=["slots", "position_ids"])
def test_backends_agree(given, path):
    model = tiny.build("absolute+transformer_xl")
    inputs = tiny.inputs(length=9, padding="left")
    if given:
        inputs["position_ids"] = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    outputs = {}
    for backend in ("eager", "sdpa", "flex_attention"):
        model.set_attn_implementation(backend)
        # flex_attention's own reference code: compiling the kernel is another test's business, and slow.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            outputs[backend] = model(**inputs).last_hidden_state
    for backend in ("sdpa", "flex_attention"):
        difference = tiny.difference_where_attended(outputs["eager"], outputs[backend], inputs["attention_mask"])
        assert difference < TOLERANCE, backend
    without = without_positions(model, inputs)
    assert tiny.difference_where_attended(outputs["eager"], without, inputs["attention_mask"]) > 100 * TOLERANCE


@pytest.mark.parametrize("given", [False, True], ids=["slots", "position_ids"])
def test_gradients_of_the_parameters_are_right(given):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 5}
    model = tiny.build("transformer_xl", **sizes, attn_implementation="eager").double()
    inputs = tiny.inputs(batch=2, length=4)
    if given:
        inputs["position_ids"] = torch.tensor([[0, 1, 0, 1], [3, 9, 2, 2]])
    parameters = position_parameters(model)

    def output(*values):
        return torch.func.functional_call(model, dict(zip(parameters, values)), kwargs=inputs).last_hidden_state

    assert {name.rsplit(".self.")[1] for name in parameters} == {
        "linear_pos.weight",
        "pos_bias_u.weight",
        "pos_bias_v.weight",
    }
    torch.autograd.gradcheck(output, tuple(parameters.values()))


def test_starts_silent_and_every_parameter_learns():
    torch.manual_seed(0)
    stock = BertModel(tiny.stock_config()).eval()
    model = tiny.variant_class("bert")(tiny.variant_config(position_scheme="absolute+transformer_xl")).eval()
    missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert set(missing) == set(position_parameters(model)) and not unexpected
    inputs = tiny.inputs()
    with torch.no_grad():
        expected = stock(**inputs).last_hidden_state
        silent = model(**inputs).last_hidden_state
    torch.testing.assert_close(silent, expected, rtol=0, atol=1e-6)

    model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        output = model(**inputs).last_hidden_state
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        optimizer.step()
    for name, parameter in position_parameters(model).items():
        assert parameter.grad.abs().max() > 1e-6, name


def test_reference_start_is_normal():
    torch.manual_seed(0)
    config = tiny.variant_config(position_scheme="transformer_xl", position_init="paper", hidden_size=64)
    parameters = position_parameters(tiny.variant_class("bert")(config))
    assert len(parameters) == 3 * config.num_hidden_layers
    for name, parameter in parameters.items():
        assert abs(parameter.std().item() / config.initializer_range - 1) < (0.05 if "linear" in name else 0.35), name


def test_has_the_parameters_of_the_checkpoint_format():
    model = tiny.build("transformer_xl")
    prefix = "encoder.layer.1.attention.self."
    shapes = {n.removeprefix(prefix): tuple(p.shape) for n, p in position_parameters(model).items() if prefix in n}
    assert shapes == {"linear_pos.weight": (32, 32), "pos_bias_u.weight": (4, 8), "pos_bias_v.weight": (4, 8)}
    assert len(position_parameters(model)) == 6 and not hasattr(model.embeddings, "position_embeddings")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_padding_on_the_left_and_shifted_positions_change_nothing(family):
    model = tiny.build("transformer_xl", family)
    inputs = tiny.inputs(batch=1, length=7, family=family, padding=None)
    pad = model.config.pad_token_id
    padded = {
        "input_ids": nn.functional.pad(inputs["input_ids"], (5, 0), value=pad),
        "attention_mask": nn.functional.pad(inputs["attention_mask"], (5, 0)),
    }
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        assert (model(**padded).last_hidden_state[:, 5:] - plain).abs().max() < TOLERANCE
        for shift in (0, 1000):
            shifted = model(**inputs, position_ids=torch.arange(7)[None] + shift).last_hidden_state
            assert (shifted - plain).abs().max() < TOLERANCE
        swapped = model(**inputs, position_ids=torch.arange(7).flip(0)[None]).last_hidden_state
    assert (swapped - plain).abs().max() > 100 * TOLERANCE


def test_one_token_at_a_time_gives_what_the_whole_sequence_gives():
    model = tiny.build("transformer_xl", head="LMHeadModel", is_decoder=True)
    input_ids = tiny.inputs(batch=2, length=8, padding=None)["input_ids"]
    with torch.no_grad():
        whole = model(input_ids, use_cache=False).logits
        cache, pieces = None, []
        for piece in (input_ids[:, :3], *input_ids[:, 3:].split(1, dim=1)):
            output = model(piece, **{tiny.CACHE: cache}, use_cache=True)
            cache = getattr(output, tiny.CACHE)
            pieces.append(output.logits)
        zeros = {name: torch.zeros_like(p) for name, p in position_parameters(model).items()}
        without = torch.func.functional_call(model, zeros, (input_ids,)).logits
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=TOLERANCE)
    assert (whole - without).abs().max() > 100 * TOLERANCE


@pytest.mark.slow
def test_exports_with_position_ids_of_any_range():
    model = tiny.build("transformer_xl", attn_implementation="sdpa")
    inputs = tiny.inputs(batch=2, length=6, padding=None)
    inputs["position_ids"] = torch.arange(6).expand(2, 6).clone()
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, dynamic))
    other = tiny.inputs(batch=3, length=9, padding=None)
    other["position_ids"] = torch.randint(0, 500, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exported, expected = program.module()(**other).last_hidden_state, model(**other).last_hidden_state
    torch.testing.assert_close(exported, expected, rtol=0, atol=TOLERANCE)
    assert (expected - without_positions(model, other)).abs().max() > 100 * TOLERANCE


def test_refuses_what_it_cannot_take():
    with pytest.raises(ValueError, match="even hidden_size"):
        tiny.variant_config(position_scheme="transformer_xl", hidden_size=15, num_attention_heads=3)
    with pytest.raises(ValueError, match="position_base must be greater than 1"):
        build_schemes(tiny.variant_config(position_scheme="transformer_xl", position_base=1))


def test_far_positions_cost_no_more_than_near_ones():
    """A row for every integer between positions that are millions apart would not fit into memory."""
    model, batch = tiny.build("transformer_xl"), tiny.inputs(padding=None)
    near = torch.arange(12).repeat(3, 1)
    far = near + torch.where(near < 6, 0, 5_000_000)
    made = []
    for layer in model.encoder.layer:
        layer.attention.self.linear_pos.register_forward_hook(lambda module, arguments, result: made.append(result))
    with torch.no_grad():
        found = model(**batch, position_ids=far).last_hidden_state
        assert max(len(rows) for rows in made) <= 3 * 11
        double = model.double()(**batch, position_ids=far).last_hidden_state
        assert (double - model(**batch).last_hidden_state).abs().max() > 100 * TOLERANCE
    torch.testing.assert_close(found, double.float(), atol=TOLERANCE, rtol=0)
