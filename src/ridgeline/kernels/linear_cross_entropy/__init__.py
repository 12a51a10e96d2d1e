"""A linear layer and the cross-entropy of its output, without the output."""
