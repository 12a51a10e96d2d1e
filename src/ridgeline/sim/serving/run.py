"""The event loop: arrivals, the front end, iterations of every worker, and caches on their way between pools."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from ridgeline.sim.serving.state import Requests, requests_of
from ridgeline.sim.serving.worker import Worker
from ridgeline.sim.serving.workload import Workload

ARRIVE, SEEN, END, MOVED, WAKE = range(5)
LAST = 1 << 60
"""Added to the order of events that come after all others of their instant."""


@dataclass(slots=True)
class Sampled:
    """What the pools looked like over time, at most ``limit`` points, thinned as they fill up."""

    limit: int = 4096
    stride: int = 1
    skipped: int = 0
    at_s: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def add(self, now_s: float, workers: list[Worker]) -> None:
        self.skipped += 1
        if self.skipped < self.stride:
            return
        self.skipped = 0
        self.at_s.append(now_s)
        self.held.append(sum(w.held + w.prefix_held for w in workers if w.decodes))
        self.running.append(sum(w.running for w in workers))
        self.waiting.append(sum(len(w.waiting) for w in workers))
        if len(self.at_s) >= self.limit:
            self.stride *= 2
            for name in ("at_s", "held", "running", "waiting"):
                setattr(self, name, getattr(self, name)[::2])


@dataclass(slots=True)
class Spans:
    """Iterations as they ran, the first ``limit`` of them: (worker, start, end, prompts, decoding, steps)."""

    limit: int = 0
    rows: list[tuple[int, float, float, int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """One simulation under way."""

    workload: Workload
    requests: Requests
    entry: list[Worker]  # take prompts
    decoders: list[Worker]  # where prompts go on, when that is elsewhere
    request_s: float
    token_s: float
    transfer_s: tuple[float, float]  # (fixed, a token) of moving a cache between pools
    spans: Spans
    sampled: Sampled = field(default_factory=Sampled)
    events: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    order: int = 0
    arrived: int = 0
    front_free_s: float = 0.0
    now_s: float = 0.0
    place: dict[int, int] = field(default_factory=dict)

    def push(self, at_s: float, kind: int, subject: int, version: int = 0) -> None:
        self.order += 1
        heappush(self.events, (at_s, self.order + (LAST if kind == WAKE else 0), kind, subject, version))

    @property
    def workers(self) -> list[Worker]:
        return self.entry + self.decoders

    def loop(self) -> None:
        self._begin()
        while self.events:
            self.now_s, _, kind, subject, version = heappop(self.events)
            if kind == END:
                worker = self.workers[subject] if self.decoders else self.entry[subject]
                if version == worker.version:
                    self._end(subject, worker)
            elif kind == SEEN:
                self._hand(subject, self.entry, 0)
            elif kind == ARRIVE:
                self._arrive(subject)
                self._next_open()
            elif kind == WAKE:
                if not self.workers[subject].is_busy:
                    self._start(subject, self.workers[subject])
            else:
                self._hand(subject, self.decoders, len(self.entry))

    def _begin(self) -> None:
        if self.workload.concurrency:
            for _ in range(min(self.workload.concurrency, len(self.workload))):
                self._arrive(self._take())
        else:
            self._next_open()

    def _take(self) -> int:
        self.arrived += 1
        return self.arrived - 1

    def _next_open(self) -> None:
        if not self.workload.concurrency and self.arrived < len(self.workload):
            request = self._take()
            self.push(float(self.workload.arrival_s[request]), ARRIVE, request)

    def _arrive(self, request: int) -> None:
        """Through the front end, one request after the other."""
        r = self.requests
        r.arrival_s[request] = self.now_s
        self.front_free_s = max(self.now_s, self.front_free_s) + self.token_s * r.isl[request]
        r.seen_s[request] = self.front_free_s + self.request_s / 2
        self.push(r.seen_s[request], SEEN, request)

    def _hand(self, request: int, pool: list[Worker], offset: int) -> None:
        """To the worker with the least to do; prefixes go where they were seen."""
        at = self._choose(request, pool)
        worker = pool[at]
        worker.arrive(request, self.now_s)
        if not worker.is_busy:  # once everyone who arrives at this instant is there
            self.push(self.now_s, WAKE, offset + at)
        elif worker.interrupt(self.now_s):
            self.push(worker.ends_s, END, offset + at, worker.version)

    def _choose(self, request: int, pool: list[Worker]) -> int:
        if len(pool) == 1:
            return 0
        key = self.requests.prefix[request]
        if key >= 0 and key in self.place:
            return self.place[key]
        at = min(range(len(pool)), key=lambda i: (pool[i].running + len(pool[i].waiting) + len(pool[i].partial), i))
        if key >= 0:
            self.place[key] = at
        return at

    def _start(self, at: int, worker: Worker) -> None:
        if worker.plan(self.now_s):
            self.push(worker.ends_s, END, at, worker.version)

    def _end(self, at: int, worker: Worker) -> None:
        prompts, decoding, began = len(worker.chunks), worker.running if worker.steps else 0, worker.began_s
        first, done = worker.complete()
        if len(self.spans.rows) < self.spans.limit:
            self.spans.rows.append((at, began, self.now_s, prompts, decoding, worker.steps))
        for request in first:
            if self.requests.made[request] == 0:
                self.requests.first_s[request] = self.now_s + self.request_s / 2
        for request in done:
            self._leave(request, worker)
        self.sampled.add(self.now_s, self.workers)
        self._start(at, worker)

    def _leave(self, request: int, worker: Worker) -> None:
        r = self.requests
        if self.decoders and not worker.decodes and r.osl[request] > 1:
            fixed, each = self.transfer_s
            moved_s = self.now_s + fixed + each * r.isl[request]
            r.first_s[request] = moved_s + self.request_s / 2
            self.push(moved_s, MOVED, request)
            return
        r.done_s[request] = max(self.now_s + self.request_s / 2, r.first_s[request])
        if self.workload.concurrency and self.arrived < len(self.workload):
            self._arrive(self._take())


def run_of(
    workload: Workload, entry: list[Worker], decoders: list[Worker], requests: Requests, *, request_s: float,
    token_s: float, transfer_s: tuple[float, float] = (0.0, 0.0), max_spans: int = 0,
) -> Run:  # fmt: skip
    return Run(workload, requests, entry, decoders, request_s, token_s, transfer_s, Spans(max_spans))


__all__ = ["Run", "Sampled", "Spans", "requests_of", "run_of"]
