"""Embedding bags: many tables in one launch, and a backward pass that is the optimizer's step."""
