"""Links: the steps that a bound is composed of, from the nodes that one reads to the node that it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from normscope.certify.fold import check_fold
from normscope.core.magnitude import Magnitude, root_sum_square, total
from normscope.core.rounding import UNIT_ROUNDOFF
from normscope.graph.graph import Node
from normscope.rules.affine import constant_map
from normscope.rules.readings import Normalizer
from normscope.rules.registry import Gain, registry


@dataclass(eq=False)
class Link:
    """One step of the composition: from `sources` to `node`, over `members` that nothing else reads."""

    node: Node
    sources: tuple[Node, ...]
    gain: Gain
    members: tuple[Node, ...]
    shares: dict[Node, float] = field(default_factory=dict)  # log gain of each member, for the ledger

    def arriving(self, at: Callable[[Node], Magnitude]) -> Magnitude:
        """The constant from the inputs to the link's node, from those at its sources."""
        parts = [factor * at(source) for factor, source in zip(self.gain.factors, self.sources, strict=True)]
        return (root_sum_square if self.gain.separate else total)(parts)


def link_of(node: Node, before: Node | None, gain: Callable[[Node], Gain], readers: Mapping[Node, Sequence[Node]]) -> Link:
    """The link of one node, alone or with what is bounded better along with it.

    before: the linear map that this node, a BN with running statistics, is folded into. Padding goes with its convolution.
    """
    link = _alone(node, gain, readers) if before is None else _folded(node, _alone(before, gain, readers), gain)
    if len(link.sources) == 1:
        link.shares.setdefault(node, link.gain.factors[0].log)
    return link


def _alone(node: Node, gain: Callable[[Node], Gain], readers: Mapping[Node, Sequence[Node]]) -> Link:
    """A node, with the padding that is part of its operator."""
    applied = constant_map(node)
    pad = applied.kernel.pad if applied is not None and applied.kernel is not None else None
    if pad is None:
        return Link(node, node.inputs, gain(node), (node,))
    return Link(node, pad.inputs, gain(node), (pad, node) if len(readers[pad]) == 1 else (node,))


def _folded(node: Node, own: Link, gain: Callable[[Node], Gain]) -> Link:
    before, normalizer, applied = own.node, registry.reading(node, Normalizer), constant_map(own.node)
    assert normalizer is not None and applied is not None
    if len(own.gain.factors) != 1 or own.gain.reason or not check_fold(before, applied, normalizer):
        return Link(node, (before,), gain(node), (node,))
    (plain,), scale = own.gain.factors, normalizer.affine[0]
    if bool((scale == scale[0]).all()):  # as after initialization: a multiple of the same map
        bound, method = plain * float(scale[0].abs()), own.gain.method
    else:
        bound, method = applied.scaled(scale).norm()
    bound = min(bound, plain * gain(node).factors[0])
    shares = {before: plain.log, node: log_ratio(bound, plain)}
    return Link(node, own.sources, Gain((bound,), f"{method}, BN folded"), (*own.members, node), shares)


def log_ratio(larger: Magnitude, smaller: Magnitude) -> float:
    """log(larger/smaller), zero where it is not defined."""
    return larger.log - smaller.log if math.isfinite(larger.log) and math.isfinite(smaller.log) else 0.0


@dataclass
class LogRounding:
    """The relative rounding of a composition: each operation on logarithms errs by at most an ulp of their size.

    In a sum of positive numbers relative errors do not grow, so those of all operations together bound that of any result.
    """

    operations: int = 0
    largest: float = 0.0

    def add(self, factors: Sequence[Magnitude], *found: Magnitude) -> None:
        """Count a sum of products with factors, and what was found by it."""
        self.operations += 2 * len(factors) + 2
        logs = [magnitude.log for magnitude in (*factors, *found)]
        self.largest = max(self.largest, *(abs(log) for log in logs if math.isfinite(log)), 0.0)

    @property
    def relative(self) -> float:
        return math.expm1(min(8 * self.operations * UNIT_ROUNDOFF * (2 + self.largest), 1.0))


def signature(node: Node) -> object | None:
    """Equal for nodes that apply the same weight in the same way: shared modules are bounded once."""
    applied = constant_map(node)
    return None if applied is None else applied.key
