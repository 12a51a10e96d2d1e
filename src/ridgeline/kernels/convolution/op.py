"""Convolutions of float32 images in PyTorch's own layout, with the chain of elementwise functions behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.convolution import config, kernel, reference
from ridgeline.kernels.convolution.links import POOLS, coded, links_of, parts_of
from ridgeline.kernels.launcher import Kernel, Plans, launchable, vector_of
from ridgeline.kernels.rows import cdiv

_WEIGHTS = Kernel(kernel.convolution_weights, loose=("w_ptr",))
_TILE = Kernel(kernel.convolution_tile, loose=("x_ptr", "bias_ptr", "vectors_ptr", "out_ptr"))
_DEPTHWISE = Kernel(kernel.convolution_depthwise, loose=("x_ptr", "w_ptr", "bias_ptr", "vectors_ptr", "out_ptr"))
_TURN = Kernel(kernel.convolution_turn, loose=("vectors_ptr",))
_LINKS = Kernel(kernel.convolution_links, loose=("x_ptr", "vectors_ptr"))
_plans = Plans()
_BLOCK = 1024
_TURNED_CHANNELS, _TURNED_PIXELS = 64, 64
"""A tile of 16 kB, of which every row is 256 bytes of memory on either side."""
MOST_OFFSET = 2**31 - 1
_active_modes = torch._C._len_torch_dispatch_stack
SINGLE = ("min", "max", "logsumexp")
"""Pools that leave a number a pixel."""
SOFTMAX, MEAN = "softmax", "mean"
"""The pool that leaves a number a channel: of pixels, which any tile has some of."""
Ints = Sequence[int]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    stride: Ints = (1,),
    padding: Ints = (0,),
    dilation: Ints = (1,),
    output_padding: Ints = (0,),
    groups: int = 1,
    transposed: bool = False,
    chain: str = "",
) -> Tensor:
    """``conv1d`` to ``conv3d`` and their transposed forms for float32 images, without gradients.

    Products are TensorFloat-32, as PyTorch's own convolutions are unless it is told otherwise. ``chain`` is what
    follows element by element (``links``); ``vectors`` [num, channels] hold what it adds or multiplies.
    """
    num = x.dim() - 2
    sizes = [list(each) * (num if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)]
    if type(x) is Tensor and launchable(x) and not _active_modes() and not is_dynamo_compiling():
        return planned(x, weight, bias, vectors, *sizes, groups, transposed, chain)(x, weight, bias, vectors)
    return CONVOLUTION(x, weight, bias, vectors, *sizes, groups, transposed, chain)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, *rest: Any) -> Tensor:
    if not launchable(x):
        return CONVOLUTION.on_host(x, weight, bias, vectors, *rest)  # type: ignore[return-value]
    return planned(x, weight, bias, vectors, *rest)(x, weight, bias, vectors)


def _looks(x: Tensor | None) -> tuple[Any, ...]:
    return () if x is None else (x.dtype, x.shape)


def planned(
    x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, *rest: Any, tile: config.Tile | None = None
) -> Any:
    """The launches of a problem, with the tile given or the likely one: called with the four tensors."""
    settings: tuple[Any, ...] = tuple(tuple(each) if isinstance(each, (list, tuple)) else each for each in rest)
    key = (x.shape, weight.shape, x.dtype, weight.dtype, _looks(bias), _looks(vectors), settings, x.get_device(), tile)
    plan = _plans.get(key)
    if plan is None:
        CONVOLUTION.check(x, weight, bias, vectors, *rest)
        plan = _plans[key] = _made(x, weight, bias, vectors, settings, tile)
    return plan


def _made(
    x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, settings: tuple[Any, ...],
    tile: config.Tile | None,
) -> Any:  # fmt: skip
    stride, padding, dilation, output_padding, groups, transposed, chain = settings
    if transposed and any(s > 1 and d > 1 for s, d in zip(stride, dilation, strict=True)):
        return _Spread(x, weight, bias, vectors, settings, tile)
    sizes = Sizes(x, weight, stride, padding, dilation, output_padding, groups, transposed)
    kind = _Depthwise if sizes.is_depthwise else _Tiled
    return kind(x, weight, bias, vectors, sizes, chain, tile)


class Sizes:
    """A convolution as three spatial dims, whatever it has."""

    def __init__(
        self, x: Tensor, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints, output_padding: Ints,
        groups: int, transposed: bool,
    ) -> None:  # fmt: skip
        self.num, self.groups, self.transposed = x.shape[0], groups, transposed
        self.inputs = x.shape[1] // groups
        self.outputs = weight.shape[1] if transposed else weight.shape[0] // groups
        self.stride, self.dilation = (_three(each, 1) for each in (stride, dilation))
        self.padding = _three(padding, 0)
        self.image, self.taps = _three(x.shape[2:], 1), _three(weight.shape[2:], 1)
        self.shape = (x.shape[0], self.outputs * groups, *out_sizes(x.shape[2:], weight.shape[2:], stride, padding,
                                                                  dilation, output_padding, transposed))  # fmt: skip
        self.out = _three(self.shape[2:], 1)

    @property
    def is_depthwise(self) -> bool:
        return self.inputs == self.outputs == 1 and self.groups > 1 and not self.transposed

    @property
    def num_taps(self) -> int:
        return math.prod(self.taps)

    @property
    def num_terms(self) -> int:
        """Products that an output is the sum of, in the phase with most."""
        steps = self.stride if self.transposed else (1, 1, 1)
        return self.inputs * math.prod(cdiv(size, step) for size, step in zip(self.taps, steps, strict=True))

    @property
    def num_phases(self) -> int:
        return math.prod(self.stride) if self.transposed else 1

    @property
    def phase_pixels(self) -> int:
        """Output pixels of one phase, in one image."""
        steps = self.stride if self.transposed else (1, 1, 1)
        return math.prod(cdiv(size, step) for size, step in zip(self.out, steps, strict=True))

    @property
    def padded(self) -> bool:
        return self.transposed or any(self.padding)

    def constants(self) -> dict[str, Any]:
        found: dict[str, Any] = {"CI": self.inputs, "CO": self.outputs}
        for names, values in (
            ("D H W", self.image), ("OD OH OW", self.out), ("KD KH KW", self.taps), ("SD SH SW", self.stride),
            ("PD PH PW", self.padding), ("DD DH DW", self.dilation),
        ):  # fmt: skip
            found |= dict(zip(names.split(), values, strict=True))
        return found


def _three(values: Ints, fill: int) -> tuple[int, int, int]:
    """Values of one to three dims as those of three, the missing ones in front."""
    a, b, c = (*([fill] * (3 - len(values))), *(int(value) for value in values))
    return a, b, c


def out_sizes(
    image: Ints, taps: Ints, stride: Ints, padding: Ints, dilation: Ints, output_padding: Ints, transposed: bool
) -> list[int]:
    """The spatial sizes of a convolution's result."""
    found = []
    for i, size in enumerate(image):
        reach = dilation[i] * (taps[i] - 1) + 1
        if transposed:
            found.append((size - 1) * stride[i] - 2 * padding[i] + reach + output_padding[i])
        else:
            found.append((size + 2 * padding[i] - reach) // stride[i] + 1)
    return found


class _Spread:
    """A transposed convolution with both strides and gaps between taps: gaps become taps of zero, which add nothing."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, settings: tuple[Any, ...],
        tile: config.Tile | None,
    ) -> None:  # fmt: skip
        stride, padding, dilation, *rest = settings
        self.steps = [d if s > 1 else 1 for s, d in zip(stride, dilation, strict=True)]
        left = tuple(1 if s > 1 else d for s, d in zip(stride, dilation, strict=True))
        wide = self._spread(weight)
        self.plan = _made(x, wide, bias, vectors, (stride, padding, left, *rest), tile)

    def _spread(self, weight: Tensor) -> Tensor:
        sizes = [step * (size - 1) + 1 for step, size in zip(self.steps, weight.shape[2:], strict=True)]
        wide = weight.new_zeros(*weight.shape[:2], *sizes)
        wide[(slice(None), slice(None), *(slice(None, None, step) for step in self.steps))] = weight
        return wide

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None) -> Tensor:
        return self.plan(x, self._spread(weight), bias, vectors)  # type: ignore[no-any-return]


class _Tiled:
    """Weights laid out anew, then tiles on the tensor cores."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, sizes: Sizes, chain: str,
        tile: config.Tile | None,
    ) -> None:  # fmt: skip
        self.sizes, device = sizes, x.get_device()
        links, pool, after = parts_of(chain)
        self.shape: tuple[int, ...] = (sizes.num, 1 if pool in SINGLE else sizes.shape[1], *sizes.shape[2:])
        named = {"channels": sizes.outputs, "pixels": sizes.phase_pixels}
        together = pool not in ("", MEAN)
        chosen = tile or tuning.choose("convolution", named, config.tiles(**named, pooled=together)[0])
        if together and chosen.channels < sizes.outputs:
            raise KernelError(f"convolution: {pool} over {sizes.outputs} channels needs a tile with all of them")
        (self.how, weights_how), self.exact = config.ROUNDINGS[chosen.rounding], chosen.rounding == "exact"
        self.last = chosen.last and sizes.groups == 1 and sizes.inputs % chosen.depth == 0
        tiles = cdiv(sizes.phase_pixels, chosen.pixels) * sizes.num_phases
        self.means = (*sizes.shape[:2], *([1] * (len(sizes.shape) - 2))) if pool == MEAN else None
        self.pixels = math.prod(sizes.shape[2:])
        self.shape = (*sizes.shape[:2], tiles) if pool == MEAN else self.shape
        laid = torch.empty(4, dtype=torch.float32, device=x.device)
        self.counts = (sizes.outputs, sizes.inputs, sizes.num_taps, weight.numel())
        self.lay = _WEIGHTS.bind(
            (weight, laid, *self.counts),
            grid=(cdiv(weight.numel(), _BLOCK),),
            constants={"TURNED": sizes.transposed, "HOW": weights_how} | {"EXACT": self.exact, "BLOCK": _BLOCK},
            num_warps=4,
            device=device,
        )
        self.launch = _TILE.bind(
            (x, laid, *_there(laid, bias, vectors), laid),
            grid=(cdiv(sizes.outputs, chosen.channels) * tiles, sizes.num * sizes.groups),
            constants=sizes.constants()
            | {"GROUPS": sizes.groups, "TURNED": sizes.transposed, "PADDED": sizes.padded, "BIAS": bias is not None}
            | {
                "HOW": self.how,
                "EXACT": self.exact,
                "LAST": self.last,
                "POOL": list(POOLS).index(pool),
                "LINKS": coded(links),
                "AFTER": coded(after),
                "BM": chosen.pixels,
                "BN": chosen.channels,
                "BK": chosen.depth,
            },
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            device=device,
            vector=4,
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.float32, device=x.device)
        laid = torch.empty(weight.numel() * (2 if self.exact else 1), dtype=torch.float32, device=x.device)
        self.lay(weight.contiguous(), laid, *self.counts)
        x = x.contiguous()
        if self.last:
            x = turn(x, torch.empty_like(x), None, back=False, rounding=0 if self.exact else self.how + 1)
        self.launch(x, laid, *_there(laid, bias, vectors), out)
        return out if self.means is None else out.sum(2).div_(self.pixels).view(self.means)


