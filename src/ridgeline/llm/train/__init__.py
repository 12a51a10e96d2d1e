"""Training: settings, parallelism, the step, checkpoints, and the loop around them."""
