"""The server answers questions about runs below its directory, to whom it should, and does nothing else."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from starlette.testclient import TestClient

import normscope as ns
from normscope._watch.columns import METRICS, PRODUCTS, SCALARS
from normscope.dashboard.server import STATIC, application
from normscope.dashboard.views import FIGURES, Question, parse_ranges
from tests.browser.serving import served
from tests.dashboard.cards import FINDING, NAMES
from tests.report.recordings import write_run

HERE = "http://127.0.0.1:8321"
HOSTILE = "</script><img src=x onerror=alert(1)>"
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base")
    write_run(base / "runs" / "bad", 30, NAMES, finding=FINDING)
    write_run(base / "runs" / "good", 20, NAMES, seed=1)
    write_run(
        base / "runs" / "hostile",
        5,
        [HOSTILE, "javascript:alert(1)", HOSTILE],
        finding={**FINDING, "layer": HOSTILE, "message": HOSTILE},
    )
    (base / "secret.json").write_text('{"secret": "do not tell"}')
    return base / "runs"


def client(root: Path, base: str = HERE, **options: Any) -> TestClient:
    return TestClient(application(root, **options), base_url=base, raise_server_exceptions=True)


@pytest.fixture(scope="module")
def here(root: Path) -> TestClient:
    found = client(root)
    while found.get("/api/runs").json()["more"]:
        pass
    return found


# answers -------------------------------------------------------------------------------------------------------------


def test_the_list_of_runs(here: TestClient) -> None:
    answer = here.get("/api/runs").json()
    assert sorted(answer["ids"]) == ["bad", "good", "hostile"] and answer["directory"] == "runs"
    (bad,) = (card for card in answer["cards"] if card["id"] == "bad")
    assert bad["worst"]["layer"] == "norm" and bad["step"] == 30
    assert here.get("/api/runs", params={"since": answer["version"]}).json()["cards"] == []


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_are_those_of_the_report(kind: str, here: TestClient, root: Path) -> None:
    of = "loss" if kind == "series" else "spectral_norm"
    found = here.get("/api/figure", params={"kind": kind, "of": of, "run": ["bad"]})
    assert found.status_code == 200 and found.json()["data"]
    if kind in ("heatmap", "series", "products", "norm_angle"):
        names = {"heatmap": of, "series": of}
        assert found.json() == json.loads(ns.load_run(root / "bad").figure(names.get(kind, kind)).to_json())


@pytest.mark.quick(15)
@pytest.mark.parametrize("of", [*METRICS, *SCALARS])
def test_every_column_has_a_figure_and_a_table(of: str, here: TestClient) -> None:
    kind = "heatmap" if of in METRICS else "series"
    for path in ("figure", "table"):
        answer = here.get(f"/api/{path}", params={"kind": kind, "of": of, "run": ["good", "bad"]})
        assert answer.status_code == 200, answer.text


def test_layers_and_steps_can_be_chosen(here: TestClient) -> None:
    asked = {"of": "spectral_norm", "run": "bad", "layers": "0,2", "from": 10, "to": 20}
    figure = here.get("/api/figure", params={"kind": "heatmap", **asked}).json()
    assert figure["data"][0]["y"] == ["first", "head"] and figure["layout"]["xaxis"]["range"] == [10, 20]
    table = here.get("/api/table", params=asked).json()
    assert [row[0] for row in table["rows"]] == ["first", "head"]
    assert all(10 <= row[column] <= 20 for row in table["rows"] for column in (5, 7))


def test_a_table_holds_the_numbers_of_its_figure(here: TestClient, root: Path) -> None:
    values = ns.load_run(root / "bad").matrix("gradient_norm").astype(np.float64)
    table = here.get("/api/table", params={"of": "gradient_norm", "run": "bad"}).json()
    for index, (name, _, first, last, least, at_least, greatest, at_greatest) in enumerate(table["rows"]):
        column = values[:, index]
        assert (name, first, last, least, greatest) == (NAMES[index], column[0], column[-1], column.min(), column.max())
        assert (at_least, at_greatest) == (column.argmin() + 1, column.argmax() + 1)
    products = here.get("/api/table", params={"kind": "products", "run": "bad"}).json()
    assert len(products["columns"]) == 1 + len(PRODUCTS) and products["rows"][0][0] == 1
    loss = here.get("/api/table", params={"of": "loss", "run": ["bad", "good"]}).json()
    assert loss["columns"] == ["step", "bad", "good"] and loss["rows"][-1][0] == 30 and loss["rows"][-1][2] is None


def test_what_did_not_change_is_not_sent_again(here: TestClient) -> None:
    asked = {"kind": "heatmap", "of": "angle", "run": "bad"}
    first = here.get("/api/figure", params=asked)
    again = here.get("/api/figure", params=asked, headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    from tests.watch.test_store import opened

    writer = opened(tmp_path / "odd")
    for step, value in enumerate([np.nan, np.inf, -np.inf, 0.0, 1e300, -1e-45]):
        writer.row({"step": 2**62 + step, "time": 0.0, "loss": value, **dict.fromkeys(METRICS, np.full(7, value))})
    writer.close()
    found = client(tmp_path)
    for of in (*METRICS, *SCALARS):
        for path in ("figure", "table"):
            kind = "heatmap" if of in METRICS else "series"
            answer = found.get(f"/api/{path}", params={"kind": kind, "of": of, "run": "odd"})
            assert answer.status_code == 200, (of, answer.text)
            json.loads(answer.text, parse_constant=lambda text: pytest.fail(f"{text} in JSON"))


WRONG = [
    ("figure", {"run": "none"}, "no run"), ("figure", {}, "between 1 and"), ("figure", {"run": ["good"] * 13}, "between 1 and 12"),
    ("figure", {"run": "good", "of": "__class__"}, "no quantity"), ("figure", {"run": "good", "kind": "evil"}, "no figure"),
    ("figure", {"run": "good", "layers": "1-"}, None), ("figure", {"run": "good", "layers": "0-9999999999"}, "numbers and ranges"),
    ("figure", {"run": "good", "layers": "-1"}, "numbers and ranges"), ("figure", {"run": "good", "layers": "٣"}, "numbers and ranges"),
    ("figure", {"run": "good", "layers": "0-999999,0-999999"}, "more layers"), ("figure", {"run": "good", "layers": "0-50000"}, "more layers"), ("figure", {"run": "good", "layers": "999"}, None),
    ("figure", {"run": "good", "from": "nan", "to": "1"}, "finite"), ("figure", {"run": "good", "from": "5"}, "`to` must be"),
    ("figure", {"run": "good", "from": "9", "to": "3"}, "before"), ("figure", {"run": "good", "columns": "inf"}, "finite"),
    ("figure", {"run": "good", "columns": "-5"}, None), ("figure", {"run": "good", "kind": "heatmap", "of": "loss"}, "not a quantity of layers"),
    ("figure", {"run": "good", "kind": "series", "of": "angle"}, None), ("runs", {"since": "x"}, "version"), ("runs", {"since": "9" * 30}, "version"),
    ("table", {"of": "loss"}, "between 1 and"), ("run", {"run": ["good", "none"]}, "no run"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "asked", "message"), WRONG, ids=[f"{path} {asked}"[:60] for path, asked, _ in WRONG])
def test_a_wrong_question_gets_one_line(path: str, asked: dict[str, Any], message: str | None, here: TestClient) -> None:
    answer = here.get(f"/api/{path}", params=asked)
    assert answer.status_code in ((400,) if message else (200, 400, 422))
    if answer.status_code != 200:
        assert message is None or message in answer.json()["error"]
        assert "\n" not in answer.json()["error"] and "Traceback" not in answer.text


def test_no_question_makes_a_figure_larger_than_a_run(root: Path) -> None:
    here = client(root)
    repeated = here.get("/api/figure", params={"run": "good", "layers": ",".join(["0-99"] * 2000)})
    assert repeated.status_code == 200 and repeated.json() == here.get("/api/figure", params={"run": "good"}).json()
    for rows in (1, 3, 1000, 50_000):
        assert 2 <= Question("angle", columns=500).columns_of(rows) <= max(1_000_000 // rows, 2)


def test_questions_are_kept_within_limits() -> None:
    assert Question.parse({"columns": "100000"}).columns == 500 and Question.parse({"columns": "1"}).columns == 50
    assert parse_ranges("3") == (3,) and parse_ranges("5-4") == ()


def test_names_come_as_data_never_as_markup(here: TestClient) -> None:
    """JSON, under a type that no browser shows as a page; the page's own text holds no name at all."""
    for path in ("/api/runs", "/api/run?run=hostile", "/api/figure?run=hostile", "/api/table?run=hostile"):
        answer = here.get(path)
        assert answer.headers["content-type"] == "application/json" and answer.headers["x-content-type-options"] == "nosniff"
    figure = here.get("/api/figure?run=hostile").json()
    assert not any("<" in name for name in figure["data"][0]["y"])
    assert HOSTILE not in here.get("/").text


