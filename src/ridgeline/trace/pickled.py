"""Plain data out of a pickle (dicts, lists, numbers, text) without running anything it asks for."""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any

from ridgeline.errors import InputError

MAX_OBJECTS = 60_000_000  # opcodes; at 64 bytes an empty dict, 4 GB at most
MAX_DEPTH = 2_000
_KEYS = frozenset((str, int, float, bool, bytes, type(None)))
_NAMES = {op.code.encode("latin-1"): op.name for op in pickletools.opcodes}
Step = Callable[["_Reader"], None]


def plain_data(data: bytes, where: str) -> Any:
    """The value a pickle describes, if it is plain data; anything that would import or call something is refused."""
    return _Reader(data, where).run()


class _Reader:
    """A stack machine for the opcodes of plain data; every other opcode is an error."""

    __slots__ = ("at", "data", "memo", "num", "outer", "stack", "where")

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.num = 0

    def run(self) -> Any:
        size = len(self.data)
        while self.at < size:
            code = self.fast()
            if code == b".":
                return self.pop()
            step = _STEPS.get(code)
            if step is None:
                raise self.unknown(code)
            step(self)
        raise self.refuse("it ends before its value does; the file is cut short")

    def fast(self) -> bytes:
        """Obey the commonest opcodes (memo, small integers, marks) in one loop; the first other one is returned."""
        data, at, stack, memo, outer = self.data, self.at, self.stack, self.memo, self.outer
        last, began = len(data) - 8, at
        while at < last:
            code = data[at]
            if code == 0x94 and stack:
                memo[len(memo)] = stack[-1]
                at += 1
            elif code == 0x68 and data[at + 1] in memo:
                stack.append(memo[data[at + 1]])
                at += 2
            elif code == 0x6A and (place := int.from_bytes(data[at + 1 : at + 5], "little")) in memo:
                stack.append(memo[place])
                at += 5
            elif code == 0x4B:
                stack.append(data[at + 1])
                at += 2
            elif code == 0x4D:
                stack.append(data[at + 1] | data[at + 2] << 8)
                at += 3
            elif code == 0x7D:
                stack.append({})
                at += 1
            elif code == 0x28 and len(outer) < MAX_DEPTH:
                outer.append(stack)
                stack = self.stack = []
                at += 1
            elif code == 0x75 and outer and len(stack) % 2 == 0:
                items, stack = stack, outer.pop()
                self.stack, self.at = stack, at
                self.set_items(items)
                at += 1
            else:
                break
        self.num += at - began + 1
        if self.num > MAX_OBJECTS:
            raise self.refuse(f"more than {MAX_OBJECTS:,} objects; record with a smaller max_entries")
        self.at = at + 1
        return data[at : at + 1]

    def unknown(self, code: bytes) -> InputError:
        name = _NAMES.get(code, f"0x{code.hex()}")
        return self.refuse(
            f"opcode {name} at byte {self.at - 1:,} is not plain data (it could import or run code), and is not obeyed"
        )

    def refuse(self, why: str) -> InputError:
        return InputError(f"{self.where} is not a pickle that can be read safely: {why}")

    def take(self, num: int) -> bytes:
        start, self.at = self.at, self.at + num
        if num < 0 or self.at > len(self.data):
            raise self.refuse("it ends before its value does; the file is cut short")
        return self.data[start : self.at]

    def skip(self, num: int) -> None:
        self.take(num)

    def unsigned(self, num: int) -> int:
        return int.from_bytes(self.take(num), "little")

    def pop(self) -> Any:
        if not self.stack:
            raise self.refuse(f"byte {self.at - 1:,} takes a value that is not there")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise self.refuse(f"byte {self.at - 1:,} adds to something that is not a {kind.__name__}")
        return self.stack[-1]

    def mark(self) -> None:
        if len(self.outer) >= MAX_DEPTH:
            raise self.refuse(f"values are nested more than {MAX_DEPTH:,} deep")
        self.outer.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        if not self.outer:
            raise self.refuse(f"byte {self.at - 1:,} closes a list that was not opened")
        items, self.stack = self.stack, self.outer.pop()
        return items

    def close(self, kind: type[tuple[Any, ...]] | type[list[Any]]) -> None:
        items = self.since_mark()  # first: it changes which stack is the current one
        self.stack.append(kind(items))

    def text(self, num: int) -> None:
        try:
            self.stack.append(str(self.take(num), "utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise self.refuse(f"text at byte {self.at:,} is not UTF-8") from None

    def remember(self, place: int) -> None:
        if not self.stack:
            raise self.refuse(f"byte {self.at - 1:,} remembers a value that is not there")
        self.memo[place] = self.stack[-1]

    def recall(self, place: int) -> None:
        if place not in self.memo:
            raise self.refuse(f"byte {self.at - 1:,} recalls a value that was never remembered")
        self.stack.append(self.memo[place])

    def set_items(self, items: list[Any]) -> None:
        into = self.top(dict)
        if len(items) % 2:
            raise self.refuse(f"byte {self.at - 1:,} sets a key without a value")
        keys = items[::2]
        for key in keys:
            if type(key) not in _KEYS:
                raise self.refuse(f"byte {self.at - 1:,} uses a {type(key).__name__} as a key")
        into.update(zip(keys, items[1::2], strict=True))

    def integer(self, num: int) -> None:
        # max long bytes
        if num > 64:
            raise self.refuse(f"an integer of {num:,} bytes at byte {self.at:,}")
        self.stack.append(int.from_bytes(self.take(num), "little", signed=True))

    def pair(self, num: int) -> None:
        items = [self.pop() for _ in range(num)]
        self.stack.append(tuple(reversed(items)))

    def set_one(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def extend(self) -> None:
        items = self.since_mark()
        self.top(list).extend(items)


_STEPS: dict[bytes, Step] = {
    b"\x80": lambda r: r.skip(1),
    b"\x95": lambda r: r.skip(8),
    b"}": lambda r: r.stack.append({}),
    b"]": lambda r: r.stack.append([]),
    b")": lambda r: r.stack.append(()),
    b"(": _Reader.mark,
    b"\x94": lambda r: r.remember(len(r.memo)),
    b"q": lambda r: r.remember(r.unsigned(1)),
    b"r": lambda r: r.remember(r.unsigned(4)),
    b"h": lambda r: r.recall(r.unsigned(1)),
    b"j": lambda r: r.recall(r.unsigned(4)),
    b"\x8c": lambda r: r.text(r.unsigned(1)),
    b"X": lambda r: r.text(r.unsigned(4)),
    b"\x8d": lambda r: r.text(r.unsigned(8)),
    b"C": lambda r: r.stack.append(r.take(r.unsigned(1))),
    b"B": lambda r: r.stack.append(r.take(r.unsigned(4))),
    b"\x8e": lambda r: r.stack.append(r.take(r.unsigned(8))),
    b"J": lambda r: r.integer(4),
    b"K": lambda r: r.stack.append(r.unsigned(1)),
    b"M": lambda r: r.stack.append(r.unsigned(2)),
    b"\x8a": lambda r: r.integer(r.unsigned(1)),
    b"\x8b": lambda r: r.integer(r.unsigned(4)),
    b"G": lambda r: r.stack.append(struct.unpack(">d", r.take(8))[0]),
    b"N": lambda r: r.stack.append(None),
    b"\x88": lambda r: r.stack.append(True),
    b"\x89": lambda r: r.stack.append(False),
    b"\x85": lambda r: r.pair(1),
    b"\x86": lambda r: r.pair(2),
    b"\x87": lambda r: r.pair(3),
    b"t": lambda r: r.close(tuple),
    b"l": lambda r: r.close(list),
    b"a": _Reader.append,
    b"e": _Reader.extend,
    b"s": _Reader.set_one,
    b"u": lambda r: r.set_items(r.since_mark()),
}
