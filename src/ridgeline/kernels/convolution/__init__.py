"""Convolutions of images as PyTorch lays them out, with what follows them element by element."""
