"""The encoder and its model: which modules they read, what they repeat before every layer, and what may be saved."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from tiny import FAMILIES as ALL_FAMILIES
from tiny import SCHEMES, SIZES, build, cross, fill_positions, inputs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_posenc import position_parameters


pytestmark = pytest.mark.usefixtures("blocks_for_all_lengths")


# Schemes whose encoder reads the embeddings.
READING = [
    ("tupe", {}),
    ("absolute+tupe", {}),
    ("tupe+t5", {}),
    ("absolute", {"position_every_layer": True}),
    ("sinusoidal+tupe", {"position_every_layer": True}),
    ("sinusoidal", {"position_every_layer": True, "position_combine": "concat"}),
]
FAMILIES = ["bert", "roberta", "electra"]
reading = cross(case=READING, family=FAMILIES, rest=pytest.mark.slow)


@torch.no_grad()
def output(model: nn.Module, **batch) -> torch.Tensor:
    return model.eval()(**(batch or inputs()))[0]


def reloaded(model: nn.Module, folder) -> nn.Module:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


@reading
def test_replaced_modules_are_read_before_saving_as_after(case, family, tmp_path):
    scheme, flags = case
    model, batch = build(scheme, family, **flags), inputs(family=family)
    before = output(model, **batch)
    model.embeddings = fill_positions(copy.deepcopy(model.embeddings), seed=5)
    if hasattr(model.embeddings, "position_embeddings"):
        model.embeddings.position_embeddings = copy.deepcopy(model.embeddings.position_embeddings)
        nn.init.normal_(model.embeddings.position_embeddings.weight, std=0.5)
    if family == "electra":
        projection = model.embeddings_project
        model.embeddings_project = nn.Linear(projection.in_features, projection.out_features)
    after = output(model, **batch)
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(output(reloaded(model, tmp_path), **batch), after, atol=1e-5, rtol=0)


class OnlyCalled(nn.Module):
    """A module of which nothing can be read: it stands for quantised, offloaded and adapted ones."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.hidden = (module,)

    def forward(self, *args):
        return self.hidden[0](*args)


def hide_what_has_parameters(model: nn.Module) -> None:
    """Tables, projections, norms and single parameters of schemes, and those of stock that they work with."""
    for module in [*model.modules()]:
        for name, part in [*module.named_children()]:
            if not [*part.children()] and [*part.parameters(), *part.buffers()]:
                setattr(module, name, OnlyCalled(part))


JOINED = [
    (scheme, flags)
    for scheme, flags in itertools.product(
        ["absolute", "sinusoidal"],
        [
            {"position_combine": "concat"},
            {"position_combine": "concat", "position_width": 8},
            {"position_combine": "gate"},
            {"position_combine": "attention"},
            {"position_every_layer": True, "position_every_layer_weight": 0.5},
        ],
    )
]
CALLED = [
    *((scheme, {}) for scheme in (*SCHEMES, "absolute+t5", "tupe+t5")),
    *JOINED,
    ("absolute", {"position_stride": 3}),
    ("t5", {"position_per_layer": True}),
    ("deberta", {"position_share_projections": False, "position_norm": True}),
]


@cross(case=CALLED, family=ALL_FAMILIES, length=[12, 20], strength=1)
def test_schemes_call_modules_and_do_not_read_them(case, family, length):
    scheme, flags = case
    model, batch = build(scheme, family, **flags), inputs(length=length, family=family)
    expected = output(model, **batch)
    hide_what_has_parameters(model)
    assert not [*model.parameters()]
    torch.testing.assert_close(output(model, **batch), expected, atol=1e-5, rtol=0)


