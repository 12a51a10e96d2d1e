"""Which engine and knobs cuDNN's own heuristic takes for a convolution, asked without a GPU or on one.

cuDNN answers its heuristics for a device that is described instead of present (a device-property descriptor read from
JSON, cuDNN 9.8 and newer). Asked as PyTorch asks with ``benchmark=False``: instant mode first, then fallback, the first
answer whose numerical notes are allowed. Without a device, engines that call cuBLAS are left out of the answers
(pointwise products, Fourier transforms); ``--device`` asks with a handle on a GPU instead, which has them.

    pip download --no-deps nvidia-cudnn-cu13==9.19.0.56   # and nvidia-cublas; unpack, DIR is the folder of libcudnn
    LD_LIBRARY_PATH=... python -m lab.record.cudnn_heuristic --lib DIR --num 240000 --out FOLDER  # no GPU: 3 ms a shape
    python -m lab.record.cudnn_heuristic --device --seconds 35 --workers 12 --out FOLDER           # on a GPU host
    LD_LIBRARY_PATH=... python -m lab.record.cudnn_heuristic --lib DIR --recorded --out data/recordings/h200
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import importlib.util
import json
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.record import surveys
from ridgeline.bench import sampling

H200 = {
    "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000, "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536, "multiProcessorCount": 132, "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
    "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000,
    "l2CacheSize": 62914560, "totalGlobalMem": 150109880320, "deviceName": "NVIDIA H200",
}  # fmt: skip

RECORDINGS = ROOT / "data" / "recordings" / "h200"

# Numbers of the backend interface (cudnn_graph_v9.h): descriptors, attribute types, data types, modes.
CONV, ENGINE, CONFIG, HEUR, KNOB, GRAPH, TENSOR, DEVICE = 1, 2, 3, 4, 7, 15, 17, 38
T_HANDLE, T_DATA, T_INT64, T_FLOAT, T_MODE, T_HEUR, T_KNOB, T_NOTE, T_DESC = 0, 1, 3, 4, 7, 8, 9, 11, 15
T_INT32, T_CHAR = 23, 24
DATA = {"fp32": 0, "tf32": 0, "fp16": 2, "bf16": 9}
INSTANT, FALLBACK = 0, 2
NOTE_TENSOR_CORE, NOTE_DOWN_CONVERT = 0, 1
OPERATIONS = {"fwd": (10, 700), "dgrad": (12, 706), "wgrad": (11, 712)}
ROLES = {"fwd": {"w": 703, "x": 704, "y": 705, "c": 702}, "dgrad": {"w": 709, "x": 710, "y": 711, "c": 708},
         "wgrad": {"w": 715, "x": 716, "y": 717, "c": 714}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    op: str  # fwd, dgrad, wgrad
    dtype: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Answer:
    engine: int
    knobs: tuple[tuple[int, int], ...]
    notes: tuple[int, ...]
    fallback: bool


def strides(sizes: Sequence[int], last: bool) -> list[int]:
    order = [1, *range(len(sizes) - 1, 1, -1), 0] if last else list(range(len(sizes) - 1, -1, -1))
    found, step = [0] * len(sizes), 1
    for axis in order:
        found[axis] = step
        step *= sizes[axis]
    return found


class Cudnn:
    """The library and the descriptors it is asked with."""

    def __init__(self, lib: Path, properties: dict[str, Any] | None) -> None:
        """``properties`` describe a device that is not here; None asks the one that is."""
        self.lib = ctypes.CDLL(str(lib / "libcudnn.so.9"), mode=ctypes.RTLD_GLOBAL)
        self.live: list[ctypes.c_void_p] = []
        self.handle = ctypes.c_void_p()
        self.device = self.make(DEVICE, keep=True)
        if properties is None:
            self.check(self.lib.cudnnCreate(ctypes.byref(self.handle)))
            self.put(self.device, 2700, T_INT32, 1, ctypes.byref(ctypes.c_int32(0)))
        else:
            text = json.dumps(properties).encode()
            self.put(self.device, 2702, T_CHAR, len(text), ctypes.create_string_buffer(text))
        self.finalize(self.device)

    def properties(self) -> str:
        """The device's description, as another machine can be given it."""
        size, get = ctypes.c_int64(), self.lib.cudnnBackendGetAttribute
        self.check(get(self.device, 2702, T_CHAR, ctypes.c_int64(0), ctypes.byref(size), None))
        text = ctypes.create_string_buffer(size.value + 1)
        self.check(get(self.device, 2702, T_CHAR, ctypes.c_int64(size.value), ctypes.byref(size), text))
        return text.value.decode()

    def version(self) -> int:
        self.lib.cudnnGetVersion.restype = ctypes.c_size_t
        return int(self.lib.cudnnGetVersion())

    def make(self, kind: int, keep: bool = False) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self.check(self.lib.cudnnBackendCreateDescriptor(kind, ctypes.byref(found)))
        if not keep:
            self.live.append(found)
        return found

    def check(self, status: int) -> None:
        if status:
            text = ctypes.create_string_buffer(2048)
            self.lib.cudnnGetLastErrorString(text, 2048)
            raise RuntimeError(f"cuDNN {status}: {text.value.decode(errors='replace')}")

    def put(self, desc: ctypes.c_void_p, name: int, kind: int, count: int, value: Any) -> None:
        self.check(self.lib.cudnnBackendSetAttribute(desc, name, kind, ctypes.c_int64(count), value))

    def put_ints(self, desc: ctypes.c_void_p, name: int, values: Sequence[int]) -> None:
        self.put(desc, name, T_INT64, len(values), (ctypes.c_int64 * len(values))(*values))

    def put_enum(self, desc: ctypes.c_void_p, name: int, kind: int, value: int) -> None:
        self.put(desc, name, kind, 1, ctypes.byref(ctypes.c_int(value)))

    def put_desc(self, desc: ctypes.c_void_p, name: int, value: ctypes.c_void_p) -> None:
        self.put(desc, name, T_DESC, 1, ctypes.byref(value))

    def finalize(self, desc: ctypes.c_void_p) -> None:
        self.check(self.lib.cudnnBackendFinalize(desc))

    def forget(self) -> None:
        for desc in reversed(self.live):
            self.lib.cudnnBackendDestroyDescriptor(desc)
        self.live.clear()

    def tensor(self, uid: int, dtype: str, sizes: Sequence[int], last: bool) -> ctypes.c_void_p:
        desc = self.make(TENSOR)
        self.put_enum(desc, 901, T_DATA, DATA[dtype])
        self.put_ints(desc, 902, sizes)
        self.put_ints(desc, 903, strides(sizes, last))
        self.put_ints(desc, 906, [uid])
        self.put_ints(desc, 900, [16])
        self.finalize(desc)
        return desc

    def convolution(self, q: Question) -> ctypes.c_void_p:
        desc = self.make(CONV)
        self.put_ints(desc, 106, [len(q.stride)])
        self.put_enum(desc, 100, T_DATA, 0)
        self.put_enum(desc, 101, T_MODE, 1)
        self.put_ints(desc, 102, [1] * len(q.stride))
        self.put_ints(desc, 103, q.stride)
        self.put_ints(desc, 104, q.padding)
        self.put_ints(desc, 105, q.padding)
        self.finalize(desc)
        return desc

    def graph(self, q: Question) -> ctypes.c_void_p:
        kind, scale = OPERATIONS[q.op]
        desc = self.make(kind)
        for role, uid, sizes in (("x", 120, q.x), ("y", 121, q.y), ("w", 119, q.w)):
            self.put_desc(desc, ROLES[q.op][role], self.tensor(uid, q.dtype, sizes, q.last))
        self.put_desc(desc, ROLES[q.op]["c"], self.convolution(q))
        for name, value in ((scale, 1.0), (scale + 1, 0.0)):
            self.put(desc, name, T_FLOAT, 1, ctypes.byref(ctypes.c_float(value)))
        self.finalize(desc)
        graph = self.make(GRAPH)
        if self.handle:
            self.put(graph, 800, T_HANDLE, 1, ctypes.byref(self.handle))
        self.put_desc(graph, 801, desc)
        self.finalize(graph)
        return graph

    def heuristic(self, graph: ctypes.c_void_p, mode: int) -> list[ctypes.c_void_p]:
        desc = self.make(HEUR)
        self.put_desc(desc, 201, graph)
        self.put_enum(desc, 200, T_HEUR, mode)
        if not self.handle:
            self.put_desc(desc, 204, self.device)
        self.finalize(desc)
        count = ctypes.c_int64()
        self.check(self.lib.cudnnBackendGetAttribute(desc, 202, T_DESC, ctypes.c_int64(0), ctypes.byref(count), None))
        made = [self.make(CONFIG) for _ in range(count.value)]
        array = (ctypes.c_void_p * len(made))(*[m.value for m in made])
        self.check(
            self.lib.cudnnBackendGetAttribute(
                desc, 202, T_DESC, ctypes.c_int64(len(made)), ctypes.byref(count), ctypes.byref(array)
            )
        )
        return [ctypes.c_void_p(v) for v in array[: count.value]]

    def answer(self, config: ctypes.c_void_p, fallback: bool) -> Answer:
        engine, count = self.make(ENGINE), ctypes.c_int64()
        get = self.lib.cudnnBackendGetAttribute
        self.check(get(config, 300, T_DESC, ctypes.c_int64(1), ctypes.byref(count), ctypes.byref(engine)))
        index = ctypes.c_int64()
        self.check(get(engine, 1301, T_INT64, ctypes.c_int64(1), ctypes.byref(count), ctypes.byref(index)))
        notes = (ctypes.c_int * 10)()
        self.check(get(engine, 1303, T_NOTE, ctypes.c_int64(10), ctypes.byref(count), ctypes.byref(notes)))
        found_notes = tuple(notes[: count.value])
        return Answer(int(index.value), self.knobs(config), found_notes, fallback)

    def knobs(self, config: ctypes.c_void_p) -> tuple[tuple[int, int], ...]:
        get, count = self.lib.cudnnBackendGetAttribute, ctypes.c_int64()
        made = [self.make(KNOB) for _ in range(44)]
        array = (ctypes.c_void_p * len(made))(*[m.value for m in made])
        self.check(get(config, 302, T_DESC, ctypes.c_int64(len(made)), ctypes.byref(count), ctypes.byref(array)))
        found = []
        for desc in array[: count.value]:
            kind, value, one = ctypes.c_int(), ctypes.c_int64(), ctypes.c_int64()
            knob = ctypes.c_void_p(desc)
            self.check(get(knob, 600, T_KNOB, ctypes.c_int64(1), ctypes.byref(one), ctypes.byref(kind)))
            self.check(get(knob, 601, T_INT64, ctypes.c_int64(1), ctypes.byref(one), ctypes.byref(value)))
            found.append((int(kind.value), int(value.value)))
        return tuple(sorted(found))

    def ask(self, q: Question, first: int = 1) -> list[Answer]:
        found: list[Answer] = []
        try:
            graph = self.graph(q)
            for mode in (INSTANT, FALLBACK):
                for config in self.heuristic(graph, mode):
                    answer = self.answer(config, mode == FALLBACK)
                    if allowed(answer, q.dtype):
                        found.append(answer)
                    if len(found) >= first:
                        return found
            return found
        finally:
            self.forget()


