"""Promise 7: all attention backends agree, for every scheme, whatever the mask, the positions and the dtype."""

import copy

import pytest
import tiny
import torch

from hf_posenc import position_parameters
from hf_posenc.modeling.attention import backends
from hf_posenc.modeling.attention.backends import Attention, score_bias
from hf_posenc.modeling.kernels import fast
from hf_posenc.modeling.kernels.constants import declare_constant
from hf_posenc.modeling.masks import Mask
from hf_posenc.modeling.schemes.table import SCHEMES
from hf_posenc.modeling.schemes.terms import PairTerm, RelativeTerm


TOLERANCE = 1e-5
COMPOSITES = ["absolute+t5", "sinusoidal+rope", "absolute+relative", "alibi+rope", "tupe+t5", "absolute+deberta+t5"]
ALL = [*SCHEMES, *COMPOSITES]
BACKENDS = ["eager", "sdpa", "flex_attention"]
# One per kind of work in the attention: none, bias, rotation, bias per pair, query and key tables, value side.
KINDS = ["absolute", "t5", "rope", "tupe", "deberta", "relative"]
slow = pytest.mark.slow
in_blocks = pytest.mark.usefixtures("blocks_for_all_lengths")
both_ways = {"path": tiny.PATHS, "indirect": ("path",)}


def run(model, implementation: str, **inputs) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def without_positions(model):
    """The same model with its position schemes silenced: parameters at zero, rotations and fixed terms taken out."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in position_parameters(model).values():
            parameter.zero_()
        if hasattr(model.embeddings, "position_embeddings"):
            model.embeddings.position_embeddings.weight.zero_()
        if hasattr(model.embeddings, "position_scale"):
            model.embeddings.position_scale.weight.zero_()
    model.encoder.position_schemes = ()
    for layer in model.encoder.layer:
        layer.attention.self.position_schemes = ()
    return model


@tiny.cross(scheme=ALL, padding=["right", "left"], **both_ways, rest=slow)
def test_backends_give_the_same_outputs(scheme, padding, path):
    model = tiny.build(scheme)
    inputs = tiny.inputs(padding=padding)
    mask = inputs["attention_mask"]
    outputs = {backend: run(model, backend, **inputs) for backend in BACKENDS}
    for backend in BACKENDS[1:]:
        assert tiny.difference_where_attended(outputs["eager"], outputs[backend], mask) < TOLERANCE, backend
    if scheme != "none":
        silenced = run(without_positions(model), "eager", **inputs)
        assert tiny.difference_where_attended(outputs["eager"], silenced, mask) > 100 * TOLERANCE


@tiny.cross(scheme=ALL, **both_ways)
def test_eager_and_sdpa_give_the_same_gradients(scheme, path):
    gradients = {}
    for backend in ("eager", "sdpa"):
        model = tiny.build(scheme, attn_implementation=backend).double()
        output = model(**tiny.inputs()).last_hidden_state
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
        gradients[backend] = {name: p.grad for name, p in model.named_parameters() if "pooler" not in name}
    torch.testing.assert_close(gradients["sdpa"], gradients["eager"], rtol=1e-8, atol=1e-8)
    for name in position_parameters(model):
        # One value for [CLS]'s whole row is nothing to a softmax: TUPE's own formula, not a lost gradient.
        if not name.endswith("cls_to_others.weight"):
            assert gradients["sdpa"][name].abs().max() > 1e-6, name


def masks_with_nothing_to_attend_to(kind: str, batch: int, length: int) -> torch.Tensor:
    """A mask of pairs in which some queries may attend to no key, or one of keys that leaves a sequence none."""
    if kind == "padding":
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[1] = 0
        mask[2, 7:] = 0
        return mask
    attended = torch.rand(batch, 1, length, length) < 0.6
    attended[..., 0] = True
    attended[:, :, 3:6] = False
    masked = -torch.inf if kind == "-inf" else torch.finfo(torch.float64).min
    return torch.zeros(attended.shape, dtype=torch.float64).masked_fill(~attended, masked)


@tiny.cross(
    scheme=[name for name in ALL if {*name.split("+")} - {"absolute", "sinusoidal", "rope", "none"}],
    kind=["padding", "pairs", "-inf"],
    frozen=[False, True],
    **both_ways,
)
def test_queries_that_may_attend_to_nothing_have_the_same_gradients_too(scheme, kind, frozen, path):
    """Frozen, a bias leads to another of PyTorch's kernels, which once turned such rows into enormous gradients."""
    input_ids = tiny.inputs(batch=3, padding=None)["input_ids"]
    mask = masks_with_nothing_to_attend_to(kind, *input_ids.shape)
    found = {}
    for backend in ("eager", "sdpa"):
        model = tiny.build(scheme, attn_implementation=backend).double()
        for name in position_parameters(model):
            model.get_parameter(name).requires_grad_(not frozen)
        output = model(input_ids, attention_mask=mask).last_hidden_state
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[backend] = {"output": output.detach(), **gradients}
    torch.testing.assert_close(found["sdpa"], found["eager"], rtol=1e-8, atol=1e-8)


