"""Attention of one new token a sequence over a paged cache, keys split over the device, grouped heads together."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.kernels import tuning
from ridgeline.kernels.autocast import as_cached
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.launcher import INTERPRETING, Blocks, Kernel, Plans, carved, fits, launchable, num_sms, vector_of
from ridgeline.kernels.paged_attention import config, kernel, reference, tall
from ridgeline.kernels.rows import cdiv, float_reason, power_of_two

LOG2_E = math.log2(math.e)
MAX_HEAD_DIM, MAX_FLOAT32_HEAD_DIM = 256, 128
BLOCK_VECTOR = 8
"""16-byte accesses of 16-bit elements, which is how far apart rows have to be for the copy engine."""

_SHARE = Kernel(
    kernel.paged_share,
    vectors=("q_b", "q_h", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "d"),
    loose=("table_ptr", "lens_ptr"),
)
_COLUMNS = Kernel(kernel.paged_columns, vectors=("d",), loose=("table_ptr", "lens_ptr"))
_TOGETHER = Kernel(kernel.paged_together, vectors=("d",), loose=("table_ptr", "lens_ptr"))
_UNITS = Kernel(kernel.paged_units, vectors=("d",), loose=("table_ptr", "lens_ptr"))
_GATHERED = Kernel(
    kernel.paged_gathered,
    vectors=("k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "d"),
    loose=("table_ptr", "lens_ptr"),
)
_TALL = Kernel(
    tall.paged_tall,
    vectors=("k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "d"),
    loose=("table_ptr", "lens_ptr"),
)
_JOIN = Kernel(kernel.paged_join, vectors=("d",), loose=("lens_ptr",), dependent=True)
_BORDER = Kernel(kernel.paged_border, vectors=("d",), loose=("lens_ptr",), dependent=True)
_SHARES = Kernel(kernel.shares_join, vectors=("d",), dependent=True)
_plans = Plans()


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """One step of decoding: ``query`` [batch, heads, head dim] over the first ``seq_lens`` keys of each sequence.

    Caches are [pages, keys a page, key heads, head dim]; ``block_table`` [batch, pages] names each sequence's pages in
    order. A sequence of length 0 gets zeros. Reads the lengths on the device: no synchronization, safe in CUDA graphs.
    ``out`` takes the result.
    """
    if out is None:
        call = _paged if is_dynamo_compiling() else PAGED_ATTENTION.quick or _paged
        found: Tensor = call(query, key_cache, value_cache, block_table, seq_lens, scale)
        return found
    if not launchable(query):
        return out.copy_(_paged(query, key_cache, value_cache, block_table, seq_lens, scale))
    query = as_cached(query, key_cache)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    PAGED_ATTENTION.check_out(out, query, key_cache, value_cache, block_table, seq_lens, scale)
    return _forward(query, key_cache, value_cache, block_table, seq_lens, scale, out)


def _paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float | None
) -> Tensor:
    query = as_cached(query, key_cache)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found: Tensor = PAGED_ATTENTION(query, key_cache, value_cache, block_table, seq_lens, scale)
    return found


def _forward(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    query, key_cache, value_cache = (dense(x) for x in (query, key_cache, value_cache))
    args = (query, key_cache, value_cache, block_table, seq_lens)
    if not launchable(query):
        return PAGED_ATTENTION.on_host(*args, scale)  # type: ignore[return-value]
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    key = (
        query.dtype, key_cache.dtype, value_cache.dtype, block_table.dtype, seq_lens.dtype, query.shape, query.stride(),
        key_cache.shape, key_cache.stride(), value_cache.shape, value_cache.stride(), block_table.shape,
        block_table.stride(), seq_lens.shape, seq_lens.stride(), query.get_device(),
        (query.data_ptr() | key_cache.data_ptr() | value_cache.data_ptr()) & 15,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan(args, out, scale)
    plan.run(args, out, scale)
    return out


def bind_join(part: Tensor, lse: Tensor, out: Tensor, shares: int) -> Any:
    """The launch that joins [batch, heads, shares, dim] partial results, at most 128 columns a program."""
    batch, heads, dim = out.shape
    wide = min(128, max(16, power_of_two(dim)))  # joined columns
    return _SHARES.bind(
        (part, lse, out, shares, dim),
        grid=(batch * heads, cdiv(dim, wide)),
        constants={"SHARES": power_of_two(shares), "D": wide, "EARLY": not INTERPRETING},
        num_warps=4,
        device=out.get_device(),
        vector=vector_of(out.element_size(), 0, dim),
    )


def dense(x: Tensor) -> Tensor:
    """Rows of head dim one element after the other; a copy where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def counter(out: Tensor) -> Tensor:
    """Stands in for counters, one a program, when a kernel is bound."""
    return torch.empty(2, dtype=torch.int64, device=out.device)


