"""AdamW over lists of parameters: one launch for all of a type, moments in 32 or 8 bits, clipping fused in."""
