"""RMSNorm of every query and key head and the rotary embedding, in one pass."""
