"""CABLE: its formula in loops, in encoders and decoders, its gradients, where it starts, padding, packed documents and caches."""

import functools
import math

import pytest
import tiny
import torch
from transformers import AutoModel, BertModel, DynamicCache, StaticCache

from hf_posenc.modeling.schemes import cable


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")
sides = pytest.mark.parametrize("two_sided", [False, True])
_SHAPES = {"cable_step.weight": (1, 32), "cable_scale.weight": (1, 32), "cable_amplitude.weight": (1,)}
CHECKPOINT_KEYS = [
    (
        "cable",
        {"position_two_sums": two_sided},
        {
            f"encoder.layer.1.attention.self.{name}": ((8 if two_sided else 4) * shape[0], *shape[1:])
            for name, shape in _SHAPES.items()
        },
    )
    for two_sided in (False, True)
]
TOLERANCE = 1e-5


def filled(two_sided: bool = False, **overrides) -> torch.nn.Module:
    return tiny.build("cable", position_two_sums=two_sided, **overrides)


def penalty(attention, hidden: torch.Tensor, is_token: list[bool], head: int, i: int, j: int) -> float:
    """What is taken off the score of query i and key j of a sequence, hidden (length, hidden_size), one number at a time."""
    if i == j:
        return 0.0
    if attention.cable_amplitude.weight.shape == (8,) and j > i:
        head += 4  # the other sums

    def product(weight: torch.Tensor, at: int) -> float:
        return sum(float(x) * float(w) for x, w in zip(hidden[at], weight[head]))

    between = range(j + 1, i + 1) if j < i else range(i + 1, j + 1)
    steps = sum(max(0.0, product(attention.cable_step.weight, at)) for at in between if is_token[at])
    gate = math.log1p(math.exp(product(attention.cable_scale.weight, i)))
    return attention.cable_amplitude.weight[head].item() * gate * steps


