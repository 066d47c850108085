"""Results as JSON, in one way: infinity is the string "inf", NaN is null, a number that no float holds is text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from normscope.core.magnitude import Magnitude, json_number
from normscope.core.text import encodable


def plain(content: Any) -> Any:
    """The JSON values of nested lists, mappings, tensors, arrays, numbers and dataclasses; anything else becomes its text.

    >>> plain({"a": [1, math.inf, math.nan], "b": Magnitude.from_log10(400), "c": (True, None)})
    {'a': [1, 'inf', None], 'b': '1.00e+400', 'c': [True, None]}
    """
    if content is None or isinstance(content, (str, bool, int)):
        return content
    if isinstance(content, float):
        return json_number(float(content))
    if isinstance(content, Magnitude):
        return plain(float(content)) if -300 < content.log10 < 300 or not content else str(content)
    if isinstance(content, Mapping):
        return {str(key): plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    if hasattr(content, "tolist"):  # a tensor, an array, or a number of numpy
        return plain(content.tolist())
    if hasattr(content, "to_dict"):
        return plain(content.to_dict())
    return named(content, *content.__dataclass_fields__) if is_dataclass(content) else str(content)


def named(content: Any, *names: str) -> dict[str, Any]:
    """The JSON values of some attributes, by name.

    >>> named(3 + 4j, "real", "imag")
    {'real': 3.0, 'imag': 4.0}
    """
    return {name: plain(getattr(content, name)) for name in names}


def encode(content: Any) -> str:
    """JSON text that every parser reads.

    >>> print(encode({"loss": math.nan, "name": "ε"}))
    {
     "loss": null,
     "name": "ε"
    }
    """
    return encodable(json.dumps(plain(content), indent=1, ensure_ascii=False, allow_nan=False))


def numbers(values: Any) -> np.ndarray:
    """Nested lists of what `plain` made of floats, as an array of floats."""
    return np.vectorize(number, otypes=[float])(np.array(values, dtype=object)) if np.size(values) else np.zeros(np.shape(values))


def logarithm(value: float | str | None) -> Magnitude:
    """The magnitude whose log10 `plain` wrote."""
    return Magnitude.from_log10(number(value))


def number(value: float | str | None) -> float:
    """What `plain` made of a float, as a float again; files of earlier versions have NaN as text.

    >>> number("inf"), number(None), number(1.5), number("nan")
    (inf, nan, 1.5, nan)
    """
    return math.nan if value is None else float(value)
