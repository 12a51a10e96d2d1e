"""What a call is given and what it returns, whatever the types: tensors, plain values and the containers around them.

A value is walked once into a flat form: a hashable list of tokens that says its structure, the tensors in order and the
mutable containers in order. Two values with equal tokens differ in nothing but the contents of their tensors.
"""

from __future__ import annotations

import array
import copy
import ctypes
import enum
import io
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter, call
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine.guards.dict_version import stillness, version
from ridgeline.engine.guards.native import glance

Path = str
Token = tuple[Any, ...]

_SCALARS = (int, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
            torch.memory_format, slice, range, type(Ellipsis))  # fmt: skip
PLAIN = frozenset(_SCALARS)
LOOSE = frozenset((slice, complex, range))
"""Plain types of which two values may be equal and not the same: zeros of either sign, ranges that end elsewhere."""
_WORDS = (str, bytes, int, float, complex)
SEALED = (*_WORDS, bytearray, array.array, BaseException, partial, memoryview, io.IOBase, ctypes._SimpleCData,
          ctypes.Structure, ctypes.Union, ctypes.Array)  # fmt: skip
"""Types whose values are more than the attributes of theirs that can be seen."""
_OPAQUE = (type, nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
           types.CodeType, types.GeneratorType, torch.Generator)  # fmt: skip
HOST_ELEMENTS = 64
"""A tensor on the host of at most this many elements is read as a value: Python may branch on it."""
_MOST_TOKENS = 50_000

SETS = -1
"""Where a twin's memo keeps the sets of the original, each with its copy."""

# The first word of a token.
TENSOR, VALUE, SEQUENCE, MAPPING, RECORD, AGAIN, SAME, OPAQUE, SHARES, STRANGE, HOST, PIECE = range(12)


