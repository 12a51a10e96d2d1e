"""Arguments that only seem equal, results that hold what a call made, memory that is shared or kept."""

from __future__ import annotations

import collections
import ctypes
import functools
import queue
import threading
import types
from collections import defaultdict, deque

import numpy as np
import torch
from adversarial_callers import CallerCase, calls, of, x
from torch import nn

ARGUMENTS: list[CallerCase] = []


def add(name, model, script, **kw):
    ARGUMENTS.append(CallerCase(name, model, script, **kw))


def given(name, function, *values, first=None, **kw):
    """Called with values in turn; optimized with the first."""

    def script(m):
        for i, v in enumerate(values):
            v = v() if callable(v) and getattr(v, "make", False) else v
            yield m(x(i), v)
            yield m(x(i + 50), v)
        v = values[0]() if callable(values[0]) and getattr(values[0], "make", False) else values[0]
        yield m(x(90), v)

    def inp():
        v = values[0]
        v = v() if callable(v) and getattr(v, "make", False) else v
        return ((x(), v), {})

    add(name, of(function), script, inputs=inp, **kw)


def mk(f):
    f.make = True
    return f


# --- arguments equal and not the same
given(
    "complex zeros of either sign",
    lambda m, y, v: m.inner(y) * (1.0 if str(v) == "0j" else 2.0),
    0j,
    complex(-0.0, 0.0),
    complex(0.0, -0.0),
)
given("ranges that count alike and end elsewhere", lambda m, y, v: m.inner(y) * v.stop, range(0, 3, 2), range(0, 4, 2))


class Word(str):
    pass


class Num(int):
    def __new__(cls, v, **k):
        o = super().__new__(cls, v)
        o.__dict__.update(k)
        return o


class Fl(float):
    pass


given("words of a class of their own", lambda m, y, v: m.inner(y) * len(v), Word("a"), Word("abc"))
given("numbers of a class of their own", lambda m, y, v: m.inner(y) * v, Num(2), Num(3))
given("numbers of another class of their own", lambda m, y, v: m.inner(y) * v, Fl(2.5), Fl(3.5))
given(
    "numbers of a class of their own, marked", lambda m, y, v: m.inner(y) * v.mark, Num(2, mark=1.0), Num(2, mark=4.0)
)


class By(bytes):
    pass


given("bytes of a class of their own", lambda m, y, v: m.inner(y) * v[0], By(b"\x02"), By(b"\x03"))
given(
    "sets of equal values of other types",
    lambda m, y, v: (torch.ones(3, dtype=torch.bool) * next(iter(v)), m.inner(y)),
    {1},
    {True},
    {1.0},
)
given(
    "frozen sets of equal values of other types",
    lambda m, y, v: (torch.ones(3, dtype=torch.bool) * next(iter(v)), m.inner(y)),
    frozenset({1}),
    frozenset({True}),
    frozenset({1.0}),
)


def _s(*a):
    s = set()
    for i in a:
        s.add(i)
    return s


given("sets in another order", lambda m, y, v: m.inner(y) * (1.0 + next(iter(v))), _s(0, 8), _s(8, 0))
given(
    "keys of equal values of other types",
    lambda m, y, v: (torch.ones(3, dtype=torch.bool) * next(iter(v)), m.inner(y)),
    {1: 0},
    {True: 0},
)
given("keys of negative zero", lambda m, y, v: m.inner(y) / next(iter(v)), {0.0: 0}, {-0.0: 0})
given(
    "tuples as keys of equal values of other types",
    lambda m, y, v: (torch.ones(3, dtype=torch.bool) * next(iter(v))[0], m.inner(y)),
    {(1,): 0},
    {(True,): 0},
)
given(
    "a set that is added to",
    lambda m, y, v: (v.add("seen"), m.inner(y))[1] * len(v),
    mk(lambda: {"a"}),
    mk(lambda: {"a"}),
)


def _setadd(m):
    s = {"a"}
    out = m(x(0), s)
    yield out, sorted(s)
    out = m(x(1), {"a"})
    yield out
    t = {"a"}
    m(x(2), t)
    yield sorted(t)


