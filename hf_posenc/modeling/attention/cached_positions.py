"""Positions of the tokens in a cache, and what schemes keep of each. They lie in the cache itself, and so follow what is done to its
keys and values.
"""

import functools
from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache, StaticLayer


# torch.compiler.is_exporting is younger than the oldest torch supported.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


class PositionCacheLayer:
    """Mixin over a cache layer of transformers that keeps more of its tokens than their keys and values.

    Rebuilt by hand from the tensors of its layers, a cache knows nothing of it any more.

    What shortens a layer (`crop`) leaves its first tokens: [`append_positions`] and [`keep_beside`] go by their number.

    Attributes:
        positions: int64 (batch, 2, length): as the caller counts, and as the table of absolute positions does; None where
            nobody gave positions, and a token's is its index.
        kept: by the name of a scheme, what it keeps of each token, (batch, any, length).
    """

    positions: torch.Tensor | None = None
    kept: dict[str, torch.Tensor] = {}

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do to all that is kept what was done to keys and values."""
        if self.positions is not None:
            self.positions = change(self.positions)
        self.kept = {name: change(values) for name, values in self.kept.items()}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._change(lambda values: values.index_select(0, beam_idx.to(values.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change(lambda values: values.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._change(lambda values: values[indices, ...])

    def reset(self) -> None:
        super().reset()
        # A static layer keeps its memory, which is overwritten token by token.
        if not isinstance(self, StaticLayer):
            self.positions, self.kept = None, {}


class PositionDynamicLayer(PositionCacheLayer, DynamicLayer):
    """[`DynamicLayer`] that keeps positions."""


class PositionStaticLayer(PositionCacheLayer, StaticLayer):
    """[`StaticLayer`] that keeps positions."""


@functools.cache
def _with_positions(kind: type[CacheLayerMixin]) -> type[PositionCacheLayer]:
    """The class of a layer that keeps positions, for kinds other than the two above (quantized ones)."""
    return type(f"Position{kind.__name__}", (PositionCacheLayer, kind), {})


def self_attention_cache(cache: Cache) -> Cache:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def cache_lengths(cache: Cache | None, length: int) -> tuple[int | torch.Tensor, int]:
    """Number of tokens in the cache, and number of keys once the current ones are in it (empty slots of a static one too)."""
    if cache is None:
        return 0, length
    own = self_attention_cache(cache)
    past_length = own.get_seq_length()
    if isinstance(past_length, torch.Tensor):
        past_length = past_length.clone()  # a static cache counts on in the same tensor, while layers go by what was
    return past_length, own.get_mask_sizes(length, 0)[0]


def past_length_of(cache: Cache, layer: int) -> int | torch.Tensor:
    """Number of tokens that a layer has in the cache.

    Raises:
        ValueError: the layer moves along a window: the indices of its tokens are not known.
    """
    own = self_attention_cache(cache)
    if layer < len(own.layers):
        _check_layer_keeps_all(own.layers[layer])
    past_length = own.get_seq_length(layer)
    # As in `cache_lengths`.
    return past_length.clone() if isinstance(past_length, torch.Tensor) else past_length


def check_keeps_all(cache: Cache) -> None:
    """Raise ValueError if a layer moves along a window: the indices of its tokens are not known."""
    for layer in self_attention_cache(cache).layers:
        _check_layer_keeps_all(layer)


def _check_layer_keeps_all(layer: CacheLayerMixin) -> None:
    if getattr(layer, "is_sliding", False):
        raise ValueError(
            f"{type(layer).__name__} drops its first tokens: positions need a cache of whole sequences, such as "
            "DynamicCache or StaticCache"
        )


def keeps_positions(cache: Cache | None) -> bool:
    """Whether somebody gave positions to tokens of the cache."""
    layers = [] if cache is None else self_attention_cache(cache).layers
    return bool(layers) and isinstance(layers[0], PositionCacheLayer) and layers[0].positions is not None


def append_positions(
    cache: Cache, positions: torch.Tensor, past_length: int | torch.Tensor, key_length: int, first: int
) -> torch.Tensor:
    """Enter the positions of the current tokens, whose keys and values their layers are about to enter.

    Args:
        positions: int64 (batch, 2, length), see [`PositionCacheLayer`].
        past_length, key_length: as [`cache_lengths`] gives them.
        first: position of a sequence's first token, where nobody gave positions.

    Returns:
        (batch, 2, key_length), of all keys; those of empty slots are any that a table has.

    Raises:
        ValueError: the cache holds more tokens than those that it was told the positions of; it moves along a window; a program
            is exported with tokens in the cache.
    """
    if _is_exporting():
        # An exported program takes and gives caches as keys and values alone.
        if not isinstance(past_length, int) or past_length:
            raise ValueError(
                "positions of cached tokens cannot be exported: export without position_ids, or without a cache (use_cache=False)"
            )
        return positions
    layer = _keeping_layer(self_attention_cache(cache), 0)
    batch, kinds, length = positions.shape
    known = layer.positions
    if known is None:
        # Until now a token's position was its index.
        known_length = key_length if isinstance(layer, StaticLayer) else past_length
        known = torch.arange(known_length, device=positions.device) + first
        if isinstance(layer, StaticLayer):
            known = known.clamp(max=first + past_length)
        known = known.expand(batch, kinds, -1)
    if isinstance(layer, StaticLayer):
        if layer.positions is None:
            layer.positions = _static(known.contiguous())
        _overwrite(layer.positions, positions, past_length)
        return layer.positions
    layer.positions = _appended("positions", known, positions, past_length)
    return layer.positions


def keep_beside(
    cache: Cache, index: int, name: str, values: torch.Tensor, past_length: int | torch.Tensor
) -> torch.Tensor:
    """Enter what a scheme keeps of the current tokens, whose keys and values are in their layer by now.

    Args:
        index: of the layer.
        name: the scheme's.
        values: (batch, any, length).
        past_length: as [`cache_lengths`] gave it before.

    Returns:
        (batch, any, key length), of all keys; 0 in empty slots.

    Raises:
        ValueError: as for [`append_positions`].
    """
    if _is_exporting():
        if not isinstance(past_length, int) or past_length:
            raise ValueError(
                f"what {name} keeps of cached tokens cannot be exported: export without a cache (use_cache=False)"
            )
        return values
    layer = _keeping_layer(self_attention_cache(cache), index)
    known = layer.kept.get(name)
    if isinstance(layer, StaticLayer):
        if known is None:
            known = _static(values.new_zeros(*values.shape[:2], layer.max_cache_len))
            layer.kept = {**layer.kept, name: known}
        _overwrite(known, values, past_length)
        return known
    known = values[..., :0] if known is None else known
    layer.kept = {**layer.kept, name: _appended(f"what {name} keeps", known, values, past_length)}
    return layer.kept[name]


def _static(memory: torch.Tensor) -> torch.Tensor:
    """Memory of a static cache, which stays where it is."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(memory)
    return memory


