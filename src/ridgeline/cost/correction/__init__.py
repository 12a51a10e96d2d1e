"""Learned, bounded correction factors on top of the time models."""
