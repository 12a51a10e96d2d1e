"""Models whose factor hides somewhere: odd containers, functions' variables, settings of libraries, the thread."""

from __future__ import annotations

import builtins
import collections
import ctypes
import enum
import functools
import inspect
import io
import itertools
import logging
import multiprocessing
import os
import queue
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from contextvars import ContextVar

import numpy as np
import torch
import torch.nn.functional as F
from adversarial_callers import CallerCase, calls, of, x
from torch import Tensor, nn

HIDDEN_STATE: list[CallerCase] = []


def add(name, model, script, **kw):
    HIDDEN_STATE.append(CallerCase(name, model, script, **kw))


def setter(path, value):
    def f(m):
        o = m
        *ps, last = path.split(".")
        for p in ps:
            o = getattr(o, p)
        setattr(o, last, value)

    return f


class Attr(nn.Module):
    """Holds something, and asks a function of it for a factor."""

    def __init__(self, held, ask):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.held, self.ask = held, ask

    def forward(self, y):
        return self.inner(y) * self.ask(self.held)


def attr(make, ask, change, name, **kw):
    add(name, lambda: Attr(make(), ask), calls(lambda m: change(m.held)), **kw)


# state in odd containers
def _reord(d):
    d["a"] = d.pop("a")


attr(lambda: {"a": 2.0, "b": 3.0}, lambda d: next(iter(d.values())), _reord, "a dictionary put in another order")
attr(
    lambda: OrderedDict(a=2.0, b=3.0),
    lambda d: next(iter(d.values())),
    lambda d: d.move_to_end("a"),
    "an ordered dictionary, moved to its end",
)


def _modules_reord(m):
    first = m._modules.pop("0")
    m._modules["0"] = first


add(
    "layers in another order", lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), calls(_modules_reord)
)


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Tanh()})

    def forward(self, y):
        for l in self.layers.values():
            y = l(y)
        return y


def _md(m):
    l = m.layers.pop("a")
    m.layers["a"] = l


add("named layers in another order", ByName, calls(_md))


class ParamOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(8))
        self.b = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, y):
        return y * next(iter(self.parameters()))


def _po(m):
    p = m._parameters.pop("a")
    m._parameters["a"] = p


add("parameters in another order", ParamOrder, calls(_po))
attr(
    lambda: types.MappingProxyType(PROXIED),
    lambda d: d["a"],
    lambda d: PROXIED.__setitem__("a", 5.0),
    "a view of a dictionary",
    reset=lambda: PROXIED.__setitem__("a", 2.0),
)
PROXIED = {"a": 2.0}
attr(lambda: [0.0], lambda l: 1.0 / (torch.tensor(l[0])), lambda l: l.__setitem__(0, -0.0), "negative zero in a list")


