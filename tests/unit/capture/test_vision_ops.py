"""torchvision beside a torch that it was not built for."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("timm")


def test_timm_and_transformers_can_be_imported_whatever_torchvision_was_built_for() -> None:
    allow = "from ridgeline.capture.vision_ops import allow_unmatched_torchvision as allow; allow(); allow(); "
    code = allow + "import timm; from transformers import Blip2Model; print(timm.is_model('resnet18'))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.split()[-1:] == ["True"], ran.stderr[-800:]
