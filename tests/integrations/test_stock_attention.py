"""DeBERTa and MPNet of transformers compute with other backends what they compute in eager mode, and stay what they are."""

import copy
import pickle
import random

import pytest
import stock_models
import torch
from stock_models import CASES, KINDS, batch, build
from tiny import cross
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertLMHeadModel,
    DebertaV2Config,
    DebertaV2ForTokenClassification,
    DebertaV2Model,
    EncoderDecoderModel,
)
from transformers.models.deberta_v2 import modeling_deberta_v2

import hf_posenc
from hf_posenc.integrations.stock_attention import attention as own_attention
from hf_posenc.integrations.stock_attention import deberta, mpnet
from hf_posenc.modeling.kernels import caching, fast
from hf_posenc.modeling.schemes.positions import expand_to_pairs


@pytest.fixture
def blocks(monkeypatch):
    """Blocks for sequences of any length, and the number of calls of them."""
    calls = []

    def counted(*arguments):
        calls.append(arguments[0].shape)
        return attend(*arguments)

    attend = fast.blockwise_attention
    monkeypatch.setattr(fast, "blockwise_attention", counted)
    monkeypatch.setattr(fast, "FEWEST_SCORES", 0)
    monkeypatch.setattr(fast, "FEWEST_SCORES_WITH_VIEWS", 0)
    monkeypatch.setattr(mpnet, "BLOCKS_FROM", 0)
    return calls


def outputs(model: nn.Module, implementation: str, inputs: dict, **settings) -> torch.Tensor:
    assert hf_posenc.set_attn_implementation(model, implementation) == 1
    return model(**inputs, **settings).last_hidden_state


def exact_outputs(case: str, inputs: dict) -> torch.Tensor:
    """Stock's in float64: in float32, its mean over values at padding is 2e-5 off on some processors."""
    return outputs(build(case).double(), "eager", inputs).float()


def outputs_and_gradients(
    model: nn.Module, implementation: str, inputs: dict
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    hidden = outputs(model, implementation, inputs)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    # What nothing depends on has no gradient here, or 0.
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return hidden.detach(), found


def gradients(model: nn.Module, implementation: str, inputs: dict) -> dict[str, torch.Tensor]:
    _, found = outputs_and_gradients(model, implementation, inputs)
    return {name: found[name] for name, p in model.named_parameters() if p.grad is not None}


@cross(case=CASES, padding=[None, "left", "right"], rest=pytest.mark.slow)
def test_outputs_are_those_of_transformers_at_every_position(case, padding):
    model = build(case)
    with torch.no_grad():
        for length in (1, 2, 12, 60, 130, 600):
            inputs = batch(length, padding, number=2 if length > 500 else 3)
            expected = exact_outputs(case, inputs)
            torch.testing.assert_close(outputs(model, "sdpa", inputs), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_transformers_for_long_sequences(case):
    model, inputs = build(case), batch(1100, "left", number=2)
    with torch.no_grad():
        expected = exact_outputs(case, inputs)
        torch.testing.assert_close(outputs(model, "sdpa", inputs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if "no " not in case])
def test_short_sequences_in_blocks_are_those_of_transformers(case, blocks):
    model, inputs = build(case), batch(9, "left")
    with torch.no_grad():
        expected = outputs(model, "eager", inputs)
        torch.testing.assert_close(outputs(model, "sdpa", inputs), expected, rtol=0, atol=1e-5)
    assert len(blocks) == 2


@cross(case=CASES, length=[7, 80], rest=pytest.mark.slow)
def test_gradients_are_those_of_transformers(case, length):
    model, inputs = build(case), batch(length, "left")
    expected, found = (gradients(model, implementation, inputs) for implementation in ("eager", "sdpa"))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # A key's bias gives every key the same score: its gradient is 0 but for rounding where nothing else reads it.
        scale = max(float(gradient.norm()), 0.1)
        assert float((found[name] - gradient).norm()) < 1e-4 * scale, name


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 12 else pytest.mark.slow) for seed in range(40)]
)
def test_any_config_computes_as_eager(seed):
    """Options that do not fit each other too: what one of them switches off, others may still name."""
    draw = random.Random(seed)
    sizes = {
        "max_position_embeddings": 64,
        "relative_attention": draw.random() < 0.6,
        "pos_att_type": draw.choice([None, [], ["c2p"], ["p2c"], ["p2c", "c2p"], "c2p|p2c", ["c2p", "c2p"], ["p2p"]]),
        "max_relative_positions": draw.choice([-1, 5, 20]),
        "position_biased_input": draw.random() < 0.5,
        "type_vocab_size": draw.choice([0, 2]),
        "norm_rel_ebd": draw.choice(["none", "layer_norm"]),
    }
    if draw.random() < 0.6:
        choices = {"position_buckets": [-1, 0, 8], "share_att_key": [True, False], "conv_kernel_size": [0, 3]}
        sizes |= {name: draw.choice(values) for name, values in choices.items()}
    model = build("v3" if "share_att_key" in sizes else "v1", **sizes).double()
    inputs = batch(draw.choice([1, 2, 9, 40]), draw.choice([None, "left", "right"]))
    inputs["attention_mask"][draw.randrange(3)] *= draw.choice([0, 1])
    (stock, expected), (own, found) = (outputs_and_gradients(model, name, inputs) for name in ("eager", "sdpa"))
    # Stock takes the root that it scales by in float32.
    torch.testing.assert_close(own, stock, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(float(g.norm()) for g in expected.values()))


