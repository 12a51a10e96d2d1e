"""Time of convolutions."""
