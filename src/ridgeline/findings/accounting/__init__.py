"""Top-down accounting of a step: bars from the floor of its work to its measured length, which always add up."""
