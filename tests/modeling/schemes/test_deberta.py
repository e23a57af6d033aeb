"""deberta: equal to transformers' DeBERTa and DeBERTa-v2, to the formula in loops, and silent where it says so."""

import copy
import itertools
import math

import pytest
import tiny
import torch
from torch import nn
from transformers import BertModel, DebertaConfig, DebertaModel, DebertaV2Config, DebertaV2Model
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from hf_posenc import position_parameters
from hf_posenc.modeling.models.self_attention import EMBEDDINGS, ENCODER, ModuleReference
from hf_posenc.modeling.schemes.positions import Positions, deberta_bucket
from hf_posenc.modeling.schemes.table import build_schemes


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


TOLERANCE = 1e-5
SMALL = {"position_buckets": 8, "position_max_distance": 32}
TYPES = [["c2p"], ["p2c"], ["c2p", "p2c"]]
WITH_P2P = [["c2p", "p2p"], ["p2p", "p2c"], ["c2p", "p2c", "p2p"]]


def with_biases(model: nn.Module) -> nn.Module:
    """The same model with biases in its query and key projections: BERT's start at zero, where they would not show."""
    generator = torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.base_model.encoder.layer:
            for projection in (layer.attention.self.query, layer.attention.self.key):
                projection.bias.copy_(torch.randn(projection.bias.shape, generator=generator) / 2)
    return model


def build(**flags) -> nn.Module:
    return with_biases(tiny.build("deberta", **flags))


def without_positions(model: nn.Module, inputs: dict) -> torch.Tensor:
    """The model's output with a table of zeros (and no biases that would fill it again)."""
    parameters = {
        name: torch.zeros_like(parameter) if name.endswith(("rel_embeddings.weight", ".bias")) else parameter
        for name, parameter in position_parameters(model).items()
    }
    with torch.no_grad():
        return torch.func.functional_call(model, parameters, kwargs=inputs).last_hidden_state


