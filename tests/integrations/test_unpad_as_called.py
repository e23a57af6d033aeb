"""Promise 7: what stock refuses is refused where padding is left out, and what it takes is computed as it does."""

import copy

import pytest
import tiny
import torch
from test_unpad import DEBERTA, stock
from torch import nn
from transformers.models.bert.modeling_bert import BertLayer

import hf_posenc
from hf_posenc.modeling.kernels import packing


BATCH, LENGTH = 4, 48
HEADS = {
    "ForSequenceClassification": (BATCH,),
    "ForTokenClassification": (BATCH, LENGTH),
    "ForMaskedLM": (BATCH, LENGTH),
    "ForQuestionAnswering": (BATCH,),
}


@pytest.fixture(autouse=True)
def packs(monkeypatch):
    """All padding counts, and the packings made are kept."""
    made = []
    monkeypatch.setattr(packing, "SMALLEST_SHARE", 0)
    monkeypatch.setattr(packing, "FEWEST_PLACES", 1)
    of = packing.Packing.of
    monkeypatch.setattr(packing.Packing, "of", lambda *args: made.append(of(*args)) or made[-1])
    return made


def mask(*shape: int) -> torch.Tensor:
    """A mask whose rows are padding from some place on, each from another."""
    return (torch.arange(shape[1]) < torch.arange(shape[0])[:, None] * 3 + 20).long()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(5, 99, shape, generator=torch.Generator().manual_seed(0))


def outcome(model: nn.Module, attended: torch.Tensor, **batch):
    """What a call gives at the tokens that are not padding, None if it is refused."""
    try:
        output = model(**batch)
    except (ValueError, RuntimeError, IndexError):
        return None
    loss, states = output.get("loss"), output[1] if "loss" in output else output[0]
    if states.shape[:2] == attended.shape:
        states = states[attended.bool()]
    return states if loss is None else torch.cat([states.flatten(), loss.flatten()])


def assert_same_outcome(model: nn.Module, padded: nn.Module, attended: torch.Tensor, **batch) -> bool:
    """Both refuse, or both give the same; whether they gave something."""
    with torch.no_grad():
        found, expected = outcome(model, attended, **batch), outcome(padded, attended, **batch)
    assert (found is None) == (expected is None)
    if found is not None:
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    return found is not None


def variants(family: str, head: str = "Model", scheme: str = "absolute+t5") -> tuple[nn.Module, nn.Module]:
    return tuple(tiny.build(scheme, family, head, unpad=unpad) for unpad in (True, False))


def stocks(family: str) -> tuple[nn.Module, nn.Module]:
    padded = stock(family)
    model = copy.deepcopy(padded)
    hf_posenc.unpad(model)
    return model, padded


SHAPES = [(4, 44), (4, 52), (4, 96), (4, 1), (1, 48), (3, 48), (5, 48), (8, 48)]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_mask_of_another_shape_does_what_it_does_with_padding(family, packs):
    model, padded = variants(family)
    for shape in SHAPES:
        assert_same_outcome(model, padded, mask(4, 48), input_ids=ids(4, 48), attention_mask=mask(*shape))
        assert not packs
    assert assert_same_outcome(model, padded, mask(4, 48), input_ids=ids(4, 48), attention_mask=mask(4, 48))
    assert packs


@tiny.cross(family=[*tiny.FAMILIES, *DEBERTA], implementation=["eager", "sdpa"], strength=1)
def test_a_mask_of_another_shape_does_what_it_does_in_stock(family, implementation, packs):
    model, padded = stocks(family)
    for each in (model, padded):
        hf_posenc.set_attn_implementation(each, implementation) if family in (*DEBERTA, "mpnet") else None
    for shape in SHAPES:
        assert_same_outcome(model, padded, mask(4, 48), input_ids=ids(4, 48), attention_mask=mask(*shape))
    packs.clear()
    assert assert_same_outcome(model, padded, mask(4, 48), input_ids=ids(4, 48), attention_mask=mask(4, 48))
    assert packs


