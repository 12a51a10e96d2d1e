"""Writing into a cache without a GPU: the op writes what it says, and what the kernel does not take is said."""

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import launcher, rope
from ridgeline.kernels.cache_append.op import APPEND, ROPE_APPEND, append, refusal, rope_append, turning_refusal
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


def turned(dtype=torch.bfloat16, device="cpu"):
    caches = [torch.zeros(1, 2, 10, 16, dtype=dtype, device=device) for _ in range(2)]
    q, k, v = (torch.randn(1, 1, heads, 16).to(device, dtype).transpose(1, 2) for heads in (4, 2, 2))
    angles = torch.randn(1, 1, 8).repeat(1, 1, 2).to(device, dtype)
    return *caches, torch.tensor([7], device=device), q, k, v, angles.cos(), angles.sin(), False


def test_keys_are_turned_on_their_way_into_the_cache_and_queries_beside_them():
    keys, values, index, q, k, v, cos, sin, _ = given = turned(torch.float32)
    out = rope_append(*given)
    meant_q, meant_k = rope(q, k, cos, sin)
    torch.testing.assert_close(out, meant_q)
    torch.testing.assert_close(keys[:, :, index], meant_k)
    assert torch.equal(values[:, :, index], v) and keys.count_nonzero() == meant_k.count_nonzero()


def test_the_turning_op_says_what_it_writes():
    torch.library.opcheck(ROPE_APPEND, turned(torch.float32))


def test_turning_and_writing_is_one_launch_without_spills():
    def like(heads, places):
        return torch.empty(1, heads, places, 128, dtype=torch.bfloat16, device="meta")

    cache, table = like(8, 2048), torch.empty(1, 1, 128, dtype=torch.bfloat16, device="meta")
    index = torch.empty(1, dtype=torch.int64, device="meta")
    with launcher.collecting() as found:
        rope_append(cache, cache, index, like(32, 1), like(8, 1), like(8, 1), table, table, False)
    (variant,) = found
    assert facts_of(launcher.kernel(variant.kernel).function, variant).num_spills == 0


def test_what_is_not_turned_and_written_is_said():
    keys, values, index, q, k, v, cos, sin, _ = turned(torch.float32)
    assert turning_refusal(keys, values, index, q, k, v, cos, sin) is None
    sparse = q.repeat_interleave(2, -1)[..., ::2]
    assert "dense" in turning_refusal(keys, values, index, sparse, k, v, cos, sin)
    assert "differ" in turning_refusal(keys, values, index, q[..., :8], k, v, cos, sin)
