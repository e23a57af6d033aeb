"""Padding that is left out: the same at every token, and what stands against it."""

import copy
import pickle
import re
import threading

import pytest
import torch
from test_stock_stays_stock import replicate
from tiny import (
    CACHE,
    FAMILIES,
    PATHS,
    SIZES,
    STOCK_CONFIGS,
    Sentences,
    aligned,
    build,
    cross,
    fill_positions,
    heads_that_compute,
    inputs,
    stock_config,
    variant_class,
    variant_config,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertModel,
    DebertaConfig,
    DebertaV2Config,
    DynamicCache,
)

import hf_posenc
from hf_posenc.integrations import unpadding
from hf_posenc.modeling.kernels import fast, packing
from hf_posenc.modeling.schemes.table import SCHEMES


TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "max_relative_positions": 16,
    "position_biased_input": False,
    "type_vocab_size": 0,
}
DEBERTA = {
    "deberta": DebertaConfig(**SIZES, **RELATIVE),
    "deberta-v2": DebertaV2Config(
        **SIZES, **RELATIVE, position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm"
    ),
}
STOCK = [*FAMILIES, *DEBERTA]
COMPOSITES = ["absolute+t5+deberta", "tupe+t5", "sinusoidal+rope+relative"]
families = pytest.mark.parametrize("family", FAMILIES)
stock_families = pytest.mark.parametrize("family", STOCK)
PADDINGS = ["right", "left", "inner", "at [CLS]"]
SLOW = pytest.mark.slow


@pytest.fixture
def packed(monkeypatch) -> list[packing.Packing]:
    """The packings that were used; tiny batches are worth it here."""
    monkeypatch.setattr(packing, "FEWEST_PLACES", 1)
    monkeypatch.setattr(packing, "SMALLEST_SHARE", 0.0)
    monkeypatch.setattr(packing, "FEWEST_SAVED", 1)
    used, of = [], packing.Packing.of.__func__

    def noted(cls, *arguments):
        used.append(of(cls, *arguments))
        return used[-1]

    monkeypatch.setattr(packing.Packing, "of", classmethod(noted))
    return used


def padded(padding: str, family: str = "bert", batch: int = 5, length: int = 12, seed: int = 0) -> dict:
    """Inputs with padding somewhere; the last sequence is the shortest."""
    given = inputs(batch, length, family if family in FAMILIES else "bert", seed=seed)
    if padding == "left":
        return inputs(batch, length, family if family in FAMILIES else "bert", padding="left", seed=seed)
    if padding in ("inner", "at [CLS]"):
        generator = torch.Generator().manual_seed(seed)
        mask = (torch.rand(batch, length, generator=generator) > 0.4).long()
        mask[:, 0], mask[:, 3] = int(padding == "inner"), 1
        ids = torch.randint(5, SIZES["vocab_size"], (batch, length), generator=generator)
        given = {"input_ids": ids, "attention_mask": mask}
    return given


def stock(family: str, auto=AutoModel, **overrides) -> nn.Module:
    torch.manual_seed(0)
    config = copy.deepcopy(DEBERTA[family]) if family in DEBERTA else stock_config(family)
    for name, value in overrides.items():
        setattr(config, name, value)
    return auto.from_config(config).eval()


def trained(model: nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Hidden states, the pooled ones, and gradients of a loss that reads every token that is not padding."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    hidden, pooled = output.last_hidden_state, output.get("pooler_output")
    kept = hidden[batch["attention_mask"].bool()]
    loss = (kept * torch.linspace(-1, 1, kept.shape[-1])).sum()
    if pooled is not None:
        loss = loss + pooled.square().sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), pooled, gradients


def assert_same(found, expected, batch: dict) -> None:
    """The same at tokens, at each first place and in all gradients; zeros at other padding."""
    (hidden, pooled, gradients), (hidden_0, pooled_0, gradients_0) = found, expected
    read = batch["attention_mask"].bool().clone()
    read[:, 0] = True
    torch.testing.assert_close(hidden[read], hidden_0[read], **TOLERANCE)
    assert not hidden[~read].any() and hidden_0[~read].any()
    if pooled is not None:
        torch.testing.assert_close(pooled, pooled_0, **TOLERANCE)
    assert gradients.keys() == gradients_0.keys()
    for name, gradient in gradients_0.items():
        scale = max(1.0, gradient.abs().max().item())
        assert (gradients[name] - gradient).abs().max() < 1e-5 * scale, name


