"""``torch.matmul`` of float32 tensors on the tensor cores, at float32's own accuracy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.compiler import POINTER_ALIGNMENT_BYTES
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.launcher import Kernel, Plans, launchable, num_sms, vector_of
from ridgeline.kernels.rows import cdiv, clamp, power_of_two
from ridgeline.kernels.split_gemm import config, kernel, reference

_SPLIT = Kernel(
    kernel.matmul_split,
    vectors=("outer", "k", "filled_outer", "filled_k", "x_z", "x_step", "half_z", "half_step"),
    loose=("scale_ptr",),
)
_HALVES = Kernel(
    kernel.matmul_halves,
    vectors=("filled_m", "filled_n", "k", "a_z", "a_step", "b_z", "b_step"),
    loose=("a_scale_ptr", "b_scale_ptr", "bias_ptr", "nan_ptr"),
)
_DIGITS = Kernel(kernel.matmul_digits, loose=("x_ptr",))
_THIN = Kernel(kernel.matmul_thin, vectors=("n", "k"), loose=("bias_ptr", "nan_ptr"))
_MEND = Kernel(kernel.matmul_mend, loose=("a_ptr", "b_ptr", "bias_ptr", "nan_ptr", "by_ptr", "more_ptr", "u_ptr"))
_PIECES = Kernel(kernel.matmul_pieces, vectors=("m", "n", "k", "a_step", "b_step", "length"))
_DIGITS_BLOCK = 1024
_plans = Plans()
FILL = 8
"""Halves of a 16-byte access: sizes are filled up to as many."""


def matmul(input: Tensor, other: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ other`` (+ ``bias``) for float32, without gradients: [..., M, K] @ [K, N], or [Z, M, K] @ [Z, K, N].

    Factors are split into halves that the tensor cores multiply; see the kernel for why that is as accurate, and how
    infinities and NaN come out as float32 has them.
    """
    return MATMUL(input, other, bias)


def _forward(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if not launchable(a):
        return MATMUL.on_host(a, b, bias)  # type: ignore[return-value]
    return planned(a, b, bias)(a, b, bias)


def planned(
    a: Tensor, b: Tensor, bias: Tensor | None, thin: bool | None = None, tall: bool = False, pieces: bool = False
) -> Any:
    """The launches of a product, for few rows, few columns, few results or many as sizes suggest or as is said."""
    pointers = (a.data_ptr() | b.data_ptr()) & 15 if not a.is_meta else 0
    key = (a.shape, a.stride(), b.shape, b.stride(), bias is None, a.get_device(), pointers, thin, tall, pieces)
    plan = _plans.get(key)
    if plan is None:
        MATMUL.check(a, b, bias)
        if pieces or (thin is None and pieces_fit(a, b) and not is_thin(a, b)):
            plan = _plans[key] = Pieces(a, b)
            return plan.run
        if thin is None:
            thin = is_thin(a, b)
            tall = tall or (not thin and tall_fits(a, b))
        plan = _plans[key] = _Thin(a, b, bias, tall) if thin or tall else _Plan(a, b, bias)
    return plan.run


def is_thin(a: Tensor, b: Tensor) -> bool:
    """Whether few rows meet a matrix laid out as a linear layer's weight."""
    return thin_fits(a, b) and a.shape[:-1].numel() <= config.MOST_THIN_ROWS


def thin_fits(a: Tensor, b: Tensor) -> bool:
    return b.dim() == 2 and b.stride(0) == 1 and b.stride(1) == b.shape[0]


def tall_fits(a: Tensor, b: Tensor) -> bool:
    """Whether many dense rows meet a narrow matrix."""
    narrow = b.dim() == 2 and b.shape[1] <= config.MOST_TALL_COLS
    return narrow and a.is_contiguous() and a.shape[:-1].numel() >= config.LEAST_TALL_ROWS


PLAIN = {"BY": False, "MORE": False, "SAVE": False}
"""A product that ends as it is."""


class _Mend:
    """The look at a product's tiles for NaN, which an infinity makes of halves: what has one is computed once more."""

    def __init__(
        self, a: Tensor, b: Tensor, bias: Tensor | None, rows: int, cols: int, told: bool = True, end: Any = PLAIN
    ) -> None:
        self.device, (num, m, k), n = a.get_device(), a.shape, b.shape[2]
        tiles = cdiv(m, rows) * cdiv(n, cols)
        self.nans = (num, tiles) if told else (1,)
        strides = (a.stride(0), a.stride(1), a.stride(2), b.stride(0), b.stride(1), b.stride(2))
        self.rest = (m, n, k, *strides)
        out, nan = (torch.empty(FILL, dtype=kind, device=a.device) for kind in (torch.float32, torch.int32))
        self.launch = _MEND.bind(
            (a, b, out if bias is None else bias, out, nan, out, out, out, *self.rest),
            grid=(min(tiles, cdiv(2 * num_sms(self.device), num)), num),
            constants={"TOLD": told, "BIAS": bias is not None, **end, "BM": rows, "BN": cols, "BK": 16},
            num_warps=8 if rows * cols > 4096 else 4,
            device=self.device,
        )

    def room(self, a: Tensor) -> Tensor:
        return torch.empty(self.nans, dtype=torch.int32, device=a.device)

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, nans: Tensor, *ends: Tensor) -> None:
        self.launch(a, b, out if bias is None else bias, out, nans, *(ends or (out, out, out)), *self.rest)


