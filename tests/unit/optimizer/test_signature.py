"""Which calls count as alike, and how a difference is told."""

from __future__ import annotations

import gc
import math
import timeit
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.pytree import flatten, twin
from ridgeline.engine.signature import Signature, difference

MODEL = nn.Linear(2, 2)
Pair = namedtuple("Pair", "a b")


@dataclass
class Batch:
    """Something users pass around."""

    x: Any
    name: str = "batch"


class Cache:
    """An object with layers, as transformers has them."""

    def __init__(self, num: int = 3) -> None:
        self.layers = [Batch(torch.zeros(2, 4), str(i)) for i in range(num)]
        self.length = 0


def _of(*args: Any, **kwargs: Any) -> Signature:
    return Signature.of(args, kwargs, MODEL)


def test_contents_of_tensors_do_not_matter() -> None:
    assert _of(torch.zeros(3, 4)) == _of(torch.ones(3, 4))
    assert hash(_of(torch.zeros(3, 4))) == hash(_of(torch.ones(3, 4)))


@pytest.mark.parametrize(
    "other",
    [torch.zeros(4, 3), torch.zeros(4, 3).t(), torch.zeros(3, 4).half(), torch.zeros(3, 4, requires_grad=True),
     torch.zeros(3, 4).to_sparse(), nn.Parameter(torch.zeros(3, 4)), torch.zeros(3, 4, device="meta"), None, 1.0],
)  # fmt: skip
def test_shape_layout_dtype_device_and_gradients_matter(other: Any) -> None:
    assert _of(torch.zeros(3, 4)) != _of(other)


@pytest.mark.parametrize(("a", "b"), [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1), ([1], (1,)), ({"a": 1}, {"b": 1}),
                                      (Pair(1, 2), (1, 2)), (None, 0), (Batch(1), Batch(2)), ({1}, {2}),
                                      (torch.float32, torch.float16)])  # fmt: skip
def test_plain_values_are_compared_with_their_types(a: Any, b: Any) -> None:
    assert _of(a) != _of(b)
    assert _of(a) == _of(a)


def test_a_number_that_is_no_number_equals_itself() -> None:
    assert _of(math.nan) == _of(float("nan"))


def test_what_cannot_be_compared_equals_nothing() -> None:
    assert _of(iter([1])) != _of(iter([1]))
    assert _of(torch.Generator()) != _of(torch.Generator())


def test_functions_and_modules_are_compared_by_identity() -> None:
    assert _of(len) == _of(len)
    assert _of(MODEL) == _of(MODEL)
    assert _of(MODEL) != _of(nn.Linear(2, 2))


def test_memory_that_is_shared_matters() -> None:
    x = torch.zeros(4, 4)
    assert _of(x, x) != _of(x, x.clone())
    assert _of(x[:2], x[2:]) != _of(x[:2].clone(), x[2:].clone())
    assert _of(x[:2], x[2:]) != _of(x[:2], x[1:3])
    assert _of(x[:2], x[2:]) == _of(*(y := torch.ones(4, 4)).split(2)), y


def test_an_object_that_changed_is_another() -> None:
    cache = Cache()
    before = _of(cache)
    assert _of(cache) == before
    assert _of(Cache()) == before
    cache.layers[1].x.add_(1)
    assert _of(cache) == before
    cache.length = 1
    assert _of(cache) != before
    cache.length = 0
    assert _of(cache) == before
    cache.layers[1].x = torch.zeros(3, 4)
    assert _of(cache) != before
    cache.layers[1].x = torch.zeros(2, 4)
    assert _of(cache) == before
    cache.layers[2].x.resize_(5, 5)
    assert _of(cache) != before
    assert "layers[2].x" in difference(before, _of(cache))
    cache.layers.append(cache.layers[0])
    assert _of(cache) != before