add(
    "a set that is added to, looked at",
    of(lambda m, y, v: (v.add("seen"), m.inner(y))[1]),
    _setadd,
    inputs=lambda: ((x(), {"a"}), {}),
)


def _bytearr(m):
    for i in range(3):
        b = bytearray(b"\x01\x02")
        yield m(x(i), b), bytes(b)


add(
    "bytes that are written to",
    of(lambda m, y, v: (v.__setitem__(0, 7), m.inner(y))[1]),
    _bytearr,
    inputs=lambda: ((x(), bytearray(b"\x01\x02")), {}),
)


def _same_ba(m):
    b = bytearray(b"\x01\x02")
    yield m(x(0), b)
    yield m(x(1), b)
    b[0] = 5
    yield m(x(2), b)
    yield m(x(3), b)


BA = bytearray(b"\x01\x02")
add("bytes given that change", of(lambda m, y, v: m.inner(y) * v[0]), _same_ba, inputs=lambda: ((x(), BA), {}))


def _obj_same(make, change):
    held = {}

    def inp():
        held["v"] = make()
        return ((x(), held["v"]), {})

    def script(m):
        v = held["v"]
        yield m(x(0), v)
        yield m(x(1), v)
        change(v)
        yield m(x(2), v)
        yield m(x(3), v)

    return {"inputs": inp}, script


def same_object(name, function, make, change, **kw):
    i, s = _obj_same(make, change)
    add(name, of(function), s, **i, **kw)


same_object(
    "a number of C's given",
    lambda m, y, v: m.inner(y) * v.value,
    lambda: ctypes.c_double(2.0),
    lambda v: setattr(v, "value", 5.0),
)
same_object(
    "a view of bytes given",
    lambda m, y, v: m.inner(y) * v[0],
    lambda: memoryview(bytearray(b"\x02")),
    lambda v: v.__setitem__(0, 5),
)
same_object(
    "an event given", lambda m, y, v: m.inner(y) * (2.0 if v.is_set() else 3.0), threading.Event, lambda v: v.set()
)
same_object("a queue given", lambda m, y, v: m.inner(y) * (1.0 + v.qsize()), queue.Queue, lambda v: v.put(1))
same_object(
    "a partial function given",
    lambda m, y, v: v(m.inner(y)),
    lambda: functools.partial(torch.mul, other=2.0),
    lambda v: v.keywords.update(other=5.0),
)
same_object(
    "an array given that is written to",
    lambda m, y, v: m.inner(y) * float(v[0]),
    lambda: np.array([2.0]),
    lambda v: v.__setitem__(0, 5.0),
)


class Pt:
    __slots__ = ("s",)

    def __init__(self, s):
        self.s = s


same_object(
    "an object with slots given", lambda m, y, v: m.inner(y) * v.s, lambda: Pt(2.0), lambda v: setattr(v, "s", 5.0)
)


class PD:
    def __init__(self):
        self._h = {"s": 2.0}

    @property
    def s(self):
        return self._h["s"]


same_object("an object with a property given", lambda m, y, v: m.inner(y) * v.s, PD, lambda v: v._h.update(s=5.0))


class GA:
    def __getattr__(self, n):
        return REG[n]


