"""The zoo's graphs against captures of the same networks: the same products, traffic and peak memory."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from zoo_reference import REFERENCES, torch

from ridgeline.capture import capture, decode_kwargs
from ridgeline.graph import Graph
from ridgeline.models import build

_SPEC = importlib.util.spec_from_file_location(
    "liveness", Path(__file__).parent.parent / "unit" / "graph" / "liveness.py"
)
assert _SPEC is not None and _SPEC.loader is not None
liveness = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(liveness)


def products(graph: Graph) -> Counter[tuple[int, ...]]:
    """How often each matrix problem is solved."""
    counts: Counter[tuple[int, ...]] = Counter()
    for node, times in graph.nodes():
        if node.op == "matmul":
            counts[tuple(node.attrs[k] for k in "bmnk")] += times
    return counts


def traffic_bytes(graph: Graph, without: str = "") -> int:
    """Operands and results of everything that is not a view, a host op or an allocation."""
    return sum(
        times * sum(t.num_bytes for t in (*graph.in_types(node), *graph.out_types(node)))
        for node, times in graph.nodes()
        if node.op not in ("view", "host", "alloc", "transfer", "foreach", *without.split())
    )


def tokens(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.long, device="meta")


def pictures(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.bfloat16, device="meta")


def reference(name: str) -> Any:
    return REFERENCES[name]().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "inputs", "sizes"),
    [
        ("llama3.2-1b", {"input_ids": tokens(2, 512)}, {"batch": 2, "seq": 512, "fused_norms": False}),
        ("qwen3-8b", {"input_ids": tokens(1, 256)}, {"batch": 1, "seq": 256, "fused_norms": False}),
        ("bert-large", {"input_ids": tokens(4, 256)}, {"batch": 4, "seq": 256}),
        ("vit-b16", {"x": pictures(4, 3, 224, 224)}, {"batch": 4}),
        ("swin-b", {"x": pictures(2, 3, 224, 224)}, {"batch": 2}),
        ("resnet50", {"x": pictures(4, 3, 224, 224)}, {"batch": 4}),
    ],
)
def test_inference_moves_the_same_bytes_and_peaks_at_the_same_memory(
    name: str, inputs: dict[str, Any], sizes: dict[str, Any]
) -> None:
    ours, theirs = build(name, **sizes), capture(reference(name), kwargs=inputs)
    assert products(ours) == products(theirs)
    assert traffic_bytes(ours) == pytest.approx(traffic_bytes(theirs), rel=0.02)
    assert liveness.short_peak_bytes(ours)[0] == pytest.approx(liveness.short_peak_bytes(theirs)[0], rel=0.04)


def test_a_decode_step_is_the_same_step() -> None:
    model = reference("llama3.2-1b")
    theirs = capture(model, kwargs=decode_kwargs(model, 2, 1000))
    ours = build("llama3.2-1b", mode="decode", batch=2, kv=1000, fused_norms=False)
    assert products(ours) == products(theirs)
    assert traffic_bytes(ours) == pytest.approx(traffic_bytes(theirs), rel=1e-3)
    assert liveness.short_peak_bytes(ours)[0] == pytest.approx(liveness.short_peak_bytes(theirs)[0], rel=1e-3)


def test_a_training_step_is_the_same_step() -> None:
    inputs = {"input_ids": tokens(1, 2048), "labels": tokens(1, 2048), "use_cache": False}
    theirs = capture(reference("llama3.2-1b"), kwargs=inputs, mode="train")
    ours = build("llama3.2-1b", mode="train", seq=2048, fused_norms=False)
    assert products(ours) == products(theirs)
    # Pointwise ops apart: a capture may hold the spelled-out gradient of silu, which a GPU runs as one kernel.
    assert traffic_bytes(ours, "pointwise fill") == pytest.approx(traffic_bytes(theirs, "pointwise fill"), rel=0.01)
    assert liveness.short_peak_bytes(ours)[0] == pytest.approx(liveness.short_peak_bytes(theirs)[0], rel=1e-3)
