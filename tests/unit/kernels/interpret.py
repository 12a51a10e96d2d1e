"""Run by test_interpreted in a process of its own: every kernel on Triton's interpreter, against its reference.

float32 and float16 only: the interpreter's bfloat16 arithmetic is wrong. Configurations are made small, so that loops
run several times and blocks end in the middle of rows.
"""

import sys
import warnings
from contextlib import ExitStack

import torch

import ridgeline.kernels
from ridgeline.bench import verdict
from ridgeline.bench.check import check_case
from ridgeline.kernels import launcher, tuning
from ridgeline.kernels.contract import case, trials
from ridgeline.kernels.cross_entropy import config as cross_entropy
from ridgeline.kernels.decode_attention import config as decode
from ridgeline.kernels.gated import config as gated
from ridgeline.kernels.group_norm import config as groups
from ridgeline.kernels.linear import config as product
from ridgeline.kernels.linear_cross_entropy import config as linear
from ridgeline.kernels.matmul import config as matmul
from ridgeline.kernels.paged_attention import config as paged
from ridgeline.kernels.rms_norm import config as norm
from ridgeline.kernels.softmax import config as softmax

warnings.simplefilter("ignore")  # numpy's, on the padding of blocks
assert launcher.INTERPRETING
launcher.ASSUMED_SMS = 1
verdict.TIMES_EAGER = 4.0  # numpy's float32 exponential is off by up to 2.5 units in the last place
norm.LONG_BLOCK = 16
ridgeline.kernels.layer_norm.__globals__["config"].LONG_BLOCK = 16

ROWS = [case("float32", rows=5, cols=33), case("float16", rows=3, cols=16)]
CLASSES = [
    case("float32", rows=4, cols=70, smoothing=0.1, z=0.01),
    case("float16", rows=3, cols=16, smoothing=0.0, z=0.0),
]
HEADS = [
    case("float32", batch=2, seq=2, heads=3, keys=1, dim=8),
    case("float16", batch=1, seq=2, heads=2, keys=2, dim=24),
]
held = {"forward": norm.Forward(2, 3, 16, 1), "backward": norm.Backward(2, 3, 16, 1, 2, 1, True)}
reloaded = {"forward": norm.Forward(1, 1, 64, 1), "backward": norm.Backward(1, 1, 64, 1, 1, 2, False)}
long = {"forward": norm.Forward(1, 0, 0, 1), "backward": norm.Backward(1, 0, 0, 1, 1, 1, False)}
FORCED = {
    **{
        f"{op}_norm": [
            {f"{op}_norm.{phase}": config for phase, config in given.items()} for given in (held, reloaded, long)
        ]
        for op in ("rms", "layer")
    },
    "softmax": [
        {f"softmax.{phase}": config for phase in ("forward", "backward")}
        for config in (
            softmax.Softmax(2, 3, 16, 1, 2, 1),
            softmax.Softmax(1, 1, 64, 1),
            softmax.Softmax(1, 0, 16, 1, 2),
        )
    ],
    "cross_entropy": [
        {
            "cross_entropy.forward": cross_entropy.Forward(16, 1, 2, num),
            "cross_entropy.backward": cross_entropy.Backward(32, 1),
        }
        for num in (1, 3)
    ],
    "gated": [{"gated.forward": gated.Pointwise(16, 1), "gated.backward": gated.Pointwise(16, 1)}],
    "relu2": [{"relu2.forward": gated.Pointwise(16, 1), "relu2.backward": gated.Pointwise(16, 1)}],
}
cross_entropy.SHORTEST_STRETCHED = 64
PRODUCTS = [case("float32", rows=9, cols=33, hidden=16)]
FORCED["linear_cross_entropy"] = [FORCED["cross_entropy"][0] | {"linear_cross_entropy": linear.Chunks(4)}]
IMAGES = [
    case("float32", batch=2, channels=4, side=5, groups=2),
    case("float16", batch=1, channels=4, side=3, groups=2),
]
FORCED["group_norm"] = [{"group_norm": groups.Groups(16, 1, num, 8, 1)} for num in (1, 2)]
# The interpreter rounds float8 toward zero.
NARROW = [case("float32", rows=5, cols=96, kind=kind, block=b) for kind in ("int8",) for b in (0, 32)]
FORCED["rms_norm_quant"] = [{"rms_norm_quant": norm.Forward(2, 3, 32, 1)}]
FORCED["dropout_add"] = [{f"dropout_add.{phase}": gated.Pointwise(64, 1) for phase in ("forward", "backward")}]
CASES = {
    "dropout_add": [case("float32", rows=3, cols=50, p=0.3)],
    "rms_norm_quant": NARROW,
    "group_norm": IMAGES,
    "cross_entropy": CLASSES,
    "rope": HEADS,
    "qk_norm_rope": HEADS[:1],
    "linear_cross_entropy": PRODUCTS,
    "paged_attention": [
        case("float32", b=2, h=8, k=2, s=77, d=24, page=16, uneven=True),
        case("float16", b=1, h=4, k=4, s=150, d=16, page=32, uneven=False),
    ],
}
FORCED["paged_attention"] = [{"paged_attention": paged.Paged(16, shares, 1, 1)} for shares in (1, 3)]
CASES["decode_attention"] = [
    case("float32", b=2, h=8, k=2, s=77, d=24, hide="lengths"),
    case("float16", b=1, h=4, k=4, s=150, d=16, hide="mask"),
    case("float32", b=1, h=4, k=2, s=33, d=16, hide="added"),
]
FORCED["decode_attention"] = [{"decode_attention": decode.Decode(16, shares, 1, 1)} for shares in (1, 3)]
CASES["matmul"] = [
    case("float32", m=40, n=33, k=300, bias=True),
    case("float32", m=20, n=40, k=270, turned=True, positive=True),
    case("float32", m=16, n=20, k=256, z=2),
]
FORCED["matmul"] = [{"matmul": matmul.Product(32, 32, 64, 2, 1, 1)}]
CASES["linear"] = [
    case("float32", rows=3, k=70, n=20, parts="bnr", gated=False),
    case("float16", rows=5, k=64, n=33, parts="n", gated=False),
]
FORCED["linear"] = [
    {"linear": product.Linear("row", 4, 32, 1)},
    {"linear": product.Linear("tile", 16, 32, 1)},
    {"linear": product.Linear("tile", 16, 16, 1, 1, 3)},
]
NOT_INTERPRETED = ("attention",)  # made of instructions that the interpreter does not know



def replaced(of, **sizes):
    return case(of.dtype, **(dict(of.sizes) | sizes))


num = 0
for name, (made, _) in trials().items():
    if name in NOT_INTERPRETED or (len(sys.argv) > 1 and name not in sys.argv[1:]):
        continue
    forced = FORCED.get(made.name.removeprefix("add_"), [{}])
    for given in forced:
        for i, of in enumerate(CASES.get(made.name, ROWS)):
            of = replaced(of, gated=True) if name == "linear_gated" else of
            with ExitStack() as stack:
                for kernel, config in given.items():
                    stack.enter_context(tuning.forced(kernel, config))
                for layout in ("contiguous", "sliced") if i == 0 and given is forced[0] else ("contiguous",):
                    for finding in check_case(name, of, torch.device("cpu"), i, layout, repeat=False):
                        num += 1
                        assert finding.ok, (finding, given)
print(f"{num} findings, all right")
