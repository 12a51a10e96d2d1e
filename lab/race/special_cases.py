"""Cases that no table of shapes covers: each function returns "ok" or what went wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch.nn import functional as F

import ridgeline.kernels as rk
from ridgeline.kernels.contract import case, trials


def _drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def _close(found: torch.Tensor, meant: torch.Tensor, tolerance: float = 2e-2) -> str:
    found, meant = found.detach(), meant.detach()
    error = float((found.float() - meant.float()).norm() / meant.float().norm().clamp_min(1e-20))
    return "ok" if error < tolerance else f"WRONG: relative error {error:.3g}"


def _no_worse(found: torch.Tensor, theirs: torch.Tensor, right: torch.Tensor) -> str:
    """At most twice as far from a float64 result as PyTorch."""
    ours, allowed = (float((x.detach().float() - right).norm() / right.norm()) for x in (found, theirs))
    return "ok" if ours < 2 * allowed else f"WRONG: relative error {ours:.3g}, PyTorch's {allowed:.3g}"


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
    """A training step with cached calls, captured and replayed on other data."""
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

    def plain(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        wide, scale, along = (t.detach().to(dtype) for t in (x, w, r))
        wide, scale = wide.requires_grad_(), scale.requires_grad_()
        h = wide + along
        normed = F.rms_norm(h, (4096,), scale, 1e-6)
        return torch.autograd.grad(torch.softmax(F.silu(normed) * h, -1), (wide, scale), along)

    judged = zip(found, plain(torch.bfloat16), plain(torch.float32), strict=True)
    return " ".join(_no_worse(a, b, c) for a, b, c in judged)


def repeats_on_streams() -> str:
    """The same plan from four threads on four streams at once gives each its own results."""
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
    """Rows shared by several CTAs, from two streams at once: no deadlock."""
    return _softmax_on_two(_drawn(300, 100_000), _drawn(200, 262_144), 10)


def few_long_rows_on_streams() -> str:
    """Two kernels with CTAs that wait for each other, each of which would fill the device, from two streams at once."""
    return _softmax_on_two(_drawn(24, 262_144), _drawn(24, 262_144, dtype=torch.float16), 20)


def _softmax_on_two(x: torch.Tensor, y: torch.Tensor, times: int) -> str:
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    outputs = []
    for _ in range(times):
        outputs = []
        for stream, value in zip(streams, (x, y), strict=True):
            with torch.cuda.stream(stream), torch.no_grad():
                outputs.append(rk.softmax(value))
    torch.cuda.synchronize()
    return " ".join(_close(o, torch.softmax(v, -1)) for o, v in zip(outputs, (x, y), strict=True))


def long_rows_in_a_graph() -> str:
    """CTAs that share rows, in softmax, a norm's gradients and GroupNorm, captured and replayed on other data."""
    x, r = _drawn(40, 65536).requires_grad_(), _drawn(40, 65536)
    w = _drawn(65536).requires_grad_()
    image, scale = _drawn(4, 160, 128, 128), _drawn(160)

    def step() -> tuple[torch.Tensor, ...]:
        soft = rk.softmax(x)
        normed = rk.layer_norm(x, w, None, 1e-5)
        grads = torch.autograd.grad((soft, normed), (x, w), (r, r))
        return soft, *grads, rk.group_norm(image, 32, scale, scale)

    def meant() -> tuple[torch.Tensor, ...]:
        soft = torch.softmax(x, -1)
        normed = F.layer_norm(x, (65536,), w, None, 1e-5)
        return soft, *torch.autograd.grad((soft, normed), (x, w), (r, r)), F.group_norm(image, 32, scale, scale)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(6):
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        x.copy_(_drawn(40, 65536))
        image.copy_(_drawn(4, 160, 128, 128))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return " ".join(_close(a, b) for a, b in zip(found, meant(), strict=True))


