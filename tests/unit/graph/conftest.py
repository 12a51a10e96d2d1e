"""Two small graphs that exercise everything a graph can hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.graph import Builder, Graph, Kind, Phase, tensor, with_frees


@pytest.fixture
def mlp() -> Graph:
    """Four equal layers with a residual, between a first and a last projection."""
    b = Builder("mlp", batch=8)
    x = b.input("x", tensor((8, 16)))
    w_in = b.param("proj_in.weight", tensor((16, 32)))
    (h,) = b.node("matmul", [x, w_in], [tensor((8, 32))], module="proj_in", b=1, m=8, n=32, k=16)
    with b.repeat(4, "layers"):
        inner = b.carry(h)
        w = b.param("fc.weight", tensor((32, 32)))
        with b.module("fc"):
            (y,) = b.node("matmul", [inner, w], [tensor((8, 32))], b=1, m=8, n=32, k=32)
        (z,) = b.node("pointwise", [inner, y], [tensor((8, 32))], fn="add")
        b.close_carry(inner, z)
    out = b.view(z, tensor((256,)))
    (loss,) = b.node("reduce", [out], [tensor((), "fp32")], fn="sum", dims=(0,))
    return b.finish([loss])


@pytest.fixture
def trained() -> Graph:
    """A forward block whose inputs are stacked for the backward block that runs the layers in reverse."""
    b = Builder("trained", "train")
    x = b.input("x", tensor((8, 32)))
    (h,) = b.node("copy", [x], [tensor((8, 32))], fn="clone")
    with b.repeat(5, "layers"):
        inner = b.carry(h)
        b.values[inner] = replace(b.values[inner], count=5)
        w = b.param("weight", tensor((32, 32)))
        (y,) = b.node("matmul", [inner, w], [tensor((8, 32))], b=1, m=8, n=32, k=32)
        b.close_carry(inner, y)
    (loss,) = b.node("reduce", [y], [tensor((), "fp32")], fn="sum", dims=(0, 1))
    b.phase = Phase.BACKWARD
    (grad,) = b.node("fill", [], [tensor((8, 32))], fn="ones")
    with b.repeat(5, "layers", reverse=True):
        g = b.carry(grad)
        dw = b.value(tensor((32, 32)), Kind.GRAD, count=5)
        b.node("matmul", [inner, g], [dw], b=1, m=32, n=32, k=8, trans_a=True)
        (dx,) = b.node("matmul", [g, w], [tensor((8, 32))], b=1, m=8, n=32, k=32, trans_b=True)
        b.close_carry(g, dx)
    b.phase = Phase.OPTIMIZER
    b.node("optimizer", [w, dw], [w], fn="sgd", num_tensors=5, numel=5 * 32 * 32)
    return with_frees(b.finish([loss]))
