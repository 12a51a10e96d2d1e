"""Blocks that ask a cache for their place by number: one graph for all, and the cache as the model leaves it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor

from ridgeline.engine.replay.inference import graph_inference
from ridgeline.engine.shallow_clone import shallow_clone
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.compile.cache_slots import Place, is_cache
from ridgeline.optimizer.search.candidate import _block_runner, compile_blocks


class Layer:
    """Grows by what it is given, or is written in place."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.seen = torch.zeros(())

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        self.seen.add_(keys.shape[1])
        return self.keys


class Cache:
    layer_class_to_replicate = Layer

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def update(self, keys: torch.Tensor, number: int) -> torch.Tensor:
        while len(self.layers) <= number:
            self.layers.append(Layer())
        return self.layers[number].update(keys)


class Part(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.map = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return x + cache.update(self.map(x), self.layer_idx).mean(1, keepdim=True)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.part, self.norm = Part(number), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, cache: Cache) -> Any:
        return self.norm(self.part(x, cache=cache)), cache


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(4))

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        for block in self.blocks:
            x, handed = block(x, cache)
            assert handed is cache
        return x


def _blocks(model: nn.Module) -> tuple[nn.Module, Report]:
    report = Report()
    torch._dynamo.reset()

    def runner(group: Any) -> Any:
        return compiled(_block_runner(group.kind), rewrites=(), report=report)

    return compile_blocks(shallow_clone(model), runner, report), report


@torch.no_grad()
def test_all_blocks_share_one_graph_a_form_of_the_cache_and_fill_it_like_the_model() -> None:
    model, x = Model(), torch.randn(2, 3, 8)
    blocks, report = _blocks(model)
    ours, theirs = Cache(), Cache()
    for _ in range(2):  # an empty layer, then one that has grown
        torch.testing.assert_close(blocks(x, ours), model(x, theirs))
    assert report.graphs == 2
    for mine, meant in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, meant.keys)
        assert int(mine.seen) == int(meant.seen) == 6
    assert [block.part.layer_idx for block in model.blocks] == [0, 1, 2, 3]


@torch.no_grad()
def test_what_is_written_in_place_is_written_to_the_caches_own_tensors() -> None:
    model, cache = Model(), Cache()
    blocks, _ = _blocks(model)
    blocks(torch.randn(1, 1, 8), cache)
    counters = [layer.seen for layer in cache.layers]
    blocks(torch.randn(1, 1, 8), cache)
    assert all(layer.seen is counter for layer, counter in zip(cache.layers, counters, strict=True))
    assert [int(counter) for counter in counters] == [2] * 4


def test_blocks_without_one_number_and_caches_of_another_kind_are_called_as_they_are() -> None:
    block = Block(3)
    assert Place(block).number == 3
    block.layer_idx = 5
    assert Place(block).number is None
    assert not is_cache(nn.Sequential()) and not is_cache(SimpleNamespace(layers=(), update=print))
    given = SimpleNamespace(layers=[], update=print)  # nothing says what its layers are made of
    assert Place(Block(1)).call(lambda _, x, cache: (x, cache), block, (1, given), {}) == (1, given)


def test_numbers_come_back_when_a_block_fails() -> None:
    block, cache = Block(2), Cache()

    def fails(*args: Any) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        Place(block).call(fails, block, (torch.ones(1), cache), {})
    assert block.part.layer_idx == 2 and len(cache.layers) == 3


def test_gradients_go_through_what_a_cache_holds() -> None:
    model, cache = Model(), Cache()
    prefix = [torch.randn(1, 2, 8, requires_grad=True) for _ in range(4)]
    for i, keys in enumerate(prefix):
        cache.update(keys, i)
    blocks, _ = _blocks(model)
    blocks(torch.randn(1, 3, 8), cache).square().sum().backward()
    assert all(keys.grad is not None and keys.grad.abs().sum() > 0 for keys in prefix)


class DropPath(nn.Module):
    """Skips a block in training with a chance of its own; in evaluation the chance is read and not used."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        return x * (torch.rand(()) > self.drop_prob)


class Skipped(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.map, self.drop = nn.Linear(8, 8), DropPath(drop_prob)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.map(x))


def test_chances_that_are_not_taken_in_evaluation_make_no_graphs_of_their_own() -> None:
    model = nn.Sequential(*(Skipped(0.02 * i) for i in range(5))).eval()
    report, x = Report(), torch.randn(2, 8)
    runner = compiled(_block_runner(Skipped), rewrites=(), report=report)
    blocks = compile_blocks(shallow_clone(model), lambda group: runner, report)

    def run(x: torch.Tensor) -> torch.Tensor:
        return blocks(x)

    with torch.no_grad():
        assert torch.equal(run(x), model(x))
        recorded, y = graph_inference(run, (x,), {}, model, executor=TapeExecutor()), torch.randn(2, 8)
        assert torch.equal(recorded(y), model(y)) and recorded.replays == 1, recorded.misses
    assert report.graphs == 1
    assert [block.drop.drop_prob for block in model] == [0.02 * i for i in range(5)]


def test_blocks_that_a_tracer_was_told_to_leave_whole_are_compiled_as_blocks() -> None:
    """Diffusers says so of its blocks."""

    @torch._dynamo.allow_in_graph
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return x + self.layer(x).relu()

    torch._dynamo.reset()
    blocks, report, x = [Whole().eval() for _ in range(3)], Report(), torch.randn(2, 8)
    runner = compiled(_block_runner(Whole), rewrites=(), report=report)
    with torch.no_grad():
        for block in blocks:
            torch.testing.assert_close(runner(block, x), block(x))
    assert report.graphs == 1 and not report.breaks
