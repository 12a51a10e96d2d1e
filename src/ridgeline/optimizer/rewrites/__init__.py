"""Named rewrites of torch-level graphs, one module a family; imported in the order in which they run."""

from ridgeline.optimizer.rewrites import cleanup  # noqa: F401, I001
from ridgeline.optimizer.rewrites.linear import algebra  # noqa: F401
from ridgeline.optimizer.rewrites.conv import patch_embedding as patches  # noqa: F401
from ridgeline.optimizer.rewrites.conv import vocoder as sounds  # noqa: F401
from ridgeline.optimizer.rewrites.conv import positional_conv as positions  # noqa: F401
from ridgeline.optimizer.rewrites.rows import dense_residual as streams  # noqa: F401
from ridgeline.optimizer.rewrites.conv import fold_batch_norm as fold  # noqa: F401
from ridgeline.optimizer.rewrites.rows import norm_affine as affines  # noqa: F401
from ridgeline.optimizer.rewrites.rows import long_rows as lengths  # noqa: F401
from ridgeline.optimizer.rewrites.attention import head_layout as heads  # noqa: F401
from ridgeline.optimizer.rewrites.attention import multihead_module as multihead  # noqa: F401
from ridgeline.optimizer.rewrites.linear import einsum as einsums  # noqa: F401
from ridgeline.optimizer.rewrites.attention import window_bias as shifted  # noqa: F401
from ridgeline.optimizer.rewrites.attention import fused as attention  # noqa: F401
from ridgeline.optimizer.rewrites.attention import score_bias as biases  # noqa: F401
from ridgeline.optimizer.rewrites.attention import short_sequences as short  # noqa: F401
from ridgeline.optimizer.rewrites.rows import gated_activation as gate  # noqa: F401
from ridgeline.optimizer.rewrites.rows import norm  # noqa: F401
from ridgeline.optimizer.rewrites.attention import rotary  # noqa: F401
from ridgeline.optimizer.rewrites.attention import complex_rotary as complexes  # noqa: F401
from ridgeline.optimizer.rewrites.attention import qk_norm as headnorms  # noqa: F401
from ridgeline.optimizer.rewrites import cross_entropy as loss  # noqa: F401
from ridgeline.optimizer.rewrites.rows import softmax_group_norm as rows  # noqa: F401
from ridgeline.optimizer.rewrites.linear import quantize_weight as narrow  # noqa: F401
from ridgeline.optimizer.rewrites import recommender  # noqa: F401
from ridgeline.optimizer.rewrites.rows import dropout_add as dropout  # noqa: F401
from ridgeline.optimizer.rewrites.linear import horizontal_fusion as horizontal  # noqa: F401
from ridgeline.optimizer.rewrites.attention import decode as decoding  # noqa: F401
from ridgeline.optimizer.rewrites.linear import few_rows as products  # noqa: F401
from ridgeline.optimizer.rewrites.attention import kv_cache as caches  # noqa: F401
from ridgeline.optimizer.rewrites.linear import gemv as vectors  # noqa: F401
from ridgeline.optimizer.rewrites.linear import split_gemm as halves  # noqa: F401
from ridgeline.optimizer.rewrites.conv import average_pool as averages  # noqa: F401
from ridgeline.optimizer.rewrites.conv import upsample as enlarged  # noqa: F401
from ridgeline.optimizer.rewrites.conv import elementwise_epilogue as chains  # noqa: F401
from ridgeline.optimizer.rewrites.rows import pool_cumsum as windows  # noqa: F401
from ridgeline.optimizer.rewrites.conv import batch_norm_epilogue as pointwise  # noqa: F401
from ridgeline.optimizer.rewrites.conv import stem as stems  # noqa: F401
from ridgeline.optimizer.rewrites.rows import amax as extremes  # noqa: F401
from ridgeline.optimizer.rewrites.conv import resize as resizes  # noqa: F401
from ridgeline.optimizer.rewrites.linear import activation_epilogue as epilogue  # noqa: F401
from ridgeline.optimizer.rewrites.conv import relu_epilogue as convolution  # noqa: F401
from ridgeline.optimizer.rewrites.linear import odd_columns as odd  # noqa: F401
from ridgeline.optimizer.rewrites.rows import index_add as sums  # noqa: F401
from ridgeline.optimizer.rewrites.rows import top_k  # noqa: F401
from ridgeline.optimizer.rewrites import common_subexpressions as once  # noqa: F401
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
