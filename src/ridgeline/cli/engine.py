"""``ridgeline engine``: build, run, bench, inspect, verify, refit, compare, convert and export engines.

Options have TensorRT's spellings, too: what ``trtexec`` takes is understood, or answered.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.cli import draw
from ridgeline.cli.source import dims_of, made_by
from ridgeline.errors import InputError, nearest
from ridgeline.units import show_bytes

ACTIONS = ("build", "run", "bench", "inspect", "verify", "refit", "compare", "convert", "export-c")
BUDGETS = {"fp16": 0.01, "bf16": 0.02, "fp8": 0.05, "int8": 0.05, "best": 0.05}
"""Error budgets for trtexec's precision flags, which state a type and no accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Everything that was asked for on the command line."""

    action: str
    sources: Sequence[str] = ()
    out: Path | None = None
    shapes: Mapping[str, str] = field(default_factory=dict)  # shapes, min, opt, max
    dims: Sequence[str] = ()
    error_budget: float | None = None
    precisions: Sequence[str] = ()
    budget_s: float = 60.0
    level: int | None = None
    timings: Path | None = None
    error_on_miss: bool = False
    device: str | None = None
    trust: bool = False
    memory_limit: str | None = None
    weight_budget: str | None = None
    inputs: str | None = None
    outputs: Path | None = None
    iterations: int = 10
    duration_s: float = 3.0
    warmup_ms: float = 200.0
    times: bool = False
    on: str | None = None
    ir: str | None = None
    kernel: str | None = None
    html: Path | None = None
    json: bool = False
    to: str = "onnx"


