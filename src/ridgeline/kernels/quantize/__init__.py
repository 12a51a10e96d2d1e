"""Quantize to fp8 or int8 with a scale a tensor, row or block, and back."""
