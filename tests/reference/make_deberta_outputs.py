"""Make tests/reference/deberta.zip: checkpoints and adapters of `deberta` with buckets as hf_posenc wrote them before its tables were read as
DeBERTa reads them, and what it computed.

It runs with the code of commit f96aaee, once; the tests only read what it left:

    git worktree add /tmp/before f96aaee
    PYTHONPATH=/tmp/before python tests/reference/make_deberta_outputs.py

Each folder of a model holds config.json and model.safetensors as `save_pretrained` wrote them (not the code, which lay there too), each
folder of an adapter what PEFT wrote, and `stock` is the stock BERT that the adapters were trained on. outputs.safetensors has, for
each folder and each length L, `FOLDER.L.input_ids`, `FOLDER.L.attention_mask` and `FOLDER.L.last_hidden_state`; the last length is three
times the largest distance.
"""

import json
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

import hf_posenc
from hf_posenc.modeling.relative_positions import deberta_bucket


OUTPUTS = Path(__file__).with_name("deberta")
SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 50,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
FLAGS = {"position_scheme": "deberta", "position_buckets": 8, "position_max_distance": 16}
# An odd number of buckets has its last row one further from the end of the table.
ODD = {**FLAGS, "position_buckets": 7, "position_attention_types": ["c2p", "p2c", "p2p"]}
MODELS = {
    "shared": (BertConfig, BertModel, {**FLAGS, "position_form": "paper"}),
    "own": (RobertaConfig, RobertaModel, {**ODD, "position_share_projections": False, "position_norm": True}),
    "beside-t5": (BertConfig, BertModel, {**FLAGS, "position_scheme": "absolute+t5+deberta"}),
    "no-buckets": (BertConfig, BertModel, {**FLAGS, "position_buckets": 0}),
}
LENGTHS = (9, 48)


@torch.no_grad()
def fill(model: nn.Module, generator: torch.Generator) -> None:
    """Random weights everywhere; positions matter."""
    for name, parameter in model.named_parameters():
        std = 1.0 if "rel_embeddings" in name else 0.3
        mean = 1.0 if name.endswith("LayerNorm.weight") else 0.0
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def save_outputs(model: nn.Module, folder: Path, pad_token_id: int, generator: torch.Generator) -> None:
    """What a model computes of a row without padding and one with padding on the right."""
    tensors = {}
    for length in LENGTHS:
        input_ids = torch.randint(5, SIZES["vocab_size"], (2, length), generator=generator)
        attention_mask = torch.ones_like(input_ids)
        attention_mask[1, -2:] = 0
        inputs = {
            "input_ids": input_ids.masked_fill(attention_mask == 0, pad_token_id),
            "attention_mask": attention_mask,
        }
        outputs = {**inputs, "last_hidden_state": model.eval()(**inputs).last_hidden_state}
        tensors |= {f"{folder.name}.{length}.{name}": value.contiguous() for name, value in outputs.items()}
    file = OUTPUTS / "outputs.safetensors"
    save_file((load_file(file) if file.is_file() else {}) | tensors, file)


def make_models() -> None:
    for seed, (name, (config_class, model_class, flags)) in enumerate(MODELS.items()):
        generator, folder = torch.Generator().manual_seed(seed), OUTPUTS / name
        model = model_class(config_class(**SIZES, **flags))
        fill(model, generator)
        model.save_pretrained(folder)
        save_outputs(model, folder, model.config.pad_token_id, generator)
        for code in folder.glob("*.py"):
            code.unlink()


def make_adapters() -> None:
    """One with a copy of the table, and one with LoRA on it, of a stock BERT that was loaded with flags."""
    stock, generator = BertModel(BertConfig(**SIZES)), torch.Generator().manual_seed(9)
    fill(stock, generator)
    stock.save_pretrained(OUTPUTS / "stock")
    for name, settings in (
        ("adapter-copy", {"target_modules": ["value"]}),
        ("adapter-lora", {"target_modules": ["value", "rel_embeddings"]}),
    ):
        base = BertModel.from_pretrained(OUTPUTS / "stock", **FLAGS)
        model = get_peft_model(base, LoraConfig(r=2, **settings))
        if name == "adapter-copy":
            assert hf_posenc.train_positions(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        folder = OUTPUTS / name
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "stock"
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_outputs(model, folder, base.config.pad_token_id, generator)


if __name__ == "__main__":
    if deberta_bucket(torch.tensor([1000]), 8, 16).item() != 7:
        raise SystemExit(f"{hf_posenc.__file__} reads tables as DeBERTa does; see the docstring")
    make_models()
    make_adapters()
    shutil.make_archive(str(OUTPUTS), "zip", OUTPUTS)
    shutil.rmtree(OUTPUTS)
