"""Rewrites of attention."""
