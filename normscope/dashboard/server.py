"""The dashboard's server: a page, and JSON about the runs below one directory. It writes nothing."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import plotly
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from normscope._watch.store import plain
from normscope.core.errors import InputError, NormscopeError
from normscope.dashboard import views
from normscope.dashboard.access import MOST_HEADERS, SHORTEST_TOKEN, AccessGuard, is_loopback
from normscope.dashboard.listing import Catalogue
from normscope.dashboard.results import POLICY as RESULT_POLICY
from normscope.dashboard.results import result_page

STATIC = Path(str(resources.files("normscope.dashboard") / "static"))
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
TOKEN = re.compile(r"[\w.~-]*", re.ASCII)  # what needs no escape in an address
LONGEST_FIND = 200  # characters
MOST_CONNECTIONS, KEEP_ALIVE, HEADER_TIME = 100, 5, 10  # seconds
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def application(root: Path, token: str | None = None) -> Starlette:
    """The dashboard of the runs below `root` as an ASGI application."""
    catalogue = Catalogue(root)

    def runs(request: Request) -> Any:
        since = request.query_params.get("since", "-1")
        if not since.lstrip("-").isdigit() or len(since) > 18:
            raise InputError("`since` is a version that an earlier answer gave")
        asked = request.query_params
        answer = catalogue.changes(int(since), asked.get("find", "")[:LONGEST_FIND], asked.getlist("run"))
        return {**answer.to_dict(), "directory": catalogue.root.name}

    def run(request: Request) -> Any:
        with catalogue.reading(request.query_params.getlist("run")) as found:
            return {"runs": [views.details(run) for run in found]}

    def figure(request: Request) -> Any:
        question = views.Question.parse(request.query_params)
        with catalogue.reading(request.query_params.getlist("run")) as found:
            return views.figure(request.query_params.get("kind", "heatmap"), found, question).to_json()

    def table(request: Request) -> Any:
        question = views.Question.parse(request.query_params)
        with catalogue.reading(request.query_params.getlist("run")) as found:
            return views.table(request.query_params.get("kind", "heatmap"), found, question).to_dict()

    def quantities(request: Request) -> Any:
        return views.quantities()

    def result(request: Request) -> Response:
        try:
            page = result_page(catalogue.result(request.query_params.get("id", "")))
        except NormscopeError as error:
            return PlainTextResponse(str(error), 400)
        return HTMLResponse(page, headers={"content-security-policy": RESULT_POLICY})

    page = _page()
    api = {"runs": runs, "run": run, "figure": figure, "table": table, "quantities": quantities}
    routes = [
        Route("/", lambda request: HTMLResponse(page)),
        Route("/result", result),
        Route("/static/plotly.min.js", lambda request: _file(PLOTLY)),
        *(Route(f"/static/{path.name}", _static(path)) for path in STATIC.iterdir() if path.suffix in KINDS),
        *(Route(f"/api/{name}", _answered(answer)) for name, answer in api.items()),
    ]
    return Starlette(routes=routes, middleware=[Middleware(AccessGuard, token=token)])


def serve(
    root: Path, host: str = "127.0.0.1", port: int = 8321, token: str | None = None, ready: Callable[[str], None] = print
) -> None:
    """Serve until interrupted. token: a new one if none is given. ready: called with the link once the port is taken."""
    if not root.is_dir():
        raise InputError(f"no directory {root}: pass the one that holds your runs, such as runs for ns.watch(run='runs/name')")
    if token is None and not is_loopback(host):
        raise InputError(
            f"{host} can be reached from other machines: add --token-file FILE with at least {SHORTEST_TOKEN} characters, for "
            'instance from `python -c "import secrets; print(secrets.token_urlsafe())"`, or leave --host out'
        )
    token = secrets.token_urlsafe() if token is None else token
    if len(token) < SHORTEST_TOKEN or not TOKEN.fullmatch(token):
        raise InputError(f"a token has at least {SHORTEST_TOKEN} characters: letters, digits and any of - . _ ~")
    with listening(host, port) as taken:
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{taken.getsockname()[1]}/?token={token}")
        with suppress(KeyboardInterrupt):  # uvicorn has closed all connections by then
            server(root, token).run(sockets=[taken])


def server(root: Path, token: str | None = None) -> uvicorn.Server:
    """The application in a server that says nothing, waits for nobody, and leaves within two seconds."""
    settings = uvicorn.Config(
        application(root, token), log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=2,
        http=Protocol, ws="none", lifespan="off", limit_concurrency=MOST_CONNECTIONS, timeout_keep_alive=KEEP_ALIVE,
        h11_max_incomplete_event_size=MOST_HEADERS,
    )  # fmt: skip
    return uvicorn.Server(settings)


class Protocol(H11Protocol):
    """A connection that is closed where its next request does not come within HEADER_TIME: uvicorn itself waits for ever."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._answered = self.cycle
        self.loop.call_later(HEADER_TIME, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is self._answered:  # nothing was asked since the last look
            self.transport.close()
            return
        if self.cycle.response_complete:
            self._answered = self.cycle
        self.loop.call_later(HEADER_TIME, self._look)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError as error:
        made.close()
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0 takes a free one)") from error
    return made


# answers -------------------------------------------------------------------------------------------------------------


def _page() -> str:
    """index.html. Plotly's bundle adds styles of map libraries unless elements with certain ids exist: they do, and are empty."""
    ids = re.findall(r'getElementById\("([0-9a-f]{64})"\)', PLOTLY.read_text(encoding="utf-8"))
    empty = "".join(f'<meta id="{id}" name="unused">' for id in dict.fromkeys(ids))
    return (STATIC / "index.html").read_text(encoding="utf-8").replace("<!-- plotly's other styles -->", empty)


def _file(path: Path) -> Response:
    return FileResponse(path, media_type=KINDS[path.suffix])


def _static(path: Path) -> Callable[[Request], Response]:
    return lambda request: _file(path)


def _answered(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """JSON with its hash, so that what did not change is not sent again; an error as JSON that says what is wrong."""

    def respond(request: Request) -> Response:
        status = 200
        try:
            content = answer(request)
        except NormscopeError as error:
            content, status = {"error": str(error)}, 400
        except Exception as error:  # numbers in a run that no figure can be made of: the page says so beside that run
            content, status = {"error": f"this cannot be shown ({type(error).__name__}: {str(error)[:300]})"}, 422
        body = (content if isinstance(content, str) else json.dumps(plain(content), allow_nan=False)).encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if status == 200 and request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return Response(body, status, {"etag": tag}, "application/json")

    return respond
