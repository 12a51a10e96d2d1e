"""Squares of four pixels as channels: what makes a network's first convolution fit the tensor cores."""
