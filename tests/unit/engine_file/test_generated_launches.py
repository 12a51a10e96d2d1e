"""Inductor's own launcher with a real cubin, recorded, stored and replayed through a driver that stands in."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.engine.file.contents import Contents
from ridgeline.engine.file.cuda_kernels import Driver, Kernels
from ridgeline.engine.file.engine import Engine
from ridgeline.engine.file.execute import compiled
from ridgeline.engine.file.inspect import ir_of
from ridgeline.engine.file.program import Program
from ridgeline.errors import EngineError
from ridgeline.optimizer.record_engine import code_of, record

triton = pytest.importorskip("triton")
heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")

SOURCE = '''
import triton
import triton.language as tl

@triton.jit
def shift(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr0 + at, tl.load(in_ptr0 + at, at < xnumel) + 1, at < xnumel)
'''


SIGNATURE = {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function compiled for sm_90 as Inductor compiles one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = tmp_path_factory.mktemp("kernel") / "generated.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("generated", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = ASTSource(module.shift, {**SIGNATURE, "XBLOCK": "constexpr"}, {"XBLOCK": 128}, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


class Extension:
    """In the place of torch._C._StaticCudaLauncher: adds one on the host, and keeps what it was asked."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def _load_kernel(self, path: str, name: str, shared: int, device: int) -> tuple[int, ...]:
        found = (1, 7, 16, 0)
        return found if heuristics_unpacks_four() else found[1:]

    def _launch_kernel(self, function: int, x: int, y: int, z: int, warps: int, shared: int, kinds: str, args: Any,
                       stream: int) -> None:  # fmt: skip
        self.launches.append((x, y, z, warps, shared, kinds, stream))
        args[1][: args[2]] = args[0][: args[2]] + 1

    def _unload_kernel(self, module: int) -> None: ...


def heuristics_unpacks_four() -> bool:
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel

    return "self.module, self.function" in inspect.getsource(StaticallyLaunchedCudaKernel.load_kernel)


