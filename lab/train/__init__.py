"""Training measured on a GPU against other trainers."""
