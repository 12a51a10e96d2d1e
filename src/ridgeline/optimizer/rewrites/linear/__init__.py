"""Rewrites of linear layers and GEMMs."""
