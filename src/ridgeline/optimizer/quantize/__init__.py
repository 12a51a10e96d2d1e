"""Fewer bits for the linear layers of an engine's program, within a stated error, by measured gain."""
