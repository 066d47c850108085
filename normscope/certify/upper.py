"""The certified upper bound: one pass over the graph, in log domain, with what belongs together bounded together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.utils._pytree import tree_leaves

from normscope.certify import relaxation
from normscope.certify.certifiable import is_random
from normscope.certify.checking import check_bound
from normscope.certify.fold import CONVOLUTIONS, applies_weight, check_fold, foldable, folded_weight
from normscope.certify.runs import Link, dense_runs, log_ratio
from normscope.certify.values import Values
from normscope.core.bracket import Certificate, Step
from normscope.core.errors import InputError, InternalError, Refusal
from normscope.core.magnitude import INFINITY, ONE, Magnitude, root_sum_square, total
from normscope.core.region import Region
from normscope.graph.graph import Constant, Graph, Node
from normscope.operators.dense import UNIT_ROUNDOFF, spectral_norm
from normscope.rules.activations import Entrywise
from normscope.rules.convolution import absorbed_padding, convolution_of
from normscope.rules.normalizers import Normalizer, normalizer_of, running_scale
from normscope.rules.registry import Gain, registry

# entries of all nodes together, and nodes, up to which every activation's input is relaxed on its own
SMALL_GRAPH, FEW_NODES = 20_000, 120

Report = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(eq=False)
class Upper:
    """The bound at every node that something reads, and the links that give it."""

    graph: Graph
    links: list[Link]
    at: dict[Node, Magnitude]
    norms: dict[Node, Magnitude]  # every linear map's own operator norm, a normalizer behind it not folded in
    bound: Magnitude
    certificate: Certificate
    layered: list[Link]  # the same before any are joined to a chain
    center_error: float = 0.0  # of the float64 output at the middle of the region


def check_rules(graph: Graph) -> None:
    """Refuse, with the full list, a graph that has operations without a rule, and one that computes with NaN."""
    for node in graph:
        numbers = tree_leaves((node.args, node.kwargs))
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            raise InputError(f"{node.label} computes with NaN: no bound exists; remove it")
        normalizer = normalizer_of(node)
        if normalizer is not None and normalizer.running_variance is not None and not _sane(normalizer):
            raise InputError(
                f"{node.label} has running statistics that are not finite, or a variance that is not above −ε = "
                f"{-normalizer.epsilon:g}: no bound exists; load statistics from before training diverged, or estimate them again"
            )
    missing = [node for node in graph if node.op != "input" and registry.find(node) is None]
    random = [node for node in graph if is_random(node)]
    causes = list(dict.fromkeys(node.label for node in missing if node not in random))
    if random:
        causes += [f"{node.label} is random in train mode" for node in random]
    if causes:
        raise Refusal(
            f"no certificate: {len(causes)} operation{'s' if len(causes) > 1 else ''} without a rule",
            causes,
            "Register one with normscope.rules.register(operation, rule); see docs/rules.md.",
        )


def _sane(normalizer: Normalizer) -> bool:
    mean, variance = normalizer.running_mean, normalizer.running_variance
    assert mean is not None and variance is not None
    return bool(mean.isfinite().all() and variance.isfinite().all() and (variance + normalizer.epsilon > 0).all())


class Composition(Values):
    """Bounds of one graph; the `Context` that rules see."""

    def __init__(
        self, graph: Graph, report: Report | None = None, region: Region | None = None, known: dict[object, Gain] | None = None
    ) -> None:
        """known: gains of linear maps by signature, kept by the caller to be shared between regions."""
        check_rules(graph)
        super().__init__(graph, region)
        self.report = report or (lambda *_: None)
        self.known: dict[object, Gain] = {} if known is None else known
        self.gains: dict[Node, Gain] = {}
        self.norms: dict[Node, Magnitude] = {}
        self.layered: list[Link] = []
        self.small = len(graph) <= FEW_NODES and sum(math.prod(node.shape) for node in graph) <= SMALL_GRAPH

    def gain(self, node: Node) -> Gain:
        if node not in self.gains:
            key = signature(node)
            self.gains[node] = self.known[key] if key is not None and key in self.known else self._ask(node)
            if key is not None:
                self.known[key] = self.gains[node]
        return self.gains[node]

    # links ---------------------------------------------------------------------------------------------------------

    def links(self) -> list[Link]:
        folds = foldable(self.graph)
        found: dict[Node, Link] = {}
        absorbed: set[Node] = set()
        nodes = [node for node in self.graph if node.op != "input"]
        for done, node in enumerate(nodes):
            self.report("bounding", done, len(nodes))
            if node in folds:
                link = self._folded(node, folds[node])
            elif node in folds.values():
                continue
            elif node.op in CONVOLUTIONS and applies_weight(node):
                link = self._convolution(node)
            else:
                link = Link(node, node.inputs, self.gain(node), (node,))
            if len(link.sources) == 1:
                link.shares.setdefault(node, link.gain.factors[0].log)
            if len(link.sources) == 1 and link.gain.factors and node.op in ("linear", *CONVOLUTIONS) and node not in self.norms:
                self.norms[node] = link.gain.factors[0]
            absorbed.update(member for member in link.members if member is not node)
            found[node] = link
            self.at[node] = arriving(link, self.at)
        self.report("bounding", len(nodes), len(nodes))
        self.layered = list(found.values())
        for chain in dense_runs(self, found):
            found[chain.node] = chain
            absorbed.update(member for member in chain.members if member is not chain.node)
        return [link for node, link in found.items() if node not in absorbed]

    def _ask(self, node: Node) -> Gain:
        rule = registry.find(node)
        assert rule is not None
        if any(source.dtype is not None and not source.dtype.is_floating_point for source in node.inputs):
            return Gain.infinite(node, "which entries it takes depends on the input's values, so the result may jump")
        if node.dtype is not None and not math.prod(node.shape):
            return Gain.of(*(0 for _ in node.inputs), method="no entries")
        if self.local and isinstance(rule, Entrywise) and len(node.inputs) == 1 and self.small:
            relaxation.tighten(self, node.input)
        gain = rule.gain(node, self)
        if len(gain.factors) != len(node.inputs):
            raise InternalError(f"the rule for {node.label} gives {len(gain.factors)} factors for {len(node.inputs)} inputs")
        return gain

    def _convolution(self, node: Node) -> Link:
        pad = absorbed_padding(node)
        if pad is None:
            return Link(node, node.inputs, self.gain(node), (node,))
        members = (pad, node) if len(self.users[pad]) == 1 else (node,)
        return Link(node, pad.inputs, self.gain(node), members)

    def _folded(self, node: Node, before: Node) -> Link:
        normalizer = normalizer_of(node)
        assert normalizer is not None
        check_fold(before, normalizer)
        own = self._convolution(before) if before.op in CONVOLUTIONS else Link(before, before.inputs, self.gain(before), (before,))
        if len(own.gain.factors) != 1 or own.gain.reason:
            return Link(node, (before,), self.gain(node), (node,))
        self.norms[before] = own.gain.factors[0]
        scale = running_scale(normalizer)
        if bool((scale == scale[0]).all()):  # as after initialization: a multiple of the same map
            bound, method = own.gain.factors[0] * float(scale[0].abs()), own.gain.method
        elif before.op in CONVOLUTIONS:
            bound, method = convolution_of(before, scale).norm()
        else:
            bound, method = spectral_norm(folded_weight(before, normalizer)), "exact"
        apart = own.gain.factors[0] * self.gain(node).factors[0]
        link = Link(node, own.sources, Gain((min(bound, apart),), f"{method}, BN folded"), (*own.members, node))
        link.shares = {before: self.norms[before].log, node: log_ratio(link.gain.factors[0], self.norms[before])}
        return link

    # composition ---------------------------------------------------------------------------------------------------

    def upper(self) -> Upper:
        links = self.links()
        at = dict.fromkeys(self.graph.inputs, ONE)
        for link in links:
            at[link.node] = arriving(link, at)
        bound, rounding = at[self.graph.output], _composition_rounding(links, at)
        certificate = _certificate(links, at, bound, rounding)
        relaxed = relaxation.relax(self, self.graph.output) if self.local else None
        if relaxed is not None and relaxed.bound < bound:
            bound = relaxed.bound
            step = Step(self.graph.output.name, self.graph.output.path, "whole network", bound, "linear relaxation")
            certificate = Certificate((step,), "", rounding)
        center_error = self.error(self.graph.output) if self.local else 0.0
        return Upper(self.graph, links, at, self.norms, bound.widened(rounding), certificate, self.layered, center_error)


def upper(
    graph: Graph, report: Report | None = None, region: Region | None = None, known: dict[object, Gain] | None = None
) -> Upper:
    """A certified upper bound on the Lipschitz constant of the traced function, from ℓ2 to ℓ2, on a region or everywhere.

    Every bound takes this road, and none leaves it that a pair of points contradicts.
    """
    found = Composition(graph, report, region, known).upper()
    check_bound(graph, found.bound, region)
    return found


def arriving(link: Link, at: dict[Node, Magnitude]) -> Magnitude:
    """The bound at a link's node from those at its sources."""
    arriving = [factor * at[source] for factor, source in zip(link.gain.factors, link.sources, strict=True)]
    return (root_sum_square if link.gain.separate else total)(arriving)


