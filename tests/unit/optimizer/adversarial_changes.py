"""Weights, hooks, modes, threads and dice that change between calls."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import threading

import torch
import torch.nn.functional as F
from adversarial import Lambda
from adversarial_callers import CallerCase, calls, of, x
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

CHANGES_BETWEEN_CALLS: list[CallerCase] = []


def add(name, model, script, **kw):
    CHANGES_BETWEEN_CALLS.append(CallerCase(name, model, script, **kw))


def lin():
    return Lambda(lambda m, y: m.inner(y))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.3)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, y):
        return self.norm(self.drop(self.b(F.gelu(self.a(y)))) + self.shift)


def c(*ch, **k):
    return calls(*ch, **k)


# --- weights
add("a weight set to other memory", Net, c(lambda m: m.a.weight.data.set_(torch.full((16, 8), 0.5))))
add("a weight resized", Net, c(lambda m: m.shift.resize_(1).fill_(2.0)))
add("a weight laid out otherwise", Net, c(lambda m: setattr(m.a.weight, "data", torch.full((8, 16), 0.5).t())))


def dataof(m):
    m.a.weight.data = m.b.weight.data.t()


add("a weight in another's memory", Net, c(dataof, lambda m: m.b.weight.data.fill_(0.1)))


def tie(m):
    m.a.weight = nn.Parameter(torch.full((16, 8), 0.25))
    m.b.weight = nn.Parameter(m.a.weight.data.t())


add("weights tied by memory later", Net, c(tie, lambda m: m.a.weight.data.mul_(3)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, y):
        return self.b(self.a(y).relu())


add("tied weights taken apart", Tied, c(lambda m: setattr(m.b, "weight", nn.Parameter(torch.eye(8)))))
add("tied weights written to through one", Tied, c(lambda m: m.b.weight.data.mul_(0.5)))
add("a bias taken away", Net, c(lambda m: setattr(m.a, "bias", None)))
add(
    "a bias registered anew",
    Net,
    c(
        lambda m: m.a.register_parameter("bias", None),
        lambda m: m.a.register_parameter("bias", nn.Parameter(torch.ones(16))),
    ),
)
add(
    "a buffer made a parameter",
    Net,
    c(lambda m: (delattr(m, "shift"), m.register_parameter("shift", nn.Parameter(torch.full((8,), 3.0))))),
)
add(
    "a buffer that is an attribute later",
    Net,
    c(lambda m: (delattr(m, "shift"), m.__dict__.__setitem__("shift", torch.full((8,), 3.0)))),
)
add("a state loaded, not strictly", Net, c(lambda m: m.load_state_dict({"shift": torch.full((8,), 4.0)}, strict=False)))
add(
    "weights drawn anew",
    Net,
    c(
        lambda m: (
            torch.manual_seed(3),
            m.apply(lambda l: l.reset_parameters() if hasattr(l, "reset_parameters") else None),
        )
    ),
)
add(
    "to another type for good",
    Net,
    lambda m: iter([m(x(0)), m.double() and m(x(1).double()), m(x(2).double()), m.float() and m(x(3))]),
)
add("weights learn and do not", Net, c(lambda m: m.requires_grad_(False), lambda m: m.requires_grad_(True)), grad=False)
add("switched to training and back", Net, c(lambda m: m.train(), lambda m: m.eval()))
add(
    "a part switched to training",
    Net,
    c(lambda m: m.drop.train(), lambda m: setattr(m.drop, "p", 0.9), lambda m: m.drop.eval()),
)
add(
    "dropped more of",
    Net,
    c(lambda m: setattr(m.drop, "p", 0.8), lambda m: setattr(m.drop, "p", 0.0), lambda m: setattr(m.drop, "p", 1.0)),
    train=True,
)
add("a norm's epsilon", Net, c(lambda m: setattr(m.norm, "eps", 0.5)))
add("a norm's shape", Net, c(lambda m: setattr(m.norm, "normalized_shape", [8])))


class Momentum(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(8)

    def forward(self, y):
        return self.n(y)


def bn_state(m):
    return lambda: None


def bn(m):
    for i in range(3):
        yield m(x(i)), m.n.running_mean.clone(), m.n.num_batches_tracked.clone()
    m.n.momentum = None
    for i in range(3):
        yield m(x(i)), m.n.running_mean.clone()
    m.n.track_running_stats = False
    yield m(x(9)), m.n.running_mean.clone()
    m.n.reset_running_stats()
    yield m(x(10)), m.n.running_mean.clone()


add("batch statistics, otherwise", Momentum, bn, train=True)
add(
    "batch statistics, counted",
    lambda: nn.BatchNorm1d(8, momentum=None),
    lambda m: ((m(x(i)), m.running_mean.clone(), m.num_batches_tracked.clone()) for i in range(4)),
    train=True,
)


def bnfreeze(m):
    yield m(x(0))
    m.eval()
    yield m(x(1)), m.n.running_var.clone()
    m.train()
    yield m(x(2)), m.n.running_var.clone()


add("batch statistics, frozen and thawed", Momentum, bnfreeze, train=True)


# hooks
def hooked(m):
    seen = []
    yield m(x(0))
    h = m.a.register_forward_hook(lambda mod, i, o: (seen.append(1), o * 2)[1])
    yield m(x(1)), len(seen)
    yield m(x(2)), len(seen)
    h.remove()
    yield m(x(3)), len(seen)
    h = m.register_forward_pre_hook(lambda mod, a: (a[0] + 1,))
    yield m(x(4))
    h.remove()
    yield m(x(5))
    h = m.norm.register_forward_hook(lambda mod, a, k, o: o + 1, with_kwargs=True, prepend=True)
    yield m(x(6))
    h.remove()
    yield m(x(7))
    h = m.register_forward_hook(lambda *a: seen.append("always"), always_call=True)
    yield m(x(8)), len(seen)
    h.remove()
    yield m(x(9)), len(seen)


add("hooks of all kinds, that come and go", Net, hooked)


def ghooked(m):
    seen = []
    yield m(x(0))
    h = nn.modules.module.register_module_forward_hook(lambda mod, i, o: seen.append(type(mod).__name__))
    yield m(x(1)), list(seen)
    h.remove()
    yield m(x(2)), list(seen)
    h = nn.modules.module.register_module_forward_pre_hook(
        lambda mod, i: (i[0] * 2,) if isinstance(mod, nn.LayerNorm) else None
    )
    yield m(x(3))
    h.remove()
    yield m(x(4))


add("hooks on all modules, that come and go", Net, ghooked)


def hookswap(m):
    h = m.a.register_forward_hook(lambda mod, i, o: o * 2)
    m.a.register_forward_hook(lambda mod, i, o: o + 1)
    yield m(x(0))
    m.a._forward_hooks.move_to_end(h.id)
    yield m(x(1))
    yield m(x(2))


add("hooks in another order", Net, hookswap)


def pview(m):
    parametrize.register_parametrization(m.a, "weight", nn.Tanh())
    yield m(x(0))
    m.a.parametrizations.weight.original.data.mul_(3)
    yield m(x(1))
    parametrize.remove_parametrizations(m.a, "weight")
    yield m(x(2))
    yield m(x(3))


add("a weight parametrized later", Net, lambda m: itertools.chain([m(x(5))], pview(m)))


class Wn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, y):
        return self.a(y)


def wn(m):
    yield m(x(0))
    m.a.parametrizations.weight.original0.data.mul_(2)
    yield m(x(1))
    parametrize.remove_parametrizations(m.a, "weight")
    yield m(x(2))
    m.a.weight.data.mul_(2)
    yield m(x(3))


add("weight normalization taken out", Wn, wn)


def cachedp(m):
    yield m(x(0))
    with parametrize.cached():
        yield m(x(1))
        m.a.parametrizations.weight.original0.data.mul_(2)
        yield m(x(2))
    yield m(x(3))


add("parametrized weights kept for a while", Wn, cachedp)
add(
    "its forward patched", Net, c(lambda m: setattr(m, "forward", lambda y: y * 2), lambda m: m.__dict__.pop("forward"))
)
add(
    "a part's forward patched",
    Net,
    c(lambda m: setattr(m.a, "forward", lambda y: torch.zeros(y.shape[0], 16)), lambda m: m.a.__dict__.pop("forward")),
)
add("a part of another class", Net, c(lambda m: setattr(m.norm, "__class__", nn.Identity)))
add(
    "a part replaced by its copy",
    Net,
    c(lambda m: setattr(m, "a", copy.deepcopy(m.a)), lambda m: m.a.weight.data.zero_()),
)
add("a part wrapped", Net, c(lambda m: setattr(m, "a", nn.Sequential(m.a, nn.ReLU()))))
add(
    "its dictionary of parts replaced",
    Net,
    c(lambda m: m.__dict__.__setitem__("_modules", {**m._modules, "norm": nn.Identity()})),
)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, y):
        return y * self.scale


class Eased(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.part = nn.Linear(8, 8), Part()

    def forward(self, y):
        return self.part(self.inner(y))


add("a part's attributes replaced", Eased, c(lambda m: setattr(m.part, "__dict__", {**m.part.__dict__, "scale": 0.5})))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LazyLinear(8)

    def forward(self, y):
        return self.a(y)


add("a layer made in the first call", Lazy, lambda m: ((m(x(i)).shape) for i in range(3)), snap=False)


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.cache = {}

    def forward(self, y):
        key = tuple(y.shape)
        if key not in self.cache:
            self.cache[key] = torch.arange(float(y.shape[0]))[:, None]
        return self.inner(y) + self.cache[key]


def grows(m):
    yield m(x(0))
    yield m(x(1))
    m.cache[(4, 8)].add_(1)
    yield m(x(2))
    m.cache.clear()
    yield m(x(3))
    yield m(x(4)), m(x(5, 2, 8)), len(m.cache)


add("a cache of its own", Grows, grows, snap=False)


class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    @functools.cached_property
    def folded(self):
        return self.inner.weight.detach() * 2

    def forward(self, y):
        return y @ self.folded


def once(m):
    yield m(x(0))
    yield m(x(1))
    m.inner.weight.data.fill_(1.0)
    yield m(x(2))
    m.__dict__.pop("folded", None)
    yield m(x(3))
    yield m(x(4))


add("made once and kept", Once, once)


# --- modes
def modes(*ctxs):
    def script(m):
        yield m(x(0))
        for i, ctx in enumerate(ctxs):
            with ctx():
                yield m(x(10 + i))
                yield m(x(20 + i))
            yield m(x(30 + i))

    return script


add(
    "cast and not",
    Net,
    modes(
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
    ),
)
add(
    "cast, recorded so",
    Net,
    modes(
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
    ),
    around=lambda: torch.autocast("cpu", torch.bfloat16),
)
add("in inference mode and out", Net, modes(torch.inference_mode, torch.no_grad))


@contextlib.contextmanager
def _det():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _dt():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _prec():
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


add("deterministic, of another default type, precise", Net, modes(_det, _dt, _prec))


class Makes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, y):
        return self.inner(y) + torch.ones(8), torch.tensor(1.5), torch.full((2,), 0.5)


add("another default type for what it makes", Makes, modes(_dt))
add("a default device", Makes, modes(lambda: torch.device("cpu"), lambda: torch.device("meta")))


class Doubles(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, f, t, a=(), k=None):
        r = f(*a, **(k or {}))
        return r * 2 if f is F.linear else r


add("a function mode", Net, modes(Doubles))
add(
    "another function mode than it was recorded under",
    Net,
    modes(Doubles, lambda: torch.device("cpu")),
    around=lambda: torch.device("cpu"),
)
from torch.utils._python_dispatch import TorchDispatchMode


class DD(TorchDispatchMode):
    def __torch_dispatch__(self, f, t, a=(), k=None):
        r = f(*a, **(k or {}))
        return r * 2 if f is torch.ops.aten.native_layer_norm.default else r


class CountOps(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, f, t, a=(), k=None):
        type(self).num += 1
        return f(*a, **(k or {}))


def _countops(m):
    yield m(x(0))
    CountOps.num = 0
    with CountOps():
        m(x(1))
    yield CountOps.num > 3


add("operators counted", Net, _countops)


def flops(m):
    from torch.utils.flop_counter import FlopCounterMode

    m(x(0))
    with FlopCounterMode(display=False) as f:
        m(x(1))
    yield f.get_total_flops()


add("operations counted", Net, flops)


def functional(m):
    p = {k: v.detach() * 2 for k, v in m.named_parameters()}
    yield m(x(0))
    yield torch.func.functional_call(m, p, (x(1),))
    yield m(x(2))
    yield torch.func.functional_call(m, {"shift": torch.zeros(8)}, (x(3),))
    yield m(x(4))


add("called with other weights", Net, functional)


def vm(m):
    yield m(x(0))
    yield torch.func.vmap(m)(x(1, 3, 4, 8))
    yield torch.func.vmap(m, in_dims=1)(x(1, 4, 3, 8))
    yield torch.func.jvp(m, (x(2),), (x(3),))
    yield torch.func.jacrev(lambda y: m(y).sum())(x(4))
    yield m(x(5))


add("transformed", Net, vm)


def grads(m):
    yield m(x(0)).detach()
    a = x(1).requires_grad_()
    m(a).sum().backward()
    yield a.grad
    yield m.a.weight.grad
    yield m(x(2)).detach()


add("with gradients of its input", Net, grads, grad=True)


def copies(m):
    yield m(x(0))
    d = copy.deepcopy(m)
    d.a.weight.data.zero_()
    yield d(x(1))
    yield m(x(1))
    s = copy.copy(m)
    yield s(x(2))
    s.a = nn.Linear(8, 16, bias=False)
    s.a.weight.data.fill_(0.1)
    yield m(x(3))
    yield s(x(3))


add("copied, shallow and deep", Net, copies)


def pickled(m):
    yield m(x(0))
    b = io.BytesIO()
    torch.save(m.state_dict(), b)
    m.a.weight.data.zero_()
    yield m(x(1))
    b.seek(0)
    m.load_state_dict(torch.load(b))
    yield m(x(1))


add("saved and loaded", Net, pickled)


def threads(m):
    yield m(x(0))
    got = [None] * 8

    def run(i):
        with torch.no_grad():
            for _ in range(5):
                got[i] = m(x(i))

    ts = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    [t.start() for t in ts]
    [t.join() for t in ts]
    yield got


add("eight threads at once", Net, threads)


def thread_modes(m):
    yield m(x(0))
    got = []

    def run():
        got.append(m(x(1)).requires_grad)  # gradients are on in a new thread
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            got.append(m(x(2)))

    with torch.inference_mode():
        t = threading.Thread(target=run)
        t.start()
        t.join()
    yield got[1:]
    yield m(x(3))


add("another thread with modes of its own", Net, thread_modes)


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.fail = False
        self.register_buffer("n", torch.zeros(1))

    def forward(self, y):
        self.n.add_(1)
        z = self.inner(y)
        if self.fail:
            raise ValueError("no")
        return z * self.n


def raising(m):
    yield m(x(0)), m.n.clone()
    m.fail = True
    for _ in range(2):
        try:
            m(x(1))
        except ValueError as e:
            yield str(e), m.n.clone()
    m.fail = False
    yield m(x(2)), m.n.clone()
    yield m(x(3)), m.n.clone()


add("an error in the middle, and calls after it", Raises, raising)


def wrongcalls(m):
    yield m(x(0))
    for bad in (
        lambda: m(),
        lambda: m(x(0, 4, 9)),
        lambda: m(x(0).long()),
        lambda: m("a"),
        lambda: m(x(0), y=1),
        lambda: m(None),
    ):
        try:
            bad()
            yield "fine"
        except Exception as e:
            yield type(e).__name__
        yield m(x(1))


add("wrong calls between right ones", Net, wrongcalls)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.depth = 0

    def forward(self, y, n=2):
        return self.inner(y) if n == 0 else self(self.inner(y), n - 1)


add("calls itself", Inner, lambda m: (m(x(i), i % 3) for i in range(6)), inputs=lambda: ((x(), 2), {}))


def reenter(m):
    yield m(x(0))
    out = []
    h = m.register_forward_hook(lambda mod, i, o: out.append(mod.norm(o)) and None)
    yield m(x(1)), list(out)
    h.remove()
    yield m(m(m(x(2))))


add("called within its own call", Net, reenter)


# --- random
def rng(m):
    for s in (1, 1, 2):
        torch.manual_seed(s)
        yield m(x(0)), torch.rand(3)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        yield m(x(1))
    yield torch.rand(3)
    st = torch.get_rng_state()
    a = m(x(2))
    torch.set_rng_state(st)
    b = m(x(2))
    yield a, b
    torch.manual_seed(4)
    [m(x(i)) for i in range(3)]
    yield torch.rand(2)


add("seeds, states and forks", Net, rng, train=True)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.g = torch.Generator().manual_seed(3)

    def forward(self, y):
        return self.inner(y) + torch.randn(8, generator=self.g)


def ownrng(m):
    m.g.manual_seed(3)
    yield m(x(0)), m.g.get_state()
    yield m(x(1))
    m.g.manual_seed(3)
    yield m(x(0))
    m.g = torch.Generator().manual_seed(8)
    yield m(x(0))
    yield m(x(0)), torch.rand(2)


add("dice of its own", Own, ownrng)
add(
    "dropped by a number that is given",
    of(lambda m, y, p: F.dropout(m.inner(y), p, True)),
    lambda m: ((torch.manual_seed(i), m(x(i), p)) for i, p in enumerate((0.5, 0.5, 0.0, 0.9, 0.5))),
    inputs=lambda: ((x(), 0.5), {}),
)
add(
    "drawn like its input",
    of(
        lambda m, y: (
            torch.rand_like(y)
            + torch.randn(4, 8)
            + torch.bernoulli(torch.full((8,), 0.5))
            + torch.randperm(8)
            + m.inner(y)
        )
    ),
    rng,
)
add(
    "drawn in place",
    of(
        lambda m, y: (
            m.inner(y).clone().uniform_()
            + torch.empty(8).normal_()
            + torch.empty(8).exponential_()
            + torch.multinomial(torch.ones(8), 8, True)
        )
    ),
    rng,
)
# --- calls
add(
    "keywords in any order",
    of(lambda m, y, a=1.0, b=2.0: m.inner(y) * a + b),
    lambda m: iter(
        [
            m(x(0), a=2.0, b=3.0),
            m(x(0), b=3.0, a=2.0),
            m(y=x(0)),
            m(x(0), 2.0),
            m(x(0), 2.0, b=3.0),
            m(x(0), b=2.0),
            m(b=3.0, y=x(0), a=2.0),
        ]
    ),
    inputs=lambda: ((x(),), {"a": 2.0, "b": 3.0}),
)
add(
    "as many arguments as there are",
    of(lambda m, *ys, **k: sum(m.inner(v) for v in ys) + sum(k.values())),
    lambda m: iter([m(x(0), x(1)), m(x(0)), m(x(0), x(1), x(2)), m(x(0), x(1), z=1.0), m(x(1), x(0))]),
    inputs=lambda: ((x(0), x(1)), {}),
)
add(
    "nothing, an ellipsis, a type",
    of(lambda m, y, v: m.inner(y) * (1.0 if v is None else 2.0 if v is ... else 3.0)),
    lambda m: (m(x(i), v) for i, v in enumerate((None, ..., float, torch.float, None, "a", b"a"))),
    inputs=lambda: ((x(), None), {}),
)
add(
    "one tensor twice, then two",
    of(lambda m, a, b: m.inner(a) + (1.0 if a is b else 0.0) + b),
    lambda m: iter(
        [(lambda t: m(t, t))(x(0)), m(x(0), x(0)), (lambda t: m(t, t.view_as(t)))(x(0)), (lambda t: m(t, t))(x(3))]
    ),
    inputs=lambda: (lambda t: ((t, t), {}))(x()),
)
add(
    "lists that are one",
    of(lambda m, a, b: (a.append(1), m.inner(x(0)) * len(b))[1]),
    lambda m: iter(
        [(lambda l: (m(l, l), l))([]), (lambda l, k: (m(l, k), l, k))([], []), (lambda l: (m(l, l), l))([1])]
    ),
    inputs=lambda: (lambda l: ((l, l), {}))([]),
)


def layouts(m):
    yield m(x(0, 2, 3, 4, 4))
    yield m(x(1, 2, 3, 4, 4).to(memory_format=torch.channels_last))
    yield m(x(2, 2, 4, 4, 3).permute(0, 3, 1, 2))
    yield m(x(3, 2, 3, 4, 4).transpose(2, 3))
    yield m(x(4, 1, 3, 4, 4).expand(2, 3, 4, 4))
    yield m(x(5, 4, 6, 8, 8)[::2, ::2, ::2, ::2])
    yield m(x(6, 2, 3, 4, 4).flip(3))
    yield m(x(7, 2, 3, 4, 4))


add(
    "images laid out in every way",
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
    layouts,
    inputs=lambda: ((x(0, 2, 3, 4, 4),), {}),
)
add("sizes of every kind", Net, lambda m: (m(x(0, *s)) for s in ((4, 8), (1, 8), (0, 8), (2, 3, 8), (8,), (4, 8))))
add(
    "types of every kind",
    of(lambda m, y: (y + 1, y * 2.5, y / 2, y // 2, y % 3, y == 1, y.sum(), y.float().mean())),
    lambda m: (
        m((x(0) * 50).abs().to(t))
        for t in (
            torch.float32,
            torch.uint8,
            torch.int8,
            torch.int32,
            torch.bool,
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.complex64,
            torch.float32,
        )
    ),
)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, y):
        return y.sum(0), y.names


add("dims with names", Named, lambda m: iter([m(x(0)), m(x(1).refine_names("N", "C")), m(x(2))]))


def sub(m):
    class T(Tensor):
        pass

    yield m(x(0))
    yield type(m(x(1).as_subclass(T))).__name__
    yield m(nn.Parameter(x(2), requires_grad=False))
    yield m(x(3))


add("tensors of other classes", lin, sub)


def sparse(m):
    yield m(x(0))
    yield m(x(1).relu().to_sparse()).to_dense()
    yield m(x(2))


add("sparse at times", of(lambda m, y: torch.mm(y, m.inner.weight)), sparse)
