"""Promise 7 with a window: local layers see near keys alone, in every scheme and backend, whatever the mask is."""

import pytest
import tiny
import torch
from transformers import AutoModel, DynamicCache, StaticCache

import hf_posenc
from hf_posenc import position_parameters
from hf_posenc.in_memory import with_position_scheme
from hf_posenc.modeling.attention import dense_mask, leaves_causal_mask_to_kernel
from hf_posenc.modeling.schemes import SCHEMES
from hf_posenc.modeling.window import Window, reach_of


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

        def attend(content_query, key, value, mask, query, terms, window, kwargs, attention=attention):
            mask = dense_mask(mask, attention, query, key)
            lengths = query.shape[0], 1, query.shape[2], key.shape[2]
            if mask is None:
                mask = torch.ones(lengths, dtype=torch.bool)
            mask = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
            seen = in_loops(mask.expand(lengths), window.reach, int(window.offset))
            added = torch.zeros(lengths, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
            return type(attention)._attend(attention, content_query, key, value, added, query, terms, None, kwargs)

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
