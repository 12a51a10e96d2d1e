"""Attention of one new token a sequence over a contiguous cache of keys and values."""
