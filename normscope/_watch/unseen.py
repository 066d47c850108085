"""Steps that no hook of the optimizer sees, such as those of compiled code: nothing is recorded of them, and that is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

SECOND, SEVERAL = 2, 5  # calls of `Watch.step` without a step of the optimizer
MESSAGE = (
    "the weights change, but no step of the watched optimizer was seen, so these steps are not recorded: "
    "(a) if a compiled function calls optimizer.step(), call it outside of the compiled function; "
    "(b) if another optimizer makes the steps, pass that one to ns.watch"
)


class UnseenSteps:
    """Told of every call of `Watch.step` and of every step of the optimizer. say: called once with what to do.

    Micro-batches, and steps that a GradScaler skips, leave the weights as they are; so they are no unseen steps. In a loop that
    makes a step per call nothing is compared.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], say: Callable[[str], None]) -> None:
        self.parameters, self.say = parameters, say
        self._calls = self._version = 0

    def seen(self) -> None:
        self._calls = 0

    def called(self) -> None:
        self._calls += 1
        if self._calls == SECOND:
            self._version = self._versions()
        elif self._calls == SEVERAL and self._versions() != self._version:
            self.say(MESSAGE)

    def _versions(self) -> int:
        """Grows with every write to a weight."""
        return sum(parameter._version for parameter in self.parameters.values())
