"""Convolutions in groups of channels, channels last, with norm and activation in their end."""
