"""Engines as C over the CUDA driver: run against a driver that computes on the host and checks what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ridgeline as rl
from ridgeline.engine.file.contents import Contents
from ridgeline.engine.file.cuda_kernels import Kernels
from ridgeline.engine.file.engine import Engine
from ridgeline.engine.file.export_cuda import Buffer, export_cuda, laid_out, packed, sized
from ridgeline.engine.file.program import Input, Program, Step
from ridgeline.errors import EngineError

HERE = Path(__file__).parent
V = lambda number: {"v": number}
EMPTY = lambda out, *shape: Step("aten::empty_strided.default", ([*shape], [1]),
                                 {"dtype": {"dtype": "float32"}, "device": {"device": "engine"}}, (out,))  # fmt: skip


def kernel_step(key: str, *args: object) -> Step:
    return Step(f"kernel::{key}", args, {"grid": [1, 1, 1]}, (), True)


def entry(key: str, name: str, kinds: list[str], offset: int, shared: int = 0) -> dict[str, object]:
    return {"key": key, "name": name, "arguments": kinds, "num_warps": 4, "shared_bytes": shared, "scratch": 2,
            "offset": offset, "bytes": 8}  # fmt: skip


def engine_of(steps: tuple[Step, ...], outputs: object, inputs: int = 1) -> Engine:
    """An engine whose first program launches the kernels that the driver of the tests has."""
    names = tuple(Input(f"x{i}", "float32", (8,)) for i in range(inputs))
    program = Program(names, steps, outputs, issued=True)
    torch.manual_seed(1)
    kernels = {"kernels": [entry("km", "multiply", ["*", "*", "*", "fp32", "i32"], 0, 60_000),
                           entry("ks", "shift", ["*", "*", "i32"], 8)]}  # fmt: skip
    signature = {"names": [x.name for x in names], "args": [{"input": i} for i in range(inputs)], "kwargs": {}}
    contents = Contents("of */ kernels", signature, (program,), {"weight": torch.randn(8)}, {"capability": "9.0"},
                        kernels=kernels, cubins=b"multiplyshift---")  # fmt: skip
    return Engine(contents, device="cpu")


def chained() -> Engine:
    """Half of a buffer is written by one kernel, a sum with a filled one is read by the next, both are returned."""
    steps = (
        EMPTY(1, 16),
        Step("aten::slice.Tensor", (V(1), 0, 8, 16), {}, (2,)),
        kernel_step("km", V(0), {"w": "weight"}, V(2), -1.5, 8),
        Step("aten::full.default", ([8], 2.0), {"dtype": {"dtype": "float32"}, "device": {"device": "engine"}}, (3,)),
        kernel_step("km", V(2), V(3), V(3), 1.0, 8),
        EMPTY(4, 8),
        kernel_step("ks", V(3), V(4), 8),
        Step("aten::clone.default", (V(4),), {}, (5,)),
        Step("aten::view.default", (V(5), [2, 4]), {}, (6,)),
    )
    return engine_of(steps, {"tuple": [V(6), V(2)]})


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run(["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", folder / "libcuda.so.1",
                    HERE / "stub_libcuda.c"], check=True)  # fmt: skip
    return folder


Done = subprocess.CompletedProcess[bytes]
Run = Callable[..., Done]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The program that a user compiles, and its data."""
    folder = tmp_path_factory.mktemp("exported")
    source, data = export_cuda(chained(), folder)
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Wno-overlength-strings", "-Werror"]
    subprocess.run(["gcc", *flags, "-DRIDGELINE_MAIN", "-o", folder / "run", source, "-ldl"], check=True)
    return folder / "run", data


@pytest.fixture
def run(stub: Path, made: tuple[Path, Path], tmp_path: Path) -> Run:
    def called(*args: object, given: bytes = b"", driver: Path = stub, **env: str) -> Done:
        own = {**os.environ, "LD_LIBRARY_PATH": str(driver), "STUB_LOG": str(tmp_path / "log"), **env}
        return subprocess.run([made[0], *map(str, args)], input=given, capture_output=True, env=own, check=False)

    return called


def test_the_steps_compute_what_the_program_says(run: Run, made: tuple[Path, Path], tmp_path: Path) -> None:
    x = torch.randn(8)
    done = run(made[1], given=x.numpy().tobytes())
    assert done.returncode == 0, done.stderr
    first, second = np.frombuffer(done.stdout, np.float32).reshape(2, 8)
    product = (x * chained().contents.weights["weight"] * -1.5).numpy()
    assert np.array_equal(second, product)
    assert np.array_equal(first, product * np.float32(2) + 1)
    assert made[0].stat().st_size < 300_000