class TestVariants:
    @cross(scheme=[*SCHEMES, *COMPOSITES], family=FAMILIES, padding=PADDINGS, path=PATHS, rest=SLOW)
    def test_every_token_gets_the_same(self, scheme, family, padding, path, packed, monkeypatch):
        batch = padded(padding, family)
        model = build(scheme, family)
        model.config.unpad = False
        expected = trained(model, batch)
        assert not packed
        model.config.unpad = True
        if path == "blocks":
            monkeypatch.setattr(fast, "FEWEST_SCORES", 1)
            monkeypatch.setattr(fast, "FEWEST_SCORES_WITH_VIEWS", 0)
        assert_same(trained(model, batch), expected, batch)
        [used] = packed
        assert len(used.groups) > 1 or padding != "right"

    @cross(scheme=[*SCHEMES, *COMPOSITES], padding=PADDINGS, path=PATHS, rest=SLOW)
    def test_every_token_sees_the_same_in_a_window(self, scheme, padding, path, packed, monkeypatch):
        batch = padded(padding)
        model = build(scheme, position_window=3, position_global_every=2)
        model.config.unpad = False
        expected = trained(model, batch)
        model.config.unpad = True
        if path == "blocks":
            monkeypatch.setattr(fast, "FEWEST_SCORES", 1)
            monkeypatch.setattr(fast, "FEWEST_SCORES_WITH_VIEWS", 0)
        assert_same(trained(model, batch), expected, batch)
        assert len(packed) == 1

    @cross(scheme=[*SCHEMES, *COMPOSITES], backend=["eager", "sdpa"], padding=["right", "left"], rest=SLOW)
    def test_given_positions_are_those_of_the_tokens(self, scheme, backend, padding, packed):
        batch = padded(padding)
        batch["position_ids"] = torch.stack([torch.randperm(40)[:12] for _ in range(5)])
        model = build(scheme, attn_implementation=backend)
        found = trained(model, batch)
        assert len(packed) == 1
        packed.clear()
        model.config.unpad = False
        assert_same(found, trained(model, batch), batch)
        assert not packed

    @cross(
        scheme=["absolute", "sinusoidal+tupe"],
        family=["bert", "roberta", "electra", "distilbert", "mpnet"],
        combine=["add", "concat"],
    )
    def test_positions_before_every_layer_are_packed_too(self, scheme, family, combine, packed):
        batch = padded("right", family)
        model = build(scheme, family, position_every_layer=True, position_combine=combine)
        found = trained(model, batch)
        assert packed
        model.config.unpad = False
        assert_same(found, trained(model, batch), batch)

    @families
    def test_heads_give_what_they_gave(self, family, packed):
        batch = padded("right", family)
        for kind in heads_that_compute(family):
            name = kind.__name__.removeprefix(STOCK_CONFIGS[family].__name__.removesuffix("Config"))
            if name == "Model" or "Causal" in name or "LMHead" in name:
                continue
            model = build("absolute+t5+alibi", family, name)
            given = {n: v[:, None].repeat(1, 2, 1) for n, v in batch.items()} if "Multiple" in name else batch
            with torch.no_grad():
                found = model(**given)
                assert packed, name
                packed.clear()
                model.config.unpad = False
                expected = model(**given)
            for key, value in expected.items():
                ours = found[key]
                if value.shape[:2] == batch["input_ids"].shape:  # an output for each place
                    value, ours = (v[batch["attention_mask"].bool()] for v in (value, ours))
                torch.testing.assert_close(ours, value, **TOLERANCE)

    def test_checkpointed_layers_train_the_same(self, packed):
        for reentrant in (True, False):
            model, batch = build("absolute+t5+relative").train(), padded("right")
            expected = trained(model, batch)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            packed.clear()
            found = trained(model, batch)
            assert packed
            for name, gradient in expected[2].items():
                torch.testing.assert_close(found[2][name], gradient, **TOLERANCE)

    def test_the_gradient_has_a_gradient_with_eager(self, packed):
        model, batch = build("relative+t5", attn_implementation="eager"), padded("right")
        found = []
        for unpad in (True, False):
            model.config.unpad = unpad
            model.zero_grad()
            hidden = model(**batch).last_hidden_state[batch["attention_mask"].bool()]
            parameters = [p for p in model.parameters() if p.requires_grad]
            first = torch.autograd.grad(hidden.square().sum(), parameters, create_graph=True, allow_unused=True)
            sum(g.square().sum() for g in first if g is not None).backward()
            found.append(model.embeddings.word_embeddings.weight.grad.clone())
        assert len(packed) == 1
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype, packed):
        model, batch = build("t5+rope").to(dtype), padded("right")
        with torch.no_grad():
            found = model(**batch).last_hidden_state
            assert packed and found.dtype == dtype
            model.config.unpad = False
            expected = model(**batch).last_hidden_state
        kept = batch["attention_mask"].bool()
        assert (found - expected)[kept].abs().max() < 0.02 * expected.abs().max()


