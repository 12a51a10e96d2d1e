"""A shuffled order of any length without a table of it."""

from __future__ import annotations

import hashlib


class Permutation:
    """A bijection of ``range(num)`` that a seed decides: a Feistel network, walked until it stays in range."""

    def __init__(self, num: int, seed: str) -> None:
        self.num = num
        self._half = max(1, ((max(num - 1, 1)).bit_length() + 1) // 2)
        self._keys = [hashlib.sha256(f"{seed}:{i}".encode()).digest()[:8] for i in range(4)]

    def __getitem__(self, index: int) -> int:
        mask = (1 << self._half) - 1
        while True:
            left, right = index >> self._half, index & mask
            for key in self._keys:
                mixed = hashlib.blake2b(right.to_bytes(8, "little"), key=key, digest_size=8).digest()
                left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
            index = left << self._half | right
            if index < self.num:
                return index
