"""Promise 7 with schemes of global layers: each layer computes with its own schemes, as ModernBERT and models of one scheme do."""

import json

import pytest
import tiny
import torch
from fresh_process import run_fresh
from transformers import AutoModel, ModernBertConfig, ModernBertModel

from hf_posenc import inspect, position_parameters, train_positions, with_position_scheme
from hf_posenc.export.stock import to_stock
from hf_posenc.modeling.kernels import packing
from hf_posenc.modeling.models.configuration_posenc import flags_in_use


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 37, "vocab_size": 99}
TOKENS = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
LAYERS, LENGTH = 5, 14
LAYOUT = {"position_window": 6, "position_global_every": 2, "num_hidden_layers": LAYERS}
# The scheme of local layers, and the flags of the global ones: 0, 2 and 4.
CASES = {
    "modernbert": ("rope", {"position_base": 100.0, "position_global_base": 1600.0}),
    "learned by layer": ("rope", {"position_global_base": 50.0, "position_learn_frequencies": "layer"}),
    "learned by all": ("rope", {"position_global_base": 50.0, "position_learn_frequencies": "shared"}),
    "rnope": ("rope", {"position_global_scheme": "none"}),
    "added once": ("absolute+rope", {"position_global_scheme": "none"}),
    "shared table": ("t5+rope", {"position_global_scheme": "t5"}),
    "table of global layers": ("absolute", {"position_global_scheme": "t5", "position_buckets": 8}),
    "others": ("alibi", {"position_global_scheme": "deberta+transformer_xl", "position_global_base": 50.0}),
    "untied [CLS] in local layers": ("tupe+t5", {"position_global_scheme": "t5"}),
    "values": ("relative", {"position_global_scheme": "cable"}),
}
cases = pytest.mark.parametrize("case", CASES)
slow = pytest.mark.slow


def build(case: str, head: str = "Model", **settings):
    scheme, flags = CASES[case]
    return tiny.build(scheme, head=head, **LAYOUT, **flags, **settings)


def of_one_scheme(model, is_global: bool):
    """A model of the schemes of global layers, or of the others, alone; all parameters that it has are those of `model`."""
    config = model.config
    flags = {name: value for name, value in vars(config).items() if name.startswith("position_") and value is not None}
    if is_global:
        wanted = flags.get("position_global_scheme") or flags["position_scheme"]
        if "absolute" in flags["position_scheme"]:
            wanted = "absolute" if wanted == "none" else f"absolute+{wanted}"
        flags |= {"position_scheme": wanted}
        if "position_global_base" in flags:
            flags["position_base"] = flags["position_global_base"]
    flags = {name: value for name, value in flags.items() if not name.startswith("position_global_")}
    in_use = flags_in_use(flags["position_scheme"])
    flags = {name: value for name, value in flags.items() if name in in_use}
    flags["position_window"] = 0 if is_global else config.position_window
    every = {} if is_global else {"position_global_every": 0}
    other = tiny.build(**flags, **every, num_hidden_layers=LAYERS, unpad=False).double()
    own = model.state_dict()
    other.load_state_dict({name: own.get(name, value) for name, value in other.state_dict().items()})
    return other