def reference_sizes(types: list[str]) -> dict:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {
        **{name: tiny.SIZES[name] for name in names},
        "relative_attention": True,
        "pos_att_type": types,
        "max_relative_positions": SMALL["position_max_distance"],
        "position_biased_input": False,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def load(reference: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not [name for name in missing if "position_ids" not in name] and not unexpected
    return reference.eval()


def as_deberta_v2(model: nn.Module, types: list[str]) -> nn.Module:
    """transformers' DebertaV2Model with the weights of a variant."""
    config = model.config
    reference = DebertaV2Model(
        DebertaV2Config(
            **reference_sizes(types),
            position_buckets=config.position_buckets or -1,
            share_att_key=config.position_share_projections is not False,
            norm_rel_ebd="layer_norm" if config.position_norm else "none",
        )
    )
    state = {}
    for name, value in model.state_dict().items():
        if not name.startswith("pooler"):
            for projection in ("query", "key", "value"):
                name = name.replace(f".self.{projection}.", f".self.{projection}_proj.")
            state[name] = value
    return load(reference, state)


def as_deberta_v1(model: nn.Module, types: list[str]) -> nn.Module:
    """transformers' DebertaModel with the weights of a variant, whose key biases become 0: DeBERTa has none."""
    reference = DebertaModel(DebertaConfig(**reference_sizes(types)))
    for layer in model.encoder.layer:
        nn.init.zeros_(layer.attention.self.key.bias)
        if "c2p" in types:
            nn.init.zeros_(layer.attention.self.pos_key_proj.bias)
    state = {name: v for name, v in model.state_dict().items() if ".self." not in name and "pooler" not in name}
    for index, layer in enumerate(model.encoder.layer):
        attention, prefix = layer.attention.self, f"encoder.layer.{index}.attention.self."
        per_head = (attention.num_attention_heads, attention.attention_head_size, -1)
        together = [getattr(attention, name).weight.view(per_head) for name in ("query", "key", "value")]
        state[prefix + "in_proj.weight"] = torch.cat(together, dim=1).flatten(0, 1)
        state[prefix + "q_bias"] = attention.query.bias
        state[prefix + "v_bias"] = attention.value.bias
        if "c2p" in types:
            state[prefix + "pos_proj.weight"] = attention.pos_key_proj.weight
        if "p2c" in types:
            state[prefix + "pos_q_proj.weight"] = attention.pos_query_proj.weight
            state[prefix + "pos_q_proj.bias"] = attention.pos_query_proj.bias
    return load(reference, state)


# Within the table, at its end, and up to three times the distance from which on all share a row.
LENGTHS = (3, 17, 32, 33, 3 * SMALL["position_max_distance"])


def assert_equal_to(reference: nn.Module, model: nn.Module, padding: str | None) -> None:
    """The same outputs and gradients, in float64."""
    model, reference = model.double(), reference.double()
    for length in LENGTHS:
        inputs = tiny.inputs(length=length, padding=padding)
        mask = inputs["attention_mask"][..., None]
        weights = mask * torch.randn(3, length, 32, dtype=torch.float64, generator=torch.manual_seed(0))
        ours, theirs = model(**inputs).last_hidden_state, reference(**inputs).last_hidden_state
        # transformers takes the root that it scales by in float32.
        assert ((ours - theirs) * mask).abs().max() < 2e-6
        assert tiny.difference_where_attended(ours, without_positions(model, inputs), mask[..., 0]) > 100 * TOLERANCE
        table, tables = model.encoder.rel_embeddings.weight, reference.encoder.rel_embeddings.weight
        [found] = torch.autograd.grad((ours * weights).sum(), table)
        [wanted] = torch.autograd.grad((theirs * weights).sum(), tables)
        assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()
        # Every row that there is gets a gradient once a text is long enough.
        assert bool(found.any(-1).all()) == (length > SMALL["position_max_distance"])


@tiny.cross(
    flags=[
        {},
        {"position_norm": True},
        {"position_share_projections": False},
        {"position_share_projections": False, "position_norm": True},
        {"position_buckets": 0},
    ],
    types=TYPES,
    padding=["right", "left"],
    path=tiny.PATHS,
    indirect=("path",),
)
def test_form_paper_is_deberta_v2(flags, types, padding, path):
    flags = {**SMALL, "position_form": "paper", "position_attention_types": types, **flags}
    model = build(**flags)
    assert_equal_to(as_deberta_v2(model, types), model, padding)


@tiny.cross(types=TYPES, padding=["right", "left"], path=tiny.PATHS, indirect=("path",))
def test_form_paper_with_own_projections_and_without_buckets_is_deberta_v1(types, padding, path):
    flags = {"position_buckets": 0, "position_max_distance": 32, "position_share_projections": False}
    model = build(position_form="paper", position_attention_types=types, **flags)
    assert_equal_to(as_deberta_v1(model, types), model, padding)


def first_attention(model: nn.Module, position_ids: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """Attention weights (batch, heads, query, key) of the first layer; positions 0, 1, ... unless given."""
    _, schemes = build_schemes(model.config)
    contiguous = position_ids is None
    if contiguous:
        position_ids = torch.arange(hidden.shape[1])[None]
    positions = Positions(position_ids, position_ids, offset=0, contiguous=contiguous, first=0)
    state = {ENCODER: ModuleReference(model.encoder), EMBEDDINGS: ModuleReference(None)}
    state |= {s.name: (positions, s.prepare(positions, hidden.dtype)) for s in schemes}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.encoder.layer[0].attention.self(hidden, position_state=state)[1]


def delta(distance: int, buckets: int, max_distance: int) -> int:
    """δ for the distance `query - key`, in plain numbers."""
    if not buckets:
        span = max_distance
        if distance <= -span:
            return 0
        return 2 * span - 1 if distance >= span else distance + span
    half = buckets // 2
    if abs(distance) <= half:
        return distance + buckets
    far = math.ceil(round(math.log(abs(distance) / half) / math.log((max_distance - 1) / half) * (half - 1), 6)) + half
    return max(0, min(buckets + int(math.copysign(far, distance)), 2 * buckets - 1))


@torch.no_grad()
def weights_in_loops(
    model: nn.Module, position_ids: list[int], hidden: torch.Tensor, types: list[str], buckets: int, max_distance: int
) -> torch.Tensor:
    """Attention weights (heads, query, key) of the first layer, by the formula, one pair after the other."""
    config, attention = model.config, model.encoder.layer[0].attention.self
    heads, width, length = config.num_attention_heads, attention.attention_head_size, len(position_ids)
    table = model.encoder.rel_embeddings.weight
    if config.position_norm:
        norm = model.encoder.LayerNorm
        centred = table - table.mean(-1, keepdim=True)
        variance = (centred**2).mean(-1, keepdim=True)
        table = centred / torch.sqrt(variance + config.layer_norm_eps) * norm.weight + norm.bias
    paper = config.position_form == "paper"
    if config.position_share_projections is False:
        own_key, own_query = getattr(attention, "pos_key_proj", None), getattr(attention, "pos_query_proj", None)
        row_keys = own_key and table @ own_key.weight.T + own_key.bias
        row_queries = own_query and table @ own_query.weight.T + own_query.bias
    else:
        row_keys = table @ attention.key.weight.T + paper * attention.key.bias
        row_queries = table @ attention.query.weight.T + paper * attention.query.bias
    queries = hidden @ attention.query.weight.T + attention.query.bias
    keys = hidden @ attention.key.weight.T + attention.key.bias

    scores = torch.empty(heads, length, length, dtype=torch.float64)
    for h, i, j in itertools.product(range(heads), range(length), range(length)):
        part = slice(h * width, (h + 1) * width)
        forward = delta(position_ids[i] - position_ids[j], buckets, max_distance)
        backward = delta(position_ids[j] - position_ids[i], buckets, max_distance)
        score = queries[i, part] @ keys[j, part]
        if "c2p" in types:
            score = score + queries[i, part] @ row_keys[forward, part]
        if "p2c" in types:
            score = score + keys[j, part] @ row_queries[forward, part]
        if "p2p" in types:
            score = score + row_queries[forward, part] @ row_keys[backward, part]
        scores[h, i, j] = score / math.sqrt(width * (1 + len(types) if paper else 1))
    return scores.softmax(-1)


@tiny.cross(
    flags=[
        {},
        {"position_form": "paper"},
        {"position_norm": True},
        {"position_share_projections": False, "position_form": "paper"},
        # Distances on the table's edge and beyond it, where δ(i,j) and δ(j,i) clip differently.
        {"position_buckets": 0, "position_max_distance": 4},
        {"position_buckets": 6, "position_max_distance": 5},
    ],
    types=TYPES + WITH_P2P,
    position_ids=[None, [0, 1, 2, 0, 1, 9, 4, 30, 31]],
)
def test_every_term_is_the_formula_in_loops(flags, types, position_ids):
    flags = {**SMALL, **flags}
    model = build(position_attention_types=types, num_hidden_layers=1, **flags).double()
    tiny.fill_positions(model, seed=1, std=0.2)
    hidden = torch.randn(1, 9, tiny.SIZES["hidden_size"], dtype=torch.float64, generator=torch.manual_seed(0)) / 2
    given = None if position_ids is None else torch.tensor([position_ids])
    ours = first_attention(model, given, hidden)[0]
    limits = (flags["position_buckets"], flags["position_max_distance"])
    places = position_ids or list(range(9))
    assert (ours - weights_in_loops(model, places, hidden[0], types, *limits)).abs().max() < 1e-12
    for left_out in types:
        fewer = [kind for kind in types if kind != left_out]
        assert (ours - weights_in_loops(model, places, hidden[0], fewer, *limits)).abs().max() > 1e-3


@pytest.mark.parametrize("buckets, max_distance", [(256, 512), (32, 128), (8, 32), (5, 100), (64, 1024), (2, 9)])
def test_buckets_are_those_of_transformers_at_every_distance(buckets, max_distance):
    distance = torch.cat([torch.arange(-4 * max_distance, 4 * max_distance + 1), torch.tensor([-100_000, 100_000])])
    theirs = make_log_bucket_position(distance, buckets, max_distance).long()
    assert torch.equal(deberta_bucket(distance, buckets, max_distance), theirs)
    if buckets % 2 == 0 and buckets > 2:
        rows = (theirs + buckets).clamp(0, 2 * buckets - 1)
        assert torch.equal(rows == 0, distance <= -max_distance)
        assert torch.equal(rows == 1, (distance > -max_distance) & (theirs == 1 - buckets))


BACKEND_FLAGS = [
    SMALL,
    {**SMALL, "position_attention_types": ["c2p", "p2c", "p2p"], "position_norm": True},
    {"position_buckets": 0, "position_max_distance": 4, "position_share_projections": False},
]


@tiny.cross(flags=BACKEND_FLAGS, given_ids=[False, True], path=tiny.PATHS, indirect=("path",))
def test_backends_agree_in_outputs_and_gradients(flags, given_ids, path):
    """Beyond the distance from which on all share a row, too."""
    model = build(**flags)
    inputs = tiny.inputs(length=40)
    if given_ids:
        inputs["position_ids"] = torch.arange(40)[None] * 2
    outputs, gradients = {}, {}
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        model.zero_grad()
        outputs[backend] = model(**inputs).last_hidden_state
        (outputs[backend] * inputs["attention_mask"][..., None]).square().sum().backward()
        gradients[backend] = [parameter.grad.clone() for parameter in position_parameters(model).values()]
    model.set_attn_implementation("flex_attention")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        outputs["flex_attention"] = model(**inputs).last_hidden_state

    mask = inputs["attention_mask"]
    assert tiny.difference_where_attended(outputs["eager"], without_positions(model, inputs), mask) > 100 * TOLERANCE
    for backend in ("sdpa", "flex_attention"):
        assert tiny.difference_where_attended(outputs["eager"], outputs[backend], mask) < TOLERANCE
    for eager, sdpa in zip(gradients["eager"], gradients["sdpa"]):
        assert (eager - sdpa).abs().max() < 1e-4 * max(1.0, eager.abs().max().item())


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"position_norm": True, "position_attention_types": ["c2p", "p2c", "p2p"]},
        {"position_share_projections": False, "position_attention_types": ["c2p", "p2p"], "position_form": "paper"},
        {"position_buckets": 0, "position_max_distance": 2, "position_attention_types": ["p2c", "p2p"]},
    ],
    ids=str,
)
def test_gradients_of_its_parameters_pass_gradcheck(flags):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    flags = {"position_buckets": 4, "position_max_distance": 6, **flags}
    model = build(attn_implementation="eager", **sizes, **flags).double()
    inputs = tiny.inputs(batch=2, length=5)
    parameters = position_parameters(model)

    def outputs(*values):
        swapped = dict(zip(parameters, values))
        return torch.func.functional_call(model, swapped, kwargs=inputs).last_hidden_state[0]

    assert torch.autograd.gradcheck(outputs, tuple(p.detach().requires_grad_() for p in parameters.values()))


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A stock checkpoint on disk, and its model."""
    torch.manual_seed(0)
    model = with_biases(BertModel(tiny.stock_config())).eval()
    path = tmp_path_factory.mktemp("stock")
    model.save_pretrained(path)
    return path, model


START_ROWS = [
    {},
    {"position_norm": True},
    {"position_share_projections": False},
    {"position_share_projections": False, "position_norm": True},
    {"position_share_projections": False, "position_attention_types": ["c2p", "p2p"]},
    {"position_share_projections": False, "position_attention_types": ["p2c", "p2p"]},
    {"position_share_projections": False, "position_attention_types": ["c2p", "p2c", "p2p"]},
    {"position_norm": True, "position_share_projections": False, "position_attention_types": ["c2p", "p2p"]},
    {"position_attention_types": ["c2p", "p2c", "p2p"]},
]


@pytest.mark.parametrize("flags", START_ROWS, ids=str)
def test_it_starts_silent_and_every_parameter_has_a_gradient_by_the_second_step(stock, flags):
    path, reference = stock
    model = BertModel.from_pretrained(path, position_scheme="absolute+deberta", **SMALL, **flags).eval()
    inputs = tiny.inputs()
    with torch.no_grad():
        difference = (model(**inputs).last_hidden_state - reference(**inputs).last_hidden_state).abs().max()
    assert difference < 5e-6  # rounding: position terms and no terms are computed in another order

    model.double()
    target = torch.randn(3, 12, tiny.SIZES["hidden_size"], dtype=torch.float64, generator=torch.manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = dict.fromkeys(position_parameters(model), 0.0)
    assert seen
    for _ in range(2):
        optimizer.zero_grad()
        (model(**inputs).last_hidden_state - target).square().mean().backward()
        for name, parameter in position_parameters(model).items():
            seen[name] = max(seen[name], parameter.grad.abs().max().item())
        optimizer.step()
    types = flags.get("position_attention_types", ["c2p", "p2c"])
    for name, gradient in seen.items():
        if name.endswith("pos_key_proj.bias") and "p2p" not in types:
            # q_i·bias is the same for every key, and softmax does not see it (nor does it see BERT's own key bias).
            assert gradient < 1e-12, name
        else:
            assert gradient > 1e-9, name


def test_initial_values_are_those_of_the_table(stock):
    path, _ = stock

    def starts(**flags) -> dict[str, set]:
        model = BertModel.from_pretrained(path, position_scheme="absolute+deberta", **SMALL, **flags)
        kinds = {}
        for name, parameter in position_parameters(model).items():
            value = 0.0 if not parameter.any() else 1.0 if (parameter == 1).all() else "normal"
            if value == "normal":
                assert abs(parameter.std().item() - tiny.SIZES["initializer_range"]) < 0.05
            kinds.setdefault(name.split(".self.")[-1], set()).add(value)
        return {name: value for name, (value,) in kinds.items()}

    table, norm = "encoder.rel_embeddings.weight", "encoder.LayerNorm"
    assert starts() == {table: 0.0}
    assert starts(position_norm=True) == {table: "normal", f"{norm}.weight": 0.0, f"{norm}.bias": 0.0}
    projections = ("pos_key_proj.weight", "pos_key_proj.bias", "pos_query_proj.weight", "pos_query_proj.bias")
    own = starts(position_share_projections=False)
    assert own == {table: "normal", **dict.fromkeys(projections, 0.0)}
    # The query rows are multiplied by key rows that are zero.
    own = starts(position_share_projections=False, position_attention_types=["c2p", "p2p"])
    assert own == {table: "normal", **dict.fromkeys(projections, 0.0), "pos_query_proj.weight": "normal"}

    reference = {"position_init": "paper"}
    assert starts(**reference) == {table: "normal"}
    assert starts(**reference, position_norm=True) == {table: "normal", f"{norm}.weight": 1.0, f"{norm}.bias": 0.0}
    own = starts(**reference, position_share_projections=False)
    assert own == {table: "normal"} | {name: 0.0 if "bias" in name else "normal" for name in projections}


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_padding_on_the_left_and_shifted_positions_change_nothing(family):
    model = build(family=family, position_attention_types=["c2p", "p2c", "p2p"], **SMALL)
    tokens = tiny.inputs(batch=2, length=10, family=family, padding=None)
    padded = {
        "input_ids": nn.functional.pad(tokens["input_ids"], (4, 0), value=model.config.pad_token_id),
        "attention_mask": nn.functional.pad(tokens["attention_mask"], (4, 0)),
    }
    with torch.no_grad():
        plain = model(**tokens).last_hidden_state
        on_the_left = model(**padded).last_hidden_state[:, 4:]
        shifted = model(**tokens, position_ids=torch.arange(10)[None] + 20).last_hidden_state
        scattered = model(**tokens, position_ids=torch.arange(10)[None] * 5).last_hidden_state
    assert (plain - on_the_left).abs().max() < TOLERANCE
    assert (plain - shifted).abs().max() < TOLERANCE
    assert (plain - scattered).abs().max() > 100 * TOLERANCE


@tiny.cross(flags=BACKEND_FLAGS, backend=["eager", "sdpa"], path=tiny.PATHS, indirect=("path",))
def test_one_token_at_a_time_gives_what_the_whole_sequence_gives(backend, flags, path):
    model = build(head="LMHeadModel", is_decoder=True, attn_implementation=backend, **flags)
    input_ids = tiny.inputs(batch=2, length=14, padding=None)["input_ids"]
    with torch.no_grad():
        whole = model(input_ids).logits
        cache, steps = None, []
        for token in input_ids.split(1, dim=1):
            output = model(token, **{tiny.CACHE: cache}, use_cache=True)
            cache = getattr(output, tiny.CACHE)
            steps.append(output.logits)
        model.bert.encoder.rel_embeddings.weight.zero_()
        silenced = model(input_ids).logits
    assert (whole - torch.cat(steps, dim=1)).abs().max() < TOLERANCE
    assert (whole - silenced).abs().max() > 100 * TOLERANCE


class LowRank(nn.Module):
    """What LoRA makes of a projection: the frozen layer plus a product of two thin matrices."""

    def __init__(self, base: nn.Linear, rows_too: bool = True):
        super().__init__()
        generator = torch.manual_seed(1)
        self.base, self.rows_too = base, rows_too
        self.down = torch.randn(base.in_features, 2, generator=generator) * 0.3
        self.up = torch.randn(2, base.out_features, generator=generator) * 0.3

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.dim() == 2 and not self.rows_too:
            return self.base(states)
        return self.base(states) + states @ self.down @ self.up


def test_what_wraps_query_and_key_acts_on_positions_too():
    def wrapped(wrap) -> torch.Tensor:
        model = build(**SMALL)
        for layer in model.encoder.layer:
            for name in ("query", "key"):
                setattr(layer.attention.self, name, wrap(getattr(layer.attention.self, name)))
        with torch.no_grad():
            return model(**tiny.inputs(padding=None)).last_hidden_state

    @torch.no_grad()
    def merged(base: nn.Linear) -> nn.Linear:
        low_rank = LowRank(base)
        base.weight += (low_rank.down @ low_rank.up).T
        return base

    expected = wrapped(merged)
    assert (wrapped(LowRank) - expected).abs().max() < TOLERANCE
    content_only = wrapped(lambda base: LowRank(base, rows_too=False))
    assert (content_only - expected).abs().max() > 100 * TOLERANCE


def test_dropout_acts_on_the_table_in_training_only():
    model = build(hidden_dropout_prob=1.0, **SMALL)
    inputs = tiny.inputs()
    silenced = without_positions(model, inputs)
    with torch.no_grad():
        evaluated = model(**inputs).last_hidden_state
        for layer in model.encoder.layer:
            layer.attention.self.pos_dropout.train()  # and nothing else
        trained = model(**inputs).last_hidden_state
    assert torch.equal(trained, silenced)
    assert (evaluated - silenced).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_near_single(dtype):
    model = build(position_norm=True, position_attention_types=["c2p", "p2c", "p2p"], **SMALL)
    tiny.fill_positions(model, std=0.1)
    inputs = tiny.inputs()
    with torch.no_grad():
        single = model(**inputs).last_hidden_state
        half = model.to(dtype)(**inputs).last_hidden_state
    assert half.dtype == dtype
    assert tiny.difference_where_attended(single, half.float(), inputs["attention_mask"]) < 0.1


OWN_KEYS = [
    (["c2p"], {"pos_key_proj"}),
    (["p2c"], {"pos_query_proj"}),
    (["c2p", "p2p"], {"pos_key_proj", "pos_query_proj"}),
    (["p2c", "p2p"], {"pos_key_proj", "pos_query_proj"}),
]


@pytest.mark.parametrize("types, expected", OWN_KEYS)
def test_projections_exist_only_where_they_are_needed(types, expected):
    model = build(position_share_projections=False, position_attention_types=types, **SMALL)
    own = {name.split(".")[-2] for name in position_parameters(model) if "_proj" in name}
    assert own == expected


def test_checkpoint_keys_by_default_and_the_size_of_the_table():
    model = build()
    stock_keys = set(BertModel(tiny.stock_config()).state_dict())
    assert set(model.state_dict()) - stock_keys == {"encoder.rel_embeddings.weight"}
    assert model.encoder.rel_embeddings.weight.shape == (2 * 256, 32)
    assert build(position_buckets=0).encoder.rel_embeddings.weight.shape == (2 * 512, 32)


def test_disentangled_is_another_name_for_it():
    inputs = tiny.inputs()
    with torch.no_grad():
        outputs = [tiny.build(name, **SMALL)(**inputs).last_hidden_state for name in ("deberta", "disentangled")]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "flags, named",
    [
        ({"position_buckets": 1}, "position_buckets"),
        ({"position_max_distance": 129}, "position_max_distance"),
        ({"position_buckets": 8, "position_max_distance": 5}, "position_max_distance"),
        ({"position_attention_types": ["p2p"]}, "position_attention_types"),
        ({"position_attention_types": ["c2p", "p2q"]}, "position_attention_types"),
        ({"position_per_layer": True}, "position_per_layer"),
    ],
    ids=str,
)
def test_flags_out_of_range_are_refused_by_name(flags, named):
    with pytest.raises(ValueError, match=named):
        tiny.variant_config(position_scheme="deberta", **flags)


@pytest.mark.parametrize("scheme", ["tupe+deberta", "disentangled+tupe"])
def test_form_paper_is_refused_beside_tupe(scheme):
    tiny.variant_config(position_scheme=scheme)
    with pytest.raises(ValueError, match="position_form"):
        tiny.variant_config(position_scheme=scheme, position_form="paper")


def test_the_least_flags_are_taken():
    for flags in (
        {"position_buckets": 2, "position_max_distance": 3},
        {"position_buckets": 8, "position_max_distance": 6},
        {"position_buckets": 0, "position_max_distance": 1},
        {"position_max_distance": 130},
    ):
        model = build(position_attention_types=["c2p", "p2c", "p2p"], **flags)
        assert model(**tiny.inputs(length=20)).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 8e-3), (torch.float16, 2e-3)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "model"])
def test_small_tables_survive_the_biases_of_shared_projections_in_half_precision(dtype, bound, autocast):
    """A table starts at zero; what is added to and taken off its projections is of the size of a trained model's biases."""
    model = build(position_max_distance=32, position_buckets=16)
    with torch.no_grad():
        model.encoder.rel_embeddings.weight.mul_(1e-3)
    model.to(dtype)
    exact = copy.deepcopy(model).double()
    if autocast:
        model.float()

    def projections(model) -> torch.Tensor:
        attention = model.encoder.layer[0].attention.self
        [scheme] = attention.position_schemes
        query_table, key_table, _ = scheme._tables(attention, model.encoder, torch.device("cpu"), scheme.span)
        return torch.cat([query_table, key_table]).double()

    with torch.no_grad():
        expected = projections(exact)
        with torch.autocast("cpu", dtype, enabled=autocast):
            found = projections(model)
    assert (found - expected).norm() / expected.norm() < bound