def weights_in_loops(model, hidden: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Attention weights of the first layer, (batch, heads, query, key), given bool (batch, query, key)."""
    attention = model.encoder.layer[0].attention.self
    query, key = (
        projection(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for projection in (attention.query, attention.key)
    )
    scores = query @ key.transpose(-1, -2) / math.sqrt(8)
    for b in range(hidden.shape[0]):
        is_token = allowed[b].any(0).tolist()
        for h in range(4):
            for i, j in allowed[b].nonzero().tolist():
                scores[b, h, i, j] -= penalty(attention, hidden[b], is_token, h, i, j)
    return scores.masked_fill(~allowed[:, None], -math.inf).softmax(-1)


def check(model, given: dict, allowed: torch.Tensor) -> None:
    outputs = model(**given, output_attentions=True, output_hidden_states=True)
    expected = weights_in_loops(model, outputs.hidden_states[0], allowed)
    rows = allowed.any(-1)
    found = outputs.attentions[0].transpose(1, 2)[rows]
    torch.testing.assert_close(found, expected.transpose(1, 2)[rows], atol=1e-12, rtol=0)
    without = tiny.build("none", attn_implementation="eager", is_decoder=model.config.is_decoder).double()
    without.load_state_dict(model.state_dict(), strict=False)
    plain = without(**given, output_attentions=True).attentions[0].transpose(1, 2)[rows]
    assert (plain - found).abs().max() > 1e-2


@sides
@pytest.mark.parametrize("padding", ["right", "left", "inside"])
@torch.no_grad()
def test_scores_equal_the_formula_in_loops(padding, two_sided):
    model = filled(two_sided, attn_implementation="eager").double()
    batch = tiny.inputs(padding=None if padding == "inside" else padding)
    if padding == "inside":
        batch["attention_mask"][1, 3:6] = 0
    check(model, batch, batch["attention_mask"].bool()[:, None].expand(-1, 12, -1))


@sides
@torch.no_grad()
def test_documents_in_a_row_have_sums_of_their_own(two_sided):
    model = filled(two_sided, attn_implementation="eager").double()
    pairs = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).bool()
    batch = {"input_ids": tiny.inputs(batch=1)["input_ids"], "attention_mask": pairs[None, None]}
    check(model, batch, pairs[None])


@sides
@torch.no_grad()
def test_a_decoder_s_scores_equal_the_formula_in_loops(two_sided):
    model, batch = (
        filled(two_sided, is_decoder=True, attn_implementation="eager").double(),
        tiny.inputs(padding="left"),
    )
    allowed = batch["attention_mask"].bool()[:, None] & torch.ones(12, 12).tril().bool()
    check(model, batch, allowed)


@pytest.fixture
def made(monkeypatch) -> list:
    """The terms that the scheme makes."""
    found, terms = [], cable.Cable.terms
    monkeypatch.setattr(cable.Cable, "terms", lambda *given: found.append(terms(*given)) or found[-1])
    return found


@torch.no_grad()
def test_sums_start_anew_with_each_document_and_have_all_digits(made):
    pairs = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).bool()[None, None]
    model = filled().to(torch.bfloat16)
    model(tiny.inputs(batch=1)["input_ids"], attention_mask=pairs)
    [term] = made[0]
    assert term.key.dtype == term.query.dtype == term.scale.dtype == torch.float32
    attention = model.encoder.layer[0].attention.self
    steps = torch.relu(attention.cable_step(model.embeddings(tiny.inputs(batch=1)["input_ids"]))).float()[0].t()
    expected = torch.cat([steps[:, :5].cumsum(-1), steps[:, 5:].cumsum(-1)], -1)
    torch.testing.assert_close(term.key[0], expected)
    assert expected[:, 5].max() < expected[:, 4].max()


@tiny.cross(two_sided=[False, True], length=[12, 150], path=tiny.PATHS, decoder=[False, True], indirect=("path",))
@torch.no_grad()
def test_backends_agree(two_sided, length, path, decoder):
    batch, outputs = tiny.inputs(length=length), []
    for backend in ("eager", "sdpa", "flex_attention"):
        model = filled(two_sided, attn_implementation=backend, is_decoder=decoder)
        outputs.append(model(**batch).last_hidden_state)
    for output in outputs[1:]:
        assert tiny.difference_where_attended(output, outputs[0], batch["attention_mask"]) < TOLERANCE


@tiny.cross(two_sided=[False, True], decoder=[False, True], path=tiny.PATHS, indirect=("path",))
def test_gradients_are_those_of_finite_differences(two_sided, decoder, path):
    model, batch = filled(two_sided, is_decoder=decoder).double(), tiny.inputs(length=40)
    target = torch.randn(3, 40, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target *= batch["attention_mask"][..., None]

    def loss() -> torch.Tensor:
        return (model(**batch).last_hidden_state * target).sum()

    loss().backward()
    for layer in model.encoder.layer:
        attention = layer.attention.self
        for parameter in (attention.cable_step.weight, attention.cable_scale.weight, attention.cable_amplitude.weight):
            direction = torch.randn_like(parameter)
            with torch.no_grad():
                values = []
                for step in (1e-7, -2e-7):
                    parameter += step * direction
                    values.append(loss().item())
                parameter += 1e-7 * direction
            expected = (values[0] - values[1]) / 2e-7
            assert abs(expected) > 1e-4
            assert (parameter.grad * direction).sum().item() == pytest.approx(expected, rel=1e-4)
            if two_sided:
                # A decoder sees no keys on the right.
                of_right = parameter.grad[4:]
                assert bool(of_right.any()) != decoder


@sides
def test_starts_silent_where_the_amplitude_has_a_gradient_and_all_others_after_a_step(two_sided, tmp_path):
    torch.manual_seed(0)
    stock = BertModel(tiny.stock_config()).eval()
    stock.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, position_scheme="absolute+cable", position_two_sums=two_sided).eval()
    batch = tiny.inputs()
    torch.testing.assert_close(model(**batch)[0], stock(**batch)[0], atol=TOLERANCE, rtol=0)
    for has_moved in (False, True):
        model.zero_grad()
        model(**batch)[0].square().sum().backward()
        for layer in model.encoder.layer:
            attention = layer.attention.self
            assert attention.cable_amplitude.weight.grad.all()
            for module in (attention.cable_step, attention.cable_scale):
                assert module.weight.any(-1).all()
                assert bool(module.weight.grad.any()) == has_moved
            with torch.no_grad():
                attention.cable_amplitude.weight -= 0.1 * attention.cable_amplitude.weight.grad


@sides
@pytest.mark.parametrize("unpad", [True, False])
@torch.no_grad()
def test_padding_changes_nothing_whatever_it_holds(unpad, two_sided):
    model = filled(two_sided, unpad=unpad).double()
    ids = tiny.inputs(batch=1, length=60)["input_ids"]
    alone = model(ids).last_hidden_state
    for before, behind in ((0, 5), (0, 200), (90, 0)):
        longest = before + 60 + behind
        batch, mask = torch.full((3, longest), 7), torch.ones(3, longest)
        batch[1, before : before + 60], mask[1] = ids, 0
        mask[1, before : before + 60] = 1
        found = model(batch, attention_mask=mask).last_hidden_state[1, before : before + 60]
        torch.testing.assert_close(found, alone[0], atol=1e-10, rtol=0)


@sides
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_decoder_computes_the_same_with_a_cache_through_all_that_is_done_to_it(kind, backend, two_sided):
    model, batch = (
        filled(two_sided, is_decoder=True, attn_implementation=backend).double(),
        tiny.inputs(padding="left"),
    )
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=16)

    def step(start: int, stop: int) -> torch.Tensor:
        given = {"attention_mask": mask[:, :stop], "past_key_values": cache, "use_cache": True}
        return model(ids[:, start:stop], **given).last_hidden_state

    whole = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    found = torch.cat([step(0, 5), step(5, 8)], 1)
    assert tiny.difference_where_attended(found, whole[:, :8], mask[:, :8]) < 1e-10
    if kind == "dynamic":
        cache.crop(-2)
        assert tiny.difference_where_attended(step(6, 8), whole[:, 6:8], mask[:, 6:8]) < 1e-10
        order = torch.tensor([2, 0, 1])
        cache.reorder_cache(order)
        ids, mask, whole = ids[order], mask[order], whole[order]
    rest = torch.cat([step(8, 11), step(11, 12)], 1)
    assert tiny.difference_where_attended(rest, whole[:, 8:], mask[:, 8:]) < 1e-10
    kept = cache.layers[1].kept["cable"]
    assert kept.shape == (3, 8 if two_sided else 4, 12 if kind == "dynamic" else 16)


@torch.no_grad()
def test_a_cache_whose_sums_are_not_known_is_refused():
    model, batch = filled(is_decoder=True), tiny.inputs(padding=None)
    other, cache = tiny.build("none", is_decoder=True), DynamicCache()
    other(batch["input_ids"][:, :6], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="what cable keeps"):
        model(batch["input_ids"][:, 6:], past_key_values=cache, use_cache=True)


def _ones(attention, states: torch.Tensor) -> torch.Tensor:
    return states.new_ones(*states.shape[:2], len(attention.cable_amplitude.weight))


@torch.no_grad()
def test_one_sum_of_equal_steps_cannot_tell_left_from_right_and_two_can():
    """Equal steps make one sum blind, and two tell left from right by their amplitudes."""
    batch = tiny.inputs(padding=None)
    blind, told = [], []
    for two_sided, found in ((False, blind), (True, told)):
        model = filled(two_sided)
        for layer in model.encoder.layer:
            attention = layer.attention.self
            attention.cable_step.forward = functools.partial(_ones, attention)
        found += [
            model(**batch).last_hidden_state,
            model(input_ids=batch["input_ids"].flip(1)).last_hidden_state.flip(1),
        ]
    torch.testing.assert_close(*blind, atol=TOLERANCE, rtol=0)
    assert (told[0] - told[1]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_survives_great_sums(dtype):
    for amplitude in (30000.0, -30000.0):
        model = filled(attn_implementation="eager").to(dtype)
        for layer in model.encoder.layer:
            layer.attention.self.cable_amplitude.weight.fill_(amplitude)
        output = model(**tiny.inputs(padding=None)).last_hidden_state
        assert output.dtype == dtype and output.isfinite().all()


def test_the_paper_s_start_has_the_bias_in_it():
    torch.manual_seed(0)
    model = BertModel(tiny.stock_config(position_scheme="cable", position_init="paper"))
    for layer in model.encoder.layer:
        attention = layer.attention.self
        assert (attention.cable_amplitude.weight == 1).all() and attention.cable_step.weight.any()
