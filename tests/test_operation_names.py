"""Outside graph/ and rules/ nothing asks for an operation's name or for the places of its arguments: see rules/readings.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import normscope
from normscope.rules.registry import registry

ROOT = Path(normscope.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in ("graph", "rules")]
PASSED_ON = (ast.FormattedValue, ast.JoinedStr, ast.GeneratorExp, ast.Starred, ast.IfExp)


def questions(source: str, tables: bool = True) -> Iterator[str]:
    """Where a module asks: `node.op` in anything but text, places of arguments, or a table of names of operations."""
    tree = ast.parse(source)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if (
            (isinstance(node, ast.Attribute) and node.attr == "op" and not is_shown(node, parents))
            or (is_named_op(node) and not called(parents[node], "isinstance"))
            or (isinstance(node, ast.Subscript) and is_arguments(node.value))
            or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and is_arguments(node.value))
            or is_placed_argument(node)
        ):
            yield f"line {node.lineno}: {ast.unparse(parents[node])}"
        elif tables and isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            entries = node.keys if isinstance(node, ast.Dict) else node.elts
            names = [entry.value for entry in entries if isinstance(entry, ast.Constant) and isinstance(entry.value, str)]
            if len(names) > 1 and len(names) == len(entries) and registry.rules.keys() >= set(names):
                yield f"line {node.lineno}: {', '.join(names)}"


def is_shown(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a name of an operation ends in text: in an f-string, joined, as `path or op`, or in a row that is shown."""
    top, within_text = node, False
    while isinstance(parents[top], PASSED_ON) or is_path_or_op(parents[top]):
        top = parents[top]
        within_text = within_text or isinstance(top, (ast.JoinedStr, ast.BoolOp))
    parent = parents[top]
    row = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id[0].isupper()
    joined = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr in ("join", "fromkeys")
    asked = isinstance(parent, (ast.Compare, ast.Subscript, ast.Attribute, ast.Match))
    return row or joined or (within_text and not asked)


def is_path_or_op(node: ast.AST) -> bool:
    return isinstance(node, ast.BoolOp) and isinstance(node.values[0], ast.Attribute) and node.values[0].attr == "path"


def is_arguments(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "args"


def called(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def is_named_op(node: ast.AST) -> bool:
    """getattr(node, "op")."""
    return called(node, "getattr") and any(isinstance(part, ast.Constant) and part.value == "op" for part in node.args)


def is_placed_argument(node: ast.AST) -> bool:
    """node.argument(1, …)."""
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "argument"
    return method and bool(node.args) and isinstance(node.args[0], ast.Constant)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_asks_for_the_name_of_an_operation(path):
    lab = path.relative_to(ROOT).parts[0] == "lab"  # names what its models are made of, and reads no graph
    assert not list(questions(path.read_text(), tables=not lab))


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
        'f"{node.op}" == "linear"',
        'getattr(node, "op") == "linear"',
        "is_convolution(node.op)",
        "str(node.op)",
        'name = node.op or ""',
        '(node.path or node.op).startswith("conv")',
        'any(op == "linear" for op in (node.op for node in graph))',
        "x, weight, bias = node.args",
        'weight = node.argument(1, "weight")',
        "match node.op:\n    case 'linear': pass",
    ],
)
def test_the_check_sees_what_it_should(source):
    assert list(questions(source))


@pytest.mark.parametrize("source", ['f"{node.op} at {node.path}"', "name = node.path or node.op", "Row(node.op)", "f(*call.args)"])
def test_an_operation_may_be_shown(source):
    assert not list(questions(source))