@tiny.cross(
    scheme=["absolute", "t5", "rope", "deberta", "relative", "absolute+tupe"],
    family=["bert", "mpnet"],
    rest=pytest.mark.slow,
)
def test_token_types_positions_and_embeddings_of_another_shape(family, scheme):
    model, padded = variants(family, scheme=scheme)
    width = model.get_input_embeddings().weight.shape[1]
    first = model.config.sizes.first_position
    for shape in [(4, 44), (1, 48), (3, 48), (5, 48)]:
        for name, given in {
            **({} if family == "mpnet" else {"token_type_ids": torch.zeros(shape, dtype=torch.long)}),
            "position_ids": (torch.arange(shape[1]) % 30 + first).expand(shape),
        }.items():
            batch = {"input_ids": ids(4, 48), "attention_mask": mask(4, 48), name: given}
            assert_same_outcome(model, padded, mask(4, 48), **batch)
        embedded = torch.randn(*shape, width, generator=torch.Generator().manual_seed(1))
        assert_same_outcome(model, padded, mask(4, 48), inputs_embeds=embedded, attention_mask=mask(4, 48))
    positions = torch.arange(48) % 30 + first
    for given in (positions, positions[None], torch.stack([positions, positions + 1])):
        one = {"input_ids": ids(1, 48), "attention_mask": mask(1, 48), "position_ids": given}
        assert assert_same_outcome(model, padded, mask(1, 48), **one) or given.shape[0] == 2


@tiny.cross(head=HEADS, family=["bert", "distilbert", "mpnet"], rest=pytest.mark.slow)
def test_labels_of_another_shape(family, head):
    model, padded = variants(family, head)
    shape, seen = HEADS[head], set()
    others = {
        shape,
        (3, *shape[1:]),
        (5, *shape[1:]),
        *([(BATCH, 44), (BATCH, 52), (BATCH * LENGTH,)] if shape[1:] else [(BATCH, 1), (BATCH, 2)]),
    }
    for given in others:
        labels = ids(*given) % 2
        names = ("start_positions", "end_positions") if head == "ForQuestionAnswering" else ("labels",)
        batch = {"input_ids": ids(4, 48), "attention_mask": mask(4, 48), **dict.fromkeys(names, labels)}
        seen.add(assert_same_outcome(model, padded, mask(4, 48), **batch))
    assert True in seen


def layers_of(model: nn.Module, family: str) -> tuple[nn.Module, str]:
    encoder = model.transformer if family == "distilbert" else model.encoder
    return encoder, "layer"


CHANGES = {
    "the first alone": lambda layers: layers[:1],
    "the last alone": lambda layers: layers[-1:],
    "turned around": lambda layers: nn.ModuleList(reversed(layers)),
    "one more": lambda layers: nn.ModuleList([*layers, copy.deepcopy(layers[0])]),
    "one in front": lambda layers: nn.ModuleList([copy.deepcopy(layers[-1]), *layers]),
    "twice the same": lambda layers: nn.ModuleList([layers[0], layers[0]]),
}


@tiny.cross(family=[*tiny.FAMILIES, *DEBERTA], change=CHANGES, strength=1)
def test_layers_that_are_changed_afterwards(family, change, packs):
    model, padded = stocks(family)
    for each in (model, padded):
        encoder, name = layers_of(each, family)
        setattr(encoder, name, CHANGES[change](getattr(encoder, name)))
    assert assert_same_outcome(model, padded, mask(4, 48), input_ids=ids(4, 48), attention_mask=mask(4, 48))
    assert packs


@pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet", *DEBERTA])
def test_a_layer_and_an_attention_that_are_new_are_packed_too(family, packs):
    model, padded = stocks(family)
    other = stock(family, initializer_range=0.3)
    for each in (model, padded):
        encoder, name = layers_of(each, family)
        layers = getattr(encoder, name)
        layers.append(copy.deepcopy(getattr(layers_of(other, family)[0], name)[0]))
        layers[0].attention = copy.deepcopy(getattr(layers_of(other, family)[0], name)[1].attention)
    assert assert_same_outcome(model, padded, mask(4, 48), input_ids=ids(4, 48), attention_mask=mask(4, 48))
    assert packs


class Passing(nn.Module):
    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states + hidden_states.mean(1, keepdim=True)


class Mixing(BertLayer):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states + hidden_states.mean(1, keepdim=True), *args, **kwargs)


@pytest.mark.parametrize("kind", ["stock", "variant"])
@pytest.mark.parametrize("layer", [Passing, Mixing])
def test_a_layer_of_another_kind_computes_padding(layer, kind, packs):
    model, padded = stocks("bert") if kind == "stock" else variants("bert")
    for each in (model, padded):
        torch.manual_seed(1)
        own = each.encoder.layer[1]
        new = Passing() if layer is Passing else Mixing(each.config).eval()
        if layer is Mixing:
            new.attention = own.attention
        each.encoder.layer.append(new)
    assert assert_same_outcome(model, padded, mask(4, 48), input_ids=ids(4, 48), attention_mask=mask(4, 48))
    assert not packs


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["stock", "variant"])
def test_a_layer_that_is_compiled_by_itself(kind, index, packs):
    model, padded = stocks("bert") if kind == "stock" else variants("bert")
    for compiles in (lambda layer: layer.compile(backend="eager"), None):
        if compiles:
            compiles(model.encoder.layer[index])
        else:
            model.encoder.layer[index] = torch.compile(padded.encoder.layer[index], backend="eager")
        assert assert_same_outcome(model, padded, mask(4, 48), input_ids=ids(4, 48), attention_mask=mask(4, 48))
    assert not packs


