"""What computes an attention with score terms: backends, blocks, packed states, windows and caches."""
