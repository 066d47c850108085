"""The bracket around one sample that an audit of all inputs shows beside it, where it costs little."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch

from normscope.certify.forms import AffineForms
from normscope.certify.known import Known
from normscope.certify.lipschitz import bracket
from normscope.certify.relays import estimate
from normscope.certify.settling import settled
from normscope.certify.upper import Upper, upper
from normscope.core.bracket import Bracket
from normscope.core.data import Call
from normscope.core.errors import InputError, InternalError, first_line
from normscope.core.progress import Report
from normscope.core.region import Ball
from normscope.core.rounding import length
from normscope.graph.graph import Graph
from normscope.rules.readings import Activation
from normscope.rules.registry import registry

RELATIVE = 1e-3  # of the sample's norm: the radius unless one is given
BUDGET = 2e9  # what one sweep may cost without being asked for (`_cost`): about ten seconds of one core for all sweeps
KINKED_CALL = 180_000  # entries that cost as much as one call with the columns of a kinked activation: 0.2 ms


@dataclass(frozen=True)
class Nearby:
    """A bracket on a ball around a sample, or why there is none."""

    bracket: Bracket | None = None
    radius: float = 0.0
    missing: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        advice = "pass local=radius (--local RADIUS) or region= to have it anyway"
        absent = [f"no bracket around the first sample: {self.missing}; {advice}"] if self.missing else []
        return (*absent, *(f"around the first sample: {note}" for note in self.left_out))


def nearby(
    graph: Graph,
    above: Upper,
    example: Call,
    wanted: bool | float,
    effort: float,
    generator: torch.Generator | None,
    known: Known,
    needed: bool = False,
    report: Report | None = None,
) -> Nearby:
    """The bracket around the example's first sample.

    wanted: a radius, or True for one that depends on the sample, if the budget allows it. needed: whatever it costs.
    """
    if above.refusal is not None or not (wanted or needed):  # the global bracket says what refuses
        return Nearby()
    asked = needed or not isinstance(wanted, bool)
    try:
        ball = _ball(graph, example, wanted)
        reason = "" if asked else _too_much(settled(graph, ball)[0])
        if reason:
            return Nearby(None, ball.radius, reason)
        on_ball = upper(graph, report, ball, known, effort=effort)
        found = bracket(graph, on_ball, example, ball, None, effort, generator, known)
        return Nearby(found, ball.radius, left_out=on_ball.notes)
    except InternalError:
        raise
    except Exception as error:  # an answer that nobody asked for takes nothing from the one that was
        if asked:
            raise
        return Nearby(missing=first_line(error) or type(error).__name__)


def check_wanted(wanted: object) -> None:
    """Refuse what is neither yes nor no nor a radius."""
    if not isinstance(wanted, bool) and not (isinstance(wanted, Real) and 0 < float(wanted) < math.inf):
        raise InputError(f"local must be True, False or a radius above 0, got {wanted!r}")


def _ball(graph: Graph, example: Call, wanted: bool | float) -> Ball:
    sample = [part if graph.whole_batch else part[0] for part in example.floats()]
    size = float(length(torch.cat([part.reshape(-1).double() for part in sample])))
    return Ball(sample, RELATIVE * (size or 1.0) if isinstance(wanted, bool) else float(wanted))


def _too_much(graph: Graph) -> str:
    """Why affine forms are not made without being asked for."""
    missing = AffineForms(graph).missing
    if missing:
        return missing
    cost = _cost(graph)
    return f"it would take about {cost / BUDGET:.1f} times the budget" if cost > BUDGET else ""


def _cost(graph: Graph) -> float:
    """About what the columns of one sweep cost, with symbols at every kinked activation: in a deep network calls cost most."""
    read = ((place, registry.reading(node, Activation)) for place, node in enumerate(graph))
    calls = sum(len(graph) - place for place, activation in read if activation is not None and activation.kinked)
    return KINKED_CALL * calls + (estimate(graph) if KINKED_CALL * calls <= BUDGET else 0.0)
