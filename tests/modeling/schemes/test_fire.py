"""FIRE: its formula in loops, in encoders and decoders, its gradients, where it starts, and what padding cannot change."""

import math

import pytest
import tiny
import torch
from transformers import AutoModel, BertModel, DynamicCache

from hf_posenc.modeling.schemes import fire
from hf_posenc.modeling.schemes.fire import SMALLEST, WIDTH
from hf_posenc.modeling.schemes.terms import PairTerm, RelativeTerm


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")
per_layer = pytest.mark.parametrize("per_layer", [True, False])
# Beyond the learned L, and within.
lengths = pytest.mark.parametrize("limit", [3.3, 1000.0], ids=["beyond L", "within L"])
_NAMES = {"fire_c.weight": (1,), "fire_length.weight": (1,), "fire_hidden.weight": (32, 1)}
_NAMES |= {"fire_hidden.bias": (32,), "fire_output.weight": (4, 32)}
CHECKPOINT_KEYS = [
    ("fire", {}, {f"encoder.layer.1.attention.self.{name}": shape for name, shape in _NAMES.items()}),
    ("fire", {"position_per_layer": False}, {f"encoder.{name}": shape for name, shape in _NAMES.items()}),
]
PLACES = [0, 3, 4, 9, 2, 2, 7, 1, 40, 5, 6, 11]
TOLERANCE = 1e-5


def filled(limit: float = 3.3, per_layer: bool = True, **overrides) -> torch.nn.Module:
    """A tiny model with random networks, c of either sign, and the given L."""
    model = tiny.build("fire", position_per_layer=per_layer, **overrides)
    with torch.no_grad():
        for number, owner in enumerate(owners(model)):
            owner.fire_c.weight.fill_((-1) ** number * 0.7)
            owner.fire_length.weight.fill_(-limit / 512)
            owner.fire_output.weight.mul_(3)
    return model


def owners(model: torch.nn.Module) -> list[torch.nn.Module]:
    modules = [layer.attention.self for layer in model.base_model.encoder.layer]
    return modules if hasattr(modules[0], "fire_c") else [model.base_model.encoder]


def bias(owner: torch.nn.Module, distance: int, length: int) -> list[float]:
    """Of each head, for `distance` = key - query, one number at a time."""
    c, limit = abs(owner.fire_c.weight.item()), 512 * abs(owner.fire_length.weight.item())
    share = math.log(1 + c * abs(distance)) / (math.log(1 + c * max(limit, length - 1)) + SMALLEST)
    share = share if distance < 0 else -share
    hidden = [
        max(0.0, owner.fire_hidden.weight[unit, 0].item() * share + owner.fire_hidden.bias[unit].item())
        for unit in range(WIDTH)
    ]
    return [sum(w * x for w, x in zip(row, hidden)) for row in owner.fire_output.weight.tolist()]


def weights_in_loops(model, hidden: torch.Tensor, places, allowed: torch.Tensor) -> torch.Tensor:
    """Attention weights of the first layer, (batch, heads, query, key).

    Args:
        places: of each sequence.
        allowed: bool (batch, query, key).
    """
    attention = model.encoder.layer[0].attention.self
    query, key = (
        projection(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for projection in (attention.query, attention.key)
    )
    scores = query @ key.transpose(-1, -2) / math.sqrt(8)
    for b, row in enumerate(places):
        for i, at in enumerate(row):
            length = int(allowed[b, i].sum())
            for j, to in enumerate(row):
                scores[b, :, i, j] += scores.new_tensor(bias(owners(model)[0], to - at, length))
    return scores.masked_fill(~allowed[:, None], -math.inf).softmax(-1)


def check(model, given: dict, places, allowed: torch.Tensor, rows: slice | torch.Tensor = slice(None)) -> None:
    outputs = model(**given, output_attentions=True, output_hidden_states=True)
    expected = weights_in_loops(model, outputs.hidden_states[0], places, allowed)
    torch.testing.assert_close(outputs.attentions[0][rows], expected[rows], atol=1e-12, rtol=0)
    without = tiny.build("none", attn_implementation="eager").double()
    without.load_state_dict(model.state_dict(), strict=False)
    assert (without(**given, output_attentions=True).attentions[0] - expected)[rows].abs().max() > 1e-3


@per_layer
@lengths
@pytest.mark.parametrize("given", [False, True], ids=["in a row", "positions given"])
@torch.no_grad()
def test_scores_equal_the_formula_in_loops(given, limit, per_layer):
    """Of padded sequences too: each has its own length."""
    model, batch = filled(limit, per_layer, attn_implementation="eager").double(), tiny.inputs()
    places = PLACES if given else list(range(12))
    ids = {"position_ids": torch.tensor([places] * 3)} if given else {}
    allowed = batch["attention_mask"].bool()[:, None].expand(-1, 12, -1)
    check(model, {**batch, **ids}, [places] * 3, allowed)


@lengths
@pytest.mark.parametrize("given", [False, True], ids=["in a row", "positions given"])
@torch.no_grad()
def test_documents_in_a_row_have_lengths_of_their_own(given, limit):
    model = filled(limit, attn_implementation="eager").double()
    pairs = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).bool()
    places = [*range(5), *range(7)] if given else list(range(12))
    ids = {"position_ids": torch.tensor([places])} if given else {}
    batch = {"input_ids": tiny.inputs(batch=1)["input_ids"], "attention_mask": pairs[None, None]}
    check(model, {**batch, **ids}, [places], pairs[None])


