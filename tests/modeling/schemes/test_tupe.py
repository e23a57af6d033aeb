"""tupe: equal to the equations in loops, [CLS] untied in every family, silent at the start, and an end to the table."""

import itertools

import pytest
import tiny
import torch
from torch import nn
from transformers import BertModel, StaticCache
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc import position_parameters
from hf_posenc.modeling.schemes.table import build_schemes


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


TOLERANCE = 1e-5
# softmax does not see what is added to a whole row, and cls_to_others is.
WITHOUT_EFFECT = "encoder.cls_to_others.weight"


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


@torch.no_grad()
def position_scores(model: nn.Module, positions: list[int], first: int, paper: bool, with_t5: bool) -> torch.Tensor:
    """The position terms of one sequence, pair by pair: (heads, query, key)."""
    encoder, table = model.encoder, model.embeddings.position_embeddings.weight
    heads = model.config.num_attention_heads
    head_dim = model.config.hidden_size // heads
    scores = torch.zeros(heads, len(positions), len(positions), dtype=table.dtype)

    def normalised(position: int) -> torch.Tensor:
        row = table[position]
        row = (row - row.mean()) / (row.var(unbiased=False) + model.config.layer_norm_eps).sqrt()
        return row * encoder.pos_ln.weight + encoder.pos_ln.bias

    for (i, query), (j, key), h in itertools.product(enumerate(positions), enumerate(positions), range(heads)):
        rows = slice(h * head_dim, (h + 1) * head_dim)
        if query == first:
            scores[h, i, j] = encoder.cls_to_others.weight[h]
        elif key == first:
            scores[h, i, j] = encoder.others_to_cls.weight[h]
        else:
            left = encoder.pos_q_linear.weight[rows] @ normalised(query) + encoder.pos_q_linear.bias[rows]
            right = encoder.pos_k_linear.weight[rows] @ normalised(key) + encoder.pos_k_linear.bias[rows]
            scores[h, i, j] = left @ right / (head_dim * (2 if paper else 1)) ** 0.5
            if with_t5:
                bucket = T5Attention._relative_position_bucket(torch.tensor(key - query))
                scores[h, i, j] += encoder.relative_attention_bias.weight[bucket, h]
    return scores


@torch.no_grad()
def loops(model: nn.Module, hidden_states, positions, mask, first=0, paper=False, with_t5=False) -> torch.Tensor:
    """The first self-attention by the equations: output (batch, length, hidden), for positions as the table counts."""
    attention = model.encoder.layer[0].attention.self
    batch, length, _ = hidden_states.shape
    heads, head_dim = attention.num_attention_heads, attention.attention_head_size
    query, key, value = (
        linear(hidden_states).view(batch, length, heads, head_dim)
        for linear in (attention.query, attention.key, attention.value)
    )
    output = torch.zeros_like(value)
    for b in range(batch):
        scores = position_scores(model, positions[b].tolist(), first, paper, with_t5)
        for h in range(heads):
            content = query[b, :, h] @ key[b, :, h].t() / (head_dim * (2 if paper else 1)) ** 0.5
            total = (content + scores[h]).masked_fill(mask[b][None] == 0, -torch.inf)
            output[b, :, h] = total.softmax(-1) @ value[b, :, h]
    return output.flatten(-2)


def assert_equals_loops(model: nn.Module, inputs: dict, positions: torch.Tensor, first: int = 0, **kwargs) -> None:
    hidden_states, ours = first_attention(model, inputs)
    mask = inputs["attention_mask"]
    expected = loops(model, hidden_states, positions, mask, first, **kwargs)
    assert tiny.difference_where_attended(ours, expected, mask) < 1e-12
    # The places of [CLS] matter, and so does the order of the others.
    for other in (positions + 1, positions.flip(1)):
        assert (
            tiny.difference_where_attended(ours, loops(model, hidden_states, other, mask, first, **kwargs), mask)
            > 0.01
        )


