"""What follows from a template's recipe is what would be worked out of the graph itself."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from ridgeline.api import predict
from ridgeline.cost.estimate import EXECUTIONS
from ridgeline.cost.lower import eager as lower
from ridgeline.cost.lower import template as recipe
from ridgeline.cost.prediction import Prediction
from ridgeline.models import build, models

FIELDS = ("expected_s", "interval_s", "busy_s", "busy_interval_s", "floor_s", "host_s", "peak_bytes", "energy_j",
          "power_w", "usd", "basis", "num_kernels", "throttle", "notes", "flops")  # fmt: skip
LANGUAGE = [card.name for card in models() if card.templated]
DEVICES = ("h200", "a100-sxm-80gb", "b200", "l40s", "mi300x", "tpu-v5p", "h200 hbm_bandwidth=2x")


def everything(p: Prediction) -> list[Any]:
    lines = [(line.calls, line.work, line.cold_frac, line.unmade, dict(line.kept), line.held) for line in p.lines]
    return [*(getattr(p, name) for name in FIELDS), p.rows(), lines]


def asked(name: str, seed: int) -> dict[str, Any]:
    draw = random.Random(f"{name} {seed}")
    mode = draw.choice(("infer", "prefill", "decode", "train"))
    sizes = {"kv": draw.randint(0, 900)} if mode == "decode" else {"seq": draw.randint(1, 900)}
    return {"mode": mode, "batch": draw.choice((1, 2, 3, 8)), **sizes}


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_recipe_predicts_what_the_graph_itself_does(name: str) -> None:
    draw = random.Random(name)
    for seed in range(4):
        options, on, execution = asked(name, seed), draw.choice(DEVICES), draw.choice(EXECUTIONS)
        made = build(name, **options)
        assert "template" in made.__dict__
        itself = predict(replace(made), on=on, execution=execution)
        assert everything(predict(name, on=on, execution=execution, **options)) == everything(itself)


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_every_decoder_has_a_recipe(execution: str) -> None:
    for name in LANGUAGE:
        p = predict(name, execution=execution, batch=2, seq=70)
        purposes = recipe._recipes[p.graph.template[0]]  # type: ignore[attr-defined]
        found = purposes["fused" if execution == "compiled" else "lowered", "hopper"]
        assert not found.refused
        assert found.known


def test_sizes_that_decide_otherwise_get_a_recipe_of_their_own() -> None:
    long, short = predict("llama3-8b", batch=2, seq=70), predict("llama3-8b", batch=2, seq=30)
    assert long.graph.template[0] is short.graph.template[0]  # type: ignore[attr-defined]
    purposes = recipe._recipes[long.graph.template[0]]  # type: ignore[attr-defined]
    assert len(purposes["lowered", "hopper"].known) > 1
    assert everything(short) == everything(predict(replace(short.graph)))


def test_a_rule_that_looks_at_numbers_is_asked_without_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = everything(predict("llama3.2-1b", batch=2, seq=70, fused_norms=False))
    usual = lower._RULES["reduce"]
    monkeypatch.setitem(lower._RULES, "reduce", lambda site, arch: usual(site, arch)[: 1 + 0 * int(site.out_numel)])
    monkeypatch.setattr(recipe, "_recipes", {})
    found = predict("llama3.2-1b", batch=2, seq=70, fused_norms=False)
    assert everything(found) == wanted
    assert recipe._recipes[found.graph.template[0]]["lowered", "hopper"].refused  # type: ignore[attr-defined]


def test_threads_may_predict_at_once() -> None:
    sizes = [(batch, seq) for seq in range(40, 60) for batch in (1, 2)]
    together = ThreadPoolExecutor(4)
    found = list(together.map(lambda size: predict("qwen3-8b", batch=size[0], seq=size[1]).expected_s, sizes))
    assert found == [predict(replace(build("qwen3-8b", batch=b, seq=s))).expected_s for b, s in sizes]
