"""Self-attention with score terms by whole matrices, windows, and positions in a cache. It is saved with a checkpoint."""
