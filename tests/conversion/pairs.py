"""A tiny original of any family, and the student that is made of it."""

from pathlib import Path

import pytest
import tiny
import torch
from torch import nn

from hf_posenc import variants
from hf_posenc.modeling.schemes.table import SCHEMES, scheme_names


FAMILIES = list(tiny.FAMILIES)
# BERT, and a family with positions of its own beside the table; the others by `--all`.
every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ("bert", "mpnet") else pytest.mark.slow) for name in FAMILIES],
)


def original(family: str, head: str = "Model", **overrides) -> nn.Module:
    """A tiny stock model whose positions matter, with biases as a trained model has them."""
    name = tiny.variant_class(family, head).__name__.removeprefix("Posenc")
    stock = next(cls for cls in tiny.heads(family) if cls.__name__ == name)
    model = stock(tiny.stock_config(family, **overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


def student_of(teacher: nn.Module, folder: Path, position_scheme: str, **flags) -> nn.Module:
    """The variant that `from_pretrained` makes of a model's checkpoint, in eval mode."""
    teacher.save_pretrained(folder)
    cls = variants.VARIANT_MODELS.get(type(teacher), type(teacher))
    return cls.from_pretrained(folder, position_scheme=position_scheme, **flags).eval()


def positionless(family: str) -> str:
    """The scheme that is left of a family's own without its table of absolute positions."""
    return "+".join(set(scheme_names(tiny.FAMILIES[family].family.native_scheme)) - {"absolute"}) or "none"


def beside(family: str, scheme: str) -> str:
    """A scheme in place of the table, beside what else the family has."""
    return "+".join(dict.fromkeys([scheme, *scheme_names(positionless(family))])).removesuffix("+none")


def text(batches: int = 2, family: str = "bert", length: int = 20) -> list[dict[str, torch.Tensor]]:
    """Batches of random words with padding."""
    return [tiny.inputs(8, length, family, seed=seed) for seed in range(batches)]


PARAMETERS = [name for name in SCHEMES if name not in ("absolute", "sinusoidal", "none", "rope", "alibi")]


@torch.no_grad()
def token_cosine(student: nn.Module, teacher: nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    """Mean cosine of the vectors of tokens."""
    cosines = []
    for batch in batches:
        found, wanted = (model(**batch).last_hidden_state for model in (student, teacher))
        cosines.append(torch.cosine_similarity(found, wanted, dim=-1)[batch["attention_mask"].bool()])
    return float(torch.cat(cosines).mean())
