"""The dashboard in a real browser: every page draws, says nothing on the console, and asks nobody else."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")
from ridgeline.store.store import Store
from ridgeline.web.dash.app import application
from tests.unit.web.conftest import HOSTILE


@pytest.fixture(scope="module")
def base(kept):
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(kept), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def browser(chromium):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=300_000)
        yield found
        found.close()


@pytest.fixture
def page(browser, base):
    """A page whose faults and requests are kept in ``page.faults``."""
    context = browser.new_context(viewport={"width": 1366, "height": 900}, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(300_000)
    page.faults = []
    page.on("console", lambda m: page.faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith((base, "blob:", "data:")) else page.faults.append(r.url))
    page.on("dialog", lambda dialog: page.faults.append(f"dialog {dialog.message}"))
    yield page
    assert page.faults == []
    context.close()


def _open(page, address):
    page.goto(address)
    page.wait_for_selector("html[data-ready=yes]")


def test_every_page_draws(page, base):
    thing = "llama3-8b batch=8 mode=decode on h200"
    for path, says in (
        ("/#/runs", "llama3-8b"), (f"/#/history?kind=predict&thing={quote(thing)}", "changed beyond the noise"),
        ("/#/studies", "chips"), ("/#/compare?a=point:chips:0&b=point:chips:103", "Op by op"),
        ("/#/receipts", "receipt"), ("/#/serving", "Throughput"), ("/#/point/chips/3", "full report"),
        (f"/#/study/{quote(HOSTILE, safe='')}", "running"),
    ):  # fmt: skip
        page.goto("about:blank")
        _open(page, base + path)
        assert says in page.inner_text("main")
        assert page.locator(".error").count() == 0
        assert page.locator("main img").count() == 0
    assert HOSTILE.replace("\u2028", "") in page.inner_text("main").replace("\u2028", "").replace("\n", "")


def test_scatter_lines_and_table_share_their_limits(page, base):
    _open(page, f"{base}/#/study/chips")
    canvas = page.locator("canvas.plot").first
    assert canvas.get_attribute("data-drawn")
    before = page.locator("h2 .dim").first.inner_text()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 50, steps=4)
    page.mouse.up()
    page.wait_for_function("was => document.querySelector('h2 .dim').textContent !== was", arg=before)
    assert "where=" in page.url
    total = page.locator("h2 .dim").first.inner_text()
    limits = page.locator(".limits input").evaluate_all("all => all.filter((one) => one.value).length")
    assert limits >= 4  # of both axes
    address = page.url
    page.goto("about:blank")
    _open(page, address)  # a permalink brings the same limits
    page.wait_for_function("is => document.querySelector('h2 .dim').textContent === is", arg=total)
    canvas.focus()
    page.keyboard.press("Escape")
    page.wait_for_function("was => document.querySelector('h2 .dim').textContent === was", arg=before)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=full report")
    with page.expect_popup() as opened:
        page.click("text=full report")
    opened.value.wait_for_selector("html[data-ready=yes]")
    assert opened.value.evaluate("window.origin") == "null"  # a sandbox: it has no rights of ours


def test_a_running_study_grows_on_the_page(page, base, kept):
    with Store(kept) as store:
        whole = store.study("chips")
        (_, columns), *_ = store.chunks(whole.id)
        half = len(columns["reason"]) // 2
        row = store.add_study("live", whole.spec, "c", whole.columns, num_chunks=2, num_points=2 * half)
        store.add_chunk(row.id, 0, {name: values[:half] for name, values in columns.items()})
        _open(page, f"{base}/#/study/live")
        assert page.locator("[role=progressbar]").get_attribute("aria-valuenow") == "50"
        store.add_chunk(row.id, 1, {name: values[half : 2 * half] for name, values in columns.items()})
        store.set_state(row.id, "done")
        page.wait_for_function("is => document.querySelector('h2 .dim').textContent.includes(is)", arg=f"of {2 * half}")
        assert page.locator("[role=progressbar]").count() == 0


def test_charts_are_saved_as_png_svg_and_csv(page, base):
    _open(page, f"{base}/#/study/chips")
    for name, start in (("PNG", b"\x89PNG"), ("SVG", b"<svg"), ("CSV", b"point,")):
        with page.expect_download() as download:
            page.locator(f"button:text-is('{name}')").first.click()
        with open(download.value.path(), "rb") as file:
            assert file.read(len(start)) == start


def test_what_if_is_predicted_on_the_server(page, base):
    import ridgeline as rl

    _open(page, f"{base}/what-if?model=bert-base&seq=128")
    with page.expect_response(lambda answer: "x.hbm_bandwidth=2" in answer.url):
        page.locator("#x-hbm_bandwidth").fill("1")
    real = rl.predict("bert-base", "h200 hbm_bandwidth=2x", seq=128)
    page.wait_for_function("is => document.querySelector('main > div').dataset.step === is", arg=repr(real.expected_s))
    assert "x.hbm_bandwidth=2" in page.url


def test_narrow_and_dark_pages_do_not_scroll_sideways(page, base):
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    for path in ("/#/runs", "/#/study/chips", "/what-if?model=bert-base"):
        page.goto("about:blank")
        _open(page, base + path)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background


@pytest.mark.parametrize("path", ["/#/runs", "/#/studies", "/#/study/chips", "/#/receipts", "/#/serving"])
def test_a_page_is_whole_at_every_width(page, base, path):
    layout = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
    found = []
    for width in (1920, 1366, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("about:blank")
        _open(page, base + path)
        found += [f"{width}: {fault}" for fault in page.evaluate(layout)]
    assert not found
