"""What the fused linear cross-entropy does with the gradients it computed ahead."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from ridgeline.kernels import linear_cross_entropy
from ridgeline.kernels.linear_cross_entropy import config, op


def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 16, generator=generator).requires_grad_()
    w = torch.randn(40, 16, generator=generator).requires_grad_()
    return x, w, torch.randint(0, 40, (12,), generator=generator)


def gradients(scale, **options):
    x, w, target = problem()
    loss = linear_cross_entropy(x, w, target)
    return loss, x, w, torch.autograd.grad(loss * scale, (x, w), **options)


def test_gradients_follow_the_gradient_of_the_loss():
    *_, found = gradients(3.0)
    x, w, target = problem()
    meant = torch.autograd.grad(3.0 * F.cross_entropy(F.linear(x, w), target), (x, w))
    for ours, theirs in zip(found, meant, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    loss, x, w, first = gradients(2.0, retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(loss * 2.0, (x, w), retain_graph=True)
    for a, b in zip(copies, second, strict=True):
        torch.testing.assert_close(a, b)
    third = torch.autograd.grad(loss, (x, w))
    for a, b in zip(copies, third, strict=True):
        torch.testing.assert_close(a, 2 * b)


def test_a_graph_that_is_not_kept_takes_no_second_copy():
    x, w, target = problem()
    loss = linear_cross_entropy(x, w, target)
    kept = loss.grad_fn.saved_tensors
    found = torch.autograd.grad(loss, (x, w))
    assert [g.data_ptr() for g in found] == [g.data_ptr() for g in kept]


@pytest.mark.parametrize(
    ("dtype", "cols", "smoothing", "ends", "width"),
    [
        (torch.bfloat16, 50257, 0.0, [50240, 50257], 50264),
        (torch.float16, 131, 0.0, [128, 131], 136),
        (torch.bfloat16, 50256, 0.0, [50256], 50256),  # whole accesses
        (torch.bfloat16, 50257, 0.1, [50257], 50257),  # smoothed labels count every column
        (torch.float32, 50257, 0.0, [50257], 50257),
        (torch.bfloat16, 33, 0.0, [33], 33),  # no whole tile
    ],
)
def test_an_odd_number_of_classes_is_whole_tiles_and_the_rest(dtype, cols, smoothing, ends, width):
    parts, found = op._parts(torch.empty(4, 8, dtype=dtype), cols, smoothing)
    assert [part.stop for part in parts] == ends and parts[0].start == 0 and found == width
    assert all(a.stop == b.start for a, b in pairwise(parts))


@pytest.mark.parametrize(("rows", "step"), [(100, 2048), (1653, 2048), (8192, 2048), (9000, 2304), (16384, 4096)])
def test_few_rows_are_one_chunk_and_many_are_four(rows, step):
    assert config.default(rows, 128256, 2).rows == step
