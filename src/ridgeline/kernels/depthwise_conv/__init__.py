"""Depthwise convolutions of images whose channels lie last, with norm and activation in their end."""
