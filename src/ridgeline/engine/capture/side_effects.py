"""What every call leaves on the model for others to read: a map of attention, a router's loss, a mean for the log.

A replay runs no Python, and a name that it does not bind would go on naming the call before. So a tensor that calls
bind anew and do not read themselves is one more result of a recorded call: it is bound after every replay, with its
gradient, to what that replay has computed.
"""

from __future__ import annotations

import dis
import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.guards.check import Watch
from ridgeline.engine.guards.code_reads import library

_NOTHING = object()
_OURS = 3
"""References to a note that nobody but its dictionary holds: that, a name here, and the question itself."""


@dataclass(slots=True)
class Note:
    """A name that every call binds to a tensor.

    ``read`` if the model's code asks for it, and may ask what it is; ``own`` if PyTorch's hooks alone have use for it.
    """

    path: str
    held: dict[Any, Any]
    key: Any
    read: bool
    own: bool = False
    passed: bool = False
    """Whether calls go on to compute with it: its gradient is then computed inside of a recording, and nowhere else."""
    put: Any = field(default=lambda: None)
    """What the last replay has bound, as a weak reference."""


class Notes:
    """All of a model's notes."""

    def __init__(self, notes: Iterable[Note] = ()) -> None:
        self.notes = list(notes)
        self.boxes = list({id(note.held): note.held for note in self.notes}.values())

    def __bool__(self) -> bool:
        return bool(self.notes)

    @property
    def slots(self) -> dict[int, set[Any]]:
        found: dict[int, set[Any]] = {}
        for note in self.notes:
            found.setdefault(id(note.held), set()).add(note.key)
        return found

    def owned(self) -> set[int]:
        """The ``id`` of every note that nobody keeps: it need not be copied, however small."""
        return {id(note.held.get(note.key)) for note in self.notes if note.own}

    def unlike(self) -> str:
        """Which note is none now, if the model's code could tell."""
        for note in self.notes:
            if note.read and not isinstance(note.held.get(note.key), Tensor):
                return f"{note.path} is no tensor, as calls leave it"
        return ""

    def asking(self) -> str:
        """Which note was asked to keep or tell its gradient, if that is computed inside of the recording alone."""
        for note in self.notes:
            value = note.held.get(note.key) if note.passed else None
            if value is not None and value is note.put() and _asks(value):
                return note.path
        return ""

    def pass_through(self, behind: set[Any]) -> None:
        """Says which notes lead to a result, by the steps of autograd that results come from."""
        for note in self.notes:
            value = note.held.get(note.key)
            note.passed = isinstance(value, Tensor) and value.grad_fn in behind

    def forget(self) -> None:
        """Notes without what led to them: a history keeps gradients on the stream it was made on."""
        for note in self.notes:
            value = note.held.get(note.key)
            if isinstance(value, Tensor) and value.grad_fn is not None:
                note.held[note.key] = value.detach()

    def spare(self) -> Counter[int]:
        """Memory that is held by nothing but notes, which the next replay binds anew, whichever replay has bound them:
        whoever puts a model back as it was binds those of an earlier one."""
        found: Counter[int] = Counter()
        for note in self.notes:
            value = note.held.get(note.key)
            if isinstance(value, Tensor) and sys.getrefcount(value) <= _OURS:
                found[value.untyped_storage()._cdata] += 1
        return found

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Names stand for what they stood for before a recording: whoever counts who holds its results counts none.

        A note that was counted as a holder hid one that came later, whose tensor the next replay wrote over (H200).
        """
        before = [note.held.get(note.key, _NOTHING) for note in self.notes]
        try:
            yield
        finally:
            for note, value in zip(self.notes, before, strict=True):
                note.held.pop(note.key, None) if value is _NOTHING else note.held.update({note.key: value})

    def clear(self) -> None:
        """Lets go of what the last replay has bound, before the next writes there."""
        for note in self.notes:
            if note.held.get(note.key) is not None and note.held[note.key] is note.put():
                note.held[note.key] = None

    def bound(self, watch: Watch) -> None:
        """Remembers what a replay has bound, and that nothing else has changed."""
        for note in self.notes:
            note.put = weakref.ref(note.held[note.key])
        watch.stamp(self.boxes)

    def put_back(self, before: Watch) -> None:
        """Names as they were when another watch was made."""
        for note in self.notes:
            before.rebind(note.held, note.key)


def bound(watch: Watch) -> dict[tuple[int, Any], Tensor]:
    """What names stand for that were bound anew since a watch was made."""
    return {(id(held), key): held[key] for _, held, key, _ in watch.rebound()}


def found(watch: Watch, used: frozenset[int] | None, codes: Iterable[types.CodeType], words: Iterable[str],
          forward: Mapping[tuple[int, Any], Tensor], *, made: bool = True) -> Notes:  # fmt: skip
    """Names that a call has bound to another tensor of the same kind, where it used nothing of the one before.

    ``forward`` is what they stood for before the backward: what is bound in that is nothing that a forward leaves.
    With ``made`` weights that hooks make are among them: a backward passes through those.
    """
    notes = [Note(path, held, key, read=False, own=True) for path, held, key in watch.made()] if made else []
    if used is None:
        return Notes(notes)
    asked = set(words).union(*(_loaded(code) for code in codes if not library(code.co_filename)))
    for path, held, key, was in watch.rebound():
        now = held[key]
        plain = type(now) is Tensor and type(was) is Tensor and now.layout is was.layout is torch.strided
        plain = plain and forward.get((id(held), key)) is now and not _asks(now)
        if plain and _kind(now) == _kind(was) and was.untyped_storage()._cdata not in used:
            notes.append(Note(path, held, key, key in asked))
    return Notes(notes)


def _asks(tensor: Tensor) -> bool:
    """Whether somebody wants a tensor's gradient: to keep it, or to be called with it."""
    return tensor.requires_grad and (tensor.retains_grad or bool(tensor._backward_hooks))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _loaded(code: types.CodeType) -> set[str]:
    """Attributes and keys that a piece of code may read."""
    read = {str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return read | {each for each in code.co_consts if isinstance(each, str)}
