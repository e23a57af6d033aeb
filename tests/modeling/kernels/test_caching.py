"""What is computed once from parameters is computed again whenever they have changed, however that came about."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from torch import nn
from torch.autograd import forward_ad

import hf_posenc
from hf_posenc import position_parameters
from hf_posenc.modeling.kernels import caching
from hf_posenc.modeling.kernels.constants import declare_constant
from hf_posenc.modeling.kernels.distance_products import Table
from hf_posenc.modeling.schemes.parameters import PositionLinear, PositionTable


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


SCHEMES = {
    "deberta": {},
    "deberta, own projections": {"position_share_projections": False, "position_norm": True},
    "deberta, all types": {"position_attention_types": ["c2p", "p2c", "p2p"]},
    "transformer_xl": {},
    "tupe": {},
}


def test_every_scheme_that_caches_something_is_a_case():
    keeping = set()
    for name in tiny.schemes_with_terms():
        model = tiny.build(name)
        output(model)
        if any(module in caching._cache for module in model.modules()):
            keeping.add(name)
    assert keeping == {case.split(",")[0] for case in SCHEMES}


@pytest.fixture(params=SCHEMES)
def model(request):
    return tiny.build(request.param.split(",")[0], **SCHEMES[request.param])


def output(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny.inputs()).last_hidden_state


def fresh(model) -> torch.Tensor:
    """The output of a model of the same values that has never computed anything."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    return output(other.to(model.dtype))


@torch.no_grad()
def change(model, by) -> None:
    for name in position_parameters(model):
        by(model.get_parameter(name))


