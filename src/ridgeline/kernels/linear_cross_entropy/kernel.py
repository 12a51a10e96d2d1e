"""Linear cross-entropy has no device code of its own: cuBLAS multiplies, cross-entropy's kernels work in place.

The logits of a chunk of rows are written, turned into their own gradient where they lie, and multiplied on.
"""
