"""Make tests/reference/v4.zip: checkpoints with relative_key(_query) as transformers 4.57 wrote them, and what it computed.

It runs in an environment of its own, once; the tests only read what it left:

    python -m venv v4 && v4/bin/pip install torch==2.13.0 transformers==4.57.6 numpy
    v4/bin/python tests/reference/make_v4_outputs.py

Each folder holds what `save_pretrained` wrote (a tiny model with a language-modeling head, every weight random).
outputs.safetensors has for each of them, and each length L, `FOLDER.L.input_ids`, `FOLDER.L.attention_mask`,
`FOLDER.L.last_hidden_state` of the base model, and `FOLDER.L.logits`. No cache is in use: with one, 4.57 gave every query of a prompt the last position.
"""

import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    CamembertConfig,
    CamembertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)


SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}
SCHEMES = ("relative_key", "relative_key_query")
# Folder -> config class, model class, what else the config says.
MODELS = {
    "bert": (BertConfig, BertForMaskedLM, {}),
    "roberta": (RobertaConfig, RobertaForMaskedLM, {}),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaForMaskedLM, {}),
    "camembert": (CamembertConfig, CamembertForMaskedLM, {}),
    "electra": (ElectraConfig, ElectraForMaskedLM, {"embedding_size": 12}),
    "bert-decoder": (BertConfig, BertLMHeadModel, {"is_decoder": True, "use_cache": False}),
}
# The longest leaves 2 positions of the table to the padding of RoBERTa-like families.
LENGTHS = (5, 11, 18)
BATCH = 3
OUTPUTS = Path(__file__).with_name("v4")


@torch.no_grad()
def fill(model: nn.Module, generator: torch.Generator) -> None:
    """Random weights everywhere; the distances matter, and so would absolute positions if anyone added them."""
    for name, parameter in model.named_parameters():
        std = 1.0 if "distance_embedding" in name or "position_embeddings" in name else 0.3
        mean = 1.0 if name.endswith("LayerNorm.weight") else 0.0
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))


def batch_of(length: int, pad_token_id: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A row without padding, one with padding on the right, one with padding on the left."""
    input_ids = torch.randint(5, SIZES["vocab_size"], (BATCH, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, -2:] = 0
    attention_mask[2, :3] = 0
    return {"input_ids": input_ids.masked_fill(attention_mask == 0, pad_token_id), "attention_mask": attention_mask}


def main() -> None:
    if transformers.__version__ != "4.57.6":
        raise SystemExit(f"needs transformers 4.57.6, this is {transformers.__version__}; see the docstring")
    tensors = {}
    for seed, (name, (config_class, model_class, extra)) in enumerate(MODELS.items()):
        for scheme in SCHEMES:
            generator = torch.Generator().manual_seed(seed)
            config = config_class(**SIZES, **extra, position_embedding_type=scheme)
            model = model_class._from_config(config, attn_implementation="eager").eval()
            fill(model, generator)
            folder = f"{name}-{scheme}"
            for length in LENGTHS:
                inputs = batch_of(length, config.pad_token_id, generator)
                with torch.no_grad():
                    base = model.base_model(**inputs)
                    outputs = {"last_hidden_state": base.last_hidden_state, "logits": model(**inputs).logits}
                tensors |= {
                    f"{folder}.{length}.{key}": value.contiguous() for key, value in {**inputs, **outputs}.items()
                }
            model.save_pretrained(OUTPUTS / folder)
    save_file(tensors, OUTPUTS / "outputs.safetensors")
    shutil.make_archive(str(OUTPUTS), "zip", OUTPUTS)
    shutil.rmtree(OUTPUTS)


if __name__ == "__main__":
    main()