class Flat:
    """One value, walked: ``tokens`` for its structure, ``tensors`` and ``containers`` in the order of the walk."""

    __slots__ = ("accelerated", "containers", "grad", "hosts", "pieces", "root", "seen", "storages", "tensors",
                 "tokens")  # fmt: skip

    def __init__(self, *, grad: bool = True) -> None:
        self.tokens: list[Token] = []
        self.tensors: list[Tensor] = []
        self.containers: list[Any] = []
        self.seen: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.hosts: list[int] = []
        self.pieces: list[tuple[int, int, Piece]] | None = []
        self.accelerated = False
        self.root: Any = None
        self.grad = grad

    def walk(self, value: Any) -> None:
        cls = type(value)
        if cls is Tensor or cls is nn.Parameter:
            self._tensor(value)
        elif cls in PLAIN:
            self.tokens.append((VALUE, cls, value if cls not in LOOSE else exact(value)))
        elif cls is float:
            self.tokens.append((VALUE, float, value.hex()))  # NaN equals itself here, and −0.0 is not 0.0
        elif cls is tuple:
            self.tokens.append((SEQUENCE, tuple, len(value)))
            for item in value:
                self.walk(item)
        elif cls is dict:
            if self._first(value):
                self._mapping(value, dict)
        else:
            self._other(value, cls)

    def _tensor(self, value: Tensor) -> None:
        index = self.seen.get(id(value))
        if index is None and self.pieces:
            index = self._in_pieces(id(value))
        if index is not None:
            self.tokens.append((SAME, index))
            return
        index = len(self.tensors)
        self.seen[id(value)] = index
        self.tensors.append(value)
        if value.is_nested or value.is_quantized:  # whose sizes, or scales, are no part of what is compared
            kind = "nested" if value.is_nested else "quantized"
            self.tokens.append((STRANGE, TENSOR, kind, _Once()))
            return
        if value.layout is not torch.strided or value.is_neg() or value.is_conj():
            kind = str(value.layout) + ", negated" * value.is_neg() + ", conjugated" * value.is_conj()
            self.tokens.append((STRANGE, TENSOR, kind, value.shape, value.dtype, value.device))
            return
        device = value.device
        self.tokens.append((TENSOR, value.shape, value.stride(), value.dtype, device,
                            self.grad and value.requires_grad))  # fmt: skip
        storage = value.untyped_storage()._cdata
        other = self.storages.setdefault(storage, index)
        if other == index and self.pieces:
            other = self.storages[storage] = self._stored_in_pieces(storage, index)
        if other != index:
            distance = value.storage_offset() - self.tensors[other].storage_offset()
            self.tokens.append((SHARES, other, distance))
        if device.type == "cpu":
            self.hosts.append(index)
        else:
            self.accelerated = True

    def finish(self) -> None:
        """Small tensors on the host of a call that runs elsewhere are values: Python may branch on them unseen."""
        if self.accelerated:
            for index in self.hosts:
                if self.tensors[index].numel() <= HOST_ELEMENTS:
                    self.tokens.append((HOST, index, _host_value(self.tensors[index])))

    def _first(self, value: Any) -> bool:
        """Whether a container is met for the first time; a second meeting is a token that points at the first."""
        index = self.seen.setdefault(id(value), len(self.containers))
        if index < len(self.containers):
            self.tokens.append((AGAIN, index))
            return False
        self.containers.append(value)
        return True

    def _in_pieces(self, key: int) -> int | None:
        assert self.pieces is not None
        return next((base + piece.tensor_ids[key] for base, _, piece in self.pieces if key in piece.tensor_ids), None)

    def _stored_in_pieces(self, storage: int, otherwise: int) -> int:
        assert self.pieces is not None
        found = (base + piece.storages[storage] for base, _, piece in self.pieces if storage in piece.storages)
        return next(found, otherwise)

    def _object(self, value: Any) -> None:
        """An object with attributes; one such as a cache is one token, and walked again only if it changed."""
        if self.pieces is not None and id(value) not in self.seen:
            piece = piece_of(value, self.grad)
            if piece is not None and self._apart(piece):
                self._take(piece, value)
                return
        if self._first(value):
            self._attributes(value)

    def _apart(self, piece: Piece) -> bool:
        """Whether nothing of a piece was met before."""
        assert self.pieces is not None
        return (not self.pieces and self.seen.keys().isdisjoint(piece.tensor_ids)
                and self.seen.keys().isdisjoint(piece.container_ids)
                and self.storages.keys().isdisjoint(piece.storages))  # fmt: skip

    def _take(self, piece: Piece, value: Any) -> None:
        assert self.pieces is not None
        base = len(self.tensors)
        self.tokens.append((PIECE, piece.key))
        self.pieces.append((base, len(self.containers), piece))
        for i, box in enumerate(piece.containers(value), len(self.containers)):
            self.seen[id(box)] = i
            self.containers.append(box)
        self.tensors += map(call, piece.tensors)
        self.hosts += [base + i for i in piece.hosts]
        self.accelerated |= piece.accelerated

    def _mapping(self, value: Any, cls: type) -> None:
        keys = tuple(value)
        self.tokens.append((MAPPING, cls, _exact_keys(keys)))
        for item in value.values():
            self.walk(item)

    def _other(self, value: Any, cls: type) -> None:
        if len(self.tokens) > _MOST_TOKENS:
            raise TooLarge
        if isinstance(value, Tensor):
            self.seen[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.tokens.append((STRANGE, TENSOR, cls, value.shape, value.dtype, value.device))
        elif isinstance(value, enum.Enum):
            self.tokens.append((VALUE, cls, value))
        elif isinstance(value, _OPAQUE):
            self.tokens.append((OPAQUE, cls, _identity(value)))
        elif isinstance(value, list | deque | tuple):
            if isinstance(value, tuple) or self._first(value):
                self.tokens.append((SEQUENCE, cls, len(value)))
                for item in value:
                    self.walk(item)
                self._attributes(value)
        elif isinstance(value, dict):
            if self._first(value):
                self._mapping(value, cls)
                self._attributes(value)
        elif isinstance(value, set | frozenset):
            plain = all(type(item) in PLAIN or type(item) is float for item in value)
            items = tuple((type(item), exact(item)) for item in value)  # in order, and by type: 1 equals True
            self.tokens.append((VALUE, cls, items if plain else _Once()))
        elif isinstance(value, SEALED):
            self._sealed(value, cls)
        elif attributes(value) is not None:
            self._object(value)
        else:
            self.tokens.append((OPAQUE, cls, _identity(value)))

    def _sealed(self, value: Any, cls: type) -> None:
        """A number or a word of a class of its own; of all else that is more than its attributes, which it is."""
        held = attributes(value) or {}
        if not isinstance(value, _WORDS):
            self.tokens.append((OPAQUE, cls, _identity(value)))
        elif all(type(item) in PLAIN or type(item) is float for item in held.values()):
            more = tuple((name, type(item), exact(item)) for name, item in held.items())
            self.tokens.append((VALUE, cls, (exact(value), more)))
        else:
            self.tokens.append((OPAQUE, cls, _Once()))

    def _attributes(self, value: Any) -> None:
        held = attributes(value)
        if held is None or (not held and isinstance(value, list | tuple | dict | deque)):
            return
        self.tokens.append((RECORD, type(value), tuple(held)))
        for item in held.values():
            self.walk(item)


class Key:
    """The tokens of a piece, hashed once."""

    __slots__ = ("hashed", "tokens")

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self.tokens, self.hashed = tokens, hash(tokens)

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self.hashed == other.hashed and self.tokens == other.tokens)


