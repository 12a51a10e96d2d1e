"""Simulation: how a training step or a serving deployment unfolds over time."""
