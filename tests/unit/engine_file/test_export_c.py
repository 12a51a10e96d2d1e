"""Engines as C: compiled here, and the same results."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch import nn

import ridgeline as rl
from ridgeline.engine.file.export_c import export_c
from ridgeline.errors import EngineError

from .conftest import convolutional, perceptron


class Gated(nn.Module):
    """A norm, a gate, a residual and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.gate, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return torch.softmax(x + 0.5 * self.down(nn.functional.silu(self.gate(y)) * self.up(y)), -1)


@pytest.mark.parametrize(("make", "shape"), [(perceptron, (4, 16)), (convolutional, (2, 3, 20, 20)), (Gated, (3, 16))])
def test_the_c_program_returns_what_the_engine_does(make, shape, tmp_path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    x = torch.randn(shape)
    engine = rl.build(make().eval(), (x,), level=0)
    source, weights = export_c(engine, tmp_path / "c", [x])
    program = tmp_path / "run"
    subprocess.run([compiler, "-O2", "-Wall", "-Werror", "-DRIDGELINE_MAIN", "-o", program, source, "-lm"], check=True)
    done = subprocess.run([program, weights], input=x.numpy().tobytes(), stdout=subprocess.PIPE, check=True)
    meant = engine(x).numpy()
    found = np.frombuffer(done.stdout, np.float32).reshape(meant.shape)
    assert np.abs(found - meant).max() < 1e-5
    assert (
        subprocess.run([program, tmp_path / "nobody"], input=b"", stderr=subprocess.PIPE, check=False).returncode == 1
    )
    assert program.stat().st_size < 300_000


def test_what_is_not_written_to_c_is_named(tmp_path) -> None:
    x = torch.randn(2, 4)
    with pytest.raises(EngineError, match=r"aten::cumsum.* not written to C"):
        export_c(rl.build(Running(), (x,), level=0), tmp_path, [x])


class Running(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)
