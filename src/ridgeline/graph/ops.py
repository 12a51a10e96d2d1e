"""The vocabulary: every op a graph may hold, what it means and which attributes it must carry.

Captures of every framework end in these ops. An op is one call of the framework (one eager dispatch); how many
kernels a library launches for it is the business of `cost`. Shapes needed for pricing are attributes, so that a
rule never has to guess them back from views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.errors import GraphError, nearest


@dataclass(frozen=True, slots=True)
class OpDecl:
    """What an op means; ``required`` attributes are checked by ``verify``."""

    name: str
    meaning: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    free: bool = False  # no device work by definition (a view, a host-side fact)


_OPS: dict[str, OpDecl] = {}


def declare(name: str, meaning: str, required: str = "", optional: str = "", *, free: bool = False) -> OpDecl:
    """Add an op to the vocabulary; declaring a name twice is an error."""
    if name in _OPS:
        raise GraphError(f"op {name!r} is declared twice")
    _OPS[name] = OpDecl(name, meaning, tuple(required.split()), tuple(optional.split()), free)
    return _OPS[name]


def op(name: str) -> OpDecl:
    if name not in _OPS:
        raise GraphError(f"unknown op {name!r}{nearest(name, _OPS)}; new ops are declared in graph/ops.py")
    return _OPS[name]


def ops() -> Mapping[str, OpDecl]:
    return _OPS


# Linear algebra. Attributes are the problem as the library sees it: b independent products of m×k by k×n.
declare("matmul", "b products of [m,k]·[k,n], optional bias and epilogue",
        "b m n k", "trans_a trans_b bias epilogue accumulate")
declare("grouped_matmul", "one product per group of rows (MoE): groups weights, m rows in all",
        "groups m n k", "which trans_a trans_b")  # which = rows (2D×3D) | reduction (2D×2D, the weight gradient)
declare("conv", "convolution; `which` = fwd, or bwd with grads among input, weight, bias",
        "n c o spatial kernel stride padding dilation groups transposed which",
        "out_spatial grads bias layout epilogue")
declare("attention", "softmax(q·kᵀ)·v, phase forward or backward by the node",
        "b h hkv s skv d causal", "dv window mask dropout backend bias_grad scale varlen lse softcap sinks")
declare("rnn", "a whole LSTM/GRU/RNN call", "cell layers hidden input seq batch", "bidirectional")
declare("fft", "FFT over the last transformed dims", "length batch", "real inverse")
declare("linalg", "dense factorization or solve", "fn n batch")

# Memory-bound families. Bytes follow from the types of inputs and outputs.
declare("pointwise", "out[i] = fn(in[i]…), with broadcasting", "fn", "inplace scalars rng")
declare("copy", "the same elements elsewhere: clone, contiguous, cast, cat, stack, pad, repeat", "fn",
        "inplace transposed dim")
declare("fill", "elements from nothing: zeros, full, arange", "fn", "inplace")
declare("random", "fresh random numbers", "fn", "inplace")
declare("reduce", "fn over dims", "fn dims", "keepdim")
declare("norm", "layer_norm, rms_norm, group_norm, batch_norm or instance_norm over n groups of c elements",
        "fn n c", "affine training residual channels layout grads")
declare("softmax", "softmax or log_softmax over rows; safe: rows that are all masked become zeros", "n c",
        "log inner dim safe")
declare("loss", "nll_loss, mse and other fused loss kernels over n rows of c classes", "fn n c", "reduction")
declare("cross_entropy", "log-softmax and nll as one", "n v", "label_smoothing")
declare("embedding", "rows of a table picked by index; backward scatters", "rows cols num", "which padding_idx")
declare("embedding_bag", "rows picked and reduced per bag", "v d b l", "fn which weighted")
declare("gather", "pick elements or rows by index", "fn", "dim num")
declare("scatter", "write or add elements or rows by index", "fn", "dim num inplace reduce")
declare("scan", "running fn along a dim", "fn n c", "state")
declare("sort", "sort n rows of c", "n c", "stable")
declare("topk", "k largest of each of n rows of v", "n v k", "sorted")
declare("pool", "pooling window", "fn kernel stride spatial", "which out_spatial n c")
declare("resize", "interpolation or grid sampling", "fn", "which")
declare("nonzero", "positions of what is true: a size only data knows", "", "num")
declare("foreach", "one pointwise fn over a list of tensors (optimizers)", "fn num_tensors numel",
        "reads writes")  # reads/writes: tensors of `numel` elements touched per element
declare("optimizer", "a fused optimizer step over a list of tensors", "fn num_tensors numel", "state_dtype")
declare("quantize", "scale and round to a narrow type", "fn", "block")

# Not device arithmetic.
declare("view", "another look at the same storage", "", "fn dim", free=True)
declare("alloc", "memory without a write (empty)", "", "fn", free=True)
declare("host", "work of the host thread only", "fn", "", free=True)
declare("sync", "the host waits for the device (item, cpu())", "fn")
declare("transfer", "copy between host and device", "fn direction", "pinned")
declare("collective", "communication between ranks", "fn num_bytes num_ranks", "group async_op")
declare("custom", "an op whose cost its owner declared", "name")
