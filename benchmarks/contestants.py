"""The models that the benchmarks compare: stock BERT, every scheme on it, and the peers that transformers has."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from scheme_labels import flags_of
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    EsmConfig,
    EsmModel,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5EncoderModel,
    XLNetConfig,
    XLNetModel,
)

from hf_posenc import PosencBertConfig, PosencBertModel, position_parameters
from hf_posenc.modeling.schemes.table import SCHEMES


STOCK = "BERT"
STOCK_AGAIN = "BERT, a second copy"
STOCK_EAGER = "BERT, eager"
# What is measured, and with which dropout.
MODES = {"forward": 0.1, "training": 0.1, "training without dropout": 0.0}


@dataclass(frozen=True)
class Size:
    """Sizes of all models; by default those of bert-base.

    Attributes:
        length: tokens of a sequence, and what the models are made for.
        dropout: of hidden states and of attention weights.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocabulary: int = 30522
    length: int = 512
    dropout: float = 0.1


def bert_sizes(size: Size) -> dict[str, Any]:
    """Keywords of a BertConfig, and of the configs that call their sizes the same."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.hidden,
        "hidden_dropout_prob": size.dropout,
        "attention_probs_dropout_prob": size.dropout,
    }


def build_bert(size: Size, scheme: str | None = None, backend: str = "sdpa") -> nn.Module:
    """BERT, or a scheme on it, which may have flags of its own after a colon."""
    config_class, model_class = (BertConfig, BertModel) if scheme is None else (PosencBertConfig, PosencBertModel)
    config = config_class(
        **bert_sizes(size),
        max_position_embeddings=size.length,
        attn_implementation=backend,
        **({} if scheme is None else flags_of(scheme)),
    )
    model = model_class(config)
    if scheme is not None:
        fill_positions(model)
    return model


@torch.no_grad()
def fill_positions(model: nn.Module) -> None:
    """Random values for what starts at zero."""
    for name in position_parameters(model):
        parameter = model.get_parameter(name)
        parameter.normal_(0.0, 0.02)


def build_peer(model_class: type[nn.Module], config_class: type, size: Size, **own) -> nn.Module:
    return model_class(config_class(**bert_sizes(size), max_position_embeddings=size.length + 2, **own))


def build_xlnet(size: Size) -> nn.Module:
    return XLNetModel(
        XLNetConfig(
            vocab_size=size.vocabulary,
            d_model=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            d_inner=4 * size.hidden,
            dropout=size.dropout,
        )
    )


def build_t5(size: Size) -> nn.Module:
    return T5EncoderModel(
        T5Config(
            vocab_size=size.vocabulary,
            d_model=size.hidden,
            d_kv=size.hidden // size.heads,
            d_ff=4 * size.hidden,
            num_layers=size.layers,
            num_heads=size.heads,
            dropout_rate=size.dropout,
        )
    )


DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 256,
    "max_relative_positions": 512,
    "share_att_key": True,
    "norm_rel_ebd": "none",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
PEERS: dict[str, Callable[[Size], nn.Module]] = {
    STOCK_EAGER: partial(build_bert, backend="eager"),
    "DeBERTa-v2": partial(build_peer, DebertaV2Model, DebertaV2Config, **DEBERTA),
    "T5 encoder": build_t5,
    "XLNet": build_xlnet,
    "MPNet": partial(build_peer, MPNetModel, MPNetConfig),
    "ESM": partial(
        build_peer, EsmModel, EsmConfig, position_embedding_type="rotary", token_dropout=False, pad_token_id=0
    ),
}


def build_flash_deberta(size: Size) -> nn.Module:
    from flashdeberta import FlashDebertaV2Model

    return build_peer(FlashDebertaV2Model, DebertaV2Config, size, **DEBERTA)


def build_disentangled_flash(size: Size) -> nn.Module:
    from disentangled_flash import optimize_deberta_training

    model = build_peer(DebertaV2Model, DebertaV2Config, size, **DEBERTA)
    # Its Triton kernels are for CUDA only, and the model is put there first.
    model = model.cuda()
    optimize_deberta_training(model, backend="triton")
    return model


# Kernels for DeBERTa on CUDA, by the package that has to be installed.
CUDA_PEERS = {"flashdeberta": build_flash_deberta, "disentangled_flash": build_disentangled_flash}
if torch.cuda.is_available():
    PEERS |= {package: build for package, build in CUDA_PEERS.items() if find_spec(package) is not None}


BACKENDS = ["sdpa", "eager", "flex_attention"]

Builders = dict[str, Callable[[Size], nn.Module]]


def contestants(arguments: argparse.Namespace, mode: str) -> Builders:
    """What to compare, by name; stock BERT comes first, and once more to show how far equal models differ."""
    builders: Builders = {STOCK: build_bert, STOCK_AGAIN: build_bert}
    return builders | schemes(arguments, mode) | {peer: PEERS[peer] for peer in arguments.peers}


def schemes(arguments: argparse.Namespace, mode: str) -> Builders:
    """Every scheme with every backend that can do it; "scheme" is the one with sdpa, others are "scheme, backend"."""
    return {
        scheme if backend == "sdpa" else f"{scheme}, {backend}": partial(build_bert, scheme=scheme, backend=backend)
        for backend in arguments.backends
        if can(backend, mode, arguments.device)
        for scheme in arguments.schemes
    }


def can(backend: str, mode: str, device: str) -> bool:
    """FlexAttention has no dropout, and no backward pass on CPUs."""
    return backend != "flex_attention" or mode == "forward" or (device != "cpu" and not MODES[mode])


def comparison_parser(description: str, name: str) -> argparse.ArgumentParser:
    """The options of every comparison: of what, on which batches and how; `name` is that of its results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=name, help="name of the results")
    parser.add_argument(
        "--schemes", nargs="*", default=[*SCHEMES], help="with flags of their own after a colon, if wanted"
    )
    parser.add_argument("--backends", nargs="+", default=["sdpa"], choices=BACKENDS, help="of the schemes")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, help="tokens of a batch, in place of --batch")
    parser.add_argument("--padding", type=float, default=0.125, help="share of padding in a batch")
    parser.add_argument("--rounds", type=int, default=8, help="rounds beside the first two; half of them count")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser


def settings(arguments: argparse.Namespace, **sizes: int) -> Iterator[tuple[str, Size, int]]:
    """Mode, size and batch of everything that is to be measured; `sizes` are other fields of [`Size`]."""
    for mode in arguments.modes:
        for length in arguments.lengths:
            batch = max(1, arguments.tokens // length) if arguments.tokens else arguments.batch
            yield mode, Size(length=length, dropout=MODES[mode], **sizes), batch


def make_batch(size: Size, batch: int, padding: float, device: str) -> dict[str, torch.Tensor]:
    """Random tokens; the share of padding is `padding` on average, and twice that in the shortest sequence."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, size.vocabulary, (batch, size.length), generator=generator)
    shares = torch.linspace(0, 2 * padding, batch) if batch > 1 else torch.tensor([padding])
    lengths = (size.length * (1 - shares)).round().long()
    mask = (torch.arange(size.length) < lengths[:, None]).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}
