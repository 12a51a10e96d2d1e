"""The result of ``serve``: a simulated deployment with every request, the figures its users see, and its timeline."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.result import Result
from ridgeline.sim.serving.metrics import Metrics, Slo
from ridgeline.sim.serving.simulate import Served
from ridgeline.trace import Trace, TraceBuilder


@dataclass(frozen=True, slots=True, repr=False)
class Serving(Result):
    """``metrics`` are the figures (``metrics.ttft_s.mean``); ``served`` has the times of every request."""

    served: Served
    metrics: Metrics
    slo: Slo

    def summary(self) -> str:
        return self.metrics.summary()

    def records(self) -> list[dict[str, Any]]:
        """One row a latency."""
        return self.metrics.records()

    def to_dict(self) -> dict[str, Any]:
        """The deployment, its load, the limits that were asked for, and all figures, in SI units."""
        d = self.served.deployment
        deployment = {
            "model": d.anatomy.name, "device": d.device.name, "num_devices": d.num_devices,
            "precision": d.precision.name, "kv_precision": d.precision.kv, "engine": d.engine.name,
            "pool": asdict(d.pool), "prefill": asdict(d.prefill) if d.prefill else None,
            "cache_tokens": self.served.capacity_tokens,
            "speculation": asdict(d.speculation) if d.speculation else None,
        }  # fmt: skip
        limits = {name: value for name, value in asdict(self.slo).items() if value < math.inf}
        return {"deployment": deployment, "workload": self.served.workload.title, "slo": limits,
                **self.metrics.to_dict()}  # fmt: skip

    def trace(self) -> Trace:
        """Cache, batch and queue over time, and the iterations of every instance that ``serve(…, spans=N)`` kept."""
        served, deployment = self.served, self.served.deployment
        where = f"{deployment.num_devices} × {deployment.device.name}"
        trace = TraceBuilder(name=f"{deployment.anatomy.name} on {where}, served")
        num_prefill = deployment.prefill.replicas if deployment.prefill else 0
        for worker, start_s, end_s, prompts, decoding, steps in served.spans:
            lane = f"prefill {worker}" if worker < num_prefill else f"replica {worker - num_prefill}"
            what = "mixed" if prompts and decoding else "prefill" if prompts else "decode"
            detail = f"{prompts} prompts" if prompts else f"{steps} steps"
            trace.add(f"{what}: {detail}, batch {decoding}", lane, start_s, end_s - start_s, op=what, phase=what)
        for name, label in (("held", "cache_tokens"), ("running", "batch"), ("waiting", "queue")):
            for at_s, value in zip(served.samples["at_s"], served.samples[name], strict=True):
                trace.count(label, at_s, value)
        if served.iterations and len(served.spans) < served.iterations:
            trace.note("runs of equal decoding steps are drawn as one span")
        return trace.build()
