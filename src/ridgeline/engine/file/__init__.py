"""The engine file: one file that holds a model's program, weights, timings and proof, and runs without the model."""
