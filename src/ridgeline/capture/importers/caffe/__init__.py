"""Caffe networks: the definition is a prototxt, the weights are a caffemodel beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ridgeline.capture.importers import wire
from ridgeline.capture.importers.caffe.layers import LAYERS, LEFT_OUT, SOURCES, Params
from ridgeline.capture.importers.caffe.text import Message, parsed
from ridgeline.capture.importers.program import Context, Imported, OpRow
from ridgeline.capture.importers.weights import TensorRef, checked_shape, mapped, view_of
from ridgeline.capture.inputs import spec
from ridgeline.errors import ModelFileError, RidgelineError, nearest

V1_TYPES = {
    1: "Accuracy", 2: "BNLL", 3: "Concat", 4: "Convolution", 5: "Data", 6: "Dropout", 7: "EuclideanLoss", 8: "Flatten",
    9: "HDF5Data", 10: "HDF5Output", 11: "Im2col", 12: "ImageData", 13: "InfogainLoss", 14: "InnerProduct", 15: "LRN",
    16: "MultinomialLogisticLoss", 17: "Pooling", 18: "ReLU", 19: "Sigmoid", 20: "Softmax", 21: "SoftmaxWithLoss",
    22: "Split", 23: "TanH", 24: "WindowData", 25: "Eltwise", 26: "Power", 27: "SigmoidCrossEntropyLoss",
    28: "HingeLoss", 29: "MemoryData", 30: "ArgMax", 31: "Threshold", 32: "DummyData", 33: "Slice", 34: "MVN",
    35: "AbsVal", 36: "Silence", 37: "ContrastiveLoss", 38: "Exp", 39: "Deconvolution",
}  # fmt: skip
V1_NAMES = {name.lower(): name for name in V1_TYPES.values()} | {"softmaxloss": "SoftmaxWithLoss"}
V0_NAMES = {"conv": "Convolution", "pool": "Pooling", "innerproduct": "InnerProduct", "relu": "ReLU", "lrn": "LRN",
            "softmax": "Softmax", "dropout": "Dropout", "concat": "Concat", "softmax_loss": "SoftmaxWithLoss",
            "accuracy": "Accuracy", "data": "Data", "sigmoid": "Sigmoid", "tanh": "TanH", "flatten": "Flatten",
            "split": "Split", "eltwise": "Eltwise"}  # fmt: skip
Shapes = Mapping[str, Sequence[int]]


def load_prototxt(path: Path, weights: Path | None = None, shapes: Shapes | None = None) -> Imported:
    """The network of a definition; ``shapes`` are those of inputs that the file leaves to a database."""
    view = mapped(path)
    message = parsed(bytes(view).decode("utf-8", "replace"), path.name)  # comments may be in any encoding
    beside = path.with_suffix(".caffemodel")
    blobs = read_blobs(weights or beside) if weights is not None or beside.exists() else None
    net = _Net(path.name, message, blobs, dict(shapes or {}))
    made = Imported(path.stem if path.stem != "deploy" else path.resolve().parent.name, "caffe", net, net.inputs,
                    net.outputs, net.refs, buffers=net.buffers)  # fmt: skip
    made.survey = net.survey
    return made


def load_caffemodel(path: Path, **options: Any) -> Imported:
    """The network of weights, by the definition beside them."""
    found = [p for p in (path.with_suffix(".prototxt"), path.parent / "deploy.prototxt") if p.exists()]
    found = found or sorted(path.parent.glob("*.prototxt"))
    if len(found) != 1 and not (found and found[0].stem in (path.stem, "deploy")):
        raise ModelFileError(f"{path.name} holds weights; its network is a prototxt, of which {len(found)} lie beside "
                             f"it: put it there as {path.stem}.prototxt")  # fmt: skip
    return load_prototxt(found[0], path, **options)


def read_blobs(path: Path) -> dict[str, list[TensorRef]]:
    """Every layer's weights by its name."""
    where = path.name
    found = wire.fields(mapped(path), where, {2, 100})
    out: dict[str, list[TensorRef]] = {}
    for number, name_at, blobs_at in ((100, 1, 7), (2, 4, 6)):
        for body in found.get(number, ()):
            if not isinstance(body, memoryview):
                raise ModelFileError(f"{where}: a layer is a number: the file is damaged")
            layer = wire.fields(body, where, {1, 4, 6, 7, 50} if number == 2 else {1, 7})
            name, blobs = wire.text(layer, name_at), layer.get(blobs_at, [])
            if number == 2 and 1 in layer and isinstance(layer[1][-1], memoryview) and not blobs:
                inner = wire.fields(layer[1][-1], where, {1, 50})
                name, blobs = wire.text(inner, 1), inner.get(50, [])
            if blobs:
                out[name] = [_blob(blob, f"{where}: layer {name!r}", f"{name}.{i}") for i, blob in enumerate(blobs)]
    return out