def side_stream() -> str:
    """Ordered with other work on the current stream."""
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
    """A thread that never used CUDA has no current context."""
    x, w = _drawn(64, 4096), _drawn(4096)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(rk.rms_norm(x, w, 1e-6)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    return _close(found[0], F.rms_norm(x, (4096,), w, 1e-6)) if found else "WRONG: the thread failed"


def compiled_whole() -> str:
    """One graph without breaks, forward and backward, with the same results."""

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
    """torch.library.opcheck on CUDA tensors."""
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
            if name == "softmax":  # a fully masked row is uniform
                x[4, :] = torch.finfo(torch.float32).min
            ours, theirs = trial.call(*args), trial.eager(*args)
            same = torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())
            if not same:
                rows = [i for i in range(6) if not torch.equal(ours[i].isnan(), theirs[i].isnan())]
                wrong.append(f"{name} {cols} rows {rows}")
    return "ok" if not wrong else f"WRONG: {wrong}"


def strange_words() -> str:
    """NaN, infinities and lowest numbers in packed 16-bit rows."""
    wrong = []
    for dtype, shape in ((torch.bfloat16, (300, 24000)), (torch.float16, (300, 50257)), (torch.bfloat16, (2, 131072))):
        x = _drawn(*shape, dtype=dtype)
        x[0, 3], x[1, -1] = float("nan"), float("inf")
        if len(x) > 2:
            x[2, 5], x[3, :], x[4, :] = float("-inf"), float("-inf"), torch.finfo(dtype).min
            x[5, 100] = torch.finfo(dtype).max
        ours, theirs = rk.softmax(x), torch.softmax(x, -1)
        rows = [_close(a, b) for a, b in zip(ours.nan_to_num()[2:], theirs.nan_to_num()[2:], strict=True)]
        if not torch.equal(ours.isnan(), theirs.isnan()) or set(rows) - {"ok"}:
            wrong.append(f"softmax {dtype} {shape} {set(rows)}")
    for cols in (3000, 8192, 18008):
        x, target = _drawn(4096, cols), torch.randint(0, cols, (4096,), device="cuda")
        x[0, 3], x[2, 5], target[7] = float("nan"), float("-inf"), -100
        x[4, :] = 300.0
        ours = rk.cross_entropy(x, target, reduction="none")
        theirs = F.cross_entropy(x.float(), target, reduction="none")
        same = torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())
        close = _close(ours.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0))
        if not same or close != "ok" or ours[7] != 0:
            wrong.append(f"cross_entropy {cols} {close}")
    return "ok" if not wrong else f"WRONG: {wrong}"


def outliers_first() -> str:
    """Groups whose first numbers are outliers: sums of squares are shifted by those."""
    x, w = _drawn(90, 128, 28, 28), _drawn(128)
    x.view(90, 16, -1)[:, :, :32] += 3000.0
    ours, theirs = rk.group_norm(x, 16, w, w), F.group_norm(x, 16, w, w)
    return _no_worse(ours, theirs, F.group_norm(x.double(), 16, w.double(), w.double()).float())


def empty() -> str:
    """No rows: nothing is launched, gradients of the weights are zero."""
    x, w = _drawn(0, 512).requires_grad_(), _drawn(512).requires_grad_()
    y = rk.rms_norm(x, w, 1e-6)
    y.sum().backward()
    z = rk.softmax(_drawn(0, 512)), rk.swiglu(_drawn(0, 512), _drawn(0, 512)), rk.relu2(_drawn(0))
    good = y.shape == (0, 512) and bool((w.grad == 0).all()) and all(t.numel() == 0 for t in z)
    return "ok" if good else "WRONG"


def over_two_billion() -> str:
    """More than 2³¹ elements: the last rows are correct."""
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


