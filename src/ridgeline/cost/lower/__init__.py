"""From ops of a graph to kernel calls."""
