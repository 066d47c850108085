"""What mkdocstrings shows of docstrings: `docs/tools/docstrings.py`, applied to each as it is loaded."""

from __future__ import annotations

from typing import Any

from griffe import Class, Docstring, Extension, Function, Object

from docs.tools.docstrings import sections


class Sections(Extension):
    """Rewrites every docstring as it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        if isinstance(obj, Function):
            names, title = {parameter.name for parameter in obj.parameters}, "Args"
        elif isinstance(obj, Class):
            names, title = {name for name, member in obj.members.items() if member.is_attribute}, "Attributes"
        else:
            names, title = set(), ""
        obj.docstring = Docstring(sections(obj.docstring.value, names, title), parent=obj, lineno=obj.docstring.lineno)