def layer_outputs(model, inputs: dict, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each layer makes of the states that are given to it."""
    outputs, handles = [], []
    for layer, states in zip(model.encoder.layer, given):
        handles.append(layer.register_forward_pre_hook(lambda module, args, states=states: (states, *args[1:])))
        handles.append(layer.register_forward_hook(lambda module, args, output: outputs.append(output)))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return [output[0] if isinstance(output, tuple) else output for output in outputs]


@cases
@pytest.mark.parametrize("padding", ["right", "left"])
def test_each_layer_is_that_of_a_model_of_its_schemes(case, padding):
    model, inputs = build(case, attn_implementation="eager").double(), tiny.inputs(length=LENGTH, padding=padding)
    read = inputs["attention_mask"].bool()
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
        of_local, of_global = (
            layer_outputs(of_one_scheme(model, kind), inputs, states[:-1]) for kind in (False, True)
        )
    for number in range(LAYERS):
        expected, other = (of_global, of_local) if number % 2 == 0 else (of_local, of_global)
        assert (states[number + 1] - expected[number])[read].abs().max() < 1e-12
        assert (states[number + 1] - other[number])[read].abs().max() > 1e-3


@cases
def test_backends_and_ways_of_attention_agree(case, path):
    inputs = tiny.inputs(length=LENGTH)
    read, outputs = inputs["attention_mask"].bool(), {}
    for backend in ("eager", "sdpa", "flex_attention"):
        model = build(case, attn_implementation=backend).double()
        with torch.no_grad():
            outputs[backend] = model(**inputs).last_hidden_state[read]
    for backend, output in outputs.items():
        torch.testing.assert_close(output, outputs["eager"], rtol=0, atol=1e-10, msg=backend)


@cases
def test_all_parameters_learn_with_and_without_checkpointing_and_padding(case, monkeypatch):
    monkeypatch.setattr(packing, "FEWEST_PLACES", 1)
    inputs, gradients = tiny.inputs(length=LENGTH), []
    weight = torch.linspace(-1, 1, 32, dtype=torch.float64) * inputs["attention_mask"][..., None]
    for unpad, reentrant in ((False, None), (True, None), (False, True), (False, False)):
        model = build(case, unpad=unpad).double().train()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        (model(**inputs).last_hidden_state * weight).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        for name, parameter in position_parameters(model).items():
            assert parameter.grad is not None and parameter.grad.any(), name
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-8, atol=1e-9)


def attention_outputs(model, inputs: dict, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each self-attention makes of the states that are given to it."""
    outputs, handles = [], []
    for layer, states in zip(model.encoder.layer, given):
        attention = layer.attention.self

        def replace(module, args, keywords, states=states):
            return (states, *args[1:]), {name: value for name, value in keywords.items() if name != "hidden_states"}

        handles.append(attention.register_forward_pre_hook(replace, with_kwargs=True))
        handles.append(attention.register_forward_hook(lambda module, args, output: outputs.append(output[0])))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return outputs


@pytest.mark.parametrize("padding", ["right", "left"])
def test_modernbert_s_attention_with_its_weights(padding):
    """Rotary with the base 10,000 in local layers and 160,000 in global ones, which are the defaults there."""
    torch.manual_seed(0)
    layout = {"num_hidden_layers": LAYERS, "local_attention": 6, "global_attn_every_n_layers": 2}
    config = ModernBertConfig(**SIZES, **layout, **TOKENS, attn_implementation="eager")
    theirs, inputs = ModernBertModel(config).double().eval(), tiny.inputs(length=LENGTH, padding=padding)
    given, expected = [], []

    def note(module, args, keywords, output):
        given.append(args[0] if args else keywords["hidden_states"])
        expected.append(output[0])

    bases = {"position_base": 10000.0, "position_global_base": 160000.0}
    ours = tiny.build("rope", **LAYOUT, **bases, unpad=False, attn_implementation="eager").double()
    one_base = tiny.build("rope", **LAYOUT, unpad=False, attn_implementation="eager").double()
    with torch.no_grad():
        for own, layer in zip(ours.encoder.layer, theirs.layers):
            layer.attn.Wqkv.weight.normal_(std=0.3)  # at its start, weights are nearly equal for all keys
            layer.attn.register_forward_hook(note, with_kwargs=True)
            attention = own.attention.self
            projections = attention.query, attention.key, attention.value
            for projection, weight in zip(projections, layer.attn.Wqkv.weight.chunk(3)):
                projection.weight.copy_(weight)
                projection.bias.zero_()
        one_base.load_state_dict(ours.state_dict())
        theirs(**inputs)
        read, off = inputs["attention_mask"].bool(), []
        for model in (ours, one_base):
            found = attention_outputs(model, inputs, given)
            projected = [layer.attn.Wo(output) for layer, output in zip(theirs.layers, found)]
            off.append([(own - right)[read].abs().max() for own, right in zip(projected, expected)])
    # Its cosines are float32.
    assert max(off[0]) < 1e-6 and max(off[1][1::2]) < 1e-6
    assert min(off[1][::2]) > 1e-4


LOAD = """
import torch
from transformers import AutoModel
model = AutoModel.from_pretrained({folder!r}, trust_remote_code=True).eval()
with torch.no_grad():
    torch.save(model(**torch.load({batch!r})).last_hidden_state, {out!r})
"""


@cases
def test_saved_and_loaded(case, tmp_path):
    model, inputs = build(case), tiny.inputs(length=LENGTH)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved.get(name) for name in CASES[case][1]} == CASES[case][1]
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        found = AutoModel.from_pretrained(tmp_path).eval()(**inputs).last_hidden_state
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "case", ["modernbert", pytest.param("others", marks=slow), pytest.param("shared table", marks=slow)]
)
def test_loaded_without_hf_posenc(case, tmp_path):
    model, inputs = build(case), tiny.inputs(length=LENGTH)
    model.save_pretrained(tmp_path / "saved")
    torch.save(dict(inputs), tmp_path / "batch")
    places = {name: str(tmp_path / name) for name in ("batch", "out")}
    run_fresh(LOAD.format(folder=str(tmp_path / "saved"), **places), tmp_path / "modules", plugin=False)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    assert tiny.difference_where_attended(torch.load(places["out"]), expected, inputs["attention_mask"]) < 1e-5


