"""The roles of latent decoding of few heads on the stand-ins of ``role_play``, in any order of events.

What ``narrow.py`` waits for and tells, statement by statement, with blocks of four keys in three thirds of three
columns, the last of which is the rotary part, and a line that is cut by two keys.
"""

from dataclasses import dataclass, field

import numpy as np
import role_play
from role_play import ring

KEYS, HEADS, THIRD, VALUES, WIDTH = 4, 2, 3, 8, 9


@dataclass
class Narrow(role_play.Program):
    """One program, with rings of thirds, of probabilities and of queries instead."""

    num_queries: int = 1
    unit: int = 2
    ends: int = 0
    seen: dict = field(default_factory=dict)

    def __post_init__(self):
        self.thirds = np.full((self.num_halves, KEYS, THIRD), np.nan)
        self.p_room, self.alphas = np.full((2, KEYS, HEADS), np.nan), np.full((2, HEADS), np.nan)
        self.q_room, self.totals = np.full((self.num_queries, HEADS, WIDTH), np.nan), np.full(HEADS, np.nan)
        self.full, self.empty = ring(self.num_halves, 1), ring(self.num_halves, 2)
        self.told, self.over, self.over_empty = ring(2, 1), ring(1, 1), ring(1, 2)
        self.q_full, self.q_empty = ring(self.num_queries, 1), ring(self.num_queries, 1)

    def stretches(self, b, first, left):
        """Sequence, its first unit, one past the last, and one past the last key."""
        while left > 0:
            length = len(self.keys[b])
            units = -(-length // self.unit)
            goes = min(first + left, units + self.ends * (length > 0))
            last = min(goes, units)
            if last > first:
                yield b, first, last, min(last * self.unit, length)
            left, first, b = left - (goes - first), 0, b + 1

    def third(self, num, which):
        return self.thirds[(num + which) % self.num_halves]

    def feed(self, *stretch):
        num = 0
        for turn, (b, first, _, end) in enumerate(self.stretches(*stretch)):
            for key in range(first * self.unit, end, KEYS):
                there = min(-(-(end - key) // self.unit) * self.unit, KEYS)
                rows = np.full((there, WIDTH), np.nan)  # of a last tile whatever the page has
                own = self.keys[b][key : key + there]
                rows[: len(own)] = own
                for third in range(3):
                    yield self.room("empty", num)
                    value = rows[:, third * THIRD : (third + 1) * THIRD]
                    self.copy(self.full[num % self.num_halves], (self.third(num, 0)[:there], value))
                    num += 1
                if key == first * self.unit:
                    yield self.room("q_empty", turn)
                    half = turn % self.num_queries
                    self.copy(self.q_full[half], (self.q_room[half], self.q[b]))

    def scores(self, *stretch):
        num = block = 0
        for turn, (b, first, _, end) in enumerate(self.stretches(*stretch)):
            top, sums, half = np.full(HEADS, -np.inf), np.zeros((KEYS, HEADS)), turn % self.num_queries
            yield self.turn("q_full", turn)
            for key in range(first * self.unit, end, KEYS):

                def product(num=num, half=half):
                    return np.concatenate([self.third(num, i) for i in range(3)], 1) @ self.q_room[half].T

                for third in range(3):
                    yield self.turn("full", num + third)
                s = product()
                yield None
                np.testing.assert_array_equal(s, product(), "operands of a product changed")
                num += 3
                if key + KEYS >= end:
                    self.q_empty[half].arrive()
                    s[end - key :] = -np.inf
                raised = np.maximum(top, s.max(0))
                alpha, p, slot = np.exp(top - raised), np.exp(s - raised), block % 2
                self.alphas[slot], self.p_room[slot] = alpha, p
                yield None
                self.told[slot].arrive()
                sums, top, block = sums * alpha + p, raised, block + 1
            yield self.room("over_empty", turn)
            self.totals[:] = sums.sum(0)
            yield None
            self.over[0].arrive()
            self.left_behind[b, first, "seen"] = top, sums.sum(0)

    def sums(self, c, *stretch):
        num = block = 0
        mine = slice(c * VALUES // 2, (c + 1) * VALUES // 2)
        for turn, (b, first, _, end) in enumerate(self.stretches(*stretch)):
            o = np.zeros((VALUES // 2, HEADS))
            for key in range(first * self.unit, end, KEYS):
                slot, rest = block % 2, end - key
                yield self.turn("told", block)
                self.empty[(num + 2 * (1 - c)) % self.num_halves].arrive()
                alpha = self.alphas[slot].copy()
                for column in range(mine.start, mine.stop) if rest < KEYS else ():
                    self.third(num, column // THIRD)[rest:, column % THIRD] = 0.0

                def product(num=num, slot=slot):
                    columns = [self.third(num, i // THIRD)[:, i % THIRD] for i in range(mine.start, mine.stop)]
                    return np.stack(columns) @ self.p_room[slot]

                found = product()
                yield None
                np.testing.assert_array_equal(found, product(), "operands of a product changed")
                o = o * alpha + found
                for third in (c, c + 1):
                    self.empty[(num + third) % self.num_halves].arrive()
                num, block = num + 3, block + 1
            yield self.turn("over", turn)
            total = self.totals.copy()
            yield None
            self.over_empty[0].arrive()
            self.left_behind[b, first, c] = o, total
