"""What a position scheme is: the two base classes, and the small parts that schemes are made of.

A scheme object holds its flags and nothing else. Its parameters live on the stock modules (`embeddings`, `encoder`,
`encoder.layer.N.attention.self`) in modules whose names are part of the checkpoint format, so a scheme registers them
there and calls them there. Adding a scheme is one file with a subclass and a line in schemes.py.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import initialization as init

from .flags import Boolean, Choice, Flag, Integer, Number
from .masks import allowed
from .relative_positions import expand_to_pairs, relative_distances


# Modes in which tensors have no values, or in which operations are recorded.
_SYMBOLIC = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


def is_traced() -> bool:
    """Whether what runs is being recorded, computes shapes alone, or is transformed as `torch.func` does: then values must not
    be looked at."""
    if _is_recorded() or torch._C._are_functorch_transforms_active():
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _SYMBOLIC)


def _is_recorded() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """Whether `torch.func` differentiates or maps what runs."""
    return not _is_recorded() and torch._C._are_functorch_transforms_active()


def may_carry_tangents() -> bool:
    """Whether forward-mode AD is on, `torch.func.jvp` among it; asking each tensor costs more, and there are many."""
    return forward_ad._current_level >= 0  # no public name says so without a tensor


# Initial values. They go through transformers' own functions, which leave alone what was loaded from a checkpoint.
Initial = Callable[[torch.Tensor], Any]


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    return init.zeros_(tensor)


def ones(tensor: torch.Tensor) -> torch.Tensor:
    return init.ones_(tensor)


def xavier(tensor: torch.Tensor) -> torch.Tensor:
    return init.xavier_uniform_(tensor)


@dataclass(frozen=True)
class Normal:
    """Normal distribution of mean 0."""

    std: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return init.normal_(tensor, mean=0.0, std=self.std)


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution from `low` to `high`."""

    low: float
    high: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return init.uniform_(tensor, self.low, self.high)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return init.constant_(tensor, self.value)


