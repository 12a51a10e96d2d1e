"""Time of matrix products."""
