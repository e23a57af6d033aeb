"""Models with a position scheme as architectures of Transformers: the same numbers, there and back, and refusals of what is not the same."""

import pytest
import tiny
import torch
import transformers
from torch import nn

import hf_posenc
from hf_posenc.export.stock import from_stock, to_stock
from hf_posenc.export.stock.proof import check_agreement


LONG = 600
# Of float64: DeBERTa's square roots and Jina's angles are in float32.
ROUNDING = {"mpnet": 1e-12, "deberta-v2": 1e-6, "jina_embeddings_v3": 1e-5}
# Scheme, flags, and the architecture that computes it.
ROWS = [
    ("t5", {}, "mpnet"),
    ("none+t5", {}, "mpnet"),
    ("absolute+t5", {}, "mpnet"),
    ("deberta", {"position_buckets": 16, "position_max_distance": 64}, "deberta-v2"),
    (
        "deberta",
        {"position_buckets": 0, "position_max_distance": 40, "position_attention_types": ["p2c"]},
        "deberta-v2",
    ),
    ("deberta", {"position_share_projections": False, "position_norm": True}, "deberta-v2"),
    ("deberta", {"position_form": "paper", "position_attention_types": ["c2p"]}, "deberta-v2"),
    ("deberta", {"position_form": "paper", "position_share_projections": False}, "deberta-v2"),
    ("absolute+deberta", {}, "deberta-v2"),
    ("rope", {}, "jina_embeddings_v3"),
    ("rope", {"position_layout": "interleaved", "position_base": 5000.0}, "jina_embeddings_v3"),
    ("rope", {"position_rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "jina_embeddings_v3"),
    ("rope", {"position_rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "jina_embeddings_v3"),
    ("rope", {"position_learn_frequencies": "shared"}, "jina_embeddings_v3"),
]
FAMILIES = ["bert", "roberta", "electra", "distilbert", "mpnet"]
# One family is tried at once, the others by `--all`.
ONE_AT_ONCE = [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])]
HEADS = [
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
]
# What an architecture has not, by the end of the class's name: heads with another activation, and those that do not exist.
MISSING = {
    "mpnet": {("electra", HEADS[1]), ("distilbert", HEADS[1]), ("distilbert", HEADS[4]), ("electra", HEADS[4])},
    "deberta-v2": {("electra", HEADS[4])},
    "jina_embeddings_v3": {
        *((family, HEADS[4]) for family in FAMILIES),
        ("electra", HEADS[1]),
        ("distilbert", HEADS[1]),
    },
}


def built(family: str, scheme: str, head: str = "Model", **flags) -> nn.Module:
    """A model in float64 whose positions, token types, biases and LayerNorms are random."""
    wide = {"embedding_size": 32} if family == "electra" else {}
    padding = {"pad_token_id": 1} if tiny.FAMILIES[family].family.positions_follow_padding else {}
    flags = {"max_position_embeddings": LONG + 2, **wide, **padding, **flags}
    model = tiny.build(scheme, family=family, head=head, **flags).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).double())
    return model


def difference(model: nn.Module, other: nn.Module, length: int, sides=("right", "left"), types: bool = False) -> float:
    """The largest difference at tokens that are not padding, of hidden states and logits; the other model's numbers must not be the
    same where its positions are others."""
    return check_agreement(model, other, length, types, sides).difference


@pytest.mark.parametrize("family", ONE_AT_ONCE)
@pytest.mark.parametrize(("scheme", "flags", "architecture"), ROWS)
def test_base_models_compute_the_same_and_come_back(family, scheme, flags, architecture):
    model = built(family, scheme, **flags)
    native = {*scheme.split("+")} == {*model.config.family.native_scheme.split("+")}
    stock = to_stock(model, max_length=None if "absolute" in scheme else LONG)
    assert stock.config.model_type == architecture and type(stock).__module__.startswith("transformers.models.")
    sides = ("right",) if scheme == "absolute+deberta" else ("right", "left")
    longest = LONG - 2
    # Angles of random frequencies are larger, and Jina's are of float32.
    rounding = ROUNDING[architecture] * (3 if "position_learn_frequencies" in flags else 1)
    assert difference(model, stock, longest, sides) < rounding
    # Moved by a step, positions are others: the comparison would tell.
    other = built(family, scheme, **flags)
    tiny.fill_positions(other, seed=7)
    if hf_posenc.position_parameters(other):
        with pytest.raises(ValueError, match="the two models differ"):
            difference(other, stock, longest)
    if native:
        return
    back = from_stock(stock)
    assert type(back) is type(model) and back.config.position_scheme == model.config.position_scheme
    assert difference(model, back, longest) < 1e-9
    assert {*back.state_dict()} <= {*model.state_dict()}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ONE_AT_ONCE)