def test_the_page_builds_nodes_not_markup() -> None:
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        assert not any(
            word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function")
        ), path
    page = (STATIC / "index.html").read_text()
    assert "http" not in page.replace("http-equiv", "") and "<script>" not in page and " style=" not in page


# who may ask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_it_is_read_only(method: str, here: TestClient) -> None:
    assert here.request(method, "/api/runs").status_code == 405


def test_head_is_like_get(here: TestClient) -> None:
    answer = here.head("/api/runs")
    assert answer.status_code == 200 and answer.content == b""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8321", "localhost:1", "LOCALHOST", "[::1]:8321", "[::1]"])
def test_loopback_names_are_answered(host: str, here: TestClient) -> None:
    assert here.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8321",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        "127.0.0.1@evil",
        "[::1].evil",
    ],
)
def test_other_names_are_refused(host: str, here: TestClient) -> None:
    """DNS rebinding: a page of evil.example whose name now resolves to 127.0.0.1."""
    for path in ("/", "/api/runs", "/static/main.js"):
        assert here.get(path, headers={"host": host}).status_code == 421


def test_every_answer_has_the_headers(here: TestClient) -> None:
    answers = [
        here.get("/"),
        here.get("/static/main.js"),
        here.get("/api/runs"),
        here.get("/none"),
        here.post("/"),
        here.get("/", headers={"host": "x"}),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe-eval" not in policy and policy.count("unsafe-inline") == 1 and "style-src-attr 'unsafe-inline'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers and "server" not in answer.headers


def test_a_token_is_demanded_of_everybody(root: Path) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/static/plotly.min.js", "/none"):
        found = client(root, "http://10.0.0.1:8321", token=TOKEN)
        assert found.get(path).status_code == 401
        assert found.get(path, headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
        assert found.get(path, headers={"cookie": f"normscope-token={TOKEN}"}).status_code == 401
        assert found.get(path, headers={"cookie": b"normscope-token=\xff;;;="}).status_code == 401
        assert found.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code != 401


def test_the_token_in_the_address_becomes_a_cookie(root: Path) -> None:
    found = client(root, "http://10.0.0.1:8321", token=TOKEN)
    assert found.get("/", params={"token": "wrong" * 5}).status_code == 401
    assert found.get("/api/runs", params={"token": TOKEN}).status_code == 401  # only the page takes it there
    answer = found.get("/", params={"token": TOKEN, "run": "a b"}, follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/?run=a+b"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and TOKEN not in cookie
    assert found.get("/api/runs").status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_may_link_here_and_no_more(site: str, here: TestClient) -> None:
    """same-site: a page of another port of this machine."""
    visit = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert here.get("/", headers=visit).status_code == 200
    for path in ("/api/runs", "/static/main.js", "/result?id=x"):
        assert here.get(path, headers=visit).status_code == 403
    for mode, dest in (("no-cors", "script"), ("cors", "empty"), ("navigate", "iframe")):
        asked = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}
        assert here.get("/", headers=asked).status_code == here.get("/api/runs", headers=asked).status_code == 403
    assert here.get("/api/runs", headers={"sec-fetch-site": "same-origin", "origin": HERE}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1:8321.evil.example", "x"])
def test_an_origin_elsewhere_is_refused(origin: str, here: TestClient) -> None:
    assert here.get("/api/runs", headers={"origin": origin}).status_code == 403


def test_headers_and_cookies_of_any_size_are_answered_at_once(root: Path) -> None:
    """Backslashes in a quoted cookie are what Python's own parser of cookies takes square time for."""
    found = client(root, token=TOKEN)
    assert found.get("/api/runs", headers={"cookie": 'a="' + "\\" * 60_000 + '"'}).status_code == 431
    assert found.get("/api/runs", headers={"cookie": 'a="' + "\\" * 15_000 + '"'}).status_code == 401


def test_two_dashboards_of_one_machine_have_their_own_cookies(root: Path) -> None:
    answers = [
        client(root, token=token).get("/", params={"token": token}, follow_redirects=False) for token in (TOKEN, TOKEN + "2")
    ]
    names = {answer.headers["set-cookie"].partition("=")[0] for answer in answers}
    assert len(names) == 2


def test_a_connection_that_asks_nothing_is_closed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.dashboard.server.HEADER_TIME", 0.2)
    with served(root) as address:
        place = urlsplit(address)
        for begun in (b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "):
            with socket.create_connection((place.hostname, place.port), timeout=120) as connection:
                connection.sendall(begun)
                assert connection.recv(1) == b""
        monkeypatch.setattr("normscope.dashboard.server.HEADER_TIME", 60.0)
        with socket.create_connection((place.hostname, place.port), timeout=120) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nX-Large: " + b"x" * 100_000)
            assert b" 400 " in connection.recv(1000).partition(b"\r\n")[0]


# nothing else --------------------------------------------------------------------------------------------------------

ELSEWHERE = (
    "/../secret.json", "/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static/..%5cserver.py", "/static//etc/passwd",
    "/static/%2fetc%2fpasswd", "/static/....//server.py", "/static/main.js%00.html", "/static/%c0%ae%c0%ae/server.py", "/secret.json", "/runs/bad/manifest.json",
    "/static/", "/static", "/api/", "/api/../secret.json", "/bad/manifest.json", "/static/__init__.py", "//etc/passwd", "/%2e%2e/%2e%2e/secret.json",
)  # fmt: skip


@pytest.mark.parametrize("path", ELSEWHERE)
def test_no_other_file_is_served(path: str, here: TestClient) -> None:
    answer = here.get(HERE + path)
    assert answer.status_code in (404, 400) and "do not tell" not in answer.text and "root:" not in answer.text


@pytest.mark.parametrize("id", ["../secret.json", "..", "%2e%2e", "bad/../../secret.json", "/etc", "bad%00", "bad/manifest.json"])
def test_no_other_directory_is_read(id: str, here: TestClient) -> None:
    for path in ("run", "figure", "table"):
        answer = here.get(f"/api/{path}", params={"run": id})
        assert answer.status_code == 400 and "no run" in answer.json()["error"]
