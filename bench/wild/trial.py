"""One model of the sweep: built, audited, examined and checked, in a process of its own with limits on time and memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import normscope as ns
from bench.wild.checks import Known
from bench.wild.transformers_models import NotBuilt
from normscope.certify.unbounded import UNPROVED
from normscope.core.errors import ExportError, InputError, InternalError, NoConstant, NormscopeError, Refusal, UnforeseenError

Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]
Record = dict[str, Any]

SECONDS, GIBIBYTES = 120, 6

# in the order in which a table shows them
OUTCOMES = (
    "finite", "infinite", "refused: unproved", "refused: the model", "refused: no rule", "refused: not traceable", "refused: other",
    "crash", "too slow", "too large", "not built",
)  # fmt: skip


def trial(name: str, build: Callable[[str], Built], seconds: int = SECONDS, gibibytes: int = GIBIBYTES) -> Record:
    """What came of one model: its outcome, and the contradictions that were found."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _in_child(name, build, seconds, gibibytes, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    lines = text.decode().splitlines()
    record: Record = json.loads(lines[-1]) if lines else {}
    if not record.pop("done", False):
        slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU)
        ended = f"more than {seconds} s" if slow else f"process ended with status {status}"
        if "outcome" in record:  # the audit is done: what came after it is not
            record["unfinished"] = f"{record['stage']}: {ended}"
        else:
            record["outcome"] = "not built" if "model" not in record else "too slow" if slow else "too large"
            record["why"] = ended
    return {"name": name, **record}


def _in_child(name: str, build: Callable[[str], Built], seconds: int, gibibytes: int, writer: int) -> None:
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        os.dup2(quiet, 1)
        signal.alarm(20 * seconds)  # of the clock: a machine may have other work
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (gibibytes << 30,) * 2)
        record: Record = {}

        def note(**more: Any) -> None:
            record.update(more)
            os.write(writer, (json.dumps(record) + "\n").encode())

        examine(name, build, note)
        note(done=True)
    finally:
        os._exit(0)


def examine(name: str, build: Callable[[str], Built], note: Callable[..., None]) -> None:
    """Audit, doctor and symmetries of one model, each noted as soon as it is known."""
    torch.set_num_threads(1)
    try:
        model, example = build(name)
    except NotBuilt as error:
        note(outcome="not built", why=str(error))
        return
    except BaseException as error:
        note(outcome="not built", why=f"{type(error).__name__}: {str(error)[:150]}")
        return
    size = sum(value.numel() for value in model.parameters())
    shapes = {key: list(value.shape) for key, value in example.items()}
    note(model=type(model).__name__, parameters=size, example=shapes, stage="audit", wrong=[])
    start = time.process_time()
    audit, output = None, None
    try:
        try:
            audit = ns.audit(model, example, effort=0.2)
        except InputError as error:
            if "choose one with output=" not in str(error):
                raise
            output = 0
            audit = ns.audit(model, example, output=output, effort=0.2)
        note(seconds=round(time.process_time() - start, 2), output=output, **judged(audit))
    except BaseException as error:
        note(seconds=round(time.process_time() - start, 2), output=output, **failed(error))
    wrong: list[str] = []
    with _collected(wrong, "checks"):
        if audit is not None:
            wrong += Known(model, example, output).contradictions(audit)
    note(stage="doctor", wrong=wrong)
    start = time.process_time()
    with _collected(wrong, "doctor"):
        findings = ns.doctor(model, example, output=output)
        note(doctor=sorted({finding.rule for finding in findings}), unchecked=len(findings.not_checked))
    note(stage="symmetries", wrong=wrong, doctor_seconds=round(time.process_time() - start, 2))
    start = time.process_time()
    with _collected(wrong, "symmetries"):
        report = ns.symmetries(model, example)
        note(groups=len(report.groups), scale_free=len(report.scale_free_weights))
        note(symmetry_seconds=round(time.process_time() - start, 2))
        wrong += Known(model, example, output).wrong_symmetry(report)
    note(wrong=wrong)


@contextmanager
def _collected(wrong: list[str], what: str) -> Iterator[None]:
    """An error of ours is an answer; anything else is a crash."""
    try:
        yield
    except NormscopeError as error:
        if isinstance(error, (InternalError, UnforeseenError)):
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    except Exception as error:
        wrong.append(f"{what} crashed: {_described(error)}")


def judged(audit: ns.Audit) -> Record:
    """The outcome of an audit, with the reason where there is no finite bound."""
    bracket, local = audit.bracket, audit.local
    found: Record = {
        "local": None if local is None or local.upper is None else str(local.upper),
        "lower": str(bracket.lower),
        "rows": len(audit.layers),
    }
    if bracket.upper is None:
        causes = bracket.certificate.causes if bracket.certificate is not None else ()
        text = "; ".join(causes)
        if bracket.reason == UNPROVED:
            return {**found, "outcome": "refused: unproved", "why": text[:600]}
        of_model = any(word in text for word in ("draws random", "batch statistics", "influence"))
        return {**found, "outcome": "refused: the model" if of_model else "refused: no rule", "why": text[:600]}
    if not bracket.upper.finite:
        return {**found, "outcome": "infinite", "why": bracket.reason[:600]}
    return {**found, "outcome": "finite", "upper": str(bracket.upper)}


def failed(error: BaseException) -> Record:
    """The outcome of an audit that raised."""
    if isinstance(error, (InternalError, UnforeseenError)) or not isinstance(error, NormscopeError):
        return {"outcome": "crash", "why": _described(error)}
    kind = "other"
    if isinstance(error, NoConstant) or any(word in str(error) for word in ("influence", "draws random", "fixed shapes")):
        kind = "the model"
    elif isinstance(error, ExportError):
        kind = "not traceable"
    elif isinstance(error, Refusal) and "without a rule" in str(error):
        kind = "no rule"
    return {"outcome": f"refused: {kind}", "why": f"{type(error).__name__}: {str(error)[:600]}"}


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(sys.exc_info()[2])
    place = next(
        (f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames) if "normscope" in frame.filename), ""
    )
    cause = f" from {type(error.__cause__).__name__}: {str(error.__cause__)[:200]}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {str(error)[:300]} ({place}){cause}"
