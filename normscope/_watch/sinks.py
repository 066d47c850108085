"""Rows and findings in other tools as a training runs: W&B, trackio, MLflow, TensorBoard, or a web address for findings.

Sinks work on a thread of their own: a slow or dead one delays neither training nor the recording, and one that fails is noted and
switched off.
"""

from __future__ import annotations

import importlib
import json
import queue
import re
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol

import torch

from normscope._watch.exporters.tensorboard import TensorBoard, tagged
from normscope._watch.guard import Guard, warn
from normscope.core.errors import InputError
from normscope.findings.finding import Finding

METRICS = ("spectral_norm", "input_variance", "gradient_norm", "effective_lr", "write_ratio", "attention_logit")  # of each layer
PREFIX, PROJECT = "normscope/", "normscope"
MOST_WAITING, PATIENCE = 1_000, 10.0  # rows and findings that a slow sink may be behind, and seconds that closing waits for it
AT_ONCE, NOT_IN_MLFLOW = 1_000, re.compile(r"[^\w\-. :/]")  # metrics that it takes in one call, and what their names cannot hold
TIMEOUT = 5.0  # of one message to a web address

Row = Mapping[str, Any]


class Sink(Protocol):
    """What `sinks=` takes beside names: an object with these methods."""

    def row(self, row: Row, layers: Sequence[str]) -> None: ...
    def finding(self, finding: Finding) -> None: ...
    def close(self) -> None: ...


class WandB:
    """Into a run of its own, beside one that is open and in its group.

    One run has one step: rows in yours would move it, and what you log at a step that has passed is lost.
    """

    def __init__(self, run: Path) -> None:
        wandb = _package("wandb")
        theirs, place = wandb.run, {"project": PROJECT}
        if theirs is not None:
            place = {"project": theirs.project, "entity": theirs.entity, "group": theirs.group or theirs.name, "job_type": PROJECT}
        self.run = wandb.init(name=run.name, reinit="create_new", **place)
        self.run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def row(self, row: Row, layers: Sequence[str]) -> None:
        self.run.log({f"{PREFIX}step": row["step"], **_numbers(row, layers)})

    def finding(self, finding: Finding) -> None:
        self.run.alert(title=f"{finding.rule} {finding.name}", text=str(finding))

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """Into the run that is open, else into one of its own: to open another would end yours."""

    def __init__(self, run: Path) -> None:
        trackio = _package("trackio")
        known = getattr(trackio, "context_vars", None)
        theirs = known.current_run.get() if known is not None else None
        ended = getattr(theirs, "_stop_flag", None)  # it stays the current one when it has ended
        self.own = theirs is None or (ended is not None and ended.is_set())
        self.run: Any = trackio.init(project=PROJECT, name=run.name, resume="allow") if self.own else theirs

    def row(self, row: Row, layers: Sequence[str]) -> None:
        self.run.log(_numbers(row, layers), step=int(row["step"]))

    def finding(self, finding: Finding) -> None:
        self.run.log({f"{PREFIX}finding": str(finding)}, step=finding.first_step)

    def close(self) -> None:
        if self.own:
            self.run.finish()


class MLflow:
    """Into the run that is active in the thread that trains, else into one of its own."""

    def __init__(self, run: Path) -> None:
        mlflow = _package("mlflow")
        active = mlflow.active_run()
        self.own, self.client, self.metric = active is None, mlflow.MlflowClient(), mlflow.entities.Metric
        self.id = (mlflow.start_run(run_name=run.name) if active is None else active).info.run_id
        if self.own:
            mlflow.end_run()  # it is written to by its id, not as the one that is active

    def row(self, row: Row, layers: Sequence[str]) -> None:
        when, step = int(1000 * row["time"]), int(row["step"])
        metrics = [self.metric(NOT_IN_MLFLOW.sub("_", name), value, when, step) for name, value in _numbers(row, layers).items()]
        for first in range(0, len(metrics), AT_ONCE):  # one at a time takes a transaction each
            self.client.log_batch(self.id, metrics=metrics[first : first + AT_ONCE])

    def finding(self, finding: Finding) -> None:
        self.client.set_tag(self.id, f"{PREFIX}{finding.rule}", str(finding))

    def close(self) -> None:
        if self.own:
            self.client.set_terminated(self.id)


