"""What happens when a step is not like the others: the user's own actions, and samples that no schedule asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from normscope._watch.guard import Guard
from normscope.core.errors import InputError
from normscope.findings.finding import Finding

Action = Callable[[Finding], None]
KINDS = {  # what a user may wait for, and the rules that say so
    "spike": ("loss-spike", "exploding-gradient"),
    "not-finite": ("loss-not-finite", "weight-not-finite"),
    "finding": (),
}
AFTER = 3  # steps that are sampled after something happened


def checked(kind: str, action: Action) -> tuple[str, Action]:
    if kind not in KINDS:
        raise InputError(f"no kind {kind!r}: choose from {', '.join(KINDS)}")
    if not callable(action):
        raise InputError(f"an action must be a function that takes a finding, got {type(action).__name__}")
    return kind, action


class Reaction:
    """Findings that began and were not reacted to yet, and what to do about them.

    Findings come from the loop and from the writer's thread; actions are called in the loop, each once for every finding.
    """

    def __init__(self, guard: Guard, actions: Sequence[tuple[str, Action]]) -> None:
        """actions: with the kind that each waits for; more may come at any time."""
        self.guard, self.actions = guard, actions
        self.begun: deque[Finding] = deque()
        self.samples = 0  # still to be taken

    def note(self, finding: Finding) -> None:
        """From any thread."""
        if finding.state == "now":
            self.begun.append(finding)

    def run(self) -> None:
        """Call the actions for all that began. One that raises is switched off and noted; the loop goes on."""
        while self.begun:
            finding = self.begun.popleft()
            kinds = {kind for kind, names in KINDS.items() if not names or finding.name in names}
            if finding.name == "exploding-gradient" and "not finite" in finding.message:
                kinds = kinds - {"spike"} | {"not-finite"}
            if kinds != {"finding"} and "times" not in finding.evidence:  # the first time only
                self.samples = AFTER
            for number, (kind, action) in enumerate(self.actions):
                if kind in kinds:
                    self.guard.run(f"action {number} on {kind}", self._call, action, finding)

    def _call(self, action: Action, finding: Finding) -> None:
        with torch._C._EnableTorchFunction():  # it is the user's own code
            action(finding)
