"""Capturing a call as CUDA graphs."""
