"""Time of kernels that stream over memory."""
