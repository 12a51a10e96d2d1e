"""Situations that no table of shapes covers, each a function that returns "ok" or says what went wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import ridgeline.kernels as rk
from ridgeline.kernels.contract import trials


def _drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def _close(found: torch.Tensor, meant: torch.Tensor, tolerance: float = 2e-2) -> str:
    found, meant = found.detach(), meant.detach()
    error = float((found.float() - meant.float()).norm() / meant.float().norm().clamp_min(1e-20))
    return "ok" if error < tolerance else f"WRONG: relative error {error:.3g}"


def graph_replay() -> str:
    """Captured once, replayed on other data."""
    x, w = _drawn(256, 4096), _drawn(4096)
    rk.rms_norm(x, w, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rk.rms_norm(x, w, 1e-6)
        z = rk.swiglu(y, x)
    x.copy_(_drawn(256, 4096))
    graph.replay()
    torch.cuda.synchronize()
    meant = F.rms_norm(x, (4096,), w, 1e-6)
    return _close(y, meant) + " " + _close(z, F.silu(meant) * x)


def graph_of_repeats() -> str:
    """A training step whose calls are already repeated without Python, captured and replayed on other data."""
    x, w, r = _drawn(256, 4096), _drawn(4096), _drawn(256, 4096)
    x, w = x.requires_grad_(), w.requires_grad_()

    def step() -> tuple[torch.Tensor, ...]:
        y, h = rk.add_rms_norm(x, r, w, 1e-6)
        return torch.autograd.grad(rk.softmax(rk.swiglu(y, h)), (x, w), r)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(6):
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        x.copy_(_drawn(256, 4096))
    graph.replay()
    torch.cuda.synchronize()
    h = x + r
    meant = torch.autograd.grad(torch.softmax(F.silu(F.rms_norm(h, (4096,), w, 1e-6)) * h, -1), (x, w), r)
    return " ".join(_close(a, b, 4e-2) for a, b in zip(found, meant, strict=True))


def repeats_on_streams() -> str:
    """The same plan from four threads on four streams at once: everybody gets his own numbers."""
    found: list[str] = []
    w = _drawn(4096).requires_grad_()

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.full((64, 4096), 1.0 + seed, device="cuda", dtype=torch.bfloat16)
            x = (x * _drawn(64, 4096)).requires_grad_()
            dy = _drawn(64, 4096)
            meant = torch.autograd.grad(F.rms_norm(x, (4096,), w, 1e-6), (x, w), dy)
            for _ in range(50):
                grads = torch.autograd.grad(rk.rms_norm(x, w, 1e-6), (x, w), dy)
            torch.cuda.current_stream().synchronize()
            found.extend(_close(a, b) for a, b in zip(grads, meant, strict=True))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return " ".join(found) if len(found) == 8 else f"WRONG: {len(found)} of 8 results"


def long_rows_on_streams() -> str:
    """Rows that several programs hold, from two streams at once: nobody waits for the other's programs for ever."""
    x, y = _drawn(300, 100_000), _drawn(200, 262_144)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    outputs = []
    for _ in range(10):
        outputs = []
        for stream, value in zip(streams, (x, y), strict=True):
            with torch.cuda.stream(stream), torch.no_grad():
                outputs.append(rk.softmax(value))
    torch.cuda.synchronize()
    return " ".join(_close(o, torch.softmax(v, -1)) for o, v in zip(outputs, (x, y), strict=True))


def side_stream() -> str:
    """Ordered with what else runs on the stream, whichever is current."""
    stream = torch.cuda.Stream()
    x, w = _drawn(4096, 4096), _drawn(4096)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(2.0)
        y = rk.rms_norm(x, w, 1e-6)
    stream.synchronize()
    return _close(y, F.rms_norm(torch.full_like(x, 2.0), (4096,), w, 1e-6))


