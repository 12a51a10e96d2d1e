"""Instance, group and layer norms, softmax and unit lengths of rows too long for one SM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import split_rows, tuning
from ridgeline.kernels.contract import Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import INTERPRETING, Kernel, Plans, launchable, num_sms, vector_of
from ridgeline.kernels.long_norm import config, kernel, reference, streamed
from ridgeline.kernels.rows import cdiv, power_of_two, template

KINDS = ("norm", "l1", "l2", "softmax", "log_softmax")
_CLEAR = Kernel(kernel.clear_published)
_ROWS = Kernel(
    kernel.long_norm_rows, vectors=("cols", "length"), loose=("weight_ptr", "bias_ptr", "word_ptr"), cooperative=True
)
_HELD = Kernel(kernel.long_norm_held, vectors=("cols",), loose=("weight_ptr", "bias_ptr", "word_ptr"), cooperative=True)
_STREAMED = Kernel(
    streamed.long_norm_streamed, vectors=("cols", "length"), loose=("word_ptr",), cooperative=True
)  # fmt: skip
_plans = Plans()
_CLEAR_BLOCK = 1024


def long_norm(
    x: Tensor, kind: str, cols: int, weight: Tensor | None = None, bias: Tensor | None = None, channels: int = 0,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Rows of ``cols`` float32 numbers, normalized ("norm"), divided by their mean size or length, or as softmax.

    ``weight`` and ``bias`` have a number a column, or, with ``channels`` to a row, one a channel, which go round over
    the rows. Without gradients.
    """
    return LONG_NORM(x, kind, cols, weight, bias, channels, eps)


def _forward(
    x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float,
    way: str = "",
) -> Tensor:  # fmt: skip
    if not launchable(x):
        return LONG_NORM.on_host(x, kind, cols, weight, bias, channels, eps)  # type: ignore[return-value]
    x = x.contiguous()
    key = (x.shape, kind, cols, weight is None, bias is None, channels, x.get_device(), _ends(x, weight, bias), way)
    plan = _plans.get(key)
    if plan is None:
        LONG_NORM.check(x, kind, cols, weight, bias, channels, eps)
        plan = None if way == "registers" else _streaming(x, kind, cols, weight, bias, channels)
        plan = _plans[key] = plan or _Plan(x, kind, cols, weight, bias, channels)
    return plan(x, weight, bias, eps)


def _ends(*tensors: Tensor | None) -> int:
    """Where tensors begin inside of 16 bytes, or-ed together."""
    found = 0
    for each in tensors:
        found |= 0 if each is None else each.data_ptr() & 15
    return found


def in_registers(
    x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float
) -> Tensor:
    """The same by programs that hold their shares in registers, or read them twice."""
    return _forward(x, kind, cols, weight, bias, channels, eps, "registers")


