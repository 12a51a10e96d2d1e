"""Run by test_direct in a process of its own, with a stand-in for the CUDA driver: calls that repeat in C++.

The kernels compute nothing here: what is looked at is which tensors they are given, and what comes back.
"""

import ctypes
import gc
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

import ridgeline.kernels as rk
from ridgeline.errors import KernelError
from ridgeline.kernels import call_cache, contract, files, launcher

fake = ctypes.CDLL(sys.argv[1])
fake.fake_arg_of.restype = ctypes.c_uint64
fake.fake_map.restype = ctypes.c_uint64
fake.fake_set_num_args(6)
call_cache.build(files.cache_folder())
launcher._raw_stream = lambda device: 0
call_cache._notable = lambda args: True
for room in ("rms_norm", "softmax", "layer_norm", "cross_entropy", "gated", "rope", "dropout_add", "embedding_bag"):
    sys.modules[f"ridgeline.kernels.{room}.op"].launchable = lambda x: True
asked = []
for made in contract.primitives().values():
    type(made).slow = (lambda slow: lambda self, *args: asked.append(self.name) or slow(self, *args))(type(made).slow)
    break


def launches(call, python: bool):
    """Arguments of the launches of one call, which does or does not go through Python."""
    asked.clear()
    before = fake.fake_num_launches()
    found = call()
    assert bool(asked) == python, (asked, python)
    return found, [[fake.fake_arg_of(i, j) for j in range(6)] for i in range(before, fake.fake_num_launches())]


def settle(call, times: int = 3):
    for _ in range(times):
        call()


x, w = torch.randn(64, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)

# A plain call: the first in Python, where the launcher is loaded; the third noted; then C++ alone.
with torch.no_grad():
    settle(lambda: rk.rms_norm(x, w, 1e-6))
    y, seen = launches(lambda: rk.rms_norm(x, w, 1e-6), python=False)
    assert y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous() and not y.requires_grad
    assert [row[0] for row in seen] == [x.data_ptr()] and seen[0][2] == w.data_ptr() and seen[0][3] == y.data_ptr()
    other = torch.randn(64, 4096, dtype=torch.bfloat16)
    z, seen = launches(lambda: rk.rms_norm(other, w, 1e-6), python=False)
    assert seen[0][0] == other.data_ptr() and seen[0][3] == z.data_ptr() != y.data_ptr()

    # What is described otherwise is not repeated: numbers, shapes, layouts, alignment, types.
    for call in (
        lambda: rk.rms_norm(x, w, 1e-5),
        lambda: rk.rms_norm(x[:32], w, 1e-6),
        lambda: rk.rms_norm(x.t().contiguous().t(), w, 1e-6),
        lambda: rk.rms_norm(torch.randn(64 * 4096 + 1).bfloat16()[1:].view(64, 4096), w, 1e-6),
        lambda: rk.rms_norm(x.half(), w.half(), 1e-6),
    ):
        launches(call, python=True)
    # Rows of a wider tensor are repeated with their stride; what has to be copied first is left to Python.
    wide = torch.randn(64, 8192).bfloat16()
    settle(lambda: rk.rms_norm(wide[:, :4096], w, 1e-6))
    y, seen = launches(lambda: rk.rms_norm(wide[:, 4096:], w, 1e-6), python=False)
    assert seen[0][0] == wide.data_ptr() + 8192 and y.is_contiguous()
    transposed = x.t().contiguous().t()
    settle(lambda: rk.rms_norm(transposed, w, 1e-6))
    launches(lambda: rk.rms_norm(transposed, w, 1e-6), python=True)

    # The same tensor twice is another description than two tensors.
    settle(lambda: rk.swiglu(x, x))
    _, seen = launches(lambda: rk.swiglu(x, x), python=False)
    assert seen[0][0] == seen[0][1] == x.data_ptr()
    launches(lambda: rk.swiglu(x, other), python=True)
    settle(lambda: rk.swiglu(x, other))
    _, seen = launches(lambda: rk.swiglu(x, other), python=False)
    assert seen[0][:2] == [x.data_ptr(), other.data_ptr()]
    parts = wide[:, :4096], wide[:, 4096:]
    settle(lambda: rk.swiglu(*parts), 4)
    _, seen = launches(lambda: rk.swiglu(*parts), python=False)
    assert seen[0][:2] == [wide.data_ptr(), wide.data_ptr() + 8192]

    # Several outputs, an output inside scratch memory, and a second launch.
    settle(lambda: rk.add_rms_norm(x, other, w, 1e-6))
    (a, h), seen = launches(lambda: rk.add_rms_norm(x, other, w, 1e-6), python=False)
    assert [seen[0][3], seen[0][4]] == [a.data_ptr(), h.data_ptr()]
    labels = torch.zeros(64, dtype=torch.long)
    settle(lambda: rk.cross_entropy(x, labels))
    loss, seen = launches(lambda: rk.cross_entropy(x, labels), python=False)
    assert loss.shape == () and len(seen) == 2 and seen[1][2] == loss.data_ptr() and seen[1][0] == seen[0][3]

