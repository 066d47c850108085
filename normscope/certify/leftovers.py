"""κ: what an affine form bounds by one number per node, in ℓ2, because it is not worth a symbol.

Gains carry it from node to node, or along a link (a convolution and its BN) where that is less. Rounding adds to it: that of
columns in every sweep, and in the first sweep, which is about distances from the computed value at the middle, that of this value.
Where the exact value is known far more precisely than float64 computes it (`certify/precise.py`), the first sweep is about
distances from the exact value, and the difference of both is added to sizes alone: no gain carries it on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from normscope.certify.columns import AttentionMap, middle_of, rule_of
from normscope.certify.kernels import column_error, linear_map, middle_error
from normscope.certify.passing import Fresh, Pass
from normscope.certify.precise import PreciseMiddle
from normscope.core.rounding import SUMMED, length
from normscope.graph.graph import Node
from normscope.rules.registry import Rule
from normscope.rules.remainder import Remainder

COLUMNS_LOST = 1e-290  # what products that underflow take from all columns of a node together, at most


class Leftovers:
    """κ of every node (`left`), and in the first sweep how far computed values at the middle are from the exact ones (`off`)."""

    def __init__(self, facts: Pass, unit: float, carried: Mapping[Node, float], precise: PreciseMiddle | None) -> None:
        """unit: the size of changes of the input; carried: Frobenius norms of all columns. precise: in the first sweep alone."""
        self.facts, self.unit, self.carried, self.precise = facts, unit, carried, precise
        self.left: dict[Node, float] = {}
        self.own: dict[Node, float] = {}  # the part of κ that a node adds itself
        self.off: dict[Node, float] = {}

    def __getitem__(self, node: Node) -> float:
        """Together: what sizes of changes, or of distances from the computed value, need."""
        return self.left[node] + self.off.get(node, 0.0)

    def settle(self, node: Node, rule: Rule | None, factors: Sequence[float]) -> None:
        """κ at a node that those before it have, and its own rounding; rule: None for an input."""
        error = None if self.precise is None else self.precise.error(node, self.facts)
        if error is not None:
            self.off[node] = error + self._reading(node)
        if rule is None:
            self.left[node] = 0.0
            return
        self.own[node] = self._rounding(node, rule, factors) * SUMMED + COLUMNS_LOST * self.unit
        rest = sum(times(factor, self._arriving(source, error)) for factor, source in zip(factors, node.inputs, strict=True))
        self.left[node] = min(rest * SUMMED + self.own[node], self._linked(node, error))

    def change(self, node: Node, left: float) -> None:
        """κ behind a node whose symbols took it in, or of whose symbols some became part of it: then no link goes past the node."""
        if left not in (0.0, self.left[node]):
            self.own[node] = math.inf
        self.left[node] = left

    def _arriving(self, source: Node, error: float | None) -> float:
        return self[source] if error is None else self.left[source]

    def _linked(self, node: Node, error: float | None) -> float:
        """κ by the gain of a link, as of BN folded into a convolution, which is less than the product of both gains."""
        link = self.facts.facts[node].link
        if link is None or len(link.members) < 2 or (error is None and any(member in self.off for member in link.members)):
            return math.inf
        if link.members[0].inputs != link.sources:  # padding that others read too is in between
            return math.inf
        added = 0.0
        for member in link.members:  # what each adds is carried by the gains of those behind it
            (factor,) = self.facts.gain(member).factors
            added = times(float(factor), added) + self.own[member]
        factors = map(float, link.gain.factors)
        rest = sum(times(factor, self._arriving(source, error)) for factor, source in zip(factors, link.sources, strict=True))
        return (rest + added) * SUMMED

    def see(self, node: Node, rule: Rule, made: AttentionMap) -> None:
        """κ of the logits that a node sees, with the rounding of their columns."""
        columns = 8 * rule.roundoff(node) * made.changed_by(self.carried)
        arriving = {source: self[source] for source in made.logits.inputs}
        self.left[made.logits] = (made.changed_by(arriving) + columns) * SUMMED + COLUMNS_LOST * self.unit

    def widened(self, node: Node, found: Remainder, factors: Sequence[float]) -> Remainder:
        """What the linear part at the computed middle ŷ leaves out of f(y(x)) − f(y), y the exact one, if the sweep is about that.

        It leaves R(y(x)) out of f(y(x)) − f(ŷ), so R(y(x)) − R(y) here, and ‖R(y)‖ ≤ 2 gain ‖y − ŷ‖.
        """
        if node not in self.off:
            return found
        return found.twice(2 * sum(times(factor, self.off[source]) for factor, source in zip(factors, node.inputs, strict=True)))

    def _rounding(self, node: Node, rule: Rule, factors: Sequence[float]) -> float:
        """What the node's kernel adds: the rounding of columns, and where its value is not known more precisely, that of it."""
        product = linear_map(node)
        if product is not None:
            columns = column_error(node, product, self.facts.known) * self.carried[node.input]
        else:
            passed = sum(times(factor, self.carried.get(source, 1.0)) for factor, source in zip(factors, node.inputs, strict=True))
            # a gain may be infinite because the node is no function that a derivative describes: then nothing is known
            columns = 8 * rule.roundoff(node) * passed if rule.terms(node) or math.isinf(passed) else 0.0
        if self.precise is None or node in self.off:
            return columns
        if product is not None:
            return columns + middle_error(node, product, middle_of(self.facts, node.input)) + self._reading(node)
        return columns + rule.center_error(node, Fresh(self.facts)) + self._reading(node)

    def _reading(self, node: Node) -> float:
        """2κ'‖ŷ‖: what the readers of a node may add to the error of its value at the middle (certify/passing.py)."""
        roundoffs = [rule_of(user).roundoff(user) for user in self.facts.users[node] if linear_map(user) is None]
        return 2 * max(roundoffs, default=0.0) * float(length(middle_of(self.facts, node)))


def times(factor: float, size: float) -> float:
    """Their product, where nothing times infinity is nothing."""
    return factor * size if size and factor else 0.0
