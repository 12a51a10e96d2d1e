"""Rewrites of row-wise ops."""