class Board:
    """TensorBoard's files, in the run's directory."""

    def __init__(self, run: Path) -> None:
        self.board = TensorBoard(run / "tensorboard", METRICS)

    def row(self, row: Row, layers: Sequence[str]) -> None:
        self.board(row, layers)

    def finding(self, finding: Finding) -> None:
        self.board.writer.add_text(f"finding/{finding.rule}", str(finding), finding.first_step)
        self.board.writer.flush()

    def close(self) -> None:
        self.board.close()


class Webhook:
    """Posts every finding that begins as JSON: `text`, which chats show, and the finding with all its fields."""

    def __init__(self, address: str, run: Path) -> None:
        self.address, self.name = address, run.name

    def row(self, row: Row, layers: Sequence[str]) -> None: ...

    def finding(self, finding: Finding) -> None:
        content = {"text": f"{self.name}: {finding}", "run": self.name, "finding": finding.to_dict()}
        request = urllib.request.Request(
            self.address, json.dumps(content, default=str).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT):
            pass

    def close(self) -> None: ...


NAMED: dict[str, Callable[[Path], Sink]] = {"wandb": WandB, "trackio": Trackio, "mlflow": MLflow, "tensorboard": Board}


class Sinks:
    """Hands rows and findings to all sinks, in order, on a thread of its own."""

    def __init__(self, guard: Guard) -> None:
        self.guard, self.sinks = guard, list[tuple[str, Sink]]()
        self.dropped, self._told, self._closed = 0, set[str](), False
        self._own: list[tuple[str, Sink]] = []  # objects of the user's, which are closed only if the recording began
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="normscope sinks", daemon=True)

    def open(self, wanted: Sequence[str | Sink], run: Path) -> None:
        """In the first process; a name that means nothing, or a package that is not there, is refused."""
        for one in wanted:
            if isinstance(one, str) and one not in NAMED and not one.startswith(("http://", "https://")):
                raise InputError(f"no sink {one!r}: choose from {', '.join(NAMED)}, or give a web address for findings")
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        self._own = [(type(one).__name__, one) for one in wanted if not isinstance(one, str)]
        for name in (one for one in wanted if isinstance(one, str)):
            try:
                self.sinks.append((name, NAMED[name](run) if name in NAMED else Webhook(name, run)))
            except InputError:
                raise
            except Exception as error:  # a service that does not answer is no reason not to train
                warn(f"normscope.watch continues without {name}: {type(error).__name__}: {error}")

    def start(self) -> None:
        self.sinks += self._own
        if self.sinks:
            self._thread.start()

    def row(self, row: Row, layers: Sequence[str]) -> None:
        self._put(("row", (row, layers)))

    def finding(self, finding: Finding) -> None:
        """Those that begin, once each."""
        if finding.state == "now" and finding.key not in self._told:
            self._told.add(finding.key)
            self._put(("finding", (finding,)))

    def close(self) -> None:
        """Wait for what is still to be sent, but not for long."""
        if self._closed:
            return
        self._closed = True
        if not self._thread.is_alive():
            self._end()
            return
        self._put(None)
        self._thread.join(PATIENCE)
        left = self._waiting.qsize() + self.dropped
        if self._thread.is_alive() or left:
            warn(f"normscope.watch: {', '.join(name for name, _ in self.sinks)} did not take {left} rows and findings in time")

    def _put(self, item: tuple[str, tuple[Any, ...]] | None) -> None:
        if not self.sinks:
            return
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            for name, sink in self.sinks:
                self.guard.run(f"sink {name}", methodcaller(item[0], *item[1]), sink)
        self._end()

    def _end(self) -> None:
        for name, sink in self.sinks:
            self.guard.run(f"end of sink {name}", methodcaller("close"), sink)


def _numbers(row: Row, layers: Sequence[str]) -> dict[str, float]:
    return {f"{PREFIX}{tag}": value for tag, value in tagged(row, layers, METRICS)}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{name} is not installed: pip install {name}") from error
