"""The certified upper bound: one pass over the graph, in log domain, with what belongs together bounded together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from normscope.certify import chains
from normscope.certify.fold import CONVOLUTIONS, check_fold, foldable, folded_weight
from normscope.core.bracket import Certificate, Step
from normscope.core.errors import Refusal
from normscope.core.interval import Interval
from normscope.core.magnitude import INFINITY, ONE, Magnitude, product, root_sum_square, total
from normscope.graph.graph import Constant, Graph, Node
from normscope.operators.dense import UNIT_ROUNDOFF, spectral_norm
from normscope.rules.convolution import absorbed_padding, convolution_of
from normscope.rules.normalizers import normalizer_of, running_scale
from normscope.rules.registry import Gain, registry

Report = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(eq=False)
class Link:
    """One step of the composition: from `sources` to `node`, over `members` that nothing else reads."""

    node: Node
    sources: tuple[Node, ...]
    gain: Gain
    members: tuple[Node, ...]
    shares: dict[Node, float] = field(default_factory=dict)  # log gain of each member, for the ledger


@dataclass(eq=False)
class Upper:
    """The bound at every node that something reads, and the links that give it."""

    graph: Graph
    links: list[Link]
    at: dict[Node, Magnitude]
    norms: dict[Node, Magnitude]  # every linear map's own operator norm, a normalizer behind it not folded in
    bound: Magnitude
    certificate: Certificate


def check_rules(graph: Graph) -> None:
    """Refuse, with the full list, a graph that has operations without a rule."""
    missing = [node for node in graph if node.op != "input" and registry.find(node) is None]
    random = [node for node in graph if "dropout" in node.op or (node.op == "rrelu" and node.args[3])]
    causes = list(dict.fromkeys(node.label for node in missing if node not in random))
    if random:
        causes += [f"{node.label} is random in train mode" for node in random]
    if causes:
        raise Refusal(
            f"no certificate: {len(causes)} operation{'s' if len(causes) > 1 else ''} without a rule",
            causes,
            "Register one with normscope.rules.register(operation, rule); see docs/rules.md.",
        )


class Composition:
    """Bounds of one graph; the `Context` that rules see."""

    def __init__(self, graph: Graph, report: Report | None = None) -> None:
        check_rules(graph)
        self.graph, self.users = graph, graph.users
        self.whole_batch = graph.whole_batch
        self.report = report or (lambda *_: None)
        self.intervals: dict[Node, Interval] = {}
        self.gains: dict[object, Gain] = {}
        self.norms: dict[Node, Magnitude] = {}

    # what rules ask ------------------------------------------------------------------------------------------------

    def interval(self, node: Node) -> Interval:
        """Bounds on the values of `node`, from those of everything before it."""
        stack = [node]
        while stack:  # without recursion: a graph may be thousands of nodes deep
            top = stack[-1]
            if top in self.intervals:
                stack.pop()
                continue
            waiting = [source for source in top.inputs if source not in self.intervals]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            rule = registry.find(top)
            self.intervals[top] = Interval.unbounded(top.shape) if rule is None else rule.interval(top, self)
        return self.intervals[node]

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
            elif node.op in CONVOLUTIONS and len(node.inputs) == 1:
                link = self._convolution(node)
            else:
                link = Link(node, node.inputs, self._gain(node), (node,))
            if len(link.sources) == 1:
                link.shares.setdefault(node, link.gain.factors[0].log)
            if len(link.sources) == 1 and link.gain.factors and node.op in ("linear", *CONVOLUTIONS) and node not in self.norms:
                self.norms[node] = link.gain.factors[0]
            absorbed.update(member for member in link.members if member is not node)
            found[node] = link
        for chain in self._chains(found):
            found[chain.node] = chain
            absorbed.update(member for member in chain.members if member is not chain.node)
        return [link for node, link in found.items() if node not in absorbed]

    def _gain(self, node: Node) -> Gain:
        key = _signature(node)
        if key is None or key not in self.gains:
            rule = registry.find(node)
            assert rule is not None
            if any(source.dtype is not None and not source.dtype.is_floating_point for source in node.inputs):
                return Gain.infinite(node, "which entries it takes depends on the input's values, so the result may jump")
            gain = rule.gain(node, self)
            if len(gain.factors) != len(node.inputs):
                raise AssertionError(f"the rule for {node.label} gives {len(gain.factors)} factors for {len(node.inputs)} inputs")
            if key is None:
                return gain
            self.gains[key] = gain
        return self.gains[key]

    def _convolution(self, node: Node) -> Link:
        pad = absorbed_padding(node)
        if pad is None:
            return Link(node, node.inputs, self._gain(node), (node,))
        members = (pad, node) if len(self.users[pad]) == 1 else (node,)
        return Link(node, pad.inputs, self._gain(node), members)

    def _folded(self, node: Node, before: Node) -> Link:
        normalizer = normalizer_of(node)
        assert normalizer is not None
        check_fold(before, normalizer)
        own = self._convolution(before) if before.op in CONVOLUTIONS else Link(before, before.inputs, self._gain(before), (before,))
        if len(own.gain.factors) != 1 or own.gain.reason:
            return Link(node, (before,), self._gain(node), (node,))
        self.norms[before] = own.gain.factors[0]
        scale = running_scale(normalizer)
        if bool((scale == scale[0]).all()):  # as after initialization: a multiple of the same map
            bound, method = own.gain.factors[0] * float(scale[0].abs()), own.gain.method
        elif before.op in CONVOLUTIONS:
            bound, method = convolution_of(before, scale).norm()
        else:
            bound, method = spectral_norm(folded_weight(before, normalizer)), "exact"
        apart = own.gain.factors[0] * self._gain(node).factors[0]
        link = Link(node, own.sources, Gain((min(bound, apart),), f"{method}, BN folded"), (*own.members, node))
        link.shares = {before: self.norms[before].log, node: _difference(link.gain.factors[0], self.norms[before])}
        return link

    # chains --------------------------------------------------------------------------------------------------------

    def _chains(self, found: dict[Node, Link]) -> list[Link]:
        """Runs of dense layers and entrywise functions, each bounded as a whole where that is smaller."""
        made = []
        taken: set[Node] = set()
        for start in found:
            if start in taken or self._matrix(start, found) is None:
                continue
            run, node = [start], start
            while (following := self._next(node, found)) is not None:
                run.append(following)
                node = following
            while self._matrix(run[-1], found) is None:
                run.pop()
            taken.update(run)
            if sum(self._matrix(node, found) is not None for node in run) > 1:
                made.append(self._chain([found[node] for node in run]))
        return made

    def _next(self, node: Node, found: dict[Node, Link]) -> Node | None:
        """The only reader of a node, if the chain can go on through it."""
        readers = self.users[node]
        if node is self.graph.output or len(readers) != 1:
            return None
        reader = readers[0]
        while reader not in found:  # a linear map whose BN is folded is represented by that BN
            onward = self.users[reader]
            if len(onward) != 1:
                return None
            reader = onward[0]
        if found[reader].sources != (node,):
            return None
        if self._matrix(reader, found) is not None or self._slopes(reader) is not None:
            return reader
        return None

    def _matrix(self, node: Node, found: dict[Node, Link]) -> Callable[[], torch.Tensor] | None:
        """A maker of the dense matrix that a link applies to the last axis, or None."""
        members = [member for member in found[node].members if member.op == "linear"]
        if len(members) != 1 or len(members[0].inputs) != 1 or not found[node].gain.factors[0].finite:
            return None
        linear = members[0]
        if node is linear:
            return lambda: linear.args[1].double()
        normalizer = normalizer_of(node)
        return (lambda: folded_weight(linear, normalizer)) if normalizer is not None and normalizer.fixed else None

    def _slopes(self, node: Node) -> tuple[float, float] | None:
        rule = registry.find(node)
        slopes = None if rule is None or len(node.inputs) != 1 else rule.slopes(node)
        return slopes if slopes is not None and all(map(math.isfinite, slopes)) else None

    def _chain(self, run: Sequence[Link]) -> Link:
        layers: list[chains.Layer] = []
        found = {link.node: link for link in run}
        for link in run:
            maker = self._matrix(link.node, found)
            if maker is not None:
                layers.append(chains.Layer(maker, link.gain.factors[0], link.node.shape[-1]))
            else:
                slopes = self._slopes(link.node)
                assert slopes is not None
                last = layers[-1]
                layers[-1] = chains.Layer(last.matrix, last.norm, last.width, _slope_product(last.slopes, slopes))
        bound, method = chains.bound(layers)
        apart = product(link.gain.factors[0] for link in run)
        members = tuple(member for link in run for member in link.members)
        chain = Link(run[-1].node, run[0].sources, Gain((min(bound, apart),), f"chain of {len(layers)}: {method}"), members)
        chain.shares = {node: share for link in run for node, share in link.shares.items()}
        weights = [node for node in chain.shares if node.op == "linear"]
        saved = _difference(chain.gain.factors[0], apart) / max(len(weights), 1)
        for node in weights:  # what the chain saves over the product belongs to its layers alike
            chain.shares[node] += saved
        return chain

    # composition ---------------------------------------------------------------------------------------------------

    def upper(self) -> Upper:
        links = self.links()
        at = dict.fromkeys(self.graph.inputs, ONE)
        for link in links:
            arriving = [factor * at[source] for factor, source in zip(link.gain.factors, link.sources, strict=True)]
            at[link.node] = (root_sum_square if link.gain.separate else total)(arriving)
        bound, rounding = at[self.graph.output], _composition_rounding(links, at)
        return Upper(self.graph, links, at, self.norms, bound.widened(rounding), _certificate(links, at, bound, rounding))


def upper(graph: Graph, report: Report | None = None) -> Upper:
    """A certified upper bound on the Lipschitz constant of the traced function, from ℓ2 to ℓ2."""
    return Composition(graph, report).upper()


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


def _difference(larger: Magnitude, smaller: Magnitude) -> float:
    """log(larger/smaller), zero where it is not defined."""
    return larger.log - smaller.log if math.isfinite(larger.log) and math.isfinite(smaller.log) else 0.0


def _slope_product(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    corners = [a * b for a in first for b in second]
    return min(corners), max(corners)


def _signature(node: Node) -> object | None:
    """Equal for nodes with the same weight, settings and input shape: shared modules are bounded once."""
    if len(node.inputs) != 1 or not node.constants:
        return None
    tensors = tuple((c.value.data_ptr(), c.value.shape, c.value.stride()) for c in node.constants)
    settings = tuple(repr(a) for a in node.args if not isinstance(a, (Node, Constant)))
    padding = (node.input.op, repr(node.input.args[1:]), node.input.inputs[0].shape) if node.input.op == "pad" else ()
    return (node.op, tensors, settings, node.input.shape, padding) if node.op in ("linear", *CONVOLUTIONS) else None
