"""Key-value caches whose windows slide, made recordable: a stand-in whose count of tokens is a tensor.

A layer of transformers' ``StaticCache`` that slides counts its tokens as a Python number. A recording would have to be
made anew for every number. But for a single token the number decides two things only: whether the window is full
(then it is shifted, else the place after the last one is written), and positions, which are sums. So calls are
recorded with a cache that stands for the real one: the same tensors, the same code around them, layers whose count is
a tensor that is filled before every call, and whether the window is full as a plain value. After the call the real
layers count as they would have. Only a layer class whose code is known word for word is stood in for.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ridgeline.engine.example_inputs import Inputs, State, leaves, same
from ridgeline.engine.pytree import TooLarge, empty_like, flatten
from ridgeline.engine.replay.inference import Graphed, graph_inference
from ridgeline.engine.signature import Signature
from ridgeline.engine.state import left_alone
from ridgeline.errors import NotGraphable

HOME = "transformers.cache_utils"
COUNT = "cumulative_length_int"
"""Where a sliding layer of transformers keeps its count."""
STANDS = "stands_for_another"
"""What a stand-in has and no cache."""
KNOWN = frozenset(("763170ee38ff93c5",))
"""Digests of the code of layers that slide, without comments and docstrings (transformers 5.x up to 5.22)."""
METHODS = ("update", "get_mask_sizes", "get_seq_length")
"""What a stand-in does otherwise than the layer it stands for."""
_MOST_ERROR = 4
"""A stand-in may differ from eager by so many times what eager differs from itself, where it does."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""What a cache and its layers hold besides tensors; anything else may know the cache that it was made for."""
_GONE = object()


