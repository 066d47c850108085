"""Requests that nobody would send: each gets an answer of ours, none an error of the server, and none anything of another place."""

from __future__ import annotations

import random
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from normscope._watch.columns import METRICS, SCALARS
from normscope.dashboard.server import application
from tests.dashboard.cards import FINDING, NAMES
from tests.report.recordings import write_run

HERE = "http://127.0.0.1:8321"
TOKEN = "a-token-of-some-length"
PATHS = (
    "/",
    "/result",
    "/static/main.js",
    "/static/../x",
    "/api/runs",
    "/api/run",
    "/api/figure",
    "/api/table",
    "/api/quantities",
    "/none",
    "//",
    "/api/",
)
NAMES_OF = ("run", "of", "kind", "layers", "from", "to", "columns", "since", "find", "id", "token", "x", "")
VALUES = (
    *METRICS[:3], *SCALARS[:3], TOKEN, "bad", "good", "heatmap", "layers", "series", "products", "norm_angle", "", "0", "-1", "1e308", "nan", "inf", "0-99",
    ",".join(["0-49999"] * 50), "1-", "--", "٣", "9" * 400, "../secret.json", "..", "%2e%2e", "\0", "\ud800", "\n", "\x1b[31m", "<script>", "\u202e", "x" * 3000,
)  # fmt: skip
HEADERS = (
    "cookie",
    "host",
    "origin",
    "sec-fetch-site",
    "sec-fetch-mode",
    "range",
    "if-none-match",
    "authorization",
    "accept-encoding",
    "connection",
    "x",
)
CONTENTS = (
    "", "*", '"', "\\" * 2000, ";" * 2000, "normscope-token=x", f"Bearer {TOKEN}", "Bearer ", "cross-site", "none", "null", "127.0.0.1:8321", "[::1]", "a" * 20_000,
    "bytes=" + "0-1," * 2000, "bytes=0-", "bytes=99999999999-", HERE, "evil.example",
)  # fmt: skip
METHODS = ("GET", "GET", "GET", "HEAD", "POST", "OPTIONS", "BREW")


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> list[TestClient]:
    base = tmp_path_factory.mktemp("base")
    write_run(base / "runs" / "bad", 30, NAMES, finding=FINDING)
    write_run(base / "runs" / "good", 20, NAMES, seed=1)
    (base / "secret.json").write_text("do not tell")
    return [TestClient(application(base / "runs", token), base_url=HERE) for token in (None, TOKEN)]


def attack(cases: int, clients: list[TestClient]) -> None:
    choice = random.Random(0)
    seen: dict[int, int] = {}
    for _ in range(cases):
        pairs = [(choice.choice(NAMES_OF), choice.choice(VALUES)) for _ in range(choice.randint(0, 5))]
        if choice.random() < 0.5:
            pairs += [("run", "good"), ("of", choice.choice(METRICS))]
        query = "&".join(f"{name}={quote(value.encode(errors='surrogatepass'))}" for name, value in pairs)
        headers = {choice.choice(HEADERS): choice.choice(CONTENTS) for _ in range(choice.randint(0, 2))}
        client = choice.choices(clients, (3, 1))[0]
        path = choice.choice(PATHS)
        answer = client.request(choice.choice(METHODS), f"{HERE}{path}?{query}", headers=headers, follow_redirects=False)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (path, query, headers, answer.text)
        assert "do not tell" not in answer.text and "Traceback" not in answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        client.cookies.clear()
    assert {200, 400, 401, 403, 404, 405, 421, 431} <= seen.keys()


def test_any_request_is_answered(clients: list[TestClient]) -> None:
    attack(1_000, clients)


@pytest.mark.full
def test_any_request_is_answered_at_length(clients: list[TestClient]) -> None:
    attack(10_000, clients)
