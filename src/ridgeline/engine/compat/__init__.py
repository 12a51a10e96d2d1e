"""What must know the internals of one library."""
