"""Float32 products on the half-precision tensor cores, as accurate as float32 arithmetic."""
