"""Decoding steps rewritten: what is folded into products and attention, what is left alone, and that results agree."""

from __future__ import annotations

import operator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import nn

from ridgeline.optimizer import backend
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.attention.decode import attended, num_seen
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.linear import gemv as vectors
from ridgeline.optimizer.rewrites.linear import split_gemm as halves

NAMES = (
    "norm", "norm-call", "norm-residual", "gate", "horizontal", "grouped-keys", "decode-attention", "products", "halves"
)  # fmt: skip
WIDTH, INNER = 256, 512


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Layer(nn.Module):
    """A decoding layer as models write it: norm, three projections, a cache, attention, and a gated unit."""

    def __init__(self, activation: Any = F.silu) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, 256, 256, WIDTH))
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down, self.activation = nn.Linear(INNER, WIDTH, bias=False), activation

    def forward(self, x: Any, keys: Any, values: Any) -> Any:
        b = x.shape[0]
        y = self.norm1(x)
        q, k, v = (f(y).view(b, 1, -1, 32).transpose(1, 2) for f in (self.q, self.k, self.v))
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        a = F.scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] != keys.shape[1])
        x = x + self.o(a.transpose(1, 2).reshape(b, 1, WIDTH))
        y = self.norm2(x)
        return x + self.down(self.activation(self.gate(y)) * self.up(y))


def _ran(model: nn.Module, args: tuple[Any, ...], names: tuple[str, ...] = NAMES) -> tuple[Any, Any, Report]:
    report = Report()
    with torch.no_grad():
        return compiled(model, rewrites=names, report=report)(*args), model(*args), report


def _whats(report: Report, rewrite: str = "products") -> list[str]:
    return [match.what.split(") ", 1)[-1].split(" + ", 1)[-1] for match in report.matches if match.rewrite == rewrite]


def _args(rows: int = 1) -> tuple[Any, ...]:
    return torch.randn(rows, 1, WIDTH), torch.randn(rows, 8, 20, 32), torch.randn(rows, 8, 20, 32)


def test_a_decoding_layer_becomes_five_kernels() -> None:
    found, meant, report = _ran(Layer(), _args(3))
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)
    assert report.counts()["decode-attention"] == 1
    assert _whats(report) == ["RMSNorm", "sum", "RMSNorm + silu gate", "sum"]


@pytest.mark.parametrize("activation", [F.gelu, lambda x: F.gelu(x, approximate="tanh")])
def test_gates_of_other_kinds_are_folded_in_too(activation: Any) -> None:
    found, meant, report = _ran(Layer(activation), _args())
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)
    assert any("gelu" in what and "gate" in what for what in _whats(report))


def test_many_rows_are_left_to_cublas() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU())
    assert _ran(model, (torch.randn(17, WIDTH),))[2].counts().get("products") is None
    found, meant, report = _ran(model, (torch.randn(16, WIDTH),))
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)
    assert _whats(report) == ["relu"]


def test_a_small_weight_is_left_alone() -> None:
    assert _ran(nn.Linear(64, 64), (torch.randn(1, 64),))[2].counts().get("products") is None


class Twice(nn.Module):
    """A product that somebody else reads before its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, y: Any) -> Any:
        z = self.fc(x)
        return z + y, z * 2


def test_a_product_that_others_read_keeps_its_sum_apart() -> None:
    found, meant, report = _ran(Twice(), (torch.randn(2, WIDTH), torch.randn(2, WIDTH)))
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)
    assert report.counts()["products"] == 1 and "sum" not in _whats(report)[0]


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, y: Any) -> Any:
        return self.fc(x) + y


def test_a_sum_with_another_shape_is_not_a_residual() -> None:
    found, meant, report = _ran(Broadcast(), (torch.randn(2, WIDTH), torch.randn(WIDTH)))
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)
    assert "sum" not in _whats(report)[0]


class Swapped(nn.Module):
    """The half that is activated comes second in memory: the kernel would gate the wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * INNER, bias=False)

    def forward(self, x: Any) -> Any:
        up, gate = self.both(x).chunk(2, -1)
        return F.silu(gate) * up


