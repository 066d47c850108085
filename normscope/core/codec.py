"""Results as JSON, in one way: infinity is the string "inf", NaN is null, a number that no float holds is text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from normscope.core.magnitude import Magnitude, json_number
from normscope.core.text import encodable


def plain(content: Any) -> Any:
    """The JSON values of nested lists, mappings, tensors, arrays and numbers; anything else becomes its text.

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
    return str(content)


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
