"""Every report in a real browser at three widths: no label overlaps or is cut off, no page scrolls sideways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ridgeline as rl
from ridgeline.api import diff, explain
from ridgeline.sim.serving.compose import Wanted
from ridgeline.sim.serving.metrics import Slo
from ridgeline.sim.serving.search import Candidate, Need, search
from ridgeline.sim.serving.workload import closed
from ridgeline.web import write_report
from ridgeline.web.compare import difference_page
from ridgeline.web.explain import render_explanation
from ridgeline.web.optimize import write_receipt
from ridgeline.web.serving import write_search, write_served
from ridgeline.web.step import write_search as write_plans
from ridgeline.web.step import write_step

LAYOUT = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")


def _trained(execution: str = "eager") -> Any:
    return rl.predict("llama3-70b", on="h200", mode="train", seq=4096, execution=execution)


def _plans(path: Path) -> None:
    write_plans(rl.plans("llama3-8b", "h100-sxm*4", global_batch=8, seq=1024), path)


def _serve(path: Path) -> None:
    made = rl.serve("llama3-8b", "h200*1", closed(16, 256, 64))
    points = [_candidate(num) for num in (1, 2, 4, 8, 16, 32, 64)]
    write_served("llama3-8b on h200", made.served, made.metrics, points, path)


def _candidate(concurrency: int) -> Candidate:
    found = rl.serve("llama3-8b", "h200*1", closed(concurrency, 128, 16)).metrics
    return Candidate(title="this", precision="bf16", num_devices=1, concurrency=concurrency, found=found, keeps=True)


def _searched(path: Path) -> None:
    need = Need(isl=128, osl=16, slo=Slo(ttft_s=1.0, tpot_s=0.05))
    found = search("llama3-8b", "h200*1", need, Wanted())
    write_search("llama3-8b on 2 × h200", found, path)


def _receipt(path: Path) -> None:
    entries = [{"name": name, "changes": ["kernels of attention, losses and norms"], "status": status, "reason": why,
                "measured_s": seconds, "low_s": seconds, "high_s": seconds, "speedup": 0.05 / seconds,
                "speedup_low": 0.04 / seconds, "speedup_high": 0.06 / seconds, "build_s": 12.0, "peak_bytes": 10**10,
                "rewrites": {}, "places": {}, "breaks": {}, "recompiles": 0, "last": True}
               for name, status, why, seconds in (
                   ("eager", "slower", "", 0.05), ("torch.compile in CUDA graphs", "slower", "a tenth slower", 0.02),
                   ("whole step in one CUDA graph", "winner", "", 0.018))]  # fmt: skip
    part = {"floor_s": 0.004, "basis": "measured", "fix": "products in fp8"}
    write_receipt({
        "model": "transformers.models.modernbert.ModernBertForMaskedLM", "device": "NVIDIA H200", "mode": "train",
        "inputs": "int64[8, 2048]", "environment": {"torch": "2.13.0"}, "winner": entries[-1]["name"], "cached": True,
        "changes": entries[0]["changes"], "eager_s": 0.05, "final_s": 0.018, "stock_s": 0.02, "speedup": 2.8,
        "speedup_low": 2.7, "speedup_high": 2.9, "over_best": 1.1, "floor_s": 0.01, "eager_bytes": 2 * 10**10,
        "final_bytes": 10**10, "memory_limit_bytes": None, "budget_s": 120.0, "spent_s": 100.0, "verdict": None,
        "entries": entries, "steps": [{"name": entry["name"], "measured_s": entry["measured_s"]} for entry in entries],
        "regions": [{"name": "attention", "eager_s": 0.01, "final_s": 0.004, "stock_s": 0.006, "num_eager": 96,
                     "num_final": 24, "num_stock": 48, "eager_kernel": "flash_fwd", "final_kernel": "attention",
                     "stock_kernel": "triton_attention_with_a_long_name_0123456789"}],
        "parts": [{"name": f"model.encoder.layers.{i}.attention.output", "eager_s": 0.002, "final_s": 0.001, **part}
                  for i in range(6)],
        "narrowed": [], "forecast": None, "explanations": [], "remaining": ["products"], "notes": ["a note"],
        "asked": [], "stages_left_out": [], "searched_at": "2026-11-19 10:00", "error_budget": None,
        "guarantee": "not slower than eager or torch.compile, both measured beside it", "legend": [],
    }, path)  # fmt: skip


def _difference(path: Path) -> None:
    path.write_text(difference_page(diff(_trained().trace(), _trained("compiled").trace())), encoding="utf-8")


REPORTS: dict[str, Callable[[Path], Any]] = {
    "predict": lambda path: write_report(_trained(), path),
    "plan": _plans,
    "simulate": lambda path: write_step(rl.simulate("llama3-8b", "h100-sxm*16", tp=2, pp=4, global_batch=32), path),
    "serve": _serve,
    "serve search": _searched,
    "explain": lambda path: path.write_text(render_explanation(explain(_trained().trace())), encoding="utf-8"),
    "optimize": _receipt,
    "diff": _difference,
}


@pytest.fixture(scope="module")
def page(chromium: str) -> Any:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        yield page
        browser.close()


@pytest.mark.parametrize("name", list(REPORTS))
def test_a_report_is_whole_at_every_width(name: str, page: Any, tmp_path: Path) -> None:
    path, faults = tmp_path / "report.html", list[str]()
    REPORTS[name](path)
    listeners = {
        "console": lambda said: faults.append(said.text) if said.type in ("error", "warning") else None,
        "pageerror": lambda error: faults.append(str(error)),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    for width, scheme in ((1920, "light"), (1366, "dark"), (390, "light")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(path.as_uri())
        faults += [f"{width}: {fault}" for fault in page.evaluate(LAYOUT)]
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert not faults
