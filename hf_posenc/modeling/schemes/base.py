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
    """The argument of a scheme's `rotate`, `keep` and `terms`: modules, states and positions of one layer in one forward pass.

    In a padding-free forward pass the layer's states are packed: the tokens of all sequences, without padding, in one row.

    Attributes:
        attention: the layer's self-attention module. It has what `add_layer_parameters` registered.
        encoder: the encoder module. It has what `add_encoder_parameters` registered.
        embeddings: the embeddings module, which has the position embedding matrix. None if no scheme of the model has `reads_table`.
        query: (batch, heads, query, head_dim). In `rotate`: as projected, and rotated by the schemes before this one. In `terms`: rotated by
            all schemes, and if packed, (1, heads, tokens, head_dim). So do not compute with it in `terms`: return a term that says what
            to multiply it with.
        key: (batch, heads, key, head_dim), as for `query`. In `terms`, keys from a cache are included.
        attention_mask: the mask that the layer was called with. To find padding or documents, use `positions`.
        positions: the positions of queries and keys. If the scheme has `reads_table`, they are row numbers of the position embedding matrix.
        prepared: what the scheme's `prepare` returned.
        hidden_states: the layer's input, (batch, query, hidden_size), or packed, (1, tokens, hidden_size). [`padded`] restores the batch.
        packing: how the states are packed. None if they are not.
        kept: in `terms`, what the scheme's `keep` returned, for all keys, those from a cache included. None if it returned None.
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
        """Restore the batch of what was computed from `hidden_states`.

        Args:
            states: a vector for each token of `hidden_states`: (batch, query, width), or packed, (1, tokens, width).

        Returns:
            (batch, query, width). If the states were packed, it is zero at padding.
        """
        return states if self.packing is None else self.packing.pad_input(states)


class PositionScheme:
    """Base class of all position schemes. Derive from [`AttentionScheme`] or [`EmbeddingScheme`].

    A scheme object holds the values of its config options, as attributes without the prefix `position_`. It holds no parameters: these are
    registered on the modules of the model.

    Attributes:
        name: the name in `position_scheme`.
        flags: the config options of the scheme.
        formula: what it computes, in one line, for tables and model cards.
        paper: authors, year and arXiv number, in one line.
        extrapolates: what happens in sequences longer than those of training, in one line.
        ends_with_table: True if sequences longer than the position embedding matrix are refused.
        silent: True if the scheme is output-preserving at initialization, when it is added to a checkpoint.
        uses_table: True if the vectors that it adds to the token embeddings are the rows of the original position embedding matrix.
        reads_table: True if it reads the original position embedding matrix inside the attention.
        unties_cls: True if it treats [CLS] apart from all positions, as TUPE does. `t5` in the same model then has no bias for pairs with
            [CLS].
        reads_positions: False if outputs do not depend on `position_ids`.
        distillation_rate: the learning rate of a conversion to the scheme. None: the default rate.
        orders_heads: True if `initialize_from` changes the order of attention heads, which needs SciPy.
        is_global: set by the model: True if the object belongs to global layers, and local layers have another object of the same scheme.
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
    is_global: bool = False
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
        """Set the attributes of the config options, then call `read` and `check`.

        Args:
            config: the model's config. An option that is None there has its default.

        Raises:
            ValueError: the options do not fit each other or the model.
        """
        for flag in self.flags:
            value = getattr(config, flag.name, None)
            setattr(self, flag.attribute, flag.default if value is None else value)
        self.read(config)
        self.check(config)

    def read(self, config) -> None:
        """Set further attributes from the config, such as `config.sizes.hidden_size`. It runs before [`check`]."""

    def check(self, config) -> None:
        """Raise ValueError, with the name of the option, if the options do not fit each other or the model's sizes."""

    @property
    def key(self) -> str:
        """A name that is unique among the scheme objects of a model."""
        return f"{self.name} of global layers" if self.is_global else self.name

    def settings(self) -> dict[str, Any]:
        """All attributes that change what the scheme computes, without its parameters and their initialization.

        Two objects of a scheme with equal settings compute the same from the same parameters.
        """
        return {name: value for name, value in vars(self).items() if name != "init"}

    @classmethod
    def reads_option(cls, name: str) -> bool:
        """True if the scheme has the config option of this name."""
        return any(flag.name == name for flag in cls.flags)

    @classmethod
    def conversion_options(cls, aims: Any) -> dict[str, Any]:
        """Choose config options for a conversion to the scheme. Those that the caller gives take precedence.

        It is called twice: before weights are loaded, with `aims.teacher` None, and afterwards.

        Args:
            aims: `hf_posenc.conversion.start.Aims`: the given options, the schemes, the training length and maximum sequence length in tokens,
                and the teacher.

        Returns:
            Names of config options and their values.
        """
        return {}

    def initialize_from(self, start: Any) -> None:
        """Set parameters of a student from its teacher's positions, at the start of a conversion.

        It is called without gradients, if the scheme is new to the student. Parameters of score terms are fitted later. The default
        changes nothing in an [`AttentionScheme`]. In an [`EmbeddingScheme`], it adds the mean position embedding to the token embeddings.

        Args:
            start: `hf_posenc.conversion.start.Start`: the student, the teacher, text, and methods that change the student.
        """

    def starts_silent(self) -> bool:
        """True if the scheme, with these options, is output-preserving at initialization, when it is added to a checkpoint."""
        return self.silent and getattr(self, "init", "silent") == "silent"

    def starts_silent_beside(self, trained: set[str]) -> bool:
        """True if the scheme, with these options, is output-preserving at initialization, next to certain schemes of the checkpoint.

        Args:
            trained: names of the schemes that the checkpoint was trained with and the new model keeps.
        """
        return self.starts_silent()


