"""What the recorder computes is nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

DEVICES = ("cpu", "cuda")


@contextmanager
def unrecorded() -> Iterator[None]:
    """What is computed here is the recorder's own: no gradient, no autocast, and unseen by modes that count or trace."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_disable_current_modes())
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