class Piece:
    """An object that was walked, and how to tell in a microsecond or two that it has not changed since.

    Places in its tokens count from its own first tensor and container. It holds no tensor: whoever lets go of an object
    or of a tensor in it gets the memory back.
    """

    __slots__ = ("_asking", "_boxes", "_dicts", "_items", "_own", "_still", "_versions", "accelerated", "container_ids",
                 "glance", "grad", "hosts", "key", "storages", "tensor_ids", "tensors")  # fmt: skip

    def __init__(self, value: Any, flat: Flat) -> None:
        self.key = Key(tuple(flat.tokens))
        self.grad = flat.grad
        self.tensors = [weakref.ref(tensor) for tensor in flat.tensors]
        self.tensor_ids = {id(tensor): i for i, tensor in enumerate(flat.tensors)}
        self.container_ids = {id(box): i for i, box in enumerate(flat.containers)}
        self.storages, self.hosts, self.accelerated = flat.storages, flat.hosts, flat.accelerated
        # Boxes other than the object itself are kept: they are lists, dictionaries and layers, not tensors.
        self._boxes = [None if box is value else weakref.ref(box) if _weak(box) else box for box in flat.containers]
        self._remember(value, flat)

    def _remember(self, value: Any, flat: Flat) -> None:
        dicts = [_dict_of(box) for box in flat.containers if box is not value]
        self._dicts = [held for held in dicts if held is not None]
        self._versions = [version(held) for held in (vars(value), *self._dicts)]
        self._own, self._still = id(vars(value)), -1
        lists = [box for box in flat.containers if isinstance(box, list)]
        self._items = [(box, [id(item) for item in box]) for box in lists]
        self._asking = list(map(_REQUIRES_GRAD, flat.tensors))
        self.glance = glance(flat.tensors, weak=True)

    @property
    def lists(self) -> list[list[Any]]:
        """The lists in it, whose items are compared at every look."""
        return [box for box, _ in self._items]

    @property
    def counted(self) -> int:
        """The number of the last look that found it as it was."""
        return self._still

    def owns(self, value: Any) -> bool:
        """Whether an object has the dictionary that it was walked with."""
        return id(vars(value)) == self._own

    def containers(self, value: Any) -> list[Any]:
        return [value if box is None else box() if isinstance(box, weakref.ref) else box for box in self._boxes]

    def held(self, value: Any, grad: bool) -> list[Tensor] | None:
        """The tensors of the object, if it is what it was when it was walked."""
        now, own = stillness.now(), vars(value)
        still = now == self._still and id(own) == self._own
        if self.grad is not grad or not (still or [version(own), *map(version, self._dicts)] == self._versions):
            return None
        if any(list(map(id, box)) != items for box, items in self._items):
            return None
        tensors = self.glance.held()
        if tensors is None:
            return None
        self._own, self._still = id(own), now
        return None if grad and list(map(_REQUIRES_GRAD, tensors)) != self._asking else tensors


_REQUIRES_GRAD = attrgetter("requires_grad")
_PIECES: dict[int, tuple[weakref.ref[Any], Piece]] = {}


def known_piece(value: Any, grad: bool) -> tuple[Piece, list[Tensor]] | None:
    """An object that was walked before and has not changed since, and its tensors."""
    known = _PIECES.get(id(value))
    if known is None or known[0]() is not value:
        return None
    tensors = known[1].held(value, grad)
    return None if tensors is None else (known[1], tensors)


def piece_of(value: Any, grad: bool) -> Piece | None:
    """An object as a piece, or None for one that is walked as part of the whole."""
    found = known_piece(value, grad)
    if found is not None:
        return found[0]
    if not _weak(value) or not isinstance(getattr(value, "__dict__", None), dict) or slots_of(type(value)):
        return None
    flat = Flat(grad=grad)
    flat.pieces = None
    flat.seen[id(value)] = 0
    flat.containers.append(value)
    flat._attributes(value)
    if not flat.tensors or not _rememberable(flat):
        return None
    piece = Piece(value, flat)
    key = id(value)
    _PIECES[key] = (weakref.ref(value, lambda _: _PIECES.pop(key, None)), piece)
    return piece


