"""Design-space exploration: spaces, samplers, evaluation in batches, frontiers, and what a chip costs."""