class Reader(nn.Module):
    """A base model, and what reads its states."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.model, self.network = stock("bert"), network


@pytest.mark.parametrize(
    "network", [nn.Conv1d(32, 32, 3, padding=1), nn.MaxPool1d(3), nn.Sequential(nn.BatchNorm1d(32))]
)
def test_what_reads_padding_beside_a_base_model_is_found(network):
    model = Reader(network)
    with pytest.raises(ValueError, match=r"network.* reads the hidden states of neighbours, padding included"):
        hf_posenc.unpad(model)
    assert not model.model._forward_pre_hooks
    assert hf_posenc.unpad(model.model) == 1 and hf_posenc.unpad(model, on=False) == 1


def test_a_recurrent_network_beside_a_base_model_takes_packed_sequences_alone():
    model = Reader(nn.LSTM(32, 8, batch_first=True, bidirectional=True))
    hf_posenc.unpad(model)
    states = model.model(input_ids=ids(4, 48), attention_mask=mask(4, 48)).last_hidden_state
    model.network(
        nn.utils.rnn.pack_padded_sequence(states, mask(4, 48).sum(1), batch_first=True, enforce_sorted=False)
    )
    with pytest.raises(ValueError, match="PackedSequence"):
        model.network(states)
    hf_posenc.unpad(model, on=False)
    model.network(states)


CAUSAL = {"bert": "LMHeadModel", "roberta": "ForCausalLM", "electra": "ForCausalLM"}


@tiny.cross(family=CAUSAL, kind=["variant", "stock"], side=["left", "inner", "flat"])
def test_heads_that_write_text_read_what_stands_before_a_label(family, kind, side):
    if kind == "variant":
        model, padded = variants(family, CAUSAL[family], "t5")
    else:
        [padded] = [
            head(tiny.stock_config(family)).eval()
            for head in tiny.heads(family)
            if head.__name__.endswith(CAUSAL[family])
        ]
        model = copy.deepcopy(padded)
        hf_posenc.unpad(model)
    attended = torch.ones(4, 48, dtype=torch.long)
    attended[1:, {"left": slice(0, 20), "inner": slice(5, 25), "flat": slice(30, 48)}[side]] = 0
    batch = {
        "input_ids": ids(4, 48),
        "attention_mask": attended,
        "labels": ids(4, 48).masked_fill(attended == 0, -100),
    }
    if side == "flat":  # the last place of a sequence, padding, learns the first token of the next one
        batch["labels"] = batch["labels"].flatten()
    losses = [each(**batch).loss for each in (model, padded)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering"])
def test_a_loss_is_the_same_where_the_forward_of_a_head_is_called_directly(head, packs):
    [padded] = [kind(tiny.stock_config("bert")).eval() for kind in tiny.heads("bert") if kind.__name__ == head]
    model = copy.deepcopy(padded)
    hf_posenc.unpad(model)
    batch = {"input_ids": ids(4, 48), "attention_mask": mask(4, 48)}
    model.forward(**batch)
    assert packs
    names = ("start_positions", "end_positions") if head.endswith("Answering") else ("labels",)
    batch |= dict.fromkeys(names, ids(4) % 9 if head.endswith("Answering") else ids(4, 48) % 2)
    for call in (model.forward, model):
        torch.testing.assert_close(call(**batch).loss, padded(**batch).loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet", *DEBERTA])
def test_an_encoder_that_is_replaced_afterwards(family, packs):
    model, padded = stocks(family)
    for each in (model, padded):
        other = stock(family, initializer_range=0.3)
        name = "transformer" if family == "distilbert" else "encoder"
        setattr(each, name, getattr(other, name))
    assert assert_same_outcome(model, padded, mask(4, 48), input_ids=ids(4, 48), attention_mask=mask(4, 48))
    assert packs


@pytest.mark.parametrize("family", DEBERTA)
def test_meta_tensors_go_through_unpadded_stock_models(family):
    model = stock(family).to("meta")
    hf_posenc.unpad(model)
    inputs = {"input_ids": ids(4, 48).to("meta"), "attention_mask": mask(4, 48).to("meta")}
    assert model(**inputs)[0].shape == (4, 48, 32)
