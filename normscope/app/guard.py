"""Who may ask, and what a browser may do with the answer.

Only GET and HEAD. Without a token the server listens on loopback only, and the Host header must name loopback: a page elsewhere
whose name was made to resolve to 127.0.0.1 (DNS rebinding) is refused. With a token every request needs it, as a cookie that
`/?token=…` sets, or as `Authorization: Bearer …`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SHORTEST_TOKEN = 16
COOKIE = "normscope-token"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})

# Plotly sets style attributes, which hold no script; its style element is the stylesheet that index.html gives it
POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "style-src-attr 'unsafe-inline'", "img-src 'self' data: blob:",
    "connect-src 'self'", "worker-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
))  # fmt: skip
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, True, False, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Guard:
    """Middleware around the whole application. token: what to demand; None demands a loopback Host instead."""

    app: ASGIApp
    token: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope["method"], Headers(scope=scope), scope["path"], scope["query_string"].decode("latin-1"))
        await (answer or self.app)(scope, receive, send_guarded)

    def _refusal(self, method: str, headers: Mapping[str, str], path: str, query: str) -> Response | None:
        """The answer to who may not ask, or who must come again with a cookie; None lets the request through."""
        if method not in ("GET", "HEAD"):
            return PlainTextResponse("this server is read-only", 405, {"allow": "GET, HEAD"})
        if self.token is None:
            if _host(headers.get("host", "")) in LOOPBACK_NAMES:
                return None
            return PlainTextResponse("open the address that normscope serve printed: this name is not one of this machine", 421)
        given = dict(parse_qsl(query)).get("token")
        if path == "/" and given is not None and self._same(given):
            return self._welcome(query)
        if self._same(headers.get("authorization", "").removeprefix("Bearer ")) or self._has_cookie(headers.get("cookie", "")):
            return None
        return PlainTextResponse("a token is needed: open /?token=… with the token given to normscope serve --token", 401)

    def _same(self, given: str) -> bool:
        assert self.token is not None
        return secrets.compare_digest(given.encode(), self.token.encode())

    @property
    def _proof(self) -> str:
        """What the cookie holds: enough to show that its owner knew the token, without holding it."""
        assert self.token is not None
        return hashlib.sha256(b"normscope:" + self.token.encode()).hexdigest()

    def _has_cookie(self, header: str) -> bool:
        try:
            found = SimpleCookie(header).get(COOKIE)
        except CookieError:
            return False
        return found is not None and secrets.compare_digest(found.value.encode(), self._proof.encode())

    def _welcome(self, query: str) -> Response:
        """Set the cookie and go on without the token in the address, so that a shared address does not hold it."""
        rest = urlencode([(name, value) for name, value in parse_qsl(query) if name != "token"])
        answer = RedirectResponse("/" + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(COOKIE, self._proof, httponly=True, samesite="strict")
        return answer


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    name, colon, port = header.lower().rpartition(":")
    return name if colon and port.isdigit() and not header.endswith("]") else header.lower()