def _rememberable(flat: Flat) -> bool:
    """Whether all that a piece holds can be told apart by version numbers and identities."""
    plain = all(type(tensor) is Tensor or type(tensor) is nn.Parameter for tensor in flat.tensors)
    seen_through = all(type(box) is list or _dict_of(box) is not None for box in flat.containers)
    return plain and seen_through and not any(map(_unclear, flat.tokens))


def _unclear(token: Token) -> bool:
    """What has no version number, and is not told by which object it is."""
    odd = token[0] == VALUE and token[1] not in PLAIN and token[1] is not float and not issubclass(token[1], enum.Enum)
    return odd or token[0] in (STRANGE, OPAQUE)


def _dict_of(box: Any) -> dict[Any, Any] | None:
    if type(box) is dict:
        return box
    held = getattr(box, "__dict__", None)
    plain = isinstance(held, dict) and not isinstance(box, dict | list | deque) and not slots_of(type(box))
    return held if plain else None


def _weak(box: Any) -> bool:
    return type(box).__weakrefoffset__ != 0


class TooLarge(Exception):
    """An argument that holds more objects than can be compared at every call."""


class _Once:
    """Equals nothing but itself: what cannot be compared makes two signatures differ."""

    def __repr__(self) -> str:
        return "something that cannot be compared"


class _Identity:
    """Equal when it is the same object; keeps the object, so that its address is not given to another."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"a {type(self.held).__qualname__}"


def _identity(value: Any) -> Any:
    return _Once() if isinstance(value, Iterator | torch.Generator) else _Identity(value)


def exact(value: Any) -> Any:
    """A plain value as something that equals no other."""
    if isinstance(value, float):
        return float.hex(value)
    if isinstance(value, complex):
        return value.real.hex(), value.imag.hex()
    if isinstance(value, range):
        return value.start, value.stop, value.step
    return repr(value) if isinstance(value, slice) else value


def _exact_keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    if all(type(key) is str for key in keys):
        return keys
    return tuple((type(key), exact(key)) if type(key) in PLAIN else _Once() for key in keys)


def _host_value(value: Tensor) -> Any:
    """What a small tensor on the host holds; bytes, so that NaN equals itself."""
    if value.is_conj() or value.is_neg():
        return _Once()
    return bytes(value.detach().contiguous().view(-1).view(torch.uint8).tolist()) if value.numel() else b""


def attributes(value: Any) -> dict[str, Any] | None:
    """What an object holds by name, or None for one that holds nothing we can see."""
    held = getattr(value, "__dict__", None)
    slots = slots_of(type(value))
    if held is None and not slots:
        return None
    if not slots:
        return held
    named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**named, **(held or {})}


def slots_of(cls: type) -> tuple[str, ...]:
    found = _SLOTS.get(cls)
    if found is None:
        names: list[str] = []
        for part in cls.__mro__:
            given = part.__dict__.get("__slots__", ())
            names += [given] if isinstance(given, str) else list(given)
        found = _SLOTS[cls] = tuple(n for n in names if n not in ("__dict__", "__weakref__"))
    return found


_SLOTS: dict[type, tuple[str, ...]] = {Tensor: ()}


def all_tokens(tokens: Iterable[Token]) -> Iterator[Token]:
    """Every token, those of pieces too."""
    for token in tokens:
        if token[0] == PIECE:
            yield from token[1].tokens
        else:
            yield token


def opaque(flat: Flat) -> Iterator[Any]:
    """Functions, modules and the like among the arguments: told by which they are, not by what they hold."""
    for token in all_tokens(flat.tokens):
        if token[0] == OPAQUE and isinstance(token[2], _Identity):
            yield token[2].held


def flatten(value: Any, *, grad: bool = True) -> Flat:
    """Walks a value: its structure as tokens, its tensors and its containers in order."""
    flat = Flat(grad=grad)
    flat.root = value
    flat.walk(value)
    flat.finish()
    return flat


def twin(value: Any, tensors: dict[int, Tensor], memo: dict[int, Any] | None = None) -> Any:
    """The same value in new containers, with the tensors (by ``id``) replaced; what is opaque stays the same object.

    ``memo`` maps the ``id`` of every container of the original to its twin, in the order of the walk.
    """
    return _Twin(tensors, {} if memo is None else memo).of(value)


class _Twin:
    def __init__(self, tensors: dict[int, Tensor], memo: dict[int, Any]) -> None:
        self.tensors, self.memo = tensors, memo

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensors.get(id(value), value)
        cls = type(value)
        if cls in PLAIN or cls is float or isinstance(value, (enum.Enum, frozenset, *_OPAQUE, *SEALED)):
            return value
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, set):
            self.memo[id(value)] = made = copy.copy(value)
            self.memo.setdefault(SETS, []).append((value, made))
            return made
        if isinstance(value, tuple):
            return remade_tuple(cls, [self.of(item) for item in value])
        if isinstance(value, list | deque | dict) or attributes(value) is not None:
            made = self.memo[id(value)] = empty_like(value)
            self._fill(made, value)
            return made
        return value

    def _fill(self, made: Any, value: Any) -> None:
        if isinstance(value, list | deque):
            made.extend(self.of(item) for item in value)
        elif isinstance(value, dict):
            put = item_setter(type(value))
            for key, item in value.items():
                put(made, key, self.of(item))
        set_attributes(made, {name: self.of(item) for name, item in (attributes(value) or {}).items()})


def remade_tuple(cls: type, items: list[Any]) -> Any:
    if cls is tuple:
        return tuple(items)
    if hasattr(cls, "_fields"):  # a named tuple
        return cls(*items)
    return cls(items)


def empty_like(value: Any) -> Any:
    """A container of the same type that holds nothing yet; no constructor of the user's runs."""
    cls: Any = type(value)
    if isinstance(value, defaultdict):
        made = cls.__new__(cls)
        made.default_factory = value.default_factory
        return made
    if isinstance(value, deque):
        return cls(maxlen=value.maxlen)
    return cls.__new__(cls)