class Parts:
    """Room for the parts of sequences that lie in several programs' stretches, and the launch that joins them, unless
    the last program of a sequence does (``inside``)."""

    def __init__(
        self, keys: int, programs: int, least: int, key_heads: int, out: Tensor, lens: Tensor, borders: bool = False,
        inside: bool = False, ends: int = 0,
    ) -> None:  # fmt: skip
        batch, heads, dim = out.shape
        ratio = heads // key_heads
        self.shape, self.seen_shape = (programs, 2, ratio, dim), (programs, 2, 2, ratio)
        self.lengths = (cdiv(programs * 2 * ratio * dim, 4) * 4, programs * 4 * ratio, programs * 2)
        self.sizes = (batch, key_heads, dim, keys, programs)
        self.fixed = {
            "R": ratio, "BATCH": config.lined(batch), "LEAST": least, "EARLY": not INTERPRETING, "ENDS": ends
        }  # fmt: skip
        bind = self._bind_borders if borders else self._bind_heads
        self.launch = None if inside else bind(out, lens)

    def _bind_heads(self, out: Tensor, lens: Tensor) -> Any:
        batch, heads, dim = out.shape
        key_heads, programs = self.sizes[1], self.sizes[4]
        together, warps = 1, 4
        if dim > config.WIDE_DIM:
            parts, wide, warps = config.wide_tile(programs, batch * key_heads, batch * heads, dim)
        else:
            wide = min(config.joined_columns(batch * heads), max(16, power_of_two(dim)))
            together = heads // key_heads if batch * heads > config.MANY_HEADS else 1
            parts = config.parts_of(programs, batch * key_heads)
        grid = (batch * heads // together, cdiv(dim, wide))
        return self._bind(_JOIN, out, lens, grid, {"HEADS": together, "PARTS": parts, "D": wide}, warps)

    def _bind_borders(self, out: Tensor, lens: Tensor) -> Any:
        batch, heads, dim = out.shape
        key_heads, programs = self.sizes[1], self.sizes[4]
        rows, warps = power_of_two(heads // key_heads), 4
        if dim > config.WIDE_DIM:
            parts, wide, warps = config.wide_border(programs, batch * key_heads, rows)
        else:
            parts, wide = config.border_tile(programs, batch * key_heads, rows)
        wide = min(wide, max(16, power_of_two(dim)))
        constants = {"ROWS": rows, "PARTS": parts, "D": wide}
        return self._bind(_BORDER, out, lens, (programs, cdiv(dim, wide)), constants, warps)

    def _bind(
        self, kernel: Kernel, out: Tensor, lens: Tensor, grid: tuple[int, int], constants: dict[str, Any], warps: int
    ) -> Any:
        return kernel.bind(
            (*self.room(out), lens, out, *self.sizes),
            grid=grid,
            constants=self.fixed | constants,
            num_warps=warps,
            device=out.get_device(),
            vector=vector_of(out.element_size(), 0, out.shape[2]),
        )

    def room(self, out: Tensor) -> tuple[Tensor, Tensor]:
        part, seen = (torch.empty(x, dtype=torch.float32, device=out.device) for x in (self.shape, self.seen_shape))
        return part, seen

    def places(self, out: Tensor) -> tuple[Tensor, tuple[Any, Any, Any]]:
        """Room for parts, for what was seen and for counters in one allocation, which is to be held, and where they lie
        in it."""
        held = torch.empty(sum(self.lengths), dtype=torch.float32, device=out.device)
        part, seen, count = carved(held, *self.lengths)
        return held, (part, seen, count)

    def join(self, part: Any, seen: Any, lens: Tensor, out: Tensor) -> None:
        if self.launch is not None:
            self.launch(part, seen, lens, out, *self.sizes)


def _fed(args: tuple[Tensor, ...]) -> bool:
    """Whether the copy engine can feed a kernel that was written for these sizes."""
    query, keys, values = args[:3]
    steps = (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3])
    pointers = 0 if query.is_meta else query.data_ptr() | keys.data_ptr() | values.data_ptr()
    reachable = not any(step % BLOCK_VECTOR for step in steps) and pointers % 16 == 0
    ratio = query.shape[1] // keys.shape[2]
    return (
        not INTERPRETING and query.element_size() == 2 and reachable
        and config.takes_columns(query.shape[0], ratio, query.shape[2], keys.shape[1])
    )  # fmt: skip


def _blocks(x: Tensor, block: tuple[int, ...]) -> Blocks:
    """Blocks of a tensor whose last dim is dense; a dim of one element may be any step apart."""
    strides = (step if size > 1 else BLOCK_VECTOR for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    return Blocks(x, tuple(x.shape), (*strides, 1), block)


class _Plan:
    """Launches for one set of shapes; parts are allocated anew each time, from PyTorch's own pool."""

    def __init__(self, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, keys, _, table, _ = args
        PAGED_ATTENTION.check(*args, scale)
        batch, heads, dim = query.shape
        page, key_heads = keys.shape[1], keys.shape[2]
        sizes = {"batch": batch, "key_heads": key_heads, "longest": table.shape[1] * page, "head_dim": dim}
        rest = {"itemsize": query.element_size(), "ratio": heads // key_heads, "fed": _fed(args)}
        rest |= {"num_sms": num_sms(query.get_device()), "page": page}
        self._take(tuning.choose("paged_attention", sizes, config.choose(**sizes, **rest)), args, out, scale)
        if self.beside and not fits(self.share, self.beside):
            self._take(config.choose(**sizes, **rest, together=False), args, out, scale)

    def _take(self, chosen: config.Paged, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        """Launches of a configuration; and how many of its clusters have to be on the device together."""
        num, key_heads = chosen.programs, args[1].shape[2]
        self.counts, self.beside = False, (num // chosen.together, chosen.together) if chosen.together > 1 else None
        cut = (num // key_heads, 1) if chosen.beside else (1 if chosen.units else num, key_heads)
        sized = (chosen.keys, cut[0], chosen.least, cut[1])
        joined = (chosen.borders, chosen.fed and chosen.inside, chosen.ends if chosen.fed else 0)
        self.parts = Parts(*sized, out, args[4], *joined) if num else None
        fed = self._bind_tall if chosen.tall else self._bind_gathered if chosen.gathered else self._bind_columns
        bind = fed if chosen.fed else self._bind
        bind(chosen, args, out, scale)

    def _bind(self, chosen: config.Paged, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, keys, values, table, lens = args
        batch, heads, dim = query.shape
        page, key_heads, num = keys.shape[1], keys.shape[2], chosen.programs
        strides = (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], table.stride(0))
        self.rest = (batch, key_heads, *strides, table.shape[1], dim)
        self.share = _SHARE.bind(
            (query, keys, values, table, lens, out, *self._room(out), scale * LOG2_E, *self.rest),
            grid=(num or batch * key_heads,),
            constants={
                "R": heads // key_heads, "ROWS": config.rows_of(heads // key_heads), "D": max(16, power_of_two(dim)),
                "P": page, "KEYS": chosen.keys, "BATCH": config.lined(batch) if num else 0, "LEAST": chosen.least,
                "EARLY": chosen.early if num and not INTERPRETING else 0, "APART": query.dtype == torch.float32,
            },
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            device=query.get_device(),
            vector=vector_of(
                query.element_size(), query.data_ptr() | keys.data_ptr() | values.data_ptr(), *strides[:-1], dim
            ),
        )  # fmt: skip

    def _bind_columns(self, chosen: config.Paged, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, keys, values, table, lens = args
        batch, heads, dim = query.shape
        page, key_heads = keys.shape[1], keys.shape[2]
        rows, wide = math.gcd(page, chosen.keys, chosen.rows), config.padded(dim)
        self.rest = (batch, key_heads, table.stride(0), table.shape[1], dim)
        caches = (_blocks(x, (1, rows, 1, 64)) for x in (keys, values))
        ratio, self.counts = heads // key_heads, True
        kind, more = _COLUMNS, {
            "BATCH": config.lined(batch), "LEAST": chosen.least, "EARLY": 0 if chosen.inside else chosen.early,
            "JOINS": config.joined_at_once(ratio, dim) if chosen.inside else 0, "HEADS": power_of_two(ratio),
            "SKIPS": chosen.skips, "ENDS": chosen.ends, "PADDED": dim < power_of_two(wide),
        }  # fmt: skip
        if chosen.even:
            kind, more = _TOGETHER, {**more, "TOGETHER": chosen.together, "EVEN": chosen.even}
            del more["PADDED"]
        elif chosen.units:
            kind, more = _UNITS, {}
        self.share = kind.bind(
            (_blocks(query, (1, config.columns_of(ratio), 64)), *caches, table, lens, out, *self._room(out),
             counter(out), scale * LOG2_E, *self.rest),
            grid=(chosen.programs,),
            constants={
                "R": ratio, "D": wide, "P": page, "KEYS": chosen.keys, "ROWS": rows,
                "COLS": config.columns_of(ratio), "STAGES": chosen.num_stages, "LEAVES": chosen.leaves,
                "QUERIES": chosen.queries, **more,
            },
            num_warps=chosen.num_warps,
            max_registers=chosen.max_registers,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
            cluster=chosen.together,
        )  # fmt: skip

    def _bind_gathered(self, chosen: config.Paged, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, keys, values, table, lens = args
        batch, heads, dim = query.shape
        key_heads, ratio = keys.shape[2], heads // keys.shape[2]
        self.counts = True
        self.rest = (batch, key_heads, table.stride(0), table.shape[1], dim, *keys.stride()[:3], *values.stride()[:3])
        self.share = _GATHERED.bind(
            (_blocks(query, (1, config.columns_of(ratio), 64)), keys, values, table, lens, out, *self._room(out),
             counter(out), scale * LOG2_E, *self.rest),
            grid=(chosen.programs,),
            constants={
                "R": ratio, "D": config.padded(dim), "P": keys.shape[1], "KEYS": chosen.keys,
                "COLS": config.columns_of(ratio), "STAGES": chosen.num_stages, "BATCH": config.lined(batch),
                "LEAST": chosen.least, "EARLY": 0 if chosen.inside else chosen.early,
                "JOINS": config.joined_at_once(ratio, dim) if chosen.inside else 0, "HEADS": power_of_two(ratio),
                "QUERIES": chosen.queries, "ENDS": chosen.ends, "PADDED": dim < power_of_two(config.padded(dim)),
                "BESIDE": chosen.beside,
            },
            num_warps=chosen.num_warps,
            max_registers=chosen.max_registers,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
        )  # fmt: skip

    def _bind_tall(self, chosen: config.Paged, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, keys, values, table, lens = args
        batch, heads, dim = query.shape
        page, key_heads, ratio = keys.shape[1], keys.shape[2], heads // keys.shape[2]
        rows = chosen.keys if chosen.gathered else math.gcd(page, chosen.keys, chosen.rows)
        caches = (keys, values) if chosen.gathered else (_blocks(x, (1, rows, 1, 64)) for x in (keys, values))
        self.rest = (batch, key_heads, table.stride(0), table.shape[1], dim, *keys.stride()[:3], *values.stride()[:3])
        self.share = _TALL.bind(
            (_blocks(query, (1, chosen.tall, 64)), *caches, table, lens, out, *self._room(out), scale * LOG2_E,
             *self.rest),
            grid=(chosen.programs,),
            constants={
                "R": ratio, "D": config.padded(dim), "P": page, "KEYS": chosen.keys, "ROWS": rows,
                "HEADS": chosen.tall, "STAGES": chosen.num_stages, "QUERIES": chosen.queries,
                "BATCH": config.lined(batch), "LEAST": chosen.least, "EARLY": chosen.early,
                "LEAVES": chosen.leaves and not chosen.gathered, "SKIPS": chosen.skips, "ENDS": chosen.ends,
                "GATHERED": chosen.gathered,
            },
            num_warps=chosen.num_warps,
            max_registers=chosen.max_registers,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
        )  # fmt: skip

    def _room(self, out: Tensor) -> tuple[Tensor, Tensor]:
        return self.parts.room(out) if self.parts else (out, out)

    def run(self, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        if self.parts is None:
            self.share(*args, out, out, out, scale * LOG2_E, *self.rest)
            return
        held, (part, seen, *count) = self.parts.places(out)  # noqa: RUF059
        self.share(*args, out, part, seen, *(count if self.counts else ()), scale * LOG2_E, *self.rest)
        self.parts.join(part, seen, args[4], out)


def _support(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *_: Any
) -> str | None:
    if query.dim() != 3 or key_cache.dim() != 4 or value_cache.shape != key_cache.shape:
        return "query is [batch, heads, head dim], both caches are [pages, keys a page, key heads, head dim]"
    if query.shape[2] != key_cache.shape[3] or query.shape[2] > MAX_HEAD_DIM:
        return f"head dims are {query.shape[2]} and {key_cache.shape[3]}; kernels take one, to {MAX_HEAD_DIM}"
    if query.dtype == torch.float32 and query.shape[2] > MAX_FLOAT32_HEAD_DIM:
        return f"float32 kernels take head dims to {MAX_FLOAT32_HEAD_DIM}: beyond, they round worse than PyTorch's"
    if key_cache.shape[2] == 0 or query.shape[1] % key_cache.shape[2]:
        return f"{query.shape[1]} query heads are no multiple of {key_cache.shape[2]} key heads"
    if block_table.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        return f"block_table and seq_lens are {block_table.dtype} and {seq_lens.dtype}; both are int32"
    if block_table.shape[:1] != query.shape[:1] or seq_lens.shape != query.shape[:1]:
        return "block_table and seq_lens have one row a sequence"
    if (block_table.shape[1] > 1 and block_table.stride(1) != 1) or not seq_lens.is_contiguous():
        return "block_table and seq_lens must be dense: call .contiguous()"
    if {query.dtype, key_cache.dtype, value_cache.dtype} - {query.dtype}:
        return "query and caches are of different types"
    return float_reason(query=query)


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, float]:
    """Every sequence as long as its row of the block table allows; keys and values are read once."""
    query, keys, _, table, _ = inputs
    longest = table.shape[1] * keys.shape[1]
    pairs = query.shape[0] * query.shape[1] * longest
    cache_bytes = 2 * query.shape[0] * longest * keys.shape[2] * keys.shape[3] * (keys.num_bytes // max(1, keys.numel))
    flops = 4.0 * pairs * query.shape[2]
    return {"flops": flops, "matrix_flops": flops, "read_bytes": cache_bytes + query.num_bytes}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    kind = getattr(torch, of.dtype)
    pages_each = -(-of["s"] // of["page"])
    num_pages = of["b"] * pages_each + 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator).to(kind)

    shape = (num_pages, of["page"], of["k"], of["d"])
    order = torch.randperm(num_pages, device=on, generator=generator)[: of["b"] * pages_each]
    table = order.reshape(of["b"], pages_each).to(torch.int32)
    lens = torch.full((of["b"],), of["s"], device=on, dtype=torch.int32)
    if of.get("uneven"):
        lens = torch.randint(1, of["s"] + 1, (of["b"],), device=on, generator=generator).to(torch.int32)
    return draw(of["b"], of["h"], of["d"]), draw(*shape), draw(*shape), table, lens


CHECKS = tuple(
    case(dtype, b=b, h=h, k=k, s=s, d=d, page=page, uneven=uneven)
    for dtype in ("float32", "bfloat16", "float16")
    for b, h, k, s, d, page, uneven in (
        (1, 1, 1, 1, 16, 16, False), (3, 8, 2, 77, 64, 16, True), (2, 32, 8, 1000, 128, 64, True),
        (1, 8, 8, 4097, 128, 16, False), (2, 6, 2, 300, 80, 32, True), (1, 16, 1, 700, 256, 128, False),
    )
    if dtype != "float32" or d <= MAX_FLOAT32_HEAD_DIM
) + (
    case("bfloat16", b=300, h=8, k=2, s=100, d=128, page=16, uneven=True),  # many sequences in one line
    case("float16", b=70, h=8, k=2, s=300, d=96, page=16, uneven=True),
)  # fmt: skip
RACES = tuple(
    case("bfloat16", b=b, h=h, k=k, s=s, d=128, page=page, uneven=False)
    for b, h, k, s, page in (
        (1, 32, 8, 32768, 16), (8, 32, 8, 8192, 16), (32, 32, 8, 4096, 64), (64, 64, 8, 4096, 16),
        (128, 32, 32, 1024, 16),
    )
)  # fmt: skip

PAGED_ATTENTION = declare(
    name="paged_attention",
    summary="decoding attention over a paged cache, keys split over the device",
    schema="(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, float scale)"
    " -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda query, *rest: query.new_empty(query.shape),
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trial=Trial(
        make=_make,
        call=paged_attention,
        eager=reference.eager,
        reference=reference.public,
        mistakes={"last key lost": reference.last_key_lost, "next page": reference.next_page},
        checks=CHECKS,
        races=RACES,
        constants=(0, 1, 2),
        forward_bytes=lambda args: 2 * int(args[4].sum()) * args[1][0, 0].nbytes + 2 * args[0].nbytes,
    ),
    repeats=True,
    keyed=True,
    front=_paged,
)
