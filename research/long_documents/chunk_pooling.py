"""One vector of a document out of the vectors of its chunks, without training.

Each function takes (..., chunks, width), vectors as the encoder pools them, not normalised, and returns (..., width).
`mean` at chunks of 1,024 tokens, `maximum`, `norm_top_mean` and `norm_softmax_mean` are the modes of DICE (Lyu et al. 2026,
arXiv:2606.18781; checked against github.com/PunchlineAAAA/DICE, `_aggregate_chunk_embeddings`).
"""

import torch


def mean(chunks: torch.Tensor) -> torch.Tensor:
    """1/n Σ vᵢ."""
    return chunks.mean(dim=-2)


def maximum(chunks: torch.Tensor) -> torch.Tensor:
    """maxᵢ vᵢ, in each dimension."""
    return chunks.amax(dim=-2)


def norm_top_mean(chunks: torch.Tensor, number: int = 3) -> torch.Tensor:
    """The mean of the chunks with the largest norms, `number` of them, of all where there are fewer."""
    number = min(number, chunks.shape[-2])
    places = chunks.norm(dim=-1).topk(number, dim=-1).indices
    return chunks.take_along_dim(places[..., None], dim=-2).mean(dim=-2)


def norm_softmax_mean(chunks: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Σ wᵢ vᵢ with w = softmax(‖vᵢ‖ / temperature)."""
    weights = (chunks.norm(dim=-1) / temperature).softmax(dim=-1)
    return (weights[..., None] * chunks).sum(dim=-2)


def salience_mean(chunks: torch.Tensor) -> torch.Tensor:
    """Σ wᵢ vᵢ / Σ wᵢ with wᵢ = 1 - cos(vᵢ, 1/n Σ vⱼ): what is unlike the rest of its document counts more.

    The mean where all chunks are the same.
    """
    centre = chunks.mean(dim=-2, keepdim=True)
    weights = (1 - torch.cosine_similarity(chunks, centre, dim=-1)).clamp(min=1e-6)
    return (weights[..., None] * chunks).sum(dim=-2) / weights.sum(dim=-1, keepdim=True)
