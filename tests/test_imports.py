"""Imports point one way, and no module hides a public function."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import normscope
from normscope.claims import claim, verdicts
from normscope.core import papers
from normscope.lab import runner

ROOT = Path(normscope.__file__).parent
ORDER = (
    "core", "digits", "graph", "operators", "rules", "certify", "symmetry", "geometry", "curvature", "optim", "ledger", "floors", "bounds",
    "findings", "_watch", "auditing", "_doctor", "_checkpoint", "testing", "report", "dashboard", "lab", "claims", "cli", "__main__",
)  # fmt: skip
FREE = ("version", "__init__")  # the version may be read anywhere; the top package gathers the public names
MODULES = ("certify", "claims", "curvature", "geometry", "bounds", "lab", "optim", "rules")  # namespaces
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def part(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return path.parts[0].removesuffix(".py")


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """What runs when a module is imported: everything but functions and branches for type checkers."""
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield statement
        elif isinstance(statement, ast.If) and is_type_checking(statement.test):
            yield from imports(statement.orelse)
        elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from imports(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from imports(handler.body)


def targets(source: str) -> Iterator[str]:
    """The parts of normscope that a module imports; `normscope` itself counts as the audit, the last of its names."""
    for statement in imports(ast.parse(source).body):
        if isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, "imports are absolute"
            names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        else:
            names = [alias.name for alias in statement.names]
        for name in names:
            top, *rest = name.split(".")
            if top == "normscope":
                yield rest[0] if rest and rest[0] in (*ORDER, *FREE) else "auditing"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_one_way(path):
    own = part(path)
    if own in FREE:
        return
    assert own in ORDER, f"{own} has no place in the order of imports"
    for target in targets((ROOT / path).read_text()):
        assert target in FREE or ORDER.index(target) <= ORDER.index(own), f"{path} imports {target}"


def test_the_check_sees_what_it_should():
    source = """
import normscope.cli.audit
from typing import TYPE_CHECKING
from normscope import lab, lipschitz
if TYPE_CHECKING:
    from normscope.testing import check_rule
else:
    from normscope.rules import registry
try:
    from normscope.graph.graph import Node
except ImportError:
    from normscope import version
class Inside:
    from normscope.core import data
def later():
    from normscope.certify import upper
"""
    assert list(targets(source)) == ["cli", "lab", "auditing", "rules", "graph", "version", "core"]


def modules_imported(source: str) -> Iterator[str]:
    """Every module of normscope that a file imports, in functions and for type checkers too."""
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)


def test_certify_has_no_circles():
    """Neither when it runs nor for type checkers: every file can be read after those that it imports."""
    files = {f"normscope.{'.'.join(path.with_suffix('').parts)}": path for path in FILES if part(path) == "certify"}
    reads = {name: {*modules_imported((ROOT / path).read_text())} & {*files} for name, path in files.items()}
    while done := {name for name, needed in reads.items() if not needed}:
        reads = {name: needed - done for name, needed in reads.items() if name not in done}
    assert not reads, f"these import each other: {sorted(reads)}"


def test_the_path_of_a_bound_is_short():
    """Everywhere a bound passes ten files or fewer, and those that docs/architecture.md names are there."""
    path = Path(__file__).parent.parent.joinpath("docs", "architecture.md").read_text().split("## ")[1]
    everywhere, on_a_region = (re.findall(r"`(\w+/\w+\.py)`(?=.* \|)", part) for part in path.split("On a region"))
    assert {Path(name) for name in (*everywhere, *on_a_region)} <= {*FILES}
    assert 5 < len(everywhere) <= 10 and on_a_region


PAPERS = ("cli/lab.py", "cli/claims.py", "cli/data.py")  # the commands of lab and claims


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_library_never_imports_lab_or_claims(path):
    """Not in functions either: they sit on top of the library."""
    if part(path) in ("lab", "claims") or str(path) in PAPERS:
        return
    used = {name for name in modules_imported((ROOT / path).read_text()) if name.startswith(("normscope.lab", "normscope.claims"))}
    assert not used


def test_what_reports_know_of_the_papers_is_what_they_write():
    known = papers.LAB_SCHEMA, papers.LEDGER_SCHEMA, papers.CLAIM_VERDICTS
    assert known == (runner.Outcome.schema, claim.Ledger.schema, verdicts.VERDICTS)


def test_every_part_of_the_order_exists():
    assert {part(path) for path in FILES} == {*ORDER, *FREE}


def test_no_module_hides_a_public_function():
    """`import normscope.audit` would replace the function `normscope.audit` by a module of that name."""
    public = {name for name in normscope.__all__ if name not in MODULES}
    packages = {path.parent.name for path in FILES if path.name == "__init__.py"}
    assert not public & ({part(path) for path in FILES} | packages)
    assert all(inspect.ismodule(getattr(normscope, name)) for name in MODULES)
    assert all(not inspect.ismodule(getattr(normscope, name)) for name in public)


@pytest.mark.parametrize("module", [normscope, *(getattr(normscope, name) for name in MODULES)], ids=lambda module: module.__name__)
def test_public_names_exist_once_and_in_order(module):
    assert sorted(set(module.__all__)) == sorted(module.__all__) and {*module.__all__} <= {*dir(module)}
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("name", sorted(normscope.MOVED))
def test_names_of_earlier_releases_still_work(name):
    namespace, attribute = normscope.MOVED[name].split(".")
    with pytest.warns(DeprecationWarning, match=f"ns.{name} is now ns.{normscope.MOVED[name]}"):
        assert getattr(normscope, name) is getattr(getattr(normscope, namespace), attribute)


@pytest.mark.parametrize(
    "command", [["-c", "import normscope"], ["-m", "normscope", "--version"], ["-m", "normscope", "--help"]], ids=" ".join
)
def test_what_is_not_used_is_not_imported(command):
    """Neither torch nor any other package that takes long to import."""
    ran = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()}
    assert "normscope" in imported and not imported & {"torch", "scipy", "sklearn", "plotly", "pyarrow", "starlette"}


def test_rich_is_imported_where_its_random_number_is_put_back():
    direct = [str(path) for path in FILES if re.search(r"^ *(from|import) rich", (ROOT / path).read_text(), re.MULTILINE)]
    assert direct == ["cli/lab.py", "core/progress.py", "core/rendering.py"]


DRAWN = """
import random, tempfile
import numpy as np, torch
import normscope as ns
states = lambda: (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)), torch.randn(8, 4)
optimizer, before = torch.optim.SGD(model.parameters(), 0.1), states()
with ns.watch(model, optimizer, run=tempfile.mkdtemp() + "/run"):
    model(x).square().mean().backward()
    optimizer.step()
assert states() == before, "watch"
for call in (ns.lipschitz, ns.audit, ns.doctor, ns.symmetries):
    str(call(model, x))
    assert states() == before, call
"""


def test_no_random_number_is_drawn_the_first_time_either():
    """In a process of its own, in which nothing has been imported."""
    subprocess.run([sys.executable, "-c", DRAWN], check=True, capture_output=True)