@tiny.cross(scheme=ALL, **both_ways, strength=1)
def test_a_boolean_mask_of_pairs_is_one_for_every_backend(scheme, path):
    model = tiny.build(scheme)
    input_ids = tiny.inputs(padding=None)["input_ids"]
    mask = (torch.rand(3, 1, 12, 12) < 0.5) | torch.eye(12, dtype=torch.bool)
    eager, sdpa = (run(model, backend, input_ids=input_ids, attention_mask=mask) for backend in ("eager", "sdpa"))
    torch.testing.assert_close(sdpa, eager, rtol=0, atol=TOLERANCE)


@tiny.cross(scheme=ALL, backend=["eager", "sdpa"], **both_ways, strength=1)
def test_a_mask_of_minus_10000_is_the_boolean_mask(scheme, backend, path):
    """As models made masks for years: schemes that count visible tokens counted these."""
    model = tiny.build(scheme)
    input_ids = tiny.inputs(padding=None)["input_ids"]
    mask = (torch.rand(3, 1, 12, 12) < 0.5) | torch.eye(12, dtype=torch.bool)
    mask[1, ..., 3:6] = False
    added = torch.zeros(mask.shape).masked_fill(~mask, -10_000.0)
    boolean, additive = (run(model, backend, input_ids=input_ids, attention_mask=given) for given in (mask, added))
    torch.testing.assert_close(additive, boolean, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("scheme", ["t5", "deberta", "relative", "rope", "absolute", "fire", "cable"])
def test_a_mask_of_pairs_in_whole_numbers_is_refused(scheme, backend):
    model = tiny.build(scheme)
    mask = torch.ones(3, 1, 12, 12, dtype=torch.long)
    with pytest.raises(TypeError, match="boolean or additive floating point, got torch.int64"):
        run(model, backend, input_ids=tiny.inputs()["input_ids"], attention_mask=mask)


@in_blocks
def test_a_mask_overwritten_before_the_backward_pass_is_missed():
    model = tiny.build("t5", attn_implementation="sdpa")
    mask = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    output = model(tiny.inputs()["input_ids"], attention_mask=mask).last_hidden_state
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@in_blocks
@pytest.mark.parametrize("scheme", ALL)
def test_a_copied_layer_reads_the_encoder_that_it_is_copied_into(scheme):
    teacher, student = tiny.build(scheme, seed=1), tiny.build(scheme, seed=2)
    layers = [copy.deepcopy(layer) for layer in teacher.encoder.layer]
    student.encoder.layer = torch.nn.ModuleList(layers[::-1])
    inputs = tiny.inputs()
    loaded = type(student)(student.config).eval()
    loaded.load_state_dict(student.state_dict())
    torch.testing.assert_close(run(student, "sdpa", **inputs), run(loaded, "sdpa", **inputs), rtol=0, atol=TOLERANCE)
    student(**inputs).last_hidden_state.square().sum().backward()
    for name in position_parameters(student):
        assert student.get_parameter(name).grad is not None, name


def test_a_layer_alone_says_that_it_needs_its_encoder():
    layer = tiny.build("t5").encoder.layer[0]
    with pytest.raises(ValueError, match="call its model or encoder"):
        layer(torch.zeros(1, 3, 32))


@tiny.cross(scheme=ALL, backend=["eager", "sdpa"], strength=1)
def test_backward_hooks_on_every_module_are_called(scheme, backend):
    model = tiny.build(scheme, attn_implementation=backend)
    called = set()
    for name, module in model.named_modules():
        module.register_full_backward_hook(lambda *_, name=name: called.add(name))
    model(**tiny.inputs()).last_hidden_state.sum().backward()
    owners = {name.rpartition(".")[0] for name in position_parameters(model)}
    assert {name for name in owners if not [*model.get_submodule(name).children()]} <= called


def block_mask_of(documents: torch.Tensor, implementation: str):
    """The mask that keeps packed documents apart, in the form of a backend."""
    same = (documents[:, None, :, None] == documents[:, None, None, :]).expand(-1, 1, -1, -1)
    if implementation == "sdpa":
        return same
    if implementation == "eager":
        return torch.zeros(same.shape).masked_fill(~same, torch.finfo(torch.float32).min)
    from torch.nn.attention.flex_attention import create_block_mask

    length = documents.shape[1]

    def same_document(batch, head, query, key):
        return documents[batch, query] == documents[batch, key]

    return create_block_mask(same_document, documents.shape[0], None, length, length, device="cpu")


@tiny.cross(scheme=ALL, backend=BACKENDS, **both_ways, strength=1)
def test_packed_documents_compute_what_they_compute_alone(scheme, backend, path):
    model = tiny.build(scheme, attn_implementation=backend)
    first, second = 5, 9
    input_ids = tiny.inputs(batch=2, length=first + second, padding=None)["input_ids"]
    documents = torch.tensor([[0] * first + [1] * second]).expand(2, -1)
    position_ids = torch.cat([torch.arange(first), torch.arange(second)])[None].expand(2, -1)
    packed = run(
        model,
        backend,
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=block_mask_of(documents, backend),
    )
    alone = [run(model, backend, input_ids=part) for part in input_ids.split([first, second], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=TOLERANCE)


@in_blocks
def test_positions_given_per_row_place_each_row_by_itself():
    model = tiny.build("absolute+relative+rope")
    inputs = tiny.inputs(batch=2, length=6, padding=None)
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 3, 3, 0, 9, 20]])
    together = run(model, "sdpa", **inputs, position_ids=position_ids)
    for row in range(2):
        alone = run(
            model, "eager", input_ids=inputs["input_ids"][row : row + 1], position_ids=position_ids[row : row + 1]
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=TOLERANCE)
    straight = run(model, "eager", **inputs)
    torch.testing.assert_close(together[0], straight[0], rtol=0, atol=TOLERANCE)
    assert (together[1] - straight[1]).abs().max() > 100 * TOLERANCE


