"""Recording real runs, and linking what was recorded to modules, source lines and the nodes of a captured graph."""
