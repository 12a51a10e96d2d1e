"""How the zoo writes networks: layers as people name them, each adding the nodes eager PyTorch would dispatch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ridgeline.dtypes import DType, dtype
from ridgeline.graph import Builder, Kind, TensorType, typed

FP32, INT64, INT32, FP8, BOOL = dtype("fp32"), dtype("int64"), dtype("int32"), dtype("fp8"), dtype("bool")
Shape = tuple[int, ...]


class Operators(Builder):
    """A builder that knows the precision and whether gradients will be wanted, with the operators of eager PyTorch."""

    def __init__(self, name: str, mode: str, precision: str, **meta: Any) -> None:
        super().__init__(name, mode, precision=precision, **meta)
        self.train = mode == "train"
        self.narrow = precision == "fp8"
        self.fused_norms = True  # F.rms_norm; False spells it out as Hugging Face models do
        self.frozen = False  # weights written now are resident but never trained
        self.dt: DType = dtype("bf16") if self.narrow else dtype(precision)

    # Blocks: one iteration is no block.

    @contextmanager
    def repeat(self, times: int, module: str, *, reverse: bool = False) -> Iterator[None]:
        if times > 1:
            with super().repeat(times, module, reverse=reverse):
                yield
            return
        self._path.append(f"{module}.0")
        yield
        self._path.pop()

    def carry(self, init: int) -> int:
        return init if self._block is None else super().carry(init)

    def close_carry(self, inner: int, next_: int) -> None:
        if self._block is not None:
            super().close_carry(inner, next_)

    # Types and shapes.

    def shape(self, x: int) -> Shape:
        return self.values[x].type.shape

    def type(self, *shape: int) -> TensorType:
        return typed(shape, self.dt)

    def weight(self, name: str, *shape: int) -> int:
        return self.param(name, typed(shape, self.dt))

    def param(self, name: str, type_: TensorType) -> int:
        if self.frozen:
            return self.value(type_, Kind.BUFFER, count=self.repeats, name=self._dotted(name))
        return super().param(name, type_)

    @property
    def repeats(self) -> int:
        """Iterations of the block being written; 1 outside one."""
        return self._block.repeat if self._block is not None else 1

    def enter(self, name: str) -> None:
        self._path.append(name)

    def exit(self) -> None:
        self._path.pop()

    # One node each.

    def linear(
        self, x: int, n: int, name: str, *, bias: bool = False, weight: int | None = None, wide: bool = False
    ) -> int:
        """``F.linear``: x·Wᵀ (+ b) over the last dim; ``weight`` reuses a tied one, ``wide`` is never quantized."""
        shape = self.values[x].type.shape
        k = shape[-1]
        self._path.append(name)
        narrow = self.narrow and weight is None and not wide
        if weight is None:
            weight = self.param("weight", typed((n, k), FP8 if narrow else self.dt))
        operands = [self.quantize(x) if narrow else x, weight]
        attrs: dict[str, Any] = {"b": 1, "m": math.prod(shape[:-1]), "n": n, "k": k, "trans_b": True}
        if bias:
            operands.append(self.weight("bias", n))
            attrs["bias"] = True
        out = self.node("matmul", operands, [typed((*shape[:-1], n), self.dt)], **attrs)[0]
        self._path.pop()
        return out

    def quantize(self, x: int) -> int:
        """The activation rescaled to eight bits, as dynamic fp8 recipes do before each product."""
        return self.node("quantize", [x], [typed(self.shape(x), FP8)], fn="fp8")[0]

    def bmm(self, a: int, b: int, *, trans_b: bool = False) -> int:
        """``torch.matmul`` of two stacks of matrices."""
        left, right = self.shape(a), self.shape(b)
        n = right[-2] if trans_b else right[-1]
        out = typed((*left[:-1], n), self.values[a].type.dtype)
        return self.node("matmul", [a, b], [out], b=math.prod(left[:-2]), m=left[-2], n=n, k=left[-1], trans_b=trans_b)[
            0
        ]

    def pointwise(self, fn: str, *inputs: int, dt: DType | None = None, **attrs: Any) -> int:
        """An elementwise op; the result has the broadcast shape and the dtype of the first input unless told."""
        first = self.values[inputs[0]].type
        if len(inputs) == 1 and dt is None:
            return self.node("pointwise", inputs, [typed(first.shape, first.dtype)], fn=fn, **attrs)[0]
        shape = broadcast([self.shape(i) for i in inputs])
        return self.node("pointwise", inputs, [typed(shape, dt or first.dtype)], fn=fn, **attrs)[0]

    def add(self, a: int, b: int) -> int:
        return self.node("pointwise", (a, b), [self._wider(a, b)], fn="add")[0]

    def mul(self, a: int, b: int) -> int:
        return self.node("pointwise", (a, b), [self._wider(a, b)], fn="mul")[0]

    def inplace(self, fn: str, x: int, *others: int) -> int:
        """An elementwise op that writes over its first input."""
        out = self.value(self.values[x].type, alias=x)
        return self.node("pointwise", [x, *others], [out], fn=fn, inplace=True)[0]

    def _wider(self, a: int, b: int) -> TensorType:
        left, right = self.values[a].type, self.values[b].type
        if left.shape == right.shape:
            return typed(left.shape, left.dtype)
        return typed(broadcast([left.shape, right.shape]), left.dtype)

    def cast(self, x: int, dt: DType) -> int:
        if self.values[x].type.dtype is dt:
            return x
        return self.node("copy", [x], [typed(self.shape(x), dt)], fn="to")[0]

    def contiguous(self, x: int, *, transposed: bool = True) -> int:
        old = self.values[x].type
        return self.node("copy", [x], [typed(old.shape, old.dtype)], fn="clone", transposed=transposed)[0]

    def cat(self, parts: Sequence[int], dim: int, *, shape: Shape | None = None) -> int:
        first = self.values[parts[0]].type
        if shape is None:
            dim %= len(first.shape)
            total = sum(self.shape(p)[dim] for p in parts)
            shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
        return self.node("copy", parts, [typed(shape, first.dtype)], fn="cat", dim=dim)[0]

    def pad(self, x: int, shape: Shape) -> int:
        return self.node("copy", [x], [typed(shape, self.values[x].type.dtype)], fn="constant_pad_nd")[0]

    def reshape(self, x: int, *shape: int) -> int:
        return self.view(x, typed(shape, self.values[x].type.dtype))

    def permute(self, x: int, *shape: int) -> int:
        """A transposed view whose resulting shape is ``shape``."""
        return self.view(x, typed(shape, self.values[x].type.dtype, "strided"), fn="transpose")

    def slice(self, x: int, *shape: int) -> int:
        return self.view(x, typed(shape, self.values[x].type.dtype, "strided"), fn="slice")

    def expand_view(self, x: int, *shape: int) -> int:
        return self.view(x, typed(shape, self.values[x].type.dtype, "strided"), fn="expand")

    def split(self, x: int, widths: Sequence[int], dim: int = -1) -> tuple[int, ...]:
        """Views of consecutive pieces of ``x`` along ``dim``."""
        whole = self.values[x].type
        dim %= len(whole.shape)
        kind = self.values[x].kind
        outs = [
            self.value(
                typed((*whole.shape[:dim], w, *whole.shape[dim + 1 :]), whole.dtype, "strided"), kind, alias=x
            )
            for w in widths
        ]
        return self.node("view", [x], outs, fn="split", dim=dim)

    def unbind(self, x: int) -> tuple[int, ...]:
        """The slices of ``x`` along its first dim, as views."""
        first, *rest = self.shape(x)
        piece = typed(tuple(rest), self.values[x].type.dtype, "strided")
        return self.node("view", [x], [self.value(piece, alias=x) for _ in range(first)], fn="unbind")


class Net(Operators):
    """The layers of the zoo's networks: norms, embeddings, attention, convolutions and losses."""

    def rms_norm(self, x: int, name: str, *, affine: bool = True) -> int:
        if self.fused_norms:
            return self._norm(x, name, "rms_norm", ("weight",) if affine else (), 1)
        self._path.append(name)
        wide = self.cast(x, FP32)
        mean = self.reduce("mean", self.pointwise("pow", wide), (-1,), keepdim=True)
        scale = self.pointwise("rsqrt", self.pointwise("add", mean, scalars=1))
        out = self.cast(self.mul(wide, scale), self.dt)
        out = self.mul(self.weight("weight", self.shape(x)[-1]), out) if affine else out
        self._path.pop()
        return out

    def layer_norm(self, x: int, name: str, *, affine: bool = True, bias: bool = True) -> int:
        names = (("weight", "bias") if bias else ("weight",)) if affine else ()
        return self._norm(x, name, "layer_norm", names, 2)

    def _norm(self, x: int, name: str, fn: str, params: tuple[str, ...], num_stats: int) -> int:
        shape = self.values[x].type.shape
        c, n = shape[-1], math.prod(shape[:-1])
        self._path.append(name)
        operands = [x, *(self.weight(p, c) for p in params)]
        outs = [typed(shape, self.values[x].type.dtype)]
        if self.train:
            outs += [typed((n,), FP32)] * num_stats
        out = self.node("norm", operands, outs, fn=fn, n=n, c=c, affine=bool(params))[0]
        self._path.pop()
        return out

    def softmax(self, x: int, *, dt: DType | None = None, log: bool = False) -> int:
        shape = self.shape(x)
        out = typed(shape, dt or self.values[x].type.dtype)
        return self.node("softmax", [x], [out], n=math.prod(shape[:-1]), c=shape[-1], log=log)[0]

    def reduce(self, fn: str, x: int, dims: Sequence[int], *, keepdim: bool = False) -> int:
        old = self.values[x].type
        axes = {d % len(old.shape) for d in dims}
        shape = tuple(1 if i in axes else s for i, s in enumerate(old.shape) if keepdim or i not in axes)
        return self.node(
            "reduce", [x], [typed(shape, old.dtype)], fn=fn, dims=tuple(sorted(axes)), keepdim=keepdim
        )[0]

    def embedding(self, indices: int, rows: int, cols: int, name: str) -> tuple[int, int]:
        """Looked-up rows and the table itself (for tying)."""
        self._path.append(name)
        table = self.weight("weight", rows, cols)
        out = self.lookup(table, indices)
        self._path.pop()
        return out, table

    def lookup(self, table: int, indices: int) -> int:
        rows, cols = self.shape(table)
        shape = self.shape(indices)
        out = typed((*shape, cols), self.values[table].type.dtype)
        return self.node("embedding", [table, indices], [out], rows=rows, cols=cols, num=math.prod(shape))[0]

    def gather(self, fn: str, inputs: Sequence[int], *shape: int, dt: DType | None = None, **attrs: Any) -> int:
        out = typed(shape, dt or self.values[inputs[0]].type.dtype)
        return self.node("gather", inputs, [out], fn=fn, num=math.prod(shape), **attrs)[0]

    def scatter(self, fn: str, inputs: Sequence[int], *shape: int, dt: DType | None = None, **attrs: Any) -> int:
        out = typed(shape, dt or self.values[inputs[0]].type.dtype)
        return self.node("scatter", inputs, [out], fn=fn, **attrs)[0]

    def stacked(self, x: int) -> int:
        """Keep every iteration's ``x``, as a cache does."""
        self.values[x] = replace(self.values[x], count=self.repeats)
        return x

    def buffer(self, name: str, *shape: int, dt: DType | None = None) -> int:
        """A resident tensor that is no parameter: an index table, a mask, running statistics."""
        return self.value(typed(shape, dt or self.dt), Kind.BUFFER, count=self.repeats, name=self._dotted(name))

    def fill(self, fn: str, *shape: int, dt: DType | None = None) -> int:
        return self.node("fill", [], [typed(shape, dt or self.dt)], fn=fn)[0]

    def attention(
        self,
        q: int,
        k: int,
        v: int,
        *,
        causal: bool,
        window: int | None = None,
        mask: int | None = None,
        sinks: int | None = None,
        softcap: bool = False,
    ) -> int:
        """``scaled_dot_product_attention`` over [b, h, s, d]; fewer key heads than query heads is grouped-query."""
        b, h, s, d = self.shape(q)
        _, hkv, skv, _ = self.shape(k)
        dv = self.shape(v)[-1]
        attrs: dict[str, Any] = {"b": b, "h": h, "hkv": hkv, "s": s, "skv": skv, "d": d, "causal": causal}
        if dv != d:
            attrs["dv"] = dv
        if window is not None and window < skv:
            attrs["window"] = window
        operands = [q, k, v]
        for name, extra in (("mask", mask), ("sinks", sinks)):
            if extra is not None:
                operands.append(extra)
                attrs[name] = True
        if softcap:
            attrs["softcap"] = True
        outs = [typed((b, h, s, dv), self.values[q].type.dtype, "strided")]
        if self.train:
            outs.append(typed((b, h, s), FP32))
            attrs["lse"] = True
        return self.node("attention", operands, outs, **attrs)[0]

    def heads(self, x: int, num: int, d: int) -> int:
        """[b, s, num·d] seen as [b, num, s, d]."""
        b, s, _ = self.shape(x)
        return self.permute(self.reshape(x, b, s, num, d), b, num, s, d)

    def unheads(self, x: int) -> int:
        """[b, h, s, d] seen as [b, s, h·d]; attention writes it so that this costs nothing."""
        b, h, s, d = self.shape(x)
        return self.reshape(self.permute(x, b, s, h, d), b, s, h * d)

    # Convolutional layers.

    def conv(
        self,
        x: int,
        o: int,
        kernel: int | Shape,
        name: str,
        *,
        stride: int | Shape = 1,
        padding: int | Shape | None = None,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
        transposed: bool = False,
        output_padding: int = 0,
    ) -> int:
        """``F.conv*d`` over [n, c, *spatial]; ``padding=None`` keeps the size at stride 1."""
        n, c, *spatial = self.shape(x)
        rank = len(spatial)
        ks, st = _tuple(kernel, rank), _tuple(stride, rank)
        pads = tuple(dilation * (k - 1) // 2 for k in ks) if padding is None else _tuple(padding, rank)
        if transposed:
            out = tuple(
                (i - 1) * s - 2 * p + k + output_padding for i, s, p, k in zip(spatial, st, pads, ks, strict=True)
            )
        else:
            out = tuple(
                (i + 2 * p - dilation * (k - 1) - 1) // s + 1 for i, s, p, k in zip(spatial, st, pads, ks, strict=True)
            )
        self._path.append(name)
        weight = self.weight("weight", *((c, o // groups) if transposed else (o, c // groups)), *ks)
        operands = [x, weight, *([self.weight("bias", o)] if bias else [])]
        made = self.node(
            "conv",
            operands,
            [typed((n, o, *out), self.dt)],
            n=n,
            c=c,
            o=o,
            spatial=tuple(spatial),
            kernel=ks,
            stride=st,
            padding=pads,
            dilation=(dilation,) * rank,
            groups=groups,
            transposed=transposed,
            which="fwd",
            out_spatial=out,
            bias=bias,
        )[0]
        self._path.pop()
        return made

    def batch_norm(self, x: int, name: str) -> int:
        """Batch statistics in training, running ones otherwise; [n, c, …] or [n, c]."""
        shape = self.shape(x)
        c, n = shape[1], math.prod(shape) // shape[1]
        self._path.append(name)
        operands = [x, self.weight("weight", c), self.weight("bias", c)]
        operands += [self.buffer(stat, c) for stat in ("running_mean", "running_var")]
        seen = self.buffer("num_batches_tracked", dt=INT64)
        if self.train:
            self.node("pointwise", [seen], [seen], fn="add", inplace=True, scalars=1)
        outs = [self.values[x].type] + ([typed((c,), FP32)] * 2 if self.train else [])
        attrs: dict[str, Any] = {
            "fn": "batch_norm",
            "n": c,
            "c": n,
            "affine": True,
            "training": self.train,
            "channels": c,
        }
        out = self.node("norm", operands, outs, **attrs)[0]
        self._path.pop()
        return out

    def group_norm(self, x: int, groups: int, name: str) -> int:
        shape = self.shape(x)
        b, c = shape[0], shape[1]
        self._path.append(name)
        outs = [typed(shape, self.dt)] + ([typed((b, groups), FP32)] * 2 if self.train else [])
        out = self.node(
            "norm",
            [x, self.weight("weight", c), self.weight("bias", c)],
            outs,
            fn="group_norm",
            n=b * groups,
            c=math.prod(shape) // (b * groups),
            affine=True,
            channels=c,
        )[0]
        self._path.pop()
        return out

    def pool(self, fn: str, x: int, kernel: int, stride: int, padding: int = 0) -> int:
        n, c, *spatial = self.shape(x)
        out = tuple((i + 2 * padding - kernel) // stride + 1 for i in spatial)
        rank = len(spatial)
        outs = [typed((n, c, *out), self.dt)]
        if fn == "max" and self.train:
            outs.append(typed((n, c, *out), INT64))
        return self.node(
            "pool",
            [x],
            outs,
            fn=f"{fn}_pool{rank}d",
            kernel=(kernel,) * rank,
            stride=(stride,) * rank,
            spatial=tuple(spatial),
            out_spatial=out,
            n=n,
            c=c,
            which="fwd",
        )[0]

    def resize(self, x: int, *spatial: int, fn: str = "upsample_nearest2d") -> int:
        n, c = self.shape(x)[:2]
        return self.node("resize", [x], [typed((n, c, *spatial), self.dt)], fn=fn, which="fwd")[0]

    # Losses: each returns a scalar.

    def cross_entropy(self, logits: int, labels: int) -> int:
        """``F.cross_entropy`` as eager runs it: log-softmax, then the negative log likelihood."""
        n, c = self.shape(logits)
        logs = self.softmax(logits, log=True)
        dt = self.values[logits].type.dtype
        return self.node(
            "loss", [logs, labels], [typed((), dt), typed((), dt)], fn="nll_loss", n=n, c=c, reduction="mean"
        )[0]

    def mse(self, prediction: int, target: int) -> int:
        c = self.shape(prediction)[-1]
        out = typed((), self.values[prediction].type.dtype)
        return self.node(
            "loss",
            [prediction, target],
            [out],
            fn="mse_loss",
            n=self.values[prediction].type.numel // c,
            c=c,
            reduction="mean",
        )[0]


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape elementwise ops give to operands of these shapes."""
    rank = max(len(s) for s in shapes)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(max(dims) if min(dims) else 0 for dims in zip(*padded, strict=True))


def _tuple(value: int | Shape, rank: int) -> Shape:
    return (value,) * rank if isinstance(value, int) else value
