"""What runs an optimized model: capture into CUDA graphs, guards before each call, and replay."""

from pathlib import Path

OWN_CODE = tuple(str(Path(__file__).resolve().parent.parent / package) for package in ("engine", "optimizer"))
"""Folders whose frames and functions belong to us and not to the model that is run."""
