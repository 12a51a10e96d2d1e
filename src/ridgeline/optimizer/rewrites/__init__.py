"""Named rewrites of torch-level graphs, one module a family; imported in the order in which they run."""

from ridgeline.optimizer.rewrites import cleanup  # noqa: F401, I001
from ridgeline.optimizer.rewrites import algebra, patches, sounds, positions, streams, fold, affines, lengths, heads  # noqa: F401
from ridgeline.optimizer.rewrites import multihead, einsums  # noqa: F401
from ridgeline.optimizer.rewrites import shifted, attention, biases, short, gate, norm  # noqa: F401
from ridgeline.optimizer.rewrites import rotary, complexes, headnorms, loss, rows  # noqa: F401
from ridgeline.optimizer.rewrites import narrow, recommender, dropout  # noqa: F401
from ridgeline.optimizer.rewrites import horizontal, decoding, products, caches, vectors, halves  # noqa: F401
from ridgeline.optimizer.rewrites import averages, enlarged, chains, windows, pointwise, stems, extremes, resizes  # noqa: F401
from ridgeline.optimizer.rewrites import epilogue, convolution, odd, sums, topmost, once  # noqa: F401
from ridgeline.optimizer.rewrites.registry import (
    Match,
    Rewrite,
    Worth,
    chosen,
    recommended,
    rewrite,
    rewrites,
)

__all__ = ["Match", "Rewrite", "Worth", "chosen", "recommended", "rewrite", "rewrites"]
