"""How many programs share a sequence's keys, and how many keys they take at once."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Decode:
    """Keys of a block, shares of a sequence, warps and stages; ``early`` says when the joining kernel may start,
    ``inside`` that there is none: the last program of a key head joins its shares."""

    keys: int
    shares: int
    num_warps: int = 4
    num_stages: int = 3
    early: int = 2
    inside: bool = False


def choose(batch: int, key_heads: int, longest: int, head_dim: int, num_sms: int) -> Decode:
    keys = 64 if head_dim <= 128 else 32
    # blocks of keys that a share has at least: one step of decoding is too short to be spent on few SMs
    shares = even_shares(max(1, batch * key_heads), max(1, longest // (1 * keys)), num_sms)
    # A share of more blocks than this gains from a third stage; a shorter one loses by it.
    stages = 3 if longest > 4 * keys * shares else 2
    # shares of a key head that its last program joins itself: as fast as a kernel of their own to 8 (9.2 against 9.0
    # µs, 5.9 against 6.0 in a graph), and a launch less; 16 take 0.3 µs longer, 33 five, since one program reads them
    # all
    return Decode(keys, shares, 4, stages, inside=1 < shares <= 8)


def even_shares(heads: int, most: int, num_sms: int) -> int:
    """Shares by which the SM with most programs has the least to read, about two programs on each.

    32 key heads of 4,096 keys in 8 shares take 24.1 µs, in 9 26.3 (22 and 24 in a graph): 288 programs leave some
    SMs with three and most with two.
    """

    def unevenness(shares: int) -> tuple[float, float, int]:
        a_processor = heads * shares / num_sms
        # programs per sm
        return round(cdiv(heads * shares, num_sms) / a_processor, 1), abs(a_processor - 2), shares

    # CTAs per SM that sharing may make: three fit, by their shared memory
    fitting = [shares for shares in range(1, most + 1) if heads * shares <= 3 * num_sms]
    return min(fitting or [1], key=unevenness)


def joined_columns(heads: int, wide: int) -> int:
    """Columns of a head that a program of the joining kernel takes: few where there are few heads, as in paged
    attention."""
    return min(32 if heads <= 64 else 256, wide)


def joined_at_once(ratio: int, wide: int, shares: int) -> int:
    """Shares that a program joins at once, of as many heads as share keys."""
    # of shares that are joined at once: 64 registers of a thread
    return clamp(power_of_two(shares), 1, max(1, 8192 // (power_of_two(ratio) * wide)))
