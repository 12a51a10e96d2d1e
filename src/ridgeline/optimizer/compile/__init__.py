"""Compilation: repeated blocks compiled once, module labels, deadlines."""
