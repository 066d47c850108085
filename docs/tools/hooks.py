"""Pages of the site that lie outside of docs/: links to them and from them are written as GitHub needs them, and changed here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
OUTSIDE = ("CONTRIBUTING.md", "SECURITY.md")
NOTEBOOKS = "examples"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the top of the repository."""
    for name in OUTSIDE:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name.lower(), content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to these pages, from wherever they are."""
    for name in OUTSIDE:
        markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./{name}", lambda match, name=name: f"]({match[1]}{name.lower()}", markdown)
        markdown = markdown.replace(f"]({name}", f"]({name.lower()}")
    return markdown
