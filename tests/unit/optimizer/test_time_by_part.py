"""Time by part of the model: kernels find their module, those that span parts are divided, and gaps name their fix."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.receipt import Entry, Part, Receipt, Region
from ridgeline.optimizer.search import time_by_part as parts
from ridgeline.optimizer.search.blocks import short_name, tallied
from ridgeline.optimizer.search.candidate import Built, Candidate, build
from ridgeline.optimizer.search.explanation import explanations, remaining
from ridgeline.optimizer.search.time_by_part import (
    IDLE,
    OUTSIDE,
    Partition,
    Spent,
    fix_of,
    partition,
    parts_of,
    recorded,
    shared,
)
from ridgeline.optimizer.search.timing import Track
from ridgeline.web.optimize import render_receipt


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 64), nn.Linear(64, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PARTS = Partition(("layers.*", "layers.*.attn", "layers.*.mlp", "stem", "head"), ("layers.*",), {"layers.*": 3})


@pytest.fixture(scope="module")
def track() -> Track:
    torch.manual_seed(0)
    made = Track(Net().eval(), Inputs((torch.randn(512, 16),)), "infer", None, torch.device("cpu"))
    made.settle(made.model)
    return made


def test_blocks_are_split_by_their_children_and_the_rest_by_modules() -> None:
    assert partition(Net()) == PARTS
    assert PARTS.of("layers.2.mlp.0") == "layers.*.mlp" and PARTS.of("layers.*.mlp.0") == "layers.*.mlp"
    assert PARTS.of("layers.1") == "layers.*" and PARTS.of("Net") == OUTSIDE
    assert PARTS.shown("layers.*.mlp") == "layers.*.mlp ×3" and PARTS.shown("head") == "head"


def test_a_model_of_one_part_is_split_inside() -> None:
    assert partition(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))).names == ("0.0", "0.1")


def test_a_kernel_that_spans_a_block_is_divided_as_eagers_of_its_kind() -> None:
    before = {("layers.*.attn", "products"): 1.0, ("layers.*.mlp", "products"): 3.0, ("head", "products"): 6.0,
              ("layers.*.mlp", "pointwise"): 2.0}  # fmt: skip
    run = Spent((("layers.*", "products", 2.0), ("layers.*", "norms", 1.2), ("head", "products", 5.0)))
    after, sure = shared(run, PARTS, "Net", before)
    assert after["layers.*.attn", "products"] == pytest.approx(0.5)
    assert after["layers.*.mlp", "products"] == pytest.approx(1.5)
    assert after["layers.*.attn", "norms"] == pytest.approx(0.2)  # eager had no norms: as all of its kernels
    assert sure == {"head": 5.0} and sum(after.values()) == pytest.approx(8.2)


def test_a_kernel_of_nobody_is_divided_among_all() -> None:
    before = {("layers.*.attn", "products"): 1.0, ("head", "products"): 3.0}
    after, sure = shared(Spent((("", "products", 2.0),)), PARTS, "Net", before)
    assert after == {("layers.*.attn", "products"): 0.5, ("head", "products"): 1.5} and not sure


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_rewritten_code_is_recorded_under_the_names_of_modules(track: Track, scope: str) -> None:
    candidate = Candidate(name="rewrites", rewrites=("views",), scope=scope)
    built = build(candidate, track.model, track.inputs, "infer")
    run = recorded(track, built)
    parts_seen = {PARTS.of(path) for path, kind, _ in run.spent if kind == "products"}
    assert parts_seen == {"layers.*.attn", "layers.*.mlp", "head", "stem"}, "every product under its module's name"
    products = [PARTS.of(path) for path, kind, _ in run.spent if kind == "products"]
    num = {part: products.count(part) for part in parts_seen}
    assert num["layers.*.mlp"] == 2 * num["layers.*.attn"] == 6 * num["head"], "two in each of three blocks"
    x = torch.randn(512, 16)
    torch.testing.assert_close(built.call(x), track.model(x))


def test_the_table_adds_up_to_the_calls_and_names_its_basis(track: Track) -> None:
    eager = Built(Candidate(name="eager"), track.model, Report())
    floors = [("layers.*.mlp.0", "products", 1e-6), ("head", "products", 1e-7)]
    candidate = Candidate(name="rewrites", rewrites=("views",))
    built = build(candidate, track.model, track.inputs, "infer")
    found = parts_of(track, eager, built, (1.0, 0.5), None)
    assert found == ()  # a recording that sees next to nothing of a call that takes a second says nothing about it
    walls_s = (recorded(track, eager).busy_s / 8, recorded(track, built).busy_s / 8)  # a recording is no shorter
    found = parts_of(track, eager, built, walls_s, floors)
    table = {part.name: part for part in found}
    assert {"layers.*.mlp ×3", "head", "stem"} <= table.keys()
    assert sum(part.eager_s for part in found) == pytest.approx(walls_s[0], rel=1e-6)
    assert table["layers.*.mlp ×3"].basis == "measured" and table["layers.*.mlp ×3"].floor_s == pytest.approx(1e-6)
    assert "products" in table["layers.*.mlp ×3"].fix


def test_time_without_a_kernel_has_a_row_of_its_own(track: Track, monkeypatch: Any) -> None:
    eager, busy_s = Built(Candidate(name="eager"), track.model, Report()), 1e-3
    monkeypatch.setattr(parts, "recorded", lambda track, built: Spent((("head", "products", busy_s),)))
    idle = next(part for part in parts_of(track, eager, eager, (1.5 * busy_s, 1.5 * busy_s), None) if part.name == IDLE)
    assert idle.floor_s == 0.0 and "graph" in idle.fix and idle.eager_s == pytest.approx(0.5 * busy_s)


def test_the_fix_is_that_of_the_kind_farthest_above_its_floor() -> None:
    assert "error_budget" in fix_of({"products": 3.0, "pointwise": 1.0}, {"products": 1.0, "pointwise": 0.5}, 1.5)
    assert "elementwise" in fix_of({"products": 1.1, "pointwise": 3.0}, {"products": 1.0, "pointwise": 0.5}, 1.5)
    assert "attention kernel" in fix_of({"products": 3.0, "softmax and losses": 1.0}, {"attention": 0.5}, 0.5)
    assert fix_of({"products": 1.05}, {"products": 1.0}, 1.0) == "" and fix_of({"products": 9.0}, {}, None) == ""


def _receipt(**changed: Any) -> Receipt:
    stock = Entry(name="torch.compile", changes=("torch.compile",), status="slower", measured_s=4e-3, recompiles=2)
    made = Receipt(
        model="Net", mode="infer", device="a device", inputs="", environment={}, winner="graph", changes=("graph",),
        eager_s=3e-3, final_s=2e-3, stock_s=4e-3, speedup=1.5, speedup_low=1.4, speedup_high=1.6, over_best=1.5,
        floor_s=1e-3, eager_bytes=None, final_bytes=None, memory_limit_bytes=None, budget_s=1.0, spent_s=1.0,
        verdict=None, entries=(stock,), steps=(),
        regions=(Region("attention", 1e-3, 1e-3, 2.5e-3, 8, 8, 8, "flash_fwd", "flash_fwd", "fmha_cutlassF"),),
        parts=(Part(name="layers.* ×3", eager_s=2e-3, final_s=1.5e-3, floor_s=5e-4, basis="measured", fix="a fix"),),
    )  # fmt: skip
    return replace(made, **changed)


def test_a_lost_attention_kernel_is_named_among_the_reasons() -> None:
    text = "\n".join(explanations(_receipt(), Inputs(())))
    assert re.search(r"fmha_cutlassF takes 2\.50? ms where flash_fwd takes 1(\.00)? ms", text)
    assert "recompiles" in text and "slower than eager: attention take" in text
    none = Region("attention", 1e-3, 1e-3, 0.0, 8, 8, 0, "flash_fwd", "flash_fwd", "")
    assert any("no attention kernel" in line for line in explanations(_receipt(regions=(none,)), Inputs(())))


def test_equal_kernels_are_no_reason() -> None:
    same = Region("attention", 1e-3, 1e-3, 1e-3, 8, 8, 8, "flash_fwd", "flash_fwd", "flash_fwd")
    assert not any("attention" in line for line in explanations(_receipt(regions=(same,)), Inputs(())))


def test_what_is_left_is_told_by_part() -> None:
    assert any(line.startswith("layers.* ×3:") and line.endswith("a fix") for line in remaining(_receipt()))


def test_the_table_is_in_the_text_the_json_and_the_page() -> None:
    receipt = _receipt()
    assert "Time by part of the model" in str(receipt) and "a fix" in str(receipt)
    again = Receipt.from_dict(json.loads(receipt.to_json()))
    assert again.parts == receipt.parts and again.regions == receipt.regions
    assert '"basis":"measured"' in render_receipt(receipt.to_dict()).replace(" ", "")


def test_every_skipped_stage_is_one_line_of_the_text_and_of_the_page() -> None:
    receipt = _receipt(stages_left_out=(("channels last", "no convolution"), ("tuned", "no CUDA device")))
    section = str(receipt).split("Search stages skipped\n")[1].splitlines()
    assert section[:2] == ["  channels last: no convolution", "  tuned: no CUDA device"]
    page = render_receipt(receipt.to_dict())
    assert '<ul class="lines" id="stages">' in page and '["tuned","no CUDA device"]' in page.replace('", "', '","')
    assert "Search stages skipped" not in str(_receipt())


def test_kernels_are_counted_by_kind_and_the_longest_is_named() -> None:
    found = tallied([("void pytorch_flash::flash_fwd_kernel<T>(P)", 2.0), ("fmha_other", 1.0), ("nvjet_tst", 1.0)])
    assert found["attention"].num == 2 and found["attention"].main == "flash_fwd_kernel"
    assert short_name("void at::native::vectorized_elementwise_kernel<4, f>(int)") == "vectorized_elementwise_kernel"


def test_a_result_below_the_floor_of_its_ops_is_explained() -> None:
    assert any("fused, they move less" in line for line in remaining(_receipt(floor_s=3e-3)))
    assert not any("fused, they move less" in line for line in remaining(_receipt()))


RECORDED = Path(__file__).parents[3] / "data" / "recordings" / "h200" / "optimize_parts.json.gz"


def test_recorded_receipts_of_an_h200_have_parts_that_make_up_their_calls() -> None:
    with gzip.open(RECORDED, "rt", encoding="utf-8") as file:
        recorded_receipts = {row["model"]: Receipt.from_dict(row["receipt"]) for row in json.load(file)["receipts"]}
    assert len(recorded_receipts) == 3
    for receipt in recorded_receipts.values():
        assert sum(part.eager_s for part in receipt.parts) == pytest.approx(receipt.eager_s, rel=1e-3)
        assert sum(part.final_s or 0.0 for part in receipt.parts) == pytest.approx(receipt.final_s, rel=1e-3)
        assert sum(part.floor_s or 0.0 for part in receipt.parts) == pytest.approx(receipt.floor_s, rel=1e-3)
        assert "Time by part of the model" in str(receipt) and '"parts":' in render_receipt(receipt.to_dict())
