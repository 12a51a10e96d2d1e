"""Time models, one package per kernel family."""
