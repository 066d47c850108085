"""Every answer is whole while runs are written, replaced and deleted, whoever else asks."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.testclient import TestClient

from normscope.dashboard.server import application
from tests.dashboard.cards import NAMES
from tests.dashboard.test_server import HERE
from tests.report.recordings import write_run
from tests.watch.test_store import opened, row

ROWS = 400


def test_answers_are_whole_while_runs_grow_and_go(tmp_path: Path) -> None:
    writer = opened(tmp_path / "growing")
    writer.row(row(0))
    while writer.rows < 1:
        pass
    client = TestClient(application(tmp_path), base_url=HERE)
    ended = threading.Event()

    def disturb() -> None:
        for step in range(1, ROWS):
            writer.row(row(step))
            if step % 40 == 0:
                write_run(tmp_path / "passing", 3, NAMES)
            if step % 40 == 20:
                shutil.rmtree(tmp_path / "passing", ignore_errors=True)
        writer.close()
        ended.set()

    def ask() -> list[int]:
        seen = []
        last = False
        while not last:
            last = ended.is_set()
            (card,) = (card for card in client.get("/api/runs").json()["cards"] if card["id"] == "growing")
            figure = client.get("/api/figure", params={"run": "growing", "kind": "series", "of": "loss"})
            table = client.get("/api/table", params={"run": "growing", "of": "angle"})
            passing = client.get("/api/figure", params={"run": "passing", "of": "angle"})
            assert figure.status_code == table.status_code == 200 and passing.status_code in (200, 400)
            seen.append(card["rows"])
        return seen

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        pool.submit(disturb).result(120)
        for future in asking:
            seen = future.result(120)
            assert seen == sorted(seen) and seen[-1] <= ROWS
    while max(card["rows"] for card in client.get("/api/runs").json()["cards"]) < ROWS:
        pass
    assert client.get("/api/table", params={"run": "growing", "of": "loss"}).json()["rows"][-1][0] == ROWS - 1
