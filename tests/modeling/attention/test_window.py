"""Promise 7 with a window: local layers see near keys alone, in every scheme and backend, whatever the mask is."""

import pytest
import tiny
import torch
from transformers import AutoModel, DynamicCache, StaticCache

from hf_posenc import position_parameters
from hf_posenc.modeling.attention.window import reach_of
from hf_posenc.modeling.masks import Mask, Window
from hf_posenc.modeling.schemes.table import SCHEMES
from hf_posenc.with_position_scheme import with_position_scheme


TOLERANCE = 1e-5
COMPOSITES = ["absolute+t5", "sinusoidal+rope", "tupe+t5", "absolute+deberta+t5"]
ALL = [*SCHEMES, *COMPOSITES]
BACKENDS = ["eager", "sdpa", "flex_attention"]
LENGTH = 14
# Of a query the key itself and two on either side; the first layer is global, the others are local.
FLAGS = {"position_window": 5, "num_hidden_layers": 3}
slow = pytest.mark.slow


def batch_of(kind: str, backend: str = "eager") -> dict:
    """Three sequences: padded, or of two documents each."""
    if kind in ("right", "left"):
        inputs = tiny.inputs(length=LENGTH, padding=kind)
        # So much that most of it is far from any token.
        keep = torch.arange(LENGTH) < 4 if kind == "right" else torch.arange(LENGTH) >= LENGTH - 4
        inputs["attention_mask"][2] = keep.long()
        return inputs
    inputs = tiny.inputs(length=LENGTH, padding=None)
    if kind == "inside":
        inputs["attention_mask"][:, 5:7] = 0
        return inputs
    documents = (torch.arange(LENGTH) >= 6).long().expand(3, -1)
    same = (documents[:, :, None] == documents[:, None])[:, None]
    inputs["position_ids"] = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).expand(3, -1)
    inputs["attention_mask"] = same
    if backend == "eager":
        inputs["attention_mask"] = torch.zeros(same.shape).masked_fill(~same, torch.finfo(torch.float32).min)
    if backend == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def same_document(batch, head, query, key):
            return documents[batch, query] == documents[batch, key]

        inputs["attention_mask"] = create_block_mask(same_document, 3, None, LENGTH, LENGTH, device="cpu")
    return inputs


def in_loops(attended: torch.Tensor, reach: int, offset: int) -> torch.Tensor:
    """Which keys are seen, of those that a mask (batch, 1, query, key) leaves, pair by pair."""
    seen = attended.clone()
    for row in seen.flatten(0, 1):
        for query, keys in enumerate(row):
            near = [key for key in range(len(keys)) if abs(key - (query + offset)) <= reach and keys[key]]
            if near:
                keys[:] = False
                keys[near] = True
    return seen


def by_masks(model):
    """The model, its local layers seeing all, and what they are to see written into their masks by loops."""
    model.set_attn_implementation("eager")
    for attention in (part for part in model.modules() if getattr(part, "reach", None) is not None):

        def attend(content_query, key, value, query, terms, mask, window, *settings, attention=attention):
            mask = Mask.of(mask, query, key, attention.is_causal).dense()
            lengths = query.shape[0], 1, query.shape[2], key.shape[2]
            if mask is None:
                mask = torch.ones(lengths, dtype=torch.bool)
            mask = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
            seen = in_loops(mask.expand(lengths), window.reach, int(window.offset))
            added = torch.zeros(lengths, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
            states = content_query, key, value, query
            return type(attention)._attend(attention, *states, terms, added, None, *settings)

        attention._attend = attend
    return model


def states(model, backend: str, inputs: dict) -> torch.Tensor:
    model.set_attn_implementation(backend)
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@tiny.cross(scheme=ALL, kind=["right", "left", "inside", "packed"], path=tiny.PATHS, indirect=("path",), rest=slow)
def test_backends_see_what_the_loops_see(scheme, kind, path):
    model = tiny.build(scheme, **FLAGS)
    read = batch_of(kind)["attention_mask"]
    read = read.bool() if read.dim() == 2 else torch.ones(3, LENGTH, dtype=torch.bool)
    outputs = {backend: states(model, backend, batch_of(kind, backend)) for backend in BACKENDS}
    whole = states(tiny.build(scheme, num_hidden_layers=3), "eager", batch_of(kind))
    with torch.no_grad():
        expected = by_masks(tiny.build(scheme, **FLAGS).double())(**batch_of(kind)).last_hidden_state.float()
    for backend, output in outputs.items():
        assert (output - expected)[read].abs().max() < TOLERANCE, backend
    assert (whole - expected)[read].abs().max() > 100 * TOLERANCE


@tiny.cross(scheme=ALL, kind=["right", "packed"], path=tiny.PATHS, indirect=("path",), rest=slow)
def test_gradients_are_those_of_the_loops(scheme, kind, path):
    gradients = []
    for model, backend in ((tiny.build(scheme, **FLAGS), "sdpa"), (by_masks(tiny.build(scheme, **FLAGS)), "eager")):
        model.set_attn_implementation(backend)
        model.double()
        output = model(**batch_of(kind, backend)).last_hidden_state
        upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        (output * upstream).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "pooler" not in name})
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)
    assert all(gradients[0][name].abs().max() > 1e-6 for name in position_parameters(model) if "cls" not in name)