class Packed(nn.Module):
    """A table whose weight has another shape than the rows that it gives, as bitsandbytes' has with 4 bits."""

    def __init__(self, table: nn.Embedding):
        super().__init__()
        self.num_embeddings, self.shape = table.num_embeddings, table.weight.shape
        self.weight = nn.Parameter(table.weight.detach().view(-1, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.view(self.shape)[ids]


@pytest.mark.parametrize("kind", ["packed", "only called", "within another"])
@cross(scheme=["absolute", "tupe"], family=["bert", "roberta"])
def test_what_stands_for_a_table_has_its_rows(scheme, family, kind):
    model = build(scheme, family)
    wrap = {"packed": Packed, "only called": OnlyCalled, "within another": lambda table: nn.Sequential(Packed(table))}
    rows = SIZES["max_position_embeddings"] - model.config.first_position
    batch = inputs(length=rows, family=family)
    expected = output(model, **batch)
    model.embeddings.position_embeddings = wrap[kind](model.embeddings.position_embeddings)
    assert model.embeddings.table_length() == rows
    torch.testing.assert_close(output(model, **batch), expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=f"{rows + 1} tokens is longer than the position embedding matrix"):
        output(model, **inputs(length=rows + 1, family=family))


def replica_of(model: nn.Module) -> nn.Module:
    """A replica as nn.DataParallel makes it, with parameters of its own that a GPU would hold."""
    modules = list(model.modules())
    replicas = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            if child is not None:
                setattr(replica, name, replicas[child])
        for name, parameter in module._parameters.items():
            if parameter is not None:
                setattr(replica, name, parameter.detach().clone())
        for name, buffer in module._buffers.items():
            if buffer is not None:
                setattr(replica, name, buffer.clone())
    return replicas[model]


@reading
@torch.no_grad()
def test_replicas_of_data_parallel_read_their_own_tables(case, family):
    scheme, flags = case
    model, batch = build(scheme, family, **flags), inputs(family=family)
    expected = output(model, **batch)
    replica = replica_of(model)
    for parameter in model.parameters():  # on its GPU, a replica cannot read the original
        parameter.fill_(float("nan"))
    torch.testing.assert_close(output(replica, **batch), expected, atol=1e-6, rtol=0)


@cross(family=["roberta", "xlm-roberta", "camembert", "bert"], padding=["left", "right", None], strength=1)
def test_repeated_sinusoids_are_those_of_the_embeddings_also_beside_tupe(family, padding):
    """With nothing in tupe's term, `sinusoidal+tupe` is `sinusoidal`."""
    flags = {"position_every_layer": True, "num_hidden_layers": 3}
    both = build("sinusoidal+tupe", family, **flags)
    with torch.no_grad():
        for name, parameter in both.named_parameters():
            if "pos_q_linear" in name or "cls" in name.rpartition(".encoder.")[2]:
                parameter.zero_()
    alone = build("sinusoidal", family, **flags)
    alone.load_state_dict({key: value for key, value in both.state_dict().items() if key in alone.state_dict()})
    batch = inputs(family=family, padding=padding)
    torch.testing.assert_close(output(both, **batch), output(alone, **batch), atol=1e-5, rtol=0)
    without = copy.deepcopy(alone)
    for layer in without.encoder.layer[1:]:
        for parameter in [p for n, p in layer.named_parameters() if n.startswith("position_scale")]:
            nn.init.zeros_(parameter)
    assert (output(without, **batch) - output(alone, **batch)).abs().max() > 1e-2


@cross(scheme=["tupe", "absolute+tupe", "tupe+t5", "absolute"], family=FAMILIES, strength=1)
def test_a_longer_table_is_read_whole_before_saving_as_after(scheme, family, tmp_path):
    model, batch = build(scheme, family), inputs(length=100, family=family)
    table, first = model.embeddings.position_embeddings, model.config.first_position
    longer = nn.Embedding(128 + first, table.embedding_dim, padding_idx=table.padding_idx)
    nn.init.normal_(longer.weight, std=0.5)
    model.embeddings.position_embeddings = longer
    model.config.max_position_embeddings = 128 + first
    model.embeddings.register_buffer("position_ids", torch.arange(128 + first).expand((1, -1)), persistent=False)
    expected = output(model, **batch)
    torch.testing.assert_close(output(reloaded(model, tmp_path), **batch), expected, atol=1e-5, rtol=0)


@cross(scheme=["absolute", "sinusoidal+t5", "absolute+tupe"], family=FAMILIES, strength=1)
def test_layers_may_be_dropped_where_positions_are_added_before_every_layer(scheme, family, tmp_path):
    model = build(scheme, family, position_every_layer=True, num_hidden_layers=3)
    batch = inputs(family=family)
    whole = output(model, **batch)
    del model.encoder.layer[0]
    model.config.num_hidden_layers = 2
    expected = output(model, **batch)
    assert (expected - whole).abs().max() > 1e-2
    torch.testing.assert_close(output(reloaded(model, tmp_path), **batch), expected, atol=1e-5, rtol=0)


def test_the_first_layer_may_be_put_elsewhere():
    model = build("absolute", position_every_layer=True, num_hidden_layers=3)
    first, second, third = model.encoder.layer
    model.encoder.layer = nn.ModuleList([second, third, first])
    states = []
    handles = [
        layer.register_forward_hook(lambda module, arguments, result: states.append((arguments[0], result)))
        for layer in model.encoder.layer
    ]
    output(model)
    for handle in handles:
        handle.remove()
    # Nothing is added before `first`, which has no scale, and none before what is first now.
    assert torch.equal(states[1][1], states[2][0]) and not hasattr(first, "position_scale")


CHANGES = [
    ("t5", {}, {"position_scheme": "rope"}, "position_scheme was 't5' and is 'rope'"),
    ("absolute", {}, {"position_scheme": "sinusoidal"}, "position_scheme was 'absolute' and is 'sinusoidal'"),
    ("none+t5", {}, {"position_scheme": "absolute+t5"}, "position_scheme was 't5' and is 'absolute[+]t5'"),
    ("t5", {}, {"position_max_distance": 64}, "position_max_distance was 128 and is 64"),
    ("relative_key", {}, {"max_position_embeddings": 99}, "relative_key's max_distance was 63 and is 98"),
    ("absolute", {}, {"position_combine": "gate"}, "position_combine was 'add' and is 'gate'"),
    ("absolute", {}, {"position_every_layer": True}, "position_every_layer was False and is True"),
    ("rope", {}, {"position_layout": "interleaved"}, "position_layout was 'halves' and is 'interleaved'"),
    ("t5", {}, {"is_decoder": True}, "t5's bidirectional was True and is False"),
]


@cross(case=CHANGES, head=["Model", "ForMaskedLM"], strength=1)
def test_weights_are_not_saved_beside_flags_that_they_were_not_built_with(case, head, tmp_path):
    scheme, flags, changed, message = case
    model = build(scheme, head=head, **flags)
    before = {name: getattr(model.config, name) for name in changed}
    for name, value in changed.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed").exists()
    for name, value in before.items():
        setattr(model.config, name, value)
    expected = output(model)
    assert torch.equal(output(reloaded(model, tmp_path / "as built")), expected)


@pytest.mark.parametrize(("scheme", "flags", "same"), [
    ("t5+alibi", {}, {"position_scheme": "alibi+t5"}),
    ("deberta", {"position_attention_types": ["c2p", "p2c"]}, {"position_attention_types": ("c2p", "p2c")}),
])  # fmt: skip
def test_flags_that_mean_the_same_are_saved(scheme, flags, same, tmp_path):
    model = build(scheme, **flags)
    expected = output(model)
    for name, value in same.items():
        setattr(model.config, name, value)
    torch.testing.assert_close(output(reloaded(model, tmp_path)), expected, atol=1e-6, rtol=0)


def test_a_scaling_that_is_taken_away_is_refused_by_name(tmp_path):
    model = build("rope", position_rope_scaling={"rope_type": "yarn", "factor": 2.0})
    model.config.position_rope_scaling = None
    with pytest.raises(ValueError, match="position_rope_scaling was"):
        model.save_pretrained(tmp_path)


@cross(scheme=["sinusoidal", "sinusoidal+tupe", "absolute"], family=FAMILIES, strength=1)
def test_offloaded_models_add_positions_before_every_layer(scheme, family):
    from accelerate import cpu_offload

    model, batch = build(scheme, family, position_every_layer=True), inputs(family=family)
    expected = output(model, **batch)
    offloaded = cpu_offload(model, execution_device="cpu")
    torch.testing.assert_close(output(offloaded, **batch), expected, atol=1e-6, rtol=0)


def test_an_encoder_that_reads_embeddings_says_who_must_call_it():
    model = build("tupe")
    with pytest.raises(ValueError, match="call the model"):
        model.encoder(torch.randn(1, 4, model.config.hidden_size))


SHARED = [
    ("t5", {}, "bert.encoder.relative_attention_bias.weight"),
    ("deberta", {}, "bert.encoder.rel_embeddings.weight"),
    ("tupe", {}, "bert.embeddings.position_embeddings.weight, bert.encoder.pos_ln.weight and 7 more"),
    ("absolute+tupe", {"num_hidden_layers": 1}, "bert.embeddings.position_embeddings.weight"),
    ("absolute", {"position_every_layer": True}, "the positions that are added before every layer"),
]
NOT_SHARED = [
    ("absolute", {}),
    ("relative", {}),
    ("t5", {"position_per_layer": True}),
    ("t5", {"num_hidden_layers": 1}),
    ("tupe", {"num_hidden_layers": 1}),
    ("sinusoidal", {"position_every_layer": True}),
]


class InDDP:
    """What DDP's forward says of itself, and whether a model that is checkpointed so would be refused in it."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def train(self, model: nn.Module, reentrant: bool = True, static_graph: bool = False) -> None:
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        replica = SimpleNamespace(module=model, static_graph=static_graph)
        self.monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", replica)
        model(**inputs(), labels=torch.tensor([0, 1, 0])).loss.backward()


@pytest.fixture
def in_ddp(monkeypatch) -> InDDP:
    return InDDP(monkeypatch)


@pytest.mark.parametrize("scheme, flags, names", SHARED)
def test_reentrant_checkpointing_of_what_layers_share_is_refused_in_ddp(scheme, flags, names, in_ddp):
    def make() -> nn.Module:
        return build(scheme, head="ForSequenceClassification", **flags).train()

    with pytest.raises(ValueError, match=f"{names}: several layers share this, .* use_reentrant=False"):
        in_ddp.train(make())
    in_ddp.train(make(), reentrant=False)
    in_ddp.train(make(), reentrant=None)
    in_ddp.train(make(), static_graph=True)
    in_ddp.train(make().eval())
    frozen = make()
    for parameter in [*frozen.bert.embeddings.parameters(), *position_parameters(frozen).values()]:
        parameter.requires_grad_(False)
    in_ddp.train(frozen)


@pytest.mark.parametrize("scheme, flags", NOT_SHARED)
def test_reentrant_checkpointing_of_what_layers_have_for_themselves_is_taken_in_ddp(scheme, flags, in_ddp):
    in_ddp.train(build(scheme, head="ForSequenceClassification", **flags).train())