REG = {"s": 2.0}
same_object(
    "an object that finds its attributes elsewhere",
    lambda m, y, v: m.inner(y) * v.s,
    GA,
    lambda v: REG.update(s=5.0),
    reset=lambda: REG.update(s=2.0),
)
same_object(
    "a deque given that is turned", lambda m, y, v: m.inner(y) * v[0], lambda: deque([2.0, 3.0]), lambda v: v.rotate(1)
)
same_object(
    "a default dictionary given",
    lambda m, y, v: m.inner(y) * v["s"],
    lambda: defaultdict(lambda: 2.0),
    lambda v: v.__setitem__("s", 5.0),
)
same_object(
    "a namespace given",
    lambda m, y, v: m.inner(y) * v.s,
    lambda: types.SimpleNamespace(s=2.0),
    lambda v: setattr(v, "s", 5.0),
)
same_object(
    "a view of a dictionary given",
    lambda m, y, v: m.inner(y) * v["s"],
    lambda: types.MappingProxyType(REG),
    lambda v: REG.update(s=5.0),
    reset=lambda: REG.update(s=2.0),
)
same_object(
    "an iterator given",
    lambda m, y, v: m.inner(y) * next(v),
    lambda: iter([2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]),
    lambda v: None,
)
same_object(
    "a generator given", lambda m, y, v: m.inner(y) * next(v), lambda: (float(i) for i in range(2, 99)), lambda v: None
)
same_object(
    "a lambda with a variable given",
    lambda m, y, v: v(m.inner(y)),
    lambda: (lambda box: lambda t: t * box[0])([2.0]),
    lambda v: v.__closure__[0].cell_contents.__setitem__(0, 5.0),
)
same_object(
    "a model's own buffer in an object",
    lambda m, y, v: m.inner(y) * v.s,
    lambda: Box2(torch.tensor(2.0)),
    lambda v: setattr(v, "s", torch.tensor(5.0)),
)


class Box2:
    def __init__(self, s):
        self.s = s


same_object(
    "a tensor in an object, written to",
    lambda m, y, v: m.inner(y) * v.s,
    lambda: Box2(torch.tensor(2.0)),
    lambda v: v.s.fill_(5.0),
)
same_object(
    "a tensor in an object, another's memory",
    lambda m, y, v: m.inner(y) * v.s,
    lambda: Box2(torch.tensor([2.0, 3.0])[:1]),
    lambda v: setattr(v, "s", torch.tensor([9.0, 5.0])[1:]),
)
# --- views of storage
BASE = [None]


def _strided_in():
    BASE[0] = x(5, 6, 8)
    return ((BASE[0][2:4],), {})


def _strided(m):
    for i in range(3):
        b = x(60 + i, 6, 8)
        yield m(b[2:4])


add(
    "rows before an input, by strides",
    of(lambda m, y: m.inner(y.as_strided((2, 8), (8, 1), 0))),
    _strided,
    inputs=_strided_in,
)
add(
    "rows after an input, by strides",
    of(lambda m, y: m.inner(y.as_strided((4, 8), (8, 1)))),
    _strided,
    inputs=_strided_in,
)


def _gaps(m):
    for i in range(3):
        yield m(x(70 + i, 4, 16)[:, ::2])


add(
    "what lies between an input's elements",
    of(lambda m, y: m.inner(y.as_strided((4, 8), (16, 1)))),
    _gaps,
    inputs=lambda: ((x(5, 4, 16)[:, ::2],), {}),
)
add("an input by strides, from its start", of(lambda m, y: m.inner(y.as_strided((4, 8), (8, 1), 0))), calls())


def _off(m):
    for i in range(3):
        b = x(80 + i, 5, 8)
        yield m(b[1:])


add(
    "an input by strides, counted from its storage",
    of(lambda m, y: m.inner(torch.as_strided(y, (3, 8), (8, 1), 8))),
    _off,
    inputs=lambda: ((x(5, 5, 8)[1:],), {}),
)
add("an input by strides within itself", of(lambda m, y: m.inner(y.as_strided((2, 8), (16, 1)))), calls())
add("as other numbers", of(lambda m, y: (m.inner(y), y.view(torch.int32) + 1)), calls())
add("set to other memory", of(lambda m, y: m.inner(torch.empty(0).set_(y))), calls())


def _resized(m):
    for i in range(3):
        t = x(i, 2, 8)
        o = m(t)
        yield o, t.shape, t


add(
    "an input made larger",
    of(lambda m, y: (y.resize_(3, 8).fill_(1.0), m.inner(y))[1]),
    _resized,
    inputs=lambda: ((x(0, 2, 8),), {}),
)


def _tr(m):
    for i in range(3):
        t = x(i, 8, 4)
        o = m(t)
        yield o, t.shape, t


add("an input turned in place", of(lambda m, y: (y.t_(), m.inner(y))[1]), _tr, inputs=lambda: ((x(0, 8, 4),), {}))


def _unsq(m):
    for i in range(3):
        t = x(i, 4, 8)
        o = m(t)
        yield o, t.shape


