"""Which of the tensors that a model returns is meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._pytree import keystr, tree_flatten_with_path

from normscope.core.errors import InputError
from normscope.graph.canonical import is_float

MAIN_OUTPUTS = ("logits", "last_hidden_state")  # taken, in this order, where a model returns several and none is asked for


def chosen_output(outputs: Any, wanted: str | int | None) -> Any:
    """The floating-point leaf of what a model returns that has this name or position; without one, the only or the main one."""
    return _floats(outputs)[_chosen(outputs, wanted)][1]


def which_output(outputs: Any, wanted: str | int | None) -> list[str]:
    """A note that says which output was chosen, where there are others."""
    place, listed = _chosen(outputs, wanted), [name for name, _ in _floats(outputs)]
    others = ", ".join(listed[:place] + listed[place + 1 :])
    return [f"the output is {listed[place]}; output= chooses another: {others}"] if others else []


def _chosen(outputs: Any, wanted: str | int | None) -> int:
    listed = [name for name, _ in _floats(outputs)]
    if wanted is None:
        main = [listed.index(name) for name in MAIN_OUTPUTS if name in listed]
        if len(listed) == 1 or main:
            return main[0] if main else 0
        names = ", ".join(listed) or "none"
        raise InputError(f"the model returns {len(listed)} floating-point tensors ({names}): choose one with output=")
    for position, name in enumerate(listed):
        if wanted in (name, position) or str(wanted) == name:
            return position
    raise InputError(f"no output {wanted!r}: choose from {', '.join(listed) or 'none'}")


def _floats(outputs: Any) -> list[tuple[str, Any]]:
    """The floating-point leaves of what a model returns, each with its name or position."""
    if isinstance(outputs, Mapping):  # a class of its own need not have told torch the names of its parts
        outputs = dict(outputs)
    return [(_name(path) or "0", leaf) for path, leaf in tree_flatten_with_path(outputs)[0] if is_float(leaf)]


def _name(path: Any) -> str:
    """['parts'][0] → parts.0"""
    return keystr(path).replace("'", "").replace("][", ".").strip("[].")