# Under inference mode the description differs, and the result is an inference tensor.
with torch.inference_mode():
    settle(lambda: rk.rms_norm(x, w, 1e-6))
    y, _ = launches(lambda: rk.rms_norm(x, w, 1e-6), python=False)
    assert y.is_inference()

# With a gradient: a node of our own, whose backward pass is noted and repeated too.
xg, wg = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
dy = torch.randn_like(x)
for _ in range(2):
    rk.rms_norm(xg, wg, 1e-6)
y, seen = launches(lambda: rk.rms_norm(xg, wg, 1e-6), python=False)
assert y.requires_grad and y.grad_fn is not None and "rms_norm_backward" in y.grad_fn.name()
assert seen[0][5] not in (y.data_ptr(), xg.data_ptr()), "what the backward pass needs is kept apart"
for _ in range(2):
    torch.autograd.grad(rk.rms_norm(xg, wg, 1e-6), (xg, wg), dy)
y = rk.rms_norm(xg, wg, 1e-6)
(dx, dw), seen = launches(lambda: torch.autograd.grad(y, (xg, wg), dy), python=False)
assert dx.shape == xg.shape and dw.shape == wg.shape and dx.dtype == dw.dtype == torch.bfloat16
assert seen[0][0] == dy.data_ptr() and seen[0][1] == xg.data_ptr() and seen[0][5] == dx.data_ptr()
assert len(seen) == 2 and seen[1][1] == dw.data_ptr(), "the column sum follows"
with pytest.raises(RuntimeError, match="second time"):
    torch.autograd.grad(y, (xg, wg), dy)
only = rk.rms_norm(xg, w, 1e-6)
(dx,) = torch.autograd.grad(only, (xg,), dy)
assert dx.shape == xg.shape

# A gradient that comes in another layout is handled, in Python.
y = rk.rms_norm(xg, wg, 1e-6)
grads, _ = launches(lambda: torch.autograd.grad(y, (xg, wg), dy.t().contiguous().t()), python=True)
assert grads[0].shape == xg.shape

# A kept input that was changed in place is refused, as PyTorch refuses it.
leaf = x.clone().requires_grad_()
inner = leaf * 1
settle(lambda: rk.softmax(inner), 3)
y = rk.rms_norm(inner, wg, 1e-6)
y = rk.rms_norm(inner, wg, 1e-6)
y = rk.rms_norm(inner, wg, 1e-6)
with torch.no_grad():
    inner.add_(1)
with pytest.raises(RuntimeError, match="modified by an inplace operation"):
    torch.autograd.grad(y, wg, dy)

# An output that the backward pass keeps: no cycle keeps its node alive.
settle(lambda: torch.autograd.grad(rk.softmax(leaf), leaf, dy), 4)
y, _ = launches(lambda: rk.softmax(leaf), python=False)
gone = weakref.ref(y)
(dx,), seen = launches(lambda: torch.autograd.grad(y, leaf, dy), python=False)
assert seen[0][1] == y.data_ptr() and dx.shape == y.shape
del y
gc.collect()
assert gone() is None

