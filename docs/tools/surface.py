"""The tables of docs/api/index.md, from the public names themselves: `python -m docs.tools.surface` writes the page.

A test compares the page with what this makes, so that no public name or parameter changes unnoticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import normscope

PAGE = Path(__file__).parent.parent / "api" / "index.md"
KINDS = ("functions", "results and inputs", "errors", "namespaces")
HEAD = """# API

`import normscope as ns` loads nothing heavy: each name is imported when it is first used. Everything below is public; all else
may change without notice. What stands after `*` is passed by name. [Functions and results](normscope.md) and
[namespaces](namespaces.md) have the docstrings. This page is made by `python -m docs.tools.surface`; a test fails when it is stale.

Parameters that several functions have mean the same in all of them:

| parameter | what it is |
| --- | --- |
| `example` | a tensor, a tuple of arguments or a dict of keyword arguments; axis 0 is the batch |
| `data` | a tensor, (inputs, targets), a `Dataset`, or an iterable of batches |
| `region` | a `Ball` or `Box` of inputs; None for all of them |
| `mode` | "eval", "train" or "batch"; "eval" unless the function's first line says otherwise |
| `output` | name or position of the output that is meant, where the model returns several |
| `select` | names or ids of what to run: rules, bounds or claims; all of them if empty |
| `progress` | None, True for a bar on stderr, or a callable (what, done, total); a total of 0 is not known |
| `generator` | what random numbers are drawn from; without it they are the same every time |
| `seed` | in place of a generator where the same numbers are drawn again: on every pass, or for every model |

Every result can be printed and shown in a notebook; `to_dict()`, `from_dict(…)` and `to_json(path)` store it with the name of its
schema; `to_html(path)` writes a page; `figures` lists what `figure(name)` draws. `normscope report` takes any of the files.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    top = dict(public(normscope))
    for kind in KINDS:
        names = {name: value for name, value in top.items() if kind_of(value) == kind}
        parts.append(f"## {kind.capitalize()}\n\n{table(names, 'ns')}")
    for name, value in top.items():
        if inspect.ismodule(value):
            parts.append(f"## `ns.{name}`\n\n{sentence(value)}\n\n{table(dict(public(value)), f'ns.{name}')}")
    return "\n".join(parts)


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name in sorted(module.__all__, key=str.lower):
        if name != "__version__":
            yield name, getattr(module, name)


def kind_of(value: Any) -> str:
    if inspect.ismodule(value):
        return "namespaces"
    if inspect.isclass(value):
        return "errors" if issubclass(value, BaseException) else "results and inputs"
    return "functions"


def table(names: dict[str, Any], prefix: str) -> str:
    rows = [f"| `{prefix}.{name}{call(value)}` | {sentence(value)} |" for name, value in names.items()]
    return "\n".join(["| name | what it is |", "| --- | --- |", *rows, ""])


def call(value: Any) -> str:
    """The names of a function's parameters, with … for what has a default; nothing for classes and values."""
    if not inspect.isroutine(value):
        return ""
    shown, keyword = [], False
    for name, parameter in inspect.signature(value).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            shown.append("*")
            keyword = True
        keyword = keyword or parameter.kind is parameter.VAR_POSITIONAL
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(f"{star}{name}{'' if parameter.default is parameter.empty else '=…'}")
    return f"({', '.join(shown)})"


def sentence(value: Any) -> str:
    """The first line of its docstring, as a cell of a table."""
    lines = (inspect.getdoc(value) or "").splitlines() if not isinstance(value, (dict, tuple, str)) else []
    return (lines[0] if lines else "").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
