"""Files of weights without a program: GGUF, safetensors and Hugging Face configurations, by their headers alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

from ridgeline.capture.importers.program import Imported, OpRow
from ridgeline.capture.importers.weights import TensorRef, checked_shape, mapped, view_of
from ridgeline.errors import ModelFileError

MAX_HEADER_BYTES = 100_000_000
SAFE_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
}  # fmt: skip
GGUF_BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Block types of ggml: elements in a block and the bytes it takes."""


class Header(Imported):
    """Weights with shapes and no program: what runs them is a configuration, or a model of the zoo."""

    def __init__(self, name: str, form: str, refs: dict[str, TensorRef], num_bytes: int, facts: dict[str, Any]) -> None:
        super().__init__(name, form, _no_program, {}, (), {})
        self.refs, self.facts, self.num_bytes = refs, facts, num_bytes
        self.stored: dict[str, tuple[tuple[int, ...], float]] = {}  # shapes and bytes in the file
        kinds: dict[str, list[TensorRef]] = {}
        for ref in refs.values():
            kinds.setdefault(str(ref.dtype).removeprefix("torch."), []).append(ref)
        self.survey = [OpRow(f"tensors of {kind}", len(found)) for kind, found in sorted(kinds.items())]

    @property
    def num_params(self) -> int:
        return sum(ref.numel for ref in self.refs.values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _no_run(self)

    @property
    def input_specs(self) -> tuple[Any, ...]:
        raise _no_run(self)


def _no_program(*_: Any) -> Any:
    raise ModelFileError("weights without a program cannot be run")


def _no_run(model: Header) -> ModelFileError:
    return ModelFileError(f"{model.import_name} holds weights and no program: put its config.json beside it and give "
                          "the folder, or name the network of the zoo")  # fmt: skip


def safetensors_refs(path: Path) -> tuple[dict[str, TensorRef], int]:
    """Every tensor of a file, by the format's rules: no gaps, no overlaps, a header of at most 100 MB."""
    view, where = mapped(path), path.name
    if len(view) < 8:
        raise ModelFileError(f"{where} is cut short: a safetensors file begins with the length of its header")
    (size,) = struct.unpack("<Q", view[:8])
    if size > min(MAX_HEADER_BYTES, len(view) - 8):
        raise ModelFileError(f"{where}: a header of {size:,} bytes does not fit the file: it is damaged or cut short")
    try:
        header = json.loads(bytes(view[8 : 8 + size]).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where}: the header is not JSON: the file is damaged") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{where}: the header is no table of tensors: the file is damaged")
    refs: dict[str, TensorRef] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = SAFE_TYPES[entry["dtype"]], [int(d) for d in entry["shape"]]
            first, last = (int(v) for v in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{where}: tensor {name[:80]!r} has a type, shape or place that cannot be") from error
        told = f"{where}: tensor {name[:80]!r}"
        dims = checked_shape(shape, told)
        if not 0 <= first <= last <= len(view) - 8 - size or last - first != prod(dims) * dtype.itemsize:
            raise ModelFileError(f"{told}: its data does not fit the file: it is damaged or cut short")
        spans.append((first, last))
        data = view[8 + size + first : 8 + size + last]
        refs[name] = TensorRef(name, dtype, dims, lambda d=data, t=dtype, s=dims, w=told: view_of(d, t, s, w))  # type: ignore[misc]
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise ModelFileError(f"{where}: tensors overlap or leave gaps: the file is damaged")
        end = last
    return refs, end


def load_safetensors(path: Path, **_: Any) -> Any:
    """The tensors of a file; with a config.json beside it, the network too."""
    if (path.parent / "config.json").exists():
        return load_folder(path.parent)
    refs, num_bytes = safetensors_refs(path)
    return Header(path.stem, "safetensors", refs, num_bytes, {})


def load_gguf(path: Path, **_: Any) -> Header:
    """The tensors and facts of a GGUF file."""
    return _Gguf(mapped(path), path.name).header(path.stem)


class _Gguf:
    def __init__(self, view: memoryview, where: str) -> None:
        self.view, self.where, self.at = view, where, 4

    def take(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        if self.at + size > len(self.view):
            raise ModelFileError(f"{self.where} ends inside its header: it is cut short")
        (value,) = struct.unpack_from("<" + code, self.view, self.at)
        self.at += size
        return value

    def text(self) -> str:
        size = self.take("Q")
        if size > len(self.view) - self.at:
            raise ModelFileError(f"{self.where}: a text reaches past the end: the file is cut short or damaged")
        found = bytes(self.view[self.at : self.at + size]).decode("utf-8", "replace")
        self.at += size
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        codes = "BbHhIif?"
        if kind < 8:
            return self.take(codes[kind])
        if kind == 8:
            return self.text()
        if kind in (10, 11, 12):
            return self.take({10: "Q", 11: "q", 12: "d"}[kind])
        if kind == 9 and depth < 4:
            inner, num = self.take("I"), self.take("Q")
            if num > len(self.view) - self.at:
                raise ModelFileError(f"{self.where}: an array of {num:,} values does not fit the file: it is damaged")
            if inner < 8 or inner in (10, 11, 12):  # vocabularies' scores: not kept
                self.at += num * struct.calcsize("<" + (codes[inner] if inner < 8 else "Q"))
                return num
            for _ in range(num):
                self.value(inner, depth + 1)
            return num
        raise ModelFileError(f"{self.where}: a value of type {kind}, which GGUF does not define: it is damaged")

    def header(self, name: str) -> Header:
        version = self.take("I")
        if version not in (2, 3):
            raise ModelFileError(f"{self.where} is GGUF version {version}: 2 and 3 are read; convert it with llama.cpp")
        num_tensors, num_facts = self.take("Q"), self.take("Q")
        if max(num_tensors, num_facts) > 1_000_000:
            raise ModelFileError(f"{self.where}: {num_tensors:,} tensors and {num_facts:,} facts cannot be")
        facts = {}
        for _ in range(num_facts):
            key = self.text()
            facts[key] = self.value(self.take("I"))
        refs: dict[str, TensorRef] = {}
        stored: dict[str, tuple[tuple[int, ...], float]] = {}
        for _ in range(num_tensors):
            tensor, rank = self.text(), self.take("I")
            if rank > 8:
                raise ModelFileError(f"{self.where}: tensor {tensor[:80]!r} of rank {rank} cannot be")
            dims = checked_shape([self.take("Q") for _ in range(rank)][::-1], f"{self.where}: tensor {tensor[:80]!r}")
            kind, _offset = self.take("I"), self.take("Q")
            if kind not in GGUF_BLOCKS:
                raise ModelFileError(f"{self.where}: tensor {tensor[:80]!r} has type {kind}, which is not known here")
            label, block, size = GGUF_BLOCKS[kind]
            stored[tensor] = (dims, prod(dims) // block * size)
            plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(label, torch.uint8)
            refs[tensor] = TensorRef(tensor, plain, dims, _no_program, kind)
        total = int(sum(num_bytes for _, num_bytes in stored.values()))
        made = Header(name, "gguf", refs, total, facts)
        made.stored = stored
        counts: dict[str, int] = {}
        for ref in refs.values():
            counts[GGUF_BLOCKS[ref.element][0]] = counts.get(GGUF_BLOCKS[ref.element][0], 0) + 1
        made.survey = [OpRow(f"tensors of {label}", num) for label, num in sorted(counts.items())]
        if total > len(self.view):
            raise ModelFileError(f"{self.where}: its tensors take {total:,} bytes of a file of {len(self.view):,}: "
                                 "it is cut short")  # fmt: skip
        return made


def load_folder(path: Path, **_: Any) -> Any:
    """A Hugging Face folder: the network of its config.json on meta tensors, with the weights' headers checked."""
    return load_config(path / "config.json")


def load_config(path: Path, **_: Any) -> Any:
    """The network of a configuration, without weights in memory."""
    if not path.exists():
        raise ModelFileError(f"{path.parent} has no config.json: it is no folder of a Hugging Face model")
    from ridgeline.capture.vision_ops import allow_unmatched_torchvision

    allow_unmatched_torchvision()
    try:
        import transformers
    except ImportError as error:
        raise ModelFileError("a config.json is built by transformers: pip install 'ridgeline[hf]'") from error
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, names = config["model_type"], config.get("architectures") or []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{path} is no configuration of a Hugging Face model") from error
    if kind not in transformers.CONFIG_MAPPING or (names and not hasattr(transformers, str(names[0]))):
        raise ModelFileError(f"{path}: model type {kind!r} ({', '.join(map(str, names))}) is not one that "
                             f"transformers {transformers.__version__} builds; code that comes with weights is "
                             "never run")  # fmt: skip
    made = transformers.AutoConfig.for_model(**config)
    cls = getattr(transformers, str(names[0])) if names else transformers.AutoModel
    try:
        with torch.device("meta"):
            model = cls(made) if names else cls.from_config(made)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError, ZeroDivisionError) as error:
        raise ModelFileError(f"{path}: transformers cannot build {kind!r} from it: {str(error)[:200]}") from error
    refs: dict[str, TensorRef] = {}
    for file in sorted(path.parent.glob("*.safetensors")):
        refs |= safetensors_refs(file)[0]
    wanted = model.state_dict()
    for name, ref in refs.items():
        if name in wanted and tuple(wanted[name].shape) != ref.shape:
            raise ModelFileError(f"{path.parent}: weight {name!r} has shape {list(ref.shape)} where the configuration "
                                 f"says {list(wanted[name].shape)}: they belong to different models")  # fmt: skip
    again = lambda: cls(made) if names else cls.from_config(made)
    return _Configured(model.eval(), path.resolve().parent.name, refs, config, again)


class _Configured(Imported):
    """A network that transformers defines; its inputs are tokens or pictures with named dims."""

    def __init__(self, model: Any, name: str, refs: dict[str, TensorRef], config: dict[str, Any],
                 again: Callable[[], Any]) -> None:  # fmt: skip
        from ridgeline.capture.inputs import spec

        main = getattr(model, "main_input_name", "input_ids")
        if main == "pixel_values":
            side = config.get("image_size", 224)
            shape: tuple[Any, ...] = (
                "batch",
                config.get("num_channels", 3),
                *([side] * 2 if isinstance(side, int) else side),
            )
            given = {main: spec(shape, "fp32")}
        elif main == "input_ids":
            given = {main: spec(("batch", "seq"), "int64")}
        else:
            raise ModelFileError(
                f"{name}: a network of {main!r} has no shape in its configuration: capture it in Python"
            )
        super().__init__(name, "huggingface", _no_program, given, ("output",), {})
        self.refs, self.facts = refs, config
        self.model, self.main, self._again = model, main, again
        self.survey = [OpRow(str(type(model).__name__), 1)]

    @property
    def num_params(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def fill(self, device: str | torch.device = "cpu", seed: int = 0) -> Imported:
        """The network in memory: weights of the folder's files, random ones for those that no file holds."""
        if any(p.is_meta for p in self.model.parameters()):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.model = self._again().eval()
            with torch.no_grad():
                for name, t in self.model.state_dict().items():
                    if name in self.refs:
                        t.copy_(self.refs[name].read())
        return self.to(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {self.main: args[0]} if args else kwargs
        return self.model(**given)
