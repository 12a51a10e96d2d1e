"""LayerNorm, alone and with the residual add in front of it."""