@lengths
@pytest.mark.parametrize("padding", [None, "left"])
@torch.no_grad()
def test_a_decoder_divides_by_the_place_of_the_query_as_the_paper_does(padding, limit):
    model, batch = filled(limit, is_decoder=True, attn_implementation="eager").double(), tiny.inputs(padding=padding)
    kept = batch["attention_mask"].bool()
    allowed = kept[:, None] & torch.ones(12, 12).tril().bool()
    # i - 1 tokens, and so i counted from 0, stand before a query.
    assert (allowed.sum(-1)[0] - 1).tolist() == list(range(12))
    outputs = model(**batch, output_attentions=True, output_hidden_states=True)
    expected = weights_in_loops(model, outputs.hidden_states[0], [list(range(12))] * 3, allowed)
    found = outputs.attentions[0].transpose(1, 2)[kept]
    torch.testing.assert_close(found, expected.transpose(1, 2)[kept], atol=1e-12, rtol=0)


@tiny.cross(limit=[3.3, 1000.0], length=[12, 150], path=tiny.PATHS, decoder=[False, True], indirect=("path",))
@torch.no_grad()
def test_backends_agree(limit, length, path, decoder):
    batch, outputs = tiny.inputs(length=length), []
    for backend in ("eager", "sdpa", "flex_attention"):
        model = filled(limit, attn_implementation=backend, is_decoder=decoder)
        outputs.append(model(**batch).last_hidden_state)
    for output in outputs[1:]:
        assert tiny.difference_where_attended(output, outputs[0], batch["attention_mask"]) < TOLERANCE


@tiny.cross(limit=[3.3, 1000.0], per_layer=[True, False], decoder=[False, True], path=tiny.PATHS, indirect=("path",))
def test_gradients_are_those_of_finite_differences(limit, per_layer, decoder, path):
    model, batch = filled(limit, per_layer, is_decoder=decoder).double(), tiny.inputs(length=40)
    mask = batch["attention_mask"][..., None]
    target = mask * torch.randn(3, 40, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss() -> torch.Tensor:
        return (model(**batch).last_hidden_state * target).sum()

    loss().backward()
    for owner in owners(model):
        for module in (owner.fire_c, owner.fire_length, owner.fire_hidden, owner.fire_output):
            for parameter in module.parameters():
                direction = torch.randn_like(parameter)
                with torch.no_grad():
                    sides = []
                    for step in (1e-7, -2e-7):
                        parameter += step * direction
                        sides.append(loss().item())
                    parameter += 1e-7 * direction
                found, expected = (parameter.grad * direction).sum().item(), (sides[0] - sides[1]) / 2e-7
                if parameter is owner.fire_length.weight and limit == 3.3 and not decoder:
                    assert found == 0 and abs(expected) < 1e-6  # every sequence is longer than L
                else:
                    assert abs(expected) > 1e-6
                    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@per_layer
def test_starts_silent_where_the_output_has_a_gradient_and_all_others_after_a_step(per_layer, tmp_path):
    torch.manual_seed(0)
    stock = BertModel(tiny.stock_config()).eval()
    stock.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, position_scheme="absolute+fire", position_per_layer=per_layer).eval()
    batch = tiny.inputs()
    torch.testing.assert_close(model(**batch)[0], stock(**batch)[0], atol=TOLERANCE, rtol=0)
    for has_moved in (False, True):
        model.zero_grad()
        model(**batch)[0].square().sum().backward()
        for owner in owners(model):
            assert owner.fire_c.weight.item() == pytest.approx(0.1) and owner.fire_length.weight.item() == 1
            assert owner.fire_output.weight.grad.any()
            for module in (owner.fire_c, owner.fire_length, owner.fire_hidden):
                for parameter in module.parameters():
                    assert bool(parameter.grad.any()) == has_moved
            with torch.no_grad():
                owner.fire_output.weight -= 0.1 * owner.fire_output.weight.grad