def digest(cls: type) -> str:
    """The code of a class as a short word; empty where there is no source to read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Kind:
    """The classes of layers that are understood, as they were when their code was read."""

    plain: type
    sliding: type
    methods: tuple[tuple[Any, Any], ...]
    """The methods that a stand-in does without calling them, each with its code."""
    standing: type

    def holds(self) -> bool:
        """Whether nobody has put other methods in their place since."""
        own = vars(self.sliding)
        return all(function.__code__ is code and own.get(name) is function
                   for name, (function, code) in zip(METHODS, self.methods))  # fmt: skip


@cache
def kind(home: Any) -> Kind | None:
    """The classes of a module of transformers, or None where they are not those that are known."""
    plain, sliding = getattr(home, "StaticLayer", None), getattr(home, "StaticSlidingWindowLayer", None)
    if plain is None or sliding is None or digest(sliding) not in KNOWN:
        return None
    found: list[Any] = [vars(sliding).get(name) for name in METHODS]
    if not all(map(partial(_is_own, sliding), METHODS, found)):
        return None
    return Kind(plain, sliding, tuple((each, each.__code__) for each in found), _standing(plain, sliding))


def _is_own(cls: type, name: str, function: Any) -> bool:
    """Whether a class has the method that its source gives it."""
    file = inspect.getsourcefile(cls)
    return (inspect.isfunction(function) and function.__code__.co_filename == file
            and function.__code__.co_qualname == f"{cls.__qualname__}.{name}")  # fmt: skip


def _standing(plain: Any, sliding: Any) -> type:
    """A layer for one token at a time whose count is the tensor ``count``, and ``full`` a plain value."""

    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[-2] != 1:
            raise NotGraphable("a window that slides is stood in for where one token comes at a time")
        if not self.full:
            return plain.update(self, key_states, value_states, *args, **kwargs)
        self.keys.copy_(torch.cat((self.keys[:, :, 1:], key_states), 2))
        self.values.copy_(torch.cat((self.values[:, :, 1:], value_states), 2))
        return self.keys, self.values

    def get_mask_sizes(self: Any, query_length: int) -> tuple[int, Any]:
        if query_length != 1:
            raise NotGraphable("a window that slides is stood in for where one token comes at a time")
        return self.max_cache_len, self.count - (self.max_cache_len - 1) if self.full else 0

    def get_seq_length(self: Any) -> Tensor:
        return self.count

    # Without a name for a type of layer: transformers would make such layers for models of that type.
    body = {"update": update, "get_mask_sizes": get_mask_sizes, "get_seq_length": get_seq_length, "_layer_type": None}
    return type(sliding)("CountedWindowLayer", (sliding,), {**body, "__module__": __name__})


class Standing:
    """A cache that stands for another, around the same tensors."""

    def __init__(self, of: Any, known: Kind, windows: list[Any]) -> None:
        self._kind, self._layers = known, list(of.layers)
        with torch.inference_mode(False):
            self.count = torch.zeros((), dtype=torch.int64, device=windows[0].keys.device)
        self._pairs = [(layer, self._twin(layer)) for layer in windows]
        twins = {id(layer): twin for layer, twin in self._pairs}
        self.cache = empty_like(of)
        layers = [twins.get(id(layer), layer) for layer in of.layers]
        vars(self.cache).update({**vars(of), "layers": layers, STANDS: True})
        self._held = {name: value for name, value in vars(of).items() if name != "layers"}

    def _twin(self, layer: Any) -> Any:
        twin: Any = object.__new__(self._kind.standing)
        held = {name: value for name, value in vars(layer).items() if name != COUNT}
        vars(twin).update({**held, "count": self.count, "full": False})
        return twin

    @classmethod
    def of(cls, value: Any) -> Standing | None:
        """A stand-in for a static cache with windows that slide; None for all else."""
        known = kind(sys.modules.get(HOME))
        if known is None or not known.holds():
            return None
        windows = _windows(value, known)
        if not windows or _count(windows) is None or len({layer.keys.device for layer in windows}) != 1:
            return None
        return cls(value, known, windows)

    def stands_for(self, value: Any) -> bool:
        """Whether a cache still holds what it held when this was made of it, but for its counts."""
        held = vars(value)
        return (self._kind.holds() and len(held) == len(self._held) + 1 and _alike(self._held, held)
                and len(value.layers) == len(self._layers) and all(map(is_, value.layers, self._layers))
                and all(self._mirrors(layer, twin) for layer, twin in self._pairs))  # fmt: skip

    def _mirrors(self, layer: Any, twin: Any) -> bool:
        held = vars(layer)
        own = {name: value for name, value in held.items() if name != COUNT}
        return type(layer) is self._kind.sliding and len(vars(twin)) == len(held) + 1 and _alike(own, vars(twin))

    def counted(self) -> int | None:
        """Tells the stand-in how many tokens the real layers have seen; None where they do not agree."""
        num = _count([layer for layer, _ in self._pairs])
        if num is None:
            return None
        for layer, twin in self._pairs:
            full = num >= layer.max_cache_len
            if twin.full is not full:
                twin.full = full
        with torch.no_grad():
            self.count.fill_(num)
        return num

    def settle(self, num: int) -> None:
        """The real layers have seen as many tokens."""
        for layer, _ in self._pairs:
            setattr(layer, COUNT, num)

    def states(self) -> tuple[Any, ...]:
        """Which windows are full."""
        return tuple(twin.full for _, twin in self._pairs)

    def put(self, states: tuple[Any, ...]) -> None:
        for (_, twin), full in zip(self._pairs, states, strict=True):
            twin.full = full


def _alike(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(now.get(name, _GONE) is value for name, value in was.items())


def _count(windows: list[Any]) -> int | None:
    """How many tokens all of some layers have seen; None where that is no single number."""
    counts = [vars(layer).get(COUNT) for layer in windows]
    return counts[0] if type(counts[0]) is int and counts[0] >= 0 and len(set(counts)) == 1 else None


def _windows(value: Any, known: Kind) -> list[Any]:
    """The layers of a cache that slide; none where a layer is of a kind that is not understood."""
    cls = type(value)
    if (cls.__module__, cls.__name__) != (HOME, "StaticCache") or vars(value).get("offloading") or is_stand_in(value):
        return []
    layers = value.layers
    if not all(type(held) in _PLAIN for name, held in vars(value).items() if name != "layers"):
        return []
    if type(layers) is not list or not all(type(layer) in (known.plain, known.sliding) for layer in layers):
        return []
    if not all(vars(layer).get("is_initialized") is True and _is_plain(layer) for layer in layers):
        return []
    windows = [layer for layer in layers if type(layer) is known.sliding]
    return windows if len(set(map(id, layers))) == len(layers) else []


def _is_plain(layer: Any) -> bool:
    """Whether a layer holds tensors and plain values, and no methods of its own."""
    held = vars(layer)
    tensors = all(type(held.get(name)) is Tensor for name in ("keys", "values", "cumulative_length"))
    plain = all(type(value) in (Tensor, *_PLAIN) for value in held.values())
    return tensors and plain and type(held.get("max_cache_len")) is int


@dataclass(slots=True)
class Stood:
    """A call with a stand-in in the place of its cache."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: Any
    standing: Standing
    num: int

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any],
           made: Callable[[Any], Standing | None]) -> Stood | None:  # fmt: skip
        """The call, if there is one such cache among its arguments."""
        caches = [value for value in (*args, *kwargs.values()) if type(value).__name__ == "StaticCache"]
        standing = made(caches[0]) if len(caches) == 1 else None
        num = None if standing is None else standing.counted()
        if standing is None or num is None:
            return None
        real, stand_in = caches[0], standing.cache
        given = tuple(stand_in if value is real else value for value in args)
        named = {name: stand_in if value is real else value for name, value in kwargs.items()}
        return cls(given, named, real, standing, num)

    def told(self) -> str:
        """Which windows are full, in words."""
        states = self.standing.states()
        return "full ones" if all(states) else "some full" if any(states) else "ones that are not full"

    def settled(self, result: Any) -> Any:
        """What the call returns, with the cache itself in it, which has counted the token."""
        self.standing.settle(self.num + 1)
        return self._handed(result)

    def _handed(self, result: Any) -> Any:
        stand_in = self.standing.cache
        if result is stand_in:
            return self.cache
        if type(result) is tuple:
            return tuple(self.cache if item is stand_in else item for item in result)
        for key in [key for key, item in result.items() if item is stand_in] if isinstance(result, dict) else ():
            result[key] = self.cache
        return result


