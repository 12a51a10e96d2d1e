"""torch.export archives: the program as JSON, the weights as raw bytes; nothing in them is unpickled or executed."""

from __future__ import annotations

import json
import math
import operator
import re
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ridgeline.capture.importers.program import Context, Host, Imported, OpRow
from ridgeline.capture.importers.weights import TensorRef, mapped
from ridgeline.capture.inputs import Dim, spec
from ridgeline.dtypes import dtype as named_dtype
from ridgeline.errors import ModelFileError, RidgelineError

MAX_JSON_BYTES = 1 << 28
TYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 10: torch.complex64, 11: torch.complex128, 12: torch.bool, 13: torch.bfloat16, 28: torch.uint16,
    29: torch.float8_e4m3fn, 30: torch.float8_e5m2, 31: torch.float8_e4m3fnuz, 32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu, 34: torch.uint32, 35: torch.uint64,
}  # fmt: skip
LAYOUTS = {7: torch.strided}
FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}

_HOST_CALLS: dict[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in
       ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "and_",
        "or_", "getitem")},
    "math.trunc": math.trunc, "math.ceil": math.ceil, "math.floor": math.floor, "torch.sym_max": max,
    "torch.sym_min": min, "torch.sym_int": int, "torch.sym_float": float, "torch.sym_not": operator.not_,
    "torch.sym_sum": sum, "torch.sym_ite": lambda test, a, b: a if test else b,
}  # fmt: skip
"""Arithmetic on sizes."""
_CHECKS = ("_assert_", "sym_constrain_range", "_check")
_REFUSED = frozenset({"from_file", "_import_dlpack", "resize_", "set_", "_debug_has_internal_overlap"})
"""Calls that reach outside of tensors, or change what memory a tensor has."""