def _params(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(5)
    drawn = (torch.randn(size, device="cuda", generator=generator) for size in sizes)
    return [torch.nn.Parameter(p.to(dtype)) for p in drawn]


def _with_grads(params: list[torch.Tensor], seed: int, by: float = 1.0) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for p in params:
        p.grad = (by * torch.randn(p.shape, device="cuda", generator=generator)).to(p.dtype)


def _same_lists(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-6) -> str:
    return _close(torch.cat([p.detach().float().view(-1) for p in ours]),
                  torch.cat([p.detach().float().view(-1) for p in theirs]), tolerance)  # fmt: skip


SIZES = (70_001, 16, 1, 4096, 30_000)


def optimizer_steps() -> str:
    """Six steps with gradients at changing addresses, some missing, against PyTorch's own."""
    ours, theirs = _params(SIZES), _params(SIZES)
    a, b = rk.AdamW(ours, 1e-2, max_norm=1.0), torch.optim.AdamW(theirs, 1e-2, fused=True)
    kept = []
    for step in range(6):
        for params in (ours, theirs):
            _with_grads(params, step)
            if step == 3:
                params[1].grad = None
        kept.append(torch.empty(1000 * step + 1, device="cuda"))
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        a.step()
        b.step()
    return _same_lists(ours, theirs)


def optimizer_graph() -> str:
    """A captured step keeps counting when replayed, and follows a learning rate that is a tensor."""
    ours, theirs = _params(SIZES), _params(SIZES)
    lr = torch.tensor(1e-2, device="cuda")
    a, b = rk.AdamW(ours, lr, max_norm=1.0), torch.optim.AdamW(theirs, 1e-2, fused=True)
    _with_grads(ours, 0)
    a.step()  # creates state and pointer tables
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    graph.replay()
    lr.fill_(5e-3)
    graph.replay()
    for rate in (1e-2, 1e-2, 5e-3):
        b.param_groups[0]["lr"] = rate
        _with_grads(theirs, 0)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        b.step()
    return _same_lists(ours, theirs)


def optimizer_state() -> str:
    """State dicts are interchangeable with PyTorch's optimizer; eight-bit states stay near the exact result."""
    ours, theirs = _params(SIZES), _params(SIZES)
    a, b = rk.AdamW(ours, 1e-2), torch.optim.AdamW(theirs, 1e-2, fused=True)
    for params, made in ((ours, a), (theirs, b)):
        _with_grads(params, 1)
        made.step()
    a.load_state_dict(b.state_dict())
    b.load_state_dict(deepcopy(a.state_dict()))  # PyTorch's would share the tensors
    for params, made in ((ours, a), (theirs, b)):
        _with_grads(params, 2)
        made.step()
    found = [_same_lists(ours, theirs)]
    narrow = _params(SIZES)
    c = rk.AdamW(narrow, 1e-2, state_bits=8)
    for step in (1, 2):
        _with_grads(narrow, step)
        c.step()
    found.append(_same_lists(narrow, ours, 2e-3))
    d = rk.AdamW(narrow, 1e-2, state_bits=8)
    d.load_state_dict(c.state_dict())
    same = all(torch.equal(c.state[p]["exp_avg"], d.state[p]["exp_avg"]) for p in narrow)
    return " ".join([*found, "ok" if same else "WRONG: eight-bit state changes when it is loaded"])


def optimizer_scaler() -> str:
    """With a gradient scaler an overflow skips the step without counting it."""
    ours, theirs = _params(SIZES), _params(SIZES)
    a, b = rk.AdamW(ours, 1e-2, max_norm=1.0), torch.optim.AdamW(theirs, 1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for step in range(3):
        scaler.scale(torch.zeros((), device="cuda"))
        _with_grads(ours, step, 256.0)
        if step == 1:
            ours[0].grad[7] = float("inf")
        scaler.step(a)
        scaler.update(256.0)
        if step != 1:
            _with_grads(theirs, step)
            torch.nn.utils.clip_grad_norm_(theirs, 1.0)
            b.step()
    return _same_lists(ours, theirs)


def clip_leaves_small_norms() -> str:
    """Below the bound nothing is written; the norm equals PyTorch's."""
    params = _params(SIZES)
    _with_grads(params, 3)
    before = [p.grad.clone() for p in params]
    norm = rk.clip_grad_norm_(params, 1e6)
    meant = torch.nn.utils.get_total_norm(before)
    same = all(torch.equal(p.grad, old) for p, old in zip(params, before, strict=True))
    return _close(norm, meant, 1e-6) + (" ok" if same else " WRONG: gradients changed")


def strange_indices() -> str:
    """An index out of range gives NaN in its own bag only; empty bags are zeros."""
    weight = _drawn(100, 64, dtype=torch.float32)
    indices = torch.tensor([1, 2, 1000, 3, -1], device="cuda")
    offsets = torch.tensor([0, 2, 2, 3, 4, 5], device="cuda")
    out = rk.embedding_bags(weight, indices, offsets)
    bad = out.isnan().all(1).tolist()
    none = rk.embedding_bags(weight, indices[:0], torch.zeros(4, dtype=torch.long, device="cuda"))
    good = bad == [False, False, True, False, True] and not out[:2].isnan().any() and bool((none == 0).all())
    return "ok" if good and bool((out[1] == 0).all()) else f"WRONG: {bad}"


def tables_train() -> str:
    """Three steps of a module of tables against F.embedding_bag and PyTorch's SGD on each."""
    rows, dim, batch = (50, 3000, 7), 64, 128
    ours = rk.EmbeddingBags(rows, dim, optimizer="sgd", lr=0.1, device="cuda")
    tables = [torch.nn.Parameter(part.clone()) for part in ours.weight.split(list(rows))]
    theirs = torch.optim.SGD(tables, lr=0.1)
    for step in range(3):
        generator = torch.Generator("cuda").manual_seed(step)
        per = [torch.randint(0, n, (batch * 4,), device="cuda", generator=generator) for n in rows]
        offsets = torch.arange(0, 3 * batch * 4 + 1, 4, device="cuda")
        grad = torch.randn(batch, 3 * dim, device="cuda", generator=generator)
        ours(torch.cat(per), offsets).backward(grad)
        starts = torch.arange(0, batch * 4, 4, device="cuda")
        found = [F.embedding_bag(i, w, starts, mode="sum") for i, w in zip(per, tables, strict=True)]
        torch.cat(found, 1).backward(grad)
        theirs.step()
        theirs.zero_grad()
    return _same_lists([ours.weight], tables, 1e-5)


def opchecked_lists() -> str:
    """torch.library.opcheck of the ops over lists and tables, on CUDA tensors."""
    ops = torch.ops.ridgeline_kernels
    lists = [[_drawn(40, dtype=torch.float32), _drawn(7, dtype=torch.float32)] for _ in range(4)]
    lists[3] = [v.abs() for v in lists[3]]
    steps = [torch.zeros((), device="cuda") for _ in range(2)]
    torch.library.opcheck(ops.adamw.default, (*lists, steps, 1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, False))
    torch.library.opcheck(ops.clip_grad_norm_.default, (lists[1], 1.0))
    weight = _drawn(20, 16, dtype=torch.float32).requires_grad_()
    bags = (torch.randint(0, 20, (12,), device="cuda"), torch.tensor([0, 5, 12], device="cuda"))
    torch.library.opcheck(ops.embedding_bag.default, (weight, *bags, None, None, None, 1, False, -1, "float32"))
    x = _drawn(8, 32, dtype=torch.float32).requires_grad_()
    torch.library.opcheck(ops.dot_interaction.default, (x, _drawn(8, 3, 32, dtype=torch.float32).requires_grad_()))
    torch.library.opcheck(ops.quantize.default, (x.detach(), None, "int8", "row", 0))
    w = _drawn(32, 32, dtype=torch.float32).requires_grad_()
    torch.library.opcheck(ops.cross_layer.default, (x, x.detach().clone().requires_grad_(), w, None, None))
    return "ok"


def _caches(name: str, heads: int) -> tuple[Any, ...]:
    """A decoding call whose cache is NaN where nothing was written: past each end, and in unused pages."""
    sizes = {"b": 4, "h": heads, "s": 700, "page": 64, "uneven": False}
    sizes |= {"d": 512, "e": 64} if name == "paged_latent_attention" else {"d": 128, "k": 8}
    args = list(trials()[name][1].make(case("bfloat16", **sizes), torch.device("cuda"), torch.Generator("cuda")))
    places = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor) and value.dtype == torch.int32]
    lens = torch.tensor([700, 0, 1, 129], device="cuda", dtype=torch.int32)
    table, args[places[1]] = args[places[0]], lens
    written = torch.zeros(args[1].shape[:2], dtype=torch.bool, device="cuda")
    for row, length in zip(table.tolist(), lens.tolist(), strict=True):
        for i, page in enumerate(row):
            written[page, : max(0, min(64, length - 64 * i))] = True
    for i in range(1, places[0]):
        args[i] = args[i].masked_fill(~written.view(*written.shape, *[1] * (args[i].dim() - 2)), float("nan"))
    return tuple(args)