def _certificate(links: Sequence[Link], at: dict[Node, Magnitude], bound: Magnitude, rounding: float) -> Certificate:
    steps = tuple(
        Step(
            link.node.name,
            _paths(link),
            "+".join(dict.fromkeys(m.op for m in link.members)),
            max(link.gain.factors),
            link.gain.method,
        )
        for link in links
        if link.gain.factors
    )
    reasons = [link.gain.reason for link in links if link.gain.reason and at[link.node] == INFINITY]
    shown = "; ".join(dict.fromkeys(reasons[:3])) if bound == INFINITY else ""
    return Certificate(steps, shown + (f"; and {len(reasons) - 3} more" if shown and len(reasons) > 3 else ""), rounding)


def _paths(link: Link) -> str:
    paths = list(dict.fromkeys(member.path for member in link.members if member.path))
    return paths[0] if len(paths) == 1 else (f"{paths[0]} … {paths[-1]}" if paths else "")


def _composition_rounding(links: Sequence[Link], at: dict[Node, Magnitude]) -> float:
    """A bound on the relative rounding of the composition: each operation on logarithms errs by an ulp of their size."""
    operations = sum(2 * len(link.sources) + 2 for link in links)
    logs = [abs(value.log) for value in at.values() if math.isfinite(value.log)]
    logs += [abs(factor.log) for link in links for factor in link.gain.factors if math.isfinite(factor.log)]
    return math.expm1(min(8 * operations * UNIT_ROUNDOFF * (2 + max(logs, default=0.0)), 1.0))


def signature(node: Node) -> object | None:
    """Equal for nodes with the same weight, settings and input shape: shared modules are bounded once.

    The weight is the constant itself, which a table of known gains keeps alive: neither an address that is used again nor a view
    of other numbers at the same address can be taken for it.
    """
    if not applies_weight(node):
        return None
    settings = tuple(repr(a) for a in (*node.args[2:], *node.kwargs.items()) if not isinstance(a, (Node, Constant)))
    padding = (node.input.op, repr(node.input.args[1:]), node.input.inputs[0].shape) if node.input.op == "pad" else ()
    return node.op, node.args[1], settings, node.input.shape, padding