@pytest.fixture
def tuner(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CachingAutotuner after its first call: one launcher, made by Inductor's own code."""
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel._cubin_path = str(tmp_path / heuristics.triton_hash_to_path_key(kernel.hash) / "shift.cubin")
    Path(kernel._cubin_path).parent.mkdir()
    Path(kernel._cubin_path).write_bytes(kernel.asm["cubin"])
    static = StaticallyLaunchedCudaKernel(kernel)
    static.__dict__["C_impl"] = Extension()
    config = triton.Config({"XBLOCK": 128}, num_warps=4)
    meta = {"signature": dict(SIGNATURE), "device": 0, "constants": {"XBLOCK": 128}}
    result = heuristics.StaticTritonCompileResult(static, config, meta, {"grid_type": "Grid1D", "kernel_name": "shift"})
    made = heuristics.CachingAutotuner.__new__(heuristics.CachingAutotuner)
    launcher = result.make_launcher()
    made.__dict__.update(launchers=[launcher], compile_results=[result], triton_meta=meta, fn=SimpleNamespace(),
                         inductor_meta=result.inductor_meta, _cached_launcher=launcher, _plugins=[])  # fmt: skip
    return made


def recorded(tuner: Any, x: torch.Tensor) -> tuple[Program, Any, torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        # As generated code does: memory past the dispatcher, the launch, and an op of ATen on its result
        with torch.utils._python_dispatch._disable_current_modes():
            buffer = torch.full((300,), -1.0)
        tuner.run(x, buffer, 300, stream=0)
        return buffer * 2

    program, recording = record(call, [x], ["x"], {}, (x,), {})
    return program, recording, call(x)


def test_a_generated_launch_is_recorded_with_grid_arguments_and_code(tuner: Any, kernel: Any) -> None:
    program, recording, found = recorded(tuner, torch.randn(300))
    index, code = recording.index()
    (entry,) = index["kernels"]
    assert code == kernel.asm["cubin"] and code[:4] == b"\x7fELF"
    assert (entry["name"], entry["arguments"], entry["num_warps"]) == ("shift", ["*", "*", "i32"], 4)
    assert entry["scratch"] == 2  # Triton 3.6's two pointers
    (launch,) = [step for step in program.steps if step.op.startswith("kernel::")]
    assert launch.kwargs["grid"] == [3, 1, 1] and launch.args[2] == 300
    assert torch.isfinite(found).all()
    # Outside of a recording, nothing is in the way
    extension = tuner.compile_results[0].kernel.C_impl
    assert len(extension.launches) == 2 and extension.launches[0][5] == "OOiOO"


def test_what_was_tuned_never_or_has_lost_its_code_is_refused(tuner: Any) -> None:
    code_path = Path(os.environ["TRITON_CACHE_DIR"])
    shutil.rmtree(code_path)
    with pytest.raises(EngineError, match="not in Triton's cache"):
        recorded(tuner, torch.randn(300))
    tuner.launchers = []
    with pytest.raises(EngineError, match="shift was not run before"):
        recorded(tuner, torch.randn(300))
    assert "told" not in tuner.run.__qualname__


def test_code_that_inductor_still_holds_is_taken_from_it(tuner: Any, kernel: Any) -> None:
    assert code_of(tuner, SimpleNamespace(cubin_raw=b"code", hash=kernel.hash, name="shift"))[0] == b"code"


def test_code_of_a_recorded_kernel_is_shown_in_three_forms(tuner: Any, kernel: Any, monkeypatch: Any) -> None:
    folder = Path(os.environ["TRITON_CACHE_DIR"]) / heuristics.triton_hash_to_path_key(kernel.hash)
    (folder / "shift.ttgir").write_text(kernel.asm["ttgir"])
    program, recording, _ = recorded(tuner, torch.randn(300))
    index, code = recording.index()
    signature = {"names": ["x"], "args": [{"input": 0}], "kwargs": {}}
    engine = Engine(Contents("shift", signature, (program,), {}, {}, kernels=index, cubins=code), device="cpu")
    assert "ttg.num-warps" in ir_of(engine, "ttgir", "shift")
    assert "/*0000*/" in ir_of(engine, "sass")
    for wrong, why in (({"kind": "ptx"}, "holds no ptx"), ({"kind": "llir"}, "no form of code"),
                       ({"kind": "sass", "kernel": "other"}, "no kernel 'other': it has 'shift'")):  # fmt: skip
        with pytest.raises(EngineError, match=why):
            ir_of(engine, **wrong)
    engine.trusted = False
    with pytest.raises(EngineError, match="--trust"):
        ir_of(engine, "sass")
    engine.trusted = True
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match="needs nvdisasm: install"):
        ir_of(engine, "sass")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("stub_libcuda.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-DANY_MEMORY", "-o", path, source], check=True)
    return path


def test_the_recorded_program_is_replayed_through_the_driver(
    tuner: Any, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, other = torch.randn(300), torch.randn(300)
    program, recording, _ = recorded(tuner, x)
    index, code = recording.index()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, load=ctypes.CDLL: load(str(driver)))
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    again = Program.from_json(program.to_json(), set(), "recorded")
    run = compiled(again, {}, torch.device("cpu"), Kernels(index, code))
    assert torch.equal(run(other), (other + 1) * 2)
    assert "cuLaunchKernel shift 3,1,1 128,1,1 0" in (tmp_path / "log").read_text()
    monkeypatch.setenv("STUB_FAIL", "cuLaunchKernel:2:700")
    with pytest.raises(EngineError, match="cuLaunchKernel failed with CUDA error 700"):
        run(other)


def test_a_driver_without_libcuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(EngineError, match="no CUDA driver"):
        Driver()


def test_compiled_functions_stay_compiled_while_they_are_recorded() -> None:
    """PyTorch runs compiled functions eagerly under a dispatch mode that does not ask for the contrary."""
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append("compiled")
            return graph.forward(*args)

        return run

    call, x = torch.compile(lambda x: torch.relu(x) + 1, backend=backend), torch.randn(4)
    with torch.no_grad():
        call(x)
    record(call, [x], ["x"], {}, (x,), {})
    assert seen == ["compiled"] * 2