# Several results, of which one gets no gradient.
for which in (0, 1):
    for _ in range(4):
        pair = rk.add_rms_norm(xg, leaf, wg, 1e-6)
        found = torch.autograd.grad(pair[which], (xg, leaf, wg), dy, allow_unused=True)
    assert found[0] is not None and found[0].shape == xg.shape and (found[2] is None) == (which == 1)

# A result without a gradient counts as zeros where the op asks for that.
q, k = (torch.randn(2, 4, 3, 64).requires_grad_() for _ in range(2))
tables = rk.rope_tables(torch.arange(3), 64)
for _ in range(4):
    found = torch.autograd.grad(rk.rope(q, k, *tables)[0], (q, k), torch.ones_like(q))
assert found[0].shape == q.shape and found[1].shape == k.shape
_, seen = launches(lambda: torch.autograd.grad(rk.rope(q, k, *tables)[0], (q, k), torch.ones_like(q)), python=False)
assert len(seen) == 2
with torch.no_grad():
    q, k = (torch.randn(2, 3, 4, 64).transpose(1, 2) for _ in range(2))
    tables = rk.rope_tables(torch.arange(3), 64)
    settle(lambda: rk.rope(q, k, *tables))
    turned, seen = launches(lambda: rk.rope(q, k, *tables), python=False)
    assert turned[0].stride() == q.stride() and seen[0][4] == turned[0].data_ptr()

# A gradient of the gradient is refused, not wrong.
y = rk.rms_norm(xg, wg, 1e-6)
(dx,) = torch.autograd.grad(y, xg, dy.clone().requires_grad_(), create_graph=True)
with pytest.raises((RuntimeError, NotImplementedError)):
    torch.autograd.grad(dx.sum(), xg)

# Hooks on saved tensors are honored: checkpointing and offloading live by them.
packed = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
    y = rk.rms_norm(xg, wg, 1e-6)
assert x.shape in packed
torch.autograd.grad(y, (xg, wg), dy)

# Modes, transforms and subclasses still see the op.
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode() as mode, torch.no_grad():
    assert type(rk.rms_norm(mode.from_tensor(x), mode.from_tensor(w), 1e-6)).__name__ == "FakeTensor"
jac = torch.func.vmap(lambda row: rk.rms_norm(row, w.float(), 1e-6))(x.float())
assert torch.allclose(jac, torch.nn.functional.rms_norm(x.float(), (4096,), w.float(), 1e-6), atol=1e-5)

# Forgetting plans forgets these, too.
with torch.no_grad():
    launches(lambda: rk.rms_norm(x, w, 1e-6), python=False)
    launcher.forget_plans()
    launches(lambda: rk.rms_norm(x, w, 1e-6), python=True)
with pytest.raises(TypeError):
    contract.primitive("rms_norm").direct(x, eps=1)
with pytest.raises(RuntimeError, match="no words"):
    contract.primitive("rms_norm").direct.add(b"short", None)
assert Path(call_cache.build(files.cache_folder())).exists()

# A second kernel that starts early is started by the launcher, which knows how.
launcher.OVERLAPPED_BYTES = 0
launcher.forget_plans()
for _ in range(5):
    torch.autograd.grad(rk.rms_norm(xg, wg, 1e-6), (xg, wg), dy)
y = rk.rms_norm(xg, wg, 1e-6)
early = fake.fake_dependent()
_, seen = launches(lambda: torch.autograd.grad(y, (xg, wg), dy), python=False)
assert len(seen) == 2 and fake.fake_dependent() == early + 1, "the gradient and the column sum"

# So is one that reads through tensor maps: attention, its gradient, and decoding over pages.
from ridgeline.kernels.compiler import Compiled

launcher.compile_variant = lambda function, variant: Compiled("kernel", b"cubin", variant.num_warps, 1000)
sys.modules["ridgeline.kernels.attention.op"].on_device = lambda q: True
sys.modules["ridgeline.kernels.paged_attention.op"].launchable = lambda x: True

