"""Promise 7: packed states by `varlen` and on other devices than CPUs. The kernel alone is replaced, by its reference in plain PyTorch."""

import math

import pytest
import torch
from test_unpad import TARGETS, TOLERANCE, assert_same, padded, stock, trained
from tiny import FAMILIES, build, cross
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import hf_posenc
from hf_posenc.modeling.attention.backends import BACKENDS, Backend
from hf_posenc.modeling.kernels import packed_attention, packing
from hf_posenc.modeling.models.self_attention import ModuleReference
from hf_posenc.modeling.schemes.table import SCHEMES


# Schemes that add no scores.
WITHOUT_TERMS = {"absolute": {}, "sinusoidal": {}, "none": {}, "rope": {}, "absolute+rope": {}}
SLOW = pytest.mark.slow


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """The backends of packed states that were called; all padding counts, and CPUs have the kernel, in any dtype."""
    monkeypatch.setattr(packing, "FEWEST_PLACES", 1)
    monkeypatch.setattr(packing, "SMALLEST_SHARE", 0.0)
    monkeypatch.setattr(packing, "FEWEST_SAVED", 1)
    monkeypatch.setattr(packed_attention, "has_kernel", lambda device: True)
    floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
    monkeypatch.setattr(packed_attention, "DTYPES", floats)
    names: list[str] = []
    for name in ("varlen", "groups"):
        compute = BACKENDS[name].compute
        noted = Backend(lambda attention, name=name, compute=compute: names.append(name) or compute(attention), True)
        monkeypatch.setitem(BACKENDS, name, noted)
    return names


class TestReference:
    def test_it_is_softmax_over_the_tokens_of_a_sequence(self):
        torch.manual_seed(0)
        query, key, value = torch.randn(3, 9, 2, 4, dtype=torch.float64)
        starts, expected = torch.tensor([0, 2, 3, 9], dtype=torch.int32), torch.zeros(9, 2, 4, dtype=torch.float64)
        for start, stop in ((0, 2), (2, 3), (3, 9)):
            for head in range(2):
                for i in range(start, stop):
                    weights = [math.exp(0.3 * float(query[i, head] @ key[j, head])) for j in range(start, stop)]
                    for weight, j in zip(weights, range(start, stop)):
                        expected[i, head] += weight / sum(weights) * value[j, head]
        found = packed_attention.in_turn(query, key, value, starts, 6, 0.3)
        torch.testing.assert_close(found, expected)

    def test_the_kernel_is_called_with_the_same_scale(self, monkeypatch):
        """Its `scale` is younger than itself, and so the query is scaled."""
        varlen = pytest.importorskip("torch.nn.attention.varlen")
        query, key, value = torch.randn(3, 9, 2, 8)
        starts = torch.tensor([0, 2, 3, 9], dtype=torch.int32)

        def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
            assert (max_q, max_k) == (6, 6) and cu_seq_q is cu_seq_k
            return packed_attention.in_turn(query, key, value, cu_seq_q, max_q, 8**-0.5)

        monkeypatch.setattr(varlen, "varlen_attn", kernel)
        for scaling in (8**-0.5, 0.3):
            found = packed_attention.by_kernel(query, key, value, starts, 6, scaling)
            expected = packed_attention.in_turn(query, key, value, starts, 6, scaling)
            torch.testing.assert_close(found, expected)