def _overwrite(memory: torch.Tensor, values: torch.Tensor, past_length: int | torch.Tensor) -> None:
    slots = torch.arange(values.shape[-1], device=values.device) + past_length
    memory.index_copy_(-1, slots, values)


def _appended(what: str, known: torch.Tensor, values: torch.Tensor, past_length: int) -> torch.Tensor:
    if known.shape[-1] < past_length or known.shape[0] != values.shape[0]:
        raise ValueError(
            f"the cache has {past_length} tokens, and {what} of {known.shape[-1]} in {known.shape[0]} sequences where "
            f"{values.shape[0]} are read: its keys were changed by other means than its own methods, and their {what} are not known"
        )
    return torch.cat([known[..., :past_length], values], dim=-1)


def _keeping_layer(cache: Cache, index: int) -> PositionCacheLayer:
    """A layer of a cache; one that keeps more of its tokens takes its place."""
    while len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if not isinstance(layer, PositionCacheLayer):
        _check_layer_keeps_all(layer)
        known = {DynamicLayer: PositionDynamicLayer, StaticLayer: PositionStaticLayer}
        kind = known.get(type(layer)) or _with_positions(type(layer))
        keeping = kind.__new__(kind)
        keeping.__dict__.update(layer.__dict__)
        cache.layers[index] = keeping
    return cache.layers[index]
