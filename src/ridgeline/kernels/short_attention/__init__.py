"""Attention of few rows and keys with a bias on its scores: windows of images, relative positions."""
