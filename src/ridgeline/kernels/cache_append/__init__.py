"""New keys and values written into their cache."""
