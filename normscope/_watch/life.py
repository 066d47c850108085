"""How a recording goes, or how it ended: what its status, its lock and its events say together.

running       its process holds the lock, or gave a sign within the last minutes where there is no lock to ask
finished      closed as it should be
failed        an exception, or an exit with an error, left the `with` block
interrupted   Ctrl-C did
killed        the process ended without a word
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normscope._watch.growing import LIFE

BEAT = 10.0  # seconds between signs of life, and between fsyncs
STALE = 120.0  # seconds without one after which a run without a lock to ask counts as killed
STATES = ("running", "failed", "killed", "interrupted", "finished")  # of several processes the first of these counts
LONGEST = 500  # characters of an error


@dataclass(frozen=True)
class Life:
    """state: one of STATES. step: the last one of the training, as far as it is known. error: the exception of a failed run."""

    state: str
    step: int | None = None
    error: str = ""

    def __str__(self) -> str:
        if self.state in ("running", "finished"):
            return "still being written" if self.state == "running" else "finished"
        where = "" if self.step is None else f" at step {self.step:,}"
        return f"{self.state}{where}" + (f" ({self.error})" if self.error else "")

    @staticmethod
    def together(lives: Sequence[Life]) -> Life:
        """Of all processes of a run."""
        first = min(lives, key=lambda life: STATES.index(life.state))
        return Life(first.state, max((life.step for life in lives if life.step is not None), default=None), first.error)


FINISHED = Life("finished")


def ending(error: BaseException | None) -> Life:
    """How a run ends that this exception leaves.

    >>> ending(SystemExit(0)).state, ending(SystemExit(2)).error, ending(KeyboardInterrupt()).state
    ('finished', 'SystemExit: 2', 'interrupted')
    """
    left = isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and error.code == 0))
    if error is None or isinstance(error, GeneratorExit) or left:
        return FINISHED
    if isinstance(error, KeyboardInterrupt):
        return Life("interrupted")
    try:
        said = " ".join(str(error).split())
    except Exception:
        said = "an error that cannot be printed"
    return Life("failed", error=f"{type(error).__name__}: {said}"[:LONGEST].rstrip(": "))


def judged(status: Mapping[str, Any] | None, events: Sequence[Mapping[str, Any]], held: bool | None, updated: float) -> Life:
    """Of one process. held: whether its lock is held, None if unknown. updated: when it last wrote, for runs without a status.

    Where the lock can be asked no clock is read, so one that goes backwards confuses nothing; elsewhere a sign of life in the
    future counts as much as one in the past, since a process that lives corrects it at the next.
    """
    if status is not None:
        state, step, beat = status["state"], status["step"], float(status["beat"])
        if state in STATES[1:]:
            return Life(state, step, str(status.get("error") or "")[:LONGEST])
    else:
        step, beat = None, updated
        kinds = [event["kind"] for event in events if event["kind"] in LIFE]
        if kinds and kinds[-1] == "closed":
            return FINISHED
    alive = abs(time.time() - beat) < STALE if held is None else held
    return Life("running" if alive else "killed", step)