def test_a_tensor_that_was_turned_in_place_is_another() -> None:
    cache = Cache()
    cache.layers[0].x = torch.zeros(4, 4)
    before = _of(cache)
    assert _of(cache) == before
    cache.layers[0].x.t_()
    assert _of(cache) != before
    cache.layers[0].x.t_()
    with torch.inference_mode():
        assert _of(cache).tokens == before.tokens


def test_an_object_that_shares_memory_with_another_argument_is_not_the_same_call() -> None:
    cache = Cache()
    apart = _of(cache, torch.zeros(2, 4))
    assert _of(cache, cache.layers[0].x) != apart
    assert _of(cache.layers[0].x, cache) != _of(torch.zeros(2, 4), cache)
    assert _of(cache, cache.layers[0].x[1:]) != _of(cache, torch.zeros(1, 4))
    assert _of(cache, cache) != _of(cache, Cache())


def test_looking_at_an_object_keeps_none_of_its_tensors() -> None:
    cache = Cache()
    _of(cache)
    old = weakref.ref(cache.layers[0].x)
    cache.layers[0].x = torch.zeros(2, 4)
    gc.collect()
    assert old() is None
    last, whole = weakref.ref(cache.layers[1].x), weakref.ref(cache)
    del cache
    gc.collect()
    assert whole() is None
    assert last() is None


def test_the_state_around_a_call_matters() -> None:
    x = torch.zeros(2, 2)
    plain = _of(x)
    with torch.no_grad():
        assert _of(x) != plain
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in difference(plain, _of(x))
    MODEL.eval()
    assert difference(plain, _of(x)) == "model.training is False, not True"
    MODEL.train()
    assert _of(x) == plain


def test_for_inference_the_ways_to_want_no_gradients_are_one() -> None:
    x = torch.zeros(2, 2, requires_grad=True)
    plain = Signature.of((x,), {}, MODEL, grad=False)
    with torch.no_grad():
        assert Signature.of((x,), {}, MODEL, grad=False) == plain
    with torch.inference_mode():
        assert Signature.of((x.detach(),), {}, MODEL, grad=False) == plain


def test_a_difference_names_the_argument() -> None:
    a = _of(torch.zeros(2, 3), mask=torch.zeros(2), flags={"fast": True})
    assert difference(a, a) == ""
    assert difference(a, _of(torch.zeros(2, 4), mask=torch.zeros(2), flags={"fast": True})).startswith("args[0] is a")
    assert "kwargs['mask']" in difference(a, _of(torch.zeros(2, 3), mask=torch.zeros(3), flags={"fast": True}))
    told = difference(a, _of(torch.zeros(2, 3), mask=torch.zeros(2), flags={"fast": False}))
    assert told == "kwargs['flags']['fast'] is False, not True"
    assert difference(a, _of(torch.zeros(2, 3)))


def test_a_twin_has_the_same_structure_around_other_tensors() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    inner = [x]
    kinds = {"list": inner, "again": inner, "named": Pair(x, 1), "ordered": OrderedDict(a=x), "queue": deque([x], 3),
             "default": defaultdict(list, a=[x]), "object": Batch(x), "top": torch.topk(x, 1)}  # fmt: skip
    made = twin(kinds, {id(x): y})
    assert made["list"] is made["again"] is not inner
    assert made["list"][0] is made["named"].a is made["ordered"]["a"] is made["object"].x is made["queue"][0] is y
    assert [type(v) for v in made.values()] == [type(v) for v in kinds.values()]
    assert flatten(made).tokens == flatten(kinds).tokens
    assert made["default"]["new"] == []
    assert made["queue"].maxlen == 3


def test_a_call_of_a_few_inputs_is_recognized_in_microseconds() -> None:
    x, kwargs = torch.zeros(2, 2), {"mask": torch.zeros(3), "flag": True}
    best_s = min(timeit.repeat(lambda: Signature.of((x,), kwargs, MODEL), number=200, repeat=5)) / 200
    assert best_s < 100e-6  # 10 µs on a quiet machine