class _Thin:
    """One large factor, taken apart on its way, and one small, beforehand: few rows times a matrix as a linear layer
    has it, or (``turned``) many rows times a narrow matrix."""

    def __init__(self, a: Tensor, b: Tensor, bias: Tensor | None, turned: bool) -> None:
        self.shape, self.turned, device = (*a.shape[:-1], b.shape[-1]), turned, a.get_device()
        large, small = self._factors(a, b)
        (n, k), m = large.shape, small.shape[0]
        likely = config.tall(m) if turned else config.thin(m)
        chosen = tuning.choose("matmul.tall" if turned else "matmul.thin", {"m": m, "n": n, "k": k}, likely)
        self.rest = (n, k, m)
        out = torch.empty(FILL, dtype=torch.float32, device=a.device)
        self.digits = _DIGITS.bind(
            (small, out, out, small.numel()),
            grid=(cdiv(small.numel(), _DIGITS_BLOCK),),
            constants={"BLOCK": _DIGITS_BLOCK},
            num_warps=4,
            device=device,
        )
        self.launch = _THIN.bind(
            (large, out, out, out if bias is None else bias, out, out.view(torch.int32), *self.rest),
            grid=(cdiv(n, chosen.cols), cdiv(m, chosen.rows)),
            constants={"BM": chosen.rows, "BN": chosen.cols, "BK": chosen.depth, "TOGETHER": config.TOGETHER,
                       "EVEN": k % chosen.depth == 0, "BIAS": bias is not None, "TURNED": turned},
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            device=device,
            vector=vector_of(4, 0 if large.is_meta else large.data_ptr(), n, k),
        )  # fmt: skip
        tile = (chosen.cols, chosen.rows) if turned else (chosen.rows, chosen.cols)
        self.mend = _Mend(a.reshape(1, -1, k), b.unsqueeze(0), bias, *tile, told=turned)

    def _factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The large factor and the small one, both with the terms last."""
        rows = a.reshape(-1, a.shape[-1])
        return (rows, b.t().contiguous()) if self.turned else (b.t(), rows.contiguous())

    def run(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.float32, device=a.device)
        if out.numel() == 0:
            return out
        large, small = self._factors(a, b)
        high, low = torch.empty_like(small), torch.empty_like(small)
        nans = self.mend.room(a)
        self.digits(small, high, low, small.numel())
        self.launch(large, high, low, high if bias is None else bias, out, nans, *self.rest)
        self.mend(large if self.turned else small, b, bias, out, nans)
        return out


class Pieces:
    """Few results of long sums: stretches of the terms side by side, whose products are added.

    The tensor cores want the second factor's terms dense: where only the first one's are, bᵀ aᵀ is computed (0.82 and
    1.92 ms for 256×256 results of 524,288 terms).
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        (m, k), n, device = a.shape, b.shape[1], a.get_device()
        chosen = tuning.choose("matmul.pieces", {"m": m, "n": n, "k": k}, config.Pieces())
        self.turned = b.stride(0) != 1 and a.stride(1) == 1
        if self.turned:
            a, b, m, n = b.t(), a.t(), n, m
        self.num, length = config.stretches(m, n, k, chosen, num_sms(device))
        self.shape = (self.num, m, n)
        self.mend = _Mend(a.unsqueeze(0), b.unsqueeze(0), None, 64, 64, told=False)
        steps, turned = zip(*map(_step, (a, b)), strict=True)
        self.rest = (m, n, k, length, *steps)
        out = torch.empty(FILL, dtype=torch.float32, device=a.device)
        whole = m % chosen.rows == 0 and n % chosen.cols == 0 and k % chosen.depth == 0
        self.launch = _PIECES.bind(
            (a, b, out, *self.rest),
            grid=(cdiv(m, chosen.rows) * cdiv(n, chosen.cols), self.num),
            constants={"BM": chosen.rows, "BN": chosen.cols, "BK": chosen.depth, "TOGETHER": config.TOGETHER,
                       "A_TURNED": turned[0], "B_TURNED": turned[1], "EVEN": whole},
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            device=device,
            vector=vector_of(4, 0 if a.is_meta else a.data_ptr() | b.data_ptr(), m, n, k, length, *steps),
        )  # fmt: skip

    def run(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.float32, device=a.device)
        left, right = (b.t(), a.t()) if self.turned else (a, b)
        self.launch(left, right, out, *self.rest)
        found = out.sum(0)
        self.mend(left, right, None, found, found)
        found = found.t().contiguous() if self.turned else found
        return found if bias is None else found + bias