def test_a_call_is_one_launch_of_a_graph(run: Run, made: tuple[Path, Path], tmp_path: Path) -> None:
    done = run(made[1], 3, given=bytes(32))
    assert done.returncode == 0 and b'"calls": 3' in done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    assert [x for x in lines if x.startswith("cuLaunchKernel")][:3] == [
        "cuLaunchKernel multiply 1,1,1 128,1,1 60000", "cuLaunchKernel multiply 1,1,1 128,1,1 60000",
        "cuLaunchKernel shift 1,1,1 128,1,1 0"]  # fmt: skip
    assert lines.count("cuGraphLaunch 8") == 3  # copy in, fill, three kernels, copy, two copies out
    assert "cuFuncSetAttribute 8 60000" in lines and "cuMemsetD32Async 1073741824 8" in lines
    after = lines[lines.index("cuGraphLaunch 8") :]
    assert {x.split()[0] for x in after[: after.index("cuGraphExecDestroy .") - 2]} <= {
        "cuGraphLaunch", "cuStreamSynchronize", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"}  # fmt: skip
    assert lines[-1].startswith("cuDevicePrimaryCtxRelease")


FUNCTIONS = [
    "cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemAlloc_v2",
    "cuMemHostAlloc", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemsetD32Async",
    "cuStreamCreate", "cuStreamSynchronize", "cuStreamBeginCapture_v2", "cuEventCreate", "cuEventRecord",
    "cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute",
    "cuLaunchKernel",
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_failure_of_the_driver_is_told_and_nothing_stays_allocated(run: Run, made: tuple[Path, Path],
                                                                         function: str) -> None:  # fmt: skip
    for nth in (1, 2) if function in ("cuMemHostAlloc", "cuLaunchKernel", "cuMemAlloc_v2") else (1,):
        done = run(made[1], given=bytes(32), STUB_FAIL=f"{function}:{nth}:700")
        assert done.returncode == 1, (function, nth)
        assert b"CUDA error 700, an illegal address" in done.stderr and b"stub" not in done.stderr


def test_wrong_data_other_devices_and_short_inputs_are_told(run: Run, made: tuple[Path, Path], tmp_path: Path) -> None:
    data, other = made[1].read_bytes(), tmp_path / "other.bin"
    told = lambda *args, **env: (done := run(*args, **env)).returncode == 1 and done.stderr.decode()
    assert "No such file" in told(tmp_path / "nobody")
    for content in (b"", data[:63], b"RIDGECU1" + bytes(len(data) - 8)):
        other.write_bytes(content)
        assert "does not belong to this source" in told(other)
    other.write_bytes(data[:100])
    assert "ends within the weights" in told(other)
    other.write_bytes(data[:-1])
    assert "ends within the kernels" in told(other)
    for capability in ("80", "100"):
        assert "kernels for compute capability 9.0" in told(made[1], STUB_CAPABILITY=capability)
    assert "stdin ends before" in told(made[1], given=bytes(31))
    assert "no CUDA driver" in told(made[1], driver=tmp_path)


def test_valgrind_finds_nothing(run: Run, made: tuple[Path, Path], stub: Path) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("no valgrind")
    for failing in ("", "cuGraphInstantiateWithFlags:1:700"):
        done = subprocess.run(["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", made[0], made[1]],
                              input=bytes(32), capture_output=True, check=False,
                              env={**os.environ, "LD_LIBRARY_PATH": str(stub), "STUB_FAIL": failing})  # fmt: skip
        assert done.returncode == (1 if failing else 0), done.stderr


def test_what_needs_a_library_is_named(tmp_path: Path) -> None:
    product = Step("aten::mul.Tensor", (V(0), V(0)), {}, (1,))
    launch = kernel_step("ks", V(0), V(0), 8)
    with pytest.raises(EngineError, match=r"step 1 \(aten::mul.Tensor\) is a library's"):
        export_cuda(engine_of((launch, product), V(1)), tmp_path)
    halved = Step("aten::_to_copy.default", (V(0),), {"dtype": {"dtype": "float16"}}, (1,))
    with pytest.raises(EngineError, match="another type"):
        export_cuda(engine_of((launch, halved), V(1)), tmp_path)
    with pytest.raises(EngineError, match="launches no kernel"):
        export_cuda(engine_of((), V(0)), tmp_path)
    foreign = chained()
    foreign.trusted = False
    with pytest.raises(EngineError, match="another machine"):
        export_cuda(foreign, tmp_path)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_steps_that_we_have_kernels_for_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    engine = rl.build(Block().eval().bfloat16(), (x,), shapes={"batch": (1, 64)}, level=0)
    with pytest.raises(EngineError, match="give --shapes for x:batchx64"):
        export_cuda(engine, tmp_path)
    source, data = export_cuda(engine, tmp_path, [x.shape])
    subprocess.run(["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-c", "-o", tmp_path / "o", source], check=True)
    program = engine.contents.programs[-1]
    layout = laid_out(sized(program, [x.shape]), engine.contents.weights, Kernels({}, b""))
    # The activation and the residual are epilogues of the products before them
    assert [entry["name"] for entry in layout.kernels] == ["layer_norm_forward", "dense_forward", "dense_forward"]
    assert all(code[:4] == b"\x7fELF" and code in data.read_bytes() for code in layout.code)
    norm, up, down = layout.commands
    (given, _, size), (found, _, _) = layout.inputs[0], layout.outputs[0]
    held = [operand[0] for operand in down.operands if isinstance(operand, tuple)]
    assert size == 2048 and norm.operands[0] == (given, 0) and given in held and found in held
    assert not found.offset <= given.offset < found.offset + found.bytes
    assert up.grid == (1, 1, 1) and [o for o in up.operands if type(o) is int][:3] == [16, 64, 64]
    # Products of 32 bits are a library's
    wide = rl.build(Block().eval(), (x.float(),), level=0)
    with pytest.raises(EngineError, match=r"aten::relu.default: dense: .* 16-bit"):
        export_cuda(wide, tmp_path)


def test_values_that_live_together_lie_apart_and_others_share_memory() -> None:
    rng = np.random.RandomState(0)
    for _ in range(50):
        drawn = zip(*(rng.randint(0, most, 40).tolist() for most in (5000, 30, 8)), strict=True)
        buffers = [Buffer(1 + size, first=first, last=first + more) for size, first, more in drawn]
        total = packed(buffers)
        for i, a in enumerate(buffers):
            assert a.offset % 256 == 0 and a.offset + a.bytes <= total
            for b in buffers[:i]:
                apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
                assert apart or a.last < b.first or b.last < a.first
        assert total < sum(b.bytes for b in buffers)
