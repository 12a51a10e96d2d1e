"""Largest and mean elements of windows, in one to three dims, without the places of the largest."""
