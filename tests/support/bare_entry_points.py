"""The classes' own entry points with every hook of the plugin removed; to be run in a process of its own."""

import logging
import os

import pytest
import torch
from tiny import (
    FAMILIES,
    STOCK_CONFIGS,
    aligned,
    fill_positions,
    heads_that_compute,
    inputs,
    stock_config,
    variant_config,
)
from transformers import AutoModel, BertConfig

import hf_posenc
from hf_posenc import variants


# The modules of the schemes that stock checkpoints have not.
NEW = ("relative_attention_bias", "rel_embeddings", "LayerNorm")
FLAGS = {"position_scheme": "absolute+t5+deberta", "position_norm": True}


@torch.no_grad()
def outputs(model: torch.nn.Module, family: str) -> torch.Tensor:
    """The first output."""
    batch = inputs(family=family)
    if "MultipleChoice" in type(model).__name__:
        batch = {key: value[None].repeat(2, 1, 1) for key, value in batch.items()}
    return aligned(model).eval()(**batch).to_tuple()[0]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def use_all(folder: str, family: str) -> None:
    """Load, build, save and load again every class of a family, from keywords and from configs.

    Args:
        folder: where to save.
        family: stock model type.
    """
    hf_posenc.uninstall()
    assert type(BertConfig(**FLAGS)) is BertConfig  # there are no hooks
    said = Lines()
    logging.getLogger("transformers").addHandler(said)
    torch.set_num_threads(1)
    config_class = FAMILIES[family]
    for stock in heads_that_compute(family):
        variant = variants.VARIANT_MODELS[stock]
        name = variant.__name__
        place, saved = os.path.join(folder, stock.__name__), os.path.join(folder, name)
        torch.manual_seed(0)
        original = stock(stock_config(family))
        assert type(original) is stock and not hasattr(original.config, "position_scheme")
        original.save_pretrained(place)

        read = config_class.from_pretrained(place, **FLAGS)
        assert type(read) is config_class and read.model_type == config_class.model_type
        plain = STOCK_CONFIGS[family].from_pretrained(place)
        opened = {
            "keywords": variant.from_pretrained(place, **FLAGS),
            "config": variant.from_pretrained(place, config=read),
            "stock config and keywords": variant.from_pretrained(place, config=plain, **FLAGS),
            "built": variant(variant_config(family, **FLAGS)),
            "built from a stock config": variant(stock_config(family), **FLAGS),
        }
        assert type(plain) is STOCK_CONFIGS[family]
        expected = outputs(original, family)
        for way, model in opened.items():
            if way.startswith("built"):
                left_out, unknown = model.load_state_dict(original.state_dict(), strict=False)
                assert not unknown and all(key.split(".")[-2] in NEW for key in left_out)
            assert (outputs(model, family) - expected).abs().max() < 1e-5, (name, way)  # silent
        filled = outputs(fill_positions(opened["keywords"]), family)
        assert (filled - expected).abs().max() > 1e-3, name
        for way, model in opened.items():
            assert type(model) is variant and type(model.config) is config_class, (name, way)
            assert type(model.base_model) is variant.position_classes.model, (name, way)
            assert {flag: getattr(model.config, flag) for flag in FLAGS} == FLAGS, (name, way)
            assert torch.equal(outputs(fill_positions(model), family), filled), (name, way)

        opened["keywords"].save_pretrained(saved)
        for again in (
            variant.from_pretrained(saved),
            variant.from_pretrained(saved, config=config_class.from_pretrained(saved)),
        ):
            assert type(again) is variant and torch.equal(outputs(again, family), filled), name
        other = variant.from_pretrained(saved, position_scheme="absolute+alibi")
        assert (other.config.position_scheme, other.config.position_buckets) == ("absolute+alibi", None)
        for wrong in (
            {"position_scheem": "t5"},
            {"position_scheme": "tfive"},
            {"position_scheme": "t5", "position_base": 2},
        ):
            with pytest.raises(ValueError, match="position_"):
                variant.from_pretrained(place, **wrong)
    with pytest.raises(ValueError, match="custom code"):
        AutoModel.from_pretrained(saved)  # Auto classes are the plugin's entry points
    assert not [line for line in said.lines if "instantiate a model of type" in line]
