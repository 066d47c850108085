"""Type-check what users copy: the README's example, the sessions of the pages that teach, and the notebooks.

`make types` runs it. A bracket's `upper` may be None, but not one that `ns.lipschitz` returns, so None passes for any type here.
"""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path

from tests.documents import blocks

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build"
OPTIONS = ("--no-strict-optional", "--allow-untyped-defs", "--follow-imports", "silent", "--cache-dir", str(BUILD / "mypy"))


def session(page: Path) -> str:
    """The code of a page, in order."""
    parser = doctest.DocTestParser()
    shown = blocks(page.read_text(encoding="utf-8"), "pycon", "python")
    return "".join(example.source for block in shown for example in parser.get_examples(block))


def cells(notebook: Path) -> str:
    """The code of a notebook."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in found if cell["cell_type"] == "code") + "\n"


def sources() -> dict[str, str]:
    """Module name → code."""
    teaching = [ROOT / "README.md", ROOT / "docs/start.md", *ROOT.glob("docs/guides/*.md"), *ROOT.glob("docs/concepts/*.md")]
    found = {page.stem: session(page) for page in teaching}
    found |= {f"{notebook.stem}-notebook": cells(notebook) for notebook in ROOT.glob("examples/*.ipynb")}
    return {name.lower().replace("-", "_"): code for name, code in found.items()}


if __name__ == "__main__":
    written = []
    (BUILD / "examples").mkdir(parents=True, exist_ok=True)
    for name, code in sources().items():
        written.append(BUILD / "examples" / f"{name}.py")
        written[-1].write_text(code, encoding="utf-8")
    sys.exit(subprocess.run([sys.executable, "-m", "mypy", *OPTIONS, *map(str, written)], cwd=ROOT).returncode)
