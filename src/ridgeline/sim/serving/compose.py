"""A deployment from the words a person uses: a model's name, a cluster, widths and an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError
from ridgeline.hardware import Cluster, cluster
from ridgeline.sim.serving.anatomy import Anatomy, anatomy, of_config
from ridgeline.sim.serving.deployment import Layout, cache_tokens, precision
from ridgeline.sim.serving.engine import Engine, engine
from ridgeline.sim.serving.simulate import Deployment, Pool
from ridgeline.sim.serving.worker import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How a model is to be deployed; 0 or empty is for us to choose."""

    tp: int = 0
    pp: int = 1
    ep: int = 0
    attention_dp: int = 1
    precision: str = ""
    kv: str = ""
    engine: str = "vllm"
    settings: Mapping[str, Any] = field(default_factory=dict)
    disaggregated: str = ""  # such as 2x4+1x8: two prefill instances on 4 devices each, one decoding on 8
    draft: int = 0
    accept_frac: float = 0.7
    cache_tokens: int = 0


def model_named(name: str) -> Anatomy:
    """A name of the zoo, a path as a model hub writes it, or a ``config.json`` on disk."""
    path = Path(name)
    if path.suffix != ".json":
        return anatomy(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the model configuration {name}: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{name} is not a model configuration: it should hold one object")
    return of_config(path.parent.name or path.stem, config)


def deployment_of(model: str | Anatomy, on: str, wanted: Wanted) -> Deployment:
    """Everything filled in and checked: replicas take all devices of the cluster."""
    made = model_named(model) if isinstance(model, str) else model
    where = cluster(on)
    used = engine(wanted.engine, where.device).change(**wanted.settings)
    formats = precision(wanted.precision or default_precision(made), wanted.kv, sparse=made.is_sparse)
    draft = Speculation(wanted.draft, wanted.accept_frac) if wanted.draft else None
    if wanted.disaggregated:
        prefill, pool = _split(made, where, wanted)
    else:
        layout = _layout(made, wanted.tp, wanted) if wanted.tp else _smallest(made, where, wanted, formats, used)
        replicas, rest = divmod(where.num_devices, layout.num_devices)
        if rest or not replicas:
            raise InputError(
                f"a replica takes {layout.num_devices} devices (tp {layout.tp} × attention_dp {layout.attention_dp} × "
                f"pp {layout.pp}) and {where.num_devices} × {where.device.name} do not divide by it"
                f"{_widths(made, where, wanted)}"
            )
        one_pool = Pool(layout, replicas)
        prefill, pool = None, one_pool
    return Deployment(made, where.device, formats, used, pool, prefill, draft, wanted.cache_tokens)


def default_precision(made: Anatomy) -> str:
    """How a model is served when nobody says: as its makers publish it."""
    return "mxfp4" if made.name.startswith("gpt-oss") else "bf16"


def _layout(made: Anatomy, tp: int, wanted: Wanted) -> Layout:
    ep = wanted.ep or (tp * wanted.attention_dp if wanted.attention_dp > 1 and made.is_sparse else 1)
    return Layout(tp=tp, pp=wanted.pp, attention_dp=wanted.attention_dp, ep=ep)


def _widths(made: Anatomy, where: Cluster, wanted: Wanted) -> str:
    """The tensor-parallel widths that would divide both heads and devices."""
    heads, rest = min(group.mixer.heads for group in made.layers), wanted.attention_dp * wanted.pp
    legal = [tp for tp in range(1, where.num_devices + 1) if heads % tp == 0 and where.num_devices % (tp * rest) == 0]
    return f"; with tp {', '.join(map(str, legal))} they do" if legal else ""


def _smallest(made: Anatomy, where: Cluster, wanted: Wanted, formats: Any, used: Engine) -> Layout:
    """The least tensor parallelism whose cache holds a few thousand tokens and that fills the cluster evenly."""
    heads = min(group.mixer.heads for group in made.layers)
    for tp in (1, 2, 4, 8, 16, 32, 64):
        if heads % tp or where.num_devices % (tp * wanted.attention_dp * wanted.pp):
            continue
        layout = _layout(made, tp, wanted)
        try:
            found = cache_tokens(made, layout, formats, where.device, used.memory_frac, used.counts_free, 0)
        except InputError:
            continue
        if found >= 16384:
            return layout
    raise InputError(
        f"{made.name} in {formats.name} does not fit {where.num_devices} × {where.device.name} in any tensor-parallel "
        "width that divides them: take more devices, or quantize with --precision"
    )


def _split(made: Anatomy, where: Cluster, wanted: Wanted) -> tuple[Pool, Pool]:
    found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)x(\d+)", wanted.disaggregated.replace(" ", ""))
    if not found:
        raise InputError(
            f"--disagg {wanted.disaggregated!r}: write PxN+DxM, such as 2x4+1x8 for two prefill instances of 4 devices "
            "and one decoding instance of 8"
        )
    num_prefill, width_prefill, num_decode, width_decode = (int(g) for g in found.groups())
    prefill = Pool(_layout(made, width_prefill, wanted), num_prefill)
    pool = Pool(_layout(made, width_decode, wanted), num_decode)
    total = prefill.num_devices + pool.num_devices
    if total != where.num_devices:
        raise InputError(f"--disagg {wanted.disaggregated} takes {total} devices, the cluster has {where.num_devices}")
    return prefill, pool