def allowed(answer: Answer, dtype: str) -> bool:
    """PyTorch's filter: single precision never narrows its inputs, and keeps off the tensor cores unless tf32 is on."""
    if dtype in ("fp32", "tf32") and NOTE_DOWN_CONVERT in answer.notes:
        return False
    return not (dtype == "fp32" and NOTE_TENSOR_CORE in answer.notes)


def questions(row: dict[str, Any]) -> list[Question]:
    """One question for a forward convolution, two for its gradients."""
    d, kind = row["shape"], row["kind"]
    sp = {"conv1d": (1, d.get("l")), "conv2d": (d.get("h"), d.get("w")), "conv3d": (d.get("t"), d.get("h"), d.get("w"))}
    sp = sp[kind]
    k = (1, d["k"]) if kind == "conv1d" else (d["k"],) * len(sp)
    stride = (1, d["stride"]) if kind == "conv1d" else (d["stride"],) * len(sp)
    pad = tuple(d.get("padding", a // 2) if a > 1 or kind != "conv1d" else 0 for a in k)
    out = tuple((s + 2 * p - a) // t + 1 for s, p, a, t in zip(sp, pad, k, stride, strict=True))
    x, y = (d["n"], d["c"], *sp), (d["n"], d["o"], *out)
    w = (d["o"], d["c"] // d.get("groups", 1), *k)
    ops = ("fwd",) if row["phase"] == "fwd" else ("dgrad", "wgrad")
    return [Question(op, row["dtype"], x, w, y, stride, pad, bool(d.get("nhwc", 0))) for op in ops]


def draw(rng: random.Random, groups: bool = False) -> Question | None:
    """A convolution as networks have them, or of dimensions log-uniform; none for a draw that makes no sense."""
    sort, way = "dense" if rng.random() < (0.0 if groups else 0.78) else "grouped", rng.random()
    if way < 0.8:
        shape = (surveys._conv_shape if way < 0.35 else surveys._free_conv_shape)(rng, sort)
    else:
        point = _NETWORK(rng)
        shape = dict(point.shape) if point else None
    if shape is None or shape["groups"] == shape["c"] > 1 or (groups and shape["groups"] == 1):
        return None
    shape = _varied(rng, shape)
    shape["nhwc"] = int(rng.random() < 0.4)
    dtype = rng.choices(("bf16", "fp16", "tf32", "fp32"), (42, 8, 26, 24) if groups else (58, 12, 17, 13))[0]
    if shape["k"] > min(shape["h"], shape["w"]) + 2 * shape.get("padding", shape["k"] // 2):
        return None
    asked = questions({"kind": "conv2d", "dtype": dtype, "phase": "fwd", "shape": shape})[0]
    return replace(asked, op=rng.choice(("fwd", "dgrad", "wgrad")))


_NETWORK = sampling._conv("fwd")


def draw_untold(rng: random.Random) -> Question | None:
    """What a described device does not tell: single precision, one tap that may be a product; some of it in groups."""
    if rng.random() < 0.22:
        asked = draw(rng, True)
        ops = rng.choices(("fwd", "dgrad", "wgrad"), (1, 1, 2))[0]
        return replace(asked, op=ops, dtype=rng.choice(("fp32", "tf32"))) if asked else None
    way, kind = rng.random(), rng.choices(("fp32", "tf32", "half"), (40, 30, 30))[0]
    if way < 0.8:
        shape = (surveys._conv_shape if way < 0.5 else surveys._free_conv_shape)(rng, "dense")
    else:
        point = _NETWORK(rng)
        shape = dict(point.shape) if point else None
    if shape is None or shape["groups"] > 1:
        return None
    shape = _varied(rng, shape) if kind != "half" else shape | {"k": 1, "stride": 1}
    shape["nhwc"] = int(rng.random() < 0.4)
    if shape["k"] > min(shape["h"], shape["w"]) + 2 * shape.get("padding", shape["k"] // 2):
        return None
    dtype = rng.choices(("bf16", "fp16"), (4, 1))[0] if kind == "half" else kind
    asked = questions({"kind": "conv2d", "dtype": dtype, "phase": "fwd", "shape": shape})[0]
    return replace(asked, op=rng.choice(("fwd", "dgrad", "wgrad")))


def _varied(rng: random.Random, shape: dict[str, int]) -> dict[str, int]:
    """Now and then a rarer filter, stride or padding, or a batch of one."""
    chance = rng.random()
    if chance < 0.06:
        return shape | {"k": rng.choice((2, 4, 6, 9, 11))}
    if chance < 0.10:
        return shape | {"stride": rng.choice((3, 4, shape["k"]))}
    if chance < 0.16:
        return shape | {"padding": 0}
    return shape | {"n": 1} if chance < 0.18 else shape


def wanted(q: Question) -> bool:
    """Where an engine that calls cuBLAS may be taken: what a described device does not tell."""
    return (q.w[2] == 1 and q.stride[0] == 1) or q.dtype in ("fp32", "tf32")


def answers(cudnn: Cudnn, seed: int, num: int, seconds: float, narrow: bool, kind: str) -> Iterator[list[Any]]:
    """Shape and answer, one after another; ``narrow`` keeps four of five to the wanted, ``kind`` to single precision,
    to groups or to what only a device tells."""
    rng, end, count = random.Random(seed), time.monotonic() + seconds, 0
    single = kind == "single"
    while count < num and time.monotonic() < end:
        asked = draw_untold(rng) if kind == "untold" else draw(rng, kind == "groups")
        if asked is None or (narrow and not wanted(asked) and rng.random() < 0.8):
            continue
        count += 1
        q = replace(asked, dtype=rng.choices(("fp32", "tf32"), (2, 1))[0]) if single else asked
        try:
            found = cudnn.ask(q)
        except RuntimeError:
            continue
        told = [found[0].engine, list(found[0].knobs), found[0].fallback] if found else []
        yield [q.op, q.dtype, list(q.x), list(q.w), list(q.y), list(q.stride), list(q.padding), int(q.last), told]


def _preload() -> Path:
    """The folder of the installed cuDNN, its libraries of CUDA loaded before it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for name in ("libcudart.so", "libcublasLt.so", "libcublas.so", "libnvrtc.so"):
            for file in sorted(Path(folder).glob(f"*/lib/{name}.1?")):
                ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        for file in Path(folder).glob("cudnn/lib/libcudnn.so.9"):
            return file.parent
    import torch  # links the library: where it lies is then known

    torch.backends.cudnn.version()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudnn.so.9" in line:
            return Path(line.split()[-1]).parent
    raise SystemExit("no cuDNN found beside torch: pass --lib FOLDER, the one that holds libcudnn.so.9")


def work(job: tuple[str, int, int, float, bool, str, str]) -> int:
    lib, seed, num, seconds, present, kind, out = job
    cudnn = Cudnn(Path(lib) if lib else _preload(), None if present else H200)
    count = 0
    with gzip.open(out, "wt") as file:
        head = {"cudnn": cudnn.version(), "seed": seed, "present": present, "properties": cudnn.properties()}
        file.write(json.dumps(head) + "\n")
        for row in answers(cudnn, seed, num, seconds, present and not kind, kind):
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def _is_asked(row: dict[str, Any], groups: bool) -> bool:
    if not str(row.get("kind", "")).startswith("conv"):
        return False
    return not groups or 1 < row["shape"].get("groups", 1) < row["shape"]["c"]


def recorded(cudnn: Cudnn, folder: Path, groups: bool = False) -> int:
    """The answers for every recorded convolution, or those in groups: file, line, answer."""
    count = 0
    with gzip.open(folder / "cudnn_answers.jsonl.gz", "wt") as out:
        for path in sorted(RECORDINGS.glob("operators_seed*.jsonl.gz")):
            with gzip.open(path, "rt") as lines:
                rows = [json.loads(line) for line in lines]
            for place, row in enumerate(rows):
                for q in questions(row) if _is_asked(row, groups) else ():
                    found = cudnn.ask(q)
                    if found:
                        told = [found[0].engine, found[0].knobs, found[0].fallback]
                        asked = [q.op, q.dtype, q.x, q.w, q.y, q.stride, q.padding, int(q.last), told]
                        out.write(json.dumps([path.name, place, asked], separators=(",", ":")) + "\n")
                        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lib", default="", help="folder of libcudnn.so.9")
    parser.add_argument("--device", action="store_true", help="ask the GPU that is here")
    parser.add_argument("--num", type=int, default=1 << 40, help="shapes for each worker")
    parser.add_argument("--seconds", type=float, default=1e9, help="time for each worker")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--single", action="store_true", help="single precision alone, full and rounded")
    parser.add_argument("--groups", action="store_true", help="convolutions in groups alone")
    parser.add_argument("--untold", action="store_true", help="what a described device does not tell")
    parser.add_argument("--recorded", action="store_true", help="ask for the recorded convolutions instead")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.recorded:
        lib = Path(args.lib) if args.lib else _preload()
        print(recorded(Cudnn(lib, None if args.device else H200), args.out, args.groups), "answers")
        return
    parts = [args.out / f"part{i}.jsonl.gz" for i in range(args.workers)]
    kind = next((name for name in ("single", "groups", "untold") if getattr(args, name)), "")
    asked = (args.num, args.seconds, args.device, kind)
    jobs = [(args.lib, args.seed * 1000 + i, *asked, str(p)) for i, p in enumerate(parts)]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        counts = pool.map(work, jobs)
    with gzip.open(args.out / "answers.jsonl.gz", "wt") as whole:
        for part in parts:
            with gzip.open(part, "rt") as lines:
                whole.writelines(lines)
            part.unlink()
    print(f"{sum(counts)} answers in {args.out / 'answers.jsonl.gz'}")


if __name__ == "__main__":
    main()
