"""relative, relative_key and relative_key_query: equal to their equations in loops, on every backend, silent at the start."""

import math

import pytest
import tiny
import torch
from torch import nn
from transformers import BertModel

from hf_posenc import position_parameters


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


TOLERANCE = 1e-5
# Short tables, so that the longer sequences reach beyond them.
VARIANTS = {
    "relative": {"position_scheme": "relative", "position_max_distance": 3},
    "relative-keys-only": {"position_scheme": "relative", "position_max_distance": 3, "position_on_values": False},
    "relative_key": {"position_scheme": "relative_key", "max_position_embeddings": 8},
    "relative_key_query": {"position_scheme": "relative_key_query", "max_position_embeddings": 8},
}
each_variant = pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS.keys())


def run(model: nn.Module, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def run_without_positions(model: nn.Module, inputs: dict) -> torch.Tensor:
    zeros = {name: torch.zeros_like(parameter) for name, parameter in position_parameters(model).items()}
    with torch.no_grad():
        return torch.func.functional_call(model, zeros, kwargs=inputs).last_hidden_state


def attention_by_loops(
    attention: nn.Module, hidden_states: torch.Tensor, mask: torch.Tensor, flags: dict
) -> torch.Tensor:
    """One self-attention as the papers write it, pair by pair: (batch, length, hidden size)."""
    heads, width = attention.num_attention_heads, attention.attention_head_size
    tables = {name: parameter.tolist() for name, parameter in attention.named_parameters() if "embedding" in name}
    output = torch.zeros_like(hidden_states)
    for row, states in enumerate(hidden_states):
        for head in range(heads):
            columns = slice(head * width, (head + 1) * width)
            q, k, v = (m(states)[:, columns].tolist() for m in (attention.query, attention.key, attention.value))
            visible = [j for j in range(len(states)) if mask[row, j]]
            for i in range(len(states)):
                scores, values = [], []
                for j in visible:
                    score, value = pair_by_hand(q[i], k[j], v[j], i, j, tables, flags)
                    scores.append(math.exp(score / math.sqrt(width)))
                    values.append(value)
                for feature in range(width):
                    mixed = sum(score * value[feature] for score, value in zip(scores, values)) / sum(scores)
                    output[row, i, head * width + feature] = mixed
    return output


def dot(first: list[float], second: list[float]) -> float:
    return sum(x * y for x, y in zip(first, second))


def pair_by_hand(q: list, k: list, v: list, i: int, j: int, tables: dict, flags: dict) -> tuple[float, list[float]]:
    """Unscaled score of query i and key j, and the value that j hands to i."""
    if flags["position_scheme"] == "relative":
        clip = flags["position_max_distance"]
        row = max(-clip, min(clip, j - i)) + clip
        score = dot(q, [x + a for x, a in zip(k, tables["relative_key_embeddings.weight"][row])])
        if flags.get("position_on_values", True):
            v = [x + a for x, a in zip(v, tables["relative_value_embeddings.weight"][row])]
        return score, v
    farthest = flags["max_position_embeddings"] - 1
    vector = tables["distance_embedding.weight"][max(-farthest, min(farthest, i - j)) + farthest]
    score = dot(q, k) + dot(q, vector)
    if flags["position_scheme"] == "relative_key_query":
        score += dot(k, vector)
    return score, v


@pytest.mark.parametrize("length", [4, 9, 20])
@each_variant
def test_the_attention_is_that_of_the_paper(flags, length):
    model = tiny.build(**flags, attn_implementation="eager", num_attention_heads=2).double()
    inputs = tiny.inputs(batch=2, length=length)
    calls = []
    for layer in model.encoder.layer:
        layer.attention.self.register_forward_hook(
            lambda module, args, result: calls.append((module, args[0], result[0]))
        )
    result = run(model, inputs)
    assert len(calls) == 2
    for attention, hidden_states, output in calls:
        expected = attention_by_loops(attention, hidden_states, inputs["attention_mask"], flags)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert (result - run_without_positions(model, inputs)).abs().max() > 1e-2


@tiny.cross(flags=VARIANTS.values(), padding=["left", "right"], path=tiny.PATHS, indirect=("path",))
def test_backends_agree(flags, padding, path):
    model = tiny.build(**flags)
    inputs = tiny.inputs(length=14, padding=padding)
    mask = inputs["attention_mask"]
    model.set_attn_implementation("eager")
    expected = run(model, inputs)
    assert tiny.difference_where_attended(expected, run_without_positions(model, inputs), mask) > 100 * TOLERANCE
    for implementation in ("sdpa", "flex_attention"):
        model.set_attn_implementation(implementation)
        assert tiny.difference_where_attended(expected, run(model, inputs), mask) < TOLERANCE, implementation


@tiny.cross(flags=VARIANTS.values(), implementation=["eager", "sdpa"], path=tiny.PATHS, indirect=("path",))
def test_gradients_of_the_tables_are_right(flags, implementation, path):
    sizes = {"hidden_size": 6, "num_attention_heads": 2, "intermediate_size": 5, "num_hidden_layers": 1}
    short = {"position_max_distance": 2} if "position_max_distance" in flags else {"max_position_embeddings": 3}
    model = tiny.build(**{**flags, **short}, **sizes, attn_implementation=implementation).double()
    inputs = tiny.inputs(batch=2, length=5)
    parameters = position_parameters(model)

    def outputs(*values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(parameters, values))
        return torch.func.functional_call(model, given, kwargs=inputs).last_hidden_state

    values = tuple(parameter.detach().clone().requires_grad_() for parameter in parameters.values())
    assert torch.autograd.gradcheck(outputs, values)


def fresh(flags: dict, **others) -> nn.Module:
    """A variant with its position parameters as they start, in eval mode."""
    torch.manual_seed(0)
    return tiny.variant_class("bert")(tiny.variant_config(**{**flags, **others})).eval()


@each_variant
def test_it_starts_as_the_checkpoint_without_positions_or_beside_its_own(flags):
    stock = BertModel(tiny.stock_config(max_position_embeddings=64)).eval()
    inputs = tiny.inputs(length=14)
    with_positions = run(stock, inputs)
    weights = stock.state_dict()
    for scheme in (f"absolute+{flags['position_scheme']}", flags["position_scheme"]):
        model = fresh(flags, position_scheme=scheme, max_position_embeddings=64)
        loaded = model.load_state_dict(weights, strict=False)
        assert {*loaded.missing_keys} == {*position_parameters(model)}
        if "absolute" not in scheme:
            stock.embeddings.position_embeddings.weight.data.zero_()
            assert (run(stock, inputs) - with_positions).abs().max() > 100 * TOLERANCE
        torch.testing.assert_close(run(model, inputs), run(stock, inputs), rtol=1e-6, atol=5e-6)


@each_variant
def test_every_parameter_learns_by_the_second_step(flags):
    model = fresh(flags).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = torch.randn(3, 14, tiny.SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        optimizer.zero_grad()
        (model(**tiny.inputs(length=14)).last_hidden_state - target).square().mean().backward()
        optimizer.step()
    # The pooler is not part of this loss.
    still = [n for n, p in model.named_parameters() if "pooler" not in n and (p.grad is None or not p.grad.any())]
    assert not still


@pytest.mark.parametrize("scheme", ["relative_key", "relative_key_query"])
def test_distances_beyond_the_table_share_its_ends(scheme):
    model = tiny.build(scheme, max_position_embeddings=8)
    longer = tiny.build(scheme, max_position_embeddings=40)
    weights = model.state_dict()
    for name in position_parameters(model):
        first, last = weights[name][:1], weights[name][-1:]
        weights[name] = torch.cat([first.expand(32, -1), weights[name], last.expand(32, -1)])
    longer.load_state_dict(weights)
    inputs = tiny.inputs(length=30)
    torch.testing.assert_close(run(model, inputs), run(longer, inputs), rtol=0, atol=TOLERANCE)


def test_distances_beyond_the_clip_share_its_ends():
    model = tiny.build("relative", position_max_distance=3)
    longer = tiny.build("relative", position_max_distance=12)
    weights = model.state_dict()
    for name in position_parameters(model):
        first, last = weights[name][:1], weights[name][-1:]
        weights[name] = torch.cat([first.expand(9, -1), weights[name], last.expand(9, -1)])
    longer.load_state_dict(weights)
    inputs = tiny.inputs(length=30)
    torch.testing.assert_close(run(model, inputs), run(longer, inputs), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@each_variant
def test_padding_on_the_left_changes_no_token(flags, family):
    model = tiny.build(**{"max_position_embeddings": 32, **flags}, family=family)
    plain = tiny.inputs(batch=2, length=9, padding=None)
    pad = model.config.pad_token_id
    padded = {
        "input_ids": nn.functional.pad(plain["input_ids"], (4, 0), value=pad),
        "attention_mask": nn.functional.pad(plain["attention_mask"], (4, 0)),
    }
    expected = run(model, plain)
    torch.testing.assert_close(run(model, padded)[:, 4:], expected, rtol=0, atol=TOLERANCE)
    turned = {**plain, "input_ids": plain["input_ids"].flip(1)}
    assert (run(model, turned).flip(1) - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("one_by_one", [False, True])
@each_variant
def test_a_cache_computes_what_the_whole_sequence_computes(flags, one_by_one):
    model = tiny.build(**flags, is_decoder=True)
    input_ids = tiny.inputs(length=14, padding=None)["input_ids"]
    expected = run(model, {"input_ids": input_ids, "use_cache": False})
    cache, states = None, []
    for part in input_ids.split([1] * 14 if one_by_one else [6, 5, 3], dim=1):
        with torch.no_grad():
            outputs = model(part, **{tiny.CACHE: cache}, use_cache=True)
        cache = getattr(outputs, tiny.CACHE)
        states.append(outputs.last_hidden_state)
    torch.testing.assert_close(torch.cat(states, dim=1), expected, rtol=0, atol=TOLERANCE)


def test_reference_start_is_that_of_the_papers():
    model = fresh(
        {"position_scheme": "relative", "position_max_distance": 64, "position_init": "paper"}, hidden_size=64
    )
    for table in position_parameters(model).values():
        bound = math.sqrt(6 / (129 + 16))  # Xavier: (129, 16)
        assert 0.95 * bound < table.abs().max() <= bound
        assert abs(table.std().item() - bound / math.sqrt(3)) < 0.05 * bound
    for scheme in ("relative_key", "relative_key_query"):
        flags = {"position_scheme": scheme, "position_init": "paper", "initializer_range": 0.03}
        for table in position_parameters(fresh(flags)).values():
            assert abs(table.std().item() - 0.03) < 0.003 and abs(table.mean().item()) < 0.003


def test_checkpoint_keys_and_shapes():
    shapes = {}
    for name, flags in VARIANTS.items():
        parameters = position_parameters(tiny.build(**flags))
        assert len(parameters) == (4 if name == "relative" else 2)
        shapes[name] = {key: tuple(p.shape) for key, p in parameters.items() if key.startswith("encoder.layer.1.")}
    prefix = "encoder.layer.1.attention.self."
    keys = {f"{prefix}relative_key_embeddings.weight": (7, 8)}
    assert shapes["relative-keys-only"] == keys
    assert shapes["relative"] == keys | {f"{prefix}relative_value_embeddings.weight": (7, 8)}
    assert shapes["relative_key"] == shapes["relative_key_query"] == {f"{prefix}distance_embedding.weight": (15, 8)}


def test_value_terms_beside_flex_attention_are_computed_by_eager_and_that_is_said_once(said):
    inputs = tiny.inputs()
    run(tiny.build("relative", attn_implementation="sdpa"), inputs)  # in blocks
    run(tiny.build("relative", position_on_values=False, attn_implementation="flex_attention"), inputs)
    assert not said
    for _ in range(2):
        run(tiny.build("relative", attn_implementation="flex_attention"), inputs)
    [line] = said
    assert "computed by eager" in line


@pytest.mark.parametrize(
    "composite", ["relative_key+relative_key_query", "absolute+relative_key_query+t5+relative_key"]
)
def test_two_schemes_with_one_checkpoint_key_exclude_each_other(composite):
    with pytest.raises(ValueError, match="position_scheme.*relative_key and relative_key_query.*distance_embedding"):
        tiny.variant_config(position_scheme=composite)
    # Others keep company.
    tiny.build("relative+relative_key")


@each_variant
def test_flash_attention_is_refused(flags):
    with pytest.raises(ValueError, match="flash_attention_2.*these do: sdpa, flex_attention, eager"):
        tiny.build(**flags, attn_implementation="flash_attention_2")
