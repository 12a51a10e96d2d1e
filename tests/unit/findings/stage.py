"""A host thread and a device that really queue: small runs are played here, with a mistake in them or without."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import Any

from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.explain import findings_of
from ridgeline.findings.finding import Finding
from ridgeline.hardware import device
from ridgeline.trace import Kind, Trace, TraceBuilder

LATENCY_S, GAP_S, CALL_S, RETURN_S = 5e-6, 1e-6, 3e-6, 2e-6


class Stage:
    """Plays host code line by line; kernels start when they are launched and their stream is free."""

    def __init__(self, rank: int = 0, on: str = "h200") -> None:
        self.build = TraceBuilder("played")
        self.build.describe(devices=[{"name": f"NVIDIA {on.upper()}"}])
        self.on, self.rank = on, rank
        self.now_s, self.free_s = 0.0, dict[int, float]()
        self.parents: list[int] = []
        self._open: list[tuple[Any, ...]] = []
        self._spans: list[dict[str, Any]] = []
        self.step_number = -1
        self.facts: dict[str, Any] = {}

    # the host

    def work(self, us: float) -> None:
        """Host code that no span covers."""
        self.now_s += us * 1e-6

    @contextmanager
    def span(self, name: str, kind: Kind = Kind.OP, **more: Any):
        """A host span around what is inside."""
        index = self._add(name, "host", self.now_s, 0.0, kind=kind, thread=1, **more)
        self.parents.append(index)
        began_s = self.now_s
        yield index
        self.parents.pop()
        self._spans[index]["duration_s"] = self.now_s - began_s

    def host(self, name: str, us: float, kind: Kind = Kind.OP, **more: Any) -> None:
        with self.span(name, kind, **more):
            self.work(us)

    @contextmanager
    def step(self):
        self.step_number += 1
        with self.span(f"ProfilerStep#{self.step_number}", Kind.STEP):
            yield

    # calls

    def call(self, name: str, us: float = CALL_S * 1e6) -> int:
        index = self._add(name, "host", self.now_s, us * 1e-6, kind=Kind.RUNTIME, thread=1)
        self.now_s += us * 1e-6
        return index

    def kernel(
        self, name: str, us: float, *, op: str = "", stream: int = 7, host_us: float = 10.0, kind: Kind = Kind.KERNEL,
        shapes: list[Any] | None = None, dtypes: list[str] | None = None, blocks: int = 1000, module: str = "",
        extra: dict[str, Any] | None = None, around: str = "", call: str = "cudaLaunchKernel",
    ) -> float:  # fmt: skip
        """An op that launches one kernel; the kernel's end."""
        words = {"shapes": json.dumps(shapes)} if shapes else {}
        words |= {"dtypes": json.dumps(dtypes)} if dtypes else {}
        with self.span(op or "aten::op", extra=words or None) if not around else self.span(around):
            self.work(host_us - CALL_S * 1e6)
            if around:
                with self.span(op or "aten::op", extra=words or None):
                    return self._launch(name, us, stream, kind, op, blocks, module, extra, call)
            return self._launch(name, us, stream, kind, op, blocks, module, extra, call)

    def _launch(self, name, us, stream, kind, op, blocks, module, extra, call) -> float:
        started_s = self.now_s
        launch = self.call(call)
        at_s = max(started_s + LATENCY_S, self.free_s.get(stream, -1.0) + GAP_S)
        more = {**(extra or {}), **({"grid": (blocks, 1, 1)} if kind == Kind.KERNEL else {})}
        self._add(name, f"stream {stream}", at_s, us * 1e-6, kind=kind, device=0, stream=stream, launch=launch,
                  op=op, module=module, extra=more or None)  # fmt: skip
        self.free_s[stream] = at_s + us * 1e-6
        return self.free_s[stream]

    def wait(self, name: str = "cudaStreamSynchronize") -> None:
        """The host stops until everything launched so far is done."""
        done_s = max(self.now_s + CALL_S, max(self.free_s.values(), default=0.0) + RETURN_S)
        self._add(name, "host", self.now_s, done_s - self.now_s, kind=Kind.RUNTIME, thread=1)
        self.now_s = done_s

    def copy(self, word: str, num_bytes: int, us: float, *, stream: int = 7, waits: bool = False) -> None:
        """A copy over the host link: ``HtoD pageable`` and the like."""
        with self.span("aten::copy_"):
            self.work(7)
            facts = {"copy": word, "bytes": num_bytes}
            self._launch(f"Memcpy {word}", us, stream, Kind.MEMCPY, "aten::copy_", 0, "", facts, "cudaMemcpyAsync")
            if waits:
                self.wait()

    def collective(
        self, us: float, *, name: str = "ncclDevKernel_AllReduce_Sum", stream: int = 20, num_bytes: int = 0
    ) -> None:
        self.kernel(name, us, op="nccl:all_reduce", stream=stream, kind=Kind.COMMUNICATION,
                    extra={"message_bytes": num_bytes} if num_bytes else None)  # fmt: skip

    # the end

    def _add(self, name: str, lane: str, start_s: float, duration_s: float, **more: Any) -> int:
        parent = self.parents[-1] if self.parents and more.get("kind") not in (Kind.KERNEL,) else -1
        if more.get("device") is not None:
            parent = -1
        self._spans.append(
            {"name": name, "lane": lane, "start_s": start_s, "duration_s": duration_s, "parent": parent,
             "step": self.step_number, "rank": self.rank, **more}
        )  # fmt: skip
        return len(self._spans) - 1

    def trace(self) -> Trace:
        while self._spans:
            self.build.add(**self._spans.pop(0))
        if self.facts:
            self.build.describe(ridgeline=self.facts)
        return self.build.build()

    def context(self, others: tuple[Trace, ...] = ()) -> TraceContext:
        return TraceContext(self.trace(), device(self.on), others)

    def findings(self, others: tuple[Trace, ...] = ()) -> list[Finding]:
        return findings_of(self.context(others))


def healthy(stage: Stage, num_kernels: int = 20, us: float = 200.0) -> None:
    """Half-precision products, one after another, faster launched than run."""
    for _ in range(num_kernels):
        stage.kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", us, op="aten::mm", dtypes=["c10::BFloat16"] * 2,
                     shapes=[[4096, 4096], [4096, 4096]])  # fmt: skip


def rules_of(findings: list[Finding]) -> list[str]:
    return [finding.rule for finding in findings]