class TestCheckpoints:
    def test_a_plain_bert_gets_them(self, tmp_path, said):
        stock = AutoModel.from_config(tiny.stock_config(num_hidden_layers=3))
        stock.save_pretrained(tmp_path)
        flags = {"position_window": 4, "position_scheme": "absolute+t5", "position_global_scheme": "none"}
        model = AutoModel.from_pretrained(tmp_path, **flags).eval()
        assert [[s.name for s in each.attention.self.position_schemes] for each in model.encoder.layer] == [
            [],
            ["t5"],
            ["t5"],
        ]
        short = tiny.inputs(length=3, padding=None)  # all that a local layer sees
        with torch.no_grad():
            assert torch.equal(model(**short).last_hidden_state, stock.eval()(**short).last_hidden_state)
        assert [line.partition(":")[0] for line in said] == ["position_window=4"]

    def test_what_only_layers_of_one_kind_lose_is_said(self, tmp_path, said):
        tiny.build("t5+rope", **LAYOUT).save_pretrained(tmp_path)
        AutoModel.from_pretrained(tmp_path, position_global_scheme="rope")
        AutoModel.from_pretrained(tmp_path, position_global_base=500.0)
        assert "trained with t5 in other layers" in said[0] and "trained with rope in other layers" in said[1]
        AutoModel.from_pretrained(tmp_path)
        assert len(said) == 2

    def test_a_change_drops_what_it_leaves_without_use(self, tmp_path, said):
        build("table of global layers").save_pretrained(tmp_path)
        config = AutoModel.from_pretrained(tmp_path, position_window=0).config
        assert config.position_global_scheme is None and config.position_buckets is None
        assert "position_window=0 has no use for the stored position_buckets, position_global_scheme: dropped." in said
        build("modernbert").save_pretrained(tmp_path)
        assert AutoModel.from_pretrained(tmp_path, position_scheme="t5").config.position_global_base is None

    def test_parameters_of_new_global_layers_are_no_damage(self, tmp_path, said):
        tiny.build("absolute+t5", num_hidden_layers=3).save_pretrained(tmp_path)
        flags = {"position_window": 4, "position_global_scheme": "t5+relative"}
        _, info = AutoModel.from_pretrained(tmp_path, **flags, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


def test_parameters_are_registered_where_they_are_used():
    names = position_parameters(build("values"))
    assert {int(name.split(".")[2]) for name in names if "cable" in name} == {0, 2, 4}
    assert {int(name.split(".")[2]) for name in names if "cable" not in name} == {1, 3}
    text = str(inspect(build("values")))
    assert "relative: " in text and "cable: " in text and "position_global_scheme='cable'" in text


def test_a_model_in_memory_gets_them_and_loses_them():
    model, inputs = tiny.build("rope", num_hidden_layers=3), tiny.inputs(length=LENGTH)
    flags = {"position_window": 4, "position_global_base": 77.0}
    changed = with_position_scheme(model, "rope", copy=True, **flags)
    bases = [each.attention.self.position_schemes[0].base for each in changed.encoder.layer]
    assert bases == [77.0, 10000.0, 10000.0]
    again = with_position_scheme(changed, "rope", position_window=0)
    with torch.no_grad():
        assert torch.equal(again(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


def test_a_decoder_with_a_cache():
    model = build("modernbert", "LMHeadModel", is_decoder=True).double()
    ids = tiny.inputs(2, LENGTH, padding=None)["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :9], use_cache=True)
        cache = first.cache if hasattr(first, "cache") else first.past_key_values
        rest = model(ids[:, 9:], **{tiny.CACHE: cache}).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=0, atol=1e-9)


def test_adapters_train_and_load_them(tmp_path):
    peft = pytest.importorskip("peft")
    inputs = tiny.inputs(length=LENGTH)
    model = build("shared table", "ForSequenceClassification")
    base = build("shared table", "ForSequenceClassification")
    names = train_positions(adapted := peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2)))
    assert names
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        expected = adapted.eval()(**inputs).logits
        adapted.save_pretrained(tmp_path)
        assert (base(**inputs).logits - expected).abs().max() > 1e-3
        again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        torch.testing.assert_close(again(**inputs).logits, expected)


def test_one_that_was_changed_after_the_model_was_built_is_not_saved(tmp_path):
    model = build("modernbert")
    model.config.position_global_base = None
    with pytest.raises(ValueError, match="position_global_base was 1600.0 and is None"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("scheme, flags, error, message", [
    ("rope", {"position_global_scheme": "none"}, ValueError, "position_global_scheme='none' has no use with position_window=0"),
    ("rope", {"position_global_base": 100.0}, ValueError, "position_global_base=100.0 has no use with position_window=0"),
    ("rope", {"position_window": 8, "position_global_every": 0, "position_global_base": 100.0}, ValueError,
     "has no use with position_window=8, position_global_every=0: it is for models that have both"),
    ("rope", {"position_window": 8, "position_global_every": 1, "position_global_scheme": "none"}, ValueError, "both global and local"),
    ("rope", {"position_window": 8, "position_global_scheme": "sinusoidal"}, ValueError,
     "position_global_scheme='sinusoidal': sinusoidal is added to the token embeddings, so all layers have it"),
    ("absolute+rope", {"position_window": 8, "position_global_scheme": "absolute"}, ValueError, "absolute is added to"),
    ("rope", {"position_window": 8, "position_global_scheme": "ropee"}, ValueError,
     "position_global_scheme: unknown scheme 'ropee'; did you mean 'rope'"),
    ("rope", {"position_window": 8, "position_global_scheme": 3}, TypeError, "position_global_scheme must be a string"),
    ("t5", {"position_window": 8, "position_global_base": 100.0}, ValueError,
     "has no use with position_scheme='t5': it belongs to transformer_xl, rope in global layers"),
    ("rope", {"position_window": 8, "position_global_scheme": "t5", "position_global_base": 9.0}, ValueError,
     "position_global_scheme='t5': it belongs to"),
    ("rope", {"position_window": 8, "position_global_base": 1}, ValueError, "in global layers: position_base must be greater than 1"),
    ("relative_key", {"position_window": 8, "position_global_scheme": "relative_key_query"}, ValueError, "cannot have both"),
    ("rope", {"position_window": 8, "position_global_scheme": "alibi", "position_buckets": 8}, ValueError,
     "position_buckets=8 has no use with position_scheme='rope' and position_global_scheme='alibi'"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(scheme, flags, error, message):
    with pytest.raises(error, match=message):
        tiny.variant_config(position_scheme=scheme, **flags)


def test_no_architecture_of_transformers_has_them():
    with pytest.raises(ValueError, match="no local attention"):
        to_stock(build("modernbert"))
