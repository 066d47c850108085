"""`make screenshots`: pictures of the reports and of the dashboard, of a training in which one layer is bad.

python -m tests.browser.screenshots docs/images
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import normscope as ns
from normscope.lab.datasets import digits
from normscope.report.file import write_report
from tests.browser.chromium import chromium
from tests.browser.planted import train
from tests.browser.serving import served

RUNS = "runs"
LARGEST = 200_000  # bytes of a picture
SIZE = {"width": 1100, "height": 920}
TALLEST, MARGIN = 1300, 12  # pixels


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pages = {name: page.as_uri() for name, page in write_pages(Path(scratch)).items()}
        with chromium() as browser, served(Path(scratch) / RUNS) as dashboard:
            pages["dashboard"] = f"{dashboard}?run=one-bad-layer"
            for name, address in pages.items():
                for scheme in ("light", "dark"):
                    picture = directory / f"{name}-{scheme}.png"
                    photograph(browser, address, scheme, picture)
                    print(picture, f"{picture.stat().st_size / 1000:.0f} kB")


def write_pages(scratch: Path) -> dict[str, Path]:
    """The report of a run, of two runs, and of an audit."""
    bad, healthy = (scratch / RUNS / name for name in ("one-bad-layer", "healthy"))
    model = train(bad, epochs=12)
    train(healthy, epochs=12, bad=1.0)
    pages = {name: scratch / f"{name}.html" for name in ("report", "compare", "audit")}
    write_report([bad], pages["report"])
    write_report([bad, healthy], pages["compare"])
    images = digits().test[0]
    ns.audit(model, images[:8], data=images).to_html(pages["audit"])
    return pages


def photograph(browser: Any, address: str, scheme: str, out: Path) -> None:
    view = browser.new_page(viewport=SIZE, color_scheme=scheme)
    view.goto(address)
    view.wait_for_selector("html[data-drawn], .plot .main-svg")
    bottom = view.locator("figure, .figure").first.evaluate("figure => figure.getBoundingClientRect().bottom")
    height = bottom + MARGIN if bottom < TALLEST else SIZE["height"]  # with the first figure, where it is near
    view.screenshot(path=out, full_page=True, clip={"x": 0, "y": 0, "width": SIZE["width"], "height": height})
    view.close()
    if out.stat().st_size > LARGEST:
        raise SystemExit(f"{out} is larger than {LARGEST} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
