"""Every command of the README, the guide and the tutorials runs, on a terminal of 80 columns and piped at 120."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "install.md",
         *sorted((ROOT / "docs" / "guide").rglob("*.md")),
         *sorted((ROOT / "docs" / "tutorials").rglob("*.md"))]  # fmt: skip
ELSEWHERE = {
    "kernels check": "needs a GPU",
    "kernels race": "needs a GPU",
    "kernels tune": "needs a GPU",
    "kernels pack": "compiles for half an hour",
    "calibrate": "needs a GPU",
    "explain profiler_output/ --watch": "waits for a running job",
    "--install-completion": "writes where the shell of whoever runs it looks",
    "dash": "serves until it is interrupted",
    "compare 3fa9c1": "a run of somebody's store",
    "store tag": "a run of somebody's store",
    "llm train run.toml": "settings of a run",
    "validate published/*.csv": "files of others",
    "validate collectives.csv": "files of others",
    "validate training_other.csv": "files of others",
}
"""Commands that are parsed only, by how they begin."""
SCRIPT = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)

    def forward(self, x):
        return self.last(self.first(x).relu())


def make():
    return Net(), (torch.randn(8, 64),)


make_model = make
if __name__ == "__main__":
    model, (x,) = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):  # more than the warm-up may take, so that a loaded machine records too
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of every fenced shell line that begins with ``ridgeline``; each command once."""
    seen = set[str]()
    for page in PAGES:
        for block in re.findall(r"^```(?:bash|console)[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                text = re.sub(r"\s{2,}#.*|\s+#\s.*", "", line.removeprefix("$ ")).strip()
                if text.startswith("ridgeline ") and text not in seen:
                    seen.add(text)
                    yield page.relative_to(ROOT).as_posix(), text.removeprefix("ridgeline ")


COMMANDS = list(commands())


def _trace(scale: float) -> dict[str, Any]:
    """A short Kineto trace: sixteen steps, each a kernel that its launch precedes."""
    events: list[dict[str, Any]] = []
    for step in range(16):
        begin = step * 1000.0
        common = {"pid": 1, "ph": "X"}
        events += [
            {**common, "name": f"ProfilerStep#{step}", "cat": "user_annotation", "tid": 1, "ts": begin, "dur": 990.0},
            {**common, "name": "aten::mm", "cat": "cpu_op", "tid": 1, "ts": begin + 5, "dur": 20.0,
             "args": {"Input Dims": [[256, 256], [256, 256]], "Input type": ["float", "float"]}},
            {**common, "name": "cudaLaunchKernel", "cat": "cuda_runtime", "tid": 1, "ts": begin + 10, "dur": 5.0,
             "args": {"correlation": step + 1}},
            {**common, "name": "sm90_gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": begin + 20,
             "dur": 700.0 * scale, "args": {"correlation": step + 1, "stream": 7, "device": 0}},
        ]  # fmt: skip
    return {"deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000}],
            "traceEvents": events, "distributedInfo": {"rank": 0, "world_size": 1}}  # fmt: skip


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file that the documentation's commands name."""
    folder = tmp_path_factory.mktemp("samples")
    for name in ("train.py", "my_model.py", "mine.py", "script.py"):
        (folder / name).write_text(SCRIPT)
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "__init__.py").touch()
    (folder / "mypackage" / "train.py").write_text(SCRIPT)
    for name in ("trace.json", "before.json", "folder_of_ranks/rank0.json", "runs/main/1.json", "runs/main/2.json",
                 "runs/branch/1.json", "runs/branch/2.json", "annotated.json"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(_trace(1.0)))
    (folder / "after.json").write_text(json.dumps(_trace(1.2)))
    (folder / "trace.json.gz").write_bytes(gzip.compress(json.dumps(_trace(1.0)).encode()))
    (folder / "measured.csv").write_text(
        "kind,dtype,phase,library,shape,measured_s\ngemm,bf16,fwd,cublas,m=4096;n=4096;k=4096,2.1e-4\n"
    )
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    import ridgeline as rl

    weight = numpy_helper.from_array(np.ones((64, 8), np.float32), "weight")
    io = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", cols]) for name, cols in (("x", 64), ("y", 8))
    ]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"], "product")], "net", io[:1], io[1:], [weight]
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    rl.save(rl.build("bert-large", batch=1, seq=128), folder / "mine.json.gz")
    if (ROOT / "examples").is_dir():
        shutil.copytree(ROOT / "examples", folder / "examples")
    images = helper.make_graph(
        [helper.make_node("GlobalAveragePool", ["x"], ["y"], "pool")], "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3, 1, 1])],
    )  # fmt: skip
    onnx.save(helper.make_model(images, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "m.onnx")
    (folder / "model.py").write_text(SCRIPT)
    namespace: dict[str, Any] = {"__name__": "sample"}
    exec(compile(SCRIPT, "model.py", "exec"), namespace)
    model, args = namespace["make"]()
    import safetensors.torch

    rl.build(model, args, level=0).save(folder / "m.ridge")
    rl.build(model, args, level=0).save(folder / "other.ridge")
    safetensors.torch.save_file(model.state_dict(), folder / "new.safetensors")
    np.save(folder / "x.npy", args[0].numpy())
    return folder


@pytest.fixture
def desk(samples: Path, tmp_path: Path) -> Path:
    """A copy of it, for one command."""
    return shutil.copytree(samples, tmp_path / "desk")


class Shell:
    """The server that runs command lines."""

    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "RIDGELINE_STORE")}
        self.server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "command_server.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=env,
        )  # fmt: skip

    def __call__(self, command: str, cwd: Path, columns: int, tty: bool) -> tuple[int, str]:
        assert self.server.stdin and self.server.stdout
        argv = shlex.split(command.partition(" > ")[0])
        self.server.stdin.write(json.dumps({"argv": argv, "cwd": str(cwd), "columns": columns, "tty": tty}) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        return answer["code"], answer["output"]


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    made = Shell()
    yield made
    assert made.server.stdin
    made.server.stdin.close()
    made.server.wait()
    assert made.server.stdout
    made.server.stdout.close()


def test_the_pages_hold_commands() -> None:
    assert len(COMMANDS) > 25


@pytest.mark.parametrize(("columns", "tty"), [(80, True), (120, False)], ids=["terminal", "piped"])
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[command[:60] for _, command in COMMANDS])
def test_a_documented_command_runs(
    page: str, command: str, columns: int, tty: bool, desk: Path, shell: Shell
) -> None:  # fmt: skip
    if any(command.startswith(begin) for begin in ELSEWHERE):
        code, output = shell("--help" if command[0] == "-" else f"{shlex.split(command)[0]} --help", desk, columns, tty)
    else:
        code, output = shell(command, desk, columns, tty)
    assert code in ((0, 1) if command.startswith("gate") else (0,)), f"{page}: {output}"
    assert "Traceback" not in output
    if not tty:
        assert "\x1b[" not in output, "colors in a pipe"
    if tty and "--json" not in command and "one replica:" not in output:
        plain = re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)", "", output)
        frames = [line.split("\r")[-1] for line in plain.replace("\r\n", "\n").splitlines()]
        too_wide = [
            line
            for line in frames
            if len(line) > columns + 1 and "/" not in line and not line.startswith(("error", "USDT"))
        ]
        assert not too_wide, too_wide[:3]
