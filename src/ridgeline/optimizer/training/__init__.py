"""The optimizer update of a training step."""
