"""The roles of latent decoding on stand-ins for barriers, the copy engine and shared memory, in any order of events.

What ``roles.py`` waits for and tells, statement by statement, with blocks of four keys and halves of three columns.
Copies land whenever they like, products read their operands when they are issued and again when they are waited for,
and shared memory is no number until somebody writes it: whoever reads too early or overwrites too early gets a wrong
result, and whoever waits for nothing is found out.
"""

import random
from dataclasses import dataclass, field

import numpy as np

KEYS, WIDTH, MORE, HEADS, TILE = 4, 3, 2, 2, 2


class Stuck(Exception):
    """Everybody waits."""


@dataclass
class Barrier:
    """As many arrivals and announced copies as a phase takes; a wait is for a phase of its parity to be over."""

    need: int
    phase: int = 0
    arrived: int = 0
    on_their_way: int = 0

    def arrive(self):
        self.arrived += 1
        self.settle()

    def settle(self):
        assert self.arrived <= self.need, "more arrive than a phase has"
        if self.arrived == self.need and self.on_their_way == 0:
            self.phase, self.arrived = self.phase + 1, 0

    def over(self, parity):
        return (self.phase & 1) != parity


def ring(num, need):
    return [Barrier(need) for _ in range(num)]


@dataclass(eq=False)
class Copy:
    """What is on its way: a barrier that hears of it, and what it writes where."""

    bar: Barrier
    writes: tuple


