"""GELU, exact or by tanh, at the speed of memory."""