@pytest.mark.parametrize("sizes", [{"position_buckets": 8}, {"position_buckets": 7}, {"position_buckets": 0}], ids=str)
def test_rows_beyond_the_largest_distance_are_those_of_transformers(sizes, blocks):
    """Outputs and gradients of texts three times as long, in which every row of the table is read."""
    model, inputs = build("v3", **sizes, max_relative_positions=16).double(), batch(48, "right")
    (expected, wanted), (own, found) = (outputs_and_gradients(model, name, inputs) for name in ("eager", "sdpa"))
    # Stock takes the root that it scales by in float32.
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * max(float(g.norm()) for g in wanted.values()))
    assert blocks and found["encoder.rel_embeddings.weight"].any(-1).all()


@pytest.mark.parametrize("case", ["v3", "v1", "own projections, few buckets"])
def test_every_term_counts(case):
    inputs = batch(40)
    with torch.no_grad():
        whole = build(case)(**inputs).last_hidden_state
        for kind in ("c2p", "p2c"):
            model = build(case)
            for layer in model.encoder.layer:
                layer.attention.self.pos_att_type = [t for t in layer.attention.self.pos_att_type if t != kind]
            assert (model(**inputs).last_hidden_state - whole).abs().max() > 0.1


@cross(case=KINDS, length=[8, 70, 300], dtype=[torch.float32, torch.float64], rest=pytest.mark.slow)
def test_a_sequence_that_is_all_padding(case, length, dtype):
    """Outputs and gradients; MPNet's scores have one there too, since it adds its mask to them, and DeBERTa's none."""
    model, inputs = build(case).to(dtype), batch(length, "left")
    inputs["attention_mask"][1] = 0
    (stock, expected), (own, found) = (outputs_and_gradients(model, name, inputs) for name in ("eager", "sdpa"))
    torch.testing.assert_close(own, stock, rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(outputs(model, "sdpa", inputs), stock, rtol=0, atol=1e-5)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) < 1e-4 * max(float(gradient.norm()), 1.0), name


def test_short_sequences_that_are_all_padding_in_blocks(blocks):
    for case in KINDS:
        model, inputs = build(case), batch(8)
        inputs["attention_mask"][1] = 0
        (stock, expected), (own, found) = (outputs_and_gradients(model, name, inputs) for name in ("eager", "sdpa"))
        torch.testing.assert_close(own, stock, rtol=0, atol=1e-5)
        for name, gradient in expected.items():
            assert float((found[name] - gradient).norm()) < 1e-4 * max(float(gradient.norm()), 1.0), name
    assert len(blocks) == 2 * len(KINDS)


