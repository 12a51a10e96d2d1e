"""Decoding with multi-head latent attention over a paged cache, keys split over the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.kernels import tuning
from ridgeline.kernels.autocast import as_cached
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.latent_attention import config, kernel, narrow, reference, roles
from ridgeline.kernels.launcher import INTERPRETING, Blocks, Kernel, Plans, launchable, num_sms, vector_of
from ridgeline.kernels.paged_attention.config import MAX_FED_LINED, lined
from ridgeline.kernels.paged_attention.op import Parts, bind_join, dense
from ridgeline.kernels.rows import cdiv, float_reason, power_of_two

LOG2_E = math.log2(math.e)
MAX_VALUE_DIM, MAX_KEY_DIM = 512, 128
_SHARE = Kernel(kernel.latent_share, vectors=("q_b", "q_h", "c_page", "c_slot", "d", "e"))
_FEW = Kernel(
    kernel.latent_few, vectors=("q_b", "q_h", "c_page", "c_slot", "d", "e"), loose=("table_ptr", "lens_ptr")
)
_COLUMNS = Kernel(kernel.latent_columns, vectors=("d",), loose=("table_ptr", "lens_ptr"))
_RING = Kernel(kernel.latent_ring, vectors=("d",), loose=("table_ptr", "lens_ptr"))
_LINE = Kernel(kernel.latent_line, vectors=("d",), loose=("table_ptr", "lens_ptr"))
_ROLES = Kernel(roles.latent_roles, vectors=("d",), loose=("table_ptr", "lens_ptr"))
_NARROW = Kernel(narrow.latent_narrow, vectors=("d",), loose=("table_ptr", "lens_ptr"))
_BLOCKS = Kernel(kernel.latent_blocks, vectors=("d",), loose=("table_ptr", "lens_ptr"))
BLOCK_VECTOR = 8
"""16-byte accesses of 16-bit elements, which is how far apart rows have to be for the copy engine."""

_plans = Plans()


def paged_latent_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    value_dim: int = 512,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """One step of decoding over latent vectors: ``query`` [batch, heads, dim] over the first ``seq_lens`` of each.

    ``cache`` is [pages, keys a page, dim]: a key is a whole vector, its value the first ``value_dim`` of it, and every
    head reads the same. ``block_table`` [batch, pages] names each sequence's pages in order. A sequence of length 0
    gets zeros. The default ``scale`` is one over the square root of dim, which is not what a model with its own
    projections wants: give its own. Reads the lengths on the device: no synchronization, safe in CUDA graphs. ``out``
    takes the result.
    """
    if out is None:
        call = _latent if is_dynamo_compiling() else LATENT_ATTENTION.quick or _latent
        found: Tensor = call(query, cache, block_table, seq_lens, value_dim, scale)
        return found
    if not launchable(query):
        return out.copy_(_latent(query, cache, block_table, seq_lens, value_dim, scale))
    query = as_cached(query, cache)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    LATENT_ATTENTION.check_out(out, query, cache, block_table, seq_lens, value_dim, scale)
    return _forward(query, cache, block_table, seq_lens, value_dim, scale, out)


def _latent(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, value_dim: int, scale: float | None
) -> Tensor:
    query = as_cached(query, cache)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found: Tensor = LATENT_ATTENTION(query, cache, block_table, seq_lens, value_dim, scale)
    return found


def _forward(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, value_dim: int, scale: float,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    query, cache = dense(query), dense(cache)
    args = (query, cache, block_table, seq_lens)
    if not launchable(query):
        return LATENT_ATTENTION.on_host(*args, value_dim, scale)  # type: ignore[return-value]
    if out is None:
        out = query.new_empty((*query.shape[:2], value_dim))
    if out.numel() == 0:
        return out
    key = (
        query.dtype, cache.dtype, block_table.dtype, seq_lens.dtype, query.shape, query.stride(), cache.shape,
        cache.stride(), block_table.shape, block_table.stride(), seq_lens.shape, seq_lens.stride(), query.get_device(),
        value_dim, (query.data_ptr() | cache.data_ptr()) & 15,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        fed = _fed(query, cache, value_dim, config.columns_fit)
        longest = block_table.shape[1] * cache.shape[1]
        few = query.element_size() == 2 and config.takes_few(query.shape[0], query.shape[1], longest, fed)
        short = config.is_short(query.shape[1], cache.shape[1], longest)
        lined_up = not short and query.shape[0] <= MAX_FED_LINED and _fed(query, cache, value_dim, config.takes_line)
        plan = _plans[key] = (_FewPlan if few or lined_up else _Plan)(args, out, scale)
    plan.run(args, out, scale)
    return out


def _fed(query: Tensor, cache: Tensor, dim: int, fit: Callable[[int, int, int, int], bool]) -> bool:
    """Whether the copy engine can feed a kernel that was written for these sizes."""
    steps = (*query.stride()[:2], *cache.stride()[:2])
    pointers = 0 if query.is_meta else query.data_ptr() | cache.data_ptr()
    reachable = not any(step % BLOCK_VECTOR for step in steps) and pointers % 16 == 0
    sizes = query.shape[1], dim, query.shape[2] - dim, cache.shape[1]
    return not INTERPRETING and query.element_size() == 2 and reachable and fit(*sizes)


def _blocks(x: Tensor, rows: int, width: int) -> Blocks:
    """[1, rows, width] blocks of a tensor of three dims, the last dense."""
    strides = tuple(step if size > 1 else BLOCK_VECTOR for size, step in zip(x.shape[:2], x.stride()[:2], strict=True))
    return Blocks(x, tuple(x.shape), (*strides, 1), (1, rows, width))


def _role_blocks(query: Tensor, cache: Tensor, dim: int, keys: int) -> tuple[Blocks, Blocks, Blocks]:
    """Half of 64 queries, their rotary part, and a stripe of as many keys as lie together."""
    rows = math.gcd(cache.shape[1], keys)
    return (
        _blocks(query, config.MAX_ROWS, dim // 2), _blocks(query, config.MAX_ROWS, query.shape[2] - dim),
        _blocks(cache, rows, 64),
    )  # fmt: skip


def _role_constants(query: Tensor, cache: Tensor, dim: int, keys: int) -> dict[str, Any]:
    """What does not depend on how sequences are cut."""
    heads, page = query.shape[1], cache.shape[1]
    groups = cdiv(heads, config.MAX_ROWS)
    return {
        "R": cdiv(heads, groups), "GROUPS": groups, "D": dim, "E": query.shape[2] - dim, "P": page, "KEYS": keys,
        "ROWS": math.gcd(page, keys), "HALVES": config.HALVES, "MORES": config.MORES,
    }  # fmt: skip


class _Plan:
    """Launches for one set of shapes; partial results are allocated anew each time, from PyTorch's own pool."""

    def __init__(self, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, cache, table, _ = args
        batch, heads, dim = out.shape
        LATENT_ATTENTION.check(*args, dim, scale)
        page, device = cache.shape[1], query.get_device()
        sizes = {"batch": batch, "heads": heads, "longest": table.shape[1] * page}
        pick = config.choose_blocks if _fed(query, cache, dim, config.takes_blocks) else config.choose
        chosen = tuning.choose("latent_attention", sizes, pick(**sizes, num_sms=num_sms(device)))
        self.shares, self.shape = chosen.shares, (batch, heads, chosen.shares, dim)
        self.fed, self.roles = chosen.fed, chosen.roles
        part, lse = self._partial(out)
        if chosen.roles:
            self._bind_roles(chosen, args, out, part, lse, scale)
        else:
            bind = self._bind_blocks if chosen.fed else self._bind_share
            bind(chosen, args, part, lse, scale)
        self.join = bind_join(part, lse, out, chosen.shares) if chosen.shares > 1 else None

    def _bind_share(
        self, chosen: config.Latent, args: tuple[Tensor, ...], part: Tensor, lse: Tensor, scale: float
    ) -> None:
        query, cache, table, lens = args
        (batch, heads, width), dim, page = query.shape, self.shape[3], cache.shape[1]
        groups = cdiv(heads, chosen.rows)
        strides = (*query.stride()[:2], *cache.stride()[:2])
        self.rest = (heads, groups, *strides, table.stride(0), dim, width - dim, chosen.shares)
        self.share = _SHARE.bind(
            (query, cache, table, lens, part, lse, scale * LOG2_E, *self.rest),
            grid=(batch * groups, chosen.shares),
            constants={
                "ROWS": chosen.rows, "D": max(16, power_of_two(dim)), "E": max(16, power_of_two(width - dim)),
                "P": page, "KEYS": chosen.keys, "WHOLE": chosen.shares == 1,
                "EARLY": chosen.early if chosen.shares > 1 and not INTERPRETING else 0,
            },
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            device=query.get_device(),
            vector=vector_of(
                query.element_size(), query.data_ptr() | cache.data_ptr(), *strides, dim, width - dim
            ),
        )  # fmt: skip

    def _bind_blocks(
        self, chosen: config.Latent, args: tuple[Tensor, ...], part: Tensor, lse: Tensor, scale: float
    ) -> None:
        query, cache, table, lens = args
        (batch, heads, width), dim, page = query.shape, self.shape[3], cache.shape[1]
        groups = cdiv(heads, chosen.rows)
        self.rest = (heads, groups, table.stride(0), dim, chosen.shares)
        self.share = _BLOCKS.bind(
            (
                _blocks(query, chosen.rows, dim), _blocks(query, chosen.rows, width - dim),
                _blocks(cache, chosen.keys, dim), _blocks(cache, chosen.keys, width - dim), table, lens, part, lse,
                scale * LOG2_E, *self.rest,
            ),
            grid=(batch * groups, chosen.shares),
            constants={
                "D": dim, "E": width - dim, "P": page, "KEYS": chosen.keys, "STAGES": chosen.num_stages,
                "WHOLE": chosen.shares == 1,
            },
            num_warps=chosen.num_warps,
            max_registers=config.MAX_REGISTERS,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
        )  # fmt: skip

    def _bind_roles(
        self, chosen: config.Latent, args: tuple[Tensor, ...], out: Tensor, part: Tensor, lse: Tensor, scale: float
    ) -> None:
        query, cache, table, lens = args
        (batch, heads, _), dim = query.shape, self.shape[3]
        fixed = _role_constants(query, cache, dim, chosen.keys)
        leaves = batch * table.shape[1] * cache.shape[1] <= config.LEAVING_KEYS
        self.rest = (batch, heads, table.stride(0), table.shape[1], dim)
        self.share = _ROLES.bind(
            (*_role_blocks(query, cache, dim, chosen.keys), table, lens, out, part, lse, scale * LOG2_E, *self.rest),
            grid=(batch * fixed["GROUPS"], chosen.shares),
            constants=fixed | {
                "BATCH": 0, "LEAST": 0, "EARLY": 0, "LEAVES": leaves, "SHARED": 2 if chosen.shares == 1 else 1,
                "ENDS": 0,
            },
            num_warps=chosen.num_warps,
            max_registers=config.ROLE_REGISTERS,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
        )  # fmt: skip

    def _partial(self, out: Tensor) -> tuple[Tensor, Tensor]:
        if self.shares == 1:
            return out, out
        part = torch.empty(self.shape, dtype=torch.float32, device=out.device)
        return part, torch.empty(self.shape[:3], dtype=torch.float32, device=out.device)

    def run(self, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        part, lse = self._partial(out)
        query, cache, *rest = args
        if self.roles:
            given = (query, query, cache, *rest, out)
        else:
            given = (query, query, cache, cache, *rest) if self.fed else args
        self.share(*given, part, lse, scale * LOG2_E, *self.rest)
        if self.join is not None:
            self.join(part, lse, out, self.shares, self.shape[3])


class _FewPlan:
    """The same where keys of all sequences stand in one line, cut evenly: few heads, or many that the copy engine
    feeds."""

    def __init__(self, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, cache, table, lens = args
        (batch, heads, _), dim, page = query.shape, out.shape[2], cache.shape[1]
        LATENT_ATTENTION.check(*args, dim, scale)
        sizes = {"batch": batch, "heads": heads, "longest": table.shape[1] * page}
        num = num_sms(query.get_device())
        if config.NARROW and heads <= 2 * config.FEW_HEADS and _fed(query, cache, dim, config.columns_fit):
            default = config.choose_narrow(**sizes, num_sms=num, page=page)
            chosen = tuning.choose("latent_attention.narrow", sizes, default)
            bind = self._bind_narrow
        elif heads > config.FEW_HEADS:
            chosen = tuning.choose("latent_attention.line", sizes, config.choose_line(**sizes, num_sms=num))
            bind = self._bind_roles if chosen.roles else self._bind_line
        else:
            fed = _fed(query, cache, dim, config.columns_fit)
            default = config.choose_few(**sizes, num_sms=num, fed=fed, page=page)
            chosen = tuning.choose("latent_attention.few", sizes, default)
            bind = self._bind_ring if chosen.ring else self._bind_columns if chosen.fed else self._bind
        self.parts = Parts(chosen.keys, chosen.programs, chosen.least, 1, out, lens, chosen.borders, ends=chosen.ends)
        self.fed, self.once = chosen.fed, chosen.ring > 0 or heads > config.FEW_HEADS
        bind(chosen, args, out, scale)

    def _bind(self, chosen: config.Few, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, cache, table, lens = args
        (batch, heads, width), dim, page = query.shape, out.shape[2], cache.shape[1]
        strides = (*query.stride()[:2], *cache.stride()[:2])
        self.rest = (batch, heads, *strides, table.stride(0), table.shape[1], dim, width - dim)
        self.share = _FEW.bind(
            (query, cache, table, lens, out, *self.parts.room(out), scale * LOG2_E, *self.rest),
            grid=(chosen.programs,),
            constants={
                "COLS": max(16, power_of_two(heads)), "D": max(16, power_of_two(dim)),
                "E": max(16, power_of_two(width - dim)), "P": page, "KEYS": chosen.keys, "BATCH": lined(batch),
                "LEAST": chosen.least, "EARLY": 0 if INTERPRETING else chosen.early,
            },
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            device=query.get_device(),
            vector=vector_of(
                query.element_size(), query.data_ptr() | cache.data_ptr(), *strides, dim, width - dim
            ),
        )  # fmt: skip

    def _bind_columns(self, chosen: config.Few, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, cache, table, lens = args
        (batch, heads, width), dim, page = query.shape, out.shape[2], cache.shape[1]
        self.rest = (batch, heads, table.stride(0), table.shape[1], dim)
        blocks = [
            _blocks(x, rows, wide)
            for x, rows in ((query, config.FEW_HEADS), (cache, chosen.keys))
            for wide in (dim, width - dim)
        ]
        self.share = _COLUMNS.bind(
            (*blocks, table, lens, out, *self.parts.room(out), scale * LOG2_E, *self.rest),
            grid=(chosen.programs,),
            constants={
                "D": dim, "E": width - dim, "P": page, "KEYS": chosen.keys, "COLS": config.FEW_HEADS,
                "STAGES": chosen.num_stages, "BATCH": lined(batch), "LEAST": chosen.least,
                "EARLY": chosen.early, "LEAVES": chosen.leaves,
            },
            num_warps=chosen.num_warps,
            max_registers=config.MAX_REGISTERS,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
        )  # fmt: skip

    def _bind_ring(self, chosen: config.Few, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, cache, table, lens = args
        (batch, heads, width), dim, page = query.shape, out.shape[2], cache.shape[1]
        self.rest = (batch, heads, table.stride(0), table.shape[1], dim)
        rows = math.gcd(page, chosen.keys)
        blocks = (_blocks(query, config.FEW_HEADS, dim), _blocks(query, config.FEW_HEADS, width - dim))
        self.share = _RING.bind(
            (*blocks, _blocks(cache, rows, 64), table, lens, out, *self.parts.room(out), scale * LOG2_E, *self.rest),
            grid=(chosen.programs,),
            constants={
                "D": dim, "E": width - dim, "P": page, "KEYS": chosen.keys, "ROWS": rows, "COLS": config.FEW_HEADS,
                "RING": chosen.ring, "BATCH": lined(batch), "LEAST": chosen.least, "EARLY": chosen.early,
                "LEAVES": chosen.leaves,
            },
            num_warps=chosen.num_warps,
            max_registers=config.MAX_REGISTERS,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
        )  # fmt: skip

    def _bind_line(self, chosen: config.Few, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, cache, table, lens = args
        (batch, heads, width), dim, page = query.shape, out.shape[2], cache.shape[1]
        self.rest = (batch, heads, table.stride(0), table.shape[1], dim)
        rows, groups = math.gcd(page, chosen.keys), cdiv(heads, config.MAX_ROWS)
        columns = config.columns_of(heads // groups)
        blocks = (_blocks(query, 2 * columns, dim), _blocks(query, 2 * columns, width - dim))
        self.share = _LINE.bind(
            (*blocks, _blocks(cache, rows, 64), table, lens, out, *self.parts.room(out), scale * LOG2_E, *self.rest),
            grid=(chosen.programs * groups,),
            constants={
                "R": heads // groups, "GROUPS": groups, "D": dim, "E": width - dim, "P": page, "KEYS": chosen.keys,
                "ROWS": rows, "STAGES": chosen.num_stages, "COLS": columns,
                "QUERIES": 2 if columns < config.MAX_ROWS // 2 else 1, "BATCH": lined(batch), "LEAST": chosen.least,
                "EARLY": chosen.early, "LEAVES": chosen.leaves,
            },
            num_warps=chosen.num_warps,
            max_registers=config.MAX_REGISTERS,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
        )  # fmt: skip

    def _bind_narrow(self, chosen: config.Few, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, cache, table, lens = args
        (batch, heads, width), dim, page = query.shape, out.shape[2], cache.shape[1]
        self.rest = (batch, heads, table.stride(0), table.shape[1], dim)
        columns = config.FEW_HEADS * cdiv(heads, config.FEW_HEADS)
        blocks = (_blocks(query, columns, dim), _blocks(query, columns, width - dim), _blocks(cache, chosen.rows, 64))
        self.share = _NARROW.bind(
            (*blocks, table, lens, out, *self.parts.room(out), scale * LOG2_E, *self.rest),
            grid=(chosen.programs,),
            constants={
                "D": dim, "E": width - dim, "P": page, "KEYS": config.FED_KEYS, "UNIT": chosen.keys,
                "ROWS": chosen.rows, "COLS": columns, "RING": chosen.ring, "QUERIES": chosen.queries,
                "BATCH": lined(batch), "LEAST": chosen.least, "ENDS": chosen.ends, "EARLY": chosen.early,
                "LEAVES": chosen.leaves,
            },
            num_warps=chosen.num_warps,
            max_registers=config.NARROW_REGISTERS,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
        )  # fmt: skip

    def _bind_roles(self, chosen: config.Few, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        query, cache, table, lens = args
        batch, heads, dim = out.shape
        fixed = _role_constants(query, cache, dim, chosen.keys)
        blocks = _role_blocks(query, cache, dim, chosen.keys)
        self.rest = (batch, heads, table.stride(0), table.shape[1], dim)
        self.share = _ROLES.bind(
            (*blocks, table, lens, out, *self.parts.room(out), scale * LOG2_E, *self.rest),
            grid=(chosen.programs * fixed["GROUPS"],),
            constants=fixed | {
                "BATCH": lined(batch), "LEAST": chosen.least, "EARLY": chosen.early, "LEAVES": chosen.leaves,
                "SHARED": 0, "ENDS": chosen.ends,
            },
            num_warps=chosen.num_warps,
            max_registers=config.ROLE_REGISTERS,
            device=query.get_device(),
            vector=BLOCK_VECTOR,
        )  # fmt: skip

    def given(self, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors as the reading kernel takes them: once for every block of theirs."""
        query, cache, *rest = args
        caches = (cache,) if self.once else (cache, cache)
        return (query, query, *caches, *rest) if self.fed else args

    def run(self, args: tuple[Tensor, ...], out: Tensor, scale: float) -> None:
        held, (part, seen, _) = self.parts.places(out)  # noqa: RUF059
        self.share(*self.given(args), out, part, seen, scale * LOG2_E, *self.rest)
        self.parts.join(part, seen, args[3], out)


def _support(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, value_dim: int = 512, scale: float = 1.0
) -> str | None:
    if query.dim() != 3 or cache.dim() != 3 or query.shape[2] != cache.shape[2]:
        return "query is [batch, heads, dim], cache [pages, keys a page, dim], of one dim"
    if not 0 < value_dim <= min(MAX_VALUE_DIM, query.shape[2]) or query.shape[2] - value_dim > MAX_KEY_DIM:
        return (
            f"values take {value_dim} of {query.shape[2]} dims; kernels take to {MAX_VALUE_DIM}, "
            f"and to {MAX_KEY_DIM} more that only keys have"
        )
    if block_table.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        return f"block_table and seq_lens are {block_table.dtype} and {seq_lens.dtype}; both are int32"
    if block_table.shape[:1] != query.shape[:1] or seq_lens.shape != query.shape[:1]:
        return "block_table and seq_lens have one row a sequence"
    if (block_table.shape[1] > 1 and block_table.stride(1) != 1) or not seq_lens.is_contiguous():
        return "block_table and seq_lens must be dense: call .contiguous()"
    if query.dtype != cache.dtype:
        return f"query is {query.dtype} and cache {cache.dtype}"
    if query.dtype == torch.float32 and value_dim > 128:
        return "float32 kernels take value dims to 128: a block of wider ones does not fit into shared memory"
    return float_reason(query=query)


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, float]:
    """Every sequence as long as its row of the block table allows; latent vectors are read once."""
    query, cache, table, _ = inputs
    longest = table.shape[1] * cache.shape[1]
    pairs = query.shape[0] * query.shape[1] * longest
    cache_bytes = query.shape[0] * longest * cache.shape[2] * (cache.num_bytes // max(1, cache.numel))
    flops = 2.0 * pairs * (query.shape[2] + outputs[0].shape[2])
    return {"flops": flops, "matrix_flops": flops, "read_bytes": cache_bytes + query.num_bytes}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    kind = getattr(torch, of.dtype)
    pages_each = -(-of["s"] // of["page"])
    num_pages = of["b"] * pages_each + 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator).to(kind)

    order = torch.randperm(num_pages, device=on, generator=generator)[: of["b"] * pages_each]
    table = order.reshape(of["b"], pages_each).to(torch.int32)
    lens = torch.full((of["b"],), of["s"], device=on, dtype=torch.int32)
    if of.get("uneven"):
        lens = torch.randint(1, of["s"] + 1, (of["b"],), device=on, generator=generator).to(torch.int32)
    width = of["d"] + of["e"]
    return draw(of["b"], of["h"], width), draw(num_pages, of["page"], width), table, lens, of["d"]


CHECKS = tuple(
    case(dtype, b=b, h=h, s=s, d=d, e=e, page=page, uneven=uneven)
    for dtype in ("bfloat16", "float16")
    for b, h, s, d, e, page, uneven in (
        (2, 128, 1000, 512, 64, 64, True), (1, 16, 4097, 512, 64, 16, False), (3, 100, 77, 256, 32, 64, True),
        (1, 1, 1, 64, 16, 16, False), (3, 40, 333, 512, 64, 128, True), (1, 64, 9000, 512, 64, 64, False),
    )
) + (
    case("bfloat16", b=300, h=8, s=150, d=512, e=64, page=64, uneven=True),  # many sequences in one line
    case("bfloat16", b=5, h=16, s=3000, d=512, e=64, page=64, uneven=True),
)  # fmt: skip
RACES = tuple(
    case("bfloat16", b=b, h=h, s=s, d=512, e=64, page=64, uneven=False)
    for b, h, s in ((32, 128, 4096), (128, 128, 2048), (1, 128, 65536), (64, 16, 4096), (16, 16, 8192))
)

LATENT_ATTENTION = declare(
    name="paged_latent_attention",
    summary="decoding with multi-head latent attention over a paged cache",
    schema="(Tensor query, Tensor cache, Tensor block_table, Tensor seq_lens, int value_dim, float scale) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda query, cache, block_table, seq_lens, value_dim, scale: query.new_empty(
        (*query.shape[:2], value_dim)
    ),
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trial=Trial(
        make=_make,
        call=paged_latent_attention,
        eager=reference.eager,
        reference=reference.public,
        mistakes={"last key lost": reference.last_key_lost, "rotary part lost": reference.rotary_part_lost},
        checks=CHECKS,
        races=RACES,
        constants=(0, 1),
        forward_bytes=lambda args: int(args[3].sum()) * args[1][0, 0].nbytes + 2 * args[0].nbytes,
    ),
    repeats=True,
    keyed=True,
    front=_latent,
)
