"""Pages of the site that lie outside of docs/: those at the top of the repository, and the notebooks of examples/, executed.

Links to them and from them are written as GitHub needs them, and changed here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from markdown import Markdown
from markdown.extensions import Extension
from mkdocs.structure.files import File
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).parent.parent.parent
OUTSIDE = ("CONTRIBUTING.md", "SECURITY.md")
NOTEBOOKS = ROOT / "examples"
LONGEST = 900  # seconds that a cell may take


class Subscripts(Extension):
    """‖A‖_F and ε_set are mathematics: an underscore never emphasizes, as on GitHub it does not beside letters and bars."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.deregister("em_strong2", strict=False)  # before Markdown 3.11
        if (delimiters := getattr(md, "delimiters", None)) is not None:
            delimiters.remove("_")


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Subscripts())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the top of the repository, and the notebooks."""
    for name in OUTSIDE:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name.lower(), content=re.sub(r"\]\(docs/", "](", text)))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"examples/{path.stem}.md", content=executed(path)))
    return files


def executed(path: Path) -> str:
    """A notebook as Markdown, with what its cells show now; a cell that fails fails the build."""
    notebook = nbformat.read(path, as_version=4)
    private = Config({"KernelManager": {"transport": "ipc"}})  # over TCP, kernels warn that others could listen
    NotebookClient(notebook, timeout=LONGEST, config=private, resources={"metadata": {"path": str(ROOT)}}).execute()
    body, _ = MarkdownExporter().from_notebook_node(notebook)
    return str(body)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to these pages, from wherever they are."""
    for name in OUTSIDE:
        markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./{name}", lambda match, name=name: f"]({match[1]}{name.lower()}", markdown)
        markdown = markdown.replace(f"]({name}", f"]({name.lower()}")
    return re.sub(r"\]\(((?:\.\./)*)\.\./examples/([\w-]+)\.ipynb", r"](\1examples/\2.md", markdown)
