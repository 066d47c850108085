"""`make screenshots`: pictures of the reports, of a training in which one layer is bad.

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

LARGEST = 200_000  # bytes of a picture
SIZE = {"width": 1100, "height": 920}
TALLEST, MARGIN = 1200, 12  # pixels


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pages = write_pages(Path(scratch))
        with chromium() as browser:
            for name, page in pages.items():
                for scheme in ("light", "dark"):
                    picture = directory / f"{name}-{scheme}.png"
                    photograph(browser, page, scheme, picture)
                    print(picture, f"{picture.stat().st_size / 1000:.0f} kB")


def write_pages(scratch: Path) -> dict[str, Path]:
    """The report of a run, of two runs, and of an audit."""
    model = train(scratch / "one-bad-layer", epochs=12)
    train(scratch / "healthy", epochs=12, bad=1.0)
    pages = {name: scratch / f"{name}.html" for name in ("report", "compare", "audit")}
    write_report([scratch / "one-bad-layer"], pages["report"])
    write_report([scratch / "one-bad-layer", scratch / "healthy"], pages["compare"])
    images = digits().test[0]
    ns.audit(model, images[:8], data=images).to_html(pages["audit"])
    return pages


def photograph(browser: Any, page: Path, scheme: str, out: Path) -> None:
    view = browser.new_page(viewport=SIZE, color_scheme=scheme)
    view.goto(page.as_uri())
    view.wait_for_selector("html[data-drawn]")
    bottom = view.locator("figure").first.evaluate("figure => figure.getBoundingClientRect().bottom")
    height = bottom + MARGIN if bottom < TALLEST else SIZE["height"]  # with the first figure, where it is near
    view.screenshot(path=out, full_page=True, clip={"x": 0, "y": 0, "width": SIZE["width"], "height": height})
    view.close()
    if out.stat().st_size > LARGEST:
        raise SystemExit(f"{out} is larger than {LARGEST} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