def unwritten_caches() -> str:
    """Unwritten keys may hold anything, and a sequence without keys gets zeros."""
    said = []
    for name, heads in (("paged_attention", 32), ("paged_latent_attention", 128), ("paged_latent_attention", 8)):
        trial, args = trials()[name][1], _caches(name, heads)
        found = trial.call(*args)
        clean = [x.nan_to_num() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        meant = trial.reference(*[x.double() if x is not None and torch.is_tensor(x) and x.is_floating_point() else x
                                  for x in clean])  # fmt: skip
        said.append("ok" if torch.equal(found[1], torch.zeros_like(found[1])) else "WRONG: no keys, and not zero")
        said.append(_close(found[[0, 2, 3]], meant[[0, 2, 3]]))
    return " ".join(said)


def attention_in_graphs() -> str:
    """Kernels with programmatic dependent launch, captured and replayed on other data."""
    said = []
    q, k, v = (_drawn(2, heads, 300, 64).requires_grad_() for heads in (8, 2, 2))
    cache = [_drawn(2, 8, 3000, 128) for _ in range(2)]
    row = _drawn(2, 32, 1, 128)

    def step() -> tuple[torch.Tensor, ...]:
        out = rk.attention(q, k, v, True)
        return *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), rk.decode_attention(row, *cache)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(5):
        with torch.no_grad():
            for x in (q, k, v, row, *cache):
                x.copy_(_drawn(*x.shape))
        graph.replay()
        meant = step()
        said.append("ok" if all(torch.equal(a, b) for a, b in zip(found, meant, strict=True)) else "WRONG: other bits")
    return " ".join(said)