def _streaming(x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int) -> Any:
    """A call that takes rows through shared memory; None where they cannot be copied there, or a share of a row touches
    more than two channels."""
    vector = min(4, vector_of(4, _ends(x, weight, bias), cols))
    # elements of the shortest access that fills shared memory: eight bytes
    if INTERPRETING or vector < 2 or cols < config.LEAST_COLS:
        return None
    rows, of = x.numel() // cols, weight if weight is not None else bias
    likely = config.streamed(cols, num_sms(x.get_device()))
    if likely is None:
        return None
    chosen = tuning.choose("long_norm.streamed", {"cols": cols}, likely)
    found = split_rows.cut(chosen, rows, cols, x.get_device(), vector=vector)
    positions, period = cols // max(1, channels), of.numel() // channels if channels and of is not None else 1
    if found is None or found.shares < 2 or (channels and positions < found.length):
        return None
    numbers = (positions, channels, period)
    flags = {"KIND": KINDS.index(kind), "WEIGHT": weight is not None, "BIAS": bias is not None,
             "CHANNELS": channels > 0}  # fmt: skip
    run = split_rows.bind(
        _STREAMED, chosen, found, (x, *_there(x, weight, bias), x), rows, cols, (*numbers, 1e-5), flags,
        {"device": x.get_device(), "vector": vector},
    )  # fmt: skip

    def call(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = torch.empty_like(x)
        run(x, *_there(x, weight, bias), y, *numbers, eps)
        return y

    return call


class _Plan:
    """Words cleared, then one launch of programs that meet."""

    def __init__(
        self, x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int
    ) -> None:
        device, rows = x.get_device(), x.numel() // cols
        whole = bool(channels) and (cols // channels) % config.Held().share == 0
        weighed = (weight is not None or bias is not None) and not whole
        held = tuning.choose("long_norm.held", {"cols": cols, "weighed": weighed}, config.held(weighed))
        self.held = cdiv(cols, held.share) <= held.programs_per_sm * num_sms(device)
        chosen: Any = held if self.held else tuning.choose("long_norm", {"cols": cols}, config.Shared())
        num_programs = chosen.programs_per_sm * num_sms(device)
        shares, length = config.shares(cols, num_programs, chosen.share)
        if self.held:
            shares, length = cdiv(cols, held.share), held.share
        groups = max(1, min(rows, num_programs // shares))
        self.words = template((rows, shares), torch.int64, x.device)
        num_words = rows * shares
        self.clear = _CLEAR.bind(
            (self.words, num_words), grid=(cdiv(num_words, _CLEAR_BLOCK),), constants={"BLOCK": _CLEAR_BLOCK},
            num_warps=4, device=device,
        )  # fmt: skip
        of = weight if weight is not None else bias
        period = of.numel() // channels if channels and of is not None else 1
        cut = () if self.held else (length,)
        self.numbers = (rows, cols, *cut, shares, groups, cols // max(1, channels), channels, period)
        self.runs = self._bound(x, kind, weight, bias, channels, chosen, shares, length, groups)

    def _bound(
        self, x: Tensor, kind: str, weight: Tensor | None, bias: Tensor | None, channels: int, chosen: Any, shares: int,
        length: int, groups: int,
    ) -> list[Any]:  # fmt: skip
        """One launch; two where programs run one after the other, and nothing is at once there."""
        halves = ((True, False), (False, True)) if INTERPRETING else ((True, True),)
        return [
            (_HELD if self.held else _ROWS).bind(
                (x, *_there(x, weight, bias), x, self.words, *self.numbers, 1e-5),
                grid=(groups * shares,),
                constants={
                    "KIND": KINDS.index(kind), "WEIGHT": weight is not None, "BIAS": bias is not None,
                    "CHANNELS": channels > 0, "SHARES": power_of_two(shares),
                    **({"WHOLE": bool(channels) and self.numbers[4] % chosen.share == 0} if self.held else {}),
                    "BLOCK": chosen.share if self.held else chosen.block, "PUBLISH": publish, "FINISH": finish,
                },
                num_warps=chosen.num_warps,
                device=x.get_device(),
                vector=vector_of(4, x.data_ptr(), self.numbers[1], length),
                max_registers=chosen.max_registers if self.held else 0,
            )
            for publish, finish in halves
        ]  # fmt: skip

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = torch.empty_like(x)
        if not x.numel():
            return y
        words = torch.empty_like(self.words, device=x.device, memory_format=torch.contiguous_format)
        self.clear(words, words.numel())
        for run in self.runs:
            run(x, *_there(x, weight, bias), y, words, *self.numbers, eps)
        return y


def _there(fill: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(fill if each is None else each.contiguous() for each in tensors)


def _support(
    x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float
) -> str | None:
    if any(each is not None and each.dtype != torch.float32 for each in (x, weight, bias)):
        return "rows and weights are float32"
    if kind not in KINDS:
        return f"no kind {kind!r}: they are {', '.join(KINDS)}"
    if cols <= 0 or x.numel() % cols or cols >= 2**31:
        return f"{x.numel()} elements are no rows of {cols}"
    if channels and cols % channels:
        return f"a row of {cols} columns has no {channels} channels of one size"
    wanted = {each.numel() for each in (weight, bias) if each is not None}
    if len(wanted) > 1 or (wanted and (wanted.pop() % channels if channels else wanted.pop() != cols)):
        return "weight and bias have a number a column, or one a channel"
    return None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.rand(of["rows"], of["cols"], device=on, generator=generator) * 3 + of.get("level", 0.0)
    channels = of.get("channels", 0)
    num = of.get("weights", of["cols"] if of.get("affine") else 0)
    weight, bias = ((torch.randn(num, device=on, generator=generator) if num else None) for _ in range(2))
    return x, of["kind"], of["cols"], weight, bias, channels, 1e-5


SMALL = (
    case("float32", rows=5, cols=70, kind="norm", level=10.0),
    case("float32", rows=6, cols=64, kind="norm", channels=2, weights=4),
    case("float32", rows=6, cols=60, kind="norm", channels=2, weights=4),
    case("float32", rows=3, cols=65, kind="norm", affine=True),
    case("float32", rows=4, cols=67, kind="l1"),
    case("float32", rows=4, cols=64, kind="l2"),
    case("float32", rows=3, cols=90, kind="softmax"),
    case("float32", rows=3, cols=90, kind="log_softmax"),
    case("float32", rows=6, cols=64, kind="softmax", channels=1, weights=3),
)
CHECKS = (
    *SMALL,
    case("float32", rows=70, cols=262144, kind="norm"),
    case("float32", rows=6, cols=524288, kind="norm", channels=4, weights=8, level=100.0),
    case("float32", rows=2, cols=4194304, kind="norm", affine=True),
    case("float32", rows=12, cols=492156, kind="norm", channels=4, weights=16),
    case("float32", rows=600, cols=60000, kind="norm", affine=True),
    case("float32", rows=100, cols=65535, kind="l1"),
    case("float32", rows=100, cols=65535, kind="l2"),
    case("float32", rows=40, cols=393216, kind="softmax"),
    case("float32", rows=40, cols=393216, kind="log_softmax"),
    case("float32", rows=96, cols=131072, kind="softmax", channels=1, weights=32),
    case("float32", rows=40, cols=70001, kind="l2", channels=1, weights=8),
    case("float32", rows=8, cols=2097152, kind="norm", channels=8, weights=64),
    case("float32", rows=32, cols=532512, kind="norm", channels=8, weights=64, level=50.0),
    case("float32", rows=300, cols=65536, kind="l1"),
    case("float32", rows=2, cols=100002, kind="l2"),
    case("float32", rows=33, cols=120006, kind="log_softmax"),
    case("float32", rows=50, cols=98304, kind="norm", affine=True),
    case("float32", rows=3, cols=4194304, kind="softmax"),
)
RACES = (
    case("float32", rows=7168, cols=262144, kind="norm"),
    case("float32", rows=4096, cols=393216, kind="softmax"),
    case("float32", rows=32768, cols=65535, kind="l2"),
    case("float32", rows=896, cols=2097152, kind="norm", channels=8, weights=64),
    case("float32", rows=1024, cols=532512, kind="norm", channels=8, weights=64),
)

LONG_NORM = declare(
    name="long_norm",
    summary="norms, softmax and unit lengths of rows too long for one processor",
    schema="(Tensor x, str kind, int cols, Tensor? weight, Tensor? bias, int channels, float eps) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda x, *rest: x.new_empty(x.shape),
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(8.0),
    trial=Trial(
        make=_make,
        call=long_norm,
        eager=reference.eager,
        reference=reference.forward,
        mistakes={"first share": reference.first_share},
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        phases=("fwd",),
        constants=(0, 3, 4),
        layouts=False,
    ),
)