def run_action(asked: Asked) -> int:
    """Do what was asked; the exit code says whether it held."""
    actions = {"build": _build, "run": _run, "bench": _bench, "inspect": _inspect, "verify": _verify, "refit": _refit,
               "compare": _compare, "convert": _convert, "export-c": _export_c}  # fmt: skip
    if asked.action not in actions:
        raise InputError(f"no action {asked.action!r}{nearest(asked.action, actions)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what an engine warns of is among its notes, which are printed
        return actions[asked.action](asked) or 0


def _say(asked: Asked, found: Any, text: str = "") -> None:
    if asked.json:
        draw.print_json(found)
    else:
        draw.console().print(text, soft_wrap=True)


def _source(asked: Asked, what: str = "an engine file") -> str:
    if not asked.sources:
        raise InputError(f"`ridgeline engine {asked.action}` takes {what}")
    return asked.sources[0]


def _load(asked: Asked, place: int = 0) -> Any:
    from ridgeline.engine.file.engine import Engine

    _source(asked)
    return Engine.load(asked.sources[place], asked.device, trust=asked.trust, memory_limit=asked.memory_limit,
                       weight_budget=asked.weight_budget)  # fmt: skip


def _build(asked: Asked) -> None:
    from ridgeline.optimizer.build_engine import build_engine

    source = _source(asked, "a model: script.py:function, a file, or --onnx=model.onnx")
    model, args, kwargs = _model(source, asked)
    timings = json.loads(asked.timings.read_text(encoding="utf-8")) if asked.timings and asked.timings.is_file() else {}
    out = draw.console()

    def say(text: str) -> None:
        if not asked.json:
            out.print(f"· {text}", style=draw.DIM)

    script, colon, function = source.rpartition(":")
    name = function if colon and script.endswith(".py") else Path(source).stem
    budget = asked.error_budget
    if budget is None and asked.precisions:
        budget = max(BUDGETS[name] for name in asked.precisions)
        say(f"--{' --'.join(asked.precisions)}: layers may have fewer bits as long as results stay within "
            f"--error-budget {budget:g} of float64; state one to choose it")  # fmt: skip
    engine = build_engine(model, args, kwargs, shapes=_shapes(asked.shapes), error_budget=budget,
                          budget_s=asked.budget_s,
                          level=asked.level, timings=timings, error_on_miss=asked.error_on_miss, say=say,
                          name=name)  # fmt: skip
    path = engine.save(asked.out or f"{name}.ridge")
    if asked.timings:
        asked.timings.write_text(json.dumps(dict(engine.contents.timings), indent=1, sort_keys=True), encoding="utf-8")
    size = path.stat().st_size
    found = {"file": str(path), "bytes": size, "weight_bytes": engine.weight_bytes, "profiles": engine.profiles,
             "receipt": dict(engine.receipt)}  # fmt: skip
    lines = [f"{path}: {show_bytes(size)}, {show_bytes(engine.weight_bytes)} of them weights", *engine.profiles,
             *engine.receipt.get("notes", [])]  # fmt: skip
    _say(asked, found, "\n".join(lines))


def _model(source: str, asked: Asked) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The module and its example arguments: of a script, or of a file that ``ridgeline.load`` reads."""
    if ".py:" in source:
        return made_by(source)
    import ridgeline

    made = ridgeline.load(source)
    if not callable(made):
        raise InputError(f"{source} holds a {type(made).__name__}, which does not run: name a model's file, or "
                         "script.py:function")  # fmt: skip
    if hasattr(made, "fill"):
        made.fill()
    return made, tuple(_examples(made, asked)), {}


def _examples(model: Any, asked: Asked) -> Sequence[Any]:
    """Inputs for an imported model: of the shapes that were given, with 1 for what they and the file leave open."""
    wanted, bindings = _shapes(asked.shapes) or {}, dict[str, int]()
    for name, spec in model.inputs.items():
        shape = str(wanted[name][-1]).split("x") if name in wanted else ()
        for axis, dim in enumerate(spec.shape):
            if not isinstance(dim, int):
                told = shape[axis].split("..")[0] if axis < len(shape) else wanted.get(dim.name, (1,))[-1]
                bindings[dim.name] = int(told)
    from ridgeline.capture.importers import bindings_of

    made: Sequence[Any] = model.example(bindings_of(model, {"dims": {**bindings, **dims_of(asked.dims)}}))
    return made


def _shapes(given: Mapping[str, str]) -> dict[str, Any] | None:
    """``x:1x3x224x224,y:1x7`` for each of min, opt and max; or ``batch=1,8,64``."""
    made: dict[str, Any] = {}
    for kind in ("min", "opt", "max", "shapes"):
        text = given.get(kind)
        if not text:
            continue
        if kind == "shapes" and "=" in text:
            for part in text.split(";"):
                name, _, sizes = part.partition("=")
                try:
                    made[name.strip()] = tuple(int(size) for size in sizes.split(","))
                except ValueError:
                    raise InputError(f"cannot read --shapes {part!r}: write batch=1,8,64, or x:8x3x224x224") from None
            continue
        for part in text.split(","):
            name, colon, shape = part.rpartition(":")
            if not colon or not all(n.replace("..", "").isdigit() for n in shape.split("x")):
                raise InputError(f"cannot read --{kind}{'' if kind == 'shapes' else 'Shapes'} {part!r}: write "
                                 "input:1x3x224x224")  # fmt: skip
            made.setdefault(name.strip("'\""), []).append(shape)
    return made or None


def _inputs(asked: Asked, engine: Any) -> list[Any]:
    """Inputs from files (``x:x.npy,y:y.npy``), else those of the proof, else of the shapes that were given."""
    from ridgeline.engine.file.example_calls import drawn_for, read_arrays
    from ridgeline.engine.file.inspect import example_of

    program = engine.contents.programs[-1]
    names = [want.name for want in program.inputs]
    if asked.inputs:
        found = read_arrays(dict(part.split(":", 1) for part in asked.inputs.split(",") if ":" in part), names)
    elif shapes := _shapes(asked.shapes):
        for name in names:
            if name not in shapes:
                raise InputError(f"--shapes has no {name!r}: it takes {', '.join(names)}")
        sizes = [[int(n) for n in shapes[name][-1].split("x")] for name in names]
        found = drawn_for(sizes, [want.dtype for want in program.inputs])
    else:
        return example_of(engine, program)
    return [x.to(engine.device) for x in found]


def _run(asked: Asked) -> None:
    import numpy as np

    from ridgeline.engine.file.engine import named_outputs
    from ridgeline.engine.file.example_calls import as_array

    engine = _load(asked)
    found = named_outputs(engine.on_inputs(_inputs(asked, engine)))
    if asked.outputs:
        arrays: dict[str, Any] = {name: as_array(x) for name, x in found.items()}
        with asked.outputs.open("wb") as file:
            np.savez(file, **arrays)
    told: dict[str, dict[str, Any]] = {
        name: {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "mean": _mean(x)}
        for name, x in found.items()
    }
    lines = [f"{name}: {t['dtype']}[{', '.join(map(str, t['shape']))}], mean {t['mean']}" for name, t in told.items()]
    _say(asked, {"outputs": told, "notes": engine.notes}, "\n".join([*lines, *engine.notes]))


def _mean(x: Any) -> float | None:
    value = float(x.double().mean()) if x.numel() and not x.is_complex() else None
    return value if value is not None and value - value == 0 else None


def _bench(asked: Asked) -> None:
    from ridgeline.engine.file.bench import bench

    engine = _load(asked)
    found = bench(engine, _inputs(asked, engine), iterations=asked.iterations, duration_s=asked.duration_s,
                  warmup_s=asked.warmup_ms / 1e3)  # fmt: skip
    _say(asked, {**found.to_dict(), "device": str(engine.device)}, f"{engine.name} on {engine.device}: {found}")


def _inspect(asked: Asked) -> None:
    from ridgeline.engine.file.inspect import ir_of

    engine = _load(asked)
    if asked.ir:
        draw.console().print(ir_of(engine, asked.ir, asked.kernel), soft_wrap=True)
        return
    found = engine.inspect(times=asked.times, on=asked.on)
    if asked.html:
        try:
            asked.html.write_text(found.to_html(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {asked.html}: {error.strerror}") from error
    _say(asked, found.to_dict(), str(found))


def _verify(asked: Asked) -> int:
    found = _load(asked).verify()
    _say(asked, found.to_dict(), str(found))
    return 0 if found else 1


def _refit(asked: Asked) -> None:
    if len(asked.sources) != 2:
        raise InputError("`ridgeline engine refit` takes an engine and a checkpoint: refit m.ridge new.safetensors")
    engine = _load(asked)
    engine.refit(asked.sources[1])
    path = engine.save(asked.out or asked.sources[0])
    _say(asked, {"file": str(path)}, f"{path}: refitted with {asked.sources[1]}")


def _compare(asked: Asked) -> int:
    if len(asked.sources) != 2:
        raise InputError("`ridgeline engine compare` takes two engines, or an engine and script.py:function")
    engine = _load(asked)
    other = made_by(asked.sources[1])[0].eval() if ".py:" in asked.sources[1] else _load(asked, 1)
    found = engine.compare(other)
    _say(asked, found.to_dict(), str(found))
    return 0 if found.same_bits else 1


def _convert(asked: Asked) -> None:
    from ridgeline.engine.file.convert import to_compressed_tensors, to_qdq_onnx

    engine, source = _load(asked), Path(_source(asked))
    if asked.to == "onnx":
        made = [to_qdq_onnx(engine, asked.out or source.with_suffix(".onnx").name)]
    elif asked.to == "compressed-tensors":
        made = to_compressed_tensors(engine, asked.out or source.stem)
    else:
        raise InputError(f"no format {asked.to!r}{nearest(asked.to, ('onnx', 'compressed-tensors'))}")
    _say(asked, {"files": list(map(str, made))}, "\n".join(map(str, made)))


def _export_c(asked: Asked) -> None:
    from ridgeline.engine.file.engine import Engine
    from ridgeline.engine.file.export_c import export_c
    from ridgeline.engine.file.export_cuda import export_cuda

    # Nothing runs: an engine for a GPU is exported anywhere
    engine = Engine.load(_source(asked), "cpu", trust=asked.trust, memory_limit=asked.memory_limit)
    folder = asked.out or f"{Path(_source(asked)).stem}_c"
    recorded = any(step.op.startswith("kernel::") for p in engine.contents.programs for step in p.steps)
    if (asked.device or "").startswith("cuda") or (recorded and asked.device != "cpu"):
        made = export_cuda(engine, folder, [x.shape for x in _inputs(asked, engine)] if asked.shapes else None)
    else:
        made = export_c(engine, folder, _inputs(asked, engine))
    _say(asked, {"files": list(map(str, made))}, "\n".join(map(str, made)))
