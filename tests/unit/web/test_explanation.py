"""The page of an explanation is one file, holds what was found, and draws itself in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from ridgeline.findings.explanation import explained, summary_of
from ridgeline.trace import Kind, TraceBuilder
from ridgeline.web.explain import render_explanation, write_explanation

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&\u2028"


def _explanation(name: str = "cutlass_80_simt_sgemm_128x64"):
    build = TraceBuilder(name)
    build.describe(devices=[{"name": "NVIDIA H200"}])
    now = 0.0
    for step in range(3):
        mark = build.add(f"ProfilerStep#{step}", "host", now, 12e-3, kind=Kind.STEP, thread=1, step=step)
        build.add(
            f"enumerate(DataLoader)#{name}.__next__",
            "host",
            now,
            4e-3,
            kind=Kind.DATALOADER,
            thread=1,
            parent=mark,
            step=step,
        )
        for i in range(8):
            at = now + 4e-3 + i * 20e-6
            op = build.add("aten::mm", "host", at, 15e-6, kind=Kind.OP, thread=1, parent=mark, step=step)
            call = build.add(
                "cudaLaunchKernel", "host", at + 5e-6, 5e-6, kind=Kind.RUNTIME, thread=1, parent=op, step=step
            )
            facts = {"flops": 2e9, "read_bytes": 8_000_000, "written_bytes": 4_000_000}
            build.add(name, "GPU 0 stream 7", now + 4.1e-3 + i * 0.9e-3, 0.89e-3, kind=Kind.KERNEL, device=0, stream=7,
                      launch=call, step=step, op="aten::mm", module=f"model.{name}", extra=facts)  # fmt: skip
        build.add(
            "cudaDeviceSynchronize", "host", now + 4.2e-3, 7.1e-3, kind=Kind.RUNTIME, thread=1, parent=mark, step=step
        )
        build.count("memory_bytes", now, 1e9 * (step + 1))
        now += 12e-3
    trace = build.build()
    return explained(trace, [summary_of(trace)])


@pytest.fixture(scope="module")
def page():
    return render_explanation(_explanation())


def _data(page: str):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))


def test_the_page_loads_nothing_from_anywhere(page):
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:)?//""", page)
    assert not re.findall(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|innerHTML|document\.write|eval\(", page)
    assert "default-src &#x27;none&#x27;" in page


def test_the_page_holds_findings_timeline_modules_roofline_and_memory(page):
    data = _data(page)
    assert {"data-loader", "tensor-cores-unused"} <= {finding["rule"] for finding in data["findings"]}
    assert {lane for lane, _ in data["timeline"]["lanes"]} == {"host thread 1", "GPU 0 stream 7"}
    assert data["timeline"]["critical"] and data["modules"][0]["num"] == 8
    assert data["roofline"]["dots"] and data["memory"][0]["points"]
    assert sum(row["ms"] for row in data["modules"]) == pytest.approx(8 * 0.89, rel=1e-6)


def test_the_page_of_memory_alone_holds_its_peak_and_every_category():
    """Two of eight curves were left out, and who holds the peak was nowhere."""
    build = TraceBuilder("memory")
    for name in ("memory_bytes", *(f"memory_bytes: {i}" for i in range(8))):
        build.count(name, 0.0, 8e9 if name == "memory_bytes" else 1e9)
    trace = build.build()
    data = _data(render_explanation(explained(trace, [summary_of(trace)])))
    assert len(data["memory"]) == 9 and not data["totals"]["all"]["num_gpu_events"]
    assert data["held"][0]["allocated_bytes"] == 8_000_000_000 and len(data["held"][0]["by_category"]) == 8


def _stacked():
    """A step inside of Python frames that last longer than it, with a frame and an op inside of the step."""
    build = TraceBuilder("stack")
    build.describe(devices=[{"name": "NVIDIA H200"}])
    main = build.add("train.py(1): <module>", "host", 0.0, 10e-3, kind=Kind.PYTHON, thread=1)
    loop = build.add("train.py(9): loop", "host", 0.0, 10e-3, kind=Kind.PYTHON, thread=1, parent=main)
    mark = build.add("ProfilerStep#1", "host", 1e-3, 8e-3, kind=Kind.STEP, thread=1, parent=loop, step=1)
    frame = build.add("model.py(3): forward", "host", 1.1e-3, 7e-3, kind=Kind.PYTHON, thread=1, parent=mark, step=1)
    words = {"shapes": "[[2048, 2048], [2048, 2048]]", "dtypes": '["c10::BFloat16", "c10::BFloat16"]'}
    op = build.add("aten::mm", "host", 1.2e-3, 1e-3, kind=Kind.OP, thread=1, parent=frame, step=1, extra=words)
    call = build.add("cudaLaunchKernel", "host", 1.3e-3, 5e-6, kind=Kind.RUNTIME, thread=1, parent=op, step=1)
    build.add("nvjet_tst_128x256", "GPU 0 stream 7", 1.4e-3, 60e-6, kind=Kind.KERNEL, device=0, stream=7, launch=call,
              step=1, op="aten::mm")  # fmt: skip
    trace = build.build()
    return _data(render_explanation(explained(trace, [summary_of(trace)])))


def test_frames_around_the_step_are_left_out_and_none_lies_on_another():
    """They were drawn over each other, and what is inside of the step below the last row."""
    lanes = dict(_stacked()["timeline"]["lanes"])
    words = _stacked()["timeline"]["words"]
    drawn = {words[span[2]]: span[5] for span in lanes["host thread 1"]}
    assert drawn == {"model.py(3): forward": 0, "aten::mm": 1, "cudaLaunchKernel": 2}


def test_a_measured_trace_with_shapes_has_a_roofline():
    """Only predicted ones had: a recording says shapes, and no flops."""
    (dot,) = _stacked()["roofline"]["dots"]
    assert dot["flops"] == 2 * 2048**3 and dot["bytes"] == 3 * 2 * 2048**2


def test_causes_are_called_by_words():
    data = _stacked()
    assert set(data["idle"]) <= set(data["idle_words"]) and data["idle_words"]["dataloader"] == "data loader"


def test_hostile_names_cannot_leave_their_place():
    page = render_explanation(_explanation(HOSTILE))
    assert page.count("</script>") == 2
    assert "<img" not in page


def test_the_file_is_written(tmp_path):
    found = replace(_explanation(), context=None)
    assert write_explanation(found, tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"], timeout=300_000)
        yield opened
        opened.close()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [600, 1280])
def test_text_of_charts_keeps_its_size_in_a_narrow_window(tmp_path, width):
    """Charts were drawn 1200 wide and shrunk with their letters."""
    found = _explanation()
    promised = replace(found.findings[0], low_ms=0.5 * found.step_ms, high_ms=1.8 * found.step_ms)
    slowed = replace(found.replay, recorded_ms=2.0 * found.step_ms)
    path = write_explanation(replace(found, findings=(promised,), replay=slowed), tmp_path / "r.html")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *options, f"--window-size={width},900", "--dump-dom", path.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True).stdout
    assert 'data-drawn="yes"' in drawn
    found = re.findall(r'id="(?:flame|roofline|memory)"><svg viewBox="0 0 (\d+) ', drawn)
    assert len(found) == 3 and all(0.75 * width < int(each) < width for each in found)
    assert re.search(r'style="left: 25%; width: 65%;', drawn)  # of the step as recorded: none leaves its track


@pytest.mark.parametrize("name", ["cutlass_80_simt_sgemm_128x64", HOSTILE], ids=["plain", "hostile"])
def test_a_browser_draws_every_chart_without_an_error(browser, tmp_path, name):
    path = write_explanation(_explanation(name), tmp_path / "r.html")
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(300_000)
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("dialog", lambda dialog: errors.append("a name became markup"))
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-drawn=yes]")
    assert errors == []
    assert tab.locator(".finding").count() >= 1
    assert tab.locator("#flame rect").count() >= 3 and tab.locator("#steps rect").count() >= 3
    assert tab.locator("#roofline circle").count() >= 1 and tab.locator("#memory path").count() == 1
    assert tab.evaluate(_INKED) > 500
    tab.close()


def test_dragging_zooms_into_the_timeline_and_the_button_comes_back(browser, tmp_path):
    path = write_explanation(_explanation(), tmp_path / "r.html")
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(300_000)
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-drawn=yes]")
    canvas = tab.locator("#timeline")
    canvas.scroll_into_view_if_needed()
    box, before = canvas.bounding_box(), tab.evaluate(_PIXELS)
    tab.mouse.move(box["x"] + 300, box["y"] + 40)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 500, box["y"] + 40)
    tab.mouse.up()
    assert tab.evaluate(_PIXELS) != before
    tab.click("#zoom-out")
    tab.mouse.move(5, 5)
    assert tab.evaluate(_PIXELS) == before
    tab.close()


_INKED = """() => {
  const c = document.getElementById("timeline"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  let n = 0;
  for (let i = 3; i < d.length; i += 4) n += d[i] > 0;
  return n;
}"""
_PIXELS = """() => document.getElementById("timeline").toDataURL()"""
