"""What a position scheme is: the two base classes, and the context that a scheme gets.

A scheme object holds its options and nothing else. Its parameters live on the original modules (`embeddings`, `encoder`,
`encoder.layer.N.attention.self`) in modules whose names are part of the checkpoint format, so a scheme registers them
there and calls them there. Adding a scheme is one file with a subclass and a line in built_in.py.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import nn

from .flags import Boolean, Choice, Flag, Integer, Number
from .positions import Positions
from .terms import Term


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


class PositionScheme:
    """What all schemes have: a name, options, and a word about themselves.

    Attributes:
        name: the name in `position_scheme`.
        flags: the options that apply to the scheme.
        formula, paper: one line each, for the tables that people read.
        extrapolates: for people, what happens to sequences longer than those of training.
        ends_with_table: sequences longer than the table of absolute positions are refused.
        silent: whether the scheme, added to what a checkpoint has, can start output-preserving.
        uses_table: the vectors that are added to the token embeddings are the rows of the original table of absolute positions.
        reads_table: the scheme reads that table inside the attention.
        unties_cls: [CLS] stands outside the order of the tokens, for the schemes combined with this one too (TUPE).
        reads_positions: it reads where a caller says that tokens are, by `position_ids`.
        distillation_rate: the learning rate of a conversion to the scheme; None for that of all.
        orders_heads: its start puts attention heads in another order, for which SciPy is needed.
    """

    name: ClassVar[str]
    flags: ClassVar[tuple[Flag, ...]] = ()
    formula: ClassVar[str]
    paper: ClassVar[str]
    extrapolates: ClassVar[str]
    ends_with_table: ClassVar[bool] = False
    silent: ClassVar[bool] = True
    uses_table: ClassVar[bool] = False
    reads_table: bool = False
    unties_cls: bool = False
    reads_positions: ClassVar[bool] = True
    distillation_rate: ClassVar[float | None] = None
    orders_heads: ClassVar[bool] = False
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
        """Read the options from `config`; raises ValueError for values that the scheme cannot take."""
        for flag in self.flags:
            value = getattr(config, flag.name, None)
            setattr(self, flag.attribute, flag.default if value is None else value)
        self.read(config)
        self.check(config)

    def read(self, config) -> None:
        """Set what else the scheme needs to know of the model; anything may still be wrong with it."""

    def check(self, config) -> None:
        """Raise ValueError, naming the option, where the options do not fit each other or the model's sizes."""

    def settings(self) -> dict[str, Any]:
        """What the scheme computes with, except its parameters and how they start: two with equal settings compute the same."""
        return {name: value for name, value in vars(self).items() if name != "init"}

    @classmethod
    def reads_option(cls, name: str) -> bool:
        """Whether a config option is one of the scheme's."""
        return any(flag.name == name for flag in cls.flags)

    @classmethod
    def conversion_options(cls, aims: Any) -> dict[str, Any]:
        """Config options that a conversion to the scheme chooses, where its caller gives none of them.

        Args:
            aims: `hf_posenc.conversion.start.Aims`. It is called twice: before weights are loaded, and after, with the teacher.
        """
        return {}

    def initialize_from(self, start: Any) -> None:
        """Set what can be kept of a teacher's positions without training, in a student that has just been given the scheme.

        Called in a conversion, without gradients, before score terms are fitted to the teacher's attention.

        Args:
            start: `hf_posenc.conversion.start.Start`: both models, text, and tools.
        """

    def starts_silent(self) -> bool:
        """Whether the scheme, with its options as they are, keeps the function of a checkpoint that it is added to."""
        return self.silent and getattr(self, "init", "silent") == "silent"

    def starts_silent_beside(self, trained: set[str]) -> bool:
        """Whether the scheme keeps the function of a checkpoint that was trained with the schemes `trained`, which stay."""
        return self.starts_silent()


class EmbeddingScheme(PositionScheme):
    """Positions as vectors that are added to the token embeddings.

    Attributes:
        adds_vectors: there are such vectors.
    """

    adds_vectors: ClassVar[bool] = True
    # Of schemes that do not have all of the options.
    combine, width, every_layer, every_layer_weight = "add", 0, False, 0.0
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "position_combine",
            Choice(("add", "concat", "gate", "attention")),
            "add",
            "how positions are combined with the token embeddings; each starts as the sum",
        ),
        Flag(
            "position_width",
            Integer(0),
            0,
            "with concat: number of hidden features that hold positions only, without a projection; 0: all features hold both",
        ),
        Flag("position_every_layer", Boolean(), False, "add the positions again before every layer but the first"),
        Flag(
            "position_every_layer_weight",
            Number(0),
            0.0,
            "initial weight of the positions that are added before every layer",
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

    def initialize_from(self, start: Any) -> None:
        start.fold_mean()


class AttentionScheme(PositionScheme):
    """Positions inside the self-attention: rotated queries and keys, score terms, value-side terms.

    Attributes:
        backends: attention implementations that support the scheme.
        adds_scores: the scheme has terms of the attention score; one without, which rotates queries and keys, is supported by all.
        reads_key_positions: the scheme reads where keys are, those in a cache too, and not where queries are alone.
        pure_relative: outputs depend on differences of positions alone.
        table_has_versions: with buckets, 0.3.0 and earlier read its matrix in another way; see [`Deberta`].
        reads_content: it multiplies queries or keys, or rotates them; where no scheme does, they may have another basis.
    """

    backends: ClassVar[tuple[str, ...]] = ("sdpa", "flex_attention", "eager")
    adds_scores: ClassVar[bool] = True
    reads_key_positions: ClassVar[bool] = True
    pure_relative: ClassVar[bool] = True
    table_has_versions: ClassVar[bool] = False
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
        """Whether the scheme, with some value of its options, scales the content score."""
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
        """What a cache keeps of each token in addition to its key, (batch, any, query); `context.kept` in `terms` has it of all keys."""
        return None

    def content_query(self, attention: nn.Module, query: torch.Tensor) -> torch.Tensor:
        """The query of the content score, where it is another than that of the score terms."""
        return query

    def terms(self, context: AttentionContext) -> Sequence[Term]:
        """The scheme's terms of the attention score in this layer."""
        return []
