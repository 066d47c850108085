"""One program against normscope: what came of it, and what is wrong with that."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from unittest.mock import patch

import torch

import normscope as ns
from normscope.certify.certifiable import certifiable_graph
from normscope.core.errors import InternalError, UnforeseenError
from tests.sweep.programs import Program, mixes, program, twin_in_double
from tests.sweep.search import Region, largest_quotient, refutes

lipschitz_module = import_module("normscope.certify.lipschitz")
LIMIT = 120  # seconds of CPU for one bracket: an answer that does not come is a failure


class NoAnswer(BaseException):
    """Within the limit. It is no Exception, which normscope would turn into a refusal."""


@dataclass
class Judged:
    """outcome: bounded, infinite or refused; why: a refusal's first line; wrong: what must not happen, in words."""

    seed: int
    outcome: str
    why: str = ""
    wrong: list[str] = field(default_factory=list)


def judge(seed: int) -> Judged:
    made, example = program(seed)
    twin = twin_in_double(made)
    mixing = example.shape[0] > 0 and mixes(twin, example.double())
    judged = Judged(seed, "bounded")
    center = example[0].double()
    with patch.object(lipschitz_module, "certifiable_graph", lru_cache(1)(certifiable_graph)):  # one trace for all regions
        for region in (None, *_regions(seed, center)):
            _judge_on(judged, made, twin, example, region, mixing)
    if judged.wrong:
        judged.wrong.append(f"program {seed} ({example.dtype}, {tuple(example.shape)}): {made}")
    return judged


def _judge_on(judged: Judged, made: Program, twin: Program, example: torch.Tensor, region: Region, mixing: bool) -> None:
    try:
        with _limited():
            bracket = ns.lipschitz(made, example, region=region, effort=0.2)
    except (UnforeseenError, InternalError, NoAnswer) as error:
        judged.wrong.append(f"on {_name(region)}: {error}")
        return
    except ns.NormscopeError as error:
        if region is None:
            judged.outcome, judged.why = "refused", str(error).splitlines()[0]
        return
    except Exception as error:  # whatever leaves the library and is not its own
        judged.wrong.append(f"on {_name(region)} it raises {type(error).__name__}: {error}")
        return
    if mixing:
        judged.wrong.append(f"samples influence each other, and it certifies {bracket}")
        return
    if not bracket.upper.finite:
        judged.outcome = "infinite" if region is None else judged.outcome
        return
    bound = float(bracket.upper)
    if not bracket.lower <= bracket.upper:
        judged.wrong.append(f"on {_name(region)} the lower bound exceeds the upper: {bracket}")
    best, pair = largest_quotient(twin, example[0].double(), region, judged.seed)
    if pair is not None and best > bound * (1 + 1e-6) and refutes(twin, pair, bound):
        judged.wrong.append(f"on {_name(region)} certified {bound:.6g}, but a pair has the quotient {best:.6g}")


def _regions(seed: int, center: torch.Tensor) -> list[Region]:
    generator = torch.Generator().manual_seed(seed)
    size = float(center.abs().max()) or 1.0
    radius = size * 10 ** (2 - 8 * float(torch.rand((), generator=generator)))
    width = (
        size
        * 10 ** (1 - 5 * float(torch.rand((), generator=generator)))
        * torch.rand(center.shape, generator=generator, dtype=torch.float64)
    )
    if not math.isfinite(radius) or not bool((center + width).isfinite().all()):
        return []
    return [ns.Ball(center, radius)] if seed % 2 else [ns.Box(center - 0.3 * width, center + width)]


def _name(region: Region) -> str:
    return "all inputs" if region is None else f"a {type(region).__name__.lower()}"


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise NoAnswer(f"no answer after {LIMIT} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)  # of this process: other work on the machine does not count
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
