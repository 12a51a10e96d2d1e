"""Who takes which blocks of keys: both spellings of the cut, run on plain numbers, and what the joins make of it."""

import inspect
import random
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from ridgeline.kernels.paged_attention import kernel

SLOTS = 128


class Numbers(np.ndarray):
    """A vector of a kernel."""

    def to(self, dtype):
        return self.astype(dtype).view(Numbers)


class Number(int):
    """A number of a kernel; comparisons are numbers too."""

    def to(self, dtype):
        return Number(dtype(self))


for name in ("add", "sub", "mul", "floordiv", "mod", "gt", "lt", "le", "ge", "eq", "and", "radd", "rsub", "rmul"):

    def applied(self, other, name=f"__{name}__"):
        found = getattr(int(self), name)(other if isinstance(other, np.ndarray) else int(other))
        return getattr(other, name.replace("__", "__r", 1))(int(self)) if found is NotImplemented else Number(found)

    setattr(Number, f"__{name}__", applied)


def _chosen(condition, a, b):
    if isinstance(condition, np.ndarray):
        return np.where(condition, a, b).view(Numbers)
    return a if condition else b


def _vector(take):
    def found(a, b):
        both = np.asarray(take(np.asarray(a), np.asarray(b)))
        return both.view(Numbers) if both.ndim else Number(both)

    return found


running = SimpleNamespace(pid=0, programs=1)


def language():
    """What the cut asks of Triton and of Gluon."""
    return SimpleNamespace(
        constexpr=object, int32=int, maximum=_vector(np.maximum), minimum=_vector(np.minimum), where=_chosen,
        sum=lambda x, axis: Number(x.sum()), cumsum=lambda x, axis: np.cumsum(x).view(Numbers),
        associative_scan=lambda x, axis, add: np.cumsum(x).view(Numbers), cdiv=lambda a, b: -(-a // b),
        program_id=lambda axis: Number(running.pid), num_programs=lambda axis: Number(running.programs),
    )  # fmt: skip


def spelled(*names):
    """Functions of the kernels as ordinary ones."""
    there = {"tl": language(), "gl": language(), "_add": None}
    for name in names:
        source = textwrap.dedent(inspect.getsource(getattr(kernel, name).fn))
        exec(source[source.index("def ") :], there)
    return [there[name] for name in names]


NEEDED, CUT, OF_PROGRAM = spelled("_needed", "_cut", "_of_program")
_, PLACED, BEGINS, _, SPAN = spelled("_programs_of", "_placed", "_begins", "_whose", "_span")


def slots(numbers):
    """A vector with room for more sequences than there are."""
    return np.array([*numbers] + [0] * (SLOTS - len(numbers))).view(Numbers)


def as_triton(lens, key_heads, programs, keys, least, even):
    """(sequence, key head, first block, blocks, part, parts) of every program, and how the line is cut."""
    blocks, heads = slots([-(-n // keys) for n in lens]), Number(key_heads)
    cut = CUT(blocks, heads, Number(programs), least, even)
    i = np.arange(SLOTS).view(Numbers)
    found = [OF_PROGRAM(Number(pid), i, blocks, Number(len(lens)), heads, cut) for pid in range(programs)]
    return [tuple(map(int, one)) for one in found], tuple(map(int, cut))


def as_gluon(lens, key_heads, programs, keys, least, even):
    """(sequence, key head, first block, blocks, (first, last) program of that key head) of every program."""
    found, heads, running.programs = [], Number(key_heads), programs
    for running.pid in range(programs):
        b, within, cut = PLACED(slots(lens), len(lens), heads, keys, least, even)
        kh, first, left, line = BEGINS(within, Number(lens[int(b)]), cut, heads, keys, even)
        blocks = Number(-(-lens[int(b)] // keys))
        ends = tuple(map(int, SPAN(line[0] - first, blocks, line))) if left > 0 else None
        found.append((int(b), int(kh), int(first), int(left), ends))
    return found


def taken(stretches, lens, key_heads, keys):
    """Every block of the line with the program that takes it."""
    blocks = [-(-n // keys) for n in lens]
    whose = {}
    for pid, (b, kh, first, left, *_) in enumerate(stretches):
        while left > 0:
            last = min(first + left, blocks[b])
            for block in range(first, last):
                assert (b, kh, block) not in whose, "taken twice"
                whose[b, kh, block] = pid
            left -= last - first
            first, kh = 0, kh + 1
            if kh == key_heads:
                b, kh = b + 1, 0
    assert len(whose) == key_heads * sum(blocks), "some are nobody's"
    return whose


def drawn(seed):
    draw = random.Random(seed)
    batch = draw.choice((1, 2, 3, 7, 16, 32))
    longest = draw.choice((1, 17, 64, 300, 3000, 20000))
    same = draw.random() < 0.6
    lens = [longest if same else draw.randrange(longest + 1) for _ in range(batch)]
    if draw.random() < 0.3:
        lens[draw.randrange(batch)] = 0
    return lens, draw.choice((1, 2, 8)), draw.choice((1, 5, 33, 66)), 64, draw.choice((1, 2)), draw.choice((0, 4, 12))


@pytest.mark.parametrize("seed", range(60))
def test_every_block_is_somebodys_and_both_spellings_agree(seed):
    sizes = drawn(seed)
    lens, key_heads, _, keys, *_ = sizes
    triton, (_, each, longer, most) = as_triton(*sizes)
    gluon = as_gluon(*sizes)
    whose = taken(triton, lens, key_heads, keys)
    assert taken(gluon, lens, key_heads, keys) == whose
    most_taken = max((left for _, _, _, left, *_ in triton), default=0)
    assert most_taken <= (most or each + (longer > 0))
    for b, kh, first, left, ends in gluon:
        if left:
            blocks = -(-lens[b] // keys)
            assert ends == (whose[b, kh, 0], whose[b, kh, blocks - 1]), "who leaves parts of what a program begins with"
        if most and left:
            assert kh + -(-(first + left) // max(-(-lens[b] // keys), 1)) <= key_heads, "of one sequence"
            assert first == 0 or first + left <= -(-lens[b] // keys), "parts of two key heads"


@pytest.mark.parametrize(
    ("lens", "key_heads", "programs", "most"),
    [
        ([8000] * 4, 8, 264, 16),  # eight parts of every key head, 256 programs
        ([3000] * 16, 8, 264, 24),  # two each, of a block more than an even cut has
        ([1300] * 128, 1, 132, 21),  # nobody's parts
        ([1800] * 64, 1, 132, 15),
        ([8200] * 2, 8, 264, 0),
        ([1200, 70, 900, 333, 5000], 1, 11, 0),
    ],
)
def test_whole_sequences_where_they_cost_next_to_nothing(lens, key_heads, programs, most):
    _, (*_, found) = as_triton(lens, key_heads, programs, 64, 2, 12)
    assert found == most
