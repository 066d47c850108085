"""Outside graph/ and rules/ nothing asks for an operation's name or for the places of its arguments: see rules/readings.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import normscope
from normscope.rules.registry import registry

ROOT = Path(normscope.__file__).parent
FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] not in ("graph", "rules", "lab")  # the lab names what its models are made of
]


def questions(source: str) -> Iterator[str]:
    """Where a module asks: `node.op` in anything but text, `node.args[…]`, or a table of names of operations."""
    tree = ast.parse(source)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "op":
            parent = parents[node]
            shown = isinstance(
                parent, (ast.FormattedValue, ast.BoolOp, ast.GeneratorExp)
            )  # {node.op}, path or node.op, m.op for m in
            if not shown and not (isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name)):  # Row(name, node.op)
                yield f"line {node.lineno}: {ast.unparse(parents[node])}"
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "args":
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            entries = node.keys if isinstance(node, ast.Dict) else node.elts
            names = [entry.value for entry in entries if isinstance(entry, ast.Constant) and isinstance(entry.value, str)]
            if len(names) > 1 and len(names) == len(entries) and registry.rules.keys() >= set(names):
                yield f"line {node.lineno}: {', '.join(names)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_asks_for_the_name_of_an_operation(path):
    assert not list(questions(path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        'node.op == "linear"',
        'node.op in ("linear", "conv2d")',
        'node.op.startswith("conv")',
        "weight = node.args[1]",
        "operations = [node.op for node in graph]",
        'PLACES = {"batch_norm": 1, "layer_norm": 2}',
        "PLACES.get(node.op)",
        "PLACES[node.op]",
    ],
)
def test_the_check_sees_what_it_should(source):
    assert list(questions(source))


@pytest.mark.parametrize("source", ['f"{node.op} at {node.path}"', "name = node.path or node.op", "Row(node.op)", "call.args"])
def test_an_operation_may_be_shown(source):
    assert not list(questions(source))
