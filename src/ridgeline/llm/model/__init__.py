"""The decoder: configuration, blocks, weights."""