@tiny.cross(scheme=[name for name in ALL if name not in ("absolute", "sinusoidal", "none")], **both_ways, strength=1)
def test_a_bias_in_a_custom_mask_is_added(scheme, path):
    model = tiny.build(scheme)
    inputs = tiny.inputs(padding=None, length=7)
    bias = torch.randn(3, 1, 7, 7)
    bias[:, :, :, 5] = torch.finfo(torch.float32).min
    eager = run(model, "eager", input_ids=inputs["input_ids"], attention_mask=bias)
    sdpa = run(model, "sdpa", input_ids=inputs["input_ids"], attention_mask=bias)
    torch.testing.assert_close(eager, sdpa, rtol=0, atol=TOLERANCE)
    plain = run(model, "eager", **inputs)
    assert (eager - plain).abs().max() > 100 * TOLERANCE


@tiny.cross(scheme=ALL, dtype=[torch.float16, torch.bfloat16], backend=["eager", "sdpa"], **both_ways, strength=1)
def test_half_precision_follows_single_precision(scheme, dtype, backend, path):
    model = tiny.build(scheme, initializer_range=0.05)
    inputs = tiny.inputs()
    expected = run(model, backend, **inputs)
    half = copy.deepcopy(model).to(dtype)
    output = run(half, backend, **inputs)
    assert output.dtype == dtype
    # Every token, padding too: masked scores must not overflow to a row of NaN.
    assert output.isfinite().all()
    bound = 0.02 if dtype == torch.float16 else 0.15
    assert tiny.difference_where_attended(output.float(), expected, inputs["attention_mask"]) < bound