add("an input with one more dim in place", of(lambda m, y: (y.unsqueeze_(0), m.inner(y))[1]), _unsq)


def _rg(m):
    for i in range(3):
        t = x(i, 4, 8)
        o = m(t)
        yield o.detach(), t.requires_grad


add("an input asked to learn in place", of(lambda m, y: (y.requires_grad_(), m.inner(y))[1]), _rg)


def _mark(m):
    for i in range(3):
        t = x(i, 4, 8)
        o = m(t)
        yield o, getattr(t, "seen", None)


add("an input marked", of(lambda m, y: (setattr(y, "seen", 1), m.inner(y))[1]), _mark)


def _dat(m):
    for i in range(3):
        t = x(i, 4, 8)
        o = m(t)
        yield o, t


add("an input's data replaced", of(lambda m, y: (setattr(y, "data", y.data * 2), m.inner(y))[1]), _dat)


# --- results
class Tag(str):
    pass


def _tag(m, y):
    t = Tag("a")
    t.y = m.inner(y)
    return t


def _tagged(m):
    for i in range(3):
        t = m(x(i))
        yield str(t), t.y


add("a word with a tensor", of(_tag), _tagged)
add("a set of tensors", of(lambda m, y: {m.inner(y)}), lambda m: (list(m(x(i))) for i in range(3)))
add("a frozen set of tensors", of(lambda m, y: frozenset({m.inner(y)})), lambda m: (list(m(x(i))) for i in range(3)))
add("tensors as keys", of(lambda m, y: {m.inner(y): 1}), lambda m: (list(m(x(i))) for i in range(3)))
add("a slice between tensors", of(lambda m, y: slice(m.inner(y), None)), lambda m: (m(x(i)).start for i in range(3)))
add(
    "a class made of a tensor",
    of(lambda m, y: type("R", (), {"y": m.inner(y)})),
    lambda m: (m(x(i)).y for i in range(3)),
)


def _newmod(m, y):
    l = nn.Linear(8, 8)
    l.weight = nn.Parameter(m.inner(y)[:8].clone().repeat(2, 1), requires_grad=False)
    return l


add("a layer made of a tensor", of(_newmod), lambda m: (m(x(i)).weight.detach() for i in range(3)), snap=False)
add(
    "an error that holds a tensor",
    of(lambda m, y: ValueError("a", m.inner(y))),
    lambda m: (list(m(x(i)).args) for i in range(3)),
)
add(
    "a partial function of a tensor",
    of(lambda m, y: functools.partial(torch.add, m.inner(y))),
    lambda m: (m(x(i))(1) for i in range(3)),
)
add("a method of a tensor", of(lambda m, y: m.inner(y).sum), lambda m: (m(x(i))() for i in range(3)))
add("a built-in method of a list", of(lambda m, y: [m.inner(y)].copy), lambda m: (m(x(i))() for i in range(3)))
add(
    "a view of a dictionary's values",
    of(lambda m, y: {"a": m.inner(y)}.values()),
    lambda m: (list(m(x(i))) for i in range(3)),
)
add(
    "a read-only view of a dictionary",
    of(lambda m, y: types.MappingProxyType({"a": m.inner(y)})),
    lambda m: (dict(m(x(i))) for i in range(3)),
)
add("an iterator of tensors", of(lambda m, y: iter([m.inner(y)])), lambda m: (list(m(x(i))) for i in range(3)))
add(
    "a deque with an end",
    of(lambda m, y: deque([m.inner(y)], maxlen=2)),
    lambda m: ((list(d), d.maxlen) for d in (m(x(i)) for i in range(3))),
)
add(
    "a default dictionary",
    of(lambda m, y: defaultdict(list, a=m.inner(y))),
    lambda m: ((dict(d), d["zz"]) for d in (m(x(i)) for i in range(3))),
)
add(
    "a counter of numbers",
    of(lambda m, y: (collections.Counter(a=1), m.inner(y))),
    lambda m: (m(x(i)) for i in range(3)),
)


class Ring:
    def __init__(self, y):
        self.y = y
        self.me = self


