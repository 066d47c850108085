"""Arrays of NumPy that share memory with tensors: Python reads them where no operation of torch is seen."""

from __future__ import annotations

import gc
import types
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

MANY = 100_000  # objects that are looked into
ARRAYS = (np.ndarray, bytearray, memoryview, array)
LEFT = (types.ModuleType, types.FrameType, torch.dtype, str, bytes, int, float, complex, type(None))
FOREIGN = ("torch", "numpy", "builtins", "typing", "abc", "collections", "functools")


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether something other than torch may hold its memory: such memory is never resized."""
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def shared_with_arrays(root: Any, storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether an array within reach of an object shares memory with storages."""
    lent = [torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for storage in storages]  # type: ignore[call-overload]
    return any(np.may_share_memory(np.asarray(one), other) for one in (_arrays(root) if lent else ()) for other in lent)


def _arrays(root: Any) -> Iterator[Any]:
    seen: dict[int, Any] = {}  # kept, so that no other gets the id of one
    waiting = [root]
    while waiting and len(seen) < MANY:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, LEFT):
            continue
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
