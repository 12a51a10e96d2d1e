"""Rewrites of linear layers and matrix products."""
