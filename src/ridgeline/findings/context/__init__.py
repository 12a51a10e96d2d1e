"""One rank of a trace as the rules see it."""
