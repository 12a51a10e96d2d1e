"""Replaying captured calls."""