def attention_is_repeated(turned):
    q, k, v = (torch.randn(2, 100, n, 64).bfloat16().transpose(1, 2) for n in (4, 2, 2))
    q, k, v = (x if turned else x.contiguous() for x in (q, k, v))
    with torch.no_grad():
        settle(lambda: rk.attention(q, k, v, True))
        encoded, others = fake.fake_encoded(), torch.randn_like(q)
        o, seen = launches(lambda: rk.attention(q, k, v, True), python=False)
        assert len(seen) == 1 and fake.fake_encoded() == encoded, "maps of known addresses are kept"
        assert o.shape == q.shape and o.stride() == q.stride()
        fake.fake_set_num_args(9)
        launches(lambda: rk.attention(others, k, v, True), python=False)
        assert fake.fake_map(2) == others.data_ptr()
        fake.fake_set_num_args(6)
        launches(lambda: rk.attention(q, k, v, False), python=True)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    do = torch.randn_like(q)
    for _ in range(4):
        torch.autograd.grad(rk.attention(*leaves, True), leaves, do)
    o, seen = launches(lambda: rk.attention(*leaves, True), python=False)
    early = fake.fake_dependent()
    grads, seen = launches(lambda: torch.autograd.grad(o, leaves, do), python=False)
    assert len(seen) == 3 and fake.fake_dependent() == early + 1, "row sums, dQ, then dK and dV, which start early"
    assert all(g.shape == x.shape and g.stride() == x.stride() for g, x in zip(grads, leaves, strict=True))


attention_is_repeated(turned=False)
attention_is_repeated(turned=True)
cache, lens = torch.randn(2, 40, 16, 2, 64).bfloat16(), torch.tensor([300, 7], dtype=torch.int32)
table, row = torch.arange(40, dtype=torch.int32).view(2, 20), torch.randn(2, 8, 64).bfloat16()
with torch.no_grad():
    settle(lambda: rk.paged_attention(row, cache[0], cache[1], table, lens))
    early = fake.fake_dependent()
    out, seen = launches(lambda: rk.paged_attention(row, cache[0], cache[1], table, lens), python=False)
    assert out.shape == row.shape and len(seen) == 1 and fake.fake_dependent() == early, "nothing is joined by a kernel"
    wide, long = torch.randn(2, 2400, 16, 2, 64).bfloat16(), torch.arange(2400, dtype=torch.int32).view(2, 1200)
    settle(lambda: rk.paged_attention(row, wide[0], wide[1], long, lens))
    early = fake.fake_dependent()
    out, seen = launches(lambda: rk.paged_attention(row, wide[0], wide[1], long, lens), python=False)
    assert len(seen) == 2 and fake.fake_dependent() == early + 1, "long sequences are, by one that starts early"
    for page in (16, 4):  # heads that are padded; pages that threads gather
        odd, thin = torch.randn(2, 40, page, 2, 96).bfloat16(), torch.randn(2, 8, 96).bfloat16()
        call = partial(rk.paged_attention, thin, odd[0], odd[1], table, lens)
        settle(call)
        out, seen = launches(call, python=False)
        assert out.shape == thin.shape and len(seen) == 1
    contract.launchable = lambda x: True
    with pytest.raises(KernelError, match="int32"):
        rk.paged_attention(row, cache[0], cache[1], table.long(), lens)

# Products of PyTorch's are repeated too, of transposed and cut views, with the numbers that PyTorch has.
def products(a, b, c, bias):
    first = a.mT @ b
    return first, torch.addmm(c, a[:, :3].mT, b), torch.addmm(bias, first, c.mT[:, :3])


multiplied = contract.declare(
    name="products_of_a_test", summary="three products", forward=products, fake=products, reference=products,
    schema="(Tensor a, Tensor b, Tensor c, Tensor bias) -> (Tensor, Tensor, Tensor)", support=lambda *_: None,
    cost=contract.elementwise_cost(1.0), num_results=3, repeats=True, multiplies=True, infer=products,
)  # fmt: skip
multiplied.direct = call_cache.Repeater(multiplied).direct
factors = [torch.randn(*shape) for shape in ((16, 5), (16, 7), (3, 7), (3,))]
with torch.no_grad():
    settle(lambda: multiplied(*factors))
    for again in (factors, [torch.randn_like(value) for value in factors]):
        found, _ = launches(partial(multiplied, *again), python=False)
        assert all(torch.equal(x, y) for x, y in zip(found, products(*again), strict=True))
    other = [torch.randn(17, 5), torch.randn(17, 7), *factors[2:]]
    assert torch.equal(launches(partial(multiplied, *other), python=True)[0][1], products(*other)[1])
    with call_cache.noted(factors) as notes:
        factors[0].mT @ factors[1]
    assert "mm" in notes.strange, "not where an op does not say so"

