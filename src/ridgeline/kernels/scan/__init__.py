"""Cumulative sums and products along any dim, read and written once."""
