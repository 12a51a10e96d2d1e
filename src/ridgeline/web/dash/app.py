"""The web application: addresses of pages and data. Nothing here writes to the store."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ridgeline.cost.prediction import Prediction
from ridgeline.errors import InputError, MissingExtra, RidgelineError
from ridgeline.store.database import url_of
from ridgeline.store.store import Store
from ridgeline.study.evaluate import prediction_at
from ridgeline.web.dash import points, runs, what_if
from ridgeline.web.dash.guard import MIN_TOKEN_CHARS, Guard, is_loopback
from ridgeline.web.optimize import render_receipt
from ridgeline.web.report import asset, render_report

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

FILES = {
    "main.js": "dash/main.js", "page.js": "dash/page.js", "charts.js": "dash/charts.js", "runs.js": "dash/runs.js",
    "study.js": "dash/study.js", "whatif.js": "dash/whatif.js", "dash.css": "dash/dash.css", "report.css": "report.css",
    "uPlot.js": "vendor/uPlot.iife.min.js", "uPlot.css": "vendor/uPlot.min.css",
}  # fmt: skip
TYPES = {"js": "text/javascript", "css": "text/css"}
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<path d="M1 13 6 4l3 5 2-3 4 7z" fill="#2563eb"/></svg>'
)


class Dash:
    """Handlers of the application over one store."""

    def __init__(self, url: str) -> None:
        self.url, self.tables = url, points.Tables()
        self.busy = threading.Lock()  # predictions are made one after another

    def data(self, make: Callable[[Store, Mapping[str, str]], Any]) -> Callable[[Request], Response]:
        """A handler that answers with JSON; a mistake is one line."""
        from starlette.responses import JSONResponse

        def handler(request: Request) -> Response:
            try:
                with Store(self.url) as store:
                    return JSONResponse(make(store, {**request.query_params, **request.path_params}))
            except RidgelineError as error:
                return JSONResponse({"error": _printable(str(error))}, status_code=400)
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                return JSONResponse({"error": f"cannot read this address: {_printable(str(error))}"}, status_code=400)

        return handler

    def shell(self, _: Request) -> Response:
        from starlette.responses import HTMLResponse

        return HTMLResponse(asset("dash/index.html"))

    def file(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse

        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("no such file\n", status_code=404)
        kind = TYPES[name.rpartition(".")[2]]
        return PlainTextResponse(asset(FILES[name]), media_type=kind, headers={"cache-control": "no-cache"})

    def icon(self, _: Request) -> Response:
        from starlette.responses import Response

        return Response(ICON, media_type="image/svg+xml")

    def sample(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, Response

        asked = request.query_params
        try:
            with Store(self.url) as store:
                body = points.sample(store, self.tables, request.path_params["study"], asked.get("x", ""),
                                     asked.get("y", ""), sure="sure" in asked, every="every" in asked)  # fmt: skip
        except RidgelineError as error:
            return JSONResponse({"error": _printable(str(error))}, status_code=400)
        return Response(body, media_type="application/octet-stream")

    def table_csv(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            with Store(self.url) as store:
                lines = points.csv_lines(store, self.tables, request.path_params["study"],
                                         _wanted(request.query_params))  # fmt: skip
        except RidgelineError as error:
            return JSONResponse({"error": _printable(str(error))}, status_code=400)
        return StreamingResponse(lines, media_type="text/csv",
                                 headers={"content-disposition": 'attachment; filename="points.csv"'})  # fmt: skip

    def report(self, request: Request) -> Response:
        """A point's, a run's or a what-if's full report: a page of its own, without this page's rights."""
        from starlette.responses import HTMLResponse, JSONResponse

        asked = {**request.query_params, **request.path_params}
        try:
            with self.busy, Store(self.url) as store:
                text = self._report(store, asked)
        except RidgelineError as error:
            return JSONResponse({"error": _printable(str(error))}, status_code=400)
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": f"this cannot be drawn: {_printable(str(error))}"}, status_code=400)
        script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
        inside = hashlib.sha256(script[1].encode()).digest() if script else b""
        policy = (
            f"sandbox allow-scripts; default-src 'none'; script-src 'sha256-{base64.b64encode(inside).decode()}'; "
            "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return HTMLResponse(text, headers={"content-security-policy": policy})

    def _report(self, store: Store, asked: Mapping[str, str]) -> str:
        if "run" in asked:
            record = store.run(asked["run"])
            document = store.document(record.id)
            if record.kind != "optimize" or not isinstance(document, Mapping):
                raise InputError(f"a run of {record.kind} has no page of its own: its document is in the dashboard")
            return render_receipt(document)
        with self.tables.lock:
            table = self.tables.table(store, asked["study"], lambda found: found.row.columns)
            study = points.spoken(table, [int(asked["number"])])
        space = study.spec.space
        if space.evaluator != "predict":
            raise InputError(f"a point of {space.evaluator} has no report op by op: `ridgeline {space.evaluator}` "
                             "with --html writes one")  # fmt: skip
        one = study.point(0)
        made: Prediction = prediction_at(space, {axis.name: one[axis.name] for axis in space.axes})
        return render_report(made)

    def what_if(self, _: Store, asked: Mapping[str, str]) -> dict[str, Any]:
        with self.busy:
            return what_if.evaluated(asked)


def _wanted(asked: Mapping[str, str]) -> points.Wanted:
    try:
        where = json.loads(asked.get("where") or "{}")
    except ValueError as error:
        raise InputError("the filter of this address is not JSON") from error
    if not isinstance(where, dict):
        raise InputError("a filter names columns: {\"sms\": [100, 200]}")
    only = asked.get("only") or "feasible"
    if only not in ("all", "feasible", "frontier"):
        raise InputError(f"only={only[:20]!r}: all, feasible or frontier")
    return points.Wanted(where=where, only=only, sort=asked.get("sort", ""), down=asked.get("down") == "1")


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:600]


def application(url: str, host: str = "127.0.0.1", token: str = "") -> Any:
    """The application over a store; another host than loopback needs a token."""
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtra("starlette", "dash", "the dashboard") from error
    if token and (len(token) < MIN_TOKEN_CHARS or not re.fullmatch(r"[A-Za-z0-9_-]+", token)):
        raise InputError(f"a token has {MIN_TOKEN_CHARS} letters or digits or more; {secrets.token_urlsafe(24)} is one")
    if not token and not is_loopback(host):
        raise InputError(f"--host {host} lets others in: give --token too, or set RIDGELINE_DASH_TOKEN; "
                         f"{secrets.token_urlsafe(24)} is one")  # fmt: skip
    dash = Dash(url)
    found: dict[str, Callable[[Store, Mapping[str, str]], Any]] = {
        "/api/home": lambda store, _: runs.home(store),
        "/api/runs": lambda store, q: runs.listed(
            store, q.get("kind", ""), q.get("subject", ""), q.get("thing", ""), int(q.get("limit", 200))
        ),
        "/api/runs/{run}": lambda store, q: runs.whole(store, q["run"]),
        "/api/history": lambda store, q: runs.history(store, q["kind"], q["thing"], q.get("metric", "")),
        "/api/compare": lambda store, q: runs.differences(store, dash.tables, q["a"], q["b"]),
        "/api/studies": lambda store, _: [points.overview(row) for row in reversed(store.studies())],
        "/api/studies/{study:path}/rows": lambda store, q: points.rows(
            store, dash.tables, q["study"], _wanted(q), int(q.get("start", 0)), int(q.get("limit", 100))
        ),
        "/api/studies/{study:path}/matters": lambda store, q: points.matters(store, dash.tables, q["study"]),
        "/api/studies/{study:path}/points/{number}": lambda store, q: points.point(
            store, dash.tables, q["study"], int(q["number"])
        ),
        # A study's name may have slashes, so what is shorter comes after what is longer.
        "/api/studies/{study:path}": lambda store, q: points.summary(store, dash.tables, q["study"]),
        "/api/what-if": dash.what_if,
        "/api/what-if/choices": lambda _, __: what_if.choices(),
    }
    routes = [
        Route("/", dash.shell), Route("/what-if", dash.shell), Route("/favicon.ico", dash.icon),
        Route("/static/{name}", dash.file), Route("/api/studies/{study:path}/sample", dash.sample),
        Route("/api/studies/{study:path}/points.csv", dash.table_csv),
        Route("/reports/point/{study:path}/{number:int}", dash.report), Route("/reports/run/{run}", dash.report),
        *(Route(path, dash.data(make)) for path, make in found.items()),
    ]  # fmt: skip
    return Guard(Starlette(routes=routes), host, token)


def serve(url: str | None, host: str, port: int, token: str, say: Callable[[str], None]) -> None:
    """Serve until interrupted; the address is said once the port is taken."""
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtra("uvicorn", "dash", "the dashboard") from error
    where = url_of(url)
    app = application(where, host, token)
    with Store(where) as store:
        name = store.name
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise InputError(f"cannot listen on {host}:{port}: {why}; choose another --port or --host") from error
    with listening:
        number = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        say(f"http://{shown}:{number}/{f'?token={token}' if token else ''}  ({name}; Ctrl-C ends it)")
        config = uvicorn.Config(app, log_level="warning", server_header=False, date_header=False, access_log=False)
        uvicorn.Server(config).run(sockets=[listening])
