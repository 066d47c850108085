"""100,000 run directories: when the newest ten have their cards, and all are found; and what memory the largest questions take."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from starlette.testclient import TestClient

from bench.dashboard import write
from normscope._watch.columns import METRICS
from normscope.dashboard.server import application

RUNS, NEWEST = 100_000, 10
LINKS = 30_000  # to one file: file systems have a limit
HERE = "http://127.0.0.1:8321"
WIDE = ((50_000, 300), (500, 30_000))  # layers × steps: 60 MB in a column
MEMORY = f"""
import re, sys
from pathlib import Path
from starlette.testclient import TestClient
from normscope.dashboard.server import application

client = TestClient(application(Path(sys.argv[1])), base_url="{HERE}")
while client.get("/api/runs").json()["more"]:
    pass
def peak():  # not getrusage's, which a child takes over from its parent
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
before = peak()
answer = client.get(sys.argv[2])
print(answer.status_code, len(answer.content) >> 20, before, peak())
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        first_cards(Path(name) / "many")
        largest_questions(Path(name) / "wide")


def first_cards(root: Path) -> None:
    begun = time.perf_counter()
    template = root / "template"
    write(template, 3, 3).close()
    files = [path for path in template.iterdir() if path.is_file()]
    for number in range(RUNS - 1):
        path = root / f"run{number:06}"
        path.mkdir()
        for file in files:
            (path / file.name).hardlink_to(file)
        if number % LINKS == LINKS - 1:
            files = [_replaced(path / file.name) for file in files]  # the next ones are links to these
    print(f"{RUNS:,} run directories, written in {time.perf_counter() - begun:.0f} s")
    client = TestClient(application(root), base_url=HERE)
    newest = {f"run{number:06}" for number in range(RUNS - 1 - NEWEST, RUNS - 1)}
    begun, spent, shown, answers = time.perf_counter(), time.process_time(), 0.0, 0
    while True:
        answer = client.get("/api/runs").json()
        answers += 1
        read = {card["id"] for card in answer["cards"] if card["status"] not in ("waiting", "error")}
        if not shown and newest <= read:
            shown = time.perf_counter() - begun
            core = time.process_time() - spent
            print(f"the newest {NEWEST} cards after {shown:.2f} s ({core:.2f} s of a core), in answer {answers}", flush=True)
        if answer["total"] == RUNS and not answer["more"]:
            break
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"all found after {time.perf_counter() - begun:.1f} s; memory {memory} MB")
    begun = time.perf_counter()
    found = client.get("/api/runs", params={"find": "run000007"}).json()
    print(f"the oldest but seven by its name, {found['listed']}, after {time.perf_counter() - begun:.2f} s")


def _replaced(link: Path) -> Path:
    """A file of its own in the place of a link."""
    content = link.read_bytes()
    link.unlink()
    link.write_bytes(content)
    return link


def largest_questions(root: Path) -> None:
    for layers, steps in WIDE:
        run = root / f"{layers}x{steps}" / "run"
        write(run, layers, steps).close()
        every = ",".join(["0-49999"] * 1000)
        for question in (
            f"/api/figure?run=run&of={METRICS[0]}&columns=500&layers={every}",
            f"/api/table?run=run&of={METRICS[0]}",
            "/api/run?run=run",
        ):
            command, here = [sys.executable, "-c", MEMORY, str(run.parent), question], {**os.environ, "PYTHONPATH": os.getcwd()}
            done = subprocess.run(command, capture_output=True, text=True, env=here, check=True)
            status, size, before, after = map(int, done.stdout.split())
            asked = f"{layers:,} layers × {steps:,} steps, {question[:32]}…"
            print(f"{asked}: {status}, {size} MB sent, memory {before} MB → {after} MB")


if __name__ == "__main__":
    main()
