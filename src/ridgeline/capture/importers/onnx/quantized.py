"""Quantization: Q and DQ nodes, and ops on integers with scales."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.capture.importers.onnx.elementwise import _ELEMENT_OF, converted
from ridgeline.capture.importers.onnx.neural import convolved
from ridgeline.capture.importers.onnx.registry import Call, op
from ridgeline.capture.importers.onnx.shapes import _axis

_RANGES = {2: (0, 255), 3: (-128, 127), 4: (0, 65535), 5: (-32768, 32767), 21: (0, 15), 22: (-8, 7), 25: (0, 3),
           26: (-2, 1)}  # fmt: skip


def _spread(n: Call, scale: Any, x: Any) -> Any:
    """A scale or zero point along its axis, or one for each block of it, in the shape of ``x``."""
    if scale is None or scale.dim() == 0 or scale.numel() == 1:
        return scale if scale is None or scale.dim() == 0 else scale.reshape(())
    axis, block = _axis(n, n.integer("axis", 1), x.dim()), n.integer("block_size")
    if scale.dim() == 1 and not block:
        shape = [1] * x.dim()
        shape[axis] = scale.shape[0]
        return scale.reshape(shape)
    if block:
        return torch.repeat_interleave(scale, block, axis).narrow(axis, 0, x.shape[axis])
    return scale


def _element(n: Call, zero: Any, index: int) -> int:
    """The ONNX type quantized to: 4-bit types are told apart by what is declared, their carrier is wider."""
    if n.integer("output_dtype"):
        return n.integer("output_dtype")
    if zero is None:
        return 2
    name = n.node.inputs[index] if len(n.node.inputs) > index else ""
    declared = n.evaluate.elements.get(name)
    return declared or _ELEMENT_OF[zero.dtype]


@op("QuantizeLinear")
def _quantize(n: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    element = _element(n, zero, 2)
    wide = x.to(torch.float32)
    by = _spread(n, scale, x).to(torch.float32)
    scaled = wide / by
    if element in _RANGES:
        low, high = _RANGES[element]
        out = torch.round(scaled)
        if zero is not None:
            out = out + _spread(n, zero, x).to(torch.float32)
        out = torch.clamp(out, low, high)
        return converted(out.to(torch.int32), element, True, n.where)
    return converted(scaled, element, bool(n.integer("saturate", 1)), n.where)


@op("DequantizeLinear")
def _dequantize(n: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    by = _spread(n, scale, x)
    if by.dtype is torch.float8_e8m0fnu:
        by = by.to(torch.float32)
    wide = x.to(torch.float32) if x.dtype is not torch.int32 else x.to(torch.float64)
    if zero is not None:
        wide = wide - _spread(n, zero, x).to(wide.dtype)
    dtype = scale.dtype if scale.dtype is not torch.float8_e8m0fnu else torch.float32
    return (wide * by.to(wide.dtype)).to(dtype)


@op("DynamicQuantizeLinear")
def _dynamic_quantize(n: Call, x: Any) -> Any:
    low, high = torch.clamp(torch.amin(x), max=0), torch.clamp(torch.amax(x), min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.clamp(torch.round(-low / scale), 0, 255)
    out = torch.clamp(torch.round(x / scale) + zero, 0, 255)
    return out.to(torch.uint8), scale, zero.to(torch.uint8)


def _centered(n: Call, x: Any, zero: Any, axis: int) -> Any:
    """Integers less their zero point, as floats that hold products of 8 bits exactly."""
    wide = x.to(torch.float64)
    if zero is None:
        return wide
    zero = zero.to(torch.float64)
    if zero.dim() == 1 and zero.numel() > 1:
        shape = [1] * x.dim()
        shape[axis] = zero.numel()
        zero = zero.reshape(shape)
    elif zero.numel() == 1:
        zero = zero.reshape(())
    return wide - zero


@op("MatMulInteger")
def _matmul_integer(n: Call, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    out = torch.matmul(_centered(n, a, a_zero, a.dim() - 2), _centered(n, b, b_zero, b.dim() - 1))
    return out.to(torch.int32)


@op("ConvInteger")
def _conv_integer(n: Call, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None) -> Any:
    return convolved(n, _centered(n, x, x_zero, 1), _centered(n, w, w_zero, 0)).to(torch.int32)


def _requantized(out: Any, by: Any, scale: Any, zero: Any) -> Any:
    out = torch.round(out * (by.to(torch.float64) / scale.to(torch.float64))) + zero.to(torch.float64)
    if zero.dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16):
        limit = torch.iinfo(zero.dtype)
        return torch.clamp(out, limit.min, limit.max).to(torch.int32).to(zero.dtype)
    return converted(out.to(torch.float32), _ELEMENT_OF[zero.dtype], True, "")


@op("QLinearMatMul")
def _qlinear_matmul(n: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any,
                    y_zero: Any) -> Any:  # fmt: skip
    out = torch.matmul(_centered(n, a, a_zero, a.dim() - 2), _centered(n, b, b_zero, b.dim() - 1))
    by = a_scale.to(torch.float64) * b_scale.to(torch.float64)
    return _requantized(out, by.reshape(()) if by.numel() == 1 else by, y_scale.reshape(()), y_zero.reshape(()))


@op("QLinearConv")
def _qlinear_conv(n: Call, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, y_scale: Any,
                  y_zero: Any, bias: Any = None) -> Any:  # fmt: skip
    out = convolved(n, _centered(n, x, x_zero, 1), _centered(n, w, w_zero, 0))
    shape = [1, -1] + [1] * (x.dim() - 2)
    if bias is not None:
        out = out + bias.to(torch.float64).reshape(shape)
    by = x_scale.to(torch.float64).reshape(()) * w_scale.to(torch.float64)
    return _requantized(out, by.reshape(shape) if by.numel() > 1 else by.reshape(()), y_scale.reshape(()),
                        y_zero.reshape(()))  # fmt: skip
