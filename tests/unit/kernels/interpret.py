"""Run by test_interpreted in a process of its own: every kernel on Triton's interpreter, against its reference.

float32 and float16 only: the interpreter's bfloat16 arithmetic is wrong. Configurations are made small, so that loops
run several times and blocks end in the middle of rows.
"""

import itertools
import re
import sys
import warnings
from contextlib import ExitStack

import torch

import ridgeline.kernels
from ridgeline.bench import verdict
from ridgeline.bench.check import check_case
from ridgeline.kernels import launcher, tuning
from ridgeline.kernels.adamw import config as adamw
from ridgeline.kernels.contract import case, trials
from ridgeline.kernels.convolution import config as convolution
from ridgeline.kernels.convolution.op import SMALL as CONVOLUTIONS
from ridgeline.kernels.cross_entropy import config as cross_entropy
from ridgeline.kernels.cross_layer import config as cross_layer
from ridgeline.kernels.decode_attention import config as decode
from ridgeline.kernels.depthwise_conv import config as depthwise
from ridgeline.kernels.depthwise_conv.op import SMALL as DEPTHWISE
from ridgeline.kernels.dropout_add import config as dropout
from ridgeline.kernels.embedding_bag import config as embedding
from ridgeline.kernels.gated import config as gated
from ridgeline.kernels.grad_norm import config as grad_norm
from ridgeline.kernels.group_norm import config as groups
from ridgeline.kernels.group_norm_channels_last import config as last
from ridgeline.kernels.group_norm_channels_last.op import SMALL as LAST
from ridgeline.kernels.grouped_conv import config as grouped
from ridgeline.kernels.grouped_conv.op import SMALL as GROUPED
from ridgeline.kernels.grouped_conv1d import config as sequence
from ridgeline.kernels.grouped_conv1d.op import SMALL as SEQUENCES
from ridgeline.kernels.latent_attention import config as latent
from ridgeline.kernels.linear import config as product
from ridgeline.kernels.linear_cross_entropy import config as linear
from ridgeline.kernels.linear_epilogue import config as dense
from ridgeline.kernels.long_norm import config as long_norm
from ridgeline.kernels.long_norm.op import SMALL as LONG
from ridgeline.kernels.paged_attention import config as paged
from ridgeline.kernels.pooling import op as pooling
from ridgeline.kernels.qk_norm_rope import config as heads
from ridgeline.kernels.quantize import config as quantize
from ridgeline.kernels.rms_norm import config as norm
from ridgeline.kernels.rms_norm_quant import config as narrow
from ridgeline.kernels.rope import config as rope
from ridgeline.kernels.scan import config as scan
from ridgeline.kernels.scan.op import SMALL as SCANS
from ridgeline.kernels.selective_scan import config as selective
from ridgeline.kernels.selective_scan import reference as scans
from ridgeline.kernels.short_attention import config as short
from ridgeline.kernels.short_attention.op import SMALL as SHORT
from ridgeline.kernels.softmax import config as softmax
from ridgeline.kernels.split_gemm import config as matmul
from ridgeline.kernels.top_k import config as top_k
from ridgeline.kernels.top_k.op import SMALL as TOP_K

warnings.simplefilter("ignore")  # numpy's, on the padding of blocks
assert launcher.INTERPRETING
launcher.ASSUMED_SMS = 1
verdict.TIMES_EAGER = 4.0  # numpy's float32 exponential is off by up to 2.5 units in the last place
norm.LONG_BLOCK = 16
narrow.ONE_WARP = 16
ridgeline.kernels.layer_norm.__globals__["config"].LONG_BLOCK = 16

