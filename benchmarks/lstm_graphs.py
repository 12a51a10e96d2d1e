"""Whether CUDA graphs hold the steps of cuDNN's recurrent layers: types, dropout, weights in one stretch or not.

    python benchmarks/lstm_graphs.py

Two layers of 650, 35 steps of 20; a line for each: eager's forward and backward, the forward alone and both replayed
from a bare graph, and both by our recording, in milliseconds, or why they could not be recorded.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cudnn import rnn

from ridgeline.engine.replay.training import graph_training
from ridgeline.errors import NotGraphable


def main() -> None:
    warnings.simplefilter("ignore")
    kinds = itertools.product((torch.bfloat16, torch.float32, torch.float16), (0.0, 0.5), (False, True))
    for dtype, drop, flat in kinds:
        print(*_row(dtype, drop, flat), sep=" | ", flush=True)


def _row(dtype: torch.dtype, drop: float, flat: bool) -> list[str]:
    torch.manual_seed(0)
    layers = nn.LSTM(650, 650, 2, dropout=drop).to("cuda", dtype)
    x = torch.randn(35, 20, 650, device="cuda", dtype=dtype)
    _lay(layers, flat)

    def forward() -> Tensor:
        found: Tensor = layers(x)[0]
        return found

    def step() -> Any:
        return torch.autograd.grad(forward().float().sum(), list(layers.parameters()))

    shown = [str(dtype), f"dropout {drop}", "one stretch" if flat else "apart", f"eager {_ms(step):.2f}"]
    shown += [f"{name} {_recorded(call)}" for name, call in (("forward", forward), ("both", step))]
    return [*shown, f"ours {_ours(layers, x)}"]


def _lay(layers: nn.LSTM, flat: bool) -> None:
    """Weights in one stretch of memory, which PyTorch does by itself but for bf16, or each somewhere."""
    for parameter in layers.parameters():
        parameter.data = parameter.data.clone()
    if flat:
        with torch.no_grad():
            torch._cudnn_rnn_flatten_weight(layers._flat_weights, 4, 650, rnn.get_cudnn_mode("LSTM"), 650, 0, 2, False,
                                            False)  # fmt: skip


def _recorded(call: Callable[[], Any]) -> str:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        return f"{_ms(graph.replay):.2f}"
    except RuntimeError as error:
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"


def _ours(layers: nn.LSTM, x: Tensor) -> str:
    def loss(found: Any) -> Tensor:
        return found[0].float().sum()  # type: ignore[no-any-return]

    try:
        call = graph_training(layers, (x,), {}, layers, loss=loss)
    except NotGraphable as refusal:
        return str(refusal)

    def step() -> None:
        layers.zero_grad(set_to_none=True)
        loss(call(x)).backward()

    return f"{_ms(step):.2f} {call.misses or ''}"


def _ms(call: Callable[[], Any], num: int = 20) -> float:
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / num


if __name__ == "__main__":
    main()
