"""Rows to experts and back, shared projections, fp8 codes: against plain PyTorch, kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.llm.model.blocks import project
from ridgeline.llm.model.expert_rows import combine, places_of, spread

INTERPRETED = """
import contextlib, torch
from ridgeline.llm.model import expert_row_kernels as rows_kernels
from ridgeline.llm.train import fp8_kernel

torch.manual_seed(0)
T, k, M = 5, 3, 40
x, place, w = torch.randn(T, M), torch.randperm(T * k), torch.rand(T, k)
rows, out, dy, dw = torch.empty(T * k, M), torch.empty(T, M), torch.empty(T * k, M), torch.empty(T, k)
rows_kernels.spread[(T,)](place, x, rows, x, x, x, M, K=k, WEIGHTED=False, BLOCK=64)
assert torch.equal(rows[place], x.repeat_interleave(k, 0))
rows.normal_()
mine = rows[place].view(T, k, M)
rows_kernels.combine[(T,)](place, rows, out, w, M, K=k, WEIGHTED=True, BLOCK=64)
torch.testing.assert_close(out, (mine * w[..., None]).sum(1))
rows_kernels.spread[(T,)](place, x, dy, rows, w, dw, M, K=k, WEIGHTED=True, BLOCK=64)
torch.testing.assert_close(dw, (mine * x[:, None]).sum(-1))
torch.testing.assert_close(dy[place].view(T, k, M), x[:, None] * w[..., None])

torch.cuda.device = lambda device: contextlib.nullcontext()
for dtype, bits in ((torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)):
    for dim, shapes in ((0, ((70, 48), (33, 48))), (1, ((70, 16), (70, 48)))):
        parts = [torch.randn(shape) * (i + 1) for i, shape in enumerate(shapes)]
        whole = torch.cat(parts, dim)
        codes, turned, scale = fp8_kernel.write_codes(parts, dtype, dim)
        assert torch.equal(codes.float().t(), turned.float())
        largest = whole.abs().max()
        assert float(scale) == float(largest / torch.finfo(dtype).max)
        gaps = (codes.float() * scale - whole).abs() / whole.abs().clamp(min=1e-3 * float(largest))
        # The interpreter of Triton 3.6 rounds 1.97 to 1, not 2: it drops the carry out of a mantissa
        assert float((gaps > 2.0 ** -(bits + 1)).float().mean()) < 0.06, (dtype, dim)
print("right")
"""


def test_kernels_compute_what_plain_pytorch_does() -> None:
    pytest.importorskip("triton")
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr[-3000:]


@pytest.mark.parametrize("weighted", [True, False])
def test_rows_of_experts_have_the_gradients_of_indexing(weighted: bool) -> None:
    torch.manual_seed(0)
    order = torch.randperm(12)
    place, found = places_of(order), []
    assert torch.equal(order[place], torch.arange(12))
    x = torch.randn(4, 6, dtype=torch.float64)
    w = torch.rand(4, 3, dtype=torch.float64) if weighted else torch.ones(4, 3, dtype=torch.float64)
    for ours in (True, False):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        if ours:
            y = combine(spread(a, place, 3).sin(), place, 3, b if weighted else None)
        else:
            y = (a[order // 3].sin()[place].unflatten(0, (4, 3)) * b[..., None]).sum(1)
        (y * torch.arange(24.0, dtype=torch.float64).view(4, 6)).sum().backward()
        found.append([y.detach(), a.grad, *([b.grad] if weighted else [])])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_layers_of_one_input_have_the_gradients_of_each() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, n, bias=n == 5, dtype=torch.float64) for n in (4, 5, 6)]
    x, found = torch.randn(7, 8, dtype=torch.float64), []
    for together in (True, False):
        given = x.clone().requires_grad_()
        outputs = project(given, *layers) if together else [layer(given) for layer in layers]
        torch.cat([y.sin() for y in outputs], 1).sum().backward()
        params = [p for layer in layers for p in layer.parameters()]
        found.append([*(y.detach() for y in outputs), given.grad, *(p.grad.clone() for p in params)])
        for p in params:
            p.grad = None
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
