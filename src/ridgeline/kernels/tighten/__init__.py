"""Rows that lie farther apart than they are long, laid one behind the other."""
