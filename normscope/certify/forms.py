"""Affine forms on a region: what every node's change is made of, between any two points of the region.

    h(x) − h(x') = J (x − x') + Σ_u G_u η_u + e,     |η_u| ≤ a_u ‖x − x'‖,     ‖e‖ ≤ κ ‖x − x'‖

J is the derivative of a linearized graph, each η_u a symbol for what one entry of a curved node leaves out of its linear part, and
shared by all that reads the node, G_u its column, carried by the actual maps behind it, and κ what is not worth a symbol: rounding,
and symbols beyond the budget. Of the symbols of one set (a token) also ‖η‖₂ ≤ A ‖x − x'‖ is known (`rules/remainder.py`). So

    |Δh_i| ≤ (‖J_i‖ + Σ_sources min(Σ_u |G_iu| a_u, Σ_sets ‖G_i,set‖ A_set) + κ) ‖Δx‖.

The first sweep over the graph bounds the distance of every node from its computed value at the middle of the region (x' the middle,
J the derivative there, remainders by Taylor's theorem), the second changes between any two points, with the same J. A third, with a
J of its own, has slopes in the middle of those that the first leaves possible, where the second is not close. docs/laws.md has the
proofs.
"""

from __future__ import annotations

import math

from normscope.certify.columns import cost, middle_of, rule_of
from normscope.certify.known import Known
from normscope.certify.passing import Pass, Refinement
from normscope.certify.rehearsal import Rehearsal, rehearsed
from normscope.certify.relays import Plan, estimate, plan
from normscope.certify.sweep import MOST_SYMBOLS, Sweep
from normscope.certify.symbols import Contribution
from normscope.certify.totals import total
from normscope.core.errors import Refusal
from normscope.core.interval import Interval
from normscope.core.magnitude import INFINITY, Magnitude
from normscope.core.progress import Report
from normscope.core.region import Region
from normscope.core.rounding import length
from normscope.graph.graph import Graph, Node
from normscope.rules.readings import Activation
from normscope.rules.registry import registry

MOST_WORK = 1.5e10  # of all sweeps together, with effort = 1 (`Linearized.work`): about a minute of one core
PLANNED = 0.4  # of which one sweep shall cost at most, by an estimate; relays see to that
CLOSE = 1.02  # times the norm of J, up to which a bound is not made smaller
LITTLE_WORK = 5e8  # a few seconds of one core
HOPELESS = 10  # times the bound without forms: they are not made if a rehearsal gives more, and a larger effort is not asked for
LEAST_EFFORT = 0.1  # however little the search for the lower bound shall cost, small networks have forms