@lengths
@pytest.mark.parametrize("unpad", [True, False])
@torch.no_grad()
def test_how_far_a_batch_is_padded_changes_nothing(limit, unpad):
    model = filled(limit, unpad=unpad).double()
    ids = tiny.inputs(batch=1, length=60)["input_ids"]
    alone = model(ids).last_hidden_state
    for before, behind in ((0, 5), (0, 200), (90, 0)):
        longest = before + 60 + behind
        batch = torch.full((3, longest), 7)
        batch[1, before : before + 60] = ids
        mask = torch.ones(3, longest)
        mask[1] = 0
        mask[1, before : before + 60] = 1
        found = model(batch, attention_mask=mask).last_hidden_state[1, before : before + 60]
        torch.testing.assert_close(found, alone[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_a_decoder_beyond_its_length_computes_the_same_with_a_cache(backend):
    model, batch = filled(is_decoder=True, attn_implementation=backend).double(), tiny.inputs(padding="left")
    mask, cache, found = batch["attention_mask"], DynamicCache(), []
    whole = model(**batch, use_cache=False).last_hidden_state
    for start, stop in ((0, 5), (5, 10), (10, 11), (11, 12)):
        step = model(batch["input_ids"][:, start:stop], mask[:, :stop], past_key_values=cache, use_cache=True)
        found.append(step.last_hidden_state)
    assert tiny.difference_where_attended(torch.cat(found, 1), whole, mask) < 1e-10


@pytest.fixture
def made(monkeypatch) -> list:
    """The terms that the scheme makes."""
    found, terms = [], fire.Fire.terms
    monkeypatch.setattr(fire.Fire, "terms", lambda *given: found.append(terms(*given)) or found[-1])
    return found


@torch.no_grad()
def test_an_encoder_has_a_value_per_distance_and_a_decoder_until_it_is_longer_than_l(made):
    batch = tiny.inputs()
    for limit, decoder, shape in (
        (1000.0, False, (4, 23)),
        (3.3, False, (3, 4, 23)),
        (1000.0, True, (4, 23)),
        (3.3, True, (4, 12 * 23)),
    ):
        filled(limit, is_decoder=decoder)(**batch)
        [term] = made.pop()
        assert isinstance(term, RelativeTerm) and term.bias.shape == shape
        assert term.rows.dim() == (3 if shape[-1] > 23 else 1)


@lengths
@pytest.mark.parametrize("decoder", [False, True])
@torch.no_grad()
def test_where_values_must_not_be_looked_at_it_computes_the_same(limit, decoder, made, monkeypatch):
    model, batch = filled(limit, is_decoder=decoder), tiny.inputs()
    expected = model(**batch).last_hidden_state
    made.clear()
    monkeypatch.setattr(fire, "is_traced", lambda: True)
    found = model(**batch).last_hidden_state
    assert isinstance(made[0][0], PairTerm if decoder else RelativeTerm)
    assert tiny.difference_where_attended(found, expected, batch["attention_mask"]) < TOLERANCE


@torch.no_grad()
def test_tells_left_from_right():
    model, batch = filled(), tiny.inputs(padding=None)
    forwards = model(**batch).last_hidden_state
    backwards = model(input_ids=batch["input_ids"].flip(1)).last_hidden_state.flip(1)
    assert (forwards - backwards).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_survives_far_distances(dtype):
    model = filled(1000.0).to(dtype)
    output = model(**tiny.inputs(padding=None), position_ids=torch.arange(12)[None] * 5000).last_hidden_state
    assert output.dtype == dtype and output.isfinite().all()


def test_the_paper_s_start_is_that_of_linear_layers():
    torch.manual_seed(0)
    config = tiny.stock_config(position_scheme="fire", position_init="paper", num_hidden_layers=8)
    for owner in owners(BertModel(config)):
        assert owner.fire_hidden.weight.abs().max() > 0.8 and owner.fire_hidden.bias.abs().max() > 0.8
        assert 0.8 / WIDTH**0.5 < owner.fire_output.weight.abs().max() <= 1 / WIDTH**0.5


def test_an_encoder_that_is_made_a_decoder_afterwards_is_not_saved(tmp_path):
    model = tiny.build("fire")
    model.config.is_decoder = True
    with pytest.raises(ValueError, match="fire's is_causal was False and is True"):
        model.save_pretrained(tmp_path)