add(
    "an object that holds itself",
    of(lambda m, y: Ring(m.inner(y))),
    lambda m: ((r.y, r.me is r) for r in (m(x(i)) for i in range(3))),
)


class Final:
    seen = []

    def __init__(self, y):
        self.y = y

    def __del__(self):
        Final.seen.append(1)


class Frz:
    def __init__(self, y):
        object.__setattr__(self, "y", y)

    def __setattr__(self, n, v):
        raise AttributeError(n)


add("an object that cannot be set", of(lambda m, y: Frz(m.inner(y))), lambda m: (m(x(i)).y for i in range(3)))


class Lst(list):
    pass


def _lst(m, y):
    l = Lst([m.inner(y)])
    l.mark = m.inner(y) + 1
    return l


add(
    "a list of a class of its own",
    of(_lst),
    lambda m: ((list(l), l.mark, type(l) is Lst) for l in (m(x(i)) for i in range(3))),
)


class Dct(dict):
    def __setitem__(self, k, v):
        super().__setitem__(k + "!", v)


add(
    "a dictionary that writes otherwise",
    of(lambda m, y: Dct(a=m.inner(y))),
    lambda m: (dict(m(x(i))) for i in range(3)),
)
add(
    "a tensor of a distribution",
    of(lambda m, y: torch.distributions.Normal(m.inner(y), 1.0)),
    lambda m: ((d.mean, d.log_prob(torch.zeros(8)), d.variance) for d in (m(x(i)) for i in range(3))),
)


def _mutres(m):
    a = m(x(0))
    a["l"].append(1)
    a["t"].add_(5)
    b = m(x(1))
    b["l"].append(2)
    c = m(x(2))
    yield a
    yield b
    yield c


add("results that a caller changes", of(lambda m, y: {"l": [m.inner(y)], "t": m.inner(y) * 1.0}), _mutres)


def _heldattr(m):
    a = m(x(0))
    a.append("x")
    b = m(x(1))
    yield list(map(str, b)), len(a)
    m.log.clear()
    yield m(x(2))


class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.log = ["a"]

    def forward(self, y):
        self.inner(y)
        return self.log


add("a list of its own returned, changed by the caller", Log, _heldattr)


def _bufret(m):
    a = m(x(0))
    yield a.clone()
    a.add_(1)
    b = m(x(1))
    yield b
    m.inner.bias.data.fill_(3.0)
    yield m(x(2)), a, b


add("its bias returned, written to by the caller", of(lambda m, y: m.inner.bias.detach()), _bufret)
add("a part of its weight returned", of(lambda m, y: m.inner.weight.detach()[1:3]), _bufret)


def _keep(m):
    kept = [m(x(i)) for i in range(6)]
    yield kept
    [k.zero_() for k in kept[::2]]
    more = [m(x(i)) for i in range(6)]
    yield kept
    yield more


add("many results kept and written to", of(lambda m, y: m.inner(y)), _keep)


def _keepviews(m):
    kept = [m(x(i))[1:, ::2] for i in range(5)]
    yield kept
    more = [m(x(i + 9)).t() for i in range(5)]
    yield kept
    yield more


add("views of results kept", of(lambda m, y: m.inner(y)), _keepviews)


def _keepnp(m):
    kept = [m(x(i)).numpy() for i in range(5)]
    m(x(99))
    yield [torch.from_numpy(k.copy()) for k in kept]


add("results kept as arrays", of(lambda m, y: m.inner(y)), _keepnp)


def _keepst(m):
    outs = [m(x(i)) for i in range(5)]
    kept = [(o.untyped_storage(), o.storage_offset()) for o in outs]
    del outs
    m(x(98))
    m(x(99))
    yield [torch.frombuffer(bytearray(bytes(k.tolist())), dtype=torch.float32)[o : o + 32] for k, o in kept]


add("only the memory of results kept", of(lambda m, y: m.inner(y)), _keepst)


def _keepdl(m):
    kept = [torch.utils.dlpack.to_dlpack(m(x(i))) for i in range(5)]
    m(x(99))
    yield [torch.utils.dlpack.from_dlpack(k).clone() for k in kept]


