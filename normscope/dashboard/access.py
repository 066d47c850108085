"""Who may ask, and what a browser may do with the answer.

Only GET and HEAD, with headers of bounded size. Every request needs the token, as a cookie that `/?token=…` sets, or as
`Authorization: Bearer …`. Browsers say where a request comes from (Sec-Fetch-Site, Origin): other sites may link to the page and
ask for nothing else. An application without a token, as in tests, demands instead that the Host header names loopback: a page
elsewhere whose name was made to resolve to 127.0.0.1 (DNS rebinding) is refused.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SHORTEST_TOKEN = 16
COOKIE = "normscope-token"
MOST_HEADERS = 16 << 10  # bytes
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
class AccessGuard:
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
        if sum(len(name) + len(value) for name, value in headers.items()) > MOST_HEADERS:
            return PlainTextResponse("these headers are too large", 431)
        if _from_elsewhere(headers, path):
            return PlainTextResponse("pages of other sites may not ask this server", 403)
        if self.token is None:
            if _host(headers.get("host", "")) in LOOPBACK_NAMES:
                return None
            return PlainTextResponse("open the address that normscope serve printed: this name is not one of this machine", 421)
        given = dict(parse_qsl(query)).get("token")
        if path == "/" and given is not None and self._same(given):
            return self._welcome(query)
        if self._same(headers.get("authorization", "").removeprefix("Bearer ")) or self._has_cookie(headers.get("cookie", "")):
            return None
        return PlainTextResponse("a token is needed: open the link that normscope serve printed", 401)

    def _same(self, given: str) -> bool:
        assert self.token is not None
        return secrets.compare_digest(given.encode(), self.token.encode())

    @property
    def _proof(self) -> str:
        """What the cookie holds: enough to show that its owner knew the token, without holding it."""
        assert self.token is not None
        return hashlib.sha256(b"normscope:" + self.token.encode()).hexdigest()

    def _has_cookie(self, header: str) -> bool:
        """Whether one of the cookies is ours: its value is hexadecimal, so nothing has to be unquoted."""
        given = (part.strip().encode() for part in header.split(";"))
        return any(secrets.compare_digest(part, f"{self._cookie}={self._proof}".encode()) for part in given)

    @property
    def _cookie(self) -> str:
        """Cookies belong to a machine, not to a port: dashboards beside each other have their own."""
        return f"{COOKIE}-{self._proof[:8]}"

    def _welcome(self, query: str) -> Response:
        """Set the cookie and go on without the token in the address, so that a shared address does not hold it."""
        rest = urlencode([(name, value) for name, value in parse_qsl(query) if name != "token"])
        answer = RedirectResponse("/" + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(self._cookie, self._proof, httponly=True, samesite="strict")
        return answer


def _from_elsewhere(headers: Mapping[str, str], path: str) -> bool:
    """Whether a page of another site asks; it may lead a visitor to the page, and that is all."""
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
    visit = path == "/" and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if site not in ("same-origin", "none") and not visit:
        return True
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    name, colon, port = header.lower().rpartition(":")
    return name if colon and port.isdigit() and not header.endswith("]") else header.lower()