class TestDropout:
    @SLOW
    @pytest.mark.parametrize("where", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
    @pytest.mark.parametrize("scheme", ["absolute", "t5"])
    def test_outputs_have_the_same_mean_and_deviation(self, where, scheme, packed):
        model, batch = build(scheme, **{where: 0.3}).train(), padded("right")
        kept, samples = batch["attention_mask"].bool(), {}
        for unpad in (True, False):
            model.config.unpad = unpad
            with torch.no_grad():
                samples[unpad] = torch.stack([model(**batch)[0][kept] for _ in range(600)])
        assert len(packed) == 600
        mean, deviation = samples[False].mean(0), samples[False].std(0)
        error = (samples[True].mean(0) - mean) / (deviation * (2 / 600) ** 0.5)
        assert error.square().mean() < 1.2  # 1 for equal means
        ratio = samples[True].std(0) / deviation
        assert (ratio - 1).abs().mean() < 0.05

    def test_no_dropout_is_shared_by_tokens(self, packed):
        model = build("none", hidden_dropout_prob=0.5, num_hidden_layers=1).train()
        batch = padded("right")
        batch["input_ids"][:] = 7
        with torch.no_grad():
            hidden = model(**batch)[0][batch["attention_mask"].bool()]
        assert packed
        assert (hidden[:, None] == hidden[None]).all(-1).sum() == len(hidden)


def nothing(*_):
    return None


class TestWhatStandsAgainstIt:
    """Each time, the model computes what it computed without."""

    def check(self, packed, model: nn.Module, batch: dict, packs_other_batches: bool = True, **call) -> None:
        packed.clear()
        with torch.no_grad():
            found = model(**batch, **copy.deepcopy(call))[0]
            assert not packed
            model.config.unpad = False
            torch.testing.assert_close(found, model(**batch, **call)[0], atol=0, rtol=0)
            model.config.unpad = True
            model(**padded("right"))
        assert bool(packed) == packs_other_batches

    @cross(family=FAMILIES, recorded=["output_hidden_states", "output_attentions"], strength=1)
    def test_recorded_states(self, recorded, family, packed):
        model, batch = build("absolute+t5", family, attn_implementation="eager"), padded("right", family)
        with torch.no_grad():
            assert model(**batch)[0] is not None and len(packed) == 1
            found = model(**batch, **{recorded: True})
            assert len(packed) == 1
            model.config.unpad = False
            expected = model(**batch, **{recorded: True})
            model.config.unpad = True
            for ours, theirs in zip(found[recorded.split("_", 1)[1]], expected[recorded.split("_", 1)[1]]):
                torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
            setattr(model.config, recorded, True)
            model(**batch)
            assert len(packed) == 1
            setattr(model.config, recorded, False)
            # The hooks that recorded stay, and do nothing.
            model(**batch)
            assert len(packed) == 2

    def test_decoders_and_caches(self, packed):
        model = build("t5", is_decoder=True)
        batch = padded("right")
        self.check(packed, model, batch, packs_other_batches=False)
        self.check(packed, build("t5"), batch, **{CACHE: DynamicCache()})

    def test_cross_attention(self, packed):
        batch = padded("right")
        model = build("t5", is_decoder=True, add_cross_attention=True)
        self.check(packed, model, batch, packs_other_batches=False, encoder_hidden_states=torch.randn(5, 4, 32))

    def test_masks_of_pairs(self, packed):
        batch = padded("right")
        pairs = batch["attention_mask"].bool()[:, None, None].expand(-1, 1, 12, 12)
        self.check(packed, build("t5"), batch | {"attention_mask": pairs})

    def test_sequences_of_padding_alone(self, packed):
        batch = padded("right")
        batch["attention_mask"][2] = 0
        self.check(packed, build("t5"), batch)

    @pytest.mark.parametrize("batch", [inputs(padding=None), {"input_ids": inputs(padding=None)["input_ids"]}])
    def test_nothing_to_leave_out(self, batch, packed):
        self.check(packed, build("t5"), batch)

    def test_one_sequence_with_padding_is_packed(self, packed):
        batch = {name: value[1:2] for name, value in padded("right").items()}
        model = build("t5")
        found = trained(model, batch)
        assert packed
        model.config.unpad = False
        assert_same(found, trained(model, batch), batch)

    def test_little_padding(self, packed, monkeypatch):
        model, batch = build("t5"), padded("right")
        padding = int((batch["attention_mask"] == 0).sum())
        for name, value in (("FEWEST_PLACES", padding + 1), ("SMALLEST_SHARE", padding / 60 + 0.01)):
            with monkeypatch.context() as patch:
                patch.setattr(packing, name, value)
                with torch.no_grad():
                    model(**batch)
                assert not packed
        with torch.no_grad():
            model(**batch)
        assert packed

    def test_other_backends(self, packed):
        model = build("t5", attn_implementation="flex_attention")
        self.check(packed, model, padded("right"), packs_other_batches=False)

    @cross(
        place=["encoder.layer.0", "encoder.layer.1.output.dense"],
        kind=["forward_hook", "forward_pre_hook", "full_backward_hook", "everywhere"],
    )
    def test_hooks_on_layers(self, place, kind, packed):
        model, batch, shapes = build("t5"), padded("right"), []

        def look(module, *states):
            shapes.append(states[0][0].shape[:2] if isinstance(states[0], tuple) and states[0] else None)

        if kind == "everywhere":
            handle = nn.modules.module.register_module_forward_pre_hook(look)
        else:
            handle = getattr(model.get_submodule(place), f"register_{kind}")(look)
        model(**batch)[0].sum().backward()
        handle.remove()
        assert not packed and shapes and (1, int(batch["attention_mask"].sum())) not in shapes
        model(**batch)
        assert packed

    def test_feed_forward_in_chunks(self, packed):
        model = build("t5", chunk_size_feed_forward=4)
        self.check(packed, model, padded("right"), packs_other_batches=False)

    @SLOW
    def test_tracing(self, packed):
        model, batch = build("t5"), padded("right")
        model.config.return_dict = False
        try:
            torch.jit.trace(stock("bert", return_dict=False), tuple(batch.values()), check_trace=False)
        except IndexError:
            pytest.skip("before 5.9, a mask is not traced by transformers' own models either")
        with torch.no_grad():
            traced = torch.jit.trace(model, tuple(batch.values()), check_trace=False)
            assert not packed
            other = padded("right", seed=3)
            expected = model(**other)[0]
        kept = other["attention_mask"].bool()
        torch.testing.assert_close(traced(*other.values())[0][kept], expected[kept], **TOLERANCE)

    @SLOW
    def test_export(self, packed):
        torch.export.export(build("t5"), (), padded("right"), strict=False)
        assert not packed

    @SLOW
    @pytest.mark.compiled
    @pytest.mark.parametrize("is_stock", [False, True])
    def test_compiling(self, is_stock, packed):
        model, batch = stock("bert") if is_stock else build("t5"), padded("right")
        if is_stock:
            hf_posenc.unpad(model)
        compiled = torch.compile(model, backend="eager", fullgraph=not is_stock)
        with torch.no_grad():
            found = compiled(**batch)[0]
            assert not packed
            expected = model(**batch)[0]
        kept = batch["attention_mask"].bool()
        torch.testing.assert_close(found[kept], expected[kept], **TOLERANCE)

    def test_function_transforms(self, packed):
        model, batch = build("t5", attn_implementation="eager"), padded("right")
        parameters = dict(model.named_parameters())

        def loss(parameters):
            return torch.func.functional_call(model, parameters, (), batch)[0].sum()

        torch.func.grad(loss)(parameters)
        assert not packed

    def test_units_of_fsdp_have_hooks(self):
        from torch.distributed.fsdp import FSDPModule  # noqa: F401

        layer = nn.Linear(2, 2)
        assert not packing.is_hooked(layer)
        layer.register_forward_pre_hook(nothing)
        assert packing.is_hooked(layer)


class TestLossesThatReadPadding:
    @pytest.mark.parametrize("is_stock", [False, True])
    def test_labels_at_padding(self, is_stock, packed):
        batch = padded("right")
        labels = torch.randint(2, (5, 12))
        ignored = labels.masked_fill(batch["attention_mask"] == 0, -100)
        if is_stock:
            model = stock("bert", AutoModelForTokenClassification)
            expected = model(**batch, labels=labels).loss, model(**batch, labels=ignored).loss
            hf_posenc.unpad(model)
        else:
            model = build("t5", head="ForTokenClassification")
            model.config.unpad = False
            expected = model(**batch, labels=labels).loss, model(**batch, labels=ignored).loss
            model.config.unpad = True
        torch.testing.assert_close(model(**batch, labels=labels).loss, expected[0], atol=0, rtol=0)
        assert not packed
        torch.testing.assert_close(model(**batch, labels=ignored).loss, expected[1], **TOLERANCE)
        assert len(packed) == 1
        model(**batch)
        assert len(packed) == 2

    @pytest.mark.parametrize("is_stock", [False, True])
    def test_replicas_look_at_their_labels_too(self, is_stock, packed):
        batch, labels = padded("right"), torch.randint(2, (5, 12))
        if is_stock:
            padding = stock("bert", AutoModelForTokenClassification)
        else:
            padding = build("t5", head="ForTokenClassification", unpad=False)
        model = copy.deepcopy(padding)
        hf_posenc.unpad(model)
        replica = replicate(model)
        found = replica(**batch, labels=labels).loss
        torch.testing.assert_close(found, padding(**batch, labels=labels).loss, atol=0, rtol=0)
        assert not packed
        replica(**batch)
        assert packed

    @pytest.mark.parametrize("is_stock", [False, True])
    def test_answers_compete_with_padding(self, is_stock, packed):
        batch, answers = padded("right"), torch.tensor([1, 2, 1, 0, 3])
        if is_stock:
            model = stock("bert", AutoModelForQuestionAnswering)
            expected = model(**batch, start_positions=answers, end_positions=answers).loss
            hf_posenc.unpad(model)
        else:
            model = build("t5", head="ForQuestionAnswering")
            model.config.unpad = False
            expected = model(**batch, start_positions=answers, end_positions=answers).loss
            model.config.unpad = True
        found = model(**batch, start_positions=answers, end_positions=answers).loss
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
        assert not packed
        model(**batch)
        assert packed


class TestConfig:
    def test_it_is_on_and_not_saved_until_it_is_off(self, tmp_path):
        model = build("t5")
        assert model.config.unpad is True
        model.save_pretrained(tmp_path)
        assert "unpad" not in (tmp_path / "config.json").read_text()
        for again in (
            AutoModel.from_pretrained(tmp_path, unpad=False),
            BertModel.from_pretrained(tmp_path, unpad=False),
        ):
            assert again.config.unpad is False
            again.save_pretrained(tmp_path / "off")
            assert AutoConfig.from_pretrained(tmp_path / "off").unpad is False
        config = AutoConfig.from_pretrained(tmp_path)
        assert AutoModel.from_pretrained(tmp_path, config=config, unpad=False).config.unpad is False

    @families
    def test_every_entry_point_takes_it_beside_a_scheme_and_alone_it_makes_no_variant(self, family, tmp_path):
        flags = {"position_scheme": "absolute+t5", "unpad": False}
        assert stock_config(family, **flags).unpad is False
        model = AutoModel.from_config(stock_config(family)).eval()
        model.save_pretrained(tmp_path)
        variant = AutoModel.from_pretrained(tmp_path, **flags)
        assert variant.config.unpad is False and type(variant) is variant_class(family)
        assert type(stock_config(family, unpad=False)) is STOCK_CONFIGS[family]

    @pytest.mark.parametrize("value", [None, 1, "yes"])
    def test_other_values_are_refused(self, value):
        with pytest.raises((TypeError, ValueError), match="unpad"):
            variant_config(position_scheme="t5", unpad=value)
        model_config = variant_config(position_scheme="t5")
        model_config.unpad = value
        with pytest.raises(TypeError, match="unpad must be True or False"):
            BertModel(model_config)


class TestStock:
    @cross(family=STOCK, padding=PADDINGS, rest=SLOW)
    def test_every_token_gets_the_same(self, family, padding, packed):
        batch, model = padded(padding, family), stock(family)
        expected = trained(model, batch)
        assert hf_posenc.unpad(model) == 1
        if family in DEBERTA and padding in ("left", "at [CLS]"):
            # There padding asks for itself.
            torch.testing.assert_close(trained(model, batch)[0], expected[0], atol=0, rtol=0)
            assert not packed
            return
        assert_same(trained(model, batch), expected, batch)
        assert len(packed) == 1
        assert hf_posenc.unpad(model, False) == 1
        torch.testing.assert_close(trained(model, batch)[0], expected[0], atol=0, rtol=0)
        assert len(packed) == 1

    @cross(family=STOCK, backend=["eager", "sdpa"], path=PATHS, rest=SLOW)
    def test_sequences_of_similar_length_attend_together(self, family, backend, path, packed, monkeypatch):
        """As in variants; DeBERTa's and MPNet's terms are shared by all groups, whichever backend is asked for."""
        batch = padded("right", family, batch=6, length=40)
        for row, length in enumerate((40, 9, 33, 12, 3, 21)):
            batch["attention_mask"][row, length:] = 0
            batch["attention_mask"][row, :length] = 1
        model = stock(family)
        expected = trained(model, batch)
        if path == "blocks":
            monkeypatch.setattr(fast, "FEWEST_SCORES", 1)
            monkeypatch.setattr(fast, "FEWEST_SCORES_WITH_VIEWS", 0)
        hf_posenc.unpad(model)
        if family in DEBERTA or family == "mpnet":
            hf_posenc.set_attn_implementation(model, backend)
        else:
            model.set_attn_implementation(backend)
        assert_same(trained(model, batch), expected, batch)
        assert [len(one.groups) for one in packed] == [5]  # 40 and 33 share one

    @stock_families
    def test_a_self_attention_that_somebody_has_changed_computes_padding(self, family, packed, monkeypatch):
        batch, model = padded("right", family), stock(family)
        hf_posenc.unpad(model)
        model(**batch)
        assert packed
        found = unpadding._family_of(model)
        attention = found.self_attention_of(found.layers_of(found.encoder_of(model))[0])
        forward, seen = attention.forward, []
        for owner, value in (
            (attention, lambda *args, **kwargs: seen.append(1) or forward(*args, **kwargs)),
            (type(attention), lambda self, *args, **kwargs: seen.append(1) or forward.__func__(self, *args, **kwargs)),
        ):
            packed.clear()
            seen.clear()
            with monkeypatch.context() as patch:
                patch.setattr(owner, "forward", value)
                model(**batch)
            assert seen and not packed

    @stock_families
    def test_without_the_plugin_padding_is_computed(self, family, packed):
        batch, model = padded("right", family), stock(family)
        with torch.no_grad():
            expected = model(**batch)[0]
            hf_posenc.unpad(model)
            model(**batch)
            packed.clear()
            hf_posenc.uninstall()
            try:
                assert torch.equal(model(**batch)[0], expected) and not packed
            finally:
                hf_posenc.install()
            model(**batch)
        assert len(packed) == 1

    @stock_families
    def test_copies_and_pickles_have_it_and_nothing_is_saved(self, family, packed, tmp_path):
        model, batch = stock(family), padded("right", family)
        names = [type(module).__name__ for module in model.modules()]
        keys, config = [*model.state_dict()], model.config.to_dict()
        hf_posenc.unpad(model)
        assert [type(module).__name__ for module in model.modules()] == names
        assert [*model.state_dict()] == keys and model.config.to_dict() == config
        expected = model(**batch)[0]
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            packed.clear()
            torch.testing.assert_close(again(**batch)[0], expected, atol=0, rtol=0)
            assert packed
        model.save_pretrained(tmp_path)
        packed.clear()
        aligned(AutoModel.from_pretrained(tmp_path)).eval()(**batch)
        assert not packed

    def test_twice_is_once(self, packed):
        model = stock("bert", AutoModelForSequenceClassification)
        hooks = []
        for _ in range(2):
            assert hf_posenc.unpad(model) == 1
            hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()))
        assert hooks[0] == hooks[1] > 0
        hf_posenc.unpad(model, False)
        tables = (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_pre_hooks_with_kwargs",
        )
        tables += ("_forward_hooks_always_called",)
        assert not any(vars(module)[table] for module in model.modules() for table in tables)

    def test_hooks_of_others_stay(self, packed):
        model, batch, seen = stock("bert"), padded("right"), []
        handle = model.encoder.layer[0].register_forward_hook(lambda *_: seen.append(1))
        hf_posenc.unpad(model)
        model(**batch)
        assert seen and not packed
        hf_posenc.unpad(model, False)
        model(**batch)
        assert len(seen) == 2
        handle.remove()

    def test_what_has_no_such_model_is_named(self):
        with pytest.raises(ValueError, match="models of bert, .*deberta-v2, and there is none in this Linear"):
            hf_posenc.unpad(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="torch module"):
            hf_posenc.unpad("bert-base-uncased")

    @cross(family=STOCK, recorded=["output_hidden_states", "output_attentions"], strength=1)
    def test_recorded_states(self, recorded, family, packed):
        model, batch = stock(family), padded("right", family)
        model.set_attn_implementation("eager")
        expected = model(**batch, **{recorded: True})[recorded.split("_", 1)[1]]
        hf_posenc.unpad(model)
        found = model(**batch, **{recorded: True})[recorded.split("_", 1)[1]]
        assert not packed
        for ours, theirs in zip(found, expected):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
        model(**batch)
        assert packed

    @pytest.mark.parametrize("family", [family for family in STOCK if family != "mpnet"])
    def test_gradient_checkpointing(self, family, packed):
        model, batch = stock(family), padded("right", family)
        hf_posenc.unpad(model)
        model.train().gradient_checkpointing_enable()
        model(**batch)[0].sum().backward()
        assert not packed
        model.eval()(**batch)
        assert packed

    @pytest.mark.parametrize("is_stock", [False, True])
    def test_layers_that_are_wrapped_to_be_checkpointed(self, is_stock, packed):
        padding = stock("bert") if is_stock else build("t5", unpad=False)
        model, batch = copy.deepcopy(padding), padded("right")
        hf_posenc.unpad(model)
        model.encoder.layer = nn.ModuleList(map(checkpoint_wrapper, model.encoder.layer))
        *_, found = trained(model, batch)
        *_, expected = trained(padding, batch)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name.replace("_checkpoint_wrapped_module.", "")])
        assert not packed

    def test_convolutions_of_deberta_read_neighbours(self, packed):
        model = stock("deberta-v2", conv_kernel_size=3)
        hf_posenc.unpad(model)
        model(**padded("right"))
        assert not packed

    @cross(family=STOCK, auto=[AutoModelForMaskedLM, AutoModelForSequenceClassification], rest=SLOW)
    def test_heads_give_what_they_gave(self, family, auto, packed):
        model, batch = stock(family, auto), padded("right", family)
        with torch.no_grad():
            expected = model(**batch).logits
            hf_posenc.unpad(model)
            found = model(**batch).logits
        assert packed
        kept = batch["attention_mask"].bool() if found.dim() == 3 else slice(None)
        torch.testing.assert_close(found[kept], expected[kept], **TOLERANCE)

    @stock_families
    def test_forward_may_be_called_directly(self, family, packed):
        """sentence-transformers does."""
        model, batch = stock(family), padded("right", family)
        expected = model.forward(**batch)[0]
        hf_posenc.unpad(model)
        found = model.forward(**batch)[0]
        assert len(packed) == 1
        kept = batch["attention_mask"].bool()
        torch.testing.assert_close(found[kept], expected[kept], **TOLERANCE)
        count = len(packed)
        recorded = model.forward(**batch, output_hidden_states=True)
        assert len(packed) == count
        torch.testing.assert_close(recorded.hidden_states[-1], expected, **TOLERANCE)
        assert {len(states) for states in recorded.hidden_states} == {len(expected)}
        if family in DEBERTA:  # whose encoder returns all hidden states to whoever calls it
            states = model.encoder(
                model.embeddings(batch["input_ids"], mask=batch["attention_mask"]), batch["attention_mask"]
            )
            assert len(packed) == count and states[0].shape == expected.shape
        pairs = batch["attention_mask"].bool()[:, None] & torch.ones(12, 12, dtype=torch.bool).tril()
        if family not in DEBERTA:
            given = batch | {"attention_mask": pairs[:, None]}
            try:
                stock(family).forward(**given)
            except ValueError as error:  # MPNet, up to 5.5
                with pytest.raises(ValueError, match=re.escape(str(error))):
                    model.forward(**given)
            else:
                model.forward(**given)
            assert len(packed) == count

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_what_a_mask_of_pairs_adds_to_scores_is_added(self, implementation, packed):
        padding, batch = stock("bert", initializer_range=0.3), padded("right")
        padding.set_attn_implementation(implementation)
        model = copy.deepcopy(padding)
        hf_posenc.unpad(model)
        kept = batch["attention_mask"].bool()
        pairs = torch.zeros(5, 1, 12, 12).masked_fill(~kept[:, None, None], torch.finfo(torch.float32).min)
        assert torch.equal(model(**batch | {"attention_mask": pairs})[0][kept], model(**batch)[0][kept]) and packed
        packed.clear()
        pairs[..., 1] -= 3.0
        expected = padding(**batch | {"attention_mask": pairs})[0]
        assert (expected - padding(**batch)[0])[kept].abs().max() > 1e-2
        assert torch.equal(model(**batch | {"attention_mask": pairs})[0], expected) and not packed

    @pytest.mark.parametrize("kind", [torch.bool, torch.long])
    def test_eager_adds_a_mask_of_pairs_as_the_numbers_it_is(self, kind, packed):
        """One that is no floating point masks nothing in stock's eager attention, and so does it where `forward` is called directly."""
        model, batch = stock("bert"), padded("right")
        model.set_attn_implementation("eager")
        given = {**batch, "attention_mask": batch["attention_mask"][:, None, None].to(kind)}
        expected = model.forward(**given)[0]
        hf_posenc.unpad(model)
        assert torch.equal(model.forward(**given)[0], expected) and not packed

    @SLOW
    def test_sentence_transformers(self, minilm, packed):
        from sentence_transformers import CrossEncoder, SentenceTransformer

        texts = ["a word", "and a sentence that is longer than the first", "one of some length", "another one " * 8]
        encoder = SentenceTransformer(minilm, device="cpu")
        reranker = CrossEncoder(minilm, device="cpu", num_labels=1)
        for model, call in (
            (encoder, encoder.encode),
            (reranker, lambda texts: reranker.predict([*zip(texts, texts)])),
        ):
            expected = torch.as_tensor(call(texts))
            assert hf_posenc.unpad(model) == 1
            packed.clear()
            torch.testing.assert_close(torch.as_tensor(call(texts)), expected, **TOLERANCE)
            assert packed
            hf_posenc.unpad(model, False)

    def test_errors_leave_the_next_call_as_it_is(self, packed):
        model, batch = stock("bert"), padded("right")
        expected = model(**batch)[0]
        hf_posenc.unpad(model)
        with pytest.raises(IndexError):
            model(**(batch | {"input_ids": batch["input_ids"] + 1000}))
        assert unpadding._current.get() is None
        full = inputs(padding=None)
        without = copy.deepcopy(model)
        hf_posenc.unpad(without, False)
        torch.testing.assert_close(model(**full)[0], without(**full)[0], atol=0, rtol=0)
        kept = batch["attention_mask"].bool()
        torch.testing.assert_close(model(**batch)[0][kept], expected[kept], **TOLERANCE)

    def test_threads_do_not_meet(self, packed):
        model = stock("bert")
        batches = [padded("right", seed=seed, length=8 + seed) for seed in range(8)]
        expected = [model(**batch)[0] for batch in batches]
        hf_posenc.unpad(model)
        wrong = []

        def work(index):
            kept = batches[index]["attention_mask"].bool()
            for _ in range(5):
                if not torch.allclose(model(**batches[index])[0][kept], expected[index][kept], atol=1e-5):
                    wrong.append(index)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not wrong and len(packed) == 40


