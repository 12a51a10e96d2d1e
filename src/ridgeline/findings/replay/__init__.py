"""Scheduling a recorded run again after a change."""