CHANGES = {
    "in place": lambda parameter: parameter.mul_(1.5),
    "through .data": lambda parameter: parameter.data.mul_(1.5),
    "copied into .data": lambda parameter: parameter.data.copy_(parameter.detach().flip(0) * 1.5),
    "new .data": lambda parameter: setattr(parameter, "data", parameter.detach() * 1.5),
    "one entry": lambda parameter: parameter.data.view(-1)[parameter.numel() // 2].add_(3.0),
}


def projections_of(model, monkeypatch) -> int:
    """How many products with weights an evaluation computes."""
    counted = []
    linear = nn.functional.linear
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", lambda *arguments: counted.append(1) or linear(*arguments))
        output(model)
    return len(counted)


def test_it_is_computed_once(model, monkeypatch):
    content_alone = projections_of(tiny.build("none"), monkeypatch)
    assert projections_of(model, monkeypatch) > content_alone
    assert projections_of(model, monkeypatch) == content_alone
    caching.clear_cache()
    assert projections_of(model, monkeypatch) > content_alone


def test_what_is_cached_is_what_was_computed(model):
    assert torch.equal(output(model), output(model))
    assert torch.equal(output(model), fresh(model))


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_parameters_is_seen(model, how):
    before = output(model)
    change(model, CHANGES[how])
    after = output(model)
    assert torch.equal(after, fresh(model))
    assert (after - before).abs().max() > 1e-4


@tiny.cross(
    change=[
        lambda weight: weight[300, 77].add_(1e-3),
        lambda weight: weight.copy_(weight.flip(0)),
        lambda weight: weight.copy_(weight.flip(1)),
        lambda weight: weight.neg_(),
        lambda weight: weight[:, 5].copy_(weight[:, 6]),
        lambda weight: weight.mul_(1 + 2e-2),
        lambda weight: weight[0].copy_(weight[0].roll(1)),
    ],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    strength=1,
)
def test_a_change_of_a_large_matrix_is_seen(change, dtype):
    """Those of tiny models are compared entry by entry; these are told by a product."""
    linear = nn.Linear(256, 512).to(dtype).eval()
    assert linear.weight.numel() > caching.LARGE
    rows = torch.randn(3, 256, dtype=dtype)
    with torch.no_grad():
        first = caching.cached(linear, [linear], [rows], (), lambda: linear(rows))
        assert caching.cached(linear, [linear], [rows], (), lambda: linear(rows)) is first
        change(linear.weight.data)
        again = caching.cached(linear, [linear], [rows], (), lambda: linear(rows))
        assert torch.equal(again, linear(rows)) and not torch.equal(again, first)


class Kept:
    """What a linear layer gives for some rows, kept, and how often it was computed."""

    def __init__(self, linear: nn.Linear):
        self.linear, self.calls = linear.eval(), 0
        self.rows = torch.randn(3, linear.in_features, dtype=linear.weight.dtype)

    def compute(self) -> torch.Tensor:
        self.calls += 1
        return self.linear(self.rows)

    @torch.no_grad()
    def is_computed(self) -> bool:
        """Whether it has to be computed, now."""
        before = self.calls
        found = caching.cached(self.linear, [self.linear], [self.rows], (), self.compute)
        assert torch.equal(found, self.linear(self.rows))
        return self.calls > before


@pytest.fixture
def kept() -> Kept:
    torch.manual_seed(0)
    kept = Kept(nn.Linear(256, 512))
    assert kept.is_computed() and not kept.is_computed()
    return kept


class KeptWithProducts(Kept):
    """The same, told by a product with hidden states that is computed anyway."""

    @torch.no_grad()
    def is_computed(self, tokens: int = 16) -> bool:
        before, states = self.calls, torch.randn(tokens, self.linear.in_features)
        vectors = caching.vectors_of(self.linear, [self.linear])
        assert (vectors is None) == (before == 0)
        joint = self.linear(torch.cat([states, *(vectors or [])]))
        products = {id(self.linear.weight): (len(joint), joint[-1])} if vectors else None
        found = caching.cached(self.linear, [self.linear], [self.rows], (), self.compute, products=products)
        assert torch.equal(found, self.linear(self.rows))
        return self.calls > before


@pytest.fixture
def kept_with_products() -> KeptWithProducts:
    torch.manual_seed(0)
    kept = KeptWithProducts(nn.Linear(256, 512))
    assert kept.is_computed()
    return kept


def test_a_product_with_hidden_states_tells_what_reading_the_matrix_tells(kept_with_products, monkeypatch):
    weight = kept_with_products.linear.weight.data
    for _ in range(2):
        assert not any(kept_with_products.is_computed(tokens) for tokens in (1, 16, 17))
        # Each number of rows is known by now, and nothing is read for it alone.
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__matmul__", None)
            assert not any(kept_with_products.is_computed(tokens) for tokens in (1, 16, 17))
        before = weight.clone()
        for change in (weight[300, 77].add_, weight[5].mul_, weight.mul_):
            change(1 + 1e-2)
            assert kept_with_products.is_computed() and not kept_with_products.is_computed()
        weight.copy_(before)
        assert kept_with_products.is_computed()
        kept_with_products.linear.bias.data[3] += 1
        assert kept_with_products.is_computed()


@pytest.mark.parametrize("change", ["training", "hook", "parametrization"])
def test_no_vectors_are_given_for_a_module_that_is_more_than_a_matrix(kept_with_products, change):
    linear = kept_with_products.linear
    if change == "training":
        linear.train()
    elif change == "hook":
        linear.register_forward_hook(lambda *arguments: None)
    else:
        nn.utils.parametrizations.weight_norm(linear)
    with torch.no_grad():
        assert caching.vectors_of(linear, [linear]) is None


class Quantized(torch.Tensor):
    """A parameter of another class, as torchao's are."""


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_layer_with_quantized_parameters_is_not_plain(kept, name):
    """Its scale may be one for all rows that are projected in one call."""
    linear = kept.linear.eval()
    assert caching.is_plain(linear)
    setattr(linear, name, nn.Parameter(getattr(linear, name).detach().as_subclass(Quantized)))
    assert not caching.is_plain(linear)


def test_which_changes_are_seen_is_not_known_beforehand(kept):
    """Whoever knows the vector that tells changes can make one that it does not tell."""
    vector = torch.randn(256, generator=torch.Generator().manual_seed(0))
    change = torch.randn(512, 256) * 1e-2
    change -= torch.outer(change @ vector, vector) / vector.square().sum()
    weight = kept.linear.weight.detach()
    is_told = (weight + change) @ vector != weight @ vector
    change[is_told] = 0
    assert change.norm() > 1
    kept.linear.weight.data.add_(change)
    assert kept.is_computed()


def test_the_vector_that_tells_changes_is_another_in_every_process_and_leaves_random_numbers_alone():
    def draw() -> torch.Tensor:
        caching._random_vector.cache_clear()
        return caching._random_vector(256, torch.float32)

    state = torch.get_rng_state()
    assert not torch.equal(draw(), draw())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("place, change", [((5, 6), 1e-4), ((5, 7), 0.1)], ids=["beside", "inside"])
def test_large_columns_hide_no_change(kept, place, change):
    with torch.no_grad():
        kept.linear.weight[:, 7] = 1e4
    assert kept.is_computed() and not kept.is_computed()
    kept.linear.weight.data[place] += change
    assert kept.is_computed()


def test_columns_of_zeros_hide_no_change(kept):
    with torch.no_grad():
        kept.linear.weight[:, 7] = 0
    assert kept.is_computed() and not kept.is_computed()
    kept.linear.weight.data[5, 7] = 1e-12
    assert kept.is_computed()


def least(weight: torch.Tensor) -> torch.Tensor:
    """With one number changed by the least there is."""
    changed = weight.detach().clone()
    changed[3, 4] = torch.nextafter(changed[3, 4], changed.new_tensor(torch.inf))
    return changed


COUNTED = {
    "in place": lambda linear: linear.weight.copy_(least(linear.weight)),
    "in place, one entry": lambda linear: linear.weight[3, 4:5].copy_(least(linear.weight)[3, 4:5]),
    "loaded": lambda linear: linear.load_state_dict({"weight": least(linear.weight), "bias": linear.bias}),
    "another parameter": lambda linear: setattr(linear, "weight", nn.Parameter(least(linear.weight))),
    "another .data": lambda linear: setattr(linear.weight, "data", least(linear.weight)),
    "a detached view": lambda linear: linear.weight.detach().copy_(least(linear.weight)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", COUNTED)
def test_the_least_change_is_seen_where_pytorch_counts_it(kept, how, mode):
    with mode():
        COUNTED[how](kept.linear)
    assert kept.is_computed() and not kept.is_computed()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_least_change_in_half_precision_is_seen(dtype):
    kept = Kept(nn.Linear(256, 512).to(dtype))
    assert kept.is_computed() and not kept.is_computed()
    kept.linear.weight.data.view(torch.int16)[3, 4] += 1
    assert kept.is_computed()


def test_the_least_change_of_what_was_made_in_inference_mode_is_seen():
    """PyTorch counts no changes of such tensors."""
    with torch.inference_mode():
        kept = Kept(nn.Linear(256, 512))
    assert kept.linear.weight.is_inference()
    assert kept.is_computed() and not kept.is_computed()
    with torch.inference_mode():
        kept.linear.weight.copy_(least(kept.linear.weight))
    assert kept.is_computed() and not kept.is_computed()


def test_writes_that_pytorch_does_not_count_are_seen(kept):
    version = kept.linear.weight._version
    kept.linear.weight.detach().numpy()[3, 4] += 1e-3
    assert kept.is_computed()
    torch._foreach_add_([kept.linear.weight.data], 1e-3)
    assert kept.is_computed()
    assert kept.linear.weight._version == version


def test_matrices_that_were_replaced_are_not_held(kept):
    before = weakref.ref(kept.linear.weight)
    kept.linear.weight = nn.Parameter(least(kept.linear.weight))
    gc.collect()
    assert before() is None


def test_settings_of_modules_are_seen():
    model = tiny.build("deberta", position_norm=True)
    before = output(model)
    model.encoder.LayerNorm.eps = 0.5
    after = output(model)
    caching.clear_cache()
    assert torch.equal(after, output(model))
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    "scheme, setting, value",
    [("deberta", "form", "paper"), ("deberta", "norm", True), ("transformer_xl", "base", 50.0)],
)
def test_other_settings_of_a_scheme_are_seen(scheme, setting, value):
    """A scheme is asked again in every call, and by whoever tries its settings out."""
    model = tiny.build(scheme, **({"position_norm": True} if setting == "norm" else {}))
    [own] = model.encoder.layer[0].attention.self.position_schemes
    before = output(model)
    setattr(own, setting, value if getattr(own, setting) != value else not value)
    after = output(model)
    caching.clear_cache()
    assert torch.equal(after, output(model))
    assert (after - before).abs().max() > 1e-3


def test_a_matrix_of_numbers_that_are_none_is_computed_again():
    linear = nn.Linear(256, 512).eval()
    linear.weight.data[3, 3] = float("nan")
    rows, calls = torch.randn(3, 256), []
    with torch.no_grad():
        for _ in range(2):
            caching.cached(linear, [linear], [rows], (), lambda: calls.append(1) or linear(rows))
    assert len(calls) == 2


@pytest.mark.parametrize("scheme", ["deberta", "transformer_xl"])
def test_layouts_serve_every_length(scheme):
    """What is laid out for a sequence serves shorter ones; each length in any order gives what it gives alone."""
    model = tiny.build(scheme)
    batches = {length: tiny.inputs(length=length) for length in (9, 16, 24, 33, 40)}

    def run(length: int) -> torch.Tensor:
        with torch.no_grad():
            return model(**batches[length]).last_hidden_state

    alone = {}
    for length in batches:
        caching.clear_cache()
        alone[length] = run(length)
    for length in (33, 9, 24, 40, 16, 33, 9):
        torch.testing.assert_close(run(length), alone[length], rtol=0, atol=2e-6)


def test_layouts_are_kept_with_constant_tables_alone():
    table, rows = torch.randn(2, 31, 4), torch.arange(31)
    whole, part = (Table([(table, chosen)], 2, 0) for chosen in (rows, rows[4:-4]))
    fresh = Table([(table.clone(), rows[4:-4])], 2, 0).columns(slice(0, 2)).clone()
    assert whole.columns(slice(0, 2)).data_ptr() != Table([(table, rows)], 2, 0).columns(slice(0, 2)).data_ptr()
    declare_constant(table)
    long = Table([(table, rows)], 2, 0).columns(slice(0, 2))
    short = part.columns(slice(0, 2))
    assert short.untyped_storage().data_ptr() == long.untyped_storage().data_ptr()
    assert torch.equal(short[..., :23], fresh[..., :23])
    # Rows that do not lie in the middle are laid out for themselves.
    other = Table([(table, rows[:23])], 2, 0).columns(slice(1, 2))
    assert torch.equal(other[..., :23], table[1:, :23].mT)


def test_load_state_dict_is_seen(model):
    output(model)
    other = tiny.fill_positions(copy.deepcopy(model), seed=5)
    model.load_state_dict(other.state_dict())
    assert torch.equal(output(model), fresh(other))


def test_training_between_two_evaluations_is_seen(model):
    before = output(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    model(**tiny.inputs()).last_hidden_state.square().mean().backward()
    optimizer.step()
    after = output(model.eval())
    assert torch.equal(after, fresh(model))
    assert (after - before).abs().max() > 1e-4


def test_training_clears_it(model):
    with torch.no_grad():
        model(**tiny.inputs())
    assert any(module in caching._cache for module in model.modules())
    model.train()(**tiny.inputs())
    assert not any(module in caching._cache for module in model.modules())


def test_gradients_flow_in_eval_mode_too(model):
    output(model)
    model(**tiny.inputs()).last_hidden_state.square().mean().backward()
    assert all(model.get_parameter(name).grad is not None for name in position_parameters(model))


def test_a_copy_has_its_own(model):
    before = output(model)
    other = copy.deepcopy(model)
    change(other, CHANGES["through .data"])
    assert torch.equal(output(other), fresh(other))
    assert torch.equal(output(model), before)


def test_nothing_of_it_is_saved(model):
    fresh_size, keys = len(pickle.dumps(copy.deepcopy(model))), model.state_dict().keys()
    output(model)
    assert len(pickle.dumps(model)) == fresh_size
    assert model.state_dict().keys() == keys


def test_another_dtype_is_seen(model):
    single = output(model)
    double = output(model.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double, fresh(model), rtol=0, atol=1e-12)
    assert not torch.equal(double.float(), single)


def test_lora_merged_and_unmerged_is_seen():
    from peft import LoraConfig, get_peft_model

    model = tiny.build("deberta")
    peft = get_peft_model(model, LoraConfig(target_modules=["query", "key"], init_lora_weights=False))
    base = peft.base_model.model
    unmerged = output(base)
    peft.merge_adapter()
    torch.testing.assert_close(output(base), unmerged, rtol=0, atol=1e-4)
    peft.unmerge_adapter()
    torch.testing.assert_close(output(base), unmerged, rtol=0, atol=1e-4)
    with peft.disable_adapter():
        assert (output(base) - unmerged).abs().max() > 1e-2
    merged = peft.merge_and_unload()
    torch.testing.assert_close(output(merged), unmerged, rtol=0, atol=1e-4)
    change(merged, CHANGES["through .data"])
    assert torch.equal(output(merged), fresh(merged))


def test_two_threads_get_the_same(model):
    expected = fresh(model)
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(lambda _: output(model), range(8))]
    assert all(torch.equal(one, expected) for one in found)


def test_different_lengths_do_not_share_what_depends_on_them():
    model = tiny.build("transformer_xl")
    for length in (5, 9, 5):
        ids = torch.arange(1, length + 1)[None]
        with torch.no_grad():
            found = model(ids).last_hidden_state
            expected = tiny.build("transformer_xl")(ids).last_hidden_state
        assert torch.equal(found, expected)


def test_tensors_in_the_place_of_parameters_are_seen(model):
    """As hypernetworks and replicas of nn.DataParallel have them."""
    before = output(model)
    for module in model.modules():
        if type(module) in caching.PLAIN and "weight" in module._parameters:
            weight = module.weight.detach()
            del module.weight
            module.weight = weight
    assert torch.equal(output(model), before)
    for module in model.modules():
        if "weight" in module.__dict__:
            module.weight = module.weight * 1.5
    after = output(model)
    for module in model.modules():
        if "weight" in module.__dict__:
            module.weight = torch.nn.Parameter(module.__dict__.pop("weight"))
    assert torch.equal(after, fresh(model))
    assert (after - before).abs().max() > 1e-4


def test_another_scaling_is_seen(model):
    before = output(model)
    other = copy.deepcopy(model)  # has never computed anything
    for changed in (model, other):
        for number, layer in enumerate(changed.encoder.layer):
            layer.attention.self.scaling *= 2 + number
    assert torch.equal(output(model), output(other))
    assert (output(model) - before).abs().max() > 1e-4


def test_tangents_are_carried(model):
    model.set_attn_implementation("eager")
    output(model)  # a result is cached
    parameters = {name: model.get_parameter(name).detach() for name in position_parameters(model)}
    tangents = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    with torch.no_grad(), forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(parameters[name], tangents[name]) for name in parameters}
        found = torch.func.functional_call(model, duals, kwargs=tiny.inputs()).last_hidden_state
        tangent = forward_ad.unpack_dual(found).tangent
    step = 1e-3
    moved = {name: parameters[name] + step * tangents[name] for name in parameters}
    back = {name: parameters[name] - step * tangents[name] for name in parameters}
    with torch.no_grad():
        high, low = (
            torch.func.functional_call(
                model.double(), {n: v.double() for n, v in values.items()}, kwargs=tiny.inputs()
            )
            for values in (moved, back)
        )
    expected = (high.last_hidden_state - low.last_hidden_state) / (2 * step)
    assert (tangent.double() - expected).norm() < 1e-2 * expected.norm()


def test_global_hooks_are_called_every_time(model):
    output(model)
    modules = [module for module in model.modules() if isinstance(module, caching.PLAIN)]
    called = []
    before = nn.modules.module.register_module_forward_pre_hook(lambda module, arguments: called.append(module))
    after = nn.modules.module.register_module_forward_hook(lambda module, arguments, result: called.append(module))
    try:
        output(model)
        first = [called.count(module) for module in modules]
        called.clear()
        output(model)
        assert [called.count(module) for module in modules] == first
    finally:
        before.remove()
        after.remove()
    parts = [*model.encoder.children(), *model.encoder.layer[0].attention.self.children()]
    reading = [module for module in parts if isinstance(module, caching.PLAIN) and not isinstance(module, nn.Dropout)]
    assert all(module in called for module in reading)


def test_a_global_hook_may_change_what_a_projection_gives(model):
    plain = output(model)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, arguments, result: result * 3 if isinstance(module, PositionTable | PositionLinear) else None
    )
    try:
        hooked = output(model)
    finally:
        handle.remove()
    assert (hooked - plain).abs().max() > 1e-2
    assert torch.equal(output(model), plain)


def test_the_cache_can_be_switched_off(model):
    expected = output(model)
    keeps = [module for module in model.modules() if module in caching._cache]
    assert keeps
    with hf_posenc.cache_projections(False):
        assert not any(module in caching._cache for module in keeps)
        # Of a table's rows, only those that distances reach are multiplied then: sums may round otherwise.
        torch.testing.assert_close(output(model), expected, rtol=0, atol=1e-5)
        assert not any(module in caching._cache for module in keeps)
    output(model)
    assert all(module in caching._cache for module in keeps)


def test_deberta_projects_the_rows_that_distances_reach():
    for types in (["c2p", "p2c"], ["c2p", "p2c", "p2p"]):
        model, seen = tiny.build("deberta", position_attention_types=types), []
        expected = output(model)
        embeddings = model.encoder.rel_embeddings
        embeddings.register_forward_hook(lambda module, given, out, seen=seen: seen.append(out.shape[0]))
        found = model(**tiny.inputs()).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert set(seen) == {23}  # 12 tokens are up to 11 apart