class EmbeddingScheme(PositionScheme):
    """Base class of schemes that make a vector for each position, which is combined with the token embedding.

    A model has at most one such scheme. By default, it has the options `position_combine`, `position_width`, `position_every_layer` and
    `position_every_layer_weight`.

    Attributes:
        adds_vectors: False if there are no vectors (the scheme `none`).
    """

    adds_vectors: ClassVar[bool] = True
    # Of schemes that do not have all of the options.
    combine, width, every_layer, every_layer_weight = "add", 0, False, 0.0
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "position_combine",
            Choice(("add", "concat", "gate", "attention")),
            "add",
            "how positions are combined with the token embeddings; all initially compute their sum",
        ),
        Flag(
            "position_width",
            Integer(0),
            0,
            "with concat: number of features reserved for positions, without a projection; 0: none",
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
        """Register the scheme's parameters on the embeddings module.

        Args:
            embeddings: the embeddings module of the family.
            config: the model's config; `config.sizes.table_width` is the width of the token embeddings.
        """

    def vectors(self, embeddings: nn.Module, position_ids: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        """Compute the position vectors.

        Args:
            embeddings: the embeddings module. `embeddings.first_position` is the family's first position id.
            position_ids: int64 (batch or 1, length), as the caller of the model gave them, else None. If the scheme has `uses_table`,
                RoBERTa-like families count them from the tokens if none are given.
            slots: int64 (1, length), the index of each token in the sequence, tokens in a cache counted.

        Returns:
            (batch or 1, length, `embeddings.table_width`). With `position_width`, only the last `position_width` features are used.
        """
        raise NotImplementedError

    def initialize_from(self, start: Any) -> None:
        start.fold_mean()


class AttentionScheme(PositionScheme):
    """Base class of schemes inside the self-attention: score terms, vectors added to values, rotation of queries and keys.

    The score of query i and key j is q_i·k_j/√head_dim plus the terms of all schemes.

    Attributes:
        backends: the values of `attn_implementation` that support the scheme.
        adds_scores: False if the scheme has no score terms and only rotates queries and keys. Every backend supports such a scheme.
        reads_key_positions: False if it needs no positions of keys in a cache, for example because it rotates keys before they are cached.
        pure_relative: True if outputs depend on differences of positions only.
        table_has_versions: True if its matrix is read by `position_table_version` of the config (only [`Deberta`]).
        reads_content: False if it neither multiplies nor rotates queries and keys. If no scheme of a model does, conversion may change the
            basis of their features.
    """

    backends: ClassVar[tuple[str, ...]] = ("sdpa", "flex_attention", "eager")
    adds_scores: ClassVar[bool] = True
    reads_key_positions: ClassVar[bool] = True
    pure_relative: ClassVar[bool] = True
    table_has_versions: ClassVar[bool] = False
    reads_content: ClassVar[bool] = True

    def add_encoder_parameters(self, encoder: nn.Module, config) -> None:
        """Register parameters that all layers share, on the encoder module. Read them from `context.encoder`."""

    def add_layer_parameters(self, attention: nn.Module, config) -> None:
        """Register the parameters of one layer, on its self-attention module. Read them from `context.attention`."""

    def scaling(self, scaling: float) -> float:
        """The factor of the content score q·k.

        Args:
            scaling: the factor without the scheme, in the original model 1/√head_dim.
        """
        return scaling

    @classmethod
    def scales_content(cls) -> bool:
        """True if the scheme overrides [`scaling`]."""
        return cls.scaling is not AttentionScheme.scaling

    @property
    def rotates(self) -> bool:
        """True if the scheme overrides [`rotate`]."""
        return type(self).rotate is not AttentionScheme.rotate

    def prepare(self, positions: Positions, dtype: torch.dtype) -> Any:
        """Compute, once per forward pass, what depends on positions and the mask only.

        It must not use parameters, because layers that are recomputed (gradient checkpointing) reuse the result.

        Args:
            positions: the positions of queries and keys.
            dtype: that of the hidden states.

        Returns:
            A tensor or a tuple of tensors, or None. Each layer gets it as `context.prepared`.
        """
        return None

    def rotate(self, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Change query and key before they are cached.

        Args:
            context: `context.query` and `context.key` are never packed here.

        Returns:
            Query and key, of the same shape and dtype, (batch, heads, query, head_dim).
        """
        return context.query, context.key

    def keep(self, context: AttentionContext) -> torch.Tensor | None:
        """Compute what a cache stores for each token in addition to its key.

        Returns:
            (batch, any, query), or None. In [`terms`], `context.kept` has it for all keys, (batch, any, key).
        """
        return None

    def content_query(self, attention: nn.Module, query: torch.Tensor) -> torch.Tensor:
        """The query of the content score q·k. Score terms still use the query without this change.

        Args:
            attention: the layer's self-attention module.
            query: (batch, heads, query, head_dim), or packed, (1, heads, tokens, head_dim), from the schemes before this one.

        Returns:
            A tensor of the same shape.
        """
        return query

    def terms(self, context: AttentionContext) -> Sequence[Term]:
        """The terms that the scheme adds to the attention score in one layer.

        Returns:
            A list of [`RelativeTerm`], [`PairTerm`], [`ProductTerm`] and [`SumTerm`]; `context.positions.bias` makes the first two.
        """
        return []
