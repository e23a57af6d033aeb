"""The requirements of a position scheme, as a check that anyone can call: [`check_scheme`].

Each requirement is tested on tiny models with random parameters, in float64 where values are compared. A scheme is judged by what models
compute with it, not by how it is written.
"""

import contextlib
import inspect
import io
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from .custom_schemes import register_scheme
from .modeling.kernels.fast import FEWEST_SCORES
from .modeling.models.configuration_posenc import PositionConfigMixin
from .modeling.models.self_attention import EMBEDDINGS, ENCODER
from .modeling.schemes.base import AttentionContext, AttentionScheme, EmbeddingScheme, PositionScheme
from .modeling.schemes.parameters import PositionConstant
from .modeling.schemes.table import SCHEMES, SOURCES
from .parameters import position_parameters
from .variants import CONFIG_CLASSES, CONFIGS, STOCK_CONFIGS, STOCK_MODELS, VARIANT_MODELS


VOCABULARY, HEADS = 99, 4
# Large weights, so that positions matter and mistakes show.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 37,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
# Tokens of short inputs, and of those that attention computes in blocks.
SHORT, LONG = 12, next(length for length in range(8, 1 << 16, 8) if HEADS * length**2 >= FEWEST_SCORES)
# Schemes that are combined with the one that is checked: a bias, a rotation, tables for queries and keys, none of them exclusive.
NEIGHBOURS = ("alibi", "t5", "rope", "deberta")

Formula = Callable[[AttentionContext, int, int, int], Any] | Callable[[nn.Module, int], torch.Tensor]
Fill = Callable[[str, torch.Tensor], Any]


@dataclass
class SchemeReport:
    """The result of [`check_scheme`], in sentences.

    Attributes:
        scheme: the scheme's name.
        held: a sentence for each check that passed or does not apply.
        failed: a sentence for each check that failed, with its numbers.
    """

    scheme: str
    held: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failed

    def __str__(self) -> str:
        lines = [f"{self.scheme}: {len(self.held)} checks passed, {len(self.failed)} failed."]
        lines += [f"- {sentence}" for sentence in self.held]
        return "\n".join([*lines, *(f"- FAILED: {sentence}" for sentence in self.failed)])


class _Failed(Exception):
    """A check that failed, with the sentence that says so."""


def check_scheme(
    scheme: type[PositionScheme],
    *,
    formula: Formula | None = None,
    fill: Fill | None = None,
    **flags: Any,
) -> SchemeReport:
    """Check that a position scheme computes what it claims, in every way that models are used.

    The checks cover: a formula, initialization, learning, gradients, attention implementations, padding, packed documents, caches, dtypes,
    gradient checkpointing, combination with other schemes, all families, saving and loading with and without hf_posenc, and export. They take
    about half a minute. The scheme is registered if it is not yet.

    Args:
        scheme: the class.
        formula: the expected values. For an `AttentionScheme`, `formula(context, head, i, j)` returns the whole score of query i and key j,
            a number; `context.query` and `context.key` are the projections, (1, heads, length, head_dim). For an `EmbeddingScheme`,
            `formula(embeddings, i)` returns the vector of position i, (width,).
        fill: `fill(name, tensor)` sets a parameter in place to the values to check with, for parameters that must be in a range. Default:
            the initial values plus normal noise with standard deviation 0.5.
        flags: config options of the scheme to check it with. Default: their defaults.

    Returns:
        The checks that passed and failed, in sentences.

    Raises:
        TypeError, ValueError: the scheme cannot be registered, as for `register_scheme`, or a config option is wrong.
    """
    if SCHEMES.get(scheme.name if isinstance(getattr(scheme, "name", None), str) else None) is not scheme:
        scheme = SCHEMES[register_scheme(scheme).name]
    subject = _Subject(scheme, flags, formula, fill)
    subject.config("bert")  # a wrong flag is the caller's
    report, verbosity = SchemeReport(scheme.name), logging.get_verbosity()
    logging.set_verbosity_error()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        for check in CHECKS:
            _run(check, subject, report)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    return report


