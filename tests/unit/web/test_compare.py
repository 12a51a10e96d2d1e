"""Differences and verdicts as pages and as Markdown: nothing in a name is markup, and means over ranks add up."""

from __future__ import annotations

import pytest

from ridgeline.api import diff
from ridgeline.findings.diff import Change, Difference, over_ranks, settings_of
from ridgeline.findings.gate import gate
from ridgeline.findings.regression import Gate
from ridgeline.trace import Kind, Trace, TraceBuilder, concat
from ridgeline.web.compare import difference_markdown, difference_page, gate_markdown, gate_page

EVIL = "<img src=x onerror=alert(1)>|`@all`\n# heading"


def difference(key: str = EVIL) -> Difference:
    slower, less = "slower kernels", "less"
    changes = (Change(key, "compute", 1.0, 3.0, 2.0, 1, 1, slower), Change("b", "idle", 5, 4, -1, 0, 0, less))
    return Difference(EVIL, "b.json", 6.0, 7.0, "op", 0.9, changes, (EVIL,), (f"device: A → {EVIL}",))


def test_no_name_becomes_markup():
    page, text = difference_page(difference()), difference_markdown(difference())
    assert "<img" not in page and "&lt;img" in page
    assert "<img" not in text and "`@all`" not in text and "\n# heading" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.count("|") == 6 for line in rows) and len(rows) == 4


def test_a_gate_says_its_verdict_first():
    found = Gate(gate([[1.0], [1.0], [1.01]], [[1.2], [1.2], [1.21]], 0.03), difference("conv"))
    text = gate_markdown(found)
    assert text.startswith("### ❌ regression") and "| conv | 1.000 | 3.000 | +2.000 |" in text
    assert text.splitlines()[0].endswith("3.0% allowed)") and "\n\n| what |" in text
    assert "regression" in gate_page(found) and "script-src" in gate_page(found)
    assert gate_markdown(Gate(found.verdict, None)).startswith("### ❌")


def run(rank: int, kernel_ms: float, device: str = "A100", **meta: str) -> Trace:
    made = TraceBuilder("run")
    made.describe(devices=[{"name": device}], **meta)
    made.add("ProfilerStep#0", "host", 0.0, 10e-3, kind=Kind.STEP, thread=1, step=0, rank=rank)
    made.add("gemm", "GPU", 1e-3, kernel_ms * 1e-3, kind=Kind.KERNEL, device=0, stream=7, rank=rank, op="aten::mm",
             step=0)  # fmt: skip
    return made.build()


def test_differences_over_ranks_are_means_that_add_up():
    a = concat([run(0, 2.0), run(1, 2.0)], "a")
    b = concat([run(0, 3.0), run(1, 5.0), run(2, 5.0)], "b")
    found = diff(a, b)
    assert found.num_ranks == 2
    gemm = next(change for change in found.changes if "aten" in change.key or "matmul" in change.key)
    assert (gemm.a_ms, gemm.b_ms) == (pytest.approx(2.0), pytest.approx(4.0))
    assert sum(change.delta_ms for change in found.changes) == pytest.approx(found.delta_ms)
    assert any("1 more rank of B" in note for note in found.notes)
    assert over_ranks([difference()]) == difference()


def test_devices_and_how_a_run_was_made_come_first():
    found = settings_of(run(0, 1.0), run(0, 1.0, "V100", origin="predicted"))
    assert found == ("run: measured → predicted", "device: A100 → V100")
    assert settings_of(run(0, 1.0), run(1, 2.0)) == ()
