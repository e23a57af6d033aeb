"""Tiny stock DeBERTas and MPNets whose weights are so large that every term of their attention counts."""

import torch
from torch import nn
from transformers import (
    DebertaConfig,
    DebertaModel,
    DebertaV2Config,
    DebertaV2Model,
    MPNetConfig,
    MPNetModel,
    PreTrainedTokenizerFast,
)


SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 1200,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
# What v3, mdeberta and GLiNER have: more positions than the table is wide come after 512 tokens.
V3 = {
    **RELATIVE,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "max_relative_positions": -1,
    "max_position_embeddings": 512,
}
V1 = {**RELATIVE, "position_biased_input": False, "type_vocab_size": 0, "max_position_embeddings": 512}
CASES: dict[str, tuple[type, type, dict]] = {
    "v3": (DebertaV2Model, DebertaV2Config, V3),
    "own projections, few buckets": (
        DebertaV2Model,
        DebertaV2Config,
        {**RELATIVE, "position_buckets": 8, "max_relative_positions": 20, "type_vocab_size": 2},
    ),
    "c2p": (
        DebertaV2Model,
        DebertaV2Config,
        {**RELATIVE, "pos_att_type": "c2p", "share_att_key": True, "max_relative_positions": 20},
    ),
    "p2c": (DebertaV2Model, DebertaV2Config, {**RELATIVE, "pos_att_type": ["p2c"], "max_relative_positions": 20}),
    "no terms": (DebertaV2Model, DebertaV2Config, {**RELATIVE, "pos_att_type": []}),
    "no relative attention": (DebertaV2Model, DebertaV2Config, {"relative_attention": False}),
    "no relative attention, and its options": (
        DebertaV2Model,
        DebertaV2Config,
        {"relative_attention": False, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"},
    ),
    "convolution": (DebertaV2Model, DebertaV2Config, {**V3, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "v1": (DebertaModel, DebertaConfig, V1),
    "v1, c2p, positions in the input": (
        DebertaModel,
        DebertaConfig,
        {**RELATIVE, "pos_att_type": ["c2p"], "max_relative_positions": 20},
    ),
    "v1, p2c": (DebertaModel, DebertaConfig, {**V1, "pos_att_type": ["p2c"], "max_relative_positions": 20}),
    "v1, no relative attention": (DebertaModel, DebertaConfig, {"relative_attention": False}),
    "mpnet": (MPNetModel, MPNetConfig, {}),
}
# One of each class.
KINDS = ("v3", "v1", "mpnet")


def config(case: str, **overrides):
    """A config of a case."""
    _, config_class, own = CASES[case]
    return config_class(**{**SIZES, **own, **overrides})


@torch.no_grad()
def fill(model: nn.Module, std: float = 0.2) -> nn.Module:
    """Random weights, biases and norms."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * noise if name.endswith("LayerNorm.weight") else std * noise)
    return model


def build(case: str, model_class: type | None = None, **overrides) -> nn.Module:
    """A model of a case in eval mode, or one with a head."""
    return fill((model_class or CASES[case][0])(config(case, **overrides))).eval()


def batch(length: int, padding: str | None = None, number: int = 3) -> dict[str, torch.Tensor]:
    """Tokens, and a mask whose first row is full; padding is on one side."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(5, SIZES["vocab_size"], (number, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, number) if padding else ():
        width = row * (length - 1) // number
        mask[row, slice(length - width, length) if padding == "right" else slice(0, width)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of one letter and special tokens, for models of these sizes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words = special + [chr(97 + i) for i in range(26)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", mask_token="<mask>", **names)
