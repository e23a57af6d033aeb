"""The embeddings of a model with a position scheme: token embedding, positions added to it, token types, LayerNorm, dropout."""

from typing import ClassVar

import torch
from torch import nn

from ..extras import EXTRAS
from ..schemes.base import EmbeddingScheme
from ..schemes.parameters import Identity, Normal, PositionLinear, zeros
from ..schemes.per_sample import may_be_measured, refuse_if_measured
from ..stock_interface import past_length_in
from ..torch_state import is_traced
from .family import Family


class Add:
    """w + p."""

    def add_parameters(self, embeddings: nn.Module, width: int, initializer_range: float) -> None:
        pass

    def combine(self, embeddings: nn.Module, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return words + positions


class Concat(Add):
    """W [w; p] + b, `position_projection` (width, 2·width), W = [I, I] at the start."""

    def add_parameters(self, embeddings: nn.Module, width: int, initializer_range: float) -> None:
        embeddings.position_projection = PositionLinear(2 * width, width, Identity())

    def combine(self, embeddings: nn.Module, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return embeddings.position_projection(torch.cat([words, positions.expand_as(words)], dim=-1))


class SideBySide(Add):
    """[w; p]: the last `position_width` features are the position's, the others the word's; the rest of both has no use here.

    Positions come with zeros where the word's features are.
    """

    def __init__(self, width: int):
        self.width = width

    def combine(self, embeddings: nn.Module, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.cat([words[..., : -self.width], positions.expand_as(words)[..., -self.width :]], dim=-1)


class Gate(Add):
    """w + g ⊙ p with g = 2σ(W [w; p] + b), `position_gate` (width, 2·width), W = 0 and so g = 1 at the start."""

    def add_parameters(self, embeddings: nn.Module, width: int, initializer_range: float) -> None:
        embeddings.position_gate = PositionLinear(2 * width, width, zeros)

    def combine(self, embeddings: nn.Module, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        gate = embeddings.position_gate(torch.cat([words, positions.expand_as(words)], dim=-1))
        return words + 2 * gate.sigmoid() * positions


class Attention(Add):
    """Σ_s a_s V(s) over s in {w, p}, a = softmax_s(Q(w)·K(s)/√width): the query is the token, keys are token and position.

    `position_query` starts at 0 (both answers weigh one half), `position_key` normal, `position_value` at twice the
    identity: w + p.
    """

    def add_parameters(self, embeddings: nn.Module, width: int, initializer_range: float) -> None:
        embeddings.position_query = PositionLinear(width, width, zeros)
        embeddings.position_key = PositionLinear(width, width, Normal(initializer_range))
        embeddings.position_value = PositionLinear(width, width, Identity(2.0))

    def combine(self, embeddings: nn.Module, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        sources = torch.stack([words, positions.expand_as(words)], dim=-2)  # (batch, length, 2, width)
        query = embeddings.position_query(words)[..., None]
        scores = embeddings.position_key(sources) @ query / words.shape[-1] ** 0.5  # (batch, length, 2, 1)
        return (scores.softmax(dim=-2) * embeddings.position_value(sources)).sum(dim=-2)


def number_of_rows(table: nn.Module, width: int) -> int | None:
    """Rows of an embedding, or of what replaces it (LoRA's wrapper, a quantised one), as it is now.

    Args:
        width: of its vectors.

    Returns:
        None where nothing of the module tells.
    """
    # A quantised weight may be packed, or a method; one that is spread over processes (ZeRO) has no rows itself.
    shape = getattr(getattr(table, "weight", None), "shape", ())
    if len(shape) == 2 and shape[1] == width:
        return shape[0]
    return next((part.num_embeddings for part in table.modules() if hasattr(part, "num_embeddings")), None)


COMBINE = {"add": Add, "concat": Concat, "gate": Gate, "attention": Attention}


class PositionEmbeddings:
    """Mixin over a family's original embeddings; [`modeling_posenc.install_positions`] turns the original module into it.

    Attributes:
        family: the family's description.
        position_scheme: the embedding-level scheme, or None.
        first_position: the family's first position id.
        padding_token: the id of padding.
        scheme_modules: names of the modules that the scheme has here.
        table_width: width of the word embeddings and of the table of absolute positions.
        built_rows: rows that this table was built with.
    """

    family: ClassVar[Family]
    position_scheme: EmbeddingScheme | None
    first_position: int
    padding_token: int | None
    scheme_modules: tuple[str, ...] = ()
    table_width: int
    built_rows: int

    @property
    def words(self) -> nn.Module:
        """The token embedding matrix."""
        return getattr(self, self.family.words)

    @property
    def table(self) -> nn.Module:
        """The table of absolute positions, where there is one."""
        return getattr(self, self.family.table)

    @property
    def has_table(self) -> bool:
        """Whether there is a table of absolute positions."""
        return hasattr(self, self.family.table)

    @property
    def fills_table(self) -> bool:
        """Whether that table starts as Transformers' does."""
        return self.has_table and "position_initial" not in vars(self.table)

    def install(self, config, scheme: EmbeddingScheme | None, keep_table: bool) -> None:
        """Put a scheme in place of the original table of positions, which stays if `keep_table`."""
        self.position_scheme = scheme
        self.first_position = config.sizes.first_position
        self.padding_token = self.family.setting(config, "pad_token_id")
        # Kept: what replaces a table later need not say either.
        self.table_width, self.built_rows = config.sizes.table_width, config.sizes.max_position_embeddings
        self.position_combine = None
        if scheme is not None:
            before = {*self._modules}
            with EXTRAS.nothing_replaced(scheme, self):
                scheme.add_parameters(self, config)
            self.scheme_modules = tuple(name for name in self._modules if name not in before)
            self.position_combine = SideBySide(scheme.width) if scheme.width else COMBINE[scheme.combine]()
            self.position_combine.add_parameters(self, self.table_width, config.sizes.initializer_range)
        if not keep_table:
            delattr(self, self.family.table)

    def family_position_ids(self, input_ids: torch.Tensor | None, past_length: int) -> torch.Tensor | None:
        """Position ids (batch, length) as the family counts them for its table, or None where they are the slots."""
        return None

    def table_position_ids(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        slots: torch.Tensor,
        past_length: int | torch.Tensor = 0,
    ) -> torch.Tensor | None:
        """The rows of the table, (batch or 1, length), that the embedding-level scheme adds; None where they are the slots.

        Args:
            position_ids: as the caller of the model gave them, or None.
            slots: see [`slots`].

        Raises:
            ValueError: as [`check_length`].
        """
        if position_ids is None:
            position_ids = self.family_position_ids(input_ids, past_length)
        self.check_length(slots.shape[1], past_length, position_ids)
        if self.position_scheme.stride > 1:
            return self.position_scheme.strided(self, input_ids, position_ids, slots)
        return position_ids

    def table_length(self) -> int:
        """Number of positions that the table of absolute positions has for a sequence."""
        return (number_of_rows(self.table, self.table_width) or self.built_rows) - self.first_position

    def check_length(self, length: int, past_length: int, position_ids: torch.Tensor | None) -> None:
        """Raise ValueError for positions beyond the table of absolute positions."""
        if position_ids is not None:
            # Reading the values would stall a GPU and break a trace; there Transformers' lookup stays as it is.
            if position_ids.device.type != "cpu" or is_traced():
                return
            if position_ids.numel() == 0:
                return
            length, past_length = int(position_ids.max()) - self.first_position + 1, 0
        if isinstance(past_length, torch.Tensor) and past_length.device.type == "cpu" and not is_traced():
            past_length = int(past_length)  # a static cache counts in a tensor
        if isinstance(past_length, int) and length + past_length > self.table_length():
            raise ValueError(
                f"a sequence of {length + past_length} tokens is longer than the position embedding matrix, which has "
                f"{self.table_length()} rows; without 'absolute' and 'tupe', every position_scheme goes further: "
                "sinusoidal, t5, rope, alibi, relative, deberta, ..."
            )

    def position_vectors(
        self, position_ids: torch.Tensor | None, length: int, past_length: int, device: torch.device
    ) -> torch.Tensor:
        """Vectors (batch or 1, length, width) of the embedding-level scheme; zeros where features are the word's alone."""
        vectors = self.position_scheme.vectors(self, position_ids, self.slots(length, past_length, device))
        own = self.position_scheme.width
        if not own:
            return vectors
        return nn.functional.pad(vectors[..., -own:], (self.table_width - own, 0))

    def _refuse_measured(self, is_once: bool) -> None:
        """Raise ValueError where gradients of each sample are computed of what is used once for a batch.

        Args:
            is_once: the rows of the table are.
        """
        for name in self.scheme_modules:
            refuse_if_measured(getattr(self, name), name)
        if is_once and self.has_table:
            remedy = "give position_ids of (batch, length), "
            refuse_if_measured(self.table, "the position embedding matrix", remedy)

    def slots(self, length: int, past_length: int, device: torch.device) -> torch.Tensor:
        """Indices of tokens in the sequence, (1, length)."""
        return torch.arange(length, device=device)[None, :] + past_length

    def types(self, token_type_ids: torch.LongTensor | None, words: torch.Tensor) -> torch.Tensor | None:
        """Vectors (batch, length, width) of the tokens' types, or None in families without."""
        if self.family.token_types is None:
            return None
        # The original embeddings look default types up in a buffer of max_position_embeddings; these have no such end.
        if token_type_ids is None:
            token_type_ids = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
        return getattr(self, self.family.token_types)(token_type_ids)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *args,
        **kwargs,
    ) -> torch.Tensor:
        past_length = past_length_in(args, kwargs)
        words = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        length = words.shape[1]
        types = self.types(token_type_ids, words)

        if self.position_scheme is None:
            hidden_states = words if types is None else words + types
        else:
            if self.position_scheme.uses_table:
                slots = self.slots(length, past_length, words.device)
                position_ids = self.table_position_ids(input_ids, position_ids, slots, past_length)
            if may_be_measured(self):
                self._refuse_measured(is_once=len(words) > 1 and (position_ids is None or len(position_ids) == 1))
            positions = self.position_vectors(position_ids, length, past_length, words.device)
            if type(self.position_combine) is Add:
                # Transformers' order of summation, for Transformers' bits.
                hidden_states = (words if types is None else words + types) + positions
            else:
                hidden_states = self.position_combine.combine(self, words, positions)
                hidden_states = hidden_states if types is None else hidden_states + types
        return self.dropout(self.LayerNorm(hidden_states))


class PaddedPositionEmbeddings(PositionEmbeddings):
    """Mixin over the embeddings of RoBERTa-like families: positions count from padding_idx + 1, and padding has position padding_idx."""

    def family_position_ids(self, input_ids: torch.Tensor | None, past_length: int) -> torch.Tensor | None:
        if input_ids is None:
            return None
        return self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_length)