@dataclass(frozen=True)
class Identity:
    """`scale` times the identity, side by side as often as the (out, in) shape holds it."""

    scale: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        out_features, in_features = tensor.shape
        eye = torch.eye(out_features, dtype=tensor.dtype, device=tensor.device)
        return init.copy_(tensor, self.scale * eye.repeat(1, in_features // out_features))


class PositionTable(nn.Embedding):
    """A table whose initial value belongs to its scheme."""

    def __init__(self, rows: int, width: int, initial: Initial):
        super().__init__(rows, width)
        self.position_initial = {"weight": initial}


class PositionLinear(nn.Linear):
    """A linear layer whose initial values belong to its scheme; biases start at 0 unless it says how."""

    def __init__(
        self, in_features: int, out_features: int, initial: Initial, bias: bool = True, initial_bias: Initial = zeros
    ):
        super().__init__(in_features, out_features, bias=bias)
        self.position_initial = {"weight": initial, **({"bias": initial_bias} if bias else {})}


class SmallPositionLinear(PositionLinear, NonDynamicallyQuantizableLinear):
    """A [`PositionLinear`] of at most 32 input features, as in a network that computes a bias of a few numbers.

    It has the learning rate of tables and biases, since it sums over few features. Quantization leaves it as it is, since there is
    nothing to save: torchao leaves out subclasses of `NonDynamicallyQuantizableLinear`, and fails at matrices of a single column.

    Raises:
        ValueError: more features.
    """

    MOST_FEATURES = 32

    def __init__(self, in_features: int, out_features: int, initial: Initial, **settings: Any):
        if in_features > self.MOST_FEATURES:
            raise ValueError(
                f"SmallPositionLinear takes at most {self.MOST_FEATURES} input features, got {in_features}: use PositionLinear"
            )
        super().__init__(in_features, out_features, initial, **settings)


class PositionLayerNorm(nn.LayerNorm):
    """A LayerNorm whose initial weight belongs to its scheme; the bias starts at 0."""

    def __init__(self, width: int, eps: float, initial: Initial):
        super().__init__(width, eps=eps)
        self.position_initial = {"weight": initial, "bias": zeros}


class PositionParameter(nn.Module):
    """A single tensor of a scheme, `weight`, whose initial value belongs to the scheme. Calling it gives the tensor.

    A module, so that whatever stands in its place is obeyed: PEFT's `modules_to_save`, offloading, a unit of FSDP. Schemes
    call it and never read `weight`. Learned scalars have shape (1,): FSDP2 takes no 0-dim parameters.
    """

    def __init__(self, shape: tuple[int, ...], initial: Initial):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.position_initial = {"weight": initial}

    def forward(self) -> torch.Tensor:
        # A copy: where the module is a unit of FSDP (PEFT's wrapping makes it one), its parameter is given up by the time
        # that the tensor is used.
        return self.weight.clone()


class PositionConstant(PositionParameter):
    """A tensor like [`PositionParameter`], under the same key of checkpoints, that is a buffer and is never trained."""

    def __init__(self, shape: tuple[int, ...], initial: Initial):
        super().__init__(shape, initial)
        value = self.weight.detach()
        del self.weight
        self.register_buffer("weight", value)


def whole_table(table: nn.Module, rows: int, device: torch.device) -> torch.Tensor:
    """All rows of an embedding, (rows, width), asked of the module.

    Reading `table.weight` instead would miss what LoRA adds to it, and fail where the weight arrives with the call
    (offloading).
    """
    return table(torch.arange(rows, device=device))


# By how much rows are enlarged where numbers have few digits; powers of two, small enough for the range of the type.
ENLARGED = {torch.bfloat16: 2.0**12, torch.float16: 2.0**8}


def without_bias(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """(module(s·rows) - module(0)) / s: the linear part of a projection, whatever the module is made of.

    Reading `module.weight` instead would miss what LoRA adds to it, and fail for quantised layers. In half precision, with
    s = 1, the bias would round away what small rows give before it is taken off.
    """
    bias = module(torch.zeros_like(rows[:1]))
    scale = ENLARGED.get(bias.dtype, 1.0)
    return (module(rows * scale) - bias) / scale


@dataclass
class Positions:
    """Where the queries and the keys of one forward pass are.

    Attributes:
        query: int64 (batch or 1, query), positions of the queries; `first` is the position of a sequence's first token.
        key: int64 (batch or 1, key).
        offset: number of tokens in the cache.
        contiguous: the tokens of each sequence follow each other one by one: `key - query` is `j - i - offset`, and a
            scheme may work per distance instead of per pair.
        first: the family's first position (0, and padding_idx + 1 in RoBERTa-like families).
        mask: as the caller gave it: by token, (batch, key), by pair in the form of any backend, or None.
        is_causal: beside a mask by token, or none, queries do not see what follows them (decoders).
    """

    query: torch.Tensor
    key: torch.Tensor
    offset: int | torch.Tensor
    contiguous: bool
    first: int
    mask: Any = None
    is_causal: bool = False

    @property
    def visible(self) -> torch.Tensor | None:
        """Where there is something to attend to, bool: (batch, key) by token, (batch or 1, query, key) by pair, or None for
        everywhere; what follows a query is not looked at here."""
        mask, length = self.mask, self.key.shape[1]
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor):  # flex_attention's BlockMask
            from torch.nn.attention.flex_attention import create_mask

            shape = mask.shape[0], None, self.query.shape[1], length
            return create_mask(mask.mask_mod, *shape, device=self.key.device)[:, 0]
        mask = mask.to(self.key.device)
        if mask.dim() == 2:
            # Shorter than the keys, it hides the last ones, as in transformers: empty slots of a static cache.
            return nn.functional.pad(mask.bool(), (0, max(length - mask.shape[1], 0)))[:, :length]
        seen = allowed(mask)[..., :length]
        return seen if mask.dim() == 3 else seen.any(1)

    @property
    def context_lengths(self) -> torch.Tensor:
        """How many tokens queries may attend to, int64 (batch or 1, 1), or (batch or 1, query) where queries of a sequence differ.

        In an encoder the length of the sequence without its padding, or of the document where several are packed in a row; in a
        decoder the place of the query in it, counted from 1.
        """
        visible = self.visible
        if visible is not None and visible.dim() == 3:
            return visible.sum(-1)
        if not self.is_causal:
            return self.key.new_full((1, 1), self.key.shape[1]) if visible is None else visible.sum(-1, keepdim=True)
        slots = torch.arange(self.query.shape[1], device=self.key.device) + self.offset
        return slots[None] + 1 if visible is None else visible.long().cumsum(-1).index_select(1, slots)

    @property
    def are_tokens(self) -> torch.Tensor | None:
        """Which of the queries' tokens somebody may attend to, those that are no padding, bool (batch or 1, query); None for all."""
        visible = self.visible
        if visible is None:
            return None
        seen = visible if visible.dim() == 2 else visible.any(1)
        return seen.index_select(1, torch.arange(self.query.shape[1], device=seen.device) + self.offset)

    @property
    def documents(self) -> torch.Tensor | None:
        """Which document each token belongs to, by the index of the first token in it, int64 (batch or 1, key).

        Tokens that may attend to each other are of one document, whatever stands between them: padding, or another document. Padding is
        of none but its own. Where pairs say that there are no documents (a window), all of a sequence is one.

        None where no mask of pairs says so, or it has no row for each key (a cache).
        """
        visible = self.visible
        if visible is None or visible.dim() == 2 or visible.shape[1] != visible.shape[2]:
            return None
        first = visible.to(torch.uint8).argmax(-1)
        first = torch.where(visible.any(-1), first, torch.arange(first.shape[1], device=first.device))
        # What padding may attend to counts for nothing: nobody reads what it gets.
        seen = visible & visible.any(1)[:, :, None]
        are_apart = seen & (first[:, :, None] != first[:, None])
        return first.masked_fill(are_apart.flatten(1).any(1, keepdim=True), 0)

    @property
    def are_first_of_documents(self) -> torch.Tensor | None:
        """Which tokens begin a document, where several are packed in a row, bool (batch or 1, key); None as for `documents`."""
        documents, visible = self.documents, self.visible
        if documents is None:
            return None
        return (documents == torch.arange(documents.shape[1], device=documents.device)) & visible.any(1)

    @property
    def relative(self) -> torch.Tensor:
        """`key - query`: (query + key - 1,) per distance if contiguous, else (batch or 1, query, key) per pair."""
        if self.contiguous:
            return relative_distances(self.query.shape[1], self.key.shape[1], self.offset, self.query.device)
        return self.key[:, None, :] - self.query[:, :, None]

    def by_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The distances that there are, (rows,), and which of them each of `relative` is: rows of a table per distance."""
        relative = self.relative
        if self.contiguous:
            return relative, torch.arange(relative.shape[0], device=relative.device)
        distances, rows = torch.unique(relative, return_inverse=True)
        return distances, rows.view_as(relative)  # ONNX has them in a line

    def per_pair(self, rows: torch.Tensor) -> torch.Tensor:
        """What is known of each of the `relative` distances, (batch or 1, query, key)."""
        return expand_to_pairs(rows, self.query.shape[1], self.key.shape[1])[None] if self.contiguous else rows

    def bias(self, of_distance: Callable[[torch.Tensor], torch.Tensor]) -> "RelativeTerm | PairTerm":
        """The term of a bias that is a function of the distance, computed per distance where that will do.

        Args:
            of_distance: from int64 (..., n) `key - query` to (..., heads, n).
        """
        relative = self.relative
        if self.contiguous:
            return RelativeTerm(torch.arange(relative.shape[-1], device=relative.device), bias=of_distance(relative))
        # (batch or 1, query, key) -> (batch or 1, query, heads, key) -> (batch or 1, heads, query, key)
        return PairTerm(of_distance(relative).transpose(1, 2))


@dataclass
class AttentionContext:
    """What a scheme may look at inside one self-attention.

    Attributes:
        attention: the self-attention, which has the scheme's parameters of a layer.
        encoder: the encoder, which has those that layers share.
        embeddings: the embeddings, which have the table of absolute positions; None where no scheme reads it.
        query, key: (batch, heads, query or key, head_dim), as they are projected for `rotate`; for `terms` as all schemes
            have rotated them, keys of the cache among them, or packed, (1, heads, tokens, head_dim): terms say what is to
            be multiplied with them, and do not multiply themselves.
        attention_mask: as the layer was given it.
        positions: where queries and keys are; as the table of absolute positions counts them, if the scheme reads it.
        prepared: what the scheme's `prepare` returned.
        hidden_states: the layer's input, (batch, query, hidden), or packed, (1, tokens, hidden); see [`padded`].
        packing: how it is packed, or None.
        kept: in `terms`, what the scheme's `keep` returned of all keys, those in a cache too.
    """

    attention: nn.Module
    encoder: nn.Module
    embeddings: nn.Module | None
    query: torch.Tensor
    key: torch.Tensor
    attention_mask: Any
    positions: Positions
    prepared: Any
    hidden_states: torch.Tensor | None = None
    packing: Any = None
    kept: torch.Tensor | None = None

    def padded(self, states: torch.Tensor) -> torch.Tensor:
        """What was computed of each token of `hidden_states`, (batch, query, width), with zeros at padding that was left out."""
        return states if self.packing is None else self.packing.pad_input(states)


@dataclass
class RelativeTerm:
    """A term of the attention score that looks a table up by distance.

    With r the row of the pair (i, j), and every part optional, the score of query i and key j in head h gets

        (query_i + query_bias[h]) · query_table[h, r]  +  key_j · key_table[h, r]  +  bias[h, r]

    and the output of query i gets Σ_j weight_ij · value_table[r].

    Attributes:
        rows: int64, (query + key - 1,) per distance in the order of [`relative_distances`], or (batch or 1, query, key).
        query_table, key_table: (heads or 1, rows, head_dim). They carry their scale themselves.
        query_bias: (heads, head_dim), beside a query table.
        bias: (heads or 1, rows), or (batch, heads or 1, rows) where each sequence has its own; then rows are per distance.
        value_table: (rows, head_dim).
    """

    rows: torch.Tensor
    query_table: torch.Tensor | None = None
    key_table: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    value_table: torch.Tensor | None = None
    query_bias: torch.Tensor | None = None

    def biased_query(self, query: torch.Tensor) -> torch.Tensor:
        """What is multiplied with the query table, given (batch, heads, query, head_dim)."""
        return query if self.query_bias is None else query + self.query_bias.to(query.device)[:, None]

    def without_query_bias(self) -> "RelativeTerm":
        """This term with its query bias as a bias per row of the table."""
        if self.query_bias is None:
            return self
        # (heads or 1, rows, head_dim) @ (heads, head_dim, 1) -> (heads, rows)
        bias = (self.query_table @ self.query_bias.to(self.query_table.device)[..., None]).squeeze(-1)
        return replace(self, bias=bias if self.bias is None else self.bias + bias, query_bias=None)

    @property
    def differs_by_sequence(self) -> bool:
        """Whether each sequence has a bias of its own."""
        return self.bias is not None and self.bias.dim() == 3


@dataclass
class PairTerm:
    """A term of the attention score that is known for every pair of positions.

    Attributes:
        bias: (batch or 1, heads or 1, query, key), added to the score as it is.
    """

    bias: torch.Tensor


@dataclass
class ProductTerm:
    """A term of the attention score that is a product of vectors of the query's and the key's position.

    Attributes:
        query: (batch or 1, heads, query, width).
        key: (batch or 1, heads, key, width). The score of a pair gets their inner product as it is.
    """

    query: torch.Tensor
    key: torch.Tensor


@dataclass
class SumTerm:
    """A term of the attention score that is a difference of two numbers, one of the query and one of the key: of sums over tokens.

    The score of query i and key j in head h gets -scale[h, i] · |query[h, i] - key[h, j]|. With `side` it gets that for keys on one side
    alone, -scale[h, i] · max(query[h, i] - key[h, j], 0) for the left and -scale[h, i] · max(key[h, j] - query[h, i], 0) for the right: sums do
    not fall. Nothing is known per pair, forward or backward, beyond a block of pairs.

    Attributes:
        scale, query: (batch or 1, heads, query).
        key: (batch or 1, heads, key). All three in float32 at least: sums over a long text have no digits left in half precision.
        side: "left", "right", or None for both.
    """

    scale: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    side: str | None = None

    @property
    def of_both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is subtracted from each other, of the query and of the key; for one side, what is left is the positive part."""
        return (-self.query, -self.key) if self.side == "right" else (self.query, self.key)

    def pairs(self) -> torch.Tensor:
        """(batch or 1, heads, query, key), where a whole matrix is wanted."""
        query, key = self.of_both
        difference = query[..., None] - key[..., None, :]
        return -self.scale[..., None] * (difference.abs() if self.side is None else difference.relu())


# Kind of score term -> its tensors, and how many dimensions they may have.
DIMENSIONS: dict[type, dict[str, tuple[int, ...]]] = {
    RelativeTerm: {
        "rows": (1, 3),
        "query_table": (3,),
        "key_table": (3,),
        "bias": (2, 3),
        "value_table": (2,),
        "query_bias": (2,),
    },
    PairTerm: {"bias": (4,)},
    ProductTerm: {"query": (4,), "key": (4,)},
    SumTerm: {"scale": (3,), "query": (3,), "key": (3,)},
}


def checked_terms(scheme: "AttentionScheme", terms: Any) -> list[RelativeTerm | PairTerm | ProductTerm | SumTerm]:
    """What `terms` of a scheme returned, if it is a list of score terms whose tensors have the right number of dimensions.

    Raises:
        TypeError: it is something else.
        ValueError: a tensor has another number of dimensions.
    """
    who = f"`terms` of position_scheme {scheme.name!r}"
    if not isinstance(terms, list):
        raise TypeError(f"{who} must return a list of score terms, got {type(terms).__name__}")
    for term in terms:
        if (dimensions := DIMENSIONS.get(type(term))) is None:
            kinds = ", ".join(kind.__name__ for kind in DIMENSIONS)
            raise TypeError(f"{who} must return a list of {kinds}, got {type(term).__name__} in it")
        for name, possible in dimensions.items():
            value = getattr(term, name)
            if value is not None and value.dim() not in possible:
                wanted = " or ".join(map(str, possible))
                raise ValueError(
                    f"{who} returned a {type(term).__name__} whose {name} must have {wanted} dimensions, got {tuple(value.shape)}"
                )
    return terms


def checked_rotation(
    scheme: "AttentionScheme", rotated: Any, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotate` of a scheme returned, if it is a query and a key of the shapes that it was given.

    Raises:
        TypeError: it is something else.
        ValueError: a shape is another.
    """
    who = f"`rotate` of position_scheme {scheme.name!r}"
    if not isinstance(rotated, tuple) or len(rotated) != 2 or not all(map(torch.is_tensor, rotated)):
        raise TypeError(f"{who} must return a tuple of query and key, got {type(rotated).__name__}")
    for name, own, given in zip(("query", "key"), rotated, (query, key)):
        if own.shape != given.shape:
            raise ValueError(f"{who} must return a {name} of {tuple(given.shape)}, got {tuple(own.shape)}")
    return rotated


@contextmanager
def nothing_replaced(scheme: "PositionScheme", module: nn.Module) -> Iterator[None]:
    """While a scheme registers its parameters on a module.

    Raises:
        ValueError: under a name that something of the module has already, of transformers or of another scheme.
    """
    before = _attributes(module)
    yield
    now = _attributes(module)
    taken = [name for name, value in now.items() if before.get(name, value) is not value]
    taken += [name for name in now.keys() - before.keys() if hasattr(type(module), name)]
    if taken:
        names = " and ".join(repr(name) for name in sorted(taken))
        raise ValueError(
            f"position_scheme {scheme.name!r} registers {names} on {type(module).__name__}, which has that already, of transformers "
            "or of another scheme: give it another name, such as the scheme's"
        )


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._parameters, **module._buffers, **module._modules}


class PositionScheme:
    """What all schemes have: a name, flags, and a word about themselves.

    Attributes:
        name: the name in `position_scheme`.
        flags: those that apply to the scheme.
        formula, paper: one line each, for the tables that people read.
        extrapolates: for people, what happens to sequences longer than those of training.
        ends_with_table: sequences longer than the table of absolute positions are refused.
        silent: whether the scheme, added to what a checkpoint has, can start by changing nothing.
        uses_table: the vectors that join the words are the rows of the stock table of absolute positions.
        reads_table: the scheme reads that table inside the attention.
        unties_cls: [CLS] stands outside the order of the words, for the schemes beside this one too (TUPE).
        reads_positions: it asks where a caller says that tokens are, by `position_ids`.
    """

    name: ClassVar[str]
    flags: ClassVar[tuple[Flag, ...]] = ()
    formula: ClassVar[str]
    paper: ClassVar[str]
    extrapolates: ClassVar[str]
    ends_with_table: ClassVar[bool] = False
    silent: ClassVar[bool] = True
    uses_table: ClassVar[bool] = False
    reads_table: ClassVar[bool] = False
    unties_cls: ClassVar[bool] = False
    reads_positions: ClassVar[bool] = True
    # What ran when the class was defined: the code of its file, which registration compares with the file as it is then.
    _code_of_file: ClassVar[CodeType | None] = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        own = frame is not None and frame.f_globals.get("__name__") == cls.__module__
        cls._code_of_file = frame.f_code if own else None

    def __init__(self, config):
        """Read the flags from `config`; raises ValueError for values that the scheme cannot take."""
        for flag in self.flags:
            value = getattr(config, flag.name, None)
            setattr(self, flag.attribute, flag.default if value is None else value)
        self.read(config)
        self.check(config)

    def read(self, config) -> None:
        """Set what else the scheme needs to know of the model; anything may still be wrong with it."""

    def check(self, config) -> None:
        """Raise ValueError, naming the flag, where the flags do not fit each other or the model's sizes."""

    def settings(self) -> dict[str, Any]:
        """What the scheme computes with, beside its parameters and how they start: two with equal settings compute the same."""
        return {name: value for name, value in vars(self).items() if name != "init"}

    def starts_silent(self) -> bool:
        """Whether the scheme, with its flags as they are, keeps the function of a checkpoint that it is added to."""
        return self.silent and getattr(self, "init", "silent") == "silent"

    def starts_silent_beside(self, trained: set[str]) -> bool:
        """Whether the scheme keeps the function of a checkpoint that was trained with the schemes `trained`, which stay."""
        return self.starts_silent()


class EmbeddingScheme(PositionScheme):
    """Positions as vectors that join the word embeddings.

    Attributes:
        adds_vectors: there are such vectors.
    """

    adds_vectors: ClassVar[bool] = True
    # Of schemes that do not have all of the flags.
    combine, width, every_layer, every_layer_weight = "add", 0, False, 0.0
    flags = (
        Flag(
            "position_combine",
            Choice(("add", "concat", "gate", "attention")),
            "add",
            "how positions join the word embedding; each starts as the sum",
        ),
        Flag(
            "position_width",
            Integer(0),
            0,
            "concat: features of the hidden state that are the position's alone, nothing being projected; 0: all are both's",
        ),
        Flag("position_every_layer", Boolean(), False, "add the positions again before every layer but the first"),
        Flag(
            "position_every_layer_weight",
            Number(0),
            0.0,
            "what positions are multiplied with before every layer, at the start",
        ),
    )

    def check(self, config) -> None:
        if self.every_layer_weight and not self.every_layer:
            raise ValueError(
                f"position_every_layer_weight={self.every_layer_weight} has no use without position_every_layer=True"
            )
        if self.width and self.combine != "concat":
            raise ValueError(
                f"position_width={self.width} has no use with position_combine={self.combine!r}: it belongs to 'concat'"
            )
        width = config.sizes.table_width
        if self.width >= width:
            raise ValueError(
                f"position_width must be less than the {width} features of the word embeddings, got {self.width}"
            )

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings().items() if name != "every_layer_weight"}

    def starts_silent(self) -> bool:
        return super().starts_silent() and not self.width and not self.every_layer_weight

    def add_parameters(self, embeddings: nn.Module, config) -> None:
        """Register the scheme's parameters on the embeddings module."""

    def vectors(self, embeddings: nn.Module, position_ids: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        """Position vectors (batch or 1, length, width); the width is `embeddings.table_width`.

        Args:
            position_ids: int64 (batch or 1, length) as the caller gave them or as the family counts them, or None.
            slots: int64 (1, length), indices of the tokens in the sequence, the cache counted in.
        """
        raise NotImplementedError


class AttentionScheme(PositionScheme):
    """Positions inside the self-attention: rotated queries and keys, score terms, value-side terms.

    Attributes:
        backends: attention implementations that can carry the scheme.
        adds_scores: the scheme has terms of the attention score; one without, which rotates queries and keys, is carried by all.
        reads_key_positions: the scheme asks where keys are, those in a cache too, and not where queries are alone.
        pure_relative: outputs depend on differences of positions alone.
        reads_content: it multiplies queries or keys, or rotates them; where no scheme does, they may have another basis.
    """

    backends: ClassVar[tuple[str, ...]] = ("sdpa", "flex_attention", "eager")
    adds_scores: ClassVar[bool] = True
    reads_key_positions: ClassVar[bool] = True
    pure_relative: ClassVar[bool] = True
    reads_content: ClassVar[bool] = True

    def add_encoder_parameters(self, encoder: nn.Module, config) -> None:
        """Register parameters that all layers share."""

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        """Register the parameters of one self-attention."""

    def scaling(self, scaling: float) -> float:
        """Factor of the content score q·k, given the model's own."""
        return scaling

    @classmethod
    def scales_content(cls) -> bool:
        """Whether the scheme, with some value of its flags, scales the content score."""
        return cls.scaling is not AttentionScheme.scaling

    @property
    def rotates(self) -> bool:
        """Whether the scheme changes queries and keys."""
        return type(self).rotate is not AttentionScheme.rotate

    def prepare(self, positions: Positions, dtype: torch.dtype) -> Any:
        """What depends neither on the layer nor on a parameter, once per forward: a tensor or tuple of tensors."""
        return None

    def rotate(self, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key, (batch, heads, length, head_dim), changed before they are cached."""
        return context.query, context.key

    def keep(self, context: AttentionContext) -> torch.Tensor | None:
        """What a cache keeps of each token beside its key, (batch, any, query); `context.kept` in `terms` has it of all keys."""
        return None

    def content_query(self, attention: nn.Module, query: torch.Tensor) -> torch.Tensor:
        """The query of the content score, where it is another than that of the score terms."""
        return query

    def terms(self, context: AttentionContext) -> list[RelativeTerm | PairTerm | ProductTerm | SumTerm]:
        """The scheme's terms of the attention score in this layer."""
        return []
