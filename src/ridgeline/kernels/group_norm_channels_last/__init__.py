"""GroupNorm of images whose channels lie last, with SiLU behind it."""