def test_mpnet_with_a_mask_of_pairs_where_queries_attend_to_nothing():
    """Whether in a mask of truth values or of numbers to add."""
    model, inputs = build("mpnet"), batch(9, number=2)
    pairs = torch.zeros(2, 1, 9, 9)
    pairs[0, :, 3] = pairs[1, :, 5:] = pairs[1, ..., 7:] = torch.finfo(pairs.dtype).min
    stock, expected = outputs_and_gradients(model, "eager", {**inputs, "attention_mask": pairs})
    for mask in (pairs, pairs == 0):
        own, found = outputs_and_gradients(model, "sdpa", {**inputs, "attention_mask": mask})
        torch.testing.assert_close(own, stock, rtol=0, atol=1e-5)
        for name, gradient in expected.items():
            assert float((found[name] - gradient).norm()) < 1e-4 * max(float(gradient.norm()), 1.0), name


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("length", [12, 70])
def test_flex_attention_computes_the_same(case, length):
    model, inputs = build(case), batch(length, "left")
    with torch.no_grad():
        expected = outputs(model, "eager", inputs)
        torch.testing.assert_close(outputs(model, "flex_attention", inputs), expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", KINDS)
def test_flex_attention_computes_the_same_where_a_sequence_is_all_padding(case):
    model, inputs = build(case), batch(12, "left")
    inputs["attention_mask"][1] = 0
    expected = outputs(model, "eager", inputs)
    torch.testing.assert_close(outputs(model, "flex_attention", inputs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", KINDS)
def test_half_precision_and_autocast(case, blocks):
    inputs = batch(20, "right")
    with torch.no_grad():
        exact = build(case).double()(**inputs).last_hidden_state
        model = build(case).bfloat16()
        stock, own = (outputs(model, name, inputs).double() for name in ("eager", "sdpa"))
        assert (own - exact).norm() < 1.2 * (stock - exact).norm()
        model = build(case)
        with torch.autocast("cpu", torch.bfloat16):
            own = outputs(model, "sdpa", inputs).double()
            if case != "v1":  # stock's own raises under autocast
                stock = outputs(model, "eager", inputs).double()
        assert (own - exact).norm() < 1.2 * (stock - exact).norm()


@pytest.mark.parametrize("case", KINDS)
def test_attention_dropout_drops_weights(case, blocks):
    inputs, sizes = batch(10, "left"), {"attention_probs_dropout_prob": 1.0}
    model = build(case, **sizes).train()
    expected, found = (outputs(model, implementation, inputs) for implementation in ("eager", "sdpa"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    model = build(case, attention_probs_dropout_prob=0.3).train()
    assert not torch.equal(outputs(model, "sdpa", inputs), outputs(model, "sdpa", inputs))


def test_queries_that_are_padding_get_dropped_weights_too():
    torch.manual_seed(0)
    value, words = torch.randn(2, 3, 6, 4), torch.ones(2, 6, dtype=torch.bool)
    words[1, :4] = False
    mixed = torch.stack([own_attention._of_padding(value, words, 0.4) for _ in range(3000)])
    mean, variance = mixed[:, 1, :4].mean(0), mixed[:, 1, :4].var(0)
    torch.testing.assert_close(mean, value[1].mean(1).expand(4, -1, -1), rtol=0, atol=0.06)
    # Independent weights: Σ (value / length)² · p / (1 - p).
    expected = ((value[1] / 6).square().sum(1) * 0.4 / 0.6).expand(4, -1, -1)
    torch.testing.assert_close(variance, expected, rtol=0.15, atol=0)


def test_hidden_dropout_reaches_the_table():
    model = build("v3", hidden_dropout_prob=0.5).train()
    model.embeddings.dropout.p = 0.0
    for layer in model.encoder.layer:
        layer.attention.output.dropout.p = layer.output.dropout.p = 0.0
    inputs = batch(10)
    assert not torch.equal(outputs(model, "sdpa", inputs), outputs(model, "sdpa", inputs))


@pytest.mark.parametrize("case", ["v3", "v1"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(case, reentrant):
    inputs = batch(70, "left")
    expected = gradients(build(case), "sdpa", inputs)
    model = build(case, norm_rel_ebd="none") if reentrant else build(case)
    if reentrant:
        expected = gradients(build(case, norm_rel_ebd="none"), "sdpa", inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    found = gradients(model, "sdpa", inputs)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", KINDS)
def test_weights_are_returned_as_eager_computes_them(case):
    model, inputs = build(case), batch(11, "left")
    with torch.no_grad():
        hf_posenc.set_attn_implementation(model, "eager")
        expected = model(**inputs, output_attentions=True)
        for implementation in ("sdpa", "flex_attention"):
            hf_posenc.set_attn_implementation(model, implementation)
            found = model(**inputs, output_attentions=True)
            assert len(found.attentions) == 2
            torch.testing.assert_close(found.attentions, expected.attentions, rtol=0, atol=1e-6)
            torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", KINDS)
def test_unnamed_stays_stock_bit_for_bit(case):
    model, inputs = build(case), batch(70, "right")
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        hf_posenc.uninstall()
        try:
            assert torch.equal(model(**inputs).last_hidden_state, expected)
        finally:
            hf_posenc.install()


@pytest.mark.parametrize("case", KINDS)
def test_each_way_to_ask_for_a_backend(case, tmp_path, blocks):
    stock = build(case)
    stock.save_pretrained(tmp_path)
    inputs = batch(9)

    def computes_in_blocks(model) -> bool:
        blocks.clear()
        with torch.no_grad():
            torch.testing.assert_close(
                model(**inputs).last_hidden_state, stock(**inputs).last_hidden_state, rtol=0, atol=1e-5
            )
        assert type(model) is type(stock)
        return len(blocks) == 2

    assert not computes_in_blocks(AutoModel.from_pretrained(tmp_path))
    assert computes_in_blocks(AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa"))
    config = AutoConfig.from_pretrained(tmp_path)
    config._attn_implementation = "sdpa"
    model = AutoModel.from_pretrained(tmp_path, config=config)
    assert computes_in_blocks(model)
    model.set_attn_implementation("eager")
    assert not computes_in_blocks(model)
    model.set_attn_implementation("sdpa")
    assert computes_in_blocks(model)
    built = type(stock)(config).eval()
    built.load_state_dict(stock.state_dict())
    assert computes_in_blocks(built)
    built.config._attn_implementation = "eager"
    assert not computes_in_blocks(built)


@pytest.mark.parametrize("case", KINDS)
def test_what_is_saved_is_the_stock_checkpoint(case, tmp_path):
    model = build(case)
    model.save_pretrained(tmp_path / "stock")
    hf_posenc.set_attn_implementation(model, "sdpa")
    model.save_pretrained(tmp_path / "other")
    names = {file.name for file in (tmp_path / "stock").iterdir()}
    assert names == {file.name for file in (tmp_path / "other").iterdir()}
    for name in names:
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert b"hf_posenc" not in pickle.dumps(model)


@pytest.mark.parametrize("case", KINDS)
def test_copies_compute_the_same(case, blocks):
    model, inputs = build(case), batch(9, "left")
    with torch.no_grad():
        expected = outputs(model, "sdpa", inputs)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            blocks.clear()
            assert torch.equal(other(**inputs).last_hidden_state, expected)
            assert len(blocks) == 2


@pytest.mark.parametrize("case", KINDS)
def test_an_encoder_in_an_encoder_decoder(case, blocks):
    # Its model gets a copy of its config there.
    sizes = {**stock_models.SIZES, "is_decoder": True, "add_cross_attention": True}
    whole = EncoderDecoderModel(encoder=build(case), decoder=BertLMHeadModel(BertConfig(**sizes))).eval()
    given = {**batch(9, "right"), "decoder_input_ids": torch.ones(3, 2, dtype=torch.long)}
    with torch.no_grad():
        expected = whole(**given).encoder_last_hidden_state
        whole.set_attn_implementation("sdpa")
        found = whole(**given).encoder_last_hidden_state
        assert len(blocks) == 2
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        whole.set_attn_implementation("eager")
        assert torch.equal(whole(**given).encoder_last_hidden_state, expected)


def test_heads_are_changed_with_their_model(blocks):
    model = build("v3", DebertaV2ForTokenClassification)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert model(**batch(9)).logits.shape == (3, 9, 2)
    assert len(blocks) == 2


class Extractor(nn.Module):
    """As GLiNER holds its encoder: built from a config, known by its class's name, and its encoder called by itself."""

    def __init__(self, config: DebertaV2Config):
        super().__init__()
        self.token_rep_layer = nn.ModuleDict({"bert_layer": DebertaV2Model(config)})
        assert type(self.model).__name__ == "DebertaV2Model"
        assert type(self.model.encoder.layer[0].attention).__name__ == "DebertaV2Attention"

    @property
    def model(self) -> DebertaV2Model:
        return self.token_rep_layer["bert_layer"]

    def forward(self, input_ids: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        embedded = self.model.embeddings(input_ids, mask=torch.ones_like(input_ids))
        return self.model.encoder(embedded, pairs).last_hidden_state


def packed(length: int) -> torch.Tensor:
    """(2, length, length), two documents in a sequence; the last token of the second sequence belongs to none."""
    document = (torch.arange(length) >= length // 3).long()
    pairs = (document[:, None] == document[None, :]).long().repeat(2, 1, 1)
    pairs[1, -1] = pairs[1, :, -1] = 0
    return pairs


@pytest.mark.parametrize("length", [9, 70])
def test_a_model_built_from_a_config_with_a_mask_of_pairs(length, blocks):
    config = stock_models.config("v3")
    config._attn_implementation = "sdpa"
    extractor = stock_models.fill(Extractor(config)).eval()
    inputs = batch(length, number=2)["input_ids"], packed(length)
    with torch.no_grad():
        found = extractor(*inputs)
        assert len(blocks) == 2
        assert hf_posenc.set_attn_implementation(extractor, "eager") == 1
        torch.testing.assert_close(found, extractor(*inputs), rtol=0, atol=1e-5)
        assert len(blocks) == 2


def test_relative_positions_and_query_states_of_the_callers_are_stock():
    model = build("v3")
    hidden, mask = torch.randn(2, 6, 32), torch.ones(2, 6, dtype=torch.long)
    relative = torch.arange(6)[:, None] - torch.arange(6)[None] * 2
    for given in ({"relative_pos": relative[None]}, {"query_states": torch.randn(2, 6, 32)}):
        with torch.no_grad():
            expected = model.encoder(hidden, mask, **given).last_hidden_state
            hf_posenc.set_attn_implementation(model, "sdpa")
            torch.testing.assert_close(model.encoder(hidden, mask, **given).last_hidden_state, expected)
            hf_posenc.set_attn_implementation(model, "eager")


@pytest.mark.parametrize(
    ("span", "buckets", "max_distance"), [(256, 256, 512), (8, 8, 20), (20, -1, 20), (512, 0, 512), (48, 48, 64)]
)
@pytest.mark.parametrize("length", [1, 7, 33, 700])
def test_rows_are_those_of_transformers(length, span, buckets, max_distance):
    queries = torch.zeros(1, length, 1)
    pairs = modeling_deberta_v2.build_relative_position(queries, queries, buckets, max_distance)
    expected = (pairs + span).clamp(0, 2 * span - 1)[0]
    relative, rows, start, stop = deberta._reached(length, span, buckets, max_distance)
    assert torch.equal(expand_to_pairs(relative, length, length), pairs[0])
    assert torch.equal(expand_to_pairs(rows, length, length), expected)
    assert (start, stop) == (int(expected.min()), int(expected.max()) + 1)


@pytest.mark.parametrize("trains", [True, False])
def test_only_rows_that_distances_reach_are_projected(trains):
    model, seen = build("v3"), []
    hf_posenc.set_attn_implementation(model, "sdpa")
    layer = model.encoder.layer[0].attention.self
    layer.key_proj.register_forward_hook(lambda module, given, out: seen.append(given[0].shape[-2]))
    with torch.set_grad_enabled(trains), hf_posenc.cache_projections(False):
        for length in (1, 16, 128):
            model(**batch(length))
    assert seen == [1, 1, 16, 31, 128, 255]


def swap_projections(model: nn.Module) -> None:
    first, second = (layer.attention.self for layer in model.encoder.layer)
    for name in ("query_proj", "pos_proj"):
        if hasattr(first, name):
            own, other = getattr(first, name), getattr(second, name)
            setattr(first, name, other)
            setattr(second, name, own)


def train_a_step(model: nn.Module) -> None:
    model.train()
    with torch.enable_grad():
        model(**batch(70)).last_hidden_state.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.eval()


CHANGES = {
    "in place": lambda model: model.encoder.rel_embeddings.weight.mul_(1.5),
    "through .data": lambda model: model.encoder.rel_embeddings.weight.data.copy_(torch.randn(32)),
    "through NumPy": lambda model: model.encoder.rel_embeddings.weight.detach().numpy().fill(0.3),
    "loaded": lambda model: model.load_state_dict({k: v * 1.2 for k, v in model.state_dict().items()}),
    "another module": lambda model: setattr(model.encoder, "rel_embeddings", nn.Embedding(1024, 32)),
    "modules in each other's place": swap_projections,
    "to half precision": lambda model: model.bfloat16(),
    "to double precision": lambda model: model.double(),
    "training": train_a_step,
}


@cross(
    case=["v3", "v1"],
    change=CHANGES,
    mode=[torch.no_grad, torch.inference_mode],
    where=lambda change, mode, **_: change != "training" or mode is torch.no_grad,
    rest=pytest.mark.slow,
)
def test_kept_tables_follow_every_change(case, change, mode):
    model, inputs = build(case), batch(70)
    with mode():
        before = outputs(model, "sdpa", inputs)
        assert any(layer.attention.self in caching._cache for layer in model.encoder.layer)
        CHANGES[change](model)
        after = outputs(model, "sdpa", inputs)
        caching.clear_cache()
        assert torch.equal(after, outputs(model, "sdpa", inputs))
    assert (after.float() - before.float()).abs().max() > 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kept_tables_follow_settings(dtype):
    model, inputs = build("v3").to(dtype), batch(70)
    with torch.no_grad():
        before = outputs(model, "sdpa", inputs)
        model.encoder.LayerNorm.eps = 0.5
        after = outputs(model, "sdpa", inputs)
        caching.clear_cache()
        assert torch.equal(after, outputs(model, "sdpa", inputs))
        model.encoder.norm_rel_ebd = ["none"]
        without = outputs(model, "sdpa", inputs)
        caching.clear_cache()
        assert torch.equal(without, outputs(model, "sdpa", inputs))
    assert (after - before).abs().max() > 1e-3 and (without - after).abs().max() > 1e-3


@torch.no_grad()
def test_short_texts_of_a_large_model_read_each_matrix_once():
    """Matrices of 2^16 numbers and more are told by a product, which goes along with that of the hidden states."""
    model = build("v3", hidden_size=256, intermediate_size=64)
    texts = [batch(length, number=number) for length, number in ((16, 1), (16, 2), (9, 1), (48, 2))]
    hf_posenc.set_attn_implementation(model, "sdpa")
    model(**texts[0])
    sizes, linear = [], nn.functional.linear
    for repeated in range(3):
        for text in texts:
            expected = exact_large_outputs(model, text)
            torch.testing.assert_close(outputs(model, "sdpa", text), expected, rtol=0, atol=1e-4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                nn.functional, "linear", lambda rows, *given: sizes.append(len(rows)) or linear(rows, *given)
            )
            outputs(model, "sdpa", texts[0])
        assert sizes.count(16 + 2) == 2 * len(model.encoder.layer) or repeated == 0
        sizes.clear()
        model.encoder.layer[repeated % 2].attention.self.key_proj.weight.data[repeated, 3] += 0.5
        model.encoder.layer[1].attention.self.query_proj.bias.data[repeated] -= 0.5


def exact_large_outputs(model: nn.Module, text: dict) -> torch.Tensor:
    exact = type(model)(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    return outputs(exact, "eager", text).float()


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_adapter_for_each_of_as_many_sequences_as_rows_is_refused_as_in_eager(implementation):
    """PEFT would give each row of the table the adapter of a sequence."""
    from peft import LoraConfig, get_peft_model

    model, config = build("v3"), LoraConfig(target_modules=["query_proj", "key_proj"], init_lora_weights=False)
    hf_posenc.set_attn_implementation(model, implementation)
    peft = get_peft_model(model, config, adapter_name="one").eval()
    rows = 31  # that 16 tokens reach
    with pytest.raises(ValueError, match=f"Length of `adapter_names`.*got {rows} and 1 "):
        peft(**batch(16, number=rows), adapter_names=["one", *["__base__"] * (rows - 1)])


class TestBadInput:
    def test_unknown_backend(self):
        model = build("v3")
        with pytest.raises(ValueError, match="'cuda'.*eager, sdpa, flex_attention"):
            hf_posenc.set_attn_implementation(model, "cuda")
        with pytest.raises(ValueError, match="'cuda'.*DebertaV2Model has eager, sdpa, flex_attention"):
            model.set_attn_implementation("cuda")
        with pytest.raises(ValueError, match="'cuda'"):
            AutoModel.from_config(stock_models.config("mpnet"), attn_implementation="cuda")
        assert model.config._attn_implementation == "eager"

    def test_nothing_to_accelerate(self):
        with pytest.raises(ValueError, match="Linear holds no DeBERTa .* and no MPNet"):
            hf_posenc.set_attn_implementation(nn.Linear(2, 2), "sdpa")
        with pytest.raises(TypeError, match="torch module is needed.*str"):
            hf_posenc.set_attn_implementation("microsoft/deberta-v3-base", "sdpa")

    @pytest.mark.parametrize("shape", [(3, 8), (3, 8, 8), (3, 9, 8), (2, 9, 9), (3, 1, 1, 9, 9)])
    def test_mask_of_the_wrong_shape(self, shape):
        model = build("v3")
        hf_posenc.set_attn_implementation(model, "sdpa")
        with pytest.raises(ValueError, match=r"attention mask has shape .* 3 sequences of 9 tokens"):
            model.encoder(torch.randn(3, 9, 32), torch.ones(shape, dtype=torch.long).tril())

    def test_talking_heads_are_refused_at_load(self, tmp_path):
        stock_models.build("v1", talking_head=True).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="talking_head=True"):
            AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
        model = AutoModel.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match="talking_head=True"):
            hf_posenc.set_attn_implementation(model, "sdpa")
        assert model.config._attn_implementation == "eager"
        model.config._attn_implementation = "sdpa"
        with pytest.raises(ValueError, match="talking_head=True"):
            model(**batch(5))

    def test_another_attention_in_a_layer_of_mpnet(self):
        class Wrapper(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, *args, **kwargs):
                return self.inner(*args, **kwargs)

        model = build("mpnet")
        model.set_attn_implementation("sdpa")
        model.encoder.layer[0].attention.attn = Wrapper(model.encoder.layer[0].attention.attn)
        with pytest.raises(ValueError, match="this MPNet has another: use attn_implementation='eager'"):
            model(**batch(9, "right"))
        model.set_attn_implementation("eager")
        assert torch.equal(
            model(**batch(9, "right")).last_hidden_state, build("mpnet")(**batch(9, "right")).last_hidden_state
        )

    def test_repeated_layers_are_refused(self):
        model = build("v3")
        model.z_steps = 2
        with pytest.raises(ValueError, match="z_steps > 1"):
            model.set_attn_implementation("sdpa")

    @pytest.mark.parametrize("case", KINDS)
    def test_after_uninstall(self, case):
        model = build(case)
        hf_posenc.set_attn_implementation(model, "sdpa")
        hf_posenc.uninstall()
        try:
            with pytest.raises(RuntimeError, match="install"):
                hf_posenc.set_attn_implementation(model, "sdpa")
            with pytest.raises(ValueError, match="does not support"):
                AutoModel.from_config(stock_models.config(case), attn_implementation="sdpa")
            with torch.no_grad():
                found = model(**batch(9, "right")).last_hidden_state
        finally:
            hf_posenc.install()
        with torch.no_grad():
            assert torch.equal(found, outputs(model, "eager", batch(9, "right")))
        assert own_attention.IMPLEMENTATIONS == ("sdpa", "flex_attention")
