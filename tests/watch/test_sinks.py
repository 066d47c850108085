"""Rows and findings reach other tools with the same numbers; a sink that fails or hangs costs only itself."""

from __future__ import annotations

import contextvars
import http.server
import json
import re
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import normscope as ns
from normscope._watch import sinks
from normscope._watch.exporters.tensorboard import tagged
from tests.watch.loops import Loop
from tests.watch.test_exporters import events


class FakeRun:
    """A run of W&B 0.31 or trackio 0.43, with the signatures of both."""

    project, entity, group, name = "theirs", "me", None, "my-run"

    def __init__(self, **made: Any) -> None:
        self.made, self.logged, self.alerts, self.defined = made, list[Any](), list[Any](), list[Any]()
        self._stop_flag = threading.Event()

    @property
    def finished(self) -> bool:
        return self._stop_flag.is_set()

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, metrics: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append((dict(metrics), step, commit))

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))

    def finish(self) -> None:
        self._stop_flag.set()


class FakeClient:
    calls = 0
    metrics: list[Any] = []
    tags: dict[str, str] = {}
    terminated: list[str] = []

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        assert len(metrics) <= 1000 and all(re.fullmatch(r"[\w\-. :/]+", one.key) for one in metrics)  # what mlflow 3.17 refuses
        FakeClient.calls += 1
        self.metrics.extend((run_id, one.key, one.value, one.step) for one in metrics)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.tags[key] = value

    def set_terminated(self, run_id: str) -> None:
        self.terminated.append(run_id)


def trained(path: Path, wanted: list[Any], steps: int = 20) -> ns.Run:
    """With a jump of the loss at step 15."""
    loop = Loop()
    with loop.watch(path, sinks=wanted) as watch:
        for step in range(1, steps + 1):
            loop.optimizer.zero_grad()
            x, y = loop.batch()
            loss = nn.functional.cross_entropy(loop.model(x), y) * (1e6 if step == 15 else 1)
            loss.backward()
            loop.optimizer.step()
            watch.step(loss=loss)
    return ns.load_run(path)


def expected(run: ns.Run) -> list[dict[str, float]]:
    rows = run.table().to_pylist()
    return [{f"normscope/{tag}": value for tag, value in tagged(row, run.layer_names, sinks.METRICS)} for row in rows]


def close(found: dict[str, Any], wanted: dict[str, float]) -> bool:
    return found.keys() == wanted.keys() and all(found[name] == pytest.approx(wanted[name], rel=1e-5) for name in wanted)


@pytest.mark.parametrize("open_before", [False, True])
def test_wandb(open_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeRun] = []
    theirs = FakeRun() if open_before else None
    module = SimpleNamespace(run=theirs, init=lambda **k: made.append(FakeRun(**k)) or made[-1])
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    run = trained(tmp_path / "mine", ["wandb"])
    (fake,) = made
    assert fake.finished and fake.defined == [("normscope/*", "normscope/step")]
    beside = {"project": "theirs", "entity": "me", "group": "my-run", "job_type": "normscope"}
    assert fake.made == {"name": "mine", "reinit": "create_new", **(beside if open_before else {"project": "normscope"})}
    assert theirs is None or not (theirs.finished or theirs.logged or theirs.defined)  # nothing of yours is touched
    rows = expected(run)
    assert len(fake.logged) == len(rows)
    for (found, step, commit), wanted in zip(fake.logged, rows, strict=True):
        assert step is None and commit is None  # every row is kept
        assert found.pop("normscope/step") in run.table()["step"].to_pylist()
        assert close(found, wanted)
    assert any("exploding-gradient" in title for title, _ in fake.alerts)


@pytest.mark.parametrize("before", ["none", "open", "ended"])
def test_trackio(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeRun] = [FakeRun()]
    if before == "ended":
        made[0].finish()
    current = contextvars.ContextVar[FakeRun | None]("current_run", default=None if before == "none" else made[0])
    module = SimpleNamespace(
        init=lambda **k: made.append(FakeRun(**k)) or made[-1], context_vars=SimpleNamespace(current_run=current)
    )
    monkeypatch.setitem(sys.modules, "trackio", module)  # type: ignore[arg-type]
    run = trained(tmp_path / "mine", ["trackio"])
    assert len(made) == (1 if before == "open" else 2), "to open another run ends the one that is open"
    fake = made[-1]
    rows = [(found, step) for found, step, _ in fake.logged if "normscope/finding" not in found]
    assert fake.finished is (before != "open") and [step for _, step in rows] == run.table()["step"].to_pylist()
    assert all(close(found, wanted) for (found, _), wanted in zip(rows, expected(run), strict=True))
    assert any("NS504" in found.get("normscope/finding", "") for found, _, _ in fake.logged)


