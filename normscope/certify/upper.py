"""The certified upper bound: the links of one pass composed in log domain, with what belongs together bounded together."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.utils._pytree import tree_leaves

from normscope.certify.checking import check_bound
from normscope.certify.forms import AffineForms
from normscope.certify.gap import Excess, excess
from normscope.certify.known import Known
from normscope.certify.links import Link, LogRounding
from normscope.certify.lower import check_effort
from normscope.certify.passing import Pass
from normscope.certify.relaxation import relaxation
from normscope.certify.runs import dense_runs
from normscope.certify.settling import settled, uncertain
from normscope.certify.splitting import Part, cut, most_parts, part_of
from normscope.core.bracket import Certificate, Step
from normscope.core.errors import NO_CERTIFICATE, InputError, NoConstant, Refusal
from normscope.core.magnitude import INFINITY, ONE, Magnitude
from normscope.core.progress import Report
from normscope.core.region import Box, Region
from normscope.graph.graph import Graph, Node
from normscope.rules.affine import weight_of
from normscope.rules.readings import Normalizer, Random
from normscope.rules.registry import registry


@dataclass(eq=False)
class Upper:
    """A certified bound and the links that it is composed of.

    refused: operations without a bound, where a partial pass was asked for; `refusal` says why each has none, and `bound` is then
    infinite. What is known of nodes that do not depend on them holds all the same.
    """

    graph: Graph
    links: list[Link]
    at: dict[Node, Magnitude]  # the constant from the inputs to every node, without the bounds of whole chains
    norms: dict[Node, Magnitude]  # every linear map's own operator norm, a normalizer behind it not folded in
    bound: Magnitude
    certificate: Certificate
    layered: list[Link]  # the link of every node
    center_error: float = 0.0  # of the float64 output at the middle of the region
    refused: frozenset[Node] = frozenset()
    refusal: Refusal | None = None
    notes: tuple[str, ...] = ()  # what was left out of the bound for want of effort
    excess: Excess | None = None  # where affine forms give the bound: what it is made of

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped the affine forms: the bound is without them."""
        return any("affine forms: interrupted" in note for note in self.notes)


def check_rules(graph: Graph) -> None:
    """Refuse, with the full list, a graph that has operations without a rule or random ones, and one that computes with NaN."""
    for node in graph:
        numbers = tree_leaves((node.args, node.kwargs))
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            raise InputError(f"{node.label} computes with NaN: no bound exists; remove it")
        normalizer = registry.reading(node, Normalizer)
        if normalizer is not None and normalizer.running_variance is not None and not _sane(normalizer):
            raise InputError(
                f"{node.label} has running statistics that are not finite, or a variance that is not above −ε = "
                f"{-normalizer.epsilon:g}: no bound exists; load statistics from before training diverged, or estimate them again"
            )
    missing = [node for node in graph if not node.is_input and registry.find(node) is None]
    random = [node for node in graph if registry.reading(node, Random) is not None]
    causes = list(dict.fromkeys(node.label for node in missing if node not in random))
    if random:
        raise NoConstant(
            f"{NO_CERTIFICATE}the answer changes from call to call",
            [*(f"{node.label} draws random numbers" for node in random), *(f"{label} has no rule" for label in causes)],
            'Use mode="eval", and give noise that the model needs there as one of its inputs.',
        )
    if causes:
        raise Refusal(
            f"{NO_CERTIFICATE}{len(causes)} operation{'s' if len(causes) > 1 else ''} without a rule",
            causes,
            "Register one with normscope.rules.register(operation, rule); see docs/rules.md.",
        )


def _sane(normalizer: Normalizer) -> bool:
    mean, variance = normalizer.running_mean, normalizer.running_variance
    assert mean is not None and variance is not None
    return bool(mean.isfinite().all() and variance.isfinite().all() and (variance + normalizer.epsilon > 0).all())


def forward_pass(
    graph: Graph,
    report: Report | None = None,
    region: Region | None = None,
    known: Known | None = None,
    partial: bool = False,
    forms: AffineForms | None = None,
    whole: bool = False,
) -> Pass:
    """The facts of every node, on a region with what relaxations and affine forms know better.

    whole: only the constant at the output is asked for; forms that cost much and cannot lower it are left out, by a rehearsal.
    """
    unknown, forms = None, AffineForms(graph) if forms is None else forms
    try:
        check_rules(graph)
    except Refusal as refusal:
        if not partial:
            raise
        unknown = refusal
    if whole and region is not None and forms.dear:
        without = Pass(graph, region, known, report, (relaxation(graph),), partial, unknown)
        if not forms.rehearse(without):
            return without
    return Pass(graph, region, known, report, (relaxation(graph), forms), partial, unknown)


def checked_pass(graph: Graph, region: Region | None = None, forms: AffineForms | None = None) -> Pass:
    """A pass whose constant at the output no pair of points contradicts, for what rests on the facts of single nodes."""
    facts = forward_pass(graph, region=region, forms=forms)
    check_bound(graph, facts.at(graph.output), region)
    return facts


