"""A source tree that is not installed still offers its backend to PyTorch."""

import subprocess
import sys
from importlib.metadata import distributions, entry_points

import pytest

import ridgeline


def test_the_backend_is_among_the_entry_points_and_announced_once():
    found = [point for point in entry_points(group="torch_dynamo_backends") if point.name == "ridgeline"]
    assert found and {point.value for point in found} == {"ridgeline.optimizer.backend:backend"}
    ridgeline.announce()
    assert sum(dist.metadata["Name"] == "ridgeline-source" for dist in distributions()) == 1
    assert not list(distributions(name="something-else"))


def test_importing_ridgeline_is_enough_for_torch_compile():
    pytest.importorskip("torch")
    code = (
        "import ridgeline, sys; assert 'torch' not in sys.modules\n"
        "import torch; model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())\n"
        "fast = torch.compile(model, backend='ridgeline'); x = torch.randn(2, 8)\n"
        "assert torch.allclose(fast(x), model(x), atol=1e-6); assert 'ridgeline.optimizer.backend' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1800)


def test_the_backend_is_found_after_pytorch_looked_for_others():
    pytest.importorskip("torch")
    code = (
        "import torch; torch.compile(torch.nn.ReLU(), backend='eager')(torch.ones(2))\n"
        "import torch._dynamo; torch._dynamo.list_backends()\n"
        "import ridgeline.optimizer\n"
        "fast = torch.compile(torch.nn.ReLU(), backend='ridgeline', options={'compiler': 'none'})\n"
        "assert float(fast(torch.ones(1))) == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1800)