class Archive:
    """A zip file whose members are read within bounds, and mapped where they are stored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.view = mapped(path)
        try:
            with zipfile.ZipFile(path) as file:
                infos = file.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error, RuntimeError) as error:
            raise ModelFileError(
                f"{path.name} is not a whole zip archive ({error}): copy or export it again"
            ) from error
        if len(infos) > 1_000_000:
            raise ModelFileError(f"{path.name} holds {len(infos):,} members: no model does")
        roots = {info.filename.split("/")[0] for info in infos}
        self.root = f"{roots.pop()}/" if len(roots) == 1 else ""
        self.members = {info.filename.removeprefix(self.root): info for info in infos}

    def data(self, name: str) -> memoryview:
        """The bytes of a member, as they lie in the file."""
        info = self.members.get(name)
        if info is None:
            raise ModelFileError(f"{self.path.name} holds no {name!r}: it is damaged, or of another version")
        if info.compress_type != zipfile.ZIP_STORED:
            raise ModelFileError(f"{self.path.name}: {name!r} is compressed, which torch.export.save never does")
        start = info.header_offset
        header = bytes(self.view[start : start + 30])
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise ModelFileError(f"{self.path.name}: {name!r} does not lie where the archive says: it is damaged")
        name_size, extra_size = struct.unpack("<HH", header[26:30])
        start += 30 + name_size + extra_size
        if start + info.file_size > len(self.view):
            raise ModelFileError(f"{self.path.name}: {name!r} reaches past the end: the file is cut short")
        return self.view[start : start + info.file_size]

    def json(self, name: str) -> Any:
        content = self.data(name)
        if len(content) > MAX_JSON_BYTES:
            raise ModelFileError(f"{self.path.name}: {name!r} takes {len(content) / 1e6:,.0f} MB: no model does")
        try:
            return json.loads(bytes(content).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{self.path.name}: {name!r} is not JSON: the file is damaged") from error


def load_pt2(path: Path) -> Imported:
    """The model in an archive."""
    archive = Archive(path)
    names = archive.members
    if any(name.startswith("data/aotinductor/") for name in names):
        native = [name for name in names if name.endswith(".so")]
        raise ModelFileError(f"{path.name} is an AOTInductor package: machine code ({len(native)} libraries), which "
                             "is not run here; save the program itself with torch.export.save")  # fmt: skip
    models = [name for name in names if name.startswith("models/") and name.endswith(".json")]
    if "models/model.json" not in names and not models:
        raise ModelFileError(f"{path.name} holds no exported program that can be read without pickle: save it again "
                             "with torch.export.save of PyTorch 2.8 or newer")  # fmt: skip
    model = models[0].removeprefix("models/").removesuffix(".json") if "models/model.json" not in names else "model"
    try:
        return _Reader(archive, model).imported(path.stem)
    except RidgelineError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ModelFileError(f"{path.name}: the program is not as torch.export writes it ({type(error).__name__}: "
                             f"{str(error)[:120]}): save it again with PyTorch 2.8 or newer") from error  # fmt: skip


class _Reader:
    def __init__(self, archive: Archive, model: str) -> None:
        self.archive, self.where = archive, archive.path.name
        document = archive.json(f"models/{model}.json")
        self.module = document["graph_module"]
        self.graph = self.module["graph"]
        self.signature = self.module["signature"]
        self.refs: dict[str, TensorRef] = {}
        self.buffers: set[str] = set()
        for folder, config in (("weights", f"{model}_weights_config"), ("constants", f"{model}_constants_config")):
            if f"data/{folder}/{config}.json" in archive.members:
                self.tensors(folder, archive.json(f"data/{folder}/{config}.json")["config"])

    def tensors(self, folder: str, config: Mapping[str, Any]) -> None:
        for name, entry in config.items():
            meta = entry.get("tensor_meta")
            if entry.get("use_pickle") or meta is None:
                raise ModelFileError(f"{self.where}: {name!r} is pickled, and pickles are never opened: keep plain "
                                     "tensors in the module")  # fmt: skip
            path = f"data/{folder}/{entry['path_name']}"
            self.refs[name] = self.ref(name, path, meta)
            if not entry.get("is_param"):
                self.buffers.add(name)

    def ref(self, name: str, path: str, meta: Mapping[str, Any]) -> TensorRef:
        where = f"{self.where}: tensor {name!r}"
        if meta["dtype"] not in TYPES or meta["layout"] != 7:
            raise ModelFileError(f"{where} has an element type or layout that is not supported: make it dense")
        dtype = TYPES[meta["dtype"]]
        sizes, strides = ([int(v["as_int"]) for v in meta[key]] for key in ("sizes", "strides"))
        first = int(meta["storage_offset"]["as_int"])
        data = self.archive.data(path)
        needed = 0 if 0 in sizes else first + sum((n - 1) * s for n, s in zip(sizes, strides)) + 1
        if (
            any(v < 0 for v in (*sizes, *strides, first))
            or len(sizes) != len(strides)
            or len(sizes) > 64
            or (needed * dtype.itemsize > len(data))
        ):
            raise ModelFileError(f"{where}: shape {sizes} with strides {strides} does not fit {len(data):,} bytes")

        def read() -> torch.Tensor:
            if not needed:
                return torch.empty_strided(sizes, strides, dtype=dtype)
            num = len(data) // dtype.itemsize * dtype.itemsize
            return torch.frombuffer(data[:num], dtype=dtype).as_strided(sizes, strides, first)

        return TensorRef(name, dtype, tuple(sizes), read)

    def imported(self, name: str) -> Imported:
        inputs: dict[str, Any] = {}
        given: list[tuple[str, str, Any]] = []  # kind, name in the graph, what it stands for
        for entry in self.signature["input_specs"]:
            kind, body = next(iter(entry.items()))
            if kind == "user_input":
                ((arg_kind, arg),) = body["arg"].items()
                if arg_kind == "as_none":
                    continue
                if arg_kind != "as_tensor":
                    given.append(("constant", "", arg))
                    continue
                inputs[arg["name"]] = self.input_spec(arg["name"])
                given.append(("input", arg["name"], arg["name"]))
            elif kind in ("parameter", "buffer", "tensor_constant"):
                target = body.get("parameter_name") or body.get("buffer_name") or body.get("tensor_constant_name")
                if target not in self.refs:
                    raise ModelFileError(f"{self.where}: weight {target!r} is not in the archive: export it again")
                given.append(("weight", body["arg"]["name"], target))
            elif kind == "constant_input":
                continue
            else:
                raise ModelFileError(f"{self.where}: inputs of kind {kind!r} are not supported: export the module "
                                     "without custom objects")  # fmt: skip
        outputs: list[str] = []
        results: list[Any] = []
        for entry, value in zip(self.signature["output_specs"], self.graph["outputs"], strict=True):
            kind = next(iter(entry))
            if kind != "user_output":
                raise ModelFileError(f"{self.where}: outputs of kind {kind!r} are not supported: export the module in "
                                     "eval mode, without writing to its buffers")  # fmt: skip
            arg_kind, arg = next(iter(value.items()))
            if arg_kind == "as_none":
                continue
            outputs.append(arg["name"] if isinstance(arg, dict) and "name" in arg else f"output_{len(outputs)}")
            results.append(value)
        body = _Body(self.where, self.graph["nodes"], given, results)
        made = Imported(name, "torch.export", body, inputs, outputs, self.refs, buffers=self.buffers)
        made.raises = False
        made.survey = body.survey()
        return made

    def input_spec(self, name: str) -> Any:
        meta = self.graph["tensor_values"][name]
        if meta["dtype"] not in TYPES:
            raise ModelFileError(f"{self.where}: input {name!r} has an element type that is not supported")
        dims: list[int | Dim] = []
        for i, size in enumerate(meta["sizes"]):
            if "as_int" in size:
                dims.append(int(size["as_int"]))
            else:
                found = re.fullmatch(r"Symbol\('([^']{1,64})'[^()]*\)", size["as_expr"]["expr_str"][:200])
                dims.append(Dim(found[1] if found else f"{name}.{i}"))
        return spec(dims, named_dtype(str(TYPES[meta["dtype"]])))


class _Body:
    """The program's calls, one after another."""

    def __init__(self, where: str, nodes: Sequence[Mapping[str, Any]], given: list[tuple[str, str, Any]],
                 results: list[Any]) -> None:  # fmt: skip
        self.where, self.nodes, self.given, self.results = where, nodes, given, results
        self.device = torch.device("cpu")  # every device of the file is the one the model runs on

    def survey(self) -> list[OpRow]:
        found: dict[str, list[str]] = {}
        todo = list(self.nodes)
        while todo:
            node = todo.pop()
            found.setdefault(str(node["target"]), []).append(str(node.get("name") or ""))
            for item in node["inputs"]:
                if "as_graph" in item["arg"]:
                    todo.extend(item["arg"]["as_graph"]["graph"]["nodes"])
        return [OpRow(name.removeprefix("torch.ops."), len(used), self.missing(name), used[-1])
                for name, used in sorted(found.items())]  # fmt: skip

    @staticmethod
    def missing(target: str) -> str:
        if target in _HOST_CALLS or target.endswith("wrap_with_set_grad_enabled"):
            return ""
        return "" if overload(target) is not None else "no operator of this version of PyTorch"

    def __call__(self, ctx: Context, inputs: Mapping[str, Any]) -> Sequence[Any]:
        env: dict[str, Any] = {}
        self.device = torch.device("meta") if ctx.static else ctx.device
        for kind, name, value in self.given:
            if kind == "input":
                env[name] = inputs[value]
            elif kind == "weight":
                env[name] = ctx.weight(value)
        for name, value in list(env.items()):
            if isinstance(value, Host):
                env[name] = ctx.constant(value.t)
        flat: list[Any] = []
        try:
            self.run(ctx, self.nodes, env)
            for value in self.results:
                made = self.value(env, value)
                flat += made if isinstance(made, (list, tuple)) else [made]
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration, RecursionError) as error:
            raise ModelFileError(f"{self.where}: the program is not as torch.export writes it ({type(error).__name__}: "
                                 f"{str(error)[:120]}): save it again") from error  # fmt: skip
        return [ctx.constant(torch.tensor(v)) if isinstance(v, (int, float, bool)) else v for v in flat]

    def run(self, ctx: Context, nodes: Sequence[Mapping[str, Any]], env: dict[str, Any]) -> None:
        for node in nodes:
            target, label = str(node["target"]), str(node.get("name") or node["target"])
            where = f"{self.where}: node {label!r} ({target})"
            ctx.step(where)
            if ctx.trace is not None:
                stack = node.get("metadata", {}).get("nn_module_stack", "").split(";")[-1].split(",")
                ctx.trace.scope = stack[1][:200] if len(stack) > 1 else ""
            out = self.call(ctx, node, target, env, where)
            names = [self.names(output) for output in node["outputs"]]
            if not names:
                continue
            if len(names) == 1:
                self.bind(env, names[0], out)
            else:
                for name, value in zip(names, out):
                    self.bind(env, name, value)

    def call(self, ctx: Context, node: Mapping[str, Any], target: str, env: dict[str, Any], where: str) -> Any:
        args, kwargs = [], {}
        for item in node["inputs"]:
            value = self.value(env, item["arg"])
            if item.get("kind", 1) == 2:
                kwargs[item["name"]] = value
            else:
                args.append(value)
        if target in _HOST_CALLS:
            return _HOST_CALLS[target](*args, **kwargs)
        if target == "torch.ops.higher_order.wrap_with_set_grad_enabled":
            _, graph, *rest = args
            inner = {name["as_tensor"]["name"]: v for name, v in zip(graph["inputs"], rest)}
            self.run(ctx, graph["nodes"], inner)
            outs = [self.value(inner, value) for value in graph["outputs"]]
            return outs[0] if len(outs) == 1 and graph.get("is_single_tensor_return") else outs
        func = overload(target)
        if func is None:
            raise ModelFileError(f"{where} is not supported: only PyTorch's own operators are; decompose it with "
                                 "run_decompositions() before saving")  # fmt: skip
        if func._schema.name.split("::")[1].startswith(_CHECKS):
            return None
        # Schemas take by name what comes after a star
        for argument in func._schema.arguments[: len(args)]:
            if argument.kwarg_only:
                kwargs[argument.name] = args.pop(func._schema.arguments.index(argument))
        takes = [argument.name for argument in func._schema.arguments]
        if "device" in takes and not any(isinstance(value, torch.Tensor) for value in args):
            kwargs["device"] = self.device  # a tensor made from nothing lies where the model runs
        try:
            return func(*args, **kwargs)
        except RidgelineError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            told = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise ModelFileError(f"{where} fails: {told[:300]}") from error

    def names(self, output: Mapping[str, Any]) -> Any:
        kind, value = next(iter(output.items()))
        if kind in ("as_tensor",):
            return value["name"]
        if kind in ("as_tensors",):
            return [item["name"] for item in value]
        if kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
            return value.get("as_name")
        if kind == "as_optional_tensors":
            return [item["as_tensor"]["name"] if "as_tensor" in item else None for item in value]
        return None

    def bind(self, env: dict[str, Any], name: Any, value: Any) -> None:
        if isinstance(name, list):
            for one, item in zip(name, value if isinstance(value, (list, tuple)) else [value]):
                self.bind(env, one, item)
        elif name is not None:
            env[name] = value

    def value(self, env: Mapping[str, Any], arg: Mapping[str, Any]) -> Any:
        """An argument of the file as a call takes it."""
        kind, value = next(iter(arg.items()))
        if kind == "as_tensor":
            return env[value["name"]]
        if kind == "as_tensors":
            return [env[item["name"]] for item in value]
        if kind in ("as_int", "as_ints", "as_bool", "as_bools", "as_string", "as_strings", "as_int_lists"):
            return value
        if kind in ("as_float", "as_floats"):
            listed = [float(v) for v in (value if kind == "as_floats" else [value])]
            return listed if kind == "as_floats" else listed[0]
        if kind == "as_none":
            return None
        if kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
            name = value.get("as_name")
            return env[name] if name is not None else next(iter(value.values()))
        if kind in ("as_sym_ints", "as_sym_bools", "as_sym_floats"):
            return [env[v["as_name"]] if "as_name" in v else next(iter(v.values())) for v in value]
        if kind == "as_optional_tensor":
            return env[value["as_tensor"]["name"]] if "as_tensor" in value else None
        if kind == "as_optional_tensors":
            return [env[v["as_tensor"]["name"]] if "as_tensor" in v else None for v in value]
        if kind == "as_scalar_type":
            return TYPES[value]
        if kind == "as_memory_format":
            return FORMATS.get(value, torch.preserve_format)
        if kind == "as_layout":
            return LAYOUTS[value]
        if kind == "as_device":
            return self.device
        if kind == "as_complex":
            return complex(value["real"], value["imag"])
        if kind == "as_graph":
            return value["graph"]
        raise ModelFileError(f"{self.where}: arguments of kind {kind!r} are not supported: export without them")


def overload(target: str) -> Any:
    """PyTorch's operator of a name such as ``torch.ops.aten.add.Tensor``; None for any other."""
    parts = target.split(".")
    if len(parts) not in (4, 5) or parts[:2] != ["torch", "ops"] or parts[2] not in ("aten", "prims"):
        return None
    if parts[3] in _REFUSED or not all(part.isidentifier() for part in parts[3:]):
        return None
    packet = getattr(getattr(torch.ops, parts[2]), parts[3], None)
    found = getattr(packet, parts[4] if len(parts) == 5 else "default", None)
    return found if isinstance(found, torch._ops.OpOverload) else None