def upper(
    graph: Graph,
    report: Report | None = None,
    region: Region | None = None,
    known: Known | None = None,
    partial: bool = False,
    effort: float = 1.0,
) -> Upper:
    """A certified upper bound on the Lipschitz constant of the traced function, from ℓ2 to ℓ2, on a region or everywhere.

    Every bound takes this road, and none leaves it that a pair of points contradicts. partial: where operations have no bound,
    what holds without them, and a `refusal`. effort: what affine forms on a region may cost (`certify/forms.py`); where that is too
    little, `notes` say so.
    """
    check_effort(effort)
    known = Known() if known is None else known
    original, (graph, asked) = graph, settled(graph, region)
    forms, doubt = AffineForms(graph, effort=effort, report=report), ""
    facts = forward_pass(graph, report, region, known, partial, forms, whole=True)
    if asked and (doubt := uncertain(asked, facts)):
        graph, forms = original, AffineForms(original, effort=effort, report=report)
        facts = forward_pass(graph, report, region, known, partial, forms, whole=True)
    found = composed(facts)
    if isinstance(region, Box) and found.bound.finite and most_parts(region, forms) > 1:
        _cut(found, region, forms, known)
    check_bound(original, found.bound, region)
    doubts = (f"{doubt} may answer otherwise elsewhere in the region: take a smaller one",) if doubt else ()
    found.notes = (*forms.notes, *doubts)
    if [step.method for step in found.certificate.steps] == [forms.method]:
        found.excess = excess(forms)
    return found


def _cut(found: Upper, region: Box, forms: AffineForms, known: Known) -> None:
    """A smaller bound on a box from bounds on its parts, where they give one."""

    def bounded(box: Box) -> Part | None:
        own = AffineForms(found.graph, effort=forms.effort)
        Pass(found.graph, box, known, refine=(own,))
        return part_of(box, own)

    whole = part_of(region, forms)
    parts = [] if whole is None else cut(whole, bounded, most_parts(region, forms))
    least = max((part.bound for part in parts), default=INFINITY)
    if least < found.bound:
        output, method = found.graph.output, f"{forms.method} on {len(parts)} parts"
        step = Step(output.name, output.path, "whole network", least, method)
        found.bound, found.certificate = least, replace(found.certificate, steps=(step,))


def composed(facts: Pass) -> Upper:
    """The bound that the links of a pass give, dense layers in a row as chains where that is smaller.

    It starts anew where something knows better, and never exceeds what the pass knows of the output.
    """
    graph, chains = facts.graph, {chain.node: chain for chain in dense_runs(facts)}
    at, chosen, better = dict.fromkeys(graph.inputs, ONE), dict[Node, Link](), set[Node]()
    for node, own in facts.links.items():
        chosen[node] = own
        at[node] = own.arriving(at.__getitem__)
        if facts.facts[node].method and facts.at(node) < at[node]:
            at[node] = facts.at(node)
            better.add(node)
        if node in chains and (whole := chains[node].arriving(at.__getitem__)) <= at[node].widened(1e-12):
            chosen[node], at[node] = chains[node], whole
            better.discard(node)
    needed, links, rounding = {graph.output}, list[Link](), LogRounding()
    for node, link in reversed(chosen.items()):
        if node in needed:
            needed.update(link.sources)
            links.append(link)
            rounding.add(link.gain.factors, at[node])
    links.reverse()
    bound, refusal = at[graph.output].widened(rounding.relative), facts.refusal
    certificate = _certificate(facts, links, at, better, rounding.relative)
    if refusal is not None:
        bound, certificate = INFINITY, Certificate.refused(refusal, rounding.relative)
    return Upper(
        graph,
        links,
        {node: facts.at(node) for node in graph},
        {node: facts.gain(node).factors[0] for node in graph if weight_of(node) is not None},
        bound,
        certificate,
        [made for node in graph if (made := facts.facts[node].link) is not None],
        facts.error(graph.output) if facts.local else 0.0,
        frozenset(facts.refused),
        refusal,
    )


def _certificate(
    facts: Pass, links: Sequence[Link], at: Mapping[Node, Magnitude], better: Collection[Node], rounding: float
) -> Certificate:
    """The steps that the bound of the output rests on: back to the inputs, or to where something knows `better`."""
    needed, steps, reasons = {facts.graph.output}, list[Step](), list[str]()
    for link in reversed(links):
        node = link.node
        if node in better and node in needed:
            what = "whole network" if node is facts.graph.output else "all up to here"
            steps.append(Step(node.name, node.path, what, at[node], facts.facts[node].method))
        elif node in needed:
            needed.update(link.sources)
            if link.gain.factors:
                operation = "+".join(dict.fromkeys(member.op for member in link.members))
                steps.append(Step(node.name, _paths(link), operation, max(link.gain.factors), link.gain.method))
            if link.gain.reason and at[node] == INFINITY:
                reasons.append(link.gain.reason)
    shown = "; ".join(dict.fromkeys(reasons[:-4:-1])) if at[facts.graph.output] == INFINITY else ""
    more = f"; and {len(reasons) - 3} more" if shown and len(reasons) > 3 else ""
    return Certificate(tuple(reversed(steps)), shown + more, rounding)


def _paths(link: Link) -> str:
    paths = list(dict.fromkeys(member.path for member in link.members if member.path))
    return paths[0] if len(paths) == 1 else (f"{paths[0]} … {paths[-1]}" if paths else "")
