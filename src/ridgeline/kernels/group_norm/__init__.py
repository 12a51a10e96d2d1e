"""GroupNorm, alone and with SiLU behind it."""