class _Depthwise:
    """Every channel by itself: blocks of pixels, taps one after the other, in float32 throughout."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, sizes: Sizes, chain: str,
        tile: config.Tile | None,
    ) -> None:  # fmt: skip
        self.sizes = sizes
        chosen = tuning.choose("convolution.depthwise", {"pixels": sizes.phase_pixels}, config.Depthwise())
        self.launch = _DEPTHWISE.bind(
            (x, weight, *_there(weight, bias, vectors), x),
            grid=(cdiv(sizes.phase_pixels, chosen.pixels), sizes.num * sizes.groups),
            constants=sizes.constants()
            | {"GROUPS": sizes.groups, "PADDED": sizes.padded, "BIAS": bias is not None, "LINKS": coded(chain)}
            | {"BLOCK": chosen.pixels},
            num_warps=chosen.num_warps,
            device=x.get_device(),
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None) -> Tensor:
        out = torch.empty(self.sizes.shape, dtype=torch.float32, device=x.device)
        self.launch(x.contiguous(), weight.contiguous(), *_there(weight, bias, vectors), out)
        return out


def _there(fill: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Dense tensors for a launch; something for those that are not there and will not be read."""
    return tuple(fill if each is None else each.contiguous() for each in tensors)


def link_(x: Tensor, vectors: Tensor | None, chain: str) -> Tensor:
    """A chain's links on a dense result of a convolution [N, C, ...], in place."""
    if not chain or x.numel() == 0:
        return x
    pixels = math.prod(x.shape[2:])
    key = ("links", x.shape, vectors is None, chain, x.get_device())
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _LINKS.bind(
            (x, *_there(x, vectors)),
            grid=(cdiv(pixels, _BLOCK) * x.shape[0] * x.shape[1],),
            constants={"CO": x.shape[1], "PIXELS": pixels, "LINKS": coded(chain), "BLOCK": _BLOCK},
            num_warps=4,
            device=x.get_device(),
        )
    plan(x, *_there(x, vectors))
    return x


