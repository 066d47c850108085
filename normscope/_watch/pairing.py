"""Which normalizer ends the scale of which weight: as `ns.symmetries` found it before, or as torch's own modules prove it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from torch import nn

from normscope._watch.backward import Routes
from normscope._watch.layers import FirstForward, Handwritten, Pairing, is_observable, weight_names
from normscope.graph.graph import Graph, Node
from normscope.rules.normalizers import completed
from normscope.rules.readings import Activation
from normscope.rules.registry import registry
from normscope.symmetry.chain import scale_free_in_chain
from normscope.symmetry.report import SymmetryReport

LISTED = 8  # names in a note
ADVICE = "pass ns.watch(model, optimizer, …, symmetries=ns.symmetries(model, example)), made before training"


def pair(model: nn.Module, seen: FirstForward, routes: Routes | None, report: SymmetryReport | None = None) -> Pairing:
    """What `ns.symmetries` says in a report, or what the modules prove by themselves, of weights that the loss sees as it does.

    Both know what the model returns, not the loss. routes: how the loss depends on the weights, None if no backward pass was read.
    """
    live = routes or Routes()
    names = weight_names(model)
    notes = []
    if report is None:
        handwritten = {path: Handwritten(None) for path in live.activating}
        followed_by = {} if seen.hooked else scale_free_in_chain(model, seen.training)
        free: dict[str, bool | None] = {name: name in followed_by or None for name in names}
    else:
        handwritten = handwritten_in(report.numerics.graph, model)
        followed_by = report.scale_free_weights
        other = {path for path, mode in seen.training.items() if report.training.get(path) is (not mode)}
        affected = _affected(other, report.numerics.graph)
        free = {name: None if name in affected else name in followed_by for name in names}
        if affected:
            notes.append(
                "modules that train in a different mode than in the symmetry report, so weights before them are not judged: "
                f"{listed(sorted(other))}"
            )
    free = {name: None if known and name not in live.through_output else known for name, known in free.items()}
    if report is None and live.dividing:
        notes.append(
            f"modules that divide by a root, as a normalizer does, are not recorded: {listed(sorted(live.dividing))}. To record "
            f"those that are normalizers, {ADVICE}"
        )
    if live.functions:
        notes.append(f"called as functions, not as modules, so their inputs are not recorded: {', '.join(live.functions)}")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    unjudged = [name for name, known in free.items() if known is None and name not in frozen]
    if unjudged:
        why = "" if routes is not None else "; no backward pass of the whole loss was seen"
        advice = "" if report is not None else f". To judge them, {ADVICE}"
        notes.append(f"weights for which it was not judged whether the loss ignores their scale: {listed(unjudged)}{why}{advice}")
    pairs = {name: followed_by[name] for name, known in free.items() if known and followed_by[name]}
    return Pairing(pairs, free, live.multiplying, handwritten, tuple(notes))


def _affected(paths: Set[str], graph: Graph) -> set[str]:
    """The parameters that reach some modules; all of them where a module left nothing in the graph."""
    leaves = set(graph.inputs)  # the paths of parameters are their names; the others have none
    nodes = [node for node in graph if node not in leaves]
    parts = [[node for node in nodes if not path or f"{node.path}.".startswith(f"{path}.")] for path in paths]
    waiting = [node for part in parts for node in part] if all(parts) else [graph.output]
    met = set(waiting)
    while waiting:
        fresh = set(waiting.pop().inputs) - met
        met |= fresh
        waiting += fresh
    return {node.path for node in met & leaves if node.path}


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def handwritten_in(graph: Graph, model: nn.Module) -> dict[str, Handwritten]:
    """Modules of the user's own that normalize or activate, as the graph of a report shows them."""
    modules, users = dict(model.named_modules()), graph.users
    found: dict[str, Handwritten] = {}
    for node in graph:
        module = modules.get(node.path)
        if module is None or is_observable(module) or any(True for _ in module.children()):
            continue
        normalizer, activation = completed(node, users), registry.reading(node, Activation)
        if normalizer is not None and normalizer.by_hand:
            owner, _, name = normalizer.gamma.path.rpartition(".") if isinstance(normalizer.gamma, Node) else ("", "", None)
            found[node.path] = Handwritten(replace(normalizer, gamma=None, beta=None), name if owner == node.path else None)
        elif activation is not None and activation.usual:
            found.setdefault(node.path, Handwritten(None))
    return found
