"""The report is one file that asks nothing of the network, and no name in it is ever markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import ridgeline as rl
from ridgeline.cost import memory
from ridgeline.cost.analyses.memory_curve import live_bytes
from ridgeline.errors import InputError
from ridgeline.graph import Block, expand
from ridgeline.web import render_report, write_report
from ridgeline.web.data import MAX_POINTS, report_data, thinned
from ridgeline.web.report import embedded

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&\u2028"


def _data(page: str):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))


@pytest.fixture(scope="module")
def llama():
    return rl.predict("llama3-8b", on="h200")


def test_the_page_loads_nothing_from_anywhere(llama):
    page = render_report(llama)
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:)?//""", page)
    assert not re.findall(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|innerHTML|document\.write|eval\(", page)
    assert "default-src &#x27;none&#x27;" in page


def test_the_page_holds_the_whole_prediction(llama):
    data = _data(render_report(llama, ("tokens", 40_000.0)))
    assert data["totals"]["expected_s"] == llama.expected_s
    assert data["totals"]["rate"] == ["tokens", 40_000.0]
    rows = data["rows"]
    assert {len(rows[key]) for key in rows if key != "words"} == {len(llama.rows())}
    assert sum(rows["expected_s"]) == pytest.approx(llama.busy_s, rel=1e-4)
    assert data["memory"]["peak_bytes"] == llama.peak_bytes
    assert sum(seconds for _, seconds in data["bases"]) == pytest.approx(llama.busy_s)
    assert data["notes"] == list(llama.notes)


def test_hostile_names_cannot_leave_their_place():
    graph = rl.build("bert-base", seq=128)
    items = tuple(
        replace(item, module=HOSTILE, source=HOSTILE) if not isinstance(item, Block) else item for item in graph.items
    )
    p = rl.predict(replace(graph, name=HOSTILE, items=items))
    page = render_report(p)
    assert "<img" not in page
    assert page.count("</script>") == 2  # the data's and the script's own
    assert _data(page)["title"]["model"] == HOSTILE
    assert HOSTILE in _data(page)["rows"]["words"]


def test_embedded_json_is_the_same_document():
    document = {"a": HOSTILE, "b": [1, 2.5, None]}
    assert json.loads(embedded(document)) == document
    assert not set("<>&\u2028\u2029") & set(embedded(document))
    with pytest.raises(ValueError, match="JSON compliant"):
        embedded({"a": float("inf")})


def test_thinning_keeps_the_peak_and_the_order():
    curve = [i % 97 for i in range(10_000)]
    curve[7777] = 1_000_000
    points = thinned(curve)
    assert len(points) <= MAX_POINTS
    assert [7777, 1_000_000] in points
    assert [i for i, _ in points] == sorted(i for i, _ in points)
    assert thinned([5, 4]) == [[0, 5], [1, 4]]
    assert thinned([]) == []


@pytest.mark.parametrize("options", [{}, {"mode": "train"}, {"mode": "decode"}])
def test_the_memory_curve_has_a_point_a_node_and_reaches_the_peak(options):
    p = rl.predict("llama3.2-1b", seq=256, **options)
    curve = list(live_bytes(p))
    assert len(curve) == p.graph.num_nodes
    assert max(curve) == pytest.approx(p.peak_bytes, rel=0.02)
    assert min(curve) >= p.memory.resident_bytes


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_filling_in_the_repeats_equals_walking_them(mode, monkeypatch):
    p = rl.predict("llama3.2-1b", seq=256, mode=mode)
    filled = list(live_bytes(p))
    monkeypatch.setattr(memory, "expand", lambda graph: expand(graph, max_iterations=10_000))
    walked = memory.memory_of(replace(p.graph))  # a graph without a template, whose schedule is not known yet
    assert filled == pytest.approx([live + walked.workspace_bytes for _, live in walked.timeline], rel=1e-3)


def test_a_folder_that_is_not_there_is_an_error_with_a_cure(llama, tmp_path):
    with pytest.raises(InputError, match="choose a folder"):
        write_report(llama, tmp_path / "no" / "r.html")


def test_ceilings_are_those_of_the_device(llama):
    found = report_data(llama, None)["ceilings"]
    assert found["dram_bytes_per_s"] == llama.device.dram.bandwidth_bytes_per_s
    assert dict(map(tuple, found["peaks"]))["bf16 matrix peak"] == llama.device.peak_flops_per_s("tensor", "bf16")


@pytest.mark.parametrize(
    ("model", "on", "execution", "options"),
    [("llama3-70b", "h200", "eager", {"mode": "train"}), ("llama3-8b", "mi300x", "cudagraph", {"mode": "decode"}),
     ("bert-base", "h200 hbm_bandwidth=2x", "compiled", {"seq": 128})],
)  # fmt: skip
def test_every_slider_says_what_predict_says_of_that_device(model, on, execution, options):
    p = rl.predict(model, on, execution, **options)
    found = report_data(p, None)["whatif"]
    assert [axis[0] for axis in found["axes"]] == ["hbm_bandwidth", "peak", "l2_bandwidth", "clock", "tdp"]
    assert len(found["moved"]) == len(found["values"]) > 100
    singles = [at for at, moved in enumerate(found["moved"]) if len(moved) == 1]
    for at in [*singles, *range(len(singles), len(found["moved"]), 13)]:
        words = {word: f"{factor}x" for axis, factor in found["moved"][at] for word in found["axes"][axis][2]}
        real = rl.predict(p.graph, p.device.override(**words), execution)
        assert found["values"][at] == pytest.approx([real.expected_s, real.busy_s, real.energy_j, real.usd], rel=1e-8)


def test_a_device_that_cannot_be_has_no_value():
    tight = rl.device("h200 tdp=150W")  # of which a slider's 0.6x is less than it draws idle
    found = report_data(rl.predict("bert-base", on=tight, seq=64), None)["whatif"]
    assert (tight.idle_w >= 0.6 * tight.tdp_w) == (None in found["values"])


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _dom(page: str, folder: Path, script: str = "") -> str:
    """The page after its scripts have run in a real browser."""
    path = folder / "r.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run(
        [str(CHROMIUM), *flags, "--virtual-time-budget=3000", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=1800,
        check=True,
    )
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
class TestInABrowser:
    def test_everything_is_drawn(self, llama, tmp_path):
        dom = _dom(render_report(llama), tmp_path)
        assert 'data-ready="yes"' in dom
        assert dom.count('class="dot"') > 10 and dom.count('class="cell"') > 10
        assert dom.count("<tr>") > len(llama.rows())

    def test_a_slider_shows_what_a_prediction_of_that_device_says(self, tmp_path):
        p = rl.predict("llama3-70b", mode="train")
        slider = 'document.getElementById("s-hbm_bandwidth")'
        script = f'const s = {slider}; s.value = "4"; s.dispatchEvent(new Event("input"));'
        dom = _dom(render_report(p), tmp_path, script)
        row = re.search(r"<td>wall time</td><td>([^<]*)</td><td>([^<]*)</td><td[^>]*>([^<]*)</td>", dom)
        real = rl.predict("llama3-70b", on="h200 hbm_bandwidth=2x", mode="train")
        assert _seconds(row[2]) == pytest.approx(real.expected_s, rel=0.005)
        assert row[3] == f"−{100 * (1 - real.expected_s / p.expected_s):.1f} %"
        assert 'hbm_bandwidth=2x"' in dom.replace("&quot;", '"')

    def test_hostile_names_are_shown_as_text(self, tmp_path):
        graph = rl.build("bert-base", seq=128)
        items = tuple(replace(item, module=HOSTILE) if not isinstance(item, Block) else item for item in graph.items)
        dom = _dom(render_report(rl.predict(replace(graph, name=HOSTILE, items=items))), tmp_path)
        assert 'data-ready="yes"' in dom
        assert not re.search(r"<img", dom)


def _seconds(text: str) -> float:
    value, unit = text.split()
    return float(value.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