def _run(check: Callable, subject: "_Subject", report: SchemeReport) -> None:
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            report.held += [check(subject)]
        except _Failed as failed:
            report.failed.append(str(failed))
        except Exception as error:  # whatever a scheme does wrong is what is looked for
            what = check.__doc__.split("\n")[0].rstrip(".")
            report.failed.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")


@dataclass(frozen=True)
class _Subject:
    """The scheme that is checked, and models with it."""

    scheme: type[PositionScheme]
    flags: dict[str, Any]
    formula: Formula | None
    fill: Fill | None

    @property
    def name(self) -> str:
        return self.scheme.name

    @property
    def is_attention(self) -> bool:
        return issubclass(self.scheme, AttentionScheme)

    @property
    def beside(self) -> str:
        """The scheme combined with learned absolute positions, if possible; otherwise by itself."""
        return f"absolute+{self.name}" if self.is_attention else self.name

    @cached_property
    def object(self) -> PositionScheme:
        return self.scheme(self.config("bert", self.name))

    def config(self, family: str, position_scheme: str | None = None, **settings: Any) -> PositionConfigMixin:
        """A tiny config; the scheme's flags apply where it is named."""
        position_scheme = position_scheme or self.name
        cls = CONFIG_CLASSES[f"posenc_{family.replace('-', '_')}"]
        names = cls.family.config_names
        sizes = {names.get(name, name): value for name, value in {**SIZES, **settings}.items()}
        flags = self.flags if self.name in position_scheme.split("+") else {}
        return cls(position_scheme=position_scheme, **flags, **sizes)

    def model(
        self,
        position_scheme: str | None = None,
        family: str = "bert",
        filled: bool = True,
        backend: str | None = None,
        **settings: Any,
    ) -> PreTrainedModel:
        """A base model in float64, in eval mode, of the same weights each time."""
        torch.manual_seed(0)
        config = self.config(family, position_scheme, **settings)
        classes = [cls for cls in VARIANT_MODELS.values() if cls.config_class is type(config)]
        cls = next(cls for cls in classes if cls is cls.position_classes.model)
        made = cls._from_config(config, attn_implementation=backend or "eager").double().eval()
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name.endswith(("query.bias", "key.bias", "value.bias")):
                    parameter.normal_(std=0.2)
        return self.filled(made) if filled else made

    def filled(self, model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
        """The model with position parameters away from where they start: most start at zero, where a check proves nothing."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in position_parameters(model).items():
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
                if self.fill is not None:
                    self.fill(name, parameter)
        return model


def _tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (batch, length), generator=generator)


def _padded(batch: int, length: int, side: str = "right", seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids and a mask; each row but the first has padding, which holds other tokens with each seed."""
    tokens, mask = _tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        width = min(2 * row, length - 2)
        columns = slice(length - width, length) if side == "right" else slice(0, width)
        mask[row, columns] = 0
    other = _tokens(batch, length, seed + 1)
    return {"input_ids": torch.where(mask.bool(), tokens, other), "attention_mask": mask}


def _hidden(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    return model(**inputs)[0]


def _difference(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """The largest difference, where tokens are no padding; infinite where one is not a number."""
    apart = (first - second).abs()
    apart = apart if mask is None else apart[mask.bool()]
    return float(torch.nan_to_num(apart, nan=float("inf")).max())


def _agree(
    what: str, first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor | None = None, atol: float = 1e-9
) -> None:
    apart = _difference(first, second, mask)
    if apart > atol:
        raise _Failed(f"{what} differ by {apart:.2g}, but rounding explains at most {atol:g}.")


def _weighted(output: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """A scalar that depends on every entry of an output in another way, padding left out."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    return (output * (weights if mask is None else weights * mask[..., None])).sum()


def _gradients(model: PreTrainedModel, **inputs: Any) -> dict[str, torch.Tensor]:
    """Of every position parameter; zeros where there is none."""
    model.zero_grad(set_to_none=True)
    _weighted(_hidden(model, **inputs), inputs.get("attention_mask")).backward()
    own = position_parameters(model)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in own.items()}


@torch.no_grad()
def travels(subject: _Subject) -> str:
    """Its file can be saved with checkpoints."""
    if subject.name not in SOURCES:
        return "It is a scheme of the package: its file is saved with every checkpoint."
    source = SOURCES[subject.name]
    return f"Its file, {source.path.name}, only imports what is available without hf_posenc."


@torch.no_grad()
def is_made_of_position_modules(subject: _Subject) -> str:
    """Its parameters belong to position modules, and it keeps nothing else."""
    model, without = subject.model(subject.name), subject.model("none")
    own = {name for name in model.state_dict() if name not in without.state_dict()}
    own -= {name for name in subject.model("absolute").state_dict() if name not in without.state_dict()}
    constants = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, PositionConstant)}
    strangers = own - {*position_parameters(model)} - constants
    if strangers:
        raise _Failed(
            f"{', '.join(sorted(strangers))}: not parameters of PositionParameter, PositionTable, PositionLinear, "
            "PositionLayerNorm or PositionConstant. Transformers would initialize them, and they would not count as "
            "position parameters."
        )
    known = {name for name, _ in without.named_buffers()} | constants
    buffers = [name for name, _ in model.named_buffers() if name not in known and "position_ids" not in name]
    if buffers:
        raise _Failed(
            f"{', '.join(buffers)}: buffers are lost if a model is created on the meta device; compute them in prepare."
        )
    scalars = [name for name, parameter in position_parameters(model).items() if parameter.dim() == 0]
    if scalars:
        raise _Failed(
            f"{', '.join(scalars)} have no dimension, which FSDP does not support: give scalars the shape (1,)."
        )
    state = [name for name, value in vars(subject.object).items() if isinstance(value, (torch.Tensor, nn.Module))]
    if state:
        raise _Failed(
            f"The scheme object keeps tensors ({', '.join(state)}): register parameters on the model's modules."
        )
    if subject.object.settings() != subject.scheme(subject.config("bert")).settings():
        raise _Failed("Two scheme objects of the same config have different settings: keep plain values in them.")
    count = sum(model.get_parameter(name).numel() for name in own - constants)
    return f"Its {len(own)} parameters ({count} numbers in two layers of {SIZES['hidden_size']}) belong to position modules."


@torch.no_grad()
def matters(subject: _Subject) -> str:
    """It changes what the model computes."""
    tokens = _tokens(2, SHORT)
    other = "none" if not subject.is_attention else "absolute"
    apart = _difference(
        _hidden(subject.model(subject.beside), input_ids=tokens), _hidden(subject.model(other), input_ids=tokens)
    )
    if subject.is_attention or subject.scheme.adds_vectors:
        if apart < 1e-3:
            raise _Failed(f"With random parameters the outputs change by only {apart:.2g}: it computes nothing.")
        return f"With random parameters it changes the outputs, by up to {apart:.2g}."
    return "It adds no positions, as it claims."


@torch.no_grad()
def starts_as_it_says(subject: _Subject) -> str:
    """It is output-preserving at initialization if it claims so (silent = True)."""
    tokens = _padded(3, SHORT)
    config = subject.config("bert", subject.beside)
    stock = STOCK_CONFIGS[type(config)]
    torch.manual_seed(0)
    own_sizes = {name: getattr(config, name) for name in SIZES}
    original = STOCK_MODELS[type(subject.model())]._from_config(stock(**own_sizes), attn_implementation="eager").eval()
    with tempfile.TemporaryDirectory() as folder:
        original.save_pretrained(folder)
        flags = {**subject.flags, "attn_implementation": "eager"}
        started = (
            type(subject.model()).from_pretrained(folder, position_scheme=subject.beside, **flags).double().eval()
        )
        expected = original.double()
        if not subject.is_attention and not subject.scheme.uses_table:
            expected = type(subject.model()).from_pretrained(
                folder, position_scheme="none", attn_implementation="eager"
            )
            expected = expected.double().eval()
    for name, parameter in position_parameters(started).items():
        if not parameter.isfinite().all():
            raise _Failed(f"{name} starts with values that are not finite.")
    apart = _difference(_hidden(started, **tokens), _hidden(expected, **tokens), tokens["attention_mask"])
    scheme = {s.name: s for s in _scheme_objects(started)}.get(subject.name, subject.object)
    if not scheme.starts_silent_beside({"absolute"}):
        return f"It does not claim to be output-preserving (silent = False): outputs of a checkpoint change by up to {apart:.2g}."
    if apart > 1e-9:
        raise _Failed(
            f"It claims to be output-preserving at initialization (silent = True), but changes the outputs of a checkpoint by up to {apart:.2g}."
        )
    return "It is output-preserving: at initialization, a checkpoint's outputs do not change."


def _scheme_objects(model: PreTrainedModel) -> Iterator[PositionScheme]:
    family = type(model).position_classes.family
    embedding = family.embeddings_of(model).position_scheme
    yield from (embedding,) if embedding is not None else ()
    yield from family.encoder_of(model).position_schemes


def learns_from_its_start(subject: _Subject) -> str:
    """Every parameter learns from where it starts."""
    model = subject.model(subject.beside, filled=False)
    named = _own_parameters(subject, model)
    if not named:
        return "It has no parameters to learn."
    inputs = _padded(3, SHORT)
    first = _gradients(model, **inputs)
    still = [name for name in named if not first[name].any()]
    if len(still) == len(named):
        raise _Failed(
            f"At initialization no parameter has a gradient ({', '.join(sorted(named))}): products of zero-initialized factors never learn."
        )
    for _ in range(2):
        gradients = _gradients(model, **inputs)
        with torch.no_grad():
            for name, parameter in named.items():
                parameter -= 0.05 * gradients[name].sign()
    after = _gradients(model, **inputs)
    dead = [name for name in named if not after[name].any()]
    if dead:
        raise _Failed(f"After two steps these still have no gradient: {', '.join(sorted(dead))}.")
    waits = f", {len(still)} of them after others have moved" if still else ""
    return f"All {len(named)} parameters learn from their initial values{waits}."


def _own_parameters(subject: _Subject, model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Those of the scheme alone; of `absolute` and what reads its table, that."""
    other = {} if not subject.is_attention else position_parameters(subject.model("absolute"))
    return {name: p for name, p in position_parameters(model).items() if name not in other}


def has_right_gradients(subject: _Subject) -> str:
    """The gradient of each parameter is that of the formula."""
    counted = 0
    for backend, length in (("eager", SHORT), ("sdpa", SHORT), ("sdpa", LONG)):
        model = subject.model(subject.beside, backend=backend)
        inputs = _padded(2, length)
        parameters = position_parameters(model)
        gradients = _gradients(model, **inputs)

        for name, parameter in parameters.items():
            direction, step = torch.randn_like(parameter), 1e-6  # few kinks of ReLUs are so near
            along = float((gradients[name] * direction).sum())
            with torch.no_grad():
                parameter += step * direction
                above = _weighted(_hidden(model, **inputs), inputs["attention_mask"])
                parameter -= 2 * step * direction
                below = _weighted(_hidden(model, **inputs), inputs["attention_mask"])
                parameter += step * direction
            measured = float(above - below) / (2 * step)
            if abs(along - measured) > 1e-5 * (1 + abs(measured)):
                raise _Failed(
                    f"The gradient of {name} is wrong with {_called(backend, length)}: along a random direction it is {along:.6g}, and by "
                    f"finite differences {measured:.6g}."
                )
            counted += 1
        unused = [name for name in _own_parameters(subject, model) if not gradients[name].any()]
        if unused:
            raise _Failed(
                f"These parameters have no gradient with {_called(backend, length)}: {', '.join(sorted(unused))}."
            )
    if not counted:
        return "It has no parameters, so no gradients to check."
    return (
        f"Gradients agree with finite differences, in {counted} comparisons with eager, sdpa and blockwise attention."
    )


def _called(backend: str, length: int) -> str:
    return "blocks" if backend == "sdpa" and length == LONG else backend


def backends_agree(subject: _Subject) -> str:
    """All backends compute the same."""
    able = subject.scheme.backends if subject.is_attention and subject.scheme.adds_scores else AttentionScheme.backends
    for length in (SHORT, LONG):
        for side in ("right", "left"):
            inputs = _padded(3, length, side)
            model = subject.model(subject.beside)
            expected, gradients = _hidden(model, **inputs), _gradients(model, **inputs)
            for backend in able:
                model = subject.model(subject.beside, backend=backend)
                what = f"{_called(backend, length)} and eager, at {length} tokens padded on the {side},"
                with contextlib.ExitStack() as stack:
                    if backend == "flex_attention":
                        # What is compiled is the same function; it need not be compiled to be compared.
                        stack.enter_context(torch.compiler.set_stance("force_eager"))
                        stack.enter_context(torch.no_grad())
                    found = _hidden(model, **inputs)
                _agree(what, found, expected, inputs["attention_mask"])
                if backend == "flex_attention":
                    continue
                for name, gradient in _gradients(model, **inputs).items():
                    scale = 1 + float(gradients[name].abs().max())
                    _agree(f"Gradients of {name} by {what}", gradient / scale, gradients[name] / scale)
    return f"{', '.join(able)} and blockwise attention compute the same, with gradients (flex_attention on CPUs has none)."


@torch.no_grad()
def padding_changes_nothing(subject: _Subject) -> str:
    """Padding changes nothing."""
    for backend in ("eager", "sdpa"):
        for length in (SHORT, LONG):
            for unpad in (False, True):
                model = subject.model(subject.beside, backend=backend, unpad=unpad)
                for side in ("right", "left"):
                    inputs, others = _padded(3, length, side), _padded(3, length, side, seed=5)
                    mask = inputs["attention_mask"]
                    what = f"Outputs with other tokens at padding on the {side} ({_called(backend, length)}, unpad={unpad})"
                    _agree(what, _hidden(model, **others), _hidden(model, **inputs), mask)
                inputs = _padded(3, length)
                together = _hidden(model, **inputs)
                for row in range(3):
                    kept = int(inputs["attention_mask"][row].sum())
                    alone = _hidden(model, input_ids=inputs["input_ids"][row : row + 1, :kept])
                    what = f"A sequence of {kept} tokens by itself and padded to {length} ({_called(backend, length)}, unpad={unpad})"
                    _agree(what, together[row : row + 1, :kept], alone)
    return "Padding changes nothing, on either side, with any tokens in it, computed or left out."


@torch.no_grad()
def positions_are_relative_if_it_says_so(subject: _Subject) -> str:
    """Outputs depend on differences of positions alone, if it says so."""
    if not subject.is_attention or not subject.scheme.pure_relative:
        return "It does not claim to be purely relative (pure_relative)."
    tokens, ids = _tokens(2, SHORT), torch.arange(SHORT)[None]
    for backend in ("eager", "sdpa"):
        model = subject.model(subject.name, backend=backend)
        expected = _hidden(model, input_ids=tokens)
        _agree(
            "Outputs with all positions moved by 7 (pure_relative)",
            _hidden(model, input_ids=tokens, position_ids=ids + 7),
            expected,
        )
        padded = torch.nn.functional.pad(tokens, (3, 0), value=6)
        mask = torch.nn.functional.pad(torch.ones_like(tokens), (3, 0))
        found = _hidden(model, input_ids=padded, attention_mask=mask)[:, 3:]
        _agree("Outputs with padding on the left (pure_relative)", found, expected)
    return "Outputs only depend on differences of positions, as it claims (pure_relative)."


@torch.no_grad()
def documents_may_be_packed(subject: _Subject) -> str:
    """Documents that are packed in a row do not see each other."""
    first, second = _tokens(1, 7, seed=3), _tokens(1, 5, seed=4)
    lengths = first.shape[1], second.shape[1]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    together = torch.block_diag(*[torch.ones(length, length) for length in lengths]).bool()[None, None]
    for backend in ("eager", "sdpa"):
        model = subject.model(subject.beside, backend=backend)
        given = {"attention_mask": together, "position_ids": positions}
        packed = _hidden(model, input_ids=torch.cat([first, second], dim=1), **given)
        for name, part, found in zip(("first", "second"), (first, second), packed.split(lengths, dim=1), strict=True):
            _agree(
                f"The {name} of two packed documents and the same by itself ({backend})",
                found,
                _hidden(model, input_ids=part),
            )
    return "Documents packed into one sequence, each with its own positions, give the same outputs as separately."


@torch.no_grad()
def caches_agree(subject: _Subject) -> str:
    """A decoder computes the same with a cache."""
    tokens, mask = _tokens(2, SHORT), torch.ones(2, SHORT, dtype=torch.long)
    mask[1, :3] = 0  # generation pads on the left
    for backend in ("eager", "sdpa"):
        model = subject.model(subject.beside, backend=backend, is_decoder=True)
        keyword = next(n for n, p in inspect.signature(type(model).forward).parameters.items() if "Cache" in str(p))
        whole = _hidden(model, input_ids=tokens, attention_mask=mask, use_cache=False)
        cache, found = DynamicCache(config=model.config), []
        for begin, end in [(0, 6), (6, 8), *((at, at + 1) for at in range(8, SHORT))]:
            step = {
                "input_ids": tokens[:, begin:end],
                "attention_mask": mask[:, :end],
                keyword: cache,
                "use_cache": True,
            }
            found.append(_hidden(model, **step))
        _agree(f"Outputs of a decoder with a cache and without ({backend})", torch.cat(found, dim=1), whole, mask)
    return "A decoder computes the same token by token with a cache, and in one pass."


@torch.no_grad()
def dtypes_hold(subject: _Subject) -> str:
    """Half precision works."""
    inputs = _padded(3, SHORT)
    expected = _hidden(subject.model(subject.beside), **inputs)
    mask = inputs["attention_mask"].bool()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for backend in ("eager", "sdpa"):
            model = subject.model(subject.beside, backend=backend).to(dtype)
            found = _hidden(model, **inputs)
            if found.dtype != dtype:
                raise _Failed(f"A model in {dtype} has outputs in {found.dtype} ({backend}).")
            likeness = torch.nn.functional.cosine_similarity(found[mask].double(), expected[mask], dim=-1).min()
            if not likeness > 0.9:
                raise _Failed(f"In {dtype} outputs have a cosine of {likeness:.2g} with those in float64 ({backend}).")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if not _hidden(subject.model(subject.beside).float(), **inputs).isfinite().all():
            raise _Failed("Under autocast outputs are not finite.")
    return "float32, bfloat16, float16 and autocast agree with float64, up to their precision."


def checkpointing_agrees(subject: _Subject) -> str:
    """Gradient checkpointing changes no gradient."""
    inputs, expected = _padded(3, SHORT), None
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = subject.model(subject.beside, backend="sdpa").train()
        if options is not None:
            model.gradient_checkpointing_enable(options)
            model.enable_input_require_grads()
        gradients = _gradients(model, **inputs)
        expected = expected or gradients
        for name, gradient in gradients.items():
            _agree(f"Gradients of {name} with gradient checkpointing, {options},", gradient, expected[name], atol=1e-7)
    return "Gradient checkpointing of both kinds changes no gradient."


@torch.no_grad()
def stands_beside_others(subject: _Subject) -> str:
    """It can be combined with other schemes, in any order."""
    if not subject.is_attention:
        return "It is added to the token embeddings, and attention schemes can be combined with it."
    tokens, stood = _tokens(2, SHORT), []
    for other in NEIGHBOURS:
        if other == subject.name:
            continue
        try:
            subject.config("bert", f"{other}+{subject.name}")
        except ValueError:
            continue  # it says itself with which it cannot be combined
        one, two = (subject.model(name) for name in (f"{other}+{subject.name}", f"{subject.name}+{other}"))
        two.load_state_dict(one.state_dict())
        _agree(
            f"{other}+{subject.name} and {subject.name}+{other}",
            _hidden(one, input_ids=tokens),
            _hidden(two, input_ids=tokens),
        )
        one.set_attn_implementation("sdpa")
        _agree(
            f"eager and sdpa, {subject.name} with {other},",
            _hidden(one, input_ids=tokens),
            _hidden(two, input_ids=tokens),
        )
        stood.append(other)
    return f"It can be combined with {', '.join(stood) or 'none of ' + ', '.join(NEIGHBOURS)}, in any order."


@torch.no_grad()
def every_family_has_it(subject: _Subject) -> str:
    """Every family of models has it."""
    for config in CONFIGS:
        family = config.stock_model_type
        model = subject.model(subject.beside, family=family)
        inputs = _padded(2, SHORT)
        padding = model.config.pad_token_id
        inputs["input_ids"] = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], padding)
        kept = int(inputs["attention_mask"][1].sum())
        alone = _hidden(model, input_ids=inputs["input_ids"][1:, :kept])
        _agree(f"A sequence by itself and padded, in {family},", _hidden(model, **inputs)[1:, :kept], alone)
    return f"It works in all {len(CONFIGS)} families."


@torch.no_grad()
def reads_on_if_it_says_so(subject: _Subject) -> str:
    """It reads sequences longer than the position embedding matrix."""
    model = subject.model(subject.name)
    longer = SIZES["max_position_embeddings"] + 9
    if subject.scheme.ends_with_table:
        try:
            _hidden(model, input_ids=_tokens(1, longer))
        except ValueError:
            return "It is limited to the rows of the position embedding matrix, and longer sequences are refused."
        raise _Failed(
            "It claims to be limited to the position embedding matrix (ends_with_table), but accepts longer sequences."
        )
    if not _hidden(model, input_ids=_tokens(1, longer)).isfinite().all():
        raise _Failed(f"At {longer} tokens outputs are not finite.")
    return f"It reads sequences longer than the position embedding matrix ({longer} tokens with {longer - 9} rows)."


@torch.no_grad()
def computes_its_formula(subject: _Subject) -> str:
    """It computes its formula."""
    if subject.formula is None:
        return "No formula was given to compare it with."
    model, length = subject.model(subject.name), 7
    if isinstance(subject.object, EmbeddingScheme):
        embeddings = type(model).position_classes.family.embeddings_of(model)
        expected = torch.stack([torch.as_tensor(subject.formula(embeddings, i)) for i in range(length)])
        found = embeddings.position_vectors(None, length, 0, torch.device("cpu"))[0]
        _agree("Position vectors and the formula", found, expected)
        return f"Its vectors agree with the formula, for {length} positions."
    family = type(model).position_classes.family
    seen: dict[str, Any] = {}
    attention = family.self_attention_of(family.layers_of(family.encoder_of(model))[0])

    def note(module: nn.Module, arguments: tuple, keywords: dict) -> None:
        seen["states"], seen["state"] = (
            arguments[0] if arguments else keywords["hidden_states"],
            keywords["position_state"],
        )

    with attention.register_forward_pre_hook(note, with_kwargs=True):
        weights = model(_tokens(1, length), output_attentions=True).attentions[0][0]
    shape = 1, length, attention.num_heads, attention.head_dim
    query, key = (
        projection(seen["states"]).view(shape).transpose(1, 2)
        for projection in (attention.query_projection, attention.key_projection)
    )
    modules = attention, seen["state"][ENCODER].module, seen["state"][EMBEDDINGS].module
    context = AttentionContext(*modules, query, key, None, *seen["state"][subject.name], seen["states"])
    context.kept = subject.object.keep(context)
    scores = torch.tensor(
        [
            [[float(subject.formula(replace(context), head, i, j)) for j in range(length)] for i in range(length)]
            for head in range(attention.num_heads)
        ],
        dtype=torch.float64,
    )
    _agree("Attention weights and those of the formula", weights, scores.softmax(dim=-1))
    return (
        f"Its attention weights agree with the formula, for {length} tokens and {attention.num_heads} attention heads."
    )


LOAD = """
import sys
sys.modules["hf_posenc"] = None
import torch
from transformers import AutoModel
from transformers.utils import logging
logging.set_verbosity_error()
tokens, expected = torch.load(sys.argv[2])
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float64, attn_implementation="eager")
print(float((model(tokens)[0] - expected).abs().max()))
"""


@torch.no_grad()
def saves_and_loads(subject: _Subject) -> str:
    """It is saved and loaded, with hf_posenc and without."""
    model, tokens = subject.model(subject.beside), _tokens(2, SHORT)
    expected = _hidden(model, input_ids=tokens)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "model"
        model.save_pretrained(saved)
        options = {"dtype": torch.float64, "attn_implementation": "eager"}
        loaded = type(model).from_pretrained(saved, **options)
        _agree("Outputs before saving and after", _hidden(loaded, input_ids=tokens), expected, atol=1e-12)
        if loaded.config.position_scheme != subject.beside:
            raise _Failed(f"The config that was saved with {subject.beside!r} has {loaded.config.position_scheme!r}.")
        outputs = Path(folder) / "outputs.pt"
        torch.save((tokens, expected), outputs)
        environment = {**os.environ, "HF_MODULES_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", LOAD, str(saved), str(outputs)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
        if ran.returncode:
            raise _Failed(f"Without hf_posenc it cannot be loaded: {ran.stderr.strip().splitlines()[-1]}")
        if float(ran.stdout.split()[-1]) > 1e-12:
            raise _Failed(f"Loaded without hf_posenc, outputs differ by {float(ran.stdout):.2g}.")
    return "Saved and loaded, it computes the same, with hf_posenc and without (trust_remote_code)."


class _LastHiddenState(nn.Module):
    """A model as exporters want it: two tensors in, one out."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


def _exported_lengths(subject: _Subject) -> dict:
    last = SIZES["max_position_embeddings"] if _ends(subject) else 10_000
    length = torch.export.Dim("length", max=last)
    return {name: {0: torch.export.Dim("batch"), 1: length} for name in ("input_ids", "attention_mask")}


def _ends(subject: _Subject) -> bool:
    return any(SCHEMES[name].ends_with_table for name in subject.beside.split("+"))


@torch.no_grad()
def exports(subject: _Subject) -> str:
    """torch.export traces it, at any length."""
    model, inputs = subject.model(subject.beside, backend="sdpa"), _padded(2, 10)
    program = torch.export.export(_LastHiddenState(model), (), inputs, dynamic_shapes=_exported_lengths(subject))
    for batch, length in ((1, 3), (2, 10), (3, 37)):
        inputs = _padded(batch, length)
        found = program.module()(**inputs)
        _agree(
            f"An exported program at {length} tokens and the model",
            found,
            _hidden(model, **inputs),
            inputs["attention_mask"],
        )
    return "torch.export traces it, and the program computes the same at other lengths."


@torch.no_grad()
def exports_to_onnx(subject: _Subject) -> str:
    """ONNX Runtime runs it."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        return f"Not tried, since {' and '.join(missing)} is not installed: ONNX."
    import onnxruntime

    model, inputs = subject.model(subject.beside, backend="sdpa").float(), _padded(2, 10)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "model.onnx"
        names = {"input_names": [*inputs], "dynamic_shapes": _exported_lengths(subject)}
        torch.onnx.export(_LastHiddenState(model), tuple(inputs.values()), file, dynamo=True, verbose=False, **names)
        session = onnxruntime.InferenceSession(file)
        for batch, length in ((1, 3), (2, 10), (3, 37)):
            inputs = _padded(batch, length)
            [found] = session.run(None, {name: value.numpy() for name, value in inputs.items()})
            what = f"ONNX Runtime at {length} tokens and the model"
            _agree(what, torch.from_numpy(found), _hidden(model, **inputs), inputs["attention_mask"], atol=1e-4)
    return "ONNX Runtime computes the same at other lengths."


CHECKS: tuple[Callable[[_Subject], str], ...] = (
    travels,
    is_made_of_position_modules,
    matters,
    computes_its_formula,
    starts_as_it_says,
    learns_from_its_start,
    has_right_gradients,
    backends_agree,
    padding_changes_nothing,
    positions_are_relative_if_it_says_so,
    documents_may_be_packed,
    caches_agree,
    dtypes_hold,
    checkpointing_agrees,
    stands_beside_others,
    every_family_has_it,
    reads_on_if_it_says_so,
    saves_and_loads,
    exports,
    exports_to_onnx,
)
