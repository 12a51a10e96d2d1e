"""Parts of sequences that carry marks: who leaves them, who joins them, for whom anybody waits."""

import inspect
import random
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from ridgeline.kernels import launcher
from ridgeline.kernels.compiler import facts_of
from ridgeline.kernels.contract import case
from ridgeline.kernels.paged_attention import config, kernel
from ridgeline.kernels.variants import variants_of

SLOTS, KEYS, LEAST = 128, 64, 2
running = SimpleNamespace(pid=0, programs=1)


class Numbers(np.ndarray):
    """A vector of a kernel."""

    def to(self, dtype):
        return self.astype(dtype).view(Numbers)


def spelled(*names):
    """Functions of the kernel as ordinary ones."""
    gl = SimpleNamespace(
        constexpr=object, int32=int, sum=lambda x, axis: int(x.sum()), where=np.where,
        associative_scan=lambda x, axis, add: np.cumsum(x).view(Numbers), program_id=lambda axis: running.pid,
        num_programs=lambda axis: running.programs,
    )  # fmt: skip
    there = {"gl": gl, "_add": None}
    for name in names:
        source = textwrap.dedent(inspect.getsource(getattr(kernel, name).fn))
        exec(source[source.index("def ") :], there)
    return [there[name] for name in names]


PLACED, _, SPAN = spelled("_placed", "_whose", "_span")


def pieces(lens, key_heads):
    """(sequence, key head, first block, last, blocks, where in the line) of everything the running program takes."""
    padded = np.array([*lens] + [0] * (SLOTS - len(lens))).view(Numbers)
    b, within, left, (at, each, longer) = PLACED(padded, len(lens), key_heads, KEYS, LEAST)
    of_head = max(-(-lens[b] // KEYS), 1)
    kh, first = within // of_head, within % of_head
    while left > 0:
        blocks = -(-lens[b] // KEYS)
        last = min(first + left, blocks)
        if last > first:
            yield b, kh, first, last, blocks, SPAN(at - first, blocks, each, longer)
        left, at = left - (last - first), at + last - first
        first, kh = 0, kh + 1
        if kh == key_heads:
            b, kh = b + 1, 0


def drawn(seed):
    draw = random.Random(seed)
    batch, longest = draw.choice((1, 2, 7, 40)), draw.choice((1, 64, 300, 3000, 20000))
    lens = [longest if draw.random() < 0.4 else draw.randrange(longest + 1) for _ in range(batch)]
    return lens, draw.choice((1, 2, 8)), draw.choice((1, 5, 33, 66)), draw.choice((1, 2, 4))


@pytest.mark.parametrize("seed", range(40))
def test_every_slice_of_every_part_is_joined_by_one_of_the_last_programs_of_its_sequence(seed):
    lens, key_heads, running.programs, slices = drawn(seed)
    left, joined = {}, {}
    for pid in range(running.programs):
        mine, running.pid = None, pid
        for b, kh, first, last, blocks, span in pieces(lens, key_heads):
            if first == 0 and last == blocks:
                continue
            left.setdefault((b, kh), []).append((pid, 2 * pid + (first == 0)))
            if first > 0:
                assert mine is None, "a program joins one key head at most"
                mine = b, kh, span
        if mine is not None:
            b, kh, (begins, ends) = mine
            spread = min(ends - begins, slices)
            for one in range(ends - pid, slices, spread):
                if ends - pid < spread:
                    assert ends - pid < slices, "nobody waits for more than so many that come after"
                    joined.setdefault((b, kh), []).append(one)
                    read = [2 * part + (part == begins) for part in range(begins, ends + 1)]
                    assert joined[b, kh].count(one) == 1
                    left.setdefault(("read", b, kh), read)
    parts = {key: found for key, found in left.items() if key[0] != "read"}
    for key, found in parts.items():
        assert sorted(joined[key]) == list(range(slices)), "all columns, each once"
        assert left["read", *key] == [place for _, place in found], "what is read and cleared is what was left"


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((264, 2400, 4, 128), (1, 2)), ((264, 32, 4, 128), (4, 16)), ((264, 64, 16, 128), (4, 4)),
        ((264, 9, 1, 64), (2, 32)), ((264, 300, 1, 128), (1, 4)),
    ],
)  # fmt: skip
def test_no_two_warps_ask_for_the_same_part(sizes, found):
    slices, at_once = config.linked_tile(*sizes)
    assert (slices, at_once) == found
    twos = max(config.power_of_two(sizes[2]) // 2, 1)
    assert at_once * min(4, twos) >= 4 and sizes[3] // slices >= 32


@pytest.mark.parametrize(("h", "k", "d", "page"), [(32, 8, 128, 16), (16, 8, 64, 16), (9, 3, 256, 48)])
def test_numbers_and_their_marks_are_one_access(h, k, d, page, monkeypatch):
    slices, at_once = config.linked_tile(132 if d == 256 else 264, 132 * k, h // k, d)
    chosen = config.choose(132, k, 512, d, 132, ratio=h // k, fed=True)
    more = {"inside": False, "slices": slices, "linked": at_once, "skips": True, "max_registers": 128}
    monkeypatch.setattr(config, "choose", lambda **named: type(chosen)(**(as_dict(chosen) | more)))
    launcher.forget_plans()
    of = case("bfloat16", b=132, h=h, k=k, s=512, d=d, page=page, uneven=True)
    (variant,) = variants_of("paged_attention", [of])
    launcher.forget_plans()
    facts = facts_of(launcher.kernel(variant.kernel).function, variant)
    assert facts.num_spills == 0 and facts.num("ATOMG") == 0 and facts.num("MEMBAR.ALL.GPU") == 0
    assert facts.num("STG.E.128.STRONG.GPU") > 0 and facts.num("LDG.E.128.STRONG.GPU") > 0
    assert (1 if d == 256 else 2) * (facts.shared_bytes + 1024) <= 228 * 1024


def as_dict(chosen):
    return {name: getattr(chosen, name) for name in chosen.__dataclass_fields__}
