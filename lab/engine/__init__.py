"""Drivers for engine files."""
