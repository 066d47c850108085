"""No link of the docs is dead, every page is in the site, and what the new pages show runs as it stands."""

from __future__ import annotations

import doctest
import inspect
import json
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
from typer.main import get_command

import normscope
from docs.tools import docstrings, examples, surface
from normscope.cli import app
from tests.documents import anchors, blocks, broken, links, slug

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
RUN = [DOCS / "start.md", *sorted(DOCS.glob("guides/*.md")), *sorted(DOCS.glob("concepts/*.md"))]
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))
COMMANDS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *RUN]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_link_is_dead(page):
    assert not broken(page)


def test_dead_links_are_seen(tmp_path):
    (tmp_path / "other.md").write_text("# A title: γ, `code` and more\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    good = "[a](other.md#a-title-γ-code-and-more) [b](other.md#twice-1) [c](https://example.org/x) [d](#here)\n\n# Here\n"
    page.write_text(good)
    assert not broken(page)
    page.write_text(good + "[e](other.md#thrice) ![f](no.png) [g](gone.md)\n```\n[h](code.md)\n```\n`[i](code.md)`\n")
    assert broken(page) == ["other.md#thrice", "no.png", "gone.md"]


def test_every_page_is_in_the_site():
    listed = re.findall(r"^ +- .*: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    made = {"contributing.md", "security.md", *(f"examples/{path.stem}.md" for path in NOTEBOOKS)}  # by docs/tools/hooks.py
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted({*listed}) and {*listed, "index.md"} == pages | made


def test_the_home_page_leads_to_every_page_about_something():
    linked = {link.partition("#")[0] for link in links((DOCS / "index.md").read_text())}
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= linked


@pytest.mark.parametrize("page", RUN, ids=name)
def test_what_a_page_shows_runs(page, monkeypatch, tmp_path):
    """One page is one session. A block that is not executed would be a block that may be wrong."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert not blocks(text, "python", "py"), "write examples as sessions (pycon), so that they run"
    session = "\n".join(blocks(text, "pycon"))
    assert session, "a page without an example"
    case = doctest.DocTestParser().get_doctest(session, {}, name(page), str(page), 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(case)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("page", COMMANDS, ids=name)
def test_commands_are_spelled_right(page):
    """Every `normscope …` line of a page has a command and options that exist."""
    for block in blocks(page.read_text(encoding="utf-8"), "console", "sh", "yaml"):
        for line in re.findall(r"(?<![\w/-])normscope ((?:[a-z]+ )[^#\n]*)", block):
            command, words = get_command(app), shlex.split(line)
            while hasattr(command, "commands"):
                assert words and words[0] in command.commands, line
                command = command.commands[words.pop(0)]
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known, line


def cells(notebook: Path) -> list[str]:
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in found), "outputs are made by `make docs`, not committed"
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_are_sources(notebook):
    assert all(compile(cell, name(notebook), "exec") for cell in cells(notebook))


@pytest.mark.full
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_run(notebook, monkeypatch):
    """Without Jupyter: what a cell displays is not asked for."""
    shown = types.ModuleType("IPython.display")
    shown.HTML = str
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    namespace: dict[str, object] = {}
    for cell in cells(notebook):
        exec(cell, namespace)


def test_the_table_of_public_names_is_fresh():
    """A name or parameter that changes is changed on purpose: `python -m docs.tools.surface` writes the page anew."""
    assert surface.PAGE.read_text(encoding="utf-8") == surface.page()


def test_every_public_name_has_its_docstring_on_a_page():
    spaces = [normscope, *(value for _, value in surface.public(normscope) if inspect.ismodule(value))]
    named = {name for space in spaces for name, value in surface.public(space) if not inspect.ismodule(value)}
    lines = [line for page in DOCS.glob("api/*.md") for line in page.read_text(encoding="utf-8").splitlines()]
    assert {line.rpartition(".")[2] for line in lines if line.startswith(":::")} == {*named, "Result"}


def test_docstrings_become_sections():
    assert not doctest.testmod(docstrings).failed


def test_files_on_the_paths_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = {f"{path}.py" for path in re.findall(r"`(\w+/\w+)\.py`", text)}
    assert len(named) > 30 and not {
        path for path in named if not any((root / path).exists() for root in (ROOT, ROOT / "normscope"))
    }


LAWS = (DOCS / "laws.md").read_text(encoding="utf-8")


def test_paths_and_tests_that_the_laws_name_exist():
    """A file may be named alone."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    files = {path.name for path in [*(ROOT / "normscope").rglob("*.py"), *sources]}
    paths = {path for path in re.findall(r"`([\w./]+)`", LAWS) if "/" in path or path.endswith(".py")}
    assert len(paths) > 60 and not {
        path for path in paths if path not in files and not any((root / path).exists() for root in (ROOT, ROOT / "normscope"))
    }
    tests = set(re.findall(r"\b(test_\w+)", LAWS)) - {path.stem for path in sources}
    assert len(tests) > 40 and not tests - set(re.findall(r"def (test_\w+)", "".join(sources.values())))


def test_every_address_that_is_read_is_reviewed_in_the_laws():
    reviewed = LAWS.partition("Addresses and sizes of memory")[2].partition("\n## ")[0]
    for path in (ROOT / "normscope").rglob("*.py"):
        if re.search(r"data_ptr|_cdata|untyped_storage", path.read_text(encoding="utf-8")):
            assert f"`{path.relative_to(ROOT / 'normscope')}`" in reviewed, path


def test_slugs_are_those_of_github():
    assert slug("The path of `ns.lipschitz`") == "the-path-of-nslipschitz" and "cells" in anchors("## Cells")


def test_examples_are_read_for_the_type_checker():
    """`make types` checks them."""
    found = examples.sources()
    assert {"readme", "start", "add_a_rule", "bracket", "first_look_notebook"} <= found.keys()
    assert all(compile(code, name, "exec") and "ns." in code for name, code in found.items())
