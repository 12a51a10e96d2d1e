"""Recognizing a call that was planned for, without walking it: one comparison an argument."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ridgeline.engine.pytree import LOOSE, PLAIN, SAME, Flat, Piece, known_piece, piece_of
from ridgeline.engine.signature import Signature, ambient

_TENSORS = (Tensor, nn.Parameter)


class Matcher:
    """Knows calls of one signature whose arguments are tensors, plain values and at most one object such as a cache."""

    __slots__ = ("_grad", "_names", "_num", "_signature", "_wanted")

    def __init__(self, signature: Signature, wanted: list[Any], num: int, names: tuple[str, ...]) -> None:
        self._signature, self._wanted, self._num, self._names = signature, wanted, num, names
        self._grad = bool(signature.ambient[0])

    @property
    def plain(self) -> tuple[list[tuple[Any, Any]], int, tuple[str, ...]] | None:
        """What is compared of every argument, how many have no name, and the others' names; none with an object."""
        return None if any(kind is Piece for kind, _ in self._wanted) else (self._wanted, self._num, self._names)

    @classmethod
    def of(cls, signature: Signature) -> Matcher | None:
        """A matcher for a signature that still holds its call; None where only a walk can tell."""
        flat = signature.flat
        if flat.root is None or (flat.seen and len(flat.pieces or ()) > 1) or _mixed(flat):
            return None
        args, kwargs = flat.root
        grad = bool(signature.ambient[0])
        wanted = [_wanted(value, grad) for value in (*args, *kwargs.values())]
        if any(want is None for want in wanted) or len(signature.tokens) != len(wanted) + 3:
            return None
        if any(token[0] == SAME for token in signature.tokens):  # one tensor twice: only a walk tells it from two
            return None
        return cls(signature.detached(), wanted, len(args), tuple(kwargs))

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any], model: Any, grad: bool) -> Flat | None:
        """The call as a walk would have it, if it is one of those."""
        if grad is not self._grad or len(args) != self._num or tuple(kwargs) != self._names:
            return None
        tensors: list[Tensor] = []
        piece: tuple[int, Piece, Any] | None = None
        for value, (kind, want) in zip((*args, *kwargs.values()), self._wanted):
            if kind is Tensor:
                shape, stride, dtype, device, asks = want
                if (value.__class__ not in _TENSORS or value.is_nested or value.shape != shape
                        or value.dtype is not dtype or value.stride() != stride or value.device != device
                        or value.is_neg() or value.is_conj()
                        or (grad and value.requires_grad) is not asks):  # fmt: skip
                    return None
                tensors.append(value)
            elif kind is Piece:
                found = _piece(value, grad) if value.__class__ is want[0] else None
                if found is None or found[0].key != want[1]:
                    return None
                piece = (len(tensors), found[0], value)
                tensors += found[1]
            elif value is not want and (value.__class__ is not kind or value != want or kind is float):
                return None
        if len(tensors) > 1 and not _apart(tensors, piece):
            return None
        return self.flat(args, kwargs, tensors, piece) if ambient(model, grad) == self._signature.ambient else None

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor],
             piece: tuple[int, Piece, Any] | None) -> Flat:  # fmt: skip
        """A call that was recognized, in the form that a walk gives it."""
        if piece is None:
            flat = Flat.__new__(Flat)
            flat.containers = [kwargs]
        else:
            flat = Late.__new__(Late)
            flat.piece = (piece[1], piece[2])
        flat.tensors, flat.root = tensors, (args, kwargs)
        return flat


class Late(Flat):
    """A call with an object whose containers are listed when they are asked for: after the launch, as a rule."""

    __slots__ = ("piece",)
    piece: tuple[Piece, Any]

    @property
    def containers(self) -> list[Any]:  # type: ignore[override]
        piece, value = self.piece
        args, kwargs = self.root
        first = any(each is value for each in args)
        return [*piece.containers(value), kwargs] if first else [kwargs, *piece.containers(value)]


def _piece(value: Any, grad: bool) -> tuple[Piece, list[Tensor]] | None:
    """An object as a piece with its tensors; one that changed is walked again."""
    found = known_piece(value, grad)
    if found is None and piece_of(value, grad) is not None:
        found = known_piece(value, grad)
    return found


def _mixed(flat: Flat) -> bool:
    """Whether some tensors are on the host and others are not: the contents of the former then count."""
    return flat.accelerated and bool(flat.hosts)


def _wanted(value: Any, grad: bool) -> tuple[Any, Any] | None:
    cls = type(value)
    if cls in _TENSORS:
        if value.is_nested or value.is_quantized or value.is_neg() or value.is_conj():
            return None
        return Tensor, (value.shape, value.stride(), value.dtype, value.device, grad and value.requires_grad)
    if (cls in PLAIN and cls not in LOOSE) or cls is float:
        return cls, value
    piece = piece_of(value, grad) if hasattr(value, "__dict__") and not isinstance(value, dict | list | tuple) else None
    return None if piece is None else (Piece, (cls, piece.key))


def _apart(tensors: list[Tensor], piece: tuple[int, Piece, Any] | None) -> bool:
    """Whether no two arguments share memory; a piece has been compared within itself."""
    if piece is None:
        return len({t.untyped_storage()._cdata for t in tensors}) == len(tensors)
    start, found, _ = piece
    others = [*tensors[:start], *tensors[start + len(found.tensors):]]  # fmt: skip
    storages = {t.untyped_storage()._cdata for t in others}
    return len(storages) == len(others) and storages.isdisjoint(found.storages.keys())