def turn(x: Tensor, out: Tensor, vectors: Tensor | None, chain: str = "", *, back: bool, rounding: int = 0) -> Tensor:
    """An image written with its channels last, or one with its channels last written densely, through a chain.

    Either is dense memory; ``x`` and ``out`` have the same shape [N, C, ...]. ``rounding``: to TensorFloat-32, 1 to the
    nearest, 2 cut off, 3 to the nearest or the even one.
    """
    channels, pixels = x.shape[1], math.prod(x.shape[2:])
    places = x.data_ptr() | out.data_ptr()
    key = ("turn", x.shape, vectors is None, chain, back, rounding, x.get_device(), places & 15)
    plan = _plans.get(key)
    if plan is None:
        tiles = cdiv(channels, _TURNED_CHANNELS) * cdiv(pixels, _TURNED_PIXELS)
        plan = _plans[key] = _TURN.bind(
            (x, *_there(x, vectors), out),
            grid=(tiles * x.shape[0],),
            constants={"C": channels, "P": pixels, "BACK": back, "LINKS": coded(chain), "ROUND": rounding}
            | {"BC": _TURNED_CHANNELS, "BP": _TURNED_PIXELS},
            num_warps=8,
            device=x.get_device(),
            vector=vector_of(4, places),
        )
    plan(x, *_there(x, vectors), out)
    return out


