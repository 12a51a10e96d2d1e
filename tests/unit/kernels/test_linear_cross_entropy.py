"""What the fused linear cross-entropy does with the gradients it computed ahead."""

import torch
from torch.nn import functional as F

from ridgeline.kernels import linear_cross_entropy


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