def item_setter(cls: type) -> Callable[[Any, Any, Any], None]:
    """How to put an item into a mapping past its own bookkeeping (ModelOutput mirrors items as attributes)."""
    return OrderedDict.__setitem__ if issubclass(cls, OrderedDict) else dict.__setitem__


def set_attributes(made: Any, held: dict[str, Any]) -> None:
    if not held:
        return
    own = getattr(made, "__dict__", None)
    slots = slots_of(type(made))
    for name, item in held.items():
        if own is None or name in slots:
            object.__setattr__(made, name, item)
        else:
            own[name] = item


def paths(tokens: list[Token] | tuple[Token, ...], root: str) -> Iterator[tuple[Path, Token]]:
    """Every token with the place in the value it stands for."""
    reader = _Paths(tokens)
    while reader.at < len(tokens):
        yield from reader.read(root)


class _Paths:
    def __init__(self, tokens: list[Token] | tuple[Token, ...]) -> None:
        self.tokens, self.at = tokens, 0

    def read(self, path: Path) -> Iterator[tuple[Path, Token]]:
        token = self.tokens[self.at]
        self.at += 1
        if token[0] == PIECE:
            yield from paths(token[1].tokens, path)
            return
        yield path, token
        yield from self._inside(path, token)
        while self.at < len(self.tokens) and self._belongs(token):
            extra = self.tokens[self.at]
            self.at += 1
            yield path, extra
            yield from self._inside(path, extra)

    def _inside(self, path: Path, token: Token) -> Iterator[tuple[Path, Token]]:
        if token[0] == SEQUENCE:
            for i in range(token[2]):
                yield from self.read(f"{path}[{i}]")
        elif token[0] == MAPPING:
            for key in token[2]:
                yield from self.read(f"{path}[{key!r}]")
        elif token[0] == RECORD:
            for name in token[2]:
                yield from self.read(f"{path}.{name}")

    def _belongs(self, token: Token) -> bool:
        """Whether the next token says more of the same place: what a tensor shares, what a container holds by name."""
        after = self.tokens[self.at]
        if token[0] == TENSOR:
            return after[0] == SHARES
        return token[0] in (SEQUENCE, MAPPING) and after[0] == RECORD and after[1] is token[1]


def told(token: Token) -> str:
    """A token in words."""
    match token:
        case (0, shape, stride, dtype, device, requires_grad):
            grad = ", requires_grad" if requires_grad else ""
            return f"a tensor {tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}, strides {stride}{grad}"
        case (10, index, _):
            return f"other contents in tensor {index}, which is on the host"
        case (1, cls, value):
            return f"{value!r}" if cls is not float else repr(float.fromhex(value))
        case (2, cls, num):
            return f"a {cls.__name__} of {num}"
        case (3, cls, keys):
            return f"a {cls.__name__} with keys {list(keys)}"
        case (4, cls, names):
            return f"a {cls.__name__} with {', '.join(names) or 'nothing'}"
        case (8, other, distance):
            return f"memory of tensor {other} at distance {distance}"
        case (9, _, cls, *_):
            return f"a tensor of type {getattr(cls, '__name__', cls)}"
    return "the same object again" if token[0] in (AGAIN, SAME) else str(token[-1])