def _support(
    x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, stride: Ints, padding: Ints,
    dilation: Ints, output_padding: Ints, groups: int, transposed: bool, chain: str,
) -> str | None:  # fmt: skip
    if any(each is not None and each.dtype != torch.float32 for each in (x, weight, bias, vectors)):
        return "images and weights are float32: PyTorch's own convolutions are right for other types"
    if x.dim() not in (3, 4, 5) or weight.dim() != x.dim():
        return "images have one to three dims besides their number and channels"
    # the grid's second dimension
    if math.prod(x.shape[1:]) // groups > MOST_OFFSET or x.shape[0] * groups > 65535:
        return "an image has too many elements, or there are too many images"
    sizes = out_sizes(x.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, transposed)
    if min(sizes) <= 0 or math.prod(sizes) > MOST_OFFSET:
        return "the result has no pixels, or too many"
    words, pool, after = parts_of(chain)
    try:
        links = (*links_of(words), *links_of(after))
    except ValueError as error:
        return str(error)
    outputs = weight.shape[1] if transposed else weight.shape[0]
    if pool not in POOLS or (pool and (groups != 1 or (pool != MEAN and outputs > config.MOST_POOLED))):
        return f"no {pool!r} over channels, or too many of them for one tile"
    if after and pool != SOFTMAX:
        return f"links behind {pool!r}: only softmax leaves all channels"
    if any(name in ("scales", "shifts") for name, _ in links) and vectors is None:
        return "the chain reads vectors, and none are given"
    return None


