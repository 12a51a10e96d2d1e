"""What the host thread spends to launch an op: the reason a fast GPU waits."""

from __future__ import annotations

from ridgeline.cost.call import Coef
from ridgeline.graph import Node, Phase

DEFAULTS: Coef = {
    # seconds per eager call in a tight loop, by what is called: dispatch, allocation and launch
    "view_s": 2.6e-6,
    "alloc_s": 4.2e-6,
    "pointwise_s": 9.5e-6,
    "copy_s": 11.5e-6,
    "fill_s": 10.0e-6,
    "random_s": 11.0e-6,
    "reduce_s": 11.5e-6,
    "norm_s": 14.5e-6,
    "softmax_s": 10.2e-6,
    "loss_s": 13.0e-6,
    "cross_entropy_s": 30e-6,
    "matmul_s": 15.0e-6,
    "grouped_matmul_s": 26e-6,
    "conv_s": 22e-6,
    "attention_s": 30e-6,
    "embedding_s": 11e-6,
    "embedding_bag_s": 24e-6,
    "gather_s": 13e-6,
    "scatter_s": 15e-6,
    "scan_s": 10e-6,
    "sort_s": 40e-6,
    "topk_s": 22e-6,
    "pool_s": 12e-6,
    "resize_s": 12e-6,
    "nonzero_s": 30e-6,
    "foreach_s": 20e-6,
    "optimizer_s": 25e-6,
    "quantize_s": 12e-6,
    "rnn_s": 60e-6,
    "fft_s": 25e-6,
    "linalg_s": 40e-6,
    "custom_s": 20e-6,
    "sync_s": 15e-6,
    "transfer_s": 12e-6,
    "collective_s": 20e-6,
    "host_s": 1.5e-6,
    "cold": 1.6,  # a model's calls against those of a tight loop: every one runs code that the caches have forgotten
    "module_s": 2.5e-6,  # one nn.Module call: hooks, attribute look-ups, the Python around the op
    "foreach_tensor_s": 1.3e-6,  # each tensor of a list handed to a foreach op
    "grad_s": 1.2e-6,  # recording one op for the backward pass
    "engine_s": 15e-6,  # the autograd engine, per op of the backward pass
    "conv_grad_s": 170e-6,  # finding the plans of a convolution's two gradients
    "kernel_s": 4.5e-6,  # each kernel a call launches beyond its first
    "step_s": 60e-6,  # once a step: entering the model, reading the result
    "launch_s": 4.0e-6,  # from the host's call to the kernel's start on an idle device
    "gap_s": 0.9e-6,  # between two kernels that wait in the queue
    "graph_gap_s": 0.7e-6,  # between two kernels of a CUDA graph
    "compiled_call_s": 9.0e-6,  # one kernel of a compiled graph: generated wrapper code instead of dispatch
    "compiled_step_s": 600e-6,  # guards and entry of a compiled region, once a step
    "event_s": 3.0e-6,  # what events around a call add to its kernels
    "event_gap_s": 1.5e-6,  # and for every further kernel
    "group_launch_s": 7.5e-6,  # a kernel of a convolution whose groups run one by one, on a stream of its own
    "event_lead_s": 25e-6,  # how far the host is ahead of a device that flushes its cache between two calls
}


def between_events_s(kind: str, busy_s: float, num_kernels: int, coef: Coef) -> float:
    """What events around a call read. A convolution in groups of many kernels waits for the host that launches them.

    Median error of 309 recorded convolutions in groups 18.6 → 15.3 %, mean 30.8 → 26.2 %.
    """
    seen_s = busy_s + coef["event_s"] + max(0, num_kernels - 1) * coef["event_gap_s"]
    if not kind.startswith("conv"):
        return seen_s
    return max(seen_s, num_kernels * coef["group_launch_s"] - coef["event_lead_s"])


def host_s(node: Node, coef: Coef, training: bool, num_kernels: int = 1) -> float:
    """Host seconds of one eager call of this op, modules entered on the way included."""
    spent: float = coef[f"{node.op}_s"] * coef["cold"] + node.attrs.get("calls", 0) * coef["module_s"]
    if node.op in ("foreach", "optimizer"):
        spent += node.attrs["num_tensors"] * coef["foreach_tensor_s"]
    if num_kernels > 1:
        spent += (num_kernels - 1) * coef["kernel_s"]
    if node.phase is Phase.BACKWARD:
        gradient = coef["conv_grad_s"] if node.op == "conv" and node.attrs.get("which") == "bwd" else 0.0
        return spent + coef["engine_s"] + gradient
    return spent + (coef["grad_s"] if training and node.phase is Phase.FORWARD else 0.0)
