"""What the recorder computes is nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack

DEVICES = ("cpu", "cuda")
Given = ParamSpec("Given")
Result = TypeVar("Result")


def unrecorded() -> AbstractContextManager[object]:
    """What is computed here is the recorder's own: no gradient, no autocast, and unseen by modes that count or trace."""
    cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if cast or _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
        return _covered()
    return torch.no_grad()  # as a rule; it is entered many times in a step


def aside(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function of the recorder that computes with nothing of the user's but tensors."""

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with unrecorded():
            return function(*args, **kwargs)

    return called


@contextmanager
def _covered() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_disable_current_modes())
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
