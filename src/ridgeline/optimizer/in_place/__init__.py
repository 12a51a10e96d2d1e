"""Replaces parts of a model by kernels of ours in place, and restores them."""
