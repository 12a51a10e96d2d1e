"""A serving simulation as one HTML file: latencies, cache and batch over time, throughput against latency."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError
from ridgeline.sim.serving.metrics import Metrics, cdf, latencies
from ridgeline.sim.serving.search import Candidate, Searched
from ridgeline.sim.serving.simulate import Served
from ridgeline.web.report import page


def write_served(
    title: str, served: Served, found: Metrics, points: Sequence[Candidate], path: str | os.PathLike[str]
) -> Path:
    """The report of one deployment."""
    return _write(path, title, served_data(title, served, found, points))


def write_search(title: str, found: Searched, path: str | os.PathLike[str]) -> Path:
    """The report of a search: every point that was tried, and the frontier."""
    data = {"title": title, "kind": "search", "points": [_point(c) for c in found.candidates if c.found],
            "frontier": [_point(c) for c in found.frontier], "best": _point(found.best) if found.best else None,
            "refused": [{"title": c.title, "precision": c.precision, "why": c.why}
                        for c in found.candidates if not c.found]}  # fmt: skip
    return _write(path, title, data)


def _write(path: str | os.PathLike[str], title: str, data: dict[str, Any]) -> Path:
    target = Path(path)
    try:
        target.write_text(page(f"{title} · Ridgeline", "serving", data), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


def served_data(title: str, served: Served, found: Metrics, points: Sequence[Candidate]) -> dict[str, Any]:
    """What the page draws."""
    from ridgeline import __version__

    ttft, tpot, e2e = (values[found.num_skipped :] for values in latencies(served))
    return {
        "title": title, "kind": "serve", "subtitle": f"{served.workload.title}; {served.deployment.engine.title}",
        "version": __version__, "metrics": found.to_dict(), "capacity_tokens": served.capacity_tokens,
        "cdf": {"ttft": cdf(ttft), "tpot": cdf(tpot), "e2e": cdf(e2e)}, "samples": thinned(served.samples),
        "points": [_point(c) for c in points if c.found], "frontier": [], "best": None,
    }  # fmt: skip


def thinned(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    """At most ``MAX_POINTS`` of the samples, evenly."""
    step = max(1, len(samples["at_s"]) // 900)  # max points
    return {name: values[::step] for name, values in samples.items()}


def _point(candidate: Candidate) -> dict[str, Any]:
    found = candidate.found
    assert found is not None
    return {
        "title": html.unescape(candidate.title), "precision": candidate.precision, "devices": candidate.num_devices,
        "concurrency": candidate.concurrency, "user": found.tokens_per_s_per_user,
        "device": found.output_tokens_per_s_per_device, "ttft_s": found.ttft_s.mean, "tpot_s": found.tpot_s.mean,
        "usd": found.usd_per_million_output, "keeps": candidate.keeps, "good": found.good_frac,
    }  # fmt: skip
