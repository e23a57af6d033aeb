"""What computes the same faster: blocks, packed states, tables that are kept, FlexAttention. It stays in the package."""
