"""The self-attention with schemes: what it projects, rotates and passes to a backend."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.cache_utils import Cache

from ..attention.backends import Attention, attend
from ..attention.cached_positions import keep_beside, past_length_of, self_attention_cache
from ..attention.window import reach_of
from ..extras import EXTRAS
from ..masks import Mask, Window
from ..schemes.base import AttentionContext, AttentionScheme
from ..schemes.terms import Term
from ..stock_interface import Receives, stock_forward
from ..torch_state import is_exporting, is_traced
from .family import Family


# Under these names the encoder, which has the parameters that layers share, and the embeddings, which have the table of
# absolute positions, come to each layer in addition to the schemes' own.
ENCODER, EMBEDDINGS = "encoder", "embeddings"


class ModuleReference:
    """A reference to a module, as an argument of a layer, that accelerate does not move.

    accelerate moves what has a `to` to the layer's device, and a module would go along.
    """

    def __init__(self, module: nn.Module | None):
        self.module = module


class PositionSelfAttention:
    """Mixin over a family's original self-attention; [`modeling_posenc.install_positions`] turns the original module into it.

    Attributes:
        family: the family's description.
        position_schemes: the attention-level schemes, in the order of `position_scheme`.
        reach: how many tokens away keys are seen; None for all.
        receives: how the original self-attention is called.
    """

    family: ClassVar[Family]
    receives: ClassVar[Receives]
    position_schemes: tuple[AttentionScheme, ...]
    reach: int | None = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "receives" not in vars(cls):
            cls.receives = Receives.of(stock_forward(cls))

    @property
    def query_projection(self) -> nn.Module:
        return getattr(self, self.family.query)

    @property
    def key_projection(self) -> nn.Module:
        return getattr(self, self.family.key)

    @property
    def value_projection(self) -> nn.Module:
        return getattr(self, self.family.value)

    @property
    def num_heads(self) -> int:
        return getattr(self, self.family.heads_count)

    @property
    def head_dim(self) -> int:
        return getattr(self, self.family.head_dim)

    def install(self, config, layer: int, schemes: tuple[AttentionScheme, ...], eager: Callable) -> None:
        """Register the schemes' parameters of a layer."""
        self.position_schemes = schemes
        self.reach = reach_of(config, layer)
        self._eager = eager
        for scheme in schemes:
            with EXTRAS.nothing_replaced(scheme, self):
                scheme.add_layer_parameters(self, config)
            self.scaling = scheme.scaling(self.scaling)

    def project(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_state: dict | None,
        packing: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[AttentionContext]]:
        """Query, key and value as the schemes rotate them, and each scheme's context.

        They have the shape (batch, heads, length, head_dim), or packed (1, heads, tokens, head_dim).
        """
        if self.position_schemes and position_state is None:
            raise ValueError(
                "this self-attention has position schemes: call its model or encoder, which knows positions"
            )
        hidden_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.query_projection(hidden_states).view(*hidden_shape).transpose(1, 2)
        key = self.key_projection(hidden_states).view(*hidden_shape).transpose(1, 2)
        value = self.value_projection(hidden_states).view(*hidden_shape).transpose(1, 2)
        is_unpacked = packing is not None and any(scheme.rotates for scheme in self.position_schemes)
        if is_unpacked:
            query, key = packing.pad_heads(query), packing.pad_heads(key)
        where = attention_mask, position_state, hidden_states, packing
        query, key, contexts = self.rotate(query, key, *where)
        if is_unpacked:
            query, key = packing.unpad_heads(query), packing.unpad_heads(key)
        return query, key, value, contexts

    def rotate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_state: dict | None,
        hidden_states: torch.Tensor,
        packing: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[AttentionContext]]:
        """Query and key, (batch, heads, length, head_dim), as the schemes rotate them, and each scheme's context.

        Args:
            hidden_states: that they were projected from; packed where there is a packing.
        """
        contexts = []
        for scheme in self.position_schemes:
            modules = self, position_state[ENCODER].module, position_state[EMBEDDINGS].module
            own = *position_state[scheme.key], hidden_states, packing
            context = AttentionContext(*modules, query, key, attention_mask, *own)
            if scheme.rotates:
                query, key = EXTRAS.checked_rotation(scheme, scheme.rotate(context), query, key)
            context.kept = scheme.keep(context)
            contexts.append(context)
        return query, key, contexts

    def terms_by_scheme(
        self, query: torch.Tensor, key: torch.Tensor, contexts: list[AttentionContext]
    ) -> Iterator[tuple[AttentionScheme, torch.Tensor, list[Term]]]:
        """Each scheme, the query of the content score with it and those before it, and its score terms.

        Query and key are as they are rotated.
        """
        content_query = query
        for scheme, context in zip(self.position_schemes, contexts, strict=True):
            context.query, context.key = query, key
            content_query = scheme.content_query(self, content_query)
            yield scheme, content_query, EXTRAS.checked_terms(scheme, scheme.terms(context))

    def score_terms(
        self, query: torch.Tensor, key: torch.Tensor, contexts: list[AttentionContext]
    ) -> tuple[torch.Tensor, list[Term]]:
        """The query of the content score, and the score terms of all schemes, given query and key as they are rotated."""
        content_query, terms = query, []
        for _, with_scheme, own in self.terms_by_scheme(query, key, contexts):
            content_query, terms = with_scheme, terms + own
        return content_query, terms

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args,
        position_state: dict | None = None,
        packing: Any = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attention_mask, cache, kwargs = self.receives.mask_and_cache(args, kwargs)
        input_shape = hidden_states.shape[:-1]
        query, key, value, contexts = self.project(hidden_states, attention_mask, position_state, packing)
        window = self.window_beside(cache)
        if cache is not None:
            key, value = self_attention_cache(cache).update(key, value, self.layer_idx)
            for scheme, context in zip(self.position_schemes, contexts):
                if context.kept is not None:
                    own = scheme.name, context.kept, context.positions.offset
                    context.kept = keep_beside(cache, self.layer_idx, *own)
        content_query, terms = self.score_terms(query, key, contexts)
        implementation = "eager" if kwargs.pop("wants_weights", False) else self.config._attn_implementation
        if window and not is_traced() and window.sees_all(key.shape[2]):
            window = None
        mask = Mask.of(attention_mask, query, key, getattr(self, "is_causal", False), window, packing)
        mask.check()
        dropout = self.dropout.p if self.training else 0.0
        given = implementation, content_query, query, key, value, terms, mask, self.scaling, dropout
        output, weights = attend(Attention(self, *given, eager=self._eager, settings=kwargs))
        if is_exporting():
            # The kernel that is traced leaves this layout, so that no copy is recorded; the one it is decomposed to
            # (ONNX) leaves another, and the view below would not fit it.
            output = output.clone(memory_format=torch.contiguous_format)
        output = output.reshape(*input_shape, -1).contiguous()
        if self.family.output is not None:
            output = getattr(self, self.family.output)(output)
        return output, weights

    def window_beside(self, cache: Cache | None = None) -> Window | None:
        """What the queries see that come after a cache; None for everything.

        Raises:
            ValueError: the cache forgets its first tokens: how far away the others are is not known.
        """
        if self.reach is None or cache is None:
            return None if self.reach is None else Window(self.reach)
        return Window(self.reach, past_length_of(cache, self.layer_idx))
