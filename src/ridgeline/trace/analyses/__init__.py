"""What is asked of a trace: parts of it, and tables of kernels, ops, modules, collectives, ranks, copies and steps."""