class Zero(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.shift = 0.0

    def forward(self, y):
        return self.inner(y) / self.shift


add("an attribute that is negative zero later", Zero, calls(setter("shift", -0.0)))


class Zero2(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.shift = (0.0, 1)

    def forward(self, y):
        return self.inner(y) / self.shift[0]


add("negative zero in a tuple", Zero2, calls(setter("shift", (-0.0, 1))))
FZ = 0.0


def _fz(v):
    def f(m=None):
        globals()["FZ"] = v

    return f


add("a global that is negative zero later", of(lambda m, y: m.inner(y) / FZ), calls(_fz(-0.0)), reset=_fz(0.0))
attr(
    lambda: {1},
    lambda s: next(iter(s)) * torch.ones(8, dtype=torch.bool),
    lambda s: (s.clear(), s.add(True)),
    "a set of an equal value of another type",
)
attr(
    lambda: {0, 8},
    lambda s: next(iter(s)) + 1.0,
    lambda s: (s.clear(), s.add(8), s.add(0)),
    "a set put in another order",
)
attr(lambda: memoryview(bytearray(b"ab")), lambda v: float(v[0]), lambda v: v.__setitem__(0, 7), "a view of bytes")
attr(
    lambda: io.BytesIO(b"\x02\x03\x04"),
    lambda v: float(v.getvalue()[0]),
    lambda v: v.getbuffer().__setitem__(0, 7),
    "bytes in a file of memory",
)
attr(
    lambda: io.BytesIO(b"\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17"),
    lambda v: float(v.read(1)[0]),
    lambda v: None,
    "reads on in a file of memory",
    snap=False,
)
attr(lambda: (ctypes.c_double * 2)(2.0, 3.0), lambda v: v[0], lambda v: v.__setitem__(0, 7.0), "an array of C's")
attr(lambda: ctypes.c_double(2.0), lambda v: v.value, lambda v: setattr(v, "value", 7.0), "a number of C's")


class CStruct(ctypes.Structure):
    _fields_ = [("scale", ctypes.c_double)]


attr(lambda: CStruct(2.0), lambda v: v.scale, lambda v: setattr(v, "scale", 7.0), "a structure of C's")
attr(
    lambda: multiprocessing.Value("d", 2.0),
    lambda v: v.value,
    lambda v: setattr(v, "value", 7.0),
    "a number shared with other processes",
)
attr(lambda: threading.Event(), lambda v: 2.0 if v.is_set() else 3.0, lambda v: v.set(), "an event that is set")
attr(lambda: threading.Semaphore(3), lambda v: float(v._value), lambda v: v.acquire(), "a semaphore")
attr(lambda: threading.Lock(), lambda v: 2.0 if v.locked() else 3.0, lambda v: v.acquire(), "a lock that is taken")
attr(lambda: queue.Queue(), lambda v: 1.0 + v.qsize(), lambda v: v.put(1), "a queue")
attr(lambda: queue.SimpleQueue(), lambda v: 1.0 + v.qsize(), lambda v: v.put(1), "a simple queue")
attr(
    lambda: logging.getLogger("adversarial"),
    lambda v: 2.0 if v.isEnabledFor(logging.DEBUG) else 3.0,
    lambda v: v.setLevel(logging.DEBUG),
    "a log's level",
    reset=lambda: logging.getLogger("adversarial").setLevel(logging.WARNING),
)
attr(lambda: collections.Counter(a=2), lambda v: float(v["a"]), lambda v: v.update(a=3), "a counter")
attr(
    lambda: collections.ChainMap({}, {"a": 2.0}),
    lambda v: v["a"],
    lambda v: v.__setitem__("a", 4.0),
    "a chain of dictionaries",
)
attr(
    lambda: collections.UserDict(a=2.0), lambda v: v["a"], lambda v: v.__setitem__("a", 4.0), "a dictionary of a user's"
)
attr(lambda: defaultdict(lambda: 2.0), lambda v: v.get("a", 1.0), lambda v: v["a"], "a dictionary that fills itself")
attr(lambda: deque([2.0, 3.0], maxlen=2), lambda v: v[0], lambda v: v.rotate(1), "a deque turned")
attr(lambda: itertools.cycle([2.0, 3.0, 4.0]), lambda v: next(v), lambda v: None, "a cycle", snap=False)
attr(
    lambda: iter([2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0]),
    lambda v: next(v),
    lambda v: None,
    "an iterator of a list",
    snap=False,
)
attr(lambda: enumerate(range(100)), lambda v: 1.0 + next(v)[0], lambda v: None, "an enumeration", snap=False)
attr(
    lambda: zip(range(1, 100), range(100)),
    lambda v: 1.0 + next(v)[0],
    lambda v: None,
    "pairs that come one by one",
    snap=False,
)
attr(lambda: map(float, range(1, 100)), lambda v: next(v), lambda v: None, "a map that goes on", snap=False)
attr(
    lambda: np.random.RandomState(3),
    lambda v: float(v.get_state()[1][0] % 7 + 1),
    lambda v: v.seed(5),
    "the state of numpy's old dice",
)
attr(
    lambda: np.ma.masked_array([2.0, 3.0], [False, True]),
    lambda v: float(v[0]),
    lambda v: v.__setitem__(0, 5.0),
    "a masked array",
)
attr(
    lambda: np.rec.array([(2.0,)], dtype=[("s", float)]),
    lambda v: float(v.s[0]),
    lambda v: v.s.__setitem__(0, 5.0),
    "a record array",
)
attr(
    lambda: np.array([[2.0, 3.0]])[:, ::2],
    lambda v: float(v[0, 0]),
    lambda v: v.__setitem__((0, 0), 5.0),
    "a view of an array",
)
attr(
    lambda: np.array([None, 2.0], dtype=object),
    lambda v: float(v[1]),
    lambda v: v.__setitem__(1, 5.0),
    "an array of objects",
)


class Cfg:
    scale = 2.0

    def __init__(self):
        self.scale = 2.0


attr(Cfg, lambda v: v.scale, lambda v: setattr(v, "__dict__", {"scale": 5.0}), "an object with another dictionary")


class Cfg2(Cfg):
    @property
    def told(self):
        return 7.0


class Cfg1(Cfg):
    @property
    def told(self):
        return 2.0


attr(Cfg1, lambda v: v.told, lambda v: setattr(v, "__class__", Cfg2), "an object of another class later")


class AttrDict(dict):
    def __init__(self, **k):
        super().__init__(**k)
        self.__dict__ = self


attr(
    lambda: AttrDict(scale=2.0),
    lambda v: v.scale,
    lambda v: setattr(v, "scale", 5.0),
    "a dictionary that is its own attributes",
)
CV = ContextVar("adversarial")


class Box:
    def __init__(self, v):
        self.v = v


CV.set(Box(2.0))
add(
    "an object in a context variable, another later",
    of(lambda m, y: m.inner(y) * CV.get().v),
    calls(lambda m: CV.set(Box(5.0))),
    reset=lambda: CV.set(Box(2.0)),
)
add(
    "an object in a context variable, changed",
    of(lambda m, y: m.inner(y) * CV.get().v),
    calls(lambda m: setattr(CV.get(), "v", 5.0)),
    reset=lambda: CV.set(Box(2.0)),
)
LOC = threading.local()
LOC.box = Box(2.0)
LOC.l = [2.0]
add(
    "an object of the thread's, another later",
    of(lambda m, y: m.inner(y) * LOC.box.v),
    calls(lambda m: setattr(LOC, "box", Box(5.0))),
    reset=lambda: setattr(LOC, "box", Box(2.0)),
)
add(
    "a list of the thread's",
    of(lambda m, y: m.inner(y) * LOC.l[0]),
    calls(lambda m: LOC.l.__setitem__(0, 5.0)),
    reset=lambda: LOC.l.__setitem__(0, 2.0),
)


# descriptors, statics
class Desc:
    def __init__(self, v):
        self.v = v

    def __get__(self, o, t=None):
        return self.v


class WithDesc(nn.Module):
    scale = Desc(2.0)

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, y):
        return self.inner(y) * self.scale


add(
    "a descriptor that changes",
    WithDesc,
    calls(lambda m: setattr(vars(WithDesc)["scale"], "v", 5.0)),
    reset=lambda: setattr(vars(WithDesc)["scale"], "v", 2.0),
)


def _mk():
    state = 2.0

    def get():
        return state

    def put(v):
        nonlocal state
        state = v

    return get, put


get_state, put_state = _mk()
add(
    "a global function's own variable",
    of(lambda m, y: m.inner(y) * get_state()),
    calls(lambda m: put_state(5.0)),
    reset=lambda: put_state(2.0),
)


def _mkd():
    box = {"s": 2.0}

    def deco(f):
        @functools.wraps(f)
        def run(*a):
            return f(*a) * box["s"]

        return run

    return deco, box


_deco, _dbox = _mkd()


class Static(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    @staticmethod
    @_deco
    def scaled(y):
        return y * 1.0

    def forward(self, y):
        return self.scaled(self.inner(y))


add(
    "a static method's own variable",
    Static,
    calls(lambda m: _dbox.__setitem__("s", 5.0)),
    reset=lambda: _dbox.__setitem__("s", 2.0),
)


class Cls(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    @classmethod
    @_deco
    def scaled(cls, y=None):
        return 1.0

    @property
    @_deco
    def factor(self):
        return 1.0

    def forward(self, y):
        return self.inner(y) * self.factor


add(
    "a property's own variable",
    Cls,
    calls(lambda m: _dbox.__setitem__("s", 5.0)),
    reset=lambda: _dbox.__setitem__("s", 2.0),
)


@functools.singledispatch
def dispatched(y):
    return y * 2.0


def _two(y):
    return y * 2.0


def _five(y):
    return y * 5.0


def _reg(f):
    def g(m=None):
        dispatched.register(Tensor, f)

    return g


add("a function by type, another later", of(lambda m, y: dispatched(m.inner(y))), calls(_reg(_five)), reset=_reg(_two))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, y):
        return self.inner(y) * getattr(Counting.forward, "scale", 1.0)


add(
    "an attribute of its forward",
    Counting,
    calls(lambda m: setattr(Counting.forward, "scale", 5.0)),
    reset=lambda: Counting.forward.__dict__.pop("scale", None),
)


class Counting2(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, y):
        return self.inner(y) * type(self).forward.scale


Counting2.forward.scale = 2.0
add(
    "an attribute of a method",
    Counting2,
    calls(lambda m: setattr(Counting2.forward, "scale", 5.0)),
    reset=lambda: setattr(Counting2.forward, "scale", 2.0),
)
CFG = Cfg()


class Default(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, y, cfg=CFG):
        return self.inner(y) * cfg.scale


add(
    "an object that is a default",
    Default,
    calls(lambda m: setattr(CFG, "scale", 5.0)),
    reset=lambda: setattr(CFG, "scale", 2.0),
)


class Default2(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, y, *, cfg=Box(2.0)):  # noqa: B008  (so is this)
        return self.inner(y) * cfg.v


add(
    "an object that is a default, nowhere else",
    Default2,
    calls(lambda m: setattr(Default2.forward.__kwdefaults__["cfg"], "v", 5.0)),
    reset=lambda: setattr(Default2.forward.__kwdefaults__["cfg"], "v", 2.0),
)
TABLE = {"f": _two}
add(
    "a function in a table, another later",
    of(lambda m, y: TABLE["f"](m.inner(y))),
    calls(lambda m: TABLE.__setitem__("f", _five)),
    reset=lambda: TABLE.__setitem__("f", _two),
)
builtins.ADVERSARIAL = 2.0
add(
    "a name among the built-in ones",
    of(lambda m, y: m.inner(y) * ADVERSARIAL),  # noqa: F821  (the adversarial read)
    calls(lambda m: setattr(builtins, "ADVERSARIAL", 5.0)),
    reset=lambda: setattr(builtins, "ADVERSARIAL", 2.0),
)


def _unmax(m=None):
    globals().pop("max", None)


add(
    "a built-in name taken later",
    of(lambda m, y: m.inner(y) * max(1.0, 2.0)),
    calls(lambda m: globals().__setitem__("max", lambda *a: 5.0)),
    reset=_unmax,
)
add(
    "words of the command line",
    of(lambda m, y: m.inner(y) * (2.0 if "--adversarial" in sys.argv else 3.0)),
    calls(lambda m: sys.argv.append("--adversarial")),
    reset=lambda: sys.argv.remove("--adversarial") if "--adversarial" in sys.argv else None,
)
add(
    "an attribute of a library's module",
    of(lambda m, y: m.inner(y) * getattr(F, "adversarial", 1.0)),
    calls(lambda m: setattr(F, "adversarial", 5.0)),
    reset=lambda: vars(F).pop("adversarial", None),
)
add("who calls", of(lambda m, y: m.inner(y) * (2.0 if sys._getframe(6).f_code.co_name == "x" else 1.0)), calls())


def _caller_name():
    return any(f.function == "called_so" for f in inspect.stack(0))


def called_so(m, v):
    return m(v)


def _who(m):
    yield m(x(0))
    yield m(x(1))
    yield called_so(m, x(2))
    yield called_so(m, x(3))
    yield m(x(4))


add("who calls, by its stack", of(lambda m, y: m.inner(y) * (2.0 if _caller_name() else 1.0)), _who)


def _in_thread(m, *a):
    got = []

    def run():
        with torch.no_grad():
            got.append(m(*a))

    t = threading.Thread(target=run, name="adversarial-worker")
    t.start()
    t.join()
    return got[0]


def _thr(m):
    yield m(x(0))
    yield m(x(1))
    yield _in_thread(m, x(2))
    yield _in_thread(m, x(3))
    yield m(x(4))


add(
    "which thread it runs in",
    of(lambda m, y: m.inner(y) * (2.0 if threading.current_thread().name == "adversarial-worker" else 1.0)),
    _thr,
)
add("which thread, by its number", of(lambda m, y: m.inner(y) * (2.0 if threading.get_ident() == MAIN else 1.0)), _thr)
MAIN = threading.main_thread().ident
add(
    "a thread's own, not there in another",
    of(lambda m, y: m.inner(y) * getattr(LOC, "box", Box(7.0)).v),
    _thr,
    reset=lambda: setattr(LOC, "box", Box(2.0)),
)
add(
    "how many threads there are",
    of(lambda m, y: m.inner(y) * torch.get_num_threads()),
    calls(lambda m: torch.set_num_threads(2)),
    reset=lambda: torch.set_num_threads(1),
)


def _flag(backend, name, value):
    return lambda m=None: setattr(backend, name, value)


add(
    "a flag of a backend",
    of(lambda m, y: m.inner(y) * (2.0 if torch.backends.cudnn.benchmark else 3.0)),
    calls(_flag(torch.backends.cudnn, "benchmark", True)),
    reset=_flag(torch.backends.cudnn, "benchmark", False),
)


add(
    "a flag of another backend",
    of(lambda m, y: m.inner(y) * (2.0 if torch.backends.mkldnn.deterministic else 3.0)),
    calls(_flag(torch.backends.mkldnn, "deterministic", True)),
    reset=_flag(torch.backends.mkldnn, "deterministic", False),
)
add(
    "the seed it was begun with",
    of(lambda m, y: m.inner(y) * float(torch.initial_seed() % 7)),
    calls(lambda m: torch.manual_seed(5)),
)
add("the process it runs in", of(lambda m, y: m.inner(y) * (os.getpid() % 5)), calls())
add(
    "how often something is held",
    of(lambda m, y: m.inner(y) * (2.0 if sys.getrefcount(HELD) > 3 else 1.0)),
    calls(lambda m: MORE.extend([HELD] * 5)),
    reset=lambda: MORE.clear(),
)
HELD = object()
MORE = []


class Col(enum.Enum):
    A = 1
    B = 2


Col.A.scale = 2.0
Col.B.scale = 3.0
add(
    "an attribute of an enumeration's member",
    lambda: Attr(Col.A, lambda c: c.scale),
    calls(lambda m: setattr(Col.A, "scale", 5.0)),
    reset=lambda: setattr(Col.A, "scale", 2.0),
)


def _enum(m):
    yield m(x(0), Col.A)
    yield m(x(1), Col.A)
    Col.A.scale = 5.0
    yield m(x(2), Col.A)
    yield m(x(3), Col.A)


add(
    "a member of an enumeration given",
    of(lambda m, y, c: m.inner(y) * c.scale),
    _enum,
    inputs=lambda: ((x(), Col.A), {}),
    reset=lambda: setattr(Col.A, "scale", 2.0),
)
add(
    "recursion's limit",
    of(lambda m, y: m.inner(y) * (2.0 if sys.getrecursionlimit() > 5000 else 1.0)),
    calls(lambda m: sys.setrecursionlimit(6000)),
    reset=lambda: sys.setrecursionlimit(1000),
)
FN = {"f": lambda y: y * 2.0}
_C2 = (lambda y: y * 2.0).__code__
_C5 = (lambda y: y * 5.0).__code__
add(
    "a function in a table, written anew",
    of(lambda m, y: FN["f"](m.inner(y))),
    calls(lambda m: setattr(FN["f"], "__code__", _C5)),
    reset=lambda: setattr(FN["f"], "__code__", _C2),
)


class Meta(type):
    @property
    def scale(cls):
        return cls._s


class WithMeta(nn.Module):
    pass


class Settings(metaclass=Meta):
    _s = 2.0


add(
    "a property of a class",
    of(lambda m, y: m.inner(y) * Settings.scale),
    calls(lambda m: setattr(Settings, "_s", 5.0)),
    reset=lambda: setattr(Settings, "_s", 2.0),
)


class Single:
    inst = None

    def __new__(cls):
        if cls.inst is None:
            cls.inst = super().__new__(cls)
            cls.inst.scale = 2.0
        return cls.inst


add(
    "one object for all",
    of(lambda m, y: m.inner(y) * Single().scale),
    calls(lambda m: setattr(Single(), "scale", 5.0)),
    reset=lambda: setattr(Single(), "scale", 2.0),
)
