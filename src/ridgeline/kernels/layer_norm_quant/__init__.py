"""LayerNorm whose output is fp8 or int8 with a scale a row or a block."""
