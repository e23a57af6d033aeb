"""GLiNER finds the same entities with this package's attention in its DeBERTa, with padding left out, and with a variant."""

import torch
from gliner import GLiNER, InferencePackingConfig
from observing import MINILM, TEXTS, attended, difference, fill, left_out

import hf_posenc


LABELS = ["person", "place", "year", "food"]
SIZES = {
    "vocab_size": 30522,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
# As in microsoft/deberta-v3-base.
DEBERTA_V3 = {
    **SIZES,
    "model_type": "deberta-v2",
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "max_relative_positions": -1,
}
BERT = {**SIZES, "model_type": "bert"}


def gliner(encoder_config: dict) -> GLiNER:
    """A GLiNER from a config, with random weights; nothing comes from the Hub."""
    torch.manual_seed(0)
    settings = {"model_name": MINILM, "model_type": "gliner_uni_encoder_span", "hidden_size": 64, "dropout": 0.0}
    model = GLiNER.from_config({**settings, "encoder_config": encoder_config}, backbone_from_pretrained=False)
    fill(model)
    return model.eval()


def entities(model: GLiNER, **settings) -> list[tuple]:
    """Where an entity is found, in which text, as what; and the scores."""
    found = model.inference(TEXTS, LABELS, threshold=0.5, batch_size=len(TEXTS), **settings)
    return [(text, e["start"], e["end"], e["label"], e["score"]) for text, row in enumerate(found) for e in row]


def same(found: list[tuple], expected: list[tuple]) -> float:
    """The largest difference of scores, where the same entities are found."""
    assert [entity[:-1] for entity in found] == [entity[:-1] for entity in expected], (found, expected)
    return difference([entity[-1] for entity in found], [entity[-1] for entity in expected])


def attention() -> float:
    model, differences = gliner(DEBERTA_V3), []
    packing = InferencePackingConfig(max_length=128)
    with attended() as calls:
        expected, packed = entities(model), entities(model, packing_config=packing)
        assert len(expected) > 10 and len({entity[3] for entity in expected}) > 1, expected
        assert not calls
        assert hf_posenc.set_attn_implementation(model, "sdpa") == 1
        differences += [same(entities(model), expected), same(entities(model, packing_config=packing), packed)]
        assert calls == ["sdpa"] * len(calls) and len(calls) >= 6, calls
        calls.clear()
        assert hf_posenc.set_attn_implementation(model, "eager") == 1
        assert entities(model) == expected and not calls
        named = gliner({**DEBERTA_V3, "attn_implementation": "sdpa"})
        differences.append(same(entities(named), expected))
        assert calls == ["sdpa"] * 3, calls
    return max(differences)


def padding() -> float:
    model, differences = gliner(DEBERTA_V3), []
    with left_out(model) as places:
        expected = entities(model)
        assert places == [0]
        assert hf_posenc.unpad(model) == 1
        for implementation in ("eager", "sdpa"):
            hf_posenc.set_attn_implementation(model, implementation)
            differences.append(same(entities(model), expected))
        assert all(count > 100 for count in places[1:]), places
        assert hf_posenc.unpad(model, False) == 1
        hf_posenc.set_attn_implementation(model, "eager")
        assert entities(model) == expected
    return max(differences)


def variant() -> float:
    """A scheme that starts silent finds what BERT finds, and once it is filled, something else."""
    expected = entities(gliner(BERT))
    model = gliner({**BERT, "position_scheme": "absolute+t5"})
    positions = hf_posenc.position_parameters(model.model)
    assert positions
    with torch.no_grad():
        # The weights of the model without the scheme, in their order; `fill` has filled those of the scheme too.
        parameters = dict(gliner(BERT).named_parameters())
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name] if name in parameters else torch.zeros_like(parameter))
        found = same(entities(model), expected)
        for parameter in positions.values():
            parameter.normal_(std=2.0)
    assert entities(model) != expected
    return found


if __name__ == "__main__":
    for check in (attention, padding, variant):
        found = check()
        assert found < 1e-4, (check.__name__, found)
        print(f"{check.__name__}: scores differ by {found:.0e}")
