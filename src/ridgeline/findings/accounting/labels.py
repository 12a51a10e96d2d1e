"""Names of the bars, the stage each belongs to, and what generally helps where no finding says it better."""

from __future__ import annotations

STAGES = {
    "floor": "floor of the work done",
    "kernels": "kernels above their floor",
    "unpriced": "kernels whose floor is not known",
    "avoidable": "avoidable work",
    "copies": "exposed copies",
    "communication": "exposed communication",
    "idle": "device idle",
    "unrecorded": "device work that was not recorded",
    "host": "host (no device in this trace)",
    "recording": "cost of the recording",
}
_STAGE_OF = {"copy": "copies", "comm": "communication"}
_FAMILIES = {
    "gemm": "matrix products", "conv": "convolutions", "attention": "attention", "pointwise": "pointwise kernels",
    "norm": "normalization", "softmax": "softmax", "loss": "loss", "reduce": "reductions", "copy": "copies and casts",
    "layout": "layout changes", "optimizer": "optimizer", "foreach": "lists of tensors", "embedding": "embeddings",
    "index": "gather and scatter", "sort": "sorting", "fused": "compiler-generated kernels", "fill": "fills",
    "dropout": "dropout", "pool": "pooling", "random": "random numbers", "communication": "collectives beside compute",
    "other": "other kernels",
}  # fmt: skip
#: key: (label, what generally helps)
_BARS = {
    "floor": ("floor of the work done", "Faster hardware, lower precision, or less work."),
    "avoidable:recompute": (
        "recomputed forward work",
        "Checkpoint fewer layers, or only the cheap ones, if memory allows.",
    ),
    "avoidable:casts": (
        "casts between types",
        "Keep weights and activations in the type they are used in; torch.compile fuses the rest.",
    ),
    "avoidable:layout": (
        "layout copies",
        "Use one memory format throughout (channels_last), and drop .contiguous() where it only copies.",
    ),
    "avoidable:passes": (
        "repeated passes over the same tensor",
        "Fuse the chain: torch.compile, or one kernel for it.",
    ),
    "avoidable:grown": (
        "tensors copied to grow them",
        "Allocate the longest once and write new rows in place (a static KV cache, index_copy_), not torch.cat.",
    ),
    "avoidable:again": (
        "forward pass run again for its metrics",
        "Count and log in the outputs of the pass that the loss was made of.",
    ),
    "avoidable:zero": ("work multiplied by zero", "Skip it where its factor is zero."),
    "avoidable:extra": ("work that the model does not need", "Remove the passes and ops named in the parts."),
    "comm:floor": (
        "communication: least time of the bytes",
        "Overlap it with compute, send fewer bytes (a smaller type, less often), or use a faster link.",
    ),
    "comm:bandwidth": (
        "communication: transfer above the link's rate",
        "Use larger buckets and fewer calls; check the algorithm, the topology and who shares the link.",
    ),
    "comm:transfer": (
        "communication: transfer",
        "Overlap it with compute, use larger buckets, a faster link or fewer bytes.",
    ),
    "comm:wait": (
        "communication: waiting for most ranks",
        "This rank is early: give it a larger share of the work, or balance the ranks.",
    ),
    "comm:skew": (
        "communication: skew of the last ranks",
        "Balance the ranks: find what the last rank does before it arrives.",
    ),
    "comm:wait_alone": (
        "communication: above the fastest equal call",
        "Record all ranks to tell a late rank from a slow link.",
    ),
    "loader": (
        "data loader",
        "More DataLoader workers, pinned memory, prefetching, or cheaper preprocessing.",
    ),
    "collector": ("garbage collector", "gc.freeze() after warm-up, or gc.disable() and collect between epochs."),
    "first_use": (
        "first-use work (plans, JIT, autotuning, lazy loading)",
        "Warm up every shape, keep shapes static or bucketed, or choose a backend that builds no plans.",
    ),
    "recorder": ("the profiler itself", "None: a run without the profiler does not have it."),
    "allocator": (
        "memory allocation calls",
        "Keep peak memory below the limit; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ),
    "synchronize": (
        "host waiting for the device",
        "Read values later or less often (.item(), .cpu(), print), so that work stays queued.",
    ),
    "copy_call": ("copy calls", "Pin host memory and copy with non_blocking=True."),
    "launch_call": ("launch calls", "Launch less: CUDA graphs, torch.compile, fused kernels, larger batches."),
    "runtime": ("other runtime calls", "See which call it is, and call it less often."),
    "op": (
        "inside ops, before their launch",
        "Fewer and larger ops: CUDA graphs, torch.compile, fused or foreach variants, larger batches.",
    ),
    "python": ("Python frames", "Move this code out of the step, or vectorize it."),
    "between_ops": (
        "Python between ops",
        "Fewer and larger ops: CUDA graphs, torch.compile, or less Python in the loop.",
    ),
    "host_code": (
        "host outside of any recorded op or call",
        "Other code of the program, or a thread at rest: record the Python stack (ridgeline profile --stack).",
    ),
    "asleep": ("host asleep or waiting", "Find what the host waits for: another thread, a lock, input or a timer."),
    "unrecorded": (
        "host not recorded",
        "Record the whole step on all threads, with CPU activities and the Python stack.",
    ),
    "bubble": ("pipeline bubble", "More micro-batches, an interleaved schedule, or balanced stages."),
    "latency": ("from launch to kernel", "Keep work queued: launch earlier, or use CUDA graphs."),
    "queued": ("between queued kernels", "Fewer and larger kernels, CUDA graphs, or fewer dependencies of streams."),
    "graph": (
        "CUDA graph whose kernels were not recorded",
        "Record with graph nodes (nsys: --cuda-graph-trace=node), or profile without graphs.",
    ),
    "device_wait": (
        "unknown: queued work that did not start",
        "Record all devices and streams: it may wait for an event, another device, or the host.",
    ),
    "recording": ("cost of the recording", "None: a run that is not recorded does not have it."),
    "no_host": ("not recorded: the file has no host events", "Record CPU activities too."),
}


def stage_of(key: str) -> str:
    """A graph whose kernels were not recorded keeps the device busy: that time is not idle."""
    if key == "idle:graph":
        return "unrecorded"
    prefix = key.split(":", 1)[0]
    return _STAGE_OF.get(prefix, prefix)


def label_of(key: str) -> str:
    prefix, _, name = key.partition(":")
    if prefix in ("kernels", "unpriced"):
        return _FAMILIES.get(name, name)
    if prefix == "copy":
        return f"copies {name}"
    if key == "host:op":
        return "inside ops"
    return _BARS[key if key in _BARS else name][0]


def remedy_of(key: str) -> str:
    """What generally helps against a bar of this kind."""
    prefix, _, name = key.partition(":")
    if prefix == "kernels":
        return {
            "gemm": "Aligned sizes, Tensor Cores (bf16 or TF32), larger batches; a tuned or fused kernel.",
            "conv": "channels_last, Tensor Core types, cudnn.benchmark for static shapes.",
            "attention": "scaled_dot_product_attention with a fused backend; no dense mask.",
            "optimizer": "fused=True, or foreach=True.",
        }.get(name, "Fuse it with its neighbors (torch.compile), or use a faster kernel.")
    if prefix == "unpriced":
        return "Record shapes, or name the device, to know how far these are from their floor."
    if prefix == "copy":
        return ("Copy earlier and beside compute, from pinned memory with non_blocking=True." if "pinned" not in name
                else "Copy earlier, on another stream beside compute, or move fewer bytes.")  # fmt: skip
    return _BARS[key if key in _BARS else name][1]