@pytest.mark.parametrize("scheme", ["none", "absolute", "t5", "rope", "deberta", "relative"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_out_of_the_window_changes_nothing_but_through_a_global_layer(scheme, backend, path):
    inputs = tiny.inputs(batch=1, length=LENGTH, padding=None)
    changed = {"input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, 9] = (changed["input_ids"][0, 9] + 1) % 90 + 5
    for layers, every, nearest in ((1, 0, 7), (2, 0, 5), (1, 3, 0)):
        flags = {"position_window": 5, "position_global_every": every, "num_hidden_layers": layers}
        model = tiny.build(scheme, **flags)
        moved = (states(model, backend, inputs) - states(model, backend, changed)).abs().amax(-1)[0]
        far = torch.arange(LENGTH) < nearest
        assert not moved[far].any() and (moved[~far & (torch.arange(LENGTH) <= 9)] > 0).all()


@tiny.cross(scheme=ALL, kind=["dynamic", "static"], path=tiny.PATHS, indirect=("path",), strength=1)
def test_a_decoder_sees_as_much_of_its_cache_as_of_a_whole_text(scheme, kind, path):
    model = tiny.build(scheme, head="LMHeadModel", is_decoder=True, **FLAGS)
    inputs = tiny.inputs(batch=2, length=LENGTH, padding="left" if kind == "dynamic" else None)
    read = inputs["attention_mask"].bool()
    with torch.no_grad():
        whole = model(**inputs, use_cache=False).logits
        without = tiny.build(scheme, head="LMHeadModel", is_decoder=True, num_hidden_layers=3)(**inputs).logits
        cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=LENGTH + 4)
        parts, start = [], 0
        for length in (6, 1, 4, 1, 2):
            end = start + length
            part = {
                "input_ids": inputs["input_ids"][:, start:end],
                "attention_mask": inputs["attention_mask"][:, :end],
            }
            parts.append(model(**part, **{tiny.CACHE: cache}, use_cache=True).logits)
            start = end
    assert (torch.cat(parts, dim=1) - whole)[read].abs().max() < 2e-5
    assert (without - whole)[read].abs().max() > 1e-3


def test_a_cache_that_forgets_its_first_tokens_is_refused():
    model = tiny.build("none", head="LMHeadModel", is_decoder=True, **FLAGS)
    model.config.sliding_window = 4
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    model.config.sliding_window = None
    with pytest.raises(ValueError, match="drops its first tokens"):
        model(**tiny.inputs(batch=1, length=6, padding=None), **{tiny.CACHE: cache}, use_cache=True)


@pytest.mark.compiled
@pytest.mark.parametrize("scheme", ["absolute", "t5"])
def test_compiled_equals_uncompiled(scheme):
    model = tiny.build(scheme, attn_implementation="sdpa", **FLAGS)
    inputs = tiny.inputs(length=LENGTH)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).last_hidden_state
    assert tiny.difference_where_attended(found, expected, inputs["attention_mask"]) < TOLERANCE


@pytest.mark.compiled
@slow
def test_compiled_flex_attention_agrees_too():
    model, inputs = tiny.build("t5", **FLAGS), tiny.inputs(length=LENGTH)
    found, expected = (states(model, backend, inputs) for backend in ("flex_attention", "eager"))
    assert tiny.difference_where_attended(found, expected, inputs["attention_mask"]) < TOLERANCE


@pytest.mark.parametrize("path", ["blocks"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_single_precision(dtype, path):
    model, inputs = tiny.build("t5", **FLAGS), tiny.inputs(length=LENGTH)
    expected = states(model, "eager", inputs)
    found = states(model.to(dtype), "sdpa", inputs).float()
    assert tiny.difference_where_attended(found, expected, inputs["attention_mask"]) < 0.1


def test_widths_and_global_layers_are_counted_as_modernbert_does():
    from transformers import ModernBertConfig, ModernBertModel

    settings = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 37, "vocab_size": 99}
    settings |= {"num_hidden_layers": 5, "pad_token_id": 0, "attn_implementation": "eager"}
    config = ModernBertConfig(**settings, local_attention=6, global_attn_every_n_layers=2)
    with torch.no_grad():
        seen = ModernBertModel(config).eval()(tiny.inputs()["input_ids"], output_attentions=True).attentions
    own = tiny.variant_config("bert", position_window=6, position_global_every=2)
    for layer, weights in enumerate(seen):
        reach, length = reach_of(own, layer), weights.shape[-1]
        near = torch.ones(length, length, dtype=torch.bool) if reach is None else Window(reach).pairs(length, length)
        assert torch.equal(weights[0, 0] > 0, near)


class TestFlags:
    @pytest.mark.parametrize("family", tiny.FAMILIES)
    def test_a_window_alone_makes_a_variant_of_the_family_s_own_positions(self, family, tmp_path):
        torch.manual_seed(0)
        auto = AutoModel.from_config(tiny.stock_config(family))
        auto.save_pretrained(tmp_path / "stock")
        model = AutoModel.from_pretrained(tmp_path / "stock", position_window=4).eval()
        assert type(model) is tiny.variant_class(family)
        assert model.config.position_scheme == tiny.FAMILIES[family].family.native_scheme
        inputs = tiny.inputs(family=family, padding=None)
        output = states(model, "sdpa", inputs)
        assert (output - states(auto.eval(), "eager", inputs)).abs().max() > 1e-3
        assert (output - states(model, "eager", inputs)).abs().max() < TOLERANCE
        model.save_pretrained(tmp_path / "saved")
        again = AutoModel.from_pretrained(tmp_path / "saved").eval()
        assert again.config.position_window == 4 and torch.equal(states(again, "sdpa", inputs), output)

    @pytest.mark.parametrize(
        "flags, error, message",
        [
            ({"position_window": -1}, ValueError, "position_window must be an integer of at least 0"),
            ({"position_window": 12.5}, TypeError, "position_window must be an integer"),
            ({"position_window": 8, "position_global_every": -2}, ValueError, "position_global_every must be"),
            ({"position_global_every": 2}, ValueError, "no use without position_window: no layer is local"),
            ({"position_windows": 8}, ValueError, "did you mean 'position_window'"),
        ],
    )
    def test_wrong_ones_are_refused(self, flags, error, message):
        with pytest.raises(error, match=message):
            tiny.variant_config(position_scheme="t5", **flags)

    def test_flash_attention_is_refused(self):
        message = "does not support position_window=8; these do: sdpa, flex_attention, eager"
        with pytest.raises(ValueError, match=message):
            tiny.build("none", position_window=8, attn_implementation="flash_attention_2")
        with pytest.raises(ValueError, match=message):
            tiny.build("none", position_window=8).set_attn_implementation("flash_attention_2")

    def test_a_model_in_memory_gets_one_and_loses_it(self):
        model, inputs = tiny.build("t5"), tiny.inputs()
        local = with_position_scheme(model, "t5", copy=True, position_window=4, position_global_every=0)
        assert [part.reach for part in local.modules() if hasattr(part, "reach")] == [2, 2]
        assert (states(local, "sdpa", inputs) - states(model, "sdpa", inputs)).abs().max() > 1e-3
        again = with_position_scheme(local, "t5", position_window=0)
        assert torch.equal(states(again, "sdpa", inputs), states(model, "sdpa", inputs))

    def test_with_a_window_no_variant_is_a_stock_model(self):
        with pytest.raises(ValueError, match="position_window"):
            with_position_scheme(tiny.build("absolute", position_window=4), None)

    def test_one_that_was_changed_after_the_model_was_built_is_not_saved(self, tmp_path):
        model = tiny.build("t5", position_window=4)
        model.config.position_window = 6
        with pytest.raises(ValueError, match="position_window was 4 and is 6"):
            model.save_pretrained(tmp_path)

    def test_models_with_one_are_not_analysed(self):
        from hf_posenc.analysis.access import study

        with pytest.raises(ValueError, match="position_window=4; only models that attend to all tokens"):
            study(tiny.build("t5", position_window=4))

    def test_a_new_one_is_said_once(self, tmp_path, said):
        stock = AutoModel.from_config(tiny.stock_config())
        stock.save_pretrained(tmp_path / "stock")
        for _ in range(2):
            AutoModel.from_pretrained(tmp_path / "stock", position_window=4).save_pretrained(tmp_path / "saved")
        AutoModel.from_pretrained(tmp_path / "saved")
        [line] = said
        assert line.startswith(
            "position_window=4: its layers, except the global ones, attend to no key more than 2 tokens away"
        )


@pytest.mark.parametrize("scheme", ["relative", "t5", "cable"])
@pytest.mark.parametrize("window", [None, 6])
def test_a_block_mask_may_have_another_mask_in_each_head(scheme, window):
    """It is computed as the same mask as a tensor: with a window, and where FlexAttention hands over."""
    from torch.nn.attention.flex_attention import create_block_mask

    def rule(batch, head, query, key):
        return ((query - key).abs() <= head) | (key == 0)

    flags = {} if window is None else {"position_window": window, "position_global_every": 0}
    model = tiny.build(scheme, **flags)
    heads, places = model.config.num_attention_heads, torch.arange(LENGTH)
    input_ids = tiny.inputs(2, LENGTH, padding=None)["input_ids"]
    near = rule(0, torch.arange(heads)[:, None, None], places[:, None], places[None])
    as_tensor = near[None].expand(2, -1, -1, -1)
    as_blocks = create_block_mask(rule, 2, heads, LENGTH, LENGTH, device="cpu")
    with torch.no_grad():
        expected = model.eval()(input_ids=input_ids, attention_mask=as_tensor)[0]
        model.set_attn_implementation("flex_attention")
        found = model(input_ids=input_ids, attention_mask=as_blocks)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