@pytest.mark.parametrize("open_before", [False, True])
def test_mlflow(open_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "metrics", [])
    monkeypatch.setattr(FakeClient, "calls", 0)
    monkeypatch.setattr(FakeClient, "tags", {})
    monkeypatch.setattr(FakeClient, "terminated", [])
    active = [SimpleNamespace(info=SimpleNamespace(run_id="theirs"))] if open_before else []

    def start_run(run_name: str) -> Any:
        active.append(SimpleNamespace(info=SimpleNamespace(run_id=run_name)))
        return active[-1]

    module = SimpleNamespace(
        active_run=lambda: active[-1] if active and threading.current_thread() is threading.main_thread() else None,
        start_run=start_run, end_run=lambda: active.pop(), MlflowClient=FakeClient,
        entities=SimpleNamespace(Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mlflow", module)  # type: ignore[arg-type]
    run = trained(tmp_path / "mine", ["mlflow"])
    own = "theirs" if open_before else "mine"
    assert len(active) == open_before and FakeClient.terminated == ([] if open_before else ["mine"])
    by_step: dict[int, dict[str, float]] = {}
    for run_id, key, value, step in FakeClient.metrics:
        assert run_id == own
        by_step.setdefault(step, {})[key] = value
    assert all(close(found, wanted) for found, wanted in zip(by_step.values(), expected(run), strict=True))
    assert "NS504" in FakeClient.tags["normscope/NS504"] and FakeClient.calls == len(run.table())


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = trained(tmp_path / "mine", ["tensorboard"])
    found = events(tmp_path / "mine" / "tensorboard")
    assert [step for step, _ in found["run/loss"]] == run.table()["step"].to_pylist()
    for index, name in enumerate(run.layer_names[:1]):
        recorded = run.matrix("spectral_norm")[:, index]
        assert [value for _, value in found[f"spectral_norm/{name}"]] == pytest.approx(recorded.tolist())


def test_a_web_address_gets_every_finding_once(tmp_path: Path) -> None:
    posted: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        run = trained(tmp_path / "mine", [f"http://127.0.0.1:{server.server_port}/hook"])
    finally:
        server.shutdown()
        server.server_close()
    found = {(one["finding"]["rule"], one["finding"]["where"]) for one in posted}
    assert found == {(finding.rule, finding.where) for finding in run.findings} and len(posted) == len(found)
    assert all(one["run"] == "mine" and one["text"].startswith("mine: NS") for one in posted)


class Broken:
    def __init__(self, how: str) -> None:
        self.how, self.closed = how, False

    def row(self, row: Any, layers: Any) -> None:
        if self.how == "raises":
            raise RuntimeError("planted")
        time.sleep(0.2 if self.how == "hangs" else 0)

    def finding(self, finding: Any) -> None: ...
    def close(self) -> None:
        self.closed = True


@pytest.mark.filterwarnings("ignore:normscope.watch no longer records")
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_sink_that_fails_or_hangs_costs_only_itself(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "hangs":
        monkeypatch.setattr(sinks, "PATIENCE", 0.1)
    broken, fine = Broken(how), Broken("")
    with warnings.catch_warnings(record=True) as warned:
        run = trained(tmp_path / "with", [broken, fine])
    assert any("did not take" in str(one.message) for one in warned) is (how == "hangs")  # what is lost is said
    plain = trained(tmp_path / "without", [])
    assert run.status == "finished" and run.table()["step"].to_pylist() == plain.table()["step"].to_pylist()
    assert [event["what"] for event in run.events("error")] == (["sink Broken"] if how == "raises" else [])


@pytest.mark.filterwarnings("ignore:normscope.watch no longer records", "error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sink_without_methods_costs_only_itself(tmp_path: Path) -> None:
    fine = Broken("")
    run = trained(tmp_path, [object(), fine])
    assert fine.closed and run.status == "finished"
    assert {event["what"] for event in run.events("error")} == {"sink object", "end of sink object"}


@pytest.mark.filterwarnings("ignore:normscope.watch no longer records")
def test_what_fails_when_all_rows_are_written_is_on_record(tmp_path: Path) -> None:
    class Late(Broken):
        def row(self, row: Any, layers: Any) -> None:
            time.sleep(0.3)
            raise RuntimeError("planted")

    run = trained(tmp_path, [Late("")])
    assert [event["what"] for event in run.events("error")] == ["sink Late"] and run.status == "finished"


def test_what_cannot_be_opened_is_refused_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ns.InputError, match="no sink 'wandbb': choose from wandb, trackio, mlflow, tensorboard"):
        Loop().watch(tmp_path / "a", sinks=["wandbb"])
    monkeypatch.setitem(sys.modules, "trackio", None)  # type: ignore[arg-type]
    with pytest.raises(ns.InputError, match="trackio is not installed: pip install trackio"):
        Loop().watch(tmp_path / "a", sinks=["trackio"])

    def init(**options: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="continues without trackio: ConnectionError"):
        watch = Loop().watch(tmp_path / "a", sinks=["trackio"])
    watch.close()
