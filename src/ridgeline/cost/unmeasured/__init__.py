"""Coefficients for devices that nobody measured."""
