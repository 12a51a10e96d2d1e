"""Fewer bits within an error budget."""
