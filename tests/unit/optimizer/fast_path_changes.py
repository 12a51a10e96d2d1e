"""A small decoding step that is told at a glance, and everything that may be changed behind its back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from recorder import TapeExecutor
from torch import Tensor, nn

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay.inference import MISSED, graph_inference

SCALE, WORDS = 1.0, {"a"}


class Layer:
    def __init__(self) -> None:
        self.keys, self.length = torch.zeros(6, 4), torch.zeros(1, dtype=torch.int64)


class Cache:
    def __init__(self, num: int = 2) -> None:
        self.layers = [Layer() for _ in range(num)]


class Block(nn.Module):
    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.factor = 1.5
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor, layer: Layer) -> Tensor:
        new = self.linear(self.norm(x)) * self.factor + self.shift
        layer.keys.index_copy_(0, layer.length, new)
        layer.length.add_(1)
        y = x + layer.keys.sum(0, keepdim=True) * self.gain * SCALE
        return y + 1 if self.training or "b" in WORDS else y


class Step(nn.Module):
    """A decoding step in small: one token, written to a cache of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.words = {"x"}

    def forward(self, token: Tensor, cache: Cache, flag: bool = True) -> Tensor:
        x = token * 1.0
        for block, layer in zip(self.blocks, cache.layers):
            x = block(x, layer)
        return x * 2 if "y" in self.words else x


class Scene:
    """An optimized step whose next call is told at a glance, and the same step as it is written."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model, self.cache = Step().eval(), Cache()
            self.token = torch.randn(1, 4)
        self.recording = graph_inference(self.model, (self.token, self.cache), {"flag": True}, self.model,
                                         executor=TapeExecutor() if device == "cpu" else None)  # fmt: skip
        self.fast = Optimized(self.model, [Plan(self.recording.signature, self.recording)])
        with torch.no_grad():
            for _ in range(4):
                self.fast(self.token, self.cache, flag=True)
                self.rewind()

    def rewind(self) -> None:
        for layer in self.cache.layers:
            layer.keys.zero_()
            layer.length.zero_()

    def glances(self) -> int:
        """How many calls are told at a glance out of one."""
        before, told = self.recording.replays, []
        quick = self.recording.quick

        def asked(*given: Any) -> Any:
            found = quick(*given)
            told.append(found is not MISSED)
            return found

        self.recording.quick = asked  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                self.fast(self.token, self.cache, flag=True)
        finally:
            del self.recording.quick
        self.rewind()
        assert self.recording.replays == before + 1
        return sum(told)

    def agree(self, token: Tensor | None = None, cache: Any = None, **given: Any) -> None:
        """The next call, here and as it is written: results, and what it leaves in the cache."""
        token, cache = self.token if token is None else token, self.cache if cache is None else cache
        given = given or {"flag": True}
        memo: dict[int, Any] = {}
        theirs, their_token, their_cache = copy.deepcopy((self.model, token, cache), memo)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = theirs(their_token, their_cache, **given)
            found = self.fast(token, cache, **given)
        torch.testing.assert_close(found, wanted)
        assert found.dtype is wanted.dtype
        for mine, other in zip(cache.layers, their_cache.layers):
            torch.testing.assert_close(mine.keys, other.keys)
            torch.testing.assert_close(mine.length, other.length)


def _replace_parameter(s: Scene) -> None:
    s.model.blocks[0].linear.weight = nn.Parameter(torch.randn(4, 4))


def _swap_data(s: Scene) -> None:
    s.model.blocks[0].linear.weight.data = torch.randn(4, 4)


def _turn_data(s: Scene) -> None:
    weight = s.model.blocks[0].linear.weight
    weight.data = weight.data.t()  # where it lay, of the same size


def _swap_tensors(s: Scene) -> None:
    torch._C._swap_tensor_impl(s.model.blocks[0].linear.weight, nn.Parameter(torch.randn(4, 4)))


def _other_bits(s: Scene) -> None:
    for layer in s.cache.layers:
        layer.length.data = layer.length.data.view(torch.float64).view(torch.int64)
    s.model.blocks[1].shift.data = s.model.blocks[1].shift.data.view(torch.int32)


def _wider(s: Scene) -> None:
    s.model.double()
    s.token = s.token.double()
    for layer in s.cache.layers:
        layer.keys = layer.keys.double()


def _hook(s: Scene) -> None:
    s.model.blocks[1].register_forward_hook(lambda module, given, result: result + 3)


def _train(s: Scene) -> None:
    s.model.train()


def _train_part(s: Scene) -> None:
    s.model.blocks[0].train()


def _class_attribute(s: Scene) -> None:
    Block.gain = 3.0


def _global(s: Scene) -> None:
    globals()["SCALE"] = 0.5


def _global_set(s: Scene) -> None:
    WORDS.add("b")


def _own_set(s: Scene) -> None:
    s.model.words.add("y")


def _attribute(s: Scene) -> None:
    s.model.blocks[0].factor = -1.0


def _block(s: Scene) -> None:
    s.model.blocks[1] = Block().eval()


def _buffer(s: Scene) -> None:
    s.model.blocks[1].shift = torch.randn(4)


def _cache_tensor(s: Scene) -> None:
    s.cache.layers[0].keys = torch.ones(6, 4)


def _cache_data(s: Scene) -> None:
    s.cache.layers[0].keys.data = torch.ones(6, 4)


def _cache_resized(s: Scene) -> None:
    s.cache.layers[0].keys.resize_(9, 4).zero_()


def _cache_turned(s: Scene) -> None:
    s.cache.layers[1].keys.data = torch.zeros(4, 6).t()


def _cache_layer(s: Scene) -> None:
    s.cache.layers[1] = Layer()


def _cache_layers_turned(s: Scene) -> None:
    s.cache.layers[0].keys.fill_(0.25)
    s.cache.layers.reverse()


def _cache_longer(s: Scene) -> None:
    s.cache.layers.append(Layer())


def _cache_names(s: Scene) -> None:
    s.cache.__dict__ = {"layers": [Layer(), Layer()]}


def _cache_shared(s: Scene) -> None:
    s.cache.layers[0].keys = s.cache.layers[1].keys


def _token_in_cache(s: Scene) -> None:
    s.token = s.cache.layers[0].keys[0:1]


def _token_in_model(s: Scene) -> None:
    s.token = s.model.blocks[0].linear.weight.detach()[1:2]


def _token_strided(s: Scene) -> None:
    s.token = torch.randn(4, 1).t()


def _token_wide(s: Scene) -> None:
    s.token = torch.randn(2, 4)[:1, ::1].double().float()[:, [3, 2, 1, 0]]


CHANGES: list[Callable[[Scene], None]] = [
    _replace_parameter, _swap_data, _turn_data, _swap_tensors, _other_bits, _wider, _hook, _train, _train_part,
    _class_attribute, _global, _global_set, _own_set, _attribute, _block, _buffer, _cache_tensor, _cache_data,
    _cache_resized, _cache_turned, _cache_layer, _cache_layers_turned, _cache_longer, _cache_names, _cache_shared,
    _token_in_cache, _token_in_model, _token_strided, _token_wide,
]  # fmt: skip