class AffineForms:
    """The forms of one graph on one region, made along with a pass: what it asks for tighter facts (`certify/passing.py`).

    bound: on the Lipschitz constant, at most straight, the norm of J, plus what each node's symbols add at the output (`parts`),
    plus left, which is κ there. away, moves: the two sweeps. missing: why there are no forms, if there are none. notes: what was
    left out, for users.
    """

    method = "affine forms"

    def __init__(self, graph: Graph, most_symbols: int = MOST_SYMBOLS, effort: float = 1.0, report: Report | None = None) -> None:
        """effort: how much they may cost, in multiples of `MOST_WORK`; beyond it there are none. report: is told of the work."""
        self.graph, self.most_symbols, self.effort, self.report = graph, most_symbols, max(effort, LEAST_EFFORT), report
        self.work, self.plan, self.rehearsal = 0.0, Plan(), Rehearsal()
        self.away: Sweep | None = None
        self.moves: Sweep | None = None
        self.bound, self.straight = INFINITY, math.inf
        self.missing = ""
        self.notes: tuple[str, ...] = ()
        without = [node for node in graph if not node.is_input and registry.find(node) is None]
        if without:
            self.missing = f"{without[0].label} has no rule"

    @property
    def parts(self) -> list[Contribution]:
        return [] if self.moves is None else self.moves.parts

    @property
    def left(self) -> float:
        return math.inf if self.moves is None else self.moves.left[self.graph.output]

    @property
    def symbols(self) -> int:
        return sum(len(part.symbols.places) for part in self.parts)

    @property
    def dear(self) -> bool:
        """Whether they cost so much, and are affordable, that they are rehearsed first."""
        if self.missing:
            return False
        inputs = sum(math.prod(node.shape) for node in self.graph.inputs)
        return LITTLE_WORK < inputs * sum(map(cost, self.graph.nodes)) < MOST_WORK * self.effort

    def rehearse(self, without: Pass) -> bool:
        """Whether they may give a smaller bound than a pass without them."""
        if any(without.center(node) is None for node in self.graph):
            return True
        try:
            self.rehearsal, least = rehearsed(without), float(without.at(self.graph.output))
        except KeyboardInterrupt:
            self._leave_out("interrupted")
            return False
        except Exception:  # of a rule, which may be a user's own: the forms meet the same, and say so
            return True
        if self.effort > 1 or not self.rehearsal.bound > HOPELESS * least:
            return True
        self._leave_out(f"they would give about {self.rehearsal.bound:.1g}, by a guess; an effort above 1 makes them")
        return False

    def __call__(self, facts: Pass, node: Node) -> Refinement | None:
        if self.missing or facts.region is None:
            return None
        try:
            return self._refined(facts, node)
        except _TooMuchWork:
            needed = 2 * self.work / MOST_WORK  # the sweep of changes between two points costs no more than the first one
            self._leave_out(f"effort={self.effort:g} is too little: effort={needed:.2g} or more may give a smaller bound")
        except KeyboardInterrupt:  # the bound without them is next
            self._leave_out(f"interrupted at {node.label}")
        except (RuntimeError, NotImplementedError) as error:  # an operation without a forward-mode derivative, or no memory
            self._leave_out(f"{node.label}: {error}".splitlines()[0])
        return None

    def _leave_out(self, why: str) -> None:
        self.missing, self.away, self.moves = why, None, None
        self.notes = (f"the bound on the region is without affine forms: {why}",)

    def _afford(self, work: float) -> None:
        """Rather at once than after half of it."""
        if self.work + work > MOST_WORK * self.effort:
            self.work += work
            raise _TooMuchWork

    def _spend(self, work: float) -> None:
        self._afford(work)
        self.work += work
        if self.report is not None:
            expected = max(self.work, 2 * self.plan.work)  # two sweeps, of which the first also carries J
            self.report("affine forms", math.ceil(self.work / 1e6), math.ceil(expected / 1e6))

    def _refined(self, facts: Pass, node: Node) -> Refinement | None:
        if self.away is None:
            odd = [one.label for one in self.graph if facts.center(one) is None]
            if odd:
                self._leave_out(f"{odd[0]} is not a tensor of finite numbers at the middle")
                return None
            self.plan = plan(self.graph, MOST_WORK * self.effort * PLANNED, self.rehearsal.shares)
            self._afford(estimate(self.graph, self.plan.relays, bent=0.0))
            self.away = Sweep(facts, None, self.most_symbols, self._spend, self.plan)
            self.away.carry_inputs()
        self.away.settle(node)
        if node.is_input or node not in self.away.watched:
            return None
        distances = self.away.entries(node)
        interval = Interval.around(middle_of(facts, node), distances)
        if node is self.graph.output:
            self._bound(facts, chords=False)
            if float(self.bound) > CLOSE * self.straight and self._chords_differ(facts):
                self._bound_again(facts)
        deviation = float(length(distances))
        return Refinement(self.bound if node is self.graph.output else INFINITY, interval, self.method, deviation)

    def _bound(self, facts: Pass, chords: bool) -> None:
        """What a sweep of changes between any two points gives, where that is less."""
        moves = Sweep(facts, self.away, self.most_symbols, self._spend, self.plan, chords).run()
        found, straight = total(moves)
        bound = min(Magnitude(found).widened(1e-12), facts.at(self.graph.output)) if not math.isnan(found) else INFINITY
        if self.moves is None or bound < self.bound:
            self.moves, self.bound, self.straight = moves, bound, straight
            if moves.folded:
                self.notes = (f"{moves.folded} symbols beyond {self.most_symbols} per node are one error in the bound",)

    def _chords_differ(self, facts: Pass) -> bool:
        """Whether the middle of possible slopes is another linear part than the derivative at the middle, and may be worth a J.

        Where slopes are smooth, the derivative is near their middle: they are worth one only where it costs little.
        """
        parts = [] if self.away is None else self.away.parts
        if self.work > LITTLE_WORK:
            readings = {part.node: registry.reading(part.node, Activation) for part in parts}
            parts = [part for part in parts if (reading := readings[part.node]) is None or reading.kinked]
        return any(rule_of(part.node).linear_part(part.node, facts, self.away) is not None for part in parts)

    def _bound_again(self, facts: Pass) -> None:
        """With slopes in the middle of those that are possible, which takes another J: what is known already stays."""
        spent = self.work
        try:
            self._afford(estimate(self.graph, self.plan.relays, bent=0.0))
            self._bound(facts, chords=True)
        except _TooMuchWork:
            needed, self.work = (spent + self.work) / MOST_WORK, spent
            self.notes += (f"effort={needed:.2g} or more may give a smaller bound on the region",)
        except KeyboardInterrupt:
            self.notes += ("affine forms: interrupted; the bound on the region is the best so far",)


def affine_forms(
    graph: Graph,
    region: Region,
    known: Known | None = None,
    most_symbols: int = MOST_SYMBOLS,
    effort: float = math.inf,
) -> AffineForms:
    """The affine forms of a graph on a region; known: what is shared between regions."""
    forms = AffineForms(graph, most_symbols, effort)
    Pass(graph, region, known, refine=(forms,))
    if forms.missing:
        raise Refusal("no affine form", [forms.missing])
    return forms


class _TooMuchWork(Exception):
    pass