def specials() -> dict[str, Callable[[], str]]:
    return {
        "lists: steps": optimizer_steps,
        "lists: graph": optimizer_graph,
        "lists: state dict": optimizer_state,
        "lists: gradient scaler": optimizer_scaler,
        "lists: small norms": clip_leaves_small_norms,
        "lists: tables train": tables_train,
        "lists: strange indices": strange_indices,
        "lists: opcheck": opchecked_lists,
        "decoding: caches that were never written": unwritten_caches,
        "attention in graphs": attention_in_graphs,
        "graph replay": graph_replay,
        "graph of repeated calls": graph_of_repeats,
        "repeated calls on four streams": repeats_on_streams,
        "long rows on two streams": long_rows_on_streams,
        "few long rows on two streams": few_long_rows_on_streams,
        "long rows in a graph": long_rows_in_a_graph,
        "side stream": side_stream,
        "other thread": other_thread,
        "autocast": autocast,
        "strange numbers": strange_numbers,
        "strange numbers two a word": strange_words,
        "outliers first": outliers_first,
        "empty": empty,
        "shifted labels": shifted_labels,
        "opcheck": opchecked,
        "linear cross-entropy memory": linear_cross_entropy_memory,
        "over two billion elements": over_two_billion,
        "compiled whole": compiled_whole,
    }
