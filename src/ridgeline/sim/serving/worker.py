"""One engine instance: continuous batching over a paged cache, an iteration or a run of equal steps at a time."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from ridgeline.sim.serving.oracle import Oracle

if TYPE_CHECKING:
    from ridgeline.sim.serving.state import Requests


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafts of ``draft`` tokens of which each is accepted with ``accept_frac``, at ``cost_frac`` of a step each."""

    draft: int
    accept_frac: float
    cost_frac: float = 0.05
    is_beams: bool = False  # beams of a search: none is accepted, and each reads the cache for itself

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens a step yields: the accepted run and the one the model adds."""
        a = self.accept_frac
        return float(self.draft + 1) if a >= 1 else (1 - a ** (self.draft + 1)) / (1 - a)


@dataclass(slots=True)
class Worker:
    """The state of one instance. Times are absolute seconds; tokens in the cache never exceed ``capacity``."""

    oracle: Oracle
    capacity: int
    requests: Requests
    speculation: Speculation | None = None
    prefills: bool = True
    decodes: bool = True
    waiting: deque[int] = field(default_factory=deque)
    partial: deque[int] = field(default_factory=deque)  # admitted, prompt not yet done
    finishing: list[tuple[int, int]] = field(default_factory=list)  # (tick at which it ends, request)
    running: int = 0
    context: float = 0  # tokens in the cache of running requests
    held: float = 0  # tokens reserved in the cache
    tick: int = 0
    polled: int = 0  # tick of a look at the queue
    since_s: float = 0.0  # when the last step began, of which the next was planned at the latest
    queued: int = 0  # tick at which the queue began to fill
    prefixes: OrderedDict[int, int] = field(default_factory=OrderedDict)
    prefix_held: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)  # of the iteration under way: (request, tokens)
    is_jump: bool = False
    began_s: float = 0.0
    ends_s: float = 0.0
    steps: int = 0
    version: int = 0
    is_busy: bool = False
    is_warm: bool = False  # an iteration full of prompt tokens has run
    iterations: int = 0
    busy_s: float = 0.0
    matrix_s: float = 0.0
    dram_s: float = 0.0
    preemptions: int = 0

    # what an iteration holds

    def plan(self, now_s: float) -> bool:
        """Choose what runs next; False when there is nothing to do."""
        self.version += 1
        if not self.prefills:
            self._receive()
        self.chunks = self._admit() if self.prefills else []
        if not self.chunks and not self.running:
            self.is_busy = False
            return False
        self.is_busy, self.began_s = True, now_s
        if self.chunks:
            self._begin_mixed(now_s)
        else:
            self._begin_jump(now_s)
        return True

    def _begin_mixed(self, now_s: float) -> None:
        engine, r = self.oracle.engine, self.requests
        groups = self.oracle.rank.layout.attention_dp
        decoding = self.running if engine.mixed and self.decodes else 0
        loads = [0] * groups
        shapes, done = [], 0
        for request, tokens in self.chunks:
            at = loads.index(min(loads))
            loads[at] += tokens
            shapes.append((tokens, r.cached[request]))
            done += r.cached[request] + tokens >= r.target[request]
        sequences, each = self._sequences(decoding)
        mean = self.context / self.running if self.running else 0.0
        self.ends_s = now_s + self.oracle.mixed_s(sequences, groups, mean, shapes, max(loads), done, each)
        if not self.iterations:
            self.ends_s += engine.cold_s
        # of an engine's token budget: prompts seldom end on it exactly
        if engine.cold_chunk_s and not self.is_warm and max(loads) >= 0.95 * engine.chunk_tokens:
            self.is_warm, self.ends_s = True, self.ends_s + engine.cold_chunk_s
        self.is_jump, self.steps = False, 1 if decoding else 0
        self._spend(self.ends_s - now_s, sum(loads) + decoding, self.context if decoding else 0)

    def _begin_jump(self, now_s: float) -> None:
        self.is_jump = True
        limit = self.finishing[0][0] - self.tick
        if not self.oracle.engine.reserves:
            room = self.capacity - self.held - self.prefix_held
            limit = min(limit, max(1, int(room / (self.running * self._rate()))))
        if self.waiting:
            late = 1 if self._is_late(self.waiting[0]) else limit
            limit = min(limit, self._must_wait() or late)
        self.steps = max(1, limit)
        self.ends_s = now_s + self._steps_s(self.steps)

    def _steps_s(self, num: int) -> float:
        groups = self.oracle.rank.layout.attention_dp
        sequences, each = self._sequences(self.running)
        seconds = self.oracle.steps_s(sequences, groups, self.context / self.running, num, each)
        return seconds * (1 + self.speculation.draft * self.speculation.cost_frac) if self.speculation else seconds

    def _sequences(self, running: int) -> tuple[int, int]:
        """How many read a cache of their own, and the tokens each of them computes in a step."""
        each = self._tokens_each()
        return (running * each, 1) if self.speculation and self.speculation.is_beams else (running, each)

    def _tokens_each(self) -> int:
        return 1 + self.speculation.draft if self.speculation else 1

    def _spend(self, seconds: float, tokens: int, read: float) -> None:
        matrix, cache = self.oracle.group_w
        self.busy_s += seconds
        self.matrix_s += tokens * matrix
        self.dram_s += min(seconds * 0.85, self.oracle.weight_peak_s + read * cache)
        self.iterations += 1

    # admission and the cache

    def _admit(self) -> list[tuple[int, int]]:
        """Prompt tokens of the next iteration, first come first served."""
        if not self.partial and not self.waiting:
            return []
        engine, r = self.oracle.engine, self.requests
        groups = self.oracle.rank.layout.attention_dp
        budget = self._budget()
        if self._must_wait():
            return []
        chunks: list[tuple[int, int]] = []
        for request in self.partial:
            take = min(r.target[request] - r.cached[request], budget)
            if take <= 0:
                return chunks
            chunks.append((request, take))
            budget -= take
        while self.waiting and budget > 0 and self.running + len(self.partial) < engine.max_sequences * groups:
            request = self.waiting[0]
            if self._is_late(request):
                break
            if chunks and not engine.chunked and self._new_tokens(request) > budget:
                break
            if not self._enter(request, alone=not chunks and not self.running and not self.partial):
                break
            self.waiting.popleft()
            self.partial.append(request)
            take = r.target[request] - r.cached[request]
            take = min(take, budget) if engine.chunked else take
            chunks.append((request, take))
            budget -= take
        self.polled = self.tick
        return chunks

    def _budget(self) -> int:
        """Prompt tokens of one iteration: of every attention group and of every batch that is between two stages.

        An engine that cannot cut prompts is started with room for a whole one beside what is decoding.
        """
        engine, layout = self.oracle.engine, self.oracle.rank.layout
        whole = self._new_tokens(self.waiting[0]) if self.waiting and not engine.chunked else 0
        decoding, batches = self.running * self._tokens_each() if engine.mixed else 0, layout.attention_dp * layout.pp
        return max(engine.chunk_tokens * batches - decoding, whole * batches)

    def _must_wait(self) -> int:
        """Steps until the queue is looked at; 0 is now."""
        engine = self.oracle.engine
        if self.partial or not self.running:
            return 0
        if engine.hold_steps and not self._is_worth_it():
            return max(0, self.queued + engine.hold_steps - self.tick)
        return self._look(0)

    def _look(self, steps: int) -> int:
        """Steps to the first look at the queue after ``steps``: looks go on whether or not anyone has come."""
        return steps + (self.polled - self.tick - steps) % self.oracle.engine.poll_steps

    def _is_late(self, request: int) -> bool:
        """Whether the next iteration was already on its way to the device when the request came."""
        busy = self.running or self.partial
        return bool(self.oracle.engine.ahead and busy and self.requests.seen_s[request] > self.since_s)

    def _is_worth_it(self) -> bool:
        """Enough prompts wait to start without the rest."""
        engine = self.oracle.engine
        if engine.hold_prompts:
            return len(self.waiting) >= engine.hold_prompts
        tokens = sum(self.requests.isl[request] for request in self.waiting)
        return tokens >= 0.9 * engine.chunk_tokens

    def _enter(self, request: int, *, alone: bool) -> bool:
        """Room for the request's prompt (and its output, where the engine reserves it)? Then take it."""
        engine, r = self.oracle.engine, self.requests
        prompt = r.isl[request] + r.made[request]
        cached = self._reusable(request)
        pad = engine.block_tokens
        need = prompt - cached + pad + (r.osl[request] - r.made[request] if engine.reserves else 0)
        spare = 0 if alone else self.capacity // 100
        while self.held + self.prefix_held + need + spare > self.capacity and self._forget(r.prefix[request]):
            pass
        if self.held + self.prefix_held + need + spare > self.capacity:
            if alone:
                r.refuse(request, self.capacity)
            return False
        r.target[request], r.cached[request], r.reused[request] = prompt, cached, cached
        r.taken[request] = need
        self.held += need
        return True

    def _new_tokens(self, request: int) -> int:
        return self.requests.isl[request] + self.requests.made[request] - self._reusable(request)

    def _reusable(self, request: int) -> int:
        r = self.requests
        key = r.prefix[request]
        if key < 0 or key not in self.prefixes:
            return 0
        self.prefixes.move_to_end(key)
        return min(self.prefixes[key], r.isl[request] - 1)

    def _forget(self, kept: int) -> bool:
        """Drop the least recently used prefix; False when none is left to drop."""
        for key in self.prefixes:
            if key != kept:
                self.prefix_held -= self.prefixes.pop(key)
                return True
        return False

    def _remember(self, request: int) -> None:
        """Keep the prefix of a finished prompt for the next request that starts the same."""
        r = self.requests
        key, tokens = r.prefix[request], r.prefix_tokens[request]
        if key < 0 or key in self.prefixes or self.held + self.prefix_held + tokens > self.capacity:
            return
        self.prefixes[key] = tokens
        self.prefix_held += tokens

    # the end of an iteration

    def complete(self) -> tuple[list[int], list[int]]:
        """Apply the iteration that just ended: (requests that got their first token, requests that are done)."""
        self.since_s = self.ends_s - (self.ends_s - self.began_s) / max(self.steps, 1)
        if self.is_jump:
            self._spend_jump(self.steps)
            self._advance(self.steps)
            return [], self._collect()
        if self.steps:
            self._advance(1)
        done = self._collect()
        return self._end_chunks(done), done

    def _spend_jump(self, steps: int) -> None:
        matrix, cache = self.oracle.group_w
        seconds = self.ends_s - self.began_s
        self.busy_s += seconds
        self.matrix_s += steps * self.running * self._tokens_each() * matrix
        read = steps * (self.oracle.weight_peak_s + self.context * cache)
        self.dram_s += min(seconds * 0.85, read)
        self.iterations += steps

    def _advance(self, steps: int) -> None:
        gained = self.running * steps * self._rate()
        self.tick += steps
        self.context += gained
        if not self.oracle.engine.reserves:
            self.held += gained
            if self.held + self.prefix_held > self.capacity:
                self._make_room()

    def _make_room(self) -> None:
        while self.held + self.prefix_held > self.capacity and self._forget(-1):
            pass
        while self.held + self.prefix_held > self.capacity and self.running > 1:
            self._preempt()

    def _preempt(self) -> None:
        """The latest arrival gives its cache back and starts again with what it has made so far as its prompt."""
        latest = max(range(len(self.finishing)), key=lambda i: self.finishing[i][1])
        _, request = self.finishing.pop(latest)
        self.finishing.sort()
        r = self.requests
        r.made[request] += 1 + int(self._lived(request))
        self._leave(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _lived(self, request: int) -> float:
        """Tokens a running request has made since its prompt ended, beyond the first."""
        return (self.tick - self.requests.joined[request]) * self._rate()

    def _rate(self) -> float:
        return self.speculation.tokens_per_step if self.speculation else 1.0

    def _leave(self, request: int) -> None:
        r = self.requests
        grown = 1 + self._lived(request)
        self.running -= 1
        self.context -= r.target[request] + grown
        self.held -= r.taken[request] + (0 if self.oracle.engine.reserves else grown)
        if not self.running:
            self.context = 0

    def _collect(self) -> list[int]:
        done = []
        while self.finishing and self.finishing[0][0] <= self.tick:
            _, request = heappop(self.finishing)
            self._leave(request)
            done.append(request)
        return done

    def _end_chunks(self, done: list[int]) -> list[int]:
        """Prompts that are complete now begin to decode, or leave when one token was all they wanted."""
        r, first = self.requests, []
        for request, tokens in self.chunks:
            r.cached[request] += tokens
            if r.cached[request] < r.target[request]:
                continue
            self.partial.remove(request) if self.partial[0] != request else self.partial.popleft()
            self._remember(request)
            first.append(request)
            left = r.osl[request] - r.made[request] - 1
            if left <= 0 or not self.decodes:
                self.held -= r.taken[request]
                done.append(request)
            else:
                self._join(request, left)
        self.chunks = []
        return first

    def _join(self, request: int, left: int) -> None:
        r, rate = self.requests, self._rate()
        self.running += 1
        self.context += r.target[request] + 1
        self.held += 0 if self.oracle.engine.reserves else 1
        r.joined[request] = self.tick
        heappush(self.finishing, (self.tick + max(1, math.ceil(left / rate)), request))

    def _receive(self) -> None:
        """Prompts whose cache came from elsewhere join as soon as there is room."""
        engine, r = self.oracle.engine, self.requests
        groups = self.oracle.rank.layout.attention_dp
        while self.waiting and self.running < engine.max_sequences * groups:
            request = self.waiting[0]
            if r.made[request]:
                return  # preempted: its cache has to come again, which this worker cannot make
            need = r.isl[request] + engine.block_tokens + (r.osl[request] if engine.reserves else 0)
            if self.held + need > self.capacity:
                if not self.running:
                    r.refuse(request, self.capacity)
                return
            self.waiting.popleft()
            r.target[request], r.taken[request] = r.isl[request], need
            self.held += need
            self._join(request, r.osl[request] - 1)

    # arrivals

    def arrive(self, request: int, now_s: float) -> None:
        """Join the queue; the first of a queue starts the clock of an engine that holds prompts back."""
        if not self.waiting:
            self.queued = self.tick + (self._steps_past(now_s) if self.is_busy and self.is_jump else 0)
        self.waiting.append(request)

    def _steps_past(self, now_s: float) -> int:
        """Steps of this run that have ended by the first boundary after ``now_s``; later steps take longer."""
        low, high = 1, self.steps
        guess = min(high, int((now_s - self.began_s) * self.steps / (self.ends_s - self.began_s)) + 1)
        while low < high:
            short_s = now_s - self.began_s - self._steps_s(guess)
            low, high = (guess + 1, high) if short_s > 0 else (low, guess)
            mean_s = (now_s - self.began_s) / max(guess, 1)
            guess = min(max(guess + math.ceil(short_s / mean_s), low), max(high - 1, low)) if mean_s > 0 else low
        return low

    def interrupt(self, now_s: float) -> bool:
        """A new request looks in: a run of steps ends at the next boundary at which the engine polls its queue."""
        if not self.is_busy or not self.is_jump or self.steps <= 1:
            return False
        due = max(self._look(self._steps_past(now_s) + self.oracle.engine.ahead), self._must_wait())
        if due >= self.steps:
            return False
        self.steps = due
        self.ends_s = self.began_s + self._steps_s(due)
        self.version += 1
        return True