def test_a_gate_in_the_second_half_is_not_taken_for_one_in_the_first() -> None:
    found, meant, report = _ran(Swapped(), (torch.randn(2, WIDTH),))
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)
    assert "gate" not in _whats(report)[0]


class Overwritten(nn.Module):
    """A residual that is written between the product and the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        y = x * 2
        z = self.fc(y)
        y.add_(1)
        return z + y


def test_what_is_written_in_between_is_read_where_it_was() -> None:
    found, meant, _ = _ran(Overwritten(), (torch.randn(2, WIDTH),))
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)


def test_training_is_left_alone() -> None:
    model, report = nn.Linear(WIDTH, WIDTH), Report()
    compiled(model, rewrites=NAMES, report=report)(torch.randn(2, WIDTH)).sum().backward()
    assert "products" not in report.counts() and model.weight.grad is not None


class Repeated(nn.Module):
    """Keys repeated for every head, with a mask: how models attend over a fixed cache."""

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        b, h, s, d = k.shape
        k, v = (x[:, :, None].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_repeated_keys_are_shared_under_a_mask() -> None:
    k, v = torch.randn(2, 2, 2, 30, 16)
    args = (torch.randn(2, 4, 1, 16), k, v, torch.rand(2, 1, 1, 30) < 0.6)
    found, meant, report = _ran(Repeated(), args, ("decode-attention",))
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)
    assert report.counts() == {"decode-attention": 1}


class Causal(nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_causal_flag_over_one_row_sees_one_key_and_is_left_alone() -> None:
    args = (torch.randn(1, 2, 1, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16))
    found, meant, report = _ran(Causal(), args, ("decode-attention",))
    torch.testing.assert_close(found, meant)
    assert not report.counts()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (operator.matmul, ((512, 300), (300, 600))),
        (torch.bmm, ((2, 512, 300), (2, 300, 600))),
        (lambda a, b: torch.einsum("bijl,lk->bijk", a, b), ((2, 16, 32, 300), (300, 600))),
        (lambda a, b: a @ b.T, ((512, 300), (600, 300))),
        (lambda a, b: torch.addmm(b[0], a, b), ((512, 300), (300, 600))),
    ],
)
def test_large_float32_products_become_halves(function: Any, shapes: Any) -> None:
    class Product(nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return function(a, b)

    found, meant, report = _ran(Product(), tuple(torch.randn(*shape) for shape in shapes), ("halves",))
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-4)
    assert report.counts() == {"halves": 1}


def test_other_einsums_are_left_alone() -> None:
    class Other(nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return torch.einsum("il,kl->ik", a, b), torch.einsum("li,lk->ik", a, b)

    found, meant, report = _ran(Other(), (torch.randn(512, 512), torch.randn(512, 512)), ("halves",))
    torch.testing.assert_close(found, meant)
    assert not report.counts()


@pytest.mark.parametrize(("m", "k", "n"), [(16, 2048, 4096), (4096, 16, 4096)])
def test_thin_products_and_short_sums_stay(m: int, k: int, n: int) -> None:
    assert not _ran(nn.Linear(k, n), (torch.randn(m, k),), ("halves",))[2].counts()


def test_tf32_users_keep_tf32() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert not _ran(nn.Linear(512, 512), (torch.randn(512, 512),), ("halves",))[2].counts()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Cached(nn.Module):
    """Writes into a fixed cache as transformers does: the place is counted on the device."""

    def forward(self, keys: Any, values: Any, length: Any, k: Any, v: Any) -> Any:
        place = torch.arange(1) + length
        length.add_(1)
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        return keys.sum(), values.sum(), length + 0


def test_a_cache_is_written_once_and_its_place_is_read_before_it_moves_on() -> None:
    def given() -> tuple[Any, ...]:
        torch.manual_seed(1)
        caches = torch.zeros(2, 1, 2, 6, 8)
        return caches[0].clone(), caches[1].clone(), torch.tensor(3), torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)

    ours, theirs, report = given(), given(), Report()
    with torch.no_grad():
        fast = compiled(Cached(), rewrites=("cache-append",), report=report)
        for _ in range(2):
            torch.testing.assert_close(fast(*ours), Cached()(*theirs))
    torch.testing.assert_close(ours, theirs)
    assert report.counts() == {"cache-append": 2} and int(ours[2]) == 5


class Looked(nn.Module):
    """Looks at the keys before the values are written."""

    def forward(self, keys: Any, values: Any, place: Any, k: Any, v: Any) -> Any:
        keys.index_copy_(2, place, k)
        seen = keys.sum()
        values.index_copy_(2, place, v)
        return seen


def test_writes_stay_apart_where_something_looks_in_between() -> None:
    new = torch.ones(1, 2, 1, 8)
    args = (torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 6, 8), torch.tensor([2]), new, new.clone())
    report = Report()
    with torch.no_grad():
        found = compiled(Looked(), rewrites=("cache-append",), report=report)(*args)
    assert float(found) == 16.0 and float(args[1].sum()) == 16.0 and not report.counts()


class CountedLayers(nn.Module):
    """Several layers that each count their own length, as static caches do; a mask is made of the first."""

    def forward(self, caches: Any, lengths: Any, k: Any) -> Any:
        place = torch.arange(1) + lengths[0]
        seen = torch.arange(6)[None, :] <= place[:, None]
        total = seen.sum()
        for (keys, values), length in zip(caches, lengths, strict=True):
            place = torch.arange(1) + length
            length.add_(1)
            keys.index_copy_(2, place, k)
            values.index_copy_(2, place, k + 1)
            total = total + (keys * seen[:, :, None]).sum() + values.sum()
        return total


class PlaceReturned(CountedLayers):
    """Hands out a place: it must not move on with the length."""

    def forward(self, caches: Any, lengths: Any, k: Any) -> Any:
        place = torch.arange(1) + lengths[0]
        return super().forward(caches, lengths, k), place


class CountedTwice(CountedLayers):
    """Counts every length twice, and writes at both places."""

    def forward(self, caches: Any, lengths: Any, k: Any) -> Any:
        return super().forward(caches, lengths, k) + super().forward(caches, lengths, k)


class ReadBetween(nn.Module):
    """Reads a length between its count and the write, and a view of it behind."""

    def forward(self, caches: Any, lengths: Any, k: Any) -> Any:
        (keys, values), length = caches[0], lengths[0]
        place, early = torch.arange(1) + length, length.view(1)
        length.add_(1)
        k = k * length
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, k)
        return keys.sum(), values.sum(), early * 2, lengths[1] + 0


class SetAnew(nn.Module):
    """Sets a length anew behind its count."""

    def forward(self, caches: Any, lengths: Any, k: Any) -> Any:
        (keys, values), length = caches[0], lengths[0]
        place = torch.arange(1) + length
        length.add_(1)
        length.fill_(2)
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, k)
        return keys.sum(), values.sum(), lengths[1] + 0


@pytest.mark.parametrize(
    ("model", "launches", "copies"),
    [(CountedLayers, 1, 0), (PlaceReturned, 1, 1), (CountedTwice, 4, 3), (ReadBetween, 1, 1), (SetAnew, 1, 1)],
)
def test_lengths_are_counted_together_only_where_nobody_can_tell(model: Any, launches: int, copies: int,
                                                                 monkeypatch: Any) -> None:  # fmt: skip
    """Three layers: what each spelling launches to count, and how many places are still copied."""
    seen: list[Any] = []
    monkeypatch.setattr(backend, "_lowered", lambda ctx, *_: seen.append(ctx) or ctx.gm.forward)

    def given() -> tuple[Any, ...]:
        torch.manual_seed(1)
        caches = [(torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 6, 8)) for _ in range(3)]
        return caches, [torch.tensor(1), torch.tensor(0), torch.tensor(2)], torch.randn(1, 2, 1, 8)

    ours, theirs = given(), given()
    with torch.no_grad():
        fast = compiled(model(), rewrites=("cache-append",))
        for _ in range(2):
            torch.testing.assert_close(fast(*ours), model()(*theirs), rtol=0, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    names = [str(getattr(node.target, "__name__", node.target)) for node in seen[0].graph.nodes]
    assert (names.count("add_") + names.count("_foreach_add_"), names.count("copied_position")) == (launches, copies)


def test_an_op_writes_what_its_schema_says_and_nothing_else() -> None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("keys", "values", "index", "k", "v")]
    for node in nodes:
        node.meta["example_value"] = torch.empty(1)
    append = graph.call_function(torch.ops.ridgeline_kernels.cache_append.default, tuple(nodes))
    graph.output(())
    ctx = GraphContext(torch.fx.GraphModule({}, graph), [], training=False)
    assert ctx.written(append) == ctx.memory(nodes[0]) | ctx.memory(nodes[1])


class Shown(nn.Module):
    """Attention over a cache of which the keys up to a number are shown, in the spelling it is given."""

    def __init__(self, spelling: Any) -> None:
        super().__init__()
        self.spelling = spelling

    def forward(self, q: Any, k: Any, v: Any, last: Any) -> Any:
        mask = self.spelling(torch.arange(k.shape[2])[None, None, None, :], last[:, None, None, None])
        last.add_(1)  # what the mask was made of moves on before it is used
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


COUNTED = {
    "up to": lambda places, last: places <= last,
    "below": lambda places, last: places < last,
    "turned round": lambda places, last: last >= places,
    "and nothing hidden": lambda places, last: (places <= last) & (places >= 0),
}
MASKED = {
    "a window": lambda places, last: (places <= last) & (places > last - 5),
    "not from the first": lambda places, last: places + 1 <= last,
    "every second": lambda places, last: 2 * places <= last,
    "behind": lambda places, last: places >= last,
    "with a hole": lambda places, last: (places <= last) & (places != 3),
    "of fractions": lambda places, last: places <= last + 0.5,
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", [*COUNTED, *MASKED])
def test_a_mask_that_shows_keys_up_to_a_number_becomes_lengths_and_no_other_does(name: str, batch: int,
                                                                                 monkeypatch: Any) -> None:  # fmt: skip
    seen: list[Any] = []
    monkeypatch.setattr(backend, "_lowered", lambda ctx, *_: seen.append(ctx) or ctx.gm.forward)
    model = Shown((COUNTED | MASKED)[name])
    k, v = torch.randn(2, batch, 2, 30, 16)
    q, numbers = torch.randn(batch, 4, 1, 16), torch.tensor([20, 11])[:batch]
    ours, theirs = numbers.clone(), numbers.clone()
    with torch.no_grad():
        fast = compiled(model, rewrites=("decode-attention",))
        for _ in range(2):
            torch.testing.assert_close(fast(q, k, v, ours), model(q, k, v, theirs), rtol=1e-5, atol=1e-6)
    (attention,) = [node for node in seen[0].graph.nodes if node.target is attended]
    assert (attention.args[6] is not None, attention.args[3] is None) == (name in COUNTED,) * 2


class TwoShown(nn.Module):
    def forward(self, q: Any, k: Any, v: Any, last: Any) -> Any:
        mask = torch.arange(30) <= last
        return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), v, k, mask)


def test_layers_that_share_a_mask_share_its_lengths(monkeypatch: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(backend, "_lowered", lambda ctx, *_: seen.append(ctx) or ctx.gm.forward)
    k, v = torch.randn(2, 1, 4, 30, 16)
    args = (torch.randn(1, 4, 1, 16), k, v, torch.tensor([[7]]))
    found, meant, _ = _ran(TwoShown(), args, ("decode-attention",))
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-6)
    assert [node.target for node in seen[0].graph.nodes if node.op == "call_function"] == [num_seen, attended, attended]


def test_keys_behind_a_length_are_not_read() -> None:
    k, v = torch.randn(2, 1, 2, 30, 16)
    q, args = torch.randn(1, 4, 1, 16), (torch.tensor([20]),)
    with torch.no_grad():
        fast = compiled(Shown(COUNTED["up to"]), rewrites=("decode-attention",))
        clean = fast(q, k, v, args[0].clone())
        k[:, :, 21:], v[:, :, 21:] = float("nan"), float("nan")
        torch.testing.assert_close(fast(q, k, v, args[0].clone()), clean, rtol=0, atol=0)


@pytest.mark.parametrize("number", [2**62, 2**32, 2**31 - 1, 29, 0])
def test_numbers_beyond_the_keys_show_every_key_and_no_more_than_kernels_count_to(number: int) -> None:
    k, v = torch.randn(2, 1, 2, 30, 16)
    q, model = torch.randn(1, 4, 1, 16), Shown(COUNTED["up to"])
    with torch.no_grad():
        found = compiled(model, rewrites=("decode-attention",))(q, k, v, torch.tensor([number]))
        torch.testing.assert_close(found, model(q, k, v, torch.tensor([number])), rtol=1e-5, atol=1e-6)
    assert min(number + 1, 30) <= int(num_seen(torch.tensor([number]), 1, 30)) <= 31
    assert num_seen(torch.tensor([[-(2**40)], [3]]), 1, 30).tolist() == [0, 4]


@pytest.mark.parametrize("weight", [False, True])
def test_long_sums_are_cut_where_the_result_is_small(weight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "planned", lambda *given, thin: lambda a, b, bias: torch.bmm(a, b))  # no device
    a, b = torch.randn(96, 65536, dtype=torch.float64), torch.randn(65536, 64, dtype=torch.float64)
    left, right = a.float(), b.float().t().contiguous().t() if weight else b.float()
    assert halves.num_pieces(left, right) == 32
    torch.testing.assert_close(halves._in_pieces(left, right, None).double(), a @ b, rtol=1e-4, atol=1e-2)
    bias = torch.randn(64)
    with_bias = halves._in_pieces(left, right, bias)
    torch.testing.assert_close(with_bias - bias, halves._in_pieces(left, right, None), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("m", "k", "n"), [(1024, 8192, 8192), (96, 1024, 64), (96, 65537, 64)])
def test_other_sums_stay_in_one_piece(m: int, k: int, n: int) -> None:
    assert halves.num_pieces(torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta")) == 1


@pytest.mark.parametrize(
    ("function", "shapes", "num"),
    [
        (lambda a, b: a @ b, ((32, 48), (48, 1)), 1),
        (torch.mv, ((32, 48), (48,)), 1),
        (lambda a, b: torch.matmul(a, b) + 1, ((32, 48), (48,)), 1),
        (lambda a, b: a @ b, ((32, 48), (48, 2)), 0),
        (lambda a, b: a @ b, ((2, 32, 48), (48,)), 0),
        (lambda a, b: a.T @ b, ((48, 32), (48, 1)), 0),
        (lambda a, b: a @ b, ((48,), (48, 1)), 0),
    ],
)
def test_a_large_matrix_times_a_vector_is_a_product_of_one_row(
    function: Any, shapes: Any, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "LEAST_ELEMENTS", 1)
    torch._dynamo.reset()
    args, report = [torch.randn(*shape) for shape in shapes], Report()
    with torch.no_grad():
        found = compiled(function, rewrites=("vectors",), report=report)(*args)
    torch.testing.assert_close(found, function(*args), rtol=1e-4, atol=1e-5)
    assert report.counts().get("vectors", 0) == num and not report.refusals
    if num:
        torch.testing.assert_close(vectors._ours(*args), args[0] @ args[1], rtol=1e-4, atol=1e-5)