def is_stand_in(value: Any) -> bool:
    return STANDS in getattr(value, "__dict__", ())


def full_windows(inputs: Inputs) -> dict[str, Any]:
    """Which windows of a stand-in among the arguments are full: searches of one and of the other are two."""
    given = [value for value in (*inputs.args, *inputs.kwargs.values()) if is_stand_in(value)]
    return {"windows": [vars(layer).get("full") for layer in given[0].layers]} if given else {}


def stood_in(model: nn.Module, inputs: Inputs) -> Stood | None:
    """The call to optimize with a stand-in of its own, where the model computes the same with one."""
    stood = Stood.of(inputs.args, inputs.kwargs, Standing.of)
    return stood if stood is not None and agrees(model, inputs) else None


def agrees(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a call with a stand-in does what the call does, on copies: results, cache and counts."""
    state = State(model)
    try:
        with torch.no_grad(), left_alone(model, None):
            found = _ran(model, inputs.copied(), True)  # first: a prompt is refused before it is computed
            meant, again = (_ran(model, inputs.copied(), False) for _ in range(2))
    except Exception:  # whatever a stand-in is not good for, the cache itself is
        return False
    finally:
        state.restore()
    return meant is not None and found is not None and again is not None and _near(found, meant, again)


def _ran(model: nn.Module, inputs: Inputs, stands: bool) -> tuple[list[tuple[str, Tensor]], list[Any]] | None:
    """Every tensor that a call leaves, and the counts of the cache; none where a stand-in stays in its result."""
    real = next(value for value in (*inputs.args, *inputs.kwargs.values()) if type(value).__name__ == "StaticCache")
    if not stands:
        result = model(*inputs.args, **inputs.kwargs)
    else:
        stood = Stood.of(inputs.args, inputs.kwargs, Standing.of)
        if stood is None:
            return None
        result = stood.settled(model(*stood.args, **stood.kwargs))
        if any(map(_is_ours, flatten(result).containers)):
            return None
    return list(leaves((result, inputs.args, dict(inputs.kwargs)))), [vars(each).get(COUNT) for each in real.layers]


def _is_ours(box: Any) -> bool:
    return is_stand_in(box) or type(box).__module__ == __name__


def _near(found: Any, meant: Any, again: Any) -> bool:
    """Whether the same tensors hold the same numbers, or numbers no farther off than eager's are from each other."""
    if found[1] != meant[1] or [name for name, _ in found[0]] != [name for name, _ in meant[0]]:
        return False
    rows = zip(found[0], meant[0], again[0], strict=True)
    return all(same(ours, theirs) or _as_near(ours, theirs, twice) for (_, ours), (_, theirs), (_, twice) in rows)


def _as_near(ours: Tensor, theirs: Tensor, twice: Tensor) -> bool:
    if not ours.is_floating_point() or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    off = (ours.double() - theirs.double()).norm()
    return bool(off <= _MOST_ERROR * (twice.double() - theirs.double()).norm())


class Sliding:
    """The stand-ins of an optimized model's caches, and recordings for windows that have filled, or were emptied."""

    def __init__(self, model: nn.Module, stood: Stood, record: Callable[..., Graphed] = graph_inference) -> None:
        self._model, self._record = model, record
        self._standing: WeakKeyDictionary[Any, Standing] = WeakKeyDictionary()
        self._kind = self._erased(stood)
        self._refused: set[Signature] = set()

    def stood(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Stood | None:
        """A call with the stand-in of its cache, if it has one that slides."""
        return Stood.of(args, kwargs, self._stand_in)

    def _stand_in(self, value: Any) -> Standing | None:
        found = self._standing.get(value)
        if found is None or not found.stands_for(value):
            found = Standing.of(value)
            if found is not None:
                self._standing[value] = found
        return found

    def _erased(self, stood: Stood) -> Signature | None:
        """A call's signature, whichever windows are full."""
        states = stood.standing.states()
        stood.standing.put((None,) * len(states))
        try:
            return Signature.of(stood.args, stood.kwargs, self._model, grad=False).detached()
        except TooLarge:
            return None
        finally:
            stood.standing.put(states)

    def recorded(self, stood: Stood, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 planned: Container[Signature]) -> Graphed | None:  # fmt: skip
        """The model itself, recorded for a call that differs from the one that was optimized in what is full only.

        Not where there is a plan: one that does not answer has its reasons.
        """
        if self._kind is None or self._erased(stood) != self._kind or _is_capturing():
            return None
        signature = Signature.of(stood.args, stood.kwargs, self._model, grad=False).detached()
        if signature in self._refused or signature in planned:
            return None
        self._refused.add(signature)  # where it fails it is not tried again at every call
        with suppress(NotGraphable):
            if agrees(self._model, Inputs(args, kwargs)):
                return self._record(self._model, stood.args, stood.kwargs, self._model)
        return None


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

