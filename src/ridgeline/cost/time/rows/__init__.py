"""Time of row-wise kernels."""