@tiny.cross(backend=["eager", "sdpa"], **both_ways)
def test_half_precision_masks_survive_strongly_negative_terms(backend, path):
    model = tiny.build("t5")
    with torch.no_grad():
        model.encoder.relative_attention_bias.weight.fill_(-200.0)
    half = model.half()
    inputs = tiny.inputs(batch=1, length=6, padding=None)
    inputs["attention_mask"][:] = 0  # nothing to attend to: the worst case
    assert run(half, backend, **inputs).isfinite().all()


@tiny.cross(scheme=ALL, reentrant=[True, False], **both_ways, strength=1)
def test_gradient_checkpointing_changes_no_gradient(scheme, reentrant, path):
    gradients = []
    for checkpointing in (False, True):
        model = tiny.build(scheme, position_every_layer=True if scheme == "absolute" else None).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**tiny.inputs()).last_hidden_state.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "pooler" not in name})
    torch.testing.assert_close(gradients[1], gradients[0])


@slow
@pytest.mark.compiled
@pytest.mark.parametrize("scheme", ["t5", "relative_key"])
def test_compiled_flex_attention_agrees_too(scheme):
    model = tiny.build(scheme)
    for length in (12, 20):
        inputs = tiny.inputs(length=length)
        eager, flex = run(model, "eager", **inputs), run(model, "flex_attention", **inputs)
        assert tiny.difference_where_attended(eager, flex, inputs["attention_mask"]) < TOLERANCE


@slow
@pytest.mark.compiled
@pytest.mark.parametrize("scheme, backend", [(kind, "eager") for kind in KINDS] + [("deberta", "inductor")])
def test_compiled_equals_uncompiled(scheme, backend):
    """One graph of every kind of work; code is made of the one with most of it."""
    model = tiny.build(scheme)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (6, 17):
        inputs = tiny.inputs(length=length)
        with torch.no_grad():
            difference = tiny.difference_where_attended(
                compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state, inputs["attention_mask"]
            )
        assert difference < TOLERANCE


@slow
@pytest.mark.compiled
@pytest.mark.parametrize("scheme", KINDS)
def test_compiled_training_gives_the_same_gradients(scheme):
    model = tiny.build(scheme).train()
    inputs = tiny.inputs(padding="right")
    model(**inputs).last_hidden_state.square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.compile(model)(**inputs).last_hidden_state.square().mean().backward()
    # Compiled, the pooler, which is not part of this loss, may have gradients of zero.
    gradients = {name: p.grad for name, p in model.named_parameters() if name in expected}
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", ALL)
def test_output_attentions_are_the_weights(scheme):
    model = tiny.build(scheme, attn_implementation="eager")
    inputs = tiny.inputs()
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    assert len(attentions) == 2
    for weights in attentions:
        assert weights.shape == (3, 4, 12, 12)
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, 12))
        assert weights[inputs["attention_mask"][:, None, None].expand_as(weights) == 0].max() == 0


@in_blocks
@pytest.mark.parametrize("scheme", [name for name in ALL if not {"absolute", "tupe"} & {*name.split("+")}])
def test_sequences_go_beyond_max_position_embeddings(scheme):
    model = tiny.build(scheme)
    inputs = tiny.inputs(batch=2, length=100)
    eager, sdpa = run(model, "eager", **inputs), run(model, "sdpa", **inputs)
    assert tiny.difference_where_attended(eager, sdpa, inputs["attention_mask"]) < TOLERANCE