# A cross layer: its forward pass with and without a gradient, and all of its backward pass, products among it.
crossing = sys.modules["ridgeline.kernels.cross_layer.op"]
crossing.launchable = lambda x: True
x0, x1, wide = (torch.randn(*shape).bfloat16() for shape in ((96, 64), (96, 64), (64, 64)))
with torch.no_grad():
    settle(lambda: rk.cross_layer(x0, x1, wide))
    y, seen = launches(lambda: rk.cross_layer(x0, x1, wide), python=False)
    assert [row[:4] for row in seen] == [[x1.data_ptr(), wide.data_ptr(), x0.data_ptr(), x1.data_ptr()]]


def crossed(leaves, num_forward, num_backward):
    """Neither pass asks Python; so many kernels of ours are launched besides the products."""
    leaves = [value if value is None else value.detach().requires_grad_() for value in leaves]
    wanted = [value for value in leaves if value is not None]
    dy = torch.ones_like(leaves[0])
    for _ in range(4):
        torch.autograd.grad(rk.cross_layer(*leaves), wanted, dy)
    y, seen = launches(lambda: rk.cross_layer(*leaves), python=False)
    assert len(seen) == num_forward
    backward = crossing.CROSS_LAYER.backward
    crossing.CROSS_LAYER.backward = None  # Python's form of the gradients is not there to be asked
    grads, seen = launches(lambda: torch.autograd.grad(y, wanted, dy), python=False)
    crossing.CROSS_LAYER.backward = backward
    assert len(seen) == num_backward
    assert [(g.shape, g.is_contiguous()) for g in grads] == [(value.shape, True) for value in wanted]


crossed((x0, x1, wide), 1, 2)
crossed((x0, x1, wide, torch.ones(64).bfloat16()), 1, 3)
low, high = torch.randn(64, 16).bfloat16(), torch.randn(16, 64).bfloat16()
crossed((x0, x1, low, torch.ones(64).bfloat16(), high), 1, 3)
odd = [torch.randn(96, 61).bfloat16() for _ in range(2)]
crossing.config.LEAST_WIDENED = crossing.config.LEAST_WIDENED_BACK = 0
crossed((*odd, torch.randn(61, 61).bfloat16(), torch.ones(61).bfloat16()), 3, 6)
crossed((*odd, torch.randn(61, 8).bfloat16(), torch.ones(61).bfloat16(), torch.randn(8, 61).bfloat16()), 5, 8)

# In float32 a large one asks at every call whether products may round, and is not repeated.
large = [torch.randn(*shape).requires_grad_() for shape in ((4, 64), (4, 64), (64, 64))]
crossing.config.LEAST_FORWARD = crossing.config.LEAST_FLOPS = 0.0
crossing.config.is_large = lambda m, n, k, least: True
crossing.products_round = lambda: True
settle(lambda: rk.cross_layer(*large))
launches(lambda: rk.cross_layer(*large), python=True)

# Public functions: what they fill in is remembered, so that a call that comes again runs no line of theirs.
attending = sys.modules["ridgeline.kernels.attention.op"]
decoding = sys.modules["ridgeline.kernels.decode_attention.op"]
decoding.launchable = lambda x: True
filled = []
for room in (attending, decoding):
    room.narrowed = (lambda narrowed: lambda *tensors: filled.append(1) or narrowed(*tensors))(room.narrowed)


def fills(call):
    """Whether a call runs the Python lines of its function."""
    filled.clear()
    call()
    return bool(filled)


