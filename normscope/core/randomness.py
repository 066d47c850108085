"""Random state that is left as it was found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from normscope.core.errors import InputError


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Whatever is drawn inside, the generators of torch, numpy and Python continue as if it had not been."""
    python, arrays = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def seed_generators(seed: int) -> None:
    """torch.manual_seed, for devices in use alone: for each other one torch keeps a stack trace of every call for ever."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def generator_of(given: torch.Generator | None) -> torch.Generator:
    """The generator that a user gave, or one that always draws the same."""
    if given is not None and not isinstance(given, torch.Generator):
        raise InputError(f"generator must be a torch.Generator (torch.Generator().manual_seed(0)), got {type(given).__name__}")
    return torch.Generator().manual_seed(0) if given is None else given


def copied(given: torch.Generator | None) -> Callable[[], torch.Generator]:
    """Generators that draw what the given one would draw from here on, each from the start."""
    state = generator_of(given).get_state()

    def fresh() -> torch.Generator:
        made = torch.Generator() if given is None else torch.Generator(given.device)
        made.set_state(state)
        return made

    return fresh


def random_states() -> list[torch.Tensor]:
    """The states of torch's global generators: the processor's, and those of devices in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