@pytest.mark.parametrize(
    ("scheme", "architecture"),
    [(row[0], row[2]) for row in ROWS if row[:2] in (("t5", {}), ("rope", {}), ROWS[3][:2])],
)
def test_heads_compute_the_same_or_are_refused(head, family, scheme, architecture):
    if not tiny.stock_computes(getattr(transformers, tiny._stock_prefix(family) + head)):
        pytest.skip("this version of transformers builds the class without the pooler that it reads")
    model = built(family, scheme, head)
    if (family, head) in MISSING[architecture]:
        with pytest.raises(
            ValueError, match=f"would become '{architecture}', (which has no such task head|whose task head has)"
        ):
            to_stock(model, single_text=True)
        return
    stock = to_stock(model, single_text=True, max_length=LONG)
    assert type(stock).__name__.endswith(head)
    assert difference(model, stock, 140) < ROUNDING[architecture]
    assert difference(model, from_stock(stock), 140) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("scheme", ["t5", "absolute+t5", "deberta", "absolute+deberta", "rope"])
def test_heads_compute_the_same_on_long_texts_in_float32(head, family, scheme):
    model = built(family, scheme, head)
    try:
        stock = to_stock(model.float(), single_text=True, max_length=None if "absolute" in scheme else LONG)
    except ValueError:
        pytest.skip("refused, as the test of heads says")
    sides = ("right",) if scheme == "absolute+deberta" else ("right", "left")
    assert difference(model, stock, LONG - 2, sides) < 1e-5


@pytest.mark.parametrize("scheme", ["deberta", "rope", "absolute+deberta"])
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForQuestionAnswering"])
def test_pairs_of_texts_are_computed_where_there_are_token_types(scheme, head):
    model = built("bert", scheme, head)
    assert difference(model, to_stock(model), 140, types=True) < 1e-6


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice"])
def test_heads_that_may_read_pairs_are_refused_where_there_are_none(head):
    model = built("bert", "t5", head)
    with pytest.raises(ValueError, match="no token types.*single_text=True"):
        to_stock(model)
    # Rows that are alike make no difference: pairs are computed too.
    types = model.bert.embeddings.token_type_embeddings.weight
    types.data[1] = types.data[0]
    stock = to_stock(model)
    inputs = tiny.inputs()
    pairs = {**inputs, "token_type_ids": torch.randint(2, inputs["input_ids"].shape)}
    if head == "ForMultipleChoice":
        pairs, inputs = ({name: tensor[None] for name, tensor in each.items()} for each in (pairs, inputs))
    own, there = (model(**pairs), stock(**inputs))
    name = "start_logits" if "start_logits" in own else "logits"
    torch.testing.assert_close(
        own[name][inputs["attention_mask"].bool()] if name != "logits" else own[name],
        there[name][inputs["attention_mask"].bool()] if name != "logits" else there[name],
    )


