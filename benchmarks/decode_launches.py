"""What a rewritten decoding step of Llama 8B launches, counted without a GPU, with the bytes each launch moves.

    python benchmarks/decode_launches.py [--cache static|dynamic] [--places 2112] [--without NAME …]

The model is traced on tensors without memory, at its true sizes, with the rewrites that ``optimize`` tries first; what
the graph of four layers has more than that of three is a layer, the rest is the step's own. Estimates are a fixed time
a launch plus the bytes at a rate, both arguments: they rank launches and are no measurement.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ridgeline.optimizer import backend
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.rewrites.context import Scene

FREE = frozenset(
    {"getitem", "view", "transpose", "reshape", "unsqueeze", "columns", "read_place", "expand", "key_mask",
     "_log_api_usage_once"}
)  # fmt: skip
"""Views (a mask of one factor is one), and what does nothing on a device; a ``to`` is one where memory is shared."""
LAUNCHES = {"attended": 2, "num_seen": 2}
"""Kernels behind one call where they are not one: attention is shares and their join, a length is clamped and moved."""
LENGTH, DIM, KEY_HEADS = 2048, 128, 8


class _Traced(Exception):
    """Ends a compilation when its graph is known: tensors without memory cannot be computed with."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    parser.add_argument("--cache", choices=("static", "dynamic"), default="static")
    parser.add_argument("--places", type=int, default=2112)
    parser.add_argument("--layers", type=int, default=32, help="layers of the whole step")
    parser.add_argument("--without", nargs="*", default=(), help="rewrites to leave out")
    parser.add_argument("--launch-us", type=float, default=1.7, help="time of the smallest kernel in a graph")
    parser.add_argument("--bytes-per-s", type=float, default=4.2e12)
    asked = parser.parse_args(argv)
    names = [name for name in recommended("inference", "none", "cuda") if name not in asked.without]
    small, large = (launches(num, asked.cache, asked.places, names) for num in (3, 4))
    layer, step = large - small, Counter(small)
    for what, num in layer.items():
        step[what] -= 3 * num
    for title, found, times in (("a layer", layer, asked.layers), ("the step's own", +step, 1)):
        _print(title, found, times, asked.launch_us * 1e-6, asked.bytes_per_s)
    total = asked.layers * _num(layer) + _num(+step)
    print(f"{total} launches a step: {_num(layer)} × {asked.layers} layers + {_num(+step)}")


def _num(found: Counter[tuple[str, int]]) -> int:
    return sum(num * LAUNCHES.get(name, 1) for (name, _), num in found.items())


def _print(title: str, found: Counter[tuple[str, int]], times: int, launch_s: float, bytes_per_s: float) -> None:
    print(f"{title}\n{'call':24} {'calls':>5} {'kernels':>7} {'MB each':>10} {'about µs, whole step':>22}")
    for (name, num_bytes), num in sorted(found.items(), key=lambda pair: -pair[0][1]):
        kernels = LAUNCHES.get(name, 1)
        about_s = num * times * (kernels * launch_s + num_bytes / bytes_per_s)
        print(f"{name:24} {num:5} {num * kernels:7} {num_bytes / 1e6:10.3f} {about_s * 1e6:22.1f}")


def launches(num_layers: int, cache: str, places: int, names: Sequence[str]) -> Counter[tuple[str, int]]:
    """Calls of a rewritten step that launch something, by name and bytes moved."""
    scene = traced(num_layers, cache, places, names)
    found: Counter[tuple[str, int]] = Counter()
    for node in scene.graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        if node.op in ("call_function", "call_method") and name not in FREE and not _is_alias(scene, node):
            found[(name, _num_bytes(scene, node))] += 1
    return found


def _is_alias(scene: Scene, node: Any) -> bool:
    return str(node.target) == "to" and scene.memory(node) == scene.memory(node.args[0])


def _num_bytes(scene: Scene, node: Any) -> int:
    """Bytes read and written, to three digits; of a cache what is appended, single numbers and tables left out."""
    read = [node.args[0]] if str(getattr(node.target, "__name__", "")) == "embedding" else node.all_input_nodes
    read = node.args[2:] if "_append" in str(node.target) else read
    values = [scene.value(arg) for arg in (*read, node)]
    total = sum(leaf.nbytes for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim())
    return int(float(f"{total:.3g}"))


def traced(num_layers: int, cache: str, places: int, names: Sequence[str]) -> Scene:
    """The graph of one step after its rewrites."""
    found: list[Scene] = []

    def keep(scene: Scene, *_: Any) -> Any:
        found.append(scene)
        raise _Traced

    lowered, backend._lowered = backend._lowered, keep
    torch._dynamo.reset()
    try:
        model, kwargs = _model(num_layers, cache, places)
        with torch.no_grad():
            backend.compiled(model, rewrites=names, fullgraph=True)(**kwargs)
    except Exception:
        if not found:
            raise
    finally:
        backend._lowered = lowered
    return found[0]


def _model(num_layers: int, kind: str, places: int) -> tuple[Any, dict[str, Any]]:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=num_layers, num_attention_heads=32, num_key_value_heads=KEY_HEADS,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    with torch.device("meta"), _default(torch.bfloat16):  # not model.to(): tables in float32 stay so
        model = LlamaForCausalLM(config).eval()
        cache = DynamicCache() if kind == "dynamic" else StaticCache(config=config, max_cache_len=places)
        for layer in range(num_layers):
            keys, values = torch.empty(2, 1, KEY_HEADS, LENGTH, DIM).unbind(0)
            cache.update(keys, values, layer, {"cache_position": torch.arange(LENGTH)})
        kwargs = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "past_key_values": cache, "use_cache": True}
        if kind == "static":
            kwargs |= {
                "position_ids": torch.zeros(1, 1, dtype=torch.int64),
                "cache_position": torch.zeros(1, dtype=torch.int64),
            }
    return model, kwargs


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    main()
