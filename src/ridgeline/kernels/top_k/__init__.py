"""Places of the few largest or smallest elements of many rows: nearest neighbors, experts of a token."""