class TestModels:
    @cross(scheme=[*WITHOUT_TERMS], family=FAMILIES, padding=["right", "left", "inner", "at [CLS]"], rest=SLOW)
    def test_every_token_and_gradient_is_the_same(self, scheme, family, padding, called):
        batch, model = padded(padding, family), build(scheme, family)
        model.config.unpad = False
        expected = trained(model, batch)
        assert not called
        model.config.unpad = True
        assert_same(trained(model, batch), expected, batch)
        # A first token that is padding is attended to by nobody.
        assert {*called} == {"groups" if padding in ("left", "at [CLS]") else "varlen"}

    @pytest.mark.parametrize("family", FAMILIES)
    def test_models_of_transformers(self, family, called):
        batch, model = padded("right", family), stock(family)
        expected = trained(model, batch)
        hf_posenc.unpad(model)
        assert_same(trained(model, batch), expected, batch)
        assert {*called} == {"groups" if family == "mpnet" else "varlen"}

    @pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in WITHOUT_TERMS])
    def test_schemes_that_add_scores_are_computed_in_groups(self, scheme, called):
        batch, model = padded("right"), build(scheme)
        model.config.unpad = False
        expected = trained(model, batch)
        model.config.unpad = True
        assert_same(trained(model, batch), expected, batch)
        assert {*called} == {"groups"}

    def test_what_the_kernel_does_not_compute_is_computed_in_groups(self, called):
        batch = padded("right")
        for model, name in (
            (build("rope"), "varlen"),
            (build("rope", attn_implementation="eager"), "groups"),
            (build("rope", attention_probs_dropout_prob=0.1).train(), "groups"),
            (build("rope", attention_probs_dropout_prob=0.1), "varlen"),
            (build("rope", hidden_dropout_prob=0.1).train(), "varlen"),
            (build("rope", hidden_size=48), "groups"),  # 12 channels
        ):
            called.clear()
            model(**batch)
            assert {*called} == {name}
        build("rope", position_window=3)(**batch)
        assert "groups" in called  # of local layers

    @pytest.mark.parametrize("is_stock", [False, True])
    def test_arguments_of_a_call(self, is_stock, called):
        model, batch = stock("bert") if is_stock else build("rope"), padded("right")
        hf_posenc.unpad(model)
        kept = batch["attention_mask"].bool()
        types = torch.arange(12).expand(5, -1) // 6
        for given, packs in (
            (batch | {"token_type_ids": types}, True),
            ({"inputs_embeds": torch.randn(5, 12, 32), "attention_mask": batch["attention_mask"]}, True),
            (batch | {"output_hidden_states": True}, False),
        ):
            called.clear()
            hf_posenc.unpad(model)
            found = model(**given)
            assert bool(called) == packs
            hf_posenc.unpad(model, False)
            expected = model(**given)
            torch.testing.assert_close(found[0][kept], expected[0][kept], **TOLERANCE)
            if not packs:
                torch.testing.assert_close(found.hidden_states, expected.hidden_states, atol=0, rtol=0)

    @cross(head=["ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"], family=["bert", "mpnet"])
    def test_losses_of_heads(self, head, family, called):
        model, batch = build("absolute+rope", family, head), padded("right", family)
        shape = (5,) if head == "ForSequenceClassification" else (5, 12)
        batch["labels"] = torch.randint(2, shape)
        if shape[1:]:
            batch["labels"][batch["attention_mask"] == 0] = -100
        found = []
        for unpad in (True, False):
            model.config.unpad = unpad
            model.zero_grad()
            model(**batch).loss.backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert {*called} == {"varlen"} and found[0].abs().max() > 1e-3
        torch.testing.assert_close(*found, **TOLERANCE)

    def test_checkpointed_layers(self, called):
        batch = padded("right")
        for reentrant in (True, False):
            model = build("rope").train()
            model.config.unpad = False
            expected = trained(model, batch)
            model.config.unpad = True
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            assert_same(trained(model, batch), expected, batch)
        assert {*called} == {"varlen"}

    @pytest.mark.parametrize("family", ["bert", "distilbert"])
    def test_lora(self, family, called):
        from peft import LoraConfig, get_peft_model

        model = stock(family, AutoModelForSequenceClassification)
        settings = LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, target_modules=TARGETS[family])
        model, found = get_peft_model(model, settings), []
        for unpad in (True, False):
            hf_posenc.unpad(model, unpad)
            model.zero_grad()
            model(**padded("right", family), labels=torch.tensor([0, 1, 0, 1, 1])).loss.backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert {*called} == {"varlen"}
        torch.testing.assert_close(*found, **TOLERANCE)

    @SLOW
    def test_dropout_has_the_same_rate(self, called):
        model, batch = build("rope", hidden_dropout_prob=0.3).train(), padded("right")
        kept, samples = batch["attention_mask"].bool(), {}
        for unpad in (True, False):
            model.config.unpad = unpad
            with torch.no_grad():
                samples[unpad] = torch.stack([model(**batch)[0][kept] for _ in range(600)])
        assert {*called} == {"varlen"}
        error = (samples[True].mean(0) - samples[False].mean(0)) / (samples[False].std(0) * (2 / 600) ** 0.5)
        assert error.square().mean() < 1.2  # 1 for equal means
        assert (samples[True].std(0) / samples[False].std(0) - 1).abs().mean() < 0.05


class OnOneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices; meta tensors refuse all that looks at values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if len({tensor.device.type for tensor in tensors}) > 1:
            raise RuntimeError(f"{function} of tensors on several devices")
        return function(*args, **(kwargs or {}))


class TestOtherDevices:
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_layers_look_at_no_value_and_mix_no_devices(self, scheme, called, monkeypatch):
        """With PyTorch's own kernel where there is one, which has a rule for shapes, and its backward pass too."""
        pytest.importorskip("torch.nn.attention.varlen")
        monkeypatch.setitem(packed_attention.KERNELS, "meta", packed_attention.by_kernel)
        model = build(scheme).to("meta", torch.bfloat16)
        attended = torch.arange(12) < torch.tensor([[12], [5], [7]])
        used = packing.Packing.of(attended, 4).to(torch.device("meta"))
        with OnOneDevice():
            states = model.embeddings(torch.ones(3, 12, dtype=torch.long, device="meta"))
            output = model.encoder(states, None, packing=used, base_model=ModuleReference(model)).last_hidden_state
            output.sum().backward()
        assert output.shape == (3, 12, 32)
        assert {*called} == {"varlen" if scheme in WITHOUT_TERMS else "groups"}

    @pytest.mark.parametrize("is_stock", [False, True])
    def test_cuda_is_on_request(self, is_stock, called, monkeypatch):
        """With CPUs for a device on which it was not measured."""
        monkeypatch.setattr(packing, "MEASURED", ())
        model, batch = stock("bert") if is_stock else build("rope"), padded("right")
        model(**batch)
        assert not called
        assert hf_posenc.unpad(model) == 1
        model(**batch)
        assert {*called} == {"varlen"}
        called.clear()
        assert hf_posenc.unpad(model, False) == 1
        model(**batch)
        assert not called and getattr(model.config, "unpad", False) is False

    def test_another_scheme_keeps_the_request(self, called, monkeypatch):
        monkeypatch.setattr(packing, "MEASURED", ())
        model = stock("bert")
        hf_posenc.unpad(model)
        for scheme in ("rope", "absolute", None):
            model = hf_posenc.with_position_scheme(model, scheme)
            called.clear()
            model(**padded("right"))
            assert called

    @pytest.mark.parametrize("is_stock", [False, True])
    def test_a_loss_that_reads_padding(self, is_stock, called, monkeypatch):
        monkeypatch.setattr(packing, "MEASURED", ())
        batch = padded("right") | {"labels": torch.randint(2, (5, 12))}
        if is_stock:
            model = stock("bert", AutoModelForTokenClassification)
        else:
            model = build("rope", head="ForTokenClassification")
        expected = model(**batch).loss
        hf_posenc.unpad(model)
        assert torch.equal(model(**batch).loss, expected) and not called
        batch["labels"][batch["attention_mask"] == 0] = -100
        model(**batch)
        assert called

    def test_the_kernel_needs_a_device_that_has_it(self):
        assert not packed_attention.has_kernel(torch.device("cpu"))