@tiny.cross(scheme=KINDS, family=[name for name in tiny.FAMILIES if name != "bert"], **both_ways, rest=slow)
def test_every_family_agrees_too(scheme, family, path):
    model = tiny.build(scheme, family)
    inputs = tiny.inputs(family=family)
    outputs = {backend: run(model, backend, **inputs) for backend in BACKENDS}
    for backend in BACKENDS[1:]:
        assert tiny.difference_where_attended(outputs["eager"], outputs[backend], inputs["attention_mask"]) < TOLERANCE


@in_blocks
def test_attention_dropout_is_applied_with_score_terms():
    model = tiny.build("t5", attention_probs_dropout_prob=0.5)
    inputs = tiny.inputs()
    for backend in ("eager", "sdpa"):
        quiet = run(model.eval(), backend, **inputs)
        torch.manual_seed(0)
        first, second = run(model.train(), backend, **inputs), run(model, backend, **inputs)
        assert (first - second).abs().max() > 1e-3
        mean = torch.stack([run(model, backend, **inputs) for _ in range(100)]).mean(0)
        assert (mean - quiet).abs().mean() < (first - quiet).abs().mean() / 2


@tiny.cross(
    tables=[("query",), ("key",), ("query", "key"), ("query", "key", "bias")],
    lengths=[(1, 1), (7, 7), (16, 16), (3, 9), (1, 6)],
    shared=[False, True],
    batch=[1, 3],
    constant=[False, True],
)
def test_products_read_through_views_are_those_that_are_gathered(
    tables, lengths, shared, batch, constant, monkeypatch
):
    torch.manual_seed(0)
    (query_length, key_length), heads, head_dim, count = lengths, 4, 6, 11
    rows = torch.randint(count, (query_length + key_length - 1,))
    made = {
        f"{name}_table": torch.randn(1 if shared else heads, count, head_dim, dtype=torch.float64)
        for name in tables
        if name != "bias"
    }
    if constant:
        for tensor in (rows, *made.values()):
            declare_constant(tensor)
    if "bias" in tables:
        made["query_bias"] = torch.randn(heads, head_dim, dtype=torch.float64)
    term = RelativeTerm(rows, **made)
    query, key = (
        torch.randn(batch, length, heads, head_dim, dtype=torch.float64).transpose(1, 2)
        for length in (query_length, key_length)
    )
    gathered = score_bias(query, key, [term])
    assert not fast.reads_through_views(query)
    with torch.no_grad():
        for _ in range(2):  # the second time from what is kept with constants
            assert fast.reads_through_views(query)
            seen = score_bias(query, key, [term])
            torch.testing.assert_close(seen, gathered, rtol=0, atol=1e-12)


@tiny.cross(
    mask=[None, "padding", "additive"],
    shared=[False, True],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    backend=["eager", "sdpa", "views", "written out", "blocks"],
)
def test_each_backend_computes_the_formula(mask, shared, dtype, backend):
    if backend == "views" and (shared or mask is not None or dtype != torch.float32):
        pytest.skip("it is for float32, without a mask and with scores of each head and sequence")
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 9, 4, 6, dtype=dtype).transpose(1, 2) for _ in range(3))
    bias = torch.randn(1 if shared else 2, 4, 9, 9, dtype=dtype)
    attended = torch.rand(2, 1, 9, 9) < 0.7
    attended[..., 0] = True
    given = {"padding": attended, "additive": torch.where(attended, 0.5, -torch.inf).to(dtype)}.get(mask)
    scores = query.double() @ key.double().mT * 0.3 + bias.double()
    if mask is not None:
        scores = scores.masked_fill(~attended, -torch.inf) + (0.5 if mask == "additive" else 0.0)
    expected = (scores.softmax(-1) @ value.double()).transpose(1, 2)
    with torch.no_grad():
        states, terms = (query, query, key, value), [PairTerm(bias)]
        attention = Attention(None, "sdpa", *states, terms, Mask.of(given, query, key), 0.3)
        output, _ = backends.BACKENDS[backend].compute(attention)
    assert output.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)