@dataclass
class Program:
    """One program: its shared memory, its barriers, what it has on its way, and what it leaves behind."""

    q: np.ndarray  # [batch, HEADS, 2 * WIDTH + MORE]
    keys: list  # of each sequence, [length, 2 * WIDTH + MORE]
    num_halves: int
    num_mores: int
    skipped: str = ""  # a wait that is left out
    copies: list = field(default_factory=list)
    left_behind: dict = field(default_factory=dict)

    def __post_init__(self):
        self.halves = np.full((self.num_halves, KEYS, WIDTH), np.nan)
        self.mores = np.full((self.num_mores, KEYS, max(MORE, HEADS)), np.nan)
        self.held = np.full((self.num_halves, HEADS, WIDTH), np.nan)  # the same room as halves
        self.q_room = np.full((HEADS, WIDTH + MORE), np.nan)
        self.alphas, self.totals = np.full((self.num_mores, HEADS), np.nan), np.full(HEADS, np.nan)
        self.half_full, self.half_empty = ring(self.num_halves, 1), ring(self.num_halves, 1)
        self.more_full = ring(self.num_mores, 1)
        self.told, self.over, self.over_empty = ring(self.num_mores, 1), ring(1, 1), ring(1, 2)
        self.q_full, self.q_empty = ring(1, 1), ring(1, 1)

    def turn(self, name, num):
        """A wait for the ``num``-th thing."""
        bars = getattr(self, name)
        return name, bars[num % len(bars)], (num // len(bars)) & 1

    def room(self, name, num):
        """A wait for its place."""
        who, bar, parity = self.turn(name, num)
        return who, bar, parity ^ 1

    def copy(self, bar, *writes):
        """Lands later; until then nobody knows what is there. The announcement is an arrival."""
        for target, _ in writes:
            target[:] = np.nan
        bar.on_their_way += 1
        bar.arrive()
        self.copies.append(Copy(bar, writes))

    def land(self, copy):
        self.copies.remove(copy)
        for target, value in copy.writes:
            target[:] = value
        copy.bar.on_their_way -= 1
        copy.bar.settle()

    def stretches(self, b, first, left):
        while left > 0:
            blocks = -(-len(self.keys[b]) // KEYS)
            last = min(first + left, blocks)
            if last > first:
                yield b, first, last, len(self.keys[b])
            left, first, b = left - (last - first), 0, b + 1

    def feed(self, *stretch):
        num = block = 0
        for turn, (b, first, last, length) in enumerate(self.stretches(*stretch)):
            yield self.room("half_empty", num)
            slot = num % self.num_halves
            self.halves[slot] = np.nan
            self.copy(self.half_full[slot], (self.held[slot], self.q[b][:, :WIDTH]))
            num += 1
            for i in range(first, last):
                there = min(-(-(min(last * KEYS, length) - i * KEYS) // TILE) * TILE, KEYS)
                rows = np.full((there, 2 * WIDTH + MORE), np.nan)  # of a last tile whatever the page has
                own = self.keys[b][i * KEYS : i * KEYS + there]
                rows[: len(own)] = own
                for c in range(2):
                    yield self.room("half_empty", num)
                    slot = num % self.num_halves
                    self.held[slot] = np.nan
                    value = rows[:, c * WIDTH : (c + 1) * WIDTH]
                    self.copy(self.half_full[slot], (self.halves[slot, :there], value))
                    num += 1
                slot = block % self.num_mores
                self.copy(self.more_full[slot], (self.mores[slot, :there, :MORE], rows[:, 2 * WIDTH :]))
                block += 1
                if i == first:
                    yield self.room("q_empty", turn)
                    self.copy(self.q_full[0], (self.q_room, self.q[b][:, WIDTH:]))

    def scores(self, *stretch):
        num = block = 0
        for turn, (b, first, last, length) in enumerate(self.stretches(*stretch)):
            top, total = np.full(HEADS, -np.inf), np.zeros(HEADS)
            yield self.turn("half_full", num)
            held = self.held[num % self.num_halves].copy()
            yield None
            self.half_empty[num % self.num_halves].arrive()
            num += 1
            yield self.turn("q_full", turn)
            for i in range(first, last):
                slot, low, high = block % self.num_mores, num % self.num_halves, (num + 1) % self.num_halves

                def product(slot=slot, low=low, high=high, held=held):
                    s = held @ self.halves[low].T + self.q_room[:, :WIDTH] @ self.halves[high].T
                    return s + self.q_room[:, WIDTH:] @ self.mores[slot, :, :MORE].T

                yield self.turn("half_full", num)
                yield self.turn("half_full", num + 1)
                yield self.turn("more_full", block)
                s = product()
                yield None
                np.testing.assert_array_equal(s, product(), "operands of a product changed")
                if i + 1 == last:
                    self.q_empty[0].arrive()
                s[:, max(0, length - i * KEYS) :] = -np.inf
                raised = np.maximum(top, s.max(1))
                alpha, p = np.exp(top - raised), np.exp(s - raised[:, None])
                self.alphas[slot] = alpha
                self.mores[slot, :, :HEADS] = p.T
                yield None
                self.told[slot].arrive()
                total, top = total * alpha + p.sum(1), raised
                num, block = num + 2, block + 1
            yield self.room("over_empty", turn)
            self.totals[:] = total
            yield None
            self.over[0].arrive()
            self.left_behind[b, first, "seen"] = top, total

    def sums(self, c, *stretch):
        num = block = 0
        for turn, (b, first, last, length) in enumerate(self.stretches(*stretch)):
            o = np.zeros((HEADS, WIDTH))
            num += 1
            for i in range(first, last):
                slot, mine, rest = block % self.num_mores, (num + c) % self.num_halves, length - i * KEYS
                yield self.turn("told", block)
                yield self.turn("half_full", num + c)
                alpha = self.alphas[slot].copy()
                if rest < KEYS:
                    self.halves[mine, rest:] = 0.0
                    yield None
                found = self.mores[slot, :, :HEADS].T @ self.halves[mine]
                yield None
                again = self.mores[slot, :, :HEADS].T @ self.halves[mine]
                np.testing.assert_array_equal(found, again, "operands of a product changed")
                o = o * alpha[:, None] + found
                self.half_empty[mine].arrive()
                num, block = num + 2, block + 1
            yield self.turn("over", turn)
            total = self.totals.copy()
            yield None
            self.over_empty[0].arrive()
            self.left_behind[b, first, c] = o, total

    def ready(self, wait):
        return wait is None or wait[0] == self.skipped or wait[1].over(wait[2])

    def play(self, seed, *stretch):
        """All roles to their ends, in an order drawn from the seed; some are slow for a while."""
        rng = random.Random(seed)
        roles = (self.feed(*stretch), self.scores(*stretch), self.sums(0, *stretch), self.sums(1, *stretch))
        waits, slow = dict.fromkeys(roles), None
        while waits:
            choices = [*(role for role, wait in waits.items() if self.ready(wait)), *self.copies]
            if not choices:
                raise Stuck(sorted(str(wait and wait[0]) for wait in waits.values()))
            if rng.random() < 0.05:
                slow = rng.choice(choices)
            quick = [one for one in choices if one is not slow] or choices
            chosen = rng.choice(quick)
            if isinstance(chosen, Copy):
                self.land(chosen)
                continue
            try:
                waits[chosen] = next(chosen)
            except StopIteration:
                del waits[chosen]