def _fake(x: Tensor, weight: Tensor, bias: Any, vectors: Any, *rest: Any) -> Tensor:
    stride, padding, dilation, output_padding, groups, transposed, chain = rest
    sizes = out_sizes(x.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, transposed)
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    pool = parts_of(chain)[1]
    return x.new_empty((x.shape[0], 1 if pool in SINGLE else outputs, *([1] * len(sizes) if pool == MEAN else sizes)))


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, Any]:
    """Every output pixel is a product with one filter; a transposed convolution's taps are spread over its strides."""
    x, weight = inputs[:2]
    taps = math.prod(weight.shape[1:])
    spread = outputs[0].numel / max(1, x.numel // x.shape[1] * outputs[0].shape[1]) if outputs else 1.0
    flops = 2.0 * outputs[0].numel * taps / max(1.0, spread)
    return {"flops": flops, "matrix_flops": flops}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    """Numbers of few digits: TensorFloat-32 keeps them all, so that only sums may differ."""

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=on, generator=generator) * 16).round() / 16

    num, groups, turned = len(of["image"]), of.get("groups", 1), of.get("turned", False)
    inputs, outputs = of["inputs"], of["outputs"]
    x = draw(of["images"], inputs, *of["image"])
    shape = (inputs, outputs // groups) if turned else (outputs, inputs // groups)
    weight = draw(*shape, *of["taps"])
    vectors = draw(2, outputs) if "@" in of.get("chain", "") else None
    sizes = [list(of.get(name, (default,) * num)) for name, default in
             (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0))]  # fmt: skip
    bias = draw(outputs) if of.get("bias") else None
    return x, weight, bias, vectors, *sizes, groups, turned, of.get("chain", "")