@tiny.cross(
    scheme=["tupe", "absolute+tupe", "tupe+t5", "absolute+tupe+t5"],
    form=["checkpoint", "paper"],
    path=tiny.PATHS,
    indirect=("path",),
)
def test_scores_equal_the_equations_in_loops(scheme, form, path):
    model = tiny.build(scheme, position_form=form).double()
    inputs = tiny.inputs(batch=2, length=6)
    positions = torch.arange(6).expand(2, 6)
    assert_equals_loops(model, inputs, positions, paper=form == "paper", with_t5="t5" in scheme)


@pytest.mark.parametrize("scheme", ["tupe", "tupe+t5"])
def test_given_positions_place_cls(scheme):
    model = tiny.build(scheme).double()
    inputs = tiny.inputs(batch=2, length=6, padding=None)
    # Two packed documents have a [CLS] each; positions may repeat, leap, and leave 0 out.
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2], [9, 3, 3, 60, 7, 1]])
    assert_equals_loops(model, inputs, inputs["position_ids"], with_t5="t5" in scheme)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("scheme", ["tupe", "tupe+t5", "absolute+tupe"])
def test_cls_is_found_where_roberta_counts_past_padding(scheme, padding):
    model = tiny.build(scheme, "roberta").double()
    inputs = tiny.inputs(batch=2, length=6, family="roberta", padding=padding)
    mask = inputs["attention_mask"]
    pad = model.config.pad_token_id
    # The first token that is not padding is at pad + 1, padding itself at pad.
    positions = mask.cumsum(1) * mask + pad
    assert_equals_loops(model, inputs, positions, first=pad + 1, with_t5="t5" in scheme)

    given = dict(inputs, position_ids=positions)
    with torch.no_grad():
        difference = tiny.difference_where_attended(
            model(**given).last_hidden_state, model(**inputs).last_hidden_state, mask
        )
    assert difference < 1e-12


def test_cls_is_the_first_of_given_embeddings():
    model = tiny.build("tupe+t5", "roberta").double()
    inputs = tiny.inputs(batch=2, length=6, family="roberta", padding=None)
    first = model.config.pad_token_id + 1
    inputs["inputs_embeds"] = model.embeddings.word_embeddings(inputs.pop("input_ids")).detach()
    assert_equals_loops(model, inputs, torch.arange(6).expand(2, 6) + first, first=first, with_t5=True)


def test_electra_projects_from_the_width_of_its_table():
    model = tiny.build("tupe", "electra").double()
    assert model.encoder.pos_q_linear.weight.shape == (32, 24) and model.encoder.pos_ln.weight.shape == (24,)
    assert_equals_loops(model, tiny.inputs(batch=2, length=6), torch.arange(6).expand(2, 6))


@tiny.cross(given=[False, True], scheme=["tupe", "tupe+t5"], path=tiny.PATHS, indirect=("path",))
def test_backends_agree(scheme, given, path):
    model = tiny.build(scheme)
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


SMALL = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 5, "max_position_embeddings": 6}


