"""Arrays of NumPy that share memory with tensors: Python reads them where no operation of torch is seen."""

from __future__ import annotations

import ctypes
import gc
import types
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

MANY = 100_000  # objects that are looked into
ARRAYS = (np.ndarray, bytearray, memoryview, array)
LEFT = (types.ModuleType, types.FrameType, torch.dtype, str, bytes, int, float, complex, type(None))
FOREIGN = ("torch", "numpy", "builtins", "typing", "abc", "collections", "functools")


def shared_with_arrays(root: Any, storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether an array within reach of an object shares memory with storages, or may do so where too much is within reach."""
    written = [storage for storage in storages if storage.device.type == "cpu" and storage.nbytes()]
    # the array that `numpy()` makes would mark a storage as one whose memory an array holds
    bytes_of = [np.frombuffer((ctypes.c_ubyte * one.nbytes()).from_address(one.data_ptr()), np.uint8) for one in written]
    for one in _arrays(root) if written else ():
        if one is None:
            return any(not storage.resizable() for storage in written)
        if any(np.may_share_memory(_memory_of(one), other) for other in bytes_of):
            return True
    return False


def _memory_of(one: Any) -> np.ndarray:
    """As bytes where that is possible: numpy does not know every format of a `memoryview`."""
    return np.asarray(one) if isinstance(one, np.ndarray) or not memoryview(one).c_contiguous else np.frombuffer(one, np.uint8)


def _arrays(root: Any) -> Iterator[Any]:
    """The arrays within reach, nearest first, and None if there is more than is looked into."""
    seen: dict[int, Any] = {}  # kept, so that no other gets the id of one
    waiting = deque([root])
    while waiting:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, LEFT):
            continue
        if len(seen) == MANY:
            yield None
            return
        seen[id(value)] = value
        if isinstance(value, ARRAYS):
            yield value
        elif isinstance(value, types.FunctionType):
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
            waiting += [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        elif not isinstance(value, type) or value.__module__.partition(".")[0] not in FOREIGN:
            waiting += gc.get_referents(value)


def _names(code: types.CodeType) -> set[str]:
    """The global names that a function reads, the functions inside of it included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