TARGETS = {
    "bert": ["query", "value", "dense"],
    "distilbert": ["q_lin", "v_lin", "out_lin", "lin1"],
    "mpnet": ["q", "v", "o", "dense"],
}


class TestTraining:
    @SLOW
    @pytest.mark.parametrize("is_stock", [False, True])
    def test_the_trainer_has_the_same_losses(self, is_stock, packed, tmp_path):
        from transformers import Trainer, TrainingArguments

        losses = {}
        for unpad in (False, True):
            torch.manual_seed(0)
            if is_stock:
                model = stock("bert", AutoModelForSequenceClassification)
                if unpad:
                    hf_posenc.unpad(model)
            else:
                model = build("absolute+t5", head="ForSequenceClassification", unpad=unpad)
            settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
            settings |= {"learning_rate": 0.01, "logging_steps": 1, "report_to": "none", "use_cpu": True, "seed": 1}
            arguments = TrainingArguments(str(tmp_path), save_strategy="no", disable_tqdm=True, **settings)
            trainer = Trainer(model, arguments, train_dataset=Ragged())
            packed.clear()
            trainer.train()
            assert bool(packed) == unpad
            losses[unpad] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses[True]) == 4 and max(losses[True]) - min(losses[True]) > 1e-3
        torch.testing.assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), atol=2e-4, rtol=0)

    @cross(
        family=["bert", "distilbert", "mpnet"],
        is_stock=[False, True],
        unpads_first=[False, True],
        where=lambda is_stock, unpads_first, **_: is_stock or not unpads_first,
        rest=SLOW,
    )
    def test_lora_gives_the_same(self, family, is_stock, unpads_first, packed):
        from peft import LoraConfig, get_peft_model

        losses, gradients = [], []
        for unpad in (False, True):
            model = stock(family, AutoModelForSequenceClassification) if is_stock else None
            model = model or build("absolute+t5", family, "ForSequenceClassification", unpad=unpad)
            torch.manual_seed(0)
            if is_stock and unpad and unpads_first:
                hf_posenc.unpad(model)
            model = get_peft_model(
                model, LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, target_modules=TARGETS[family])
            )
            if is_stock and unpad and not unpads_first:
                hf_posenc.unpad(model)
            loss = model(**padded("right", family), labels=torch.tensor([0, 1, 0, 1, 1])).loss
            loss.backward()
            assert bool(packed) == unpad
            losses.append(loss)
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        torch.testing.assert_close(*losses, **TOLERANCE)
        torch.testing.assert_close(*gradients, **TOLERANCE)