@pytest.mark.parametrize(
    "scheme, flags",
    [("tupe", {}), pytest.param("tupe+t5", {"position_form": "paper"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_gradients_of_the_parameters_and_of_the_table_are_right(scheme, flags):
    buckets = {"position_buckets": 4, "position_max_distance": 8} if "t5" in scheme else {}
    model = tiny.build(scheme, **SMALL, **flags, **buckets, num_hidden_layers=1, attn_implementation="eager").double()
    inputs = tiny.inputs(batch=2, length=4)
    table = "embeddings.position_embeddings.weight"
    parameters = {**position_parameters(model), table: model.get_parameter(table)}

    def output(*values):
        return torch.func.functional_call(model, dict(zip(parameters, values)), kwargs=inputs).last_hidden_state

    torch.autograd.gradcheck(output, tuple(parameters.values()))


def loss_of(model: nn.Module, inputs: dict) -> torch.Tensor:
    output = model(**inputs).last_hidden_state
    return (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum()


@pytest.mark.parametrize("scheme", ["absolute+tupe", "absolute+tupe+t5"])
def test_starts_silent_and_every_parameter_learns(scheme):
    torch.manual_seed(0)
    stock = BertModel(tiny.stock_config()).eval()
    model = tiny.variant_class("bert")(tiny.variant_config(position_scheme=scheme)).eval()
    missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert set(missing) == set(position_parameters(model)) and not unexpected
    inputs = tiny.inputs()
    with torch.no_grad():
        expected = stock(**inputs).last_hidden_state
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected, rtol=0, atol=1e-6)

    model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        optimizer.step()
    for name, parameter in position_parameters(model).items():
        if name == WITHOUT_EFFECT:
            assert parameter.grad.abs().max() < 1e-10
        elif "relative_attention_bias" in name:  # buckets that no pair is in have no gradient
            assert (parameter.grad.abs().amax(1) > 1e-6).sum() > 5
        else:
            assert (parameter.grad.abs() > 1e-6).float().mean() > 0.9, name


def test_silent_start_is_one_zero_factor():
    model = tiny.variant_class("bert")(tiny.variant_config(position_scheme="tupe"))
    encoder = model.encoder
    for parameter in (*encoder.pos_q_linear.parameters(), encoder.cls_to_others.weight, encoder.others_to_cls.weight):
        assert parameter.abs().max() == 0
    assert abs(encoder.pos_k_linear.weight.std().item() / model.config.initializer_range - 1) < 0.1
    assert encoder.pos_k_linear.bias.abs().max() == 0
    assert (encoder.pos_ln.weight == 1).all() and (encoder.pos_ln.bias == 0).all()


def test_reference_start_is_normal():
    torch.manual_seed(0)
    config = tiny.variant_config(position_scheme="tupe", position_init="paper", num_attention_heads=64, hidden_size=64)
    encoder = tiny.variant_class("bert")(config).encoder
    for parameter in (encoder.pos_q_linear.weight, encoder.pos_k_linear.weight):
        assert abs(parameter.std().item() / config.initializer_range - 1) < 0.1
    for parameter in (encoder.cls_to_others.weight, encoder.others_to_cls.weight):
        assert abs(parameter.std().item() / config.initializer_range - 1) < 0.4
    assert encoder.pos_q_linear.bias.abs().max() == encoder.pos_k_linear.bias.abs().max() == 0


def test_has_the_parameters_of_the_checkpoint_format():
    model = tiny.build("tupe")
    assert {name: tuple(parameter.shape) for name, parameter in position_parameters(model).items()} == {
        "encoder.pos_ln.weight": (32,),
        "encoder.pos_ln.bias": (32,),
        "encoder.pos_q_linear.weight": (32, 32),
        "encoder.pos_q_linear.bias": (32,),
        "encoder.pos_k_linear.weight": (32, 32),
        "encoder.pos_k_linear.bias": (32,),
        "encoder.cls_to_others.weight": (4,),
        "encoder.others_to_cls.weight": (4,),
    }
    assert "embeddings.position_embeddings.weight" in model.state_dict()


def test_without_absolute_the_table_stays_out_of_the_words():
    model = tiny.build("tupe")
    for parameter in position_parameters(model).values():
        nn.init.zeros_(parameter)
    inputs = tiny.inputs(padding=None)
    order = torch.arange(11, -1, -1)
    with torch.no_grad():
        straight, turned = (
            model(input_ids).last_hidden_state for input_ids in (inputs["input_ids"], inputs["input_ids"][:, order])
        )
    torch.testing.assert_close(turned[:, order], straight, rtol=0, atol=TOLERANCE)


def test_row_of_cls_is_as_published_and_has_no_effect():
    model = tiny.build("tupe")
    inputs = tiny.inputs()
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        model.encoder.cls_to_others.weight += 3.0
        torch.testing.assert_close(model(**inputs).last_hidden_state, before, rtol=0, atol=TOLERANCE)
        model.encoder.others_to_cls.weight += 3.0
        assert (model(**inputs).last_hidden_state - before).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("scheme", ["tupe", "absolute+tupe", "tupe+t5"])
@pytest.mark.parametrize("family, head", [("bert", "LMHeadModel"), ("roberta", "ForCausalLM")])
def test_one_token_at_a_time_gives_what_the_whole_sequence_gives(family, head, scheme):
    model = tiny.build(scheme, family, head, is_decoder=True)
    input_ids = tiny.inputs(batch=2, length=8, family=family, padding=None)["input_ids"]
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


def test_a_static_cache_may_be_longer_than_the_table():
    model = tiny.build("tupe", head="LMHeadModel", is_decoder=True)
    input_ids = tiny.inputs(batch=1, length=8, padding=None)["input_ids"]
    cache = StaticCache(config=model.config, max_cache_len=200)
    with torch.no_grad():
        whole = model(input_ids, use_cache=False).logits
        pieces = [model(piece, **{tiny.CACHE: cache}).logits for piece in input_ids.split([5, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = tiny.build("absolute+tupe+t5").double().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        inputs = tiny.inputs()
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
        loss_of(model, inputs).backward()
        gradients.append({name: parameter.grad for name, parameter in position_parameters(model).items()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-10, atol=1e-10)
        assert name == WITHOUT_EFFECT or expected.abs().max() > 1e-6, name


@pytest.mark.parametrize("scheme", ["tupe", "absolute+tupe", "tupe+t5"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_positions_beyond_the_table_are_an_error_that_says_so(family, scheme):
    model = tiny.build(scheme, family)
    first = model.embeddings.first_position
    length = 64 - first
    fits = torch.full((1, length), 7)
    assert model(fits).last_hidden_state.isfinite().all()
    for inputs in (
        {"input_ids": torch.full((1, length + 1), 7)},
        {"inputs_embeds": torch.zeros(1, length + 1, 32)},
        {"input_ids": fits, "position_ids": torch.arange(length)[None] + first + 1},
    ):
        with pytest.raises(ValueError, match=f"{length + 1} tokens is longer than the position embedding matrix"):
            model(**inputs)


def test_a_cache_that_reaches_beyond_the_table_is_an_error_that_says_so():
    model = tiny.build("tupe", head="LMHeadModel", is_decoder=True)
    input_ids = tiny.inputs(batch=1, length=64, padding=None)["input_ids"]
    with torch.no_grad():
        cache = getattr(model(input_ids, use_cache=True), tiny.CACHE)
        with pytest.raises(ValueError, match="65 tokens is longer than the position embedding matrix"):
            model(input_ids[:, :1], **{tiny.CACHE: cache})


@pytest.mark.parametrize("scheme", ["deberta+tupe", "absolute+tupe+deberta", "tupe + disentangled"])
def test_the_paper_forms_of_deberta_and_tupe_exclude_each_other(scheme):
    with pytest.raises(ValueError, match="position_form"):
        tiny.variant_config(position_scheme=scheme, position_form="paper")
    assert len(build_schemes(tiny.variant_config(position_scheme=scheme))[1]) == 2


def test_form_paper_scales_once_and_cannot_start_silent():
    config = tiny.variant_config(position_scheme="absolute+tupe", position_form="paper")
    model = tiny.variant_class("bert")(config)
    for layer in model.encoder.layer:
        assert layer.attention.self.scaling == pytest.approx((2 * 8) ** -0.5)
    assert not model.encoder.position_schemes[0].starts_silent()
    assert tiny.build("absolute+tupe").encoder.position_schemes[0].starts_silent()
