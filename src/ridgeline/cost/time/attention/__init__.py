"""Time of attention."""
