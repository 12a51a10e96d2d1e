"""Measures studies: a million points, searches against exhaustive frontiers, kills and resumes."""