q, k, v = (torch.randn(2, n, 100, 64).bfloat16() for n in (4, 2, 2))
with torch.no_grad():
    for call in (
        lambda: rk.attention(q, k, v, True),
        lambda: rk.attention(q, k, v, window=(16, 0)),
        lambda: rk.attention(q, k, v, key_mask=torch.ones(2, 100, dtype=torch.bool), sinks=torch.zeros(4).bfloat16()),
    ):
        settle(call, 5)
        assert not fills(call)
    assert fills(lambda: rk.attention(q, k, v, True, 0.5)), "another number"
    assert fills(lambda: rk.attention(q, k, v, window=(17, 0))), "another window"
    assert fills(lambda: rk.attention(q, k, q[:, :2], True)), "a tensor twice"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fills(lambda: rk.attention(q, k, v, True)), "autocast changes what is handed over"
    assert not fills(lambda: rk.attention(torch.randn_like(q), k, v, True))
    fake.fake_set_num_args(9)
    others = torch.randn_like(q)
    rk.attention(others, k, v, True)
    assert fake.fake_map(2) == others.data_ptr()
    launcher.forget_plans()
    assert fills(lambda: rk.attention(q, k, v, True))
    with pytest.raises(TypeError, match="keyword"):
        contract.primitive("attention").quick(q, k, v, is_causal=True)
    with pytest.raises(KernelError):
        rk.attention(q, k[:, :, :, :32], v, True)
leaves = [x.detach().requires_grad_() for x in (q, k, v)]
settle(lambda: rk.attention(*leaves, True), 5)
filled.clear()
out = rk.attention(*leaves, True)
assert not filled and out.requires_grad and out.grad_fn.name() == "attention_backward"
assert [g.shape for g in torch.autograd.grad(out, leaves, torch.randn_like(q))] == [x.shape for x in leaves]

# Scratch is one kept place of a stream; a graph that is being recorded gets its own.
row, cache = torch.randn(2, 32, 1, 128).bfloat16(), [torch.randn(2, 8, 512, 128).bfloat16() for _ in range(2)]


def decoded():
    out, _ = launches(lambda: rk.decode_attention(row, *cache), python=False)
    used = [fake.fake_arg_of(fake.fake_num_launches() - 1, j) for j in range(9)]
    assert used[:3] == [row.data_ptr(), cache[0].data_ptr(), cache[1].data_ptr()] and used[7] == out.data_ptr()
    return out, used[5:7] + used[8:]


with torch.no_grad():
    settle(lambda: rk.decode_attention(row, *cache), 5)
    assert not fills(lambda: rk.decode_attention(row, *cache))
    (first, kept), (second, again) = decoded(), decoded()
    assert kept == again and first.data_ptr() != second.data_ptr()
    assert kept[0] < kept[1] < kept[2], "parts, what they saw and counters, one after the other"
    with launcher.overlapped():
        assert fills(lambda: rk.decode_attention(row, *cache)), "a call that may start early is planned in Python"
    fake.fake_capture(1)
    (_, other), _ = decoded(), decoded()
    fake.fake_capture(0)
    assert other != kept
    assert decoded()[1] == kept
fake.fake_set_num_args(6)

# A gradient that is handed on as it came, and a call whose backward pass sorts: forward alone is repeated.
a, b = (torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
grad, mask_seed = torch.randn(8, 64, dtype=torch.bfloat16), torch.tensor(7)


def dropped():
    return torch.autograd.grad(rk.dropout_add(a, b, 0.5, seed=mask_seed), (a, b), grad)


settle(dropped, 4)
(da, db), seen = launches(dropped, python=False)
assert [row[:3] for row in seen[:1]] == [[a.data_ptr(), b.data_ptr(), mask_seed.data_ptr()]]
assert seen[1][:3] == [grad.data_ptr(), mask_seed.data_ptr(), da.data_ptr()] and torch.equal(db, grad)
table, indices, offsets = torch.randn(50, 16), torch.arange(6), torch.tensor([0, 3, 6])
with torch.no_grad():
    settle(lambda: rk.embedding_bags(table, indices, offsets))
    out, seen = launches(lambda: rk.embedding_bags(table, indices, offsets), python=False)
    assert out.shape == (2, 16) and seen[0][0] == table.data_ptr()
    assert seen[0][2:4] == [indices.data_ptr(), offsets.data_ptr()]
    other = torch.arange(6) + 1
    out, seen = launches(lambda: rk.embedding_bags(table, other, offsets), python=False)
    assert seen[0][2] == other.data_ptr()

print("repeated")
