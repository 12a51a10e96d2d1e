"""Writing into a cache without a GPU: the op writes what it says, and what the kernel does not take is said."""

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import launcher
from ridgeline.kernels.cache_append.op import APPEND, append, refusal
from ridgeline.kernels.compiler import facts_of


def made():
    keys, values = torch.zeros(2, 3, 10, 8), torch.zeros(2, 3, 10, 8)
    k, v = (torch.randn(2, 2, 3, 8).transpose(1, 2) for _ in range(2))
    return keys, values, torch.tensor([4, 7]), k, v


def test_both_caches_are_written_at_their_places_and_nowhere_else():
    keys, values, index, k, v = made()
    append(keys, values, index, k, v)
    assert torch.equal(keys[:, :, index], k) and torch.equal(values[:, :, index], v)
    assert keys.count_nonzero() == k.count_nonzero() and values.count_nonzero() == v.count_nonzero()


def test_the_registered_op_says_what_it_writes():
    torch.library.opcheck(APPEND, made())


def test_one_launch_writes_sixteen_bytes_at_a_time():
    cache = torch.empty(1, 8, 2048, 128, dtype=torch.bfloat16, device="meta")
    new = torch.empty(1, 8, 1, 128, dtype=torch.bfloat16, device="meta")
    with launcher.collecting() as found:
        append(cache, cache, torch.empty(1, dtype=torch.int64, device="meta"), new, new)
    (variant,) = found
    facts = facts_of(launcher.kernel(variant.kernel).function, variant)
    assert facts.num_spills == 0 and facts.num("STG") == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda keys, values, index, k, v: (keys, values[:, :, :9], index, k, v), "caches are"),
        (lambda keys, values, index, k, v: (keys, values, index[:1], k, v), "do not go into"),
        (lambda keys, values, index, k, v: (keys, values, index, k.half(), v), "different types"),
        (lambda keys, values, index, k, v: (keys.double(), values.double(), index, k.double(), v.double()), "float64"),
    ],
)
def test_what_the_kernel_does_not_write_is_said(change, words):
    assert words in refusal(*change(*made()))
