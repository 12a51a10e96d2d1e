"""Softmax over rows of any length."""
