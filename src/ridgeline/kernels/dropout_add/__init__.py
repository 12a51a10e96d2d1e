"""Dropout and the residual add behind it."""
