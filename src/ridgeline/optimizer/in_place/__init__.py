"""Kernels substituted inside a model in place, and taken out again."""