def other_thread() -> str:
    """A thread that never touched CUDA has no current context."""
    x, w = _drawn(64, 4096), _drawn(4096)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(rk.rms_norm(x, w, 1e-6)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    return _close(found[0], F.rms_norm(x, (4096,), w, 1e-6)) if found else "WRONG: the thread failed"


def compiled_whole() -> str:
    """One graph, no breaks, forward and backward, and the same numbers."""

    def block(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        y, h = rk.add_rms_norm(x, r, w, 1e-6)
        return rk.swiglu(y, h * 0.5) + rk.softmax(h)

    args = [_drawn(64, 512).requires_grad_(), _drawn(512).requires_grad_(), _drawn(64, 512).requires_grad_()]
    meant = block(*args)
    meant_grads = torch.autograd.grad(meant.float().square().sum(), args)
    found = torch.compile(block, fullgraph=True)(*args)
    found_grads = torch.autograd.grad(found.float().square().sum(), args)
    return " ".join([_close(found, meant), *(_close(a, b) for a, b in zip(found_grads, meant_grads, strict=True))])


def opchecked() -> str:
    """torch.library's own examination on CUDA tensors."""
    x, w = _drawn(8, 64, dtype=torch.float32).requires_grad_(), _drawn(64, dtype=torch.float32).requires_grad_()
    target = torch.randint(0, 64, (8,), device="cuda")
    torch.library.opcheck(torch.ops.ridgeline_kernels.rms_norm.default, (x, w, 1e-6, 0.0))
    torch.library.opcheck(torch.ops.ridgeline_kernels.layer_norm.default, (x, w, w, 1e-6))
    torch.library.opcheck(torch.ops.ridgeline_kernels.softmax.default, (x,))
    torch.library.opcheck(torch.ops.ridgeline_kernels.gated.default, (x, x.detach().clone().requires_grad_(), "silu"))
    torch.library.opcheck(torch.ops.ridgeline_kernels.cross_entropy.default, (x, target, -100, 0.1, 0.0, "mean", False))
    return "ok"


def autocast() -> str:
    """Weights in float32 beside activations in bfloat16."""
    x, w = _drawn(64, 1024), _drawn(1024, dtype=torch.float32).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = rk.rms_norm(x, w, 1e-6)
        loss = rk.cross_entropy(y, torch.zeros(64, device="cuda", dtype=torch.long))
    loss.backward()
    kinds = f"{y.dtype} {loss.dtype} {w.grad.dtype if w.grad is not None else None}"
    return "ok" if kinds == "torch.bfloat16 torch.float32 torch.float32" else f"WRONG: {kinds}"


def strange_numbers() -> str:
    """NaN and infinities appear where PyTorch has them, and nowhere else."""
    wrong = []
    for name in ("rms_norm", "layer_norm", "softmax", "swiglu", "relu2"):
        trial = trials()[name][1]
        for cols in (1000, 50000):
            from ridgeline.kernels.contract import case

            args = trial.make(case("float32", rows=6, cols=cols), torch.device("cuda"), torch.Generator("cuda"))
            x = args[0]
            x[0, 3], x[1, cols - 1], x[2, 5], x[3, :] = float("nan"), float("inf"), float("-inf"), float("-inf")
            ours, theirs = trial.call(*args), trial.eager(*args)
            same = torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())
            if not same:
                rows = [i for i in range(6) if not torch.equal(ours[i].isnan(), theirs[i].isnan())]
                wrong.append(f"{name} {cols} rows {rows}")
    return "ok" if not wrong else f"WRONG: {wrong}"


def empty() -> str:
    """No rows: nothing to launch, gradients of the weights are zero."""
    x, w = _drawn(0, 512).requires_grad_(), _drawn(512).requires_grad_()
    y = rk.rms_norm(x, w, 1e-6)
    y.sum().backward()
    z = rk.softmax(_drawn(0, 512)), rk.swiglu(_drawn(0, 512), _drawn(0, 512)), rk.relu2(_drawn(0))
    good = y.shape == (0, 512) and bool((w.grad == 0).all()) and all(t.numel() == 0 for t in z)
    return "ok" if good else "WRONG"


def over_two_billion() -> str:
    """More than 2³¹ elements: the last rows are right."""
    rows, cols = (2**31 // 4096) + 16, 4096
    base = _drawn(1024, cols)
    x = base.repeat((rows + 1023) // 1024, 1)[:rows].contiguous()
    w = _drawn(cols)
    found = []
    with torch.no_grad():
        y = rk.rms_norm(x, w, 1e-6)
        found.append(_close(y[-32:], F.rms_norm(x[-32:], (cols,), w, 1e-6)))
        del y
        z = rk.swiglu(x, x)
        found.append(_close(z[-32:], F.silu(x[-32:]) * x[-32:]))
        del z
        s = rk.softmax(x)
        found.append(_close(s[-32:], torch.softmax(x[-32:], -1)))
        del s
        wide = x.view(-1)[: 16400 * 131072 if x.numel() >= 16400 * 131072 else 16384 * 131072].view(-1, 131072)
        target = torch.randint(0, 131072, (wide.shape[0],), device="cuda")
        losses = rk.cross_entropy(wide, target, reduction="none")
        found.append(_close(losses[-8:], F.cross_entropy(wide[-8:].float(), target[-8:], reduction="none")))
    xg = x.requires_grad_()
    y = rk.rms_norm(xg, w, 1e-6)
    (dx,) = torch.autograd.grad(y, xg, x.detach())
    small = x.detach()[-32:].clone().requires_grad_()
    (meant,) = torch.autograd.grad(F.rms_norm(small, (cols,), w, 1e-6), small, x.detach()[-32:])
    found.append(_close(dx[-32:], meant))
    del x, xg, y, dx
    torch.cuda.empty_cache()
    return " ".join(found)


def linear_cross_entropy_memory() -> str:
    """Peak memory of loss and gradients at 16k tokens and 128k classes, against the unfused path."""

    def peak(call: Callable[..., Any]) -> float:
        x = (_drawn(16384, 4096) * 0.5).requires_grad_()
        w = (_drawn(128256, 4096) / 64).requires_grad_()
        target = torch.randint(0, 128256, (16384,), device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(x, w, target).backward()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e9

    ours = peak(rk.linear_cross_entropy)
    theirs = peak(lambda x, w, t: F.cross_entropy(F.linear(x, w), t))
    torch.cuda.empty_cache()
    word = "ok" if ours <= 0.25 * theirs else "WRONG"
    return f"{word}: {ours:.2f} GB against {theirs:.2f} GB, {ours / theirs:.0%}"


def shifted_labels() -> str:
    """Labels that start eight bytes past an aligned address, as shifting by one token leaves them."""
    found = []
    for cols in (1000, 32000):
        x = _drawn(511, cols, dtype=torch.float32)
        target = torch.randint(0, cols, (512,), device="cuda")[1:]
        with torch.no_grad():
            found.append(_close(rk.cross_entropy(x, target), F.cross_entropy(x, target), 1e-5))
    return " ".join(found)


def specials() -> dict[str, Callable[[], str]]:
    return {
        "graph replay": graph_replay,
        "graph of repeated calls": graph_of_repeats,
        "repeated calls on four streams": repeats_on_streams,
        "long rows on two streams": long_rows_on_streams,
        "side stream": side_stream,
        "other thread": other_thread,
        "autocast": autocast,
        "strange numbers": strange_numbers,
        "empty": empty,
        "shifted labels": shifted_labels,
        "opcheck": opchecked,
        "linear cross-entropy memory": linear_cross_entropy_memory,
        "over two billion elements": over_two_billion,
        "compiled whole": compiled_whole,
    }
