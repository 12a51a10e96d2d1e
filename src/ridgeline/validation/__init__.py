"""Predictions judged against published and measured rows."""
