"""Gated linear units: SwiGLU and GeGLU."""