_SMALL = {"images": 2, "inputs": 5, "outputs": 20}
SMALL = (
    case("float32", **_SMALL, image=(9, 7), taps=(3, 3), bias=True, chain="scale=2.0 relu shifts@1"),
    case("float32", **_SMALL, image=(9, 8), taps=(3, 2), stride=(2, 3), padding=(1, 1), dilation=(2, 1)),
    case("float32", images=1, inputs=32, outputs=17, image=(40,), taps=(3,), padding=(2,), chain="mish scales@0"),
    case("float32", **_SMALL, image=(4, 5, 6), taps=(2, 3, 2), padding=(0, 1, 0), bias=True),
    case("float32", **_SMALL, image=(5, 6), taps=(3, 4), stride=(2, 3), padding=(1, 0), output_padding=(1, 0),
         turned=True),
    case("float32", images=1, inputs=32, outputs=16, image=(3, 4, 3), taps=(3, 2, 3), stride=(2, 1, 2),
         padding=(1, 0, 1), turned=True, bias=True),
    case("float32", images=1, inputs=4, outputs=6, image=(11,), taps=(3,), dilation=(3,), padding=(1,), turned=True),
    case("float32", images=1, inputs=8, outputs=6, image=(5, 6), taps=(3, 2), stride=(2, 3), dilation=(3, 2),
         padding=(1, 1), groups=2, turned=True, bias=True),
    case("float32", images=2, inputs=8, outputs=12, image=(6, 7), taps=(3, 3), groups=4, chain="tanh"),
    case("float32", **_SMALL, image=(7, 6), taps=(3, 3), bias=True, chain="scale=0.1|min"),
    case("float32", images=1, inputs=32, outputs=17, image=(3, 4), taps=(3, 3), stride=(2, 2), turned=True,
         chain="scale=0.1|logsumexp"),
    case("float32", **_SMALL, image=(7, 6), taps=(2, 2), chain="scale=0.1|softmax"),
    case("float32", images=2, inputs=8, outputs=20, image=(4, 5), taps=(3, 3), stride=(2, 2), turned=True, bias=True,
         chain="scales@0|softmax|shifts@1 scale=3.0 sigmoid"),
    case("float32", images=3, inputs=8, outputs=20, image=(19, 17), taps=(3, 3), bias=True, chain="gelu|mean"),
    case("float32", images=2, inputs=32, outputs=17, image=(3, 4, 5), taps=(3, 2, 3), stride=(2, 1, 2), turned=True,
         chain="relu scales@0|mean"),
    case("float32", images=2, inputs=8, outputs=12, image=(4, 5), taps=(3, 3), stride=(2, 2), groups=2, turned=True),
    case("float32", images=2, inputs=6, outputs=6, image=(9, 8), taps=(3, 5), padding=(1, 2), groups=6, bias=True,
         chain="hardswish"),
)  # fmt: skip
CHECKS = (
    *SMALL,
    case("float32", images=3, inputs=64, outputs=128, image=(61, 47), taps=(3, 3), bias=True, chain="gelu"),
    case("float32", images=2, inputs=3, outputs=64, image=(20, 33, 31), taps=(3, 5, 3), chain="sigmoid shift=0.5"),
    case("float32", images=2, inputs=96, outputs=200, image=(1000,), taps=(5,), padding=(2,), chain="leaky=0.1"),
    case("float32", images=3, inputs=8, outputs=200, image=(70, 61), taps=(3, 3), bias=True, chain="gelu|mean"),
    case("float32", images=2, inputs=32, outputs=48, image=(24, 24, 24), taps=(3, 3, 3), stride=(2, 2, 2),
         padding=(1, 1, 1), output_padding=(1, 1, 1), turned=True, chain="least=-1.0 most=1.0 hardsigmoid"),
    case("float32", images=2, inputs=128, outputs=128, image=(64, 64), taps=(3, 3), groups=128, chain="softplus silu"),
)  # fmt: skip
RACES = (
    case("float32", images=64, inputs=64, outputs=128, image=(128, 128), taps=(3, 3), bias=True, chain="mish mish"),
    case("float32", images=64, inputs=8, outputs=64, image=(256, 256), taps=(3, 3), bias=True, chain="relu"),
    case("float32", images=64, inputs=8, outputs=64, image=(256, 256), taps=(3, 3), bias=True, chain="gelu|mean"),
    case("float32", images=16, inputs=64, outputs=64, image=(256, 256), taps=(3, 3), groups=64),
    case("float32", images=16, inputs=64, outputs=64, image=(256, 256), taps=(3, 3), turned=True),
)

CONVOLUTION = declare(
    name="convolution",
    summary="convolutions in PyTorch's layout with what follows element by element",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? vectors, int[] stride, int[] padding, int[] dilation, "
    "int[] output_padding, int groups, bool transposed, str chain) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trial=Trial(
        make=_make,
        call=convolution,
        eager=reference.eager,
        reference=reference.forward,
        mistakes={"mirrored": reference.mirrored, "tap lost": reference.tap_lost, "shifted": reference.shifted},
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        phases=("fwd",),
        constants=(0, 1, 2, 3),
        layouts=False,
    ),
)