class Ragged(Sentences):
    """The sentences of [`Sentences`], padded to different lengths."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        length = 4 + index
        item["attention_mask"] = (torch.arange(12) < length).long()
        return item


class TestGroups:
    def test_short_sequences_share_one(self):
        assert packing.groups_of([12, 9, 7, 5, 3, 3, 2], heads=12) == [(0, 7)]

    def test_long_ones_are_apart_from_short_ones(self):
        lengths = [256, 250, 120, 115, 30, 28, 27, 9]
        found = packing.groups_of(lengths, heads=12)
        assert found[0] == (0, 2) and found[1] == (2, 4) and found[-1][1] == 8
        assert [start for start, _ in found[1:]] == [stop for _, stop in found[:-1]]

    @pytest.mark.parametrize("seed", range(5))
    def test_packing_and_unpacking_are_inverse(self, seed, monkeypatch):
        monkeypatch.setattr(packing, "FEWEST_SAVED", 1)
        torch.manual_seed(seed)
        attended = torch.arange(20) < torch.randint(1, 21, (7, 1))
        used = packing.Packing.of(attended, 4)
        states = torch.randn(7, 20, 8)
        assert len(used.groups) > 1
        torch.testing.assert_close(
            used.pad_input(used.unpad_input(states)), states * attended[..., None], atol=0, rtol=0
        )
        in_heads = used.unpad_input(states).view(1, -1, 4, 2).transpose(1, 2)
        for group, part in zip(used.groups, used.by_group(in_heads)):
            own = attended[group.sequences, : group.shape[1]]
            expected = states[group.sequences, : group.shape[1]].view(*own.shape, 4, 2)
            torch.testing.assert_close(part.transpose(1, 2)[own], expected[own], atol=0, rtol=0)
            assert group.mask is None or torch.equal(group.mask[:, 0, 0], own)

    def test_queries_keys_and_values_are_padded_once(self, monkeypatch):
        """A query is given twice where positions do not change it."""
        padded, pad = [], packing.Group.pad_heads
        monkeypatch.setattr(packing.Group, "pad_heads", lambda *given: padded.append(given) or pad(*given))
        model, attended = build("t5").eval(), torch.arange(40) < torch.tensor([[40], [4], [3]])
        with torch.no_grad():
            model(torch.ones(3, 40, dtype=torch.long), attention_mask=attended.long())
        assert len(padded) == 3 * SIZES["num_hidden_layers"]


def test_fill_positions_matter_here(packed):
    """Without its positions, what is compared above would be another output."""
    batch = padded("right")
    model = build("t5")
    with torch.no_grad():
        found = model(**batch)[0]
        other = fill_positions(copy.deepcopy(model), seed=9)(**batch)[0]
    assert packed and (found - other)[batch["attention_mask"].bool()].abs().max() > 1e-3


def test_a_call_says_why_its_padding_is_computed(caplog):
    model, batch = build("t5"), inputs(batch=8, length=40)
    caplog.set_level("DEBUG", logger="hf_posenc")
    for change, reason in (
        ({}, None),
        ({"attention_mask": None}, "no attention_mask"),
        ({"attention_mask": torch.ones(8, 40)}, "0 of 320 tokens are padding, and skipping it is faster from 32 on"),
        ({"output_hidden_states": True}, "hidden states or attention weights"),
    ):
        caplog.clear()
        model(**batch | change)
        assert [record.getMessage() for record in caplog.records if record.name.startswith("hf_posenc")] == (
            [] if reason is None else [message for message in caplog.messages if reason in message][:1]
        )
        assert reason is None or caplog.messages
    stock_model = BertModel(stock_config()).eval()
    hf_posenc.unpad(stock_model)
    stock_model.encoder.layer[0].register_forward_hook(lambda *_: None)
    stock_model(**batch)
    assert "has hooks of others" in caplog.messages[-1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_call_that_was_interrupted_leaves_other_models_alone(error, monkeypatch):
    model, other = (BertModel(stock_config()).eval() for _ in range(2))
    given = inputs(batch=2, length=60, padding=None)
    given["attention_mask"][:, 20:] = 0
    tokens = {"input_ids": torch.randint(5, 99, (1, int(given["attention_mask"].sum())))}
    activation = type(model.encoder.layer[0].intermediate.intermediate_act_fn)

    def interrupt(*args):
        assert unpadding.current_packing() is not None
        raise error

    with torch.no_grad():
        expected = other(**tokens).last_hidden_state
        hf_posenc.unpad(model)
        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(activation, "forward", interrupt)
            model(**given)
        # PyTorch calls no hook after a KeyboardInterrupt; its states are kept until the next call.
        assert error is KeyboardInterrupt or unpadding._current.get() is None
        assert torch.equal(other(**tokens).last_hidden_state, expected)
        assert (model(**given).last_hidden_state[:, 20:] == 0).all()
    assert unpadding._current.get() is None