add("results kept as capsules", of(lambda m, y: m.inner(y)), _keepdl)


def _keepmv(m):
    kept = [memoryview(m(x(i)).numpy()) for i in range(5)]
    m(x(99))
    yield [torch.frombuffer(bytearray(k.tobytes()), dtype=torch.float32) for k in kept]


add("results kept as views of memory", of(lambda m, y: m.inner(y)), _keepmv)


def _fed(m):
    a = x(0)
    for _ in range(5):
        a = m(a)
        yield a
    b = x(1)
    for _ in range(4):
        c = m(b)
        b = c.t()[:4, :4].repeat(1, 2)
        yield b


add("results fed back", of(lambda m, y: m.inner(y)), _fed)


def _fedinto(m):
    a = x(0)
    for _ in range(4):
        a.copy_(m(a))
        yield a.clone()


add("a result written to its input", of(lambda m, y: m.inner(y)), _fedinto)


def _outsalias(m):
    for i in range(3):
        a, b, c = m(x(i))
        a.add_(1)
        yield a, b, c


add(
    "results that share memory, one written to",
    of(lambda m, y: (lambda z: (z, z[1:], z.view(-1)))(m.inner(y))),
    _outsalias,
)
add(
    "the same result twice", of(lambda m, y: (lambda z: (z, z, [z]))(m.inner(y))), lambda m: (m(x(i)) for i in range(3))
)
add(
    "an input and its view returned",
    of(lambda m, y: (y, y[1:], y.t(), m.inner(y))),
    lambda m: (m(x(i)) for i in range(3)),
)
add("an input returned detached", of(lambda m, y: (y.detach(), m.inner(y))), lambda m: (m(x(i)) for i in range(3)))


def _catcher(m):
    for i in range(3):
        t = x(i, 4, 8)
        o = m(t)
        o[0].add_(1)
        yield t, o


add("a view of an input returned, written to", of(lambda m, y: (y.view(-1), m.inner(y))), _catcher)


def _two(m):
    b = x(0, 8, 8)
    yield m(b[:4], b[4:])
    yield m(b[:4], b[2:6])
    yield m(b[:4], b[:4])
    c = b[:4]
    yield m(c, c)
    yield m(b[:4], x(1))
    yield b


for nm, fn in (
    ("two inputs, one added to", lambda m, a, b: (a.add_(1), m.inner(b))[1]),
    ("two inputs that may overlap", lambda m, a, b: m.inner(a) + b),
):
    for how, inp in (
        ("apart", lambda: ((x(0), x(1)), {})),
        ("of one tensor", lambda: (lambda b: ((b[:4], b[4:]), {}))(x(0, 8, 8))),
        ("overlapping", lambda: (lambda b: ((b[:4], b[2:6]), {}))(x(0, 8, 8))),
    ):
        add(f"{nm}, recorded {how}", of(fn), _two, inputs=inp)


def _outarg(m):
    for i in range(3):
        o = torch.zeros(4, 8)
        r = m(x(i), o)
        yield r, o, r is o


add(
    "told where to put its result",
    of(lambda m, y, o: torch.add(m.inner(y), 1, out=o)),
    _outarg,
    inputs=lambda: ((x(), torch.zeros(4, 8)), {}),
)


def _outarg2(m):
    o = torch.zeros(4, 16)
    for i in range(3):
        r = m(x(i), o[:, 8:])
        yield r, o.clone()
    yield m(x(4), o[:, :8]), o


add(
    "told where to put its result, in a part",
    of(lambda m, y, o: torch.add(m.inner(y), 1, out=o)),
    _outarg2,
    inputs=lambda: ((x(), torch.zeros(4, 16)[:, 8:]), {}),
)


def _outres(m):
    for i in range(3):
        o = torch.zeros(0)
        r = m(x(i), o)
        yield r, o, o.shape


add(
    "told where to put its result, too small",
    of(lambda m, y, o: torch.add(m.inner(y), 1, out=o)),
    _outres,
    inputs=lambda: ((x(), torch.zeros(0)), {}),
)