ROWS = [case("float32", rows=5, cols=33), case("float16", rows=3, cols=16), case("float16", rows=11, cols=45)]
CLASSES = [
    case("float32", rows=4, cols=70, smoothing=0.1, z=0.01),
    case("float16", rows=3, cols=16, smoothing=0.0, z=0.0),
    case("float16", rows=6, cols=131, smoothing=0.1, z=0.01),  # rows start inside accesses
    case("float32", rows=7, cols=63, smoothing=0.1, z=0.0),
    case("float16", rows=9, cols=37, smoothing=0.0, z=0.01),
]
HEADS = [
    case("float32", batch=2, seq=2, heads=3, keys=1, dim=8),
    case("float16", batch=1, seq=2, heads=2, keys=2, dim=24),
]
held = {"forward": norm.Forward(2, 3, 16, 1), "backward": norm.Backward(2, 3, 16, 1, 2, 1, True)}
reloaded = {"forward": norm.Forward(1, 1, 64, 1), "backward": norm.Backward(1, 1, 64, 1, 1, 2, False)}
long = {"forward": norm.Forward(1, 0, 0, 1), "backward": norm.Backward(1, 0, 0, 1, 1, 1, False)}
apart = {"forward": norm.Forward(1, 3, 16, 1), "backward": norm.Backward(1, 3, 16, 1, 2, 8, True)}
ends = {"forward": norm.Forward(1, 3, 16, 1, apart=True), "backward": norm.Backward(1, 3, 16, 1, 2, 8, True, True)}
FORCED = {
    **{
        f"{op}_norm": [
            {f"{op}_norm.{phase}": config for phase, config in given.items()}
            for given in (held, reloaded, long, apart, ends)
        ]
        for op in ("rms", "layer")
    },
    "softmax": [
        {f"softmax.{phase}": config for phase in phases}
        for phases, config in (
            (("forward", "backward"), softmax.Softmax(2, 3, 16, 1, 2, 1)),
            (("forward", "backward"), softmax.Softmax(1, 1, 64, 1)),
            (("forward", "backward"), softmax.Softmax(1, 0, 16, 1, 2)),
            (("forward", "backward"), softmax.Softmax(1, 3, 16, 1, ends=True)),
            (("forward", "backward"), softmax.Softmax(2, 3, 16, 1, ends=True)),
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
    "gelu": [{"gelu.forward": gated.Pointwise(16, 1), "gelu.backward": gated.Pointwise(16, 1)}],
    "relu2": [{"relu2.forward": gated.Pointwise(16, 1), "relu2.backward": gated.Pointwise(16, 1)}],
}
cross_entropy.SHORTEST_STRETCHED = 64
cross_entropy.LONGEST_TILED, cross_entropy.LONGEST_TILED_SHIFTED = 16, 64
FORCED["cross_entropy"].append(
    {
        "cross_entropy.short": cross_entropy.Short(2, 4, 16, 1, 1, 1),
        "cross_entropy.backward_rows": cross_entropy.Rows(2, 128, 1),
    }
)
PRODUCTS = [case("float32", rows=9, cols=33, hidden=16), case("float16", rows=9, cols=131, hidden=16)]
FORCED["linear_cross_entropy"] = [FORCED["cross_entropy"][0] | {"linear_cross_entropy": linear.Chunks(4)}]
IMAGES = [
    case("float32", batch=2, channels=4, side=5, groups=2),
    case("float16", batch=1, channels=4, side=3, groups=2),
    case("float16", batch=2, channels=12, side=7, groups=2),
    case("float32", batch=3, channels=6, side=2, groups=2),
]
FORCED["group_norm"] = [
    {"group_norm": groups.Groups(16, 1, num, 8, 1), **{f"group_norm.{of}": groups.Apart() for of in ("flat", "tile")}}
    for num in (1, 2)
]
FORCED["group_norm"].append({"group_norm.flat": groups.Flat(1, 32), "group_norm.tile": groups.Tile(1, 8)})
FORCED["group_norm"].append({"group_norm.flat": groups.Walk(1), "group_norm.tile": groups.Walk(1, 4, 8)})
# The interpreter rounds float8 toward zero.
NARROW = [case("float32", rows=5, cols=96, kind=kind, block=b) for kind in ("int8",) for b in (0, 32)]
NARROW += [case(dtype, rows=19, cols=cols, kind="int8", block=0) for dtype, cols in (("float16", 45), ("float32", 94))]
for name in ("rms_norm_quant", "layer_norm_quant"):
    FORCED[name] = [{name: narrow.Tile(2, 3, 32, 1)}, {name: narrow.Tile(1, 3, 32, 1, 2, 2)}]
FORCED["qk_norm_rope"] = [
    {"qk_norm_rope.forward": heads.Heads(1, 1, rows), "qk_norm_rope.backward": heads.Heads(1, 2, rows)}
    for rows in (2, 8)
]
CASES = {
    "dropout_add": [case("float32", rows=3, cols=50, p=0.3), case("float32", rows=3, cols=1500, p=0.5)],
    "rms_norm_quant": NARROW,
    "layer_norm_quant": [*NARROW, case("float32", rows=3, cols=80, kind="int8", block=0)],
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
FORCED["clip_grad_norm_"] = [{"grad_norm": grad_norm.Pass(128, 1, 512), "grad_scale": grad_norm.Pass(128, 1, 512)}]
CASES["clip_grad_norm_"] = [
    case("float32", list="few", max_norm=1.0),
    case("float16", list="few", max_norm=1e4),
]
for name in ("adamw", "adamw_8bit"):
    FORCED[name] = [{"adamw": adamw.Update(512, 1, 1024), "grad_norm": grad_norm.Pass(128, 1, 512)}]
    CASES[name] = [
        case("float32", list="few", step=1, max_norm=-1.0),
        case("float16", list="few", step=100, max_norm=1.0),
    ]
CASES["adamw"].append(case("float16", list="few", step=100, max_norm=-1.0, own=True))
quantize.LONG_BLOCK = 64
FORCED["quantize"] = [
    {"quantize.rows": rows, "quantize.tensor": quantize.Flat(64, 1, 2)}
    for rows in (norm.Forward(2, 3, 32, 1), norm.Forward(1, 0, 0, 1))
]
CASES["quantize"] = [
    case("float32", rows=5, cols=96, kind="int8", per=per, block=32) for per in ("row", "block", "tensor")
]
FORCED["dequantize"] = [{"dequantize.rows": quantize.Tile(2, 32, 1), "dequantize.tensor": quantize.Flat(64, 1)}]
CASES["dequantize"] = [
    case("float32", rows=5, cols=96, kind="int8", per=per, block=32) for per in ("row", "block", "tensor")
]
BAGS = {"tables": 2, "batch": 5, "rows": 9, "dim": 12, "length": 4}
FORCED["embedding_bag"] = [
    {"embedding_bag.forward": forward, "embedding_bag.update": embedding.Update(length, 2, 1),
     "embedding_bag.order": order}
    for forward, length, order in (
        (embedding.Forward(4, 2, 1), 4, embedding.Order(4, 0, 8, 1)),
        (embedding.Forward(4, 4, 1), 64, embedding.Order(8, 2, 2, 1)),
        (embedding.Forward(4, 2, 1), 8, embedding.Order(0, 0, 0, 0)),
        (embedding.Forward(1, 2, 1, late=True), 2, embedding.Order(8, 2, 2, 1, share=2)),
        (embedding.Forward(2, 4, 1, columns=8), 4, embedding.Order(4, 0, 8, 1)),
    )
]  # fmt: skip
CASES["embedding_bag"] = [
    case("float32", **BAGS, weighted=True),
    case("float32", **BAGS, mode="mean", index="int32", padding=1),
    case("float16", **(BAGS | {"tables": 1, "dim": 16, "length": 9})),
]
FORCED["embedding_bags_update"] = FORCED["embedding_bag"][:1]
CASES["embedding_bags_update"] = [
    case("float32", **BAGS, optimizer="sgd", mode="mean"),
    case("float32", **BAGS, optimizer="rowwise_adagrad", weighted=True),
    case("float16", **(BAGS | {"rows": 2, "length": 12}), optimizer="adam"),
]
FORCED["dropout_add"] = [
    {f"dropout_add.{phase}": dropout.Tile(16, 1, parts) for phase in ("forward", "backward")} for parts in (1, 2)
]
FORCED["rope"] = [{"rope": rope.Rope(1)}, {"rope": rope.Rope(1, True)}]
CASES["dot_interaction"] = [case("float32", batch=3, tables=5, dim=12), case("float16", batch=2, tables=17, dim=16)]
FORCED["cross_layer"] = [
    {"cross_layer.product": cross_layer.Product(*tile), "cross_layer.backward": cross_layer.Pass(2, 16, 1, 1)}
    for tile in ((0, 0, 0, 0, 0), (16, 16, 16, 1, 1), (16, 16, 16, 1, 1, True))
]
AGAIN = {"cross_layer.again": cross_layer.Tile(16, 16, 1, 1), "cross_layer.end": cross_layer.Tile(16, 16, 1, 1)}
FORCED["cross_layer"] += [
    AGAIN | {"cross_layer.weights": cross_layer.Weights(16, 16, 1, 1, 7)},
    AGAIN | {"cross_layer.end": cross_layer.NO_TILE, "cross_layer.product": cross_layer.Product(16, 16, 16, 1, 1)},
]  # fmt: skip
cross_layer.LEAST_WIDENED = cross_layer.LEAST_WIDENED_BACK = 20 * 21
CASES["cross_layer"] = [
    case("float32", batch=9, dim=24, rank=0),
    case("float16", batch=17, dim=40, rank=18),
    case("float16", batch=20, dim=21, rank=0),
    case("bfloat16", batch=23, dim=27, rank=8),
    case("float16", batch=37, dim=40, rank=16),
    case("float16", batch=16, dim=64, rank=32),
    case("float16", batch=19, dim=40, rank=24),
    case("float16", batch=21, dim=24, rank=0),
]
FORCED["paged_attention"] = [
    {"paged_attention": paged.Paged(16, num, 1, 1, borders=borders)}
    for num, borders in ((0, False), (3, False), (5, True))
]
CASES["decode_attention"] = [
    case("float32", b=2, h=8, k=2, s=77, d=24, hide="lengths"),
    case("float16", b=1, h=4, k=4, s=150, d=16, hide="mask"),
    case("float32", b=1, h=4, k=2, s=33, d=16, hide="added"),
]
FORCED["decode_attention"] = [
    {"decode_attention": decode.Decode(16, shares, 1, 1, inside=inside)}
    for shares, inside in ((1, False), (3, False), (3, True))
]
CASES["gelu"] = [case("float16", rows=3, cols=37), case("float16", rows=5, cols=64)]
CASES["unshuffle"] = [
    case("float16", b=2, c=3, y=5, x=8, h=4, w=6, top=1, left=2),
    case("float32", b=1, c=4, y=6, x=4, h=3, w=2, top=0, left=0),
]
CASES["resize"] = [
    case("float16", b=2, c=7, y=5, x=5, h=9, w=12, last=True, corners=False),
    case("float32", b=1, c=3, y=6, x=6, h=4, w=7, last=False, corners=True),
    case("float32", b=1, c=300, y=3, x=3, h=5, w=4, last=True, corners=True),
]
CASES["drop_padding"] = [
    case("float16", rows=3, cols=4097, step=4160),
    case("float32", rows=5, cols=13, step=32),
    case("bfloat16", rows=2, cols=8190, step=8192),
]
CASES["dense"] = [
    case("float16", m=21, n=24, k=40, parts="nagep", activation="relu"),
    case("float16", m=35, n=16, k=64, parts="ngea", activation="silu"),
    case("float16", m=7, n=40, k=16, parts="bal", activation="gelu"),
    case("float16", m=16, n=32, k=32, parts="n", activation="hardswish"),
]
FORCED["dense"] = [{"dense": dense.Tile(16, 16, 32, 2, 1, 1)}]
CASES["depthwise"] = list(DEPTHWISE)
FORCED["depthwise"] = [{"depthwise": depthwise.Tile(3, 8, 16, 1)}]
CASES["short_attention"] = list(SHORT)
FORCED["short_attention"] = [{"short_attention": short.Short(16, 2, 1)}]
CASES["group_norm_last"] = list(LAST)
FORCED["group_norm_last"] = [{"group_norm_last": last.Pass(4, 16, 3, 1)}]
CASES["sequence_convolution"] = list(SEQUENCES)
FORCED["sequence_convolution"] = [{"sequence_convolution": sequence.Tile(16, 1, 1)}]
CASES["grouped_convolution"] = list(GROUPED)
FORCED["grouped_convolution"] = [{"grouped_convolution": grouped.Tile(16, 1, 1)}]
CASES["matmul"] = [
    case("float32", m=40, n=33, k=300, bias=True),
    case("float32", m=20, n=40, k=270, turned=True, positive=True),
    case("float32", m=40, n=33, k=600, turned=True),
    case("float32", m=16, n=20, k=256, z=2),
    case("float32", m=16, n=24, k=256, z=2, cut=True),
    case("float32", m=17, n=20, k=256, z=2, cut=True, weight=True),
    case("float32", m=20, n=40, k=70, weight=True, bias=True),
    case("float32", m=300, n=40, k=50, bias=True),
    case("float32", m=45, n=17, k=70, bias=True),
    case("float32", m=20, n=17, k=4200, bias=True),
    case("float32", m=20, n=33, k=4128, turned=True),
]
FORCED["matmul"] = [
    {"matmul": matmul.Product(32, 32, 64, 2, 1, 1), "matmul.thin": matmul.Thin(16, 16, 32, 1, 1),
     "matmul.tall": matmul.Thin(16, 16, 32, 1, 1), "matmul.pieces": matmul.Pieces(16, 16, 32, 1, 1)},
]
matmul.LEAST_TALL_ROWS, matmul.MOST_TALL_COLS = 45, 17
CASES["convolution"] = list(CONVOLUTIONS)
FORCED["convolution"] = [
    {"convolution": convolution.Tile(32, 32, 16, 1, 1), "convolution.depthwise": convolution.Depthwise(64, 1)},
    {"convolution": convolution.Tile(64, 32, 32, 1, 1, last=True)},
]
CASES["scan"] = list(SCANS)
FORCED["scan"] = [{"scan": scan.Scan(16, 4, 1, 1)}]
CASES["pool"] = list(pooling.SMALL)
pooling.BLOCK = 32
CASES["top_k"] = list(TOP_K)
FORCED["top_k"] = [{"top_k": top_k.Row(1)}]
CASES["long_norm"] = list(LONG)
FORCED["long_norm"] = [
    {"long_norm.held": long_norm.Held(16, 1, 8, 0)},
    {"long_norm.held": long_norm.Held(16, 1, 0, 0), "long_norm": long_norm.Shared(16, 8, 1, 8)},
]
CASES["linear"] = [
    case("float32", rows=3, k=70, n=20, parts="bnr", gated=False),
    case("float16", rows=5, k=64, n=33, parts="n", gated=False),
]
FORCED["linear"] = [
    {"linear": product.Linear("row", 4, 32, 1)},
    {"linear": product.Linear("tile", 16, 32, 1)},
    {"linear": product.Linear("tile", 16, 16, 1, 1, 3)},
]
CASES["quantized_linear"] = [
    case("float16", rows=3, k=256, n=20, parts="bnr", gated=False, bits=8),
    case("float16", rows=5, k=256, n=33, parts="n", gated=False, bits=4),
]
FORCED["quantized_linear"] = [
    {"quantized_linear": product.Linear("tile", 16, 128, 1)},
    {"quantized_linear": product.Linear("tile", 16, 128, 1, 1, 2)},
]
CASES["paged_latent_attention"] = [
    case("float32", b=2, h=20, s=77, d=24, e=8, page=16, uneven=True),
    case("float16", b=1, h=4, s=50, d=16, e=16, page=32, uneven=False),
]
FORCED["paged_latent_attention"] = [
    {"latent_attention": latent.Latent(16, 16, num, 1, 1),
     "latent_attention.few": latent.Few(16, num, 1, 1, borders=num > 1)}
    for num in (1, 3)
]
CASES["selective_scan"] = [
    case("float32", b=2, d=3, l=11, n=5, all=True),
    case("float16", b=1, d=2, l=8, n=4, all=False),
]
FORCED["selective_scan"] = [{"selective_scan": selective.Chunk(*of)} for of in ((2, 4), (4, 16))]
NOT_INTERPRETED = ("attention", "varlen_attention")  # made of instructions that the interpreter does not know


_TURN = itertools.count()


def asked(name):
    """Whether this process runs a kernel or section: all, those named, or every n-th from the k-th on (``k/n``)."""
    given = sys.argv[1:]
    if len(given) == 1 and (part := re.fullmatch(r"(\d+)/(\d+)", given[0])):
        return next(_TURN) % int(part[2]) == int(part[1])
    return not given or name in given


def replaced(of, **sizes):
    return case(of.dtype, **(dict(of.sizes) | sizes))


num = 0
for name, (made, trial) in trials().items():
    if name in NOT_INTERPRETED or not asked(name):
        continue
    forced = FORCED.get(made.name.removeprefix("add_"), [{}])
    for given in forced:
        for i, of in enumerate(CASES.get(made.name, ROWS)):
            of = replaced(of, gated=True) if name.endswith("linear_gated") else of
            with ExitStack() as stack:
                for kernel, config in given.items():
                    stack.enter_context(tuning.forced(kernel, config))
                for layout in (
                    ("contiguous", "sliced") if trial.layouts and i == 0 and given is forced[0] else ("contiguous",)
                ):
                    for finding in check_case(name, of, torch.device("cpu"), i, layout, repeat=False):
                        num += 1
                        assert finding.ok, (finding, given)
print(f"{num} findings, all right")

if asked("helpers"):  # attention's helpers are ordinary kernels
    from ridgeline.kernels.attention import launch

    o, do = torch.randn(2, 3, 70, 24), torch.randn(2, 70, 3, 24).transpose(1, 2)
    lse = torch.randn(2, 3, 70)
    lse[0, 1, 5] = float("-inf")
    delta, lse2, zeros = torch.full((2, 3, 128), 7.0), torch.full((2, 3, 128), 7.0), torch.ones(2, 3, 128, 32)
    rest = (*o.stride()[:3], *do.stride()[:3], 3, 70, 128, 24, 24)
    sizes = {"D": 32, "ROWS": 64, "VARLEN": False, "ZERO": True, "DQ": 32}
    prepare = launch._PREPARE.bind((), grid=(2, 6), constants=sizes, num_warps=1, device=-1)
    prepare(o, do, lse, delta, lse2, zeros, lse, *rest)
    torch.testing.assert_close(delta[:, :, :70], (o * do).sum(-1))
    meant = (lse * launch.LOG2_E).masked_fill(lse == float("-inf"), float("inf"))
    torch.testing.assert_close(lse2[:, :, :70], meant)
    assert (lse2[:, :, 70:] == float("inf")).all() and (delta[:, :, 70:] == 0).all() and (zeros == 0).all()

    starts = torch.tensor([0, 30, 100], dtype=torch.int32)  # two sequences in 100 rows of three heads
    o, do = (torch.randn(100, 3, 24).transpose(0, 1)[None] for _ in range(2))
    lse, delta, lse2 = torch.randn(1, 3, 100), torch.zeros(1, 3, 256), torch.zeros(1, 3, 256)
    rest = (*o.stride()[:3], *do.stride()[:3], 3, 100, 256, 24, 24)
    sizes |= {"VARLEN": True, "ZERO": False}
    prepare = launch._PREPARE.bind((), grid=(2, 6), constants=sizes, num_warps=1, device=-1)
    prepare(o, do, lse, delta, lse2, delta, starts, *rest)
    meant = (o * do).sum(-1)
    torch.testing.assert_close(delta[:, :, :30], meant[:, :, :30])  # the second begins a block of 64: (30 + 64) → 64
    torch.testing.assert_close(delta[:, :, 64:134], meant[:, :, 30:])
    torch.testing.assert_close(lse2[:, :, 64:134], lse[:, :, 30:] * launch.LOG2_E)
    assert (lse2[:, :, 30:64] == float("inf")).all() and (lse2[:, :, 134:192] == float("inf")).all()

    parts, out = torch.randn(2, 2 * 3, 10, 8), torch.empty(2, 10, 2, 8).transpose(1, 2)
    total = launch._SUM.bind((), grid=(2, 4), constants={"SPLIT": 3, "BLOCK": 64}, num_warps=1, device=-1)
    total(parts, out, 2, 80, *out.stride()[:3], 8)
    torch.testing.assert_close(out, parts.view(2, 2, 3, 10, 8).sum(2))

    summed, dq = torch.randn(2, 3, 128, 32), torch.empty(2, 70, 3, 24).transpose(1, 2)
    rounded = launch._ROUNDED.bind((), grid=(2, 6), constants={"D": 32, "ROWS": 64}, num_warps=1, device=-1)
    rounded(summed, dq, 3, 70, 128, 24, *dq.stride()[:3], 0.5)
    torch.testing.assert_close(dq, summed[:, :, :70, :24] * 0.5)

    for lengths, heads, group, block, backwards in (
        ((95, 284, 366, 0, 1166, 377), 4, 24, 128, False), ((95, 284, 0, 1166), 4, 7, 128, True),
        ((3,), 3, 2, 128, False), ((0, 0, 5), 2, 4, 64, True), ((95, 284, 366, 1166), 3, 6, 128, True),
    ):  # fmt: skip
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        listed = launch.Order(starts, heads, int(starts[-1]), max(lengths), block, group, backwards=backwards)(starts)
        blocks, num = [-(-length // block) for length in lengths], len(lengths) * heads
        meant = [
            (blocks[p // heads] - 1 - m if backwards else m) * num + p
            for first in range(0, num, group)
            for m in reversed(range(max(blocks)))
            for p in range(first, min(first + group, num))
            if blocks[p // heads] > m
        ]
        assert listed[: 1 + len(meant)].tolist() == [len(meant), *meant], (lengths, heads, group)
    print("attention's helpers, all right")

if asked("cache_append"):
    from ridgeline.kernels.cache_append.op import append

    caches = torch.zeros(2, 2, 3, 5, 12)
    new = torch.randn(2, 2, 3, 2, 12)
    append(caches[0], caches[1], torch.tensor([4, 1]), new[0], new[1])
    assert torch.equal(caches[:, :, :, [4, 1]], new) and caches.count_nonzero() == new.count_nonzero()

    from ridgeline.kernels.cache_append import reference as appended
    from ridgeline.kernels.cache_append.op import rope_append

    for dtype, interleaved, width in ((torch.float32, False, 12), (torch.float32, True, 4), (torch.float16, False, 4)):
        q, k, v = (torch.randn(2, 2, heads, 12).to(dtype).transpose(1, 2) for heads in (4, 2, 2))
        angles = torch.randn(2, 2, width // 2 if width == 12 else width)
        table = torch.cat((angles, angles), -1) if width == 12 else angles
        found, meant = (torch.zeros(2, 2, 2, 5, 12).to(dtype) for _ in range(2))
        rest = (torch.tensor([4, 1]), q, k, v, table.cos(), table.sin(), interleaved)
        turned, right = rope_append(found[0], found[1], *rest), appended.rope_append(meant[0], meant[1], *rest)
        torch.testing.assert_close(turned, right)
        torch.testing.assert_close(found, meant)
        assert turned.stride() == right.stride()

    from ridgeline.kernels import selective_scan  # what is no number stays none, and nothing overflows on its way to 0

    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 200.0, -200.0, 1.0, -1.0, 0.0])
    rows, ones = odd.expand(2, 1, 8).transpose(1, 2).contiguous(), torch.ones(2, 8, 1)
    state = (-torch.ones(8, 1), torch.ones(2, 1, 1), torch.ones(2, 1, 1))
    for z, delta, softplus in ((None, rows, True), (rows, ones, False)):
        args = (ones, delta, *state, None, z, None)
        wide = (t if t is None else t.double() for t in args)
        found, meant = selective_scan(*args, softplus)[0], scans.forward(*wide, softplus)[0]
        torch.testing.assert_close(found, meant.float(), rtol=1e-6, atol=1e-37, equal_nan=True)

if asked("softmax"):
    from ridgeline.kernels import softmax as shared_alike

    rows = torch.randn(5, 45)
    rows[0], rows[1, :40], rows[2] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min, float("-inf")
    rows[3, 9], rows[4, 9] = float("nan"), float("inf")
    for given in FORCED["softmax"]:
        for x in (rows, rows[:, 5:].bfloat16()):  # the interpreter has no bfloat16 constants, which 45 columns need
            with ExitStack() as stack:
                for kernel, config in given.items():
                    stack.enter_context(tuning.forced(kernel, config))
                torch.testing.assert_close(shared_alike(x), torch.softmax(x, -1), equal_nan=True)

if asked("means"):
    # A mean's gradient is divided by its rows: multiplied with their reciprocal it is rounded once more than PyTorch's.
    logits, target = torch.zeros(11, 5), torch.zeros(11, dtype=torch.int64)
    logits[:, 0] = -1e4  # so that gradients at targets are the factor and nothing else
    for factor in torch.linspace(0.5, 2.0, 25):
        leaf = logits.clone().requires_grad_()
        (dx,) = torch.autograd.grad(ridgeline.kernels.cross_entropy(leaf, target), leaf, factor)
        assert torch.equal(dx[:, 0], (-factor / 11).expand(11)), (factor, dx[0, 0])

if asked("rows apart"):
    # Rows that start inside accesses and are some accesses apart: what is read and what is written starts elsewhere.
    from torch.nn import functional

    x = torch.randn(13, 53).half()[:, :45]
    weight, bias = torch.randn(2, 45).half()
    leaf, exact = x.detach().requires_grad_(), x.float().requires_grad_()
    with ExitStack() as stack:
        for name in ("softmax", "layer_norm", "rms_norm"):
            for kernel, config in FORCED[name][-1].items():
                stack.enter_context(tuning.forced(kernel, config))
        found = ridgeline.kernels.softmax(x), ridgeline.kernels.rms_norm(x, weight, 1e-6)
        y = ridgeline.kernels.layer_norm(leaf, weight, bias, 1e-5)
        (dx,) = torch.autograd.grad(y, leaf, x)
    y_exact = functional.layer_norm(exact, (45,), weight.float(), bias.float())
    (dx_exact,) = torch.autograd.grad(y_exact, exact, x.float())
    rms = functional.rms_norm(x.float(), (45,), weight.float(), 1e-6)
    for ours, meant in zip((*found, y, dx), (torch.softmax(x.float(), -1), rms, y_exact, dx_exact), strict=True):
        torch.testing.assert_close(ours.float(), meant, rtol=2e-3, atol=2e-3 * float(meant.abs().max()))

if asked("convolution"):
    from ridgeline.kernels.convolution.op import planned

    def kept(x: torch.Tensor, how: int) -> torch.Tensor:
        """TensorFloat-32's ten bits of numbers."""
        bits = x.view(torch.int32)
        added = (0x1000, 0, 0xFFF + ((bits >> 13) & 1))[how]
        return ((bits + added) & -8192).view(torch.float32).double()

    image, weight = torch.randn(1, 8, 6, 7), torch.randn(8, 12, 3, 3)
    image, weight = ((x.view(torch.int32) & -4096).view(torch.float32) for x in (image, weight))  # half of them ties
    ways = {name: way for name, way in convolution.ROUNDINGS.items() if name != "exact"}
    assert len(set(ways.values())) == len(ways) == 5
    for rounding, (image_how, weights_how) in ways.items():
        tile = convolution.Tile(32, 32, 16, 1, 1, rounding=rounding)
        call = planned(image, weight, None, None, (1, 1), (1, 1), (1, 1), (0, 0), 1, True, "", tile=tile)
        meant = torch.nn.functional.conv_transpose2d(kept(image, image_how), kept(weight, weights_how), padding=1)
        torch.testing.assert_close(call(image, weight, None, None).double(), meant, rtol=1e-5, atol=1e-5)
    print("factors rounded or cut off, all right")

    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)  # NaN, as GPUs make it too
    image, weight = torch.randn(1, 8, 9, 9), torch.randn(12, 8, 3, 3)
    image[0, 1, 1, 1], image[0, 2, 7, 1], image[0, 3, 1, 7] = bits
    image[0, 4, 7, 7], weight[5, 0, 0, 0] = float("inf"), bits[0]
    meant = torch.nn.functional.conv2d(image, weight, padding=1)
    for rounding, last in itertools.product((*ways, "exact"), (False, True)):
        tile = convolution.Tile(32, 32, 16, 1, 1, rounding=rounding, last=last)
        call = planned(image, weight, None, None, (1, 1), (1, 1), (1, 1), (0, 0), 1, False, "", tile=tile)
        found = call(image, weight, None, None)
        assert torch.equal(found.isnan(), meant.isnan()), f"{rounding}, {last}: NaN stays, and nothing else becomes NaN"
        assert torch.equal(found == float("inf"), meant == float("inf")), f"{rounding}, {last}: infinities"
    print("no number stays none, all right")

if asked("top_k"):
    from ridgeline.kernels.top_k.op import top_k as places
    from ridgeline.kernels.top_k.reference import forward as meant_places

    drawn = torch.randint(-3, 4, (9, 40)).float()  # full of ties
    drawn[0, [3, 30]], drawn[1, [9, 17]], drawn[1, 2] = float("nan"), -float("nan"), float("inf")
    drawn[2], drawn[3, :36], drawn[4, 33] = float("-inf"), float("-inf"), float("-inf")
    for largest, x in itertools.product((True, False), (drawn, drawn.bfloat16(), drawn.half())):
        assert torch.equal(places(x, 7, largest), meant_places(drawn, 7, largest)), "the first of equals first"
    assert torch.equal(places(drawn, 40, True), meant_places(drawn, 40, True)), "all of a row"
    print("places of the largest, all right")

if asked("endless"):
    from ridgeline.kernels import matmul as product_of
    from ridgeline.kernels.split_gemm.op import ended

    torch.manual_seed(3)
    ones = torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # the NaN that a GPU makes, and −NaN
    with ExitStack() as stack:
        for name, forced in FORCED["matmul"][0].items():
            stack.enter_context(tuning.forced(name, forced))
        for m, n, k, z in ((40, 33, 300, 0), (20, 40, 70, 0), (45, 17, 70, 0), (20, 17, 4200, 0), (20, 24, 256, 2)):
            shape = (z,) if z else ()
            a, b = torch.randn(*shape, m, k), torch.randn(*shape, k, n)
            b[..., 5, :3] = 0.0  # an infinity times nothing
            a[..., 3, 5], a[..., 9, 7], a[..., 11, [2, 6]] = float("inf"), -float("inf"), float("inf")
            a[..., 13, 1], a[..., 15, 8], b[..., 4, 10], b[..., 9, 12] = *ones, float("inf"), -float("inf")
            a[..., 17, :], a[..., 17, 3], a[..., 18, 4] = 1e-30, float("inf"), 0.0
            for bias in (None, torch.randn(n)) if not z else (None,):
                found = product_of(a, b.mT.contiguous().mT if k == 70 else b, bias)
                meant = (a.double() @ b.double() + (0.0 if bias is None else bias)).float()
                torch.testing.assert_close(found, meant, rtol=2e-5, atol=1e-4, equal_nan=True)
                assert int(found.isinf().sum()) > 20 < int(found.isnan().sum())
                if k != 300:
                    continue
                by, more = torch.randn(m, n), torch.randn(m, n)
                by[3, 8], by[20, 9], more[21, 9] = 0.0, float("inf"), -float("inf")
                for found, u in (ended(a, b, bias, by, more, True), ended(a, b, bias, by, more)):
                    torch.testing.assert_close(found, by * meant + more, rtol=2e-5, atol=1e-4, equal_nan=True)
                    assert u is found or torch.equal(u.isinf(), meant.isinf())
                torch.testing.assert_close(ended(a, b, bias, None, more)[0], meant + more, rtol=2e-5, atol=1e-4,
                                           equal_nan=True)  # fmt: skip
    print("infinities, all right")

if asked("attend"):
    from ridgeline.kernels.split_gemm.attend import attend

    for length, keys, width, causal, turned in (
        (37, 50, 24, False, False), (40, 40, 20, True, True), (16, 33, 32, False, True),
    ):  # fmt: skip
        q, k, v = (torch.randn(2, num, 3, width).transpose(1, 2) for num in (length, keys, keys))
        with tuning.forced("matmul.attend", matmul.Thin(16, 16, 32, 1, 1)):
            found = attend(q, k, v, 0.3, causal, turned)
        wide = (x.double() for x in (q, k, v))
        meant = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal, scale=0.3)
        torch.testing.assert_close(found, meant.float(), rtol=2e-6, atol=2e-6)
        assert found.transpose(1, 2).is_contiguous() == turned
    print("float32 attention, all right")

print("nothing is left")
