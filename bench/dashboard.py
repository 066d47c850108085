"""How long the dashboard takes to show itself, and a new row: 200 runs, one of them long, against one small run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from normscope._watch.columns import METRICS, SCALARS, schema
from normscope._watch.store import Writer
from tests.browser.chromium import chromium

REPEATS = 5
RUNS, LAYERS, STEPS = 200, 500, 100_000
SMALL_LAYERS, SMALL_STEPS = 20, 100
LIVE_ROWS = 10
BAD = "layer7"
SEEN = """
const seen = {};
const note = (name, selector) => document.querySelector(selector) && (seen[name] ??= performance.now());
const look = () => { note("words", "#verdict code"); note("figure", ".plot .main-svg"); };
new MutationObserver(look).observe(document, { childList: true, subtree: true });
globalThis.seen = seen;
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        small, large = Path(name) / "small", Path(name) / "large"
        write(small / "run", SMALL_LAYERS, SMALL_STEPS).close()
        begun = time.perf_counter()
        for number in range(RUNS - 1):
            write(large / f"sweep{number // 20}" / f"run{number}", SMALL_LAYERS, SMALL_STEPS).close()
        writer = write(large / "long", LAYERS, STEPS)  # left open: live
        size = sum(path.stat().st_size for path in large.rglob("*") if path.is_file())
        written = f"{size / 2**30:.1f} GB, written in {time.perf_counter() - begun:.0f} s"
        print(f"{RUNS} runs, one of {LAYERS} layers and {STEPS:,} steps: {written}")
        print(f"{'seconds':>10} {'first paint':>12} {'words':>8} {'figure':>8} {'cold start':>11}")
        times: dict[str, list[tuple[float, ...]]] = {"small": [], "large": []}
        for _ in range(REPEATS):  # interleaved, each with a server that has read nothing yet
            for root in (small, large):
                with served(root) as (address, start):
                    times[root.name].append((*opened(browser, address), start))
        medians = {root: [statistics.median(column) for column in zip(*rows, strict=True)] for root, rows in times.items()}
        for root, (paint, words, figure, start) in medians.items():
            print(f"{root:>10} {paint:12.2f} {words:8.2f} {figure:8.2f} {start:11.2f}")
        print(
            f"{'ratio':>10} "
            + "".join(f"{b / a:{width}.1f}" for a, b, width in zip(medians["small"], medians["large"], (12, 9, 9, 12), strict=True))
        )
        with served(large) as (address, _):
            delays = live(browser, address, writer)
        writer.close()
        print(f"a new row of the long run is on its card after {statistics.median(delays):.2f} s, at most {max(delays):.2f} s")


def write(path: Path, layers: int, steps: int) -> Writer:
    """A run by the recorder's own writer, whose metrics wander; one layer has a finding."""
    random = np.random.default_rng(0)
    names = [
        {"name": f"layer{index}", "role": "weight", "kind": "Linear", "scale_free": True, "in_product": True}
        for index in range(layers)
    ]
    writer = Writer(path, on_failure=sys.exit)
    writer.event("started", step=0)
    writer.begin({"layers": names, "model": "Synthetic"}, schema(names))
    drift = {metric: np.exp(random.normal(size=(64, layers))).astype(np.float32) for metric in METRICS}
    for step in range(1, steps + 1):
        writer.row(row(step, drift))
        while writer._waiting.qsize() > 256:
            time.sleep(0.001)
    writer.event(
        "finding", rule="variance-collapse", step=1, layer=BAD, evidence={}, message="the variance is close to ε", fix="raise it"
    )
    while writer.rows < steps:
        time.sleep(0.001)
    return writer


def row(step: int, drift: dict[str, np.ndarray]) -> dict[str, Any]:
    metrics = {metric: values[step % len(values)] for metric, values in drift.items()}
    return {"step": step, "time": float(step), **dict.fromkeys(SCALARS, 1 / step), **metrics}


@contextmanager
def served(root: Path) -> Iterator[tuple[str, float]]:
    """The address of a new server, and how long it took to start."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "normscope", "serve", str(root), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split(" at ")[1].split()[0]
        yield address, time.perf_counter() - begun
    finally:
        process.terminate()
        process.wait()


def opened(browser: Any, address: str) -> tuple[float, float, float]:
    """Seconds from opening the page until it shows something, names the bad layer, and draws its first figure."""
    page = browser.new_page()
    page.add_init_script(SEEN)
    page.goto(address)
    page.wait_for_selector(".plot .main-svg", timeout=120_000)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    seen = page.evaluate("seen")
    page.close()
    return paint / 1000, seen["words"] / 1000, seen["figure"] / 1000


def live(browser: Any, address: str, writer: Writer) -> list[float]:
    """Seconds from writing a row until its step is on the card, while the figures are open."""
    page = browser.new_page()
    page.goto(address + "&run=long")
    page.wait_for_selector(".plot .main-svg", timeout=120_000)
    drift = {metric: np.ones((1, LAYERS), np.float32) for metric in METRICS}
    delays = []
    for step in range(STEPS + 1, STEPS + 1 + LIVE_ROWS):
        begun = time.perf_counter()
        writer.row(row(step, drift))
        page.wait_for_selector(f".card.live :text('step {step:,}')", timeout=60_000)
        delays.append(time.perf_counter() - begun)
    page.close()
    return delays


if __name__ == "__main__":
    main()
