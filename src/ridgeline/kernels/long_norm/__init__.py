"""Rows too long for one SM, brought to a common scale by what all of a row says, read from memory once."""