def _step(x: Tensor) -> tuple[int, bool]:
    """How far apart the rows of a matrix lie, or its columns where those are dense, and which it is."""
    return (x.stride(0), False) if x.stride(1) == 1 else (x.stride(1), True)


def pieces_fit(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices have few results and long sums, and each a dense dim."""
    dense = all(x.dim() == 2 and 1 in x.stride() for x in (a, b))
    if not dense:
        return False
    tiles = cdiv(a.shape[0], 128) * cdiv(b.shape[1], 128)
    # tiles of results with which a fourth of the SMs would have all the work
    return a.shape[1] >= 2 * config.LEAST_PIECE and tiles <= 33


class _Split:
    """The pass that takes one matrix apart, tiles long in its dense dim; each index of ``outer`` has its own scale."""

    def __init__(self, x: Tensor, outer: int, inner: int) -> None:
        self.turned = x.stride(inner) != 1
        self.outer, self.k = x.shape[outer], x.shape[inner]
        self.filled_outer, self.filled_k = (cdiv(size, FILL) * FILL for size in (self.outer, self.k))
        self.num = x.shape[0]
        self.rows, self.cols = (self.filled_k, self.filled_outer) if self.turned else (self.filled_outer, self.filled_k)
        step = x.stride(inner if self.turned else outer)
        strides = (x.stride(0), step, self.rows * self.cols, self.cols)
        self.args = (self.outer, self.k, self.filled_outer, self.filled_k, *strides)
        wide = min(2048, max(32, power_of_two(self.filled_k)))  # short rows share a program
        tile = {"BO": 2048 // wide, "BK": wide}
        if self.turned:
            chosen = config.split(self.filled_outer, self.filled_k, self.num, num_sms(x.get_device()))
            tile = {"BO": chosen[0], "BK": chosen[1]}
        self.launch = _SPLIT.bind(
            (x, *self._room(x), *self.args),
            grid=(cdiv(self.filled_outer, tile["BO"]), self.num),
            constants=tile | {"TURNED": self.turned},
            num_warps=clamp(tile["BO"] * tile["BK"] // 512, 4, 8),
            device=x.get_device(),
            vector=vector_of(2, x.data_ptr(), self.outer, self.k, *strides),
        )

    def _room(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (self.num, self.rows, self.cols)
        high, low = (torch.empty(shape, dtype=torch.float16, device=x.device) for _ in range(2))
        return high, low, torch.empty((self.num, self.outer), dtype=torch.float32, device=x.device)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self._room(x)
        self.launch(x, *found, *self.args)
        return found

    @property
    def steps(self) -> tuple[int, int]:
        return self.rows * self.cols, self.cols


class _Plan:
    """Launches for one pair of layouts: both matrices taken apart, then multiplied."""

    def __init__(self, a: Tensor, b: Tensor, bias: Tensor | None, end: Any = PLAIN) -> None:
        self.shape, self.end = (*a.shape[:-1], b.shape[-1]), end
        self.device = a.get_device()
        self.flat = b.dim() == 2
        a, b = self._laid_out(a, b)
        sizes = {"m": a.shape[1], "n": b.shape[2], "k": a.shape[2]}
        likely = config.choose(**sizes, num_sms=num_sms(self.device), num=a.shape[0])
        self.chosen = tuning.choose("matmul", sizes, likely)
        self.a, self.b = _Split(a, 1, 2), _Split(b, 2, 1)
        sizes_filled = (self.a.filled_outer, self.b.filled_outer, self.a.filled_k)
        self.rest = (self.a.outer, self.b.outer, *sizes_filled, *self.a.steps, *self.b.steps, self.b.outer)
        self.launch = self._bind(a, bias)
        self.mend = _Mend(a, b, bias, self.chosen.rows, self.chosen.cols, end=end)

    def _laid_out(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Both as [Z, rows, cols] with one dense dim; a single b serves every row of a."""
        if self.flat:
            a = a.reshape(1, -1, a.shape[-1])
            b = b.unsqueeze(0)
        return _dense(a), _dense(b)

    def _bind(self, a: Tensor, bias: Tensor | None) -> Any:
        chosen = self.chosen
        half, number = (torch.empty(FILL, dtype=kind, device=a.device) for kind in (torch.float16, torch.float32))
        return _HALVES.bind(
            (half, half, half, half, number, number, number if bias is None else bias, number,
             number.view(torch.int32), number, number, number, *self.rest),
            grid=(cdiv(self.a.outer, chosen.rows) * cdiv(self.b.outer, chosen.cols), self.a.num),
            constants={
                "BM": chosen.rows, "BN": chosen.cols, "BK": chosen.depth, "TOGETHER": config.TOGETHER,
                "GROUP": chosen.group,
                "A_TURNED": self.a.turned, "B_TURNED": not self.b.turned,
                "EVEN": self.a.filled_k % chosen.depth == 0, "WIDE": self.b.outer % FILL == 0, "BIAS": bias is not None,
                "SHORT": self.a.filled_k <= chosen.depth, **self.end,
            },
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            device=self.device,
            vector=FILL,
        )  # fmt: skip

    def run(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.float32, device=a.device)
        if out.numel():
            self.fill(a, b, bias, out, out, out, out)
        return out

    def fill(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, *ends: Tensor) -> None:
        a, b = self._laid_out(a, b)
        ah, al, a_scale = self.a(a)
        bh, bl, b_scale = self.b(b)
        nans, shift = self.mend.room(a), b_scale if bias is None else bias
        self.launch(ah, al, bh, bl, a_scale, b_scale, shift, out, nans, *ends, *self.rest)
        self.mend(a, b, bias, out, nans, *ends)


def ends_fit(a: Tensor, b: Tensor, *more: Tensor) -> bool:
    """Whether two matrices are multiplied tile by tile, so that what follows can be done in the same pass, with tensors
    as dense and as aligned as the result."""
    dense = all(x.is_contiguous() and (x.is_meta or x.data_ptr() % POINTER_ALIGNMENT_BYTES == 0) for x in more)
    return dense and a.numel() * b.numel() > 0 and not (is_thin(a, b) or tall_fits(a, b) or pieces_fit(a, b))


def ended(
    a: Tensor, b: Tensor, bias: Tensor | None, by: Tensor | None, more: Tensor, save: bool = False
) -> tuple[Tensor, Tensor]:
    """(``by * (a @ b + bias) + more``, the product itself where it is to be saved), for what ``ends_fit`` says."""
    end = {"BY": by is not None, "MORE": True, "SAVE": save}
    key = (a.shape, a.stride(), b.shape, b.stride(), bias is None, a.get_device(), (a.data_ptr() | b.data_ptr()) & 15,
           *end.values())  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan(a, b, bias, end)
    out = torch.empty_like(more)
    u = torch.empty_like(more) if save else out
    plan.fill(a, b, bias, out, more if by is None else by, more, u)
    return out, u


def _dense(x: Tensor) -> Tensor:
    """Matrices of which either dim is dense, wherever their rows and they themselves begin; a copy where neither is."""
    rows, cols = x.shape[1:]
    plain = x.stride(2) == 1 and x.stride(1) >= cols
    turned = x.stride(1) == 1 and x.stride(2) >= rows and rows > 1
    return x if plain or turned else x.contiguous()


def _support(a: Tensor, b: Tensor, bias: Tensor | None = None) -> str | None:
    if a.dtype != torch.float32 or b.dtype != torch.float32 or (bias is not None and bias.dtype != torch.float32):
        return "factors are not float32: PyTorch's own products are right for other types"
    if a.dim() < 2 or b.dim() not in (2, 3) or (b.dim() == 3 and (a.dim() != 3 or a.shape[0] != b.shape[0])):
        return f"{tuple(a.shape)} @ {tuple(b.shape)}: it is [..., M, K] @ [K, N], or [Z, M, K] @ [Z, K, N]"
    if a.shape[-1] != b.shape[-2]:
        return f"{tuple(a.shape)} and {tuple(b.shape)} do not multiply"
    if a.shape[-1] < config.LEAST_DEPTH:
        return f"sums of {a.shape[-1]} terms; below {config.LEAST_DEPTH} float32 arithmetic is more accurate"
    if bias is not None and (bias.shape != b.shape[-1:] or not bias.is_contiguous()):
        return "bias is one dense number a column"
    return None


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, Any]:
    """Three products on the matrix units; each factor is read twice, written as halves and read again."""
    a, b = inputs[:2]
    flops = 2.0 * a.numel * b.shape[-1]
    factors = a.num_bytes + b.num_bytes
    moved = {"read_bytes": 3 * factors, "written_bytes": factors + outputs[0].num_bytes}
    return {"flops": 3.0 * flops, "matrix_flops": 3.0 * flops, **moved}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    m, n, k, z = of["m"], of["n"], of["k"], of.get("z", 0)

    def draw(*shape: int) -> Tensor:
        if of.get("positive"):
            return torch.rand(*shape, device=on, generator=generator)
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)

    if of.get("cut"):  # stretches of one long inner dim
        left, right = draw(m, z * k).unflatten(1, (z, k)).transpose(0, 1), draw(n, z * k).t().unflatten(0, (z, k))
        return left, right if of.get("weight") else right.contiguous(), None
    a = draw(*((z,) if z else ()), *((k, m) if of.get("turned") else (m, k)))
    b = draw(*((z,) if z else ()), *((n, k) if of.get("turned") or of.get("weight") else (k, n)))
    if of.get("turned"):
        a = a.mT
    if of.get("turned") or of.get("weight"):
        b = b.mT
    return a, b, draw(n) if of.get("bias") else None


