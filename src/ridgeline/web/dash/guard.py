"""What every request passes: the host it names, the token, its method and origin; and headers of every answer."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "ridgeline_dash"
MIN_TOKEN_CHARS = 16
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "x-frame-options": "DENY", "cross-origin-opener-policy": "same-origin", "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin", "permissions-policy": "camera=(), microphone=(), geolocation=()",
}  # fmt: skip


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Middleware that lets a request through or answers it.

    A page of another site that reaches this address by a name of its own (DNS rebinding) states that name as the host:
    names are compared, and addresses written as numbers are taken. Nothing writes, so all but GET and HEAD is refused.
    """

    def __init__(self, app: App, host: str, token: str) -> None:
        self.app, self.token = app, token
        self.only_loopback = is_loopback(host)
        self.names = {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        named = [value for key, value in scope["headers"] if key.lower() == b"host"]

        async def answered(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {key.lower() for key, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if len(named) != 1 or not self.knows(headers.get("host", "")):
            await _refuse(answered, 421, "this address is not the dashboard's: open it as it was printed")
        elif scope["method"] not in ("GET", "HEAD"):
            await _refuse(answered, 405, "the dashboard writes nothing: GET and HEAD only")
        elif headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["path"] != "/":
            await _refuse(answered, 403, "another site asked for this")
        elif self.token and not self.allowed(headers):
            words = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
            given = [value for key, value in words if key == "token"]
            if not given or not self.equal(given[0]):
                await _refuse(answered, 401, "open the dashboard with its token: http://HOST:PORT/?token=TOKEN")
                return
            rest = urlencode([(key, value) for key, value in words if key != "token"])
            place = "/" + scope["path"].lstrip("/") + (f"?{rest}" if rest else "")
            cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(answered, 303, b"", [(b"location", place.encode("ascii", "ignore")),
                                               (b"set-cookie", cookie.encode())])  # fmt: skip
        else:
            await self.app(scope, receive, answered)

    def knows(self, host: str) -> bool:
        """Whether the host header is one of ours."""
        name = host.lower()
        name = name[1 : name.find("]")] if name.startswith("[") else name.rpartition(":")[0] or name
        if name in self.names and (not self.only_loopback or is_loopback(name)):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback or not self.only_loopback
        except ValueError:
            return False

    def equal(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def allowed(self, headers: dict[str, str]) -> bool:
        """By cookie, or by ``Authorization: Bearer TOKEN``."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.equal(bearer):
            return True
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return found is not None and self.equal(found.value)


async def _refuse(send: Send, status: int, why: str) -> None:
    await _answer(send, status, f"{why}\n".encode(), [(b"content-type", b"text/plain; charset=utf-8")])


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status,
                "headers": [*headers, (b"content-length", str(len(body)).encode())]})  # fmt: skip
    await send({"type": "http.response.body", "body": body})
