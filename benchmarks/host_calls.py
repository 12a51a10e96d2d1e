"""What calls of attention and decoding cost the host, again and again from Python, beside PyTorch's own.

    python benchmarks/host_calls.py --out DIR

Every row is timed twice: with what is repeated in C++, and with everything in Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ridgeline import kernels
from ridgeline.kernels import contract, direct
from ridgeline.kernels.files import cache_folder
from ridgeline.kernels.launcher import collecting

_without: set[Callable[[], Any]] = set()


def seconds(run: Callable[[], Any], calls: int = 100, repeats: int = 7) -> tuple[float, float]:
    """Seconds of a call, the device's part included, and the host's part alone, medians."""
    whole, host = [], []
    with gradients(run):
        for _ in range(30):
            run()
        for _ in range(repeats):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            handed = time.perf_counter()
            torch.cuda.synchronize()
            whole.append((time.perf_counter() - began) / calls)
            host.append((handed - began) / calls)
    return statistics.median(whole), statistics.median(host)


def gradients(run: Callable[[], Any]) -> Any:
    """Inside, gradients are recorded if the call wants one: once around all calls, since that takes the host 3 µs."""
    return torch.set_grad_enabled(run not in _without)


def calls(on: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]:
    """Ours and PyTorch's, by name; nothing where PyTorch has no such call."""
    found: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=on, dtype=torch.bfloat16)

    for rows, dim in ((64, 64), (256, 128)):
        q, k, v = (drawn(1, 8, rows, dim) for _ in range(3))
        leaves, seed = [x.clone().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
        turned = [drawn(1, rows, 8, dim).transpose(1, 2) for _ in range(3)]
        found[f"attention 1×8×{rows}×{dim}"] = (
            no_grad(lambda q=q, k=k, v=v: kernels.attention(q, k, v, True)),
            no_grad(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        )
        found[f"attention of a projection 1×8×{rows}×{dim}"] = (
            no_grad(lambda t=turned: kernels.attention(*t, True)),
            no_grad(lambda t=turned: F.scaled_dot_product_attention(*t, is_causal=True)),
        )
        found[f"attention and gradient 1×8×{rows}×{dim}"] = (
            lambda a=leaves, s=seed: torch.autograd.grad(kernels.attention(*a, True), a, s),
            lambda a=leaves, s=seed: torch.autograd.grad(F.scaled_dot_product_attention(*a, is_causal=True), a, s),
        )
    small, scale, shift = drawn(64, 1024), drawn(1024), drawn(1024)
    found["rms_norm 64×1024"] = (
        no_grad(lambda: kernels.rms_norm(small, scale)), no_grad(lambda: F.rms_norm(small, (1024,), scale))
    )
    found["layer_norm 64×1024"] = (
        no_grad(lambda: kernels.layer_norm(small, scale, shift)),
        no_grad(lambda: F.layer_norm(small, (1024,), scale, shift)),
    )
    found["softmax 64×1024"] = no_grad(lambda: kernels.softmax(small)), no_grad(lambda: torch.softmax(small, -1))
    cache, row = [drawn(2, 8, 512, 128) for _ in range(2)], drawn(2, 32, 1, 128)
    found["decode 2×32 over 8×512×128"] = (
        no_grad(lambda: kernels.decode_attention(row, *cache)),
        no_grad(lambda: F.scaled_dot_product_attention(row, *cache, enable_gqa=True)),
    )
    pages, token = [drawn(80, 16, 8, 128) for _ in range(2)], drawn(2, 32, 128)
    table = torch.arange(64, device=on, dtype=torch.int32).view(2, 32)
    lens = torch.tensor([500, 77], device=on, dtype=torch.int32)
    found["paged 2×32 over 8×512×128"] = (
        no_grad(lambda: kernels.paged_attention(token, *pages, table, lens)), None
    )
    latent, wide = drawn(80, 64, 576), drawn(2, 16, 576)
    few = torch.arange(16, device=on, dtype=torch.int32).view(2, 8)
    found["latent 2×16 over 512"] = no_grad(lambda: kernels.paged_latent_attention(wide, latent, few, lens)), None
    return found


def wanted_variants() -> list[Any]:
    """Everything of ours that is launched."""
    with collecting() as found:
        for ours, _ in calls("meta").values():
            with gradients(ours):
                ours()
    return list(dict.fromkeys(found))


def no_grad(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same call, noted as one that wants no gradient."""
    _without.add(run)
    return run


def rows() -> Iterator[dict[str, Any]]:
    """Seconds of every call and of its host's part: as it is, without what C++ repeats, and PyTorch's."""
    for name, (ours, theirs) in calls("cuda").items():
        row: dict[str, Any] = {"call": name, "has_direct": direct.module() is not None}
        try:
            with gradients(ours):
                found, row["repeated_s"] = ours(), seconds(ours)
                with in_python():
                    again, row["python_s"] = ours(), seconds(ours)
                last = ours()
            pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (found, again, last)), strict=True)
            row["ok"] = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in pairs)
            row["pytorch_s"] = None if theirs is None else seconds(theirs)
        except Exception as error:
            row["note"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield row


@contextmanager
def in_python() -> Iterator[None]:
    """Inside, no call is repeated in C++."""
    made = list(contract.primitives().values())
    saved = [(each.direct, each.quick) for each in made]
    for each in made:
        each.direct = each.quick = None
    try:
        yield
    finally:
        for each, before in zip(made, saved, strict=True):
            each.direct, each.quick = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    direct.build(cache_folder())
    found = []
    for row in rows():
        found.append(row)
        print(json.dumps(row), flush=True)
    (options.out / "host.json").write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