CHECKS = (
    case("float32", m=1000, n=500, k=2000, bias=True),
    case("float32", m=513, n=257, k=4096, positive=True),
    case("float32", m=129, n=333, k=777, turned=True),
    case("float32", m=64, n=64, k=256),
    case("float32", m=200, n=96, k=512, z=3, positive=True),
    case("float32", m=2048, n=2048, k=8192, positive=True),
    case("float32", m=100, n=500, k=2000, weight=True, bias=True),
    case("float32", m=33, n=257, k=4099, weight=True, positive=True),
    case("float32", m=300, n=200, k=64),
    case("float32", m=300, n=2000, k=32, positive=True),
    case("float32", m=2000, n=1001, k=40, weight=True),
    case("float32", m=9001, n=48, k=500, bias=True),
    case("float32", m=20000, n=31, k=512, weight=True, positive=True),
    case("float32", m=200, n=136, k=2048, z=8, cut=True, positive=True),
    case("float32", m=130, n=100, k=512, z=4, cut=True, weight=True),
    case("float32", m=256, n=256, k=131072),
    case("float32", m=256, n=128, k=65536, positive=True, bias=True),
    case("float32", m=300, n=70, k=20001, positive=True),
    case("float32", m=129, n=333, k=10000, turned=True),
)
RACES = (
    case("float32", m=4096, n=4096, k=4096),
    case("float32", m=1024, n=8192, k=8192, bias=True),
    case("float32", m=2048, n=4096, k=8192, turned=True),
    case("float32", m=512, n=1024, k=2048, z=64),
    case("float32", m=128, n=16384, k=16384, weight=True, bias=True),
    case("float32", m=256, n=256, k=524288),
)

MATMUL = declare(
    name="matmul",
    summary="float32 products from halves on the tensor cores, as accurate as float32",
    schema="(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda a, b, bias: a.new_empty((*a.shape[:-1], b.shape[-1])),
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trial=Trial(
        make=_make,
        call=matmul,
        eager=reference.eager,
        reference=reference.forward,
        mistakes={
            "one half": reference.one_half, "one factor halved": reference.unscaled,
            "last term lost": reference.last_term_lost,
        },
        checks=CHECKS,
        races=RACES,
        phases=("fwd",),
        constants=(0, 1, 2),
        layouts=False,
    ),
)  # fmt: skip
