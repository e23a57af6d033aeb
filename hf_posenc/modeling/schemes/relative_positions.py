"""Distances between positions and the buckets they fall into: pure functions on integer tensors.

Sign convention of this package: a relative position is `key - query`, as in T5. Schemes whose references count the
other way round (`query - key`: relative_key, Transformer-XL, DeBERTa) negate it themselves and say so.
"""

import math

import torch


def relative_distances(query_length: int, key_length: int, offset: int | torch.Tensor, device) -> torch.Tensor:
    """All values that `key - query` takes when queries are at `offset, offset + 1, ...` and keys at `0, 1, ...`.

    Args:
        query_length, key_length: number of queries and keys.
        offset: position of the first query (the number of tokens in the cache).
        device: where the result lives.

    Returns:
        int64 tensor (query_length + key_length - 1,), ascending. The pair (i, j) finds its own distance at index
        `j - i + query_length - 1`, see [`expand_to_pairs`].
    """
    return torch.arange(query_length + key_length - 1, device=device) - (query_length - 1) - offset


def expand_to_pairs(by_distance: torch.Tensor, query_length: int, key_length: int) -> torch.Tensor:
    """Lay values that are known per distance out per pair of positions.

    Args:
        by_distance: (..., query_length + key_length - 1), in the order of [`relative_distances`].

    Returns:
        (..., query_length, key_length).
    """
    keys = torch.arange(key_length, device=by_distance.device)
    queries = torch.arange(query_length, device=by_distance.device)
    return by_distance[..., keys[None, :] - queries[:, None] + (query_length - 1)]


def clip_distance(relative_position: torch.Tensor, max_distance: int) -> torch.Tensor:
    """clip(relative_position, -max_distance, max_distance) + max_distance: rows 0 to 2·max_distance (Shaw et al. 2018)."""
    return relative_position.clamp(-max_distance, max_distance) + max_distance


def t5_bucket(
    relative_position: torch.Tensor, num_buckets: int, max_distance: int, bidirectional: bool = True
) -> torch.Tensor:
    """T5's logarithmic buckets.

    Half of the buckets (of those left for a direction) hold one distance each, the other half grow logarithmically up
    to `max_distance`; everything beyond shares the last one. With `bidirectional`, keys after the query have their own
    half of all buckets; without, they share bucket 0 (they are masked anyway).

    Args:
        relative_position: int64 tensor of any shape, `key - query`.

    Returns:
        int64 tensor of the same shape, 0 to `num_buckets` - 1.

    Source: Raffel et al. 2020 (https://arxiv.org/abs/1910.10683); checked against
    `T5Attention._relative_position_bucket` of transformers.
    """
    buckets = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        buckets = (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
    else:
        distance = (-relative_position).clamp(min=0)
    exact = num_buckets // 2
    # Below `exact` the logarithm is not used, the clamp only keeps it finite.
    logarithmic = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (logarithmic * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return buckets + torch.where(distance < exact, distance, far)


def deberta_bucket(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """DeBERTa-v2's logarithmic buckets, signed like their argument.

    Distances up to `num_buckets // 2` are kept; beyond, they grow logarithmically so that `max_distance - 1` falls into
    `num_buckets - 1`, and on beyond that: nothing is clamped here. A table of 2·`num_buckets` rows is clamped to by who looks up,
    clip(bucket + `num_buckets`, 0, 2·`num_buckets` - 1), so that from `max_distance` on keys on one side share row 0, and those on the
    other the last row.

    Args:
        distance: int64 tensor of any shape, `query - key` (any sign convention works, the function is odd).

    Returns:
        int64 tensor of the same shape.

    Source: He et al. 2021 (https://arxiv.org/abs/2006.03654); checked against `make_log_bucket_position` of
    transformers' DeBERTa-v2, which is Microsoft's.
    """
    middle = num_buckets // 2
    magnitude = distance.abs()
    # Both logarithms by the same function, so that they round alike: at max_distance - 1 their ratio is 1.
    log_scale = torch.log(torch.tensor((max_distance - 1) / middle, dtype=torch.float32, device=distance.device))
    logarithmic = torch.ceil(torch.log(magnitude.clamp(min=1).float() / middle) / log_scale * (middle - 1)) + middle
    # An exported model has the second as a number: their ratio may round to more than 1 there, which is for what is further away.
    logarithmic = torch.where(magnitude < max_distance, logarithmic.clamp(max=num_buckets - 1), logarithmic)
    return torch.where(magnitude <= middle, distance, logarithmic.long() * distance.sign())