@pytest.mark.parametrize(
    ("scheme", "flags", "said"),
    [
        ("alibi", {}, "Transformers has no architecture with position_scheme='alibi'.*--stock"),
        ("sinusoidal+t5", {}, "no architecture"),
        ("absolute+rope", {}, "no architecture"),
        ("t5+deberta", {}, "no architecture"),
        ("t5", {"position_per_layer": True}, "one bias matrix for all layers"),
        ("t5", {"position_buckets": 64}, "32 buckets up to distance 128"),
        ("t5", {"position_max_distance": 256}, "32 buckets up to distance 128"),
        ("t5", {"position_window": 8}, "no local attention"),
        ("rope", {"position_window": 8}, "no local attention"),
        ("absolute+t5", {"position_combine": "concat"}, "position_combine='concat'"),
        ("absolute+t5", {"position_every_layer": True}, "position_every_layer=True"),
        ("absolute+t5", {"position_stride": 2}, "position_stride=2"),
        ("deberta", {"position_attention_types": ["c2p", "p2c", "p2p"]}, "no p2p term"),
        ("rope", {"position_rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "depends on each text's length"),
        ("t5", {"is_decoder": True}, "is_decoder=False fits"),
        ("deberta", {"is_decoder": True}, "is_decoder=False fits"),
        ("rope", {"is_decoder": True}, "is_decoder=False fits"),
    ],
)
def test_what_no_architecture_computes_is_refused_with_what_would_fit(scheme, flags, said):
    with pytest.raises(ValueError, match=said):
        to_stock(built("bert", scheme, **flags))


def test_other_models_are_refused():
    with pytest.raises(TypeError, match="to_stock needs a model of Transformers, got dict"):
        to_stock({})
    with pytest.raises(ValueError, match="has no position scheme"):
        to_stock(transformers.BertModel(tiny.stock_config("bert")))
    with pytest.raises(ValueError, match="not made by to_stock"):
        from_stock(transformers.BertModel(tiny.stock_config("bert")))
    for head in ("ForNextSentencePrediction", "ForPreTraining"):
        with pytest.raises(ValueError, match="no such task head"):
            to_stock(tiny.build("t5", head=head))
    with pytest.raises(ValueError, match="no such task head"):
        to_stock(tiny.build("t5", family="electra", head="ForPreTraining", embedding_size=32))
    with pytest.raises(ValueError, match="as wide as its layers"):
        to_stock(tiny.build("t5", family="electra"))
    with pytest.raises(ValueError, match="is_decoder=False fits"):
        to_stock(tiny.build("rope", head="LMHeadModel", is_decoder=True))


def test_an_absolute_model_becomes_what_it_was():
    model = built("bert", "absolute", "ForTokenClassification")
    stock = to_stock(model)
    assert type(stock) is transformers.BertForTokenClassification and model.config.model_type == "posenc_bert"
    assert difference(model, stock, 140, types=True) < 1e-9


@pytest.mark.parametrize("padding_id", [0, 3])
def test_other_ids_for_padding_than_1_are_refused_where_positions_follow_it(padding_id):
    with pytest.raises(ValueError, match="takes token id 1 for padding.*pad_token_id is"):
        to_stock(built("roberta", "absolute+t5", pad_token_id=padding_id))
    to_stock(built("roberta", "t5", pad_token_id=padding_id))


class Tokens:
    """As much of a tokenizer as is asked for here."""

    def __init__(self, first: str, side: str = "right", length: int = 64):
        self.first, self.padding_side, self.model_max_length = first, side, length

    def convert_ids_to_tokens(self, number: int) -> str:
        assert number == 1
        return self.first


def test_a_token_that_mpnet_takes_for_padding_is_refused_where_it_occurs():
    model = built("bert", "absolute+t5")
    to_stock(model, tokenizer=Tokens("[unused0]"))
    with pytest.raises(ValueError, match=r"token id 1 for padding.*'\[UNK\]'"):
        to_stock(model, tokenizer=Tokens("[UNK]"))
    to_stock(built("bert", "t5"), tokenizer=Tokens("[UNK]"))


def test_padding_on_the_left_is_refused_where_positions_follow_it_and_deberta_counts_it():
    with pytest.raises(ValueError, match="counts padding on the left"):
        to_stock(built("roberta", "absolute+deberta"), tokenizer=Tokens("x", "left"))
    to_stock(built("roberta", "deberta"), tokenizer=Tokens("x", "left"))


def test_how_many_tokens_it_reads():
    model = built("bert", "t5")
    assert to_stock(model).config.max_position_embeddings == LONG + 2 + 2
    assert to_stock(model, max_length=2048).config.max_position_embeddings == 2050
    assert to_stock(model, tokenizer=Tokens("x", length=300)).config.max_position_embeddings == 302
    with pytest.raises(ValueError, match="max_length must be at most 602"):
        to_stock(built("bert", "absolute+t5"), max_length=2048)
    with pytest.raises(ValueError, match="max_length must be at most 602"):
        to_stock(built("bert", "absolute"), max_length=2048)
    for wrong in (0.5, True, -1, 0):
        with pytest.raises(ValueError, match="max_length must be a number of tokens"):
            to_stock(model, max_length=wrong)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_that_has_the_token_embeddings_keeps_them(tied):
    """MPNet's token embeddings have token type 0 in them; what is asked for at the output has not."""
    model = built("bert", "t5", "ForMaskedLM", tie_word_embeddings=tied)
    stock = to_stock(model)
    assert not torch.equal(stock.lm_head.decoder.weight, stock.mpnet.embeddings.word_embeddings.weight)
    assert difference(model, stock, 140) < 1e-9
    back = from_stock(stock)
    assert difference(model, back, 140) < 1e-9


def test_what_was_trained_since_comes_back_or_is_refused():
    model = built("bert", "deberta", "ForTokenClassification")
    stock = to_stock(model)
    with torch.no_grad():
        stock.deberta.encoder.rel_embeddings.weight.add_(0.1)
        stock.deberta.encoder.layer[0].output.dense.bias.add_(0.1)
        stock.classifier.bias.add_(0.1)
    assert difference(from_stock(stock), stock, 140) < 1e-6
    with torch.no_grad():
        stock.deberta.encoder.layer[1].attention.self.pos_key_proj.weight.add_(0.1)
    with pytest.raises(ValueError, match="trained apart"):
        from_stock(stock)
    stock = to_stock(built("bert", "t5"), max_length=64)
    with torch.no_grad():
        stock.embeddings.position_embeddings.weight.add_(0.1)
    with pytest.raises(ValueError, match="position embeddings were zero, and were trained"):
        from_stock(stock)


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("family", ["distilbert", "mpnet"])
def test_a_token_type_that_was_trained_since_is_in_the_token_embeddings(family, head):
    """Jina Embeddings v3 has one where the family has none; it starts at zero and is trained as all else."""
    stock = to_stock(built(family, "rope", head), max_length=LONG)
    with torch.no_grad():
        stock.base_model.embeddings.token_type_embeddings.weight.normal_(std=0.3)
    back = from_stock(stock)
    assert difference(back, stock, 140) < 1e-5


@pytest.mark.parametrize(
    ("scheme", "changed"),
    [
        ("rope", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("deberta", {"pos_att_type": ["c2p"]}),
        ("t5", {"layer_norm_eps": 0.1}),
    ],
)
def test_a_config_that_was_changed_since_is_refused(scheme, changed):
    stock = to_stock(built("bert", scheme), max_length=LONG)
    for name, value in changed.items():
        setattr(stock.config, name, value)
    with pytest.raises(ValueError, match=f"{min(changed)} of its config was changed since to_stock"):
        from_stock(stock)


@pytest.mark.parametrize(
    "head", ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"]
)
@pytest.mark.parametrize("scheme", ["t5", "deberta", "rope"])
@pytest.mark.parametrize("family", ONE_AT_ONCE)
def test_a_head_that_was_put_on_the_base_model_since_comes_back_or_is_refused(family, scheme, head, tmp_path):
    """Heads of one name have other activations in other families, which no name of a weight tells."""
    base = to_stock(built(family, scheme), max_length=LONG)
    base.save_pretrained(tmp_path)
    names = transformers.__dict__
    cls = names.get(type(base).__name__.removesuffix("Model") + head)
    if cls is None:
        pytest.skip("there is no such head")
    stock = cls.from_pretrained(tmp_path, dtype=base.dtype).eval()
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if not name.startswith(f"{stock.base_model_prefix}.") or "pooler" in name:
                parameter.normal_(std=0.3)
    if (family, head) in MISSING[stock.config.model_type]:
        with pytest.raises(ValueError, match="does not exist|has the activation"):
            from_stock(stock)
        stock = stock.base_model
    assert difference(from_stock(stock), stock, 140) < 1e-5


@pytest.mark.parametrize("scheme", ["t5", "deberta", "rope"])
def test_tokens_that_were_added_since_come_back(scheme):
    stock = to_stock(built("bert", scheme, "ForMaskedLM"), max_length=LONG)
    more = stock.config.vocab_size + 7
    stock.resize_token_embeddings(more)
    back = from_stock(stock)
    assert back.config.vocab_size == more
    assert difference(back, stock, 140) < 1e-5


def test_the_models_random_numbers_and_mode_stay_as_they_are():
    model = built("bert", "t5", "ForTokenClassification").train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    stock = to_stock(model)
    assert torch.rand(1) == before
    assert stock.training and stock.dtype == torch.float64
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