def _blob(view: Any, where: str, name: str) -> TensorRef:
    if not isinstance(view, memoryview):
        raise ModelFileError(f"{where}: a blob is a number: the file is damaged")
    found = wire.fields(view, where, {1, 2, 3, 4, 5, 7, 8})
    if 7 in found and isinstance(found[7][-1], memoryview):
        dims = wire.integers(wire.fields(found[7][-1], where), 1, where)
    else:
        dims = [wire.integer(found, n) for n in (1, 2, 3, 4)]
    shape = checked_shape(dims, where)
    for number, dtype in ((5, torch.float32), (8, torch.float64)):
        parts = found.get(number, [])
        if not parts:
            continue
        if any(not isinstance(part, memoryview) for part in parts):
            raise ModelFileError(f"{where}: data of a blob is a number: the file is damaged")
        data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

        def read(data: memoryview = data, dtype: torch.dtype = dtype) -> torch.Tensor:
            return view_of(data, dtype, shape, where).to(torch.float32)

        return TensorRef(name, torch.float32, shape, read)
    raise ModelFileError(f"{where}: a blob without data: the file is damaged")


class _Net:
    """The layers of a network in order, run on what is given."""

    def __init__(
        self, where: str, message: Message, blobs: Mapping[str, list[TensorRef]] | None, shapes: Shapes
    ) -> None:
        self.where, self.blobs, self.given_shapes = where, blobs, dict(shapes)
        self.refs: dict[str, TensorRef] = {}
        self.buffers: set[str] = set()
        self.inputs: dict[str, Any] = {}
        self.layers = self._layers(message)
        self.survey = self._survey()
        self._inputs(message)
        missing = [row for row in self.survey if row.why]
        if missing:
            self.outputs: list[str] = []
            return
        # Weights have the shapes that the layers say: run them once on nothing
        self.ctx: Context | None = None
        made = self._run({name: torch.empty(_fixed(value), device="meta") for name, value in self.inputs.items()})
        read = {name for layer in self.layers for name in layer.message.get("bottom", [])}
        self.inputs = {name: value for name, value in self.inputs.items() if name in read}
        # A blob that a later layer reads is no output; one changed in place counts from the last change on
        runs = [(i, layer) for i, layer in enumerate(self.layers) if layer.kind not in SOURCES]
        last_write = {top: i for i, layer in runs for top in layer.message.get("top", [])}
        self.outputs = []
        for name, at in last_write.items():
            later = any(name in layer.message.get("bottom", []) for layer in self.layers[at + 1 :])
            if name in made and not later:
                self.outputs.append(name)
        if not self.outputs:
            raise ModelFileError(f"{where}: no layer makes a result: it is no network")

    def _layers(self, message: Message) -> list[Params]:
        entries: list[tuple[Message, int]] = [(m, 2) for m in message.get("layer", [])]
        entries += [(m, 1) for m in message.get("layers", [])]
        if not entries:
            raise ModelFileError(f"{self.where} has no layers: a solver names its network in another file")
        out: list[Params] = []
        for entry, version in entries:
            if not isinstance(entry, dict):
                raise ModelFileError(f"{self.where}: a layer is no message: it is damaged")
            name, kind = str(entry.get("name", [""])[-1]), entry.get("type", [""])[-1]
            if version == 1 and isinstance(entry.get("layer", [None])[-1], dict):
                entry = _upgraded(entry)
                name, kind = str(entry["name"][-1]), entry["type"][-1]
            elif version == 1 or isinstance(kind, int):
                kind = V1_TYPES.get(kind, str(kind)) if isinstance(kind, int) else (
                    V1_NAMES.get(str(kind).replace("_", "").lower(), str(kind)))  # fmt: skip
            is_loss = kind in LEFT_OUT or (kind == "Python" and "loss_weight" in entry)
            if self._is_in(entry) and not is_loss:
                out.append(Params(name, str(kind), entry, self._weight, self.where))
        # A scale right after a norm is its own
        fused: list[Params] = []
        for layer in out:
            before = fused[-1] if fused else None
            if (
                layer.kind == "Scale" and before is not None and before.kind == "BatchNorm"
                and layer.message.get("bottom") == before.message.get("top") and "_scale" not in before.message
                and layer.of("scale_param").count("axis", 1) == 1 and layer.count("num_axes", 1) == 1
                and (layer.message.get("top") == before.message.get("top") or sum(
                    before.message["top"][0] in other.message.get("bottom", []) for other in out) == 1)
            ):  # fmt: skip
                before.message = {**before.message, "_scale": [layer], "top": layer.message.get("top", [])}
            else:
                fused.append(layer)
        return fused

    @staticmethod
    def _is_in(entry: Message) -> bool:
        """Whether a layer is part of the network when it is tested."""
        phases = [rule.get("phase", [None])[-1] for rule in entry.get("include", []) if isinstance(rule, dict)]
        if phases and not any(phase in ("TEST", 1, None) for phase in phases):
            return False
        excluded = [rule.get("phase", [None])[-1] for rule in entry.get("exclude", []) if isinstance(rule, dict)]
        return not any(phase in ("TEST", 1) for phase in excluded)

    def _survey(self) -> list[OpRow]:
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            found.setdefault(layer.kind, []).append(layer.name)
            if "_scale" in layer.message:
                found.setdefault("Scale", []).append(layer.message["_scale"][0].name)
        return [OpRow(kind, len(names), "" if kind in LAYERS or kind in SOURCES else
                      f"not a layer that is known here{nearest(kind, LAYERS)}", names[0])
                for kind, names in sorted(found.items())]  # fmt: skip

    def _inputs(self, message: Message) -> None:
        names = [str(name) for name in message.get("input", [])]
        dims = message.get("input_dim", [])
        shapes = [m.get("dim", []) for m in message.get("input_shape", []) if isinstance(m, dict)]
        for i, name in enumerate(names):
            shape = shapes[i] if i < len(shapes) else dims[4 * i : 4 * i + 4]
            self._input(name, shape)
        for layer in self.layers:
            if layer.kind not in SOURCES:
                continue
            tops = [str(t) for t in layer.message.get("top", [])]
            given = layer.of("input_param" if layer.kind == "Input" else "dummy_data_param").section
            listed = [m.get("dim", []) for m in given.get("shape", []) if isinstance(m, dict)]
            if not listed and "num" in given:
                sides = [given[k] for k in ("num", "channels", "height", "width") if k in given]
                listed = [[side[min(i, len(side) - 1)] for side in sides] for i in range(len(given["num"]))]
            if not listed and layer.kind not in ("Input", "DummyData"):
                listed = self._read_shapes(layer)
            for i, top in enumerate(tops):
                self._input(top, listed[min(i, len(listed) - 1)] if listed else [])

    def _read_shapes(self, layer: Params) -> list[list[int]]:
        """What a data layer says of its pictures: the batch, and the side they are cropped to."""
        sections = ("data_param", "image_data_param", "hdf5_data_param", "window_data_param")
        batch = next((layer.of(s).count("batch_size") for s in sections if layer.of(s).get("batch_size")), 0)
        if layer.kind == "MemoryData":
            layer.of("memory_data_param")
            return [
                [layer.count(k) for k in ("batch_size", "channels", "height", "width")],
                [layer.count("batch_size")],
            ]
        crop = layer.of("transform_param").count("crop_size") or layer.of("window_data_param").count("crop_size")
        return [[batch, 3, crop, crop], [batch]] if batch and crop else []

    def _input(self, name: str, shape: Sequence[Any]) -> None:
        shape = self.given_shapes.get(name, shape)
        try:
            dims = [int(d) for d in shape]
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelFileError(f"{self.where}: the shape of input {name!r} is no list of numbers") from error
        if not dims:
            wanted = any(name in layer.message.get("bottom", []) for layer in self.layers)
            if not wanted or name == "label":
                return
            raise ModelFileError(f"{self.where}: the shape of {name!r} lies in a database, not in the file: import the "
                                 f"deploy.prototxt, or load(path, shapes={{{name!r}: (1, 3, 224, 224)}})")  # fmt: skip
        checked_shape(dims, f"{self.where}: input {name!r}")
        self.inputs[name] = spec(dims, "fp32")

    def _weight(
        self, layer: Params, what: str, index: int, shape: tuple[int, ...], scaled_by: int | None = None
    ) -> Any:
        name = f"{layer.name.replace('/', '.')}.{what}"
        if self.ctx is not None:
            return self.ctx.weight(name)
        if name not in self.refs:
            if what in ("mean", "var"):
                self.buffers.add(name)
            self.refs[name] = self._ref(layer, name, index, shape, scaled_by)
        elif self.refs[name].shape != tuple(shape):
            raise layer.wrong(f"shares {what} of shape {list(self.refs[name].shape)} where {list(shape)} is wanted")
        return torch.empty(shape, device="meta")

    def _ref(self, layer: Params, name: str, index: int, shape: tuple[int, ...], scaled_by: int | None) -> TensorRef:
        checked_shape(list(shape), f"{self.where}: weight {name!r}")
        if self.blobs is None:
            return TensorRef(name, torch.float32, shape, lambda: torch.empty(shape, device="meta"))
        stored = self.blobs.get(layer.name)
        if stored is None or len(stored) <= index:
            raise layer.wrong(f"the caffemodel has no blob {index} for it: it belongs to another network")
        ref = stored[index]
        if ref.numel != torch.Size(shape).numel():
            raise layer.wrong(
                f"blob {index} of the caffemodel has shape {list(ref.shape)} where {list(shape)} is wanted"
            )
        factor = stored[scaled_by] if scaled_by is not None and len(stored) > scaled_by else None

        def read() -> torch.Tensor:
            found = ref.read().reshape(shape)
            if factor is None:
                return found
            by = float(factor.read().reshape(-1)[0])
            return found / by if by else torch.zeros_like(found)

        return TensorRef(name, torch.float32, shape, read)

    def __call__(self, ctx: Context, inputs: Mapping[str, Any]) -> Sequence[Any]:
        self.ctx = ctx
        made = self._run(dict(inputs))
        return [made[name] for name in self.outputs]

    def _run(self, env: dict[str, Any]) -> dict[str, Any]:
        for layer in self.layers:
            if layer.kind in SOURCES:
                continue
            bottoms = [str(b) for b in layer.message.get("bottom", [])]
            for name in bottoms:
                if name not in env:
                    raise layer.wrong(f"reads {name!r}, which no layer before it makes")
            fn = LAYERS.get(layer.kind)
            if fn is None:
                raise layer.wrong(f"is not a layer that is known here{nearest(layer.kind, LAYERS)}; replace it by "
                                  "known layers, or import the network without it")  # fmt: skip
            if self.ctx is not None and self.ctx.trace is not None:
                self.ctx.trace.scope = layer.name.replace("/", ".")
            try:
                out = fn(layer, *[env[name] for name in bottoms])
            except RidgelineError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError,
                    ZeroDivisionError) as error:  # fmt: skip
                told = next(iter(str(error).splitlines()), "") or type(error).__name__
                shapes = ", ".join(str(list(env[name].shape)) for name in bottoms)
                raise layer.wrong(f"does not take {shapes or 'nothing'}: {told[:200]}") from error
            tops = [str(t) for t in layer.message.get("top", [])]
            env.update(zip(tops, out if isinstance(out, tuple) else (out,)))
        return env


def _fixed(value: Any) -> tuple[int, ...]:
    return tuple(int(d) for d in value.shape)


def _upgraded(entry: Message) -> Message:
    """A layer as the oldest files write it: one message of all parameters inside of another."""
    old = entry["layer"][-1]
    kind = str(old.get("type", [""])[-1])
    renamed = {"kernelsize": "kernel_size", "biasterm": "bias_term"}
    section = {renamed.get(key, key): value for key, value in old.items()}
    names = ("convolution_param", "pooling_param", "inner_product_param", "lrn_param", "dropout_param", "concat_param")
    return {**entry, "name": old.get("name", [""]), "type": [V0_NAMES.get(kind, kind)], **{n: [section] for n in names}}
