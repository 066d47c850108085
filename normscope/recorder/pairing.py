"""Which normalizer ends the scale of which weight: as the first sampled step showed it, or as `ns.symmetries` found it before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from normscope.graph.graph import Graph, Node
from normscope.recorder.backward import Verdicts
from normscope.recorder.layers import MULTIPLYING, NORMALIZING, Handwritten, Pairing, Seen, is_observable, weight_names
from normscope.rules.normalizers import normalizer_of
from normscope.symmetry.report import SymmetryReport

LISTED = 8  # names in a note
ADVICE = "pass ns.watch(…, symmetries=ns.symmetries(model, example)), made before training"


def pair(model: nn.Module, seen: Seen, verdicts: Verdicts | None, report: SymmetryReport | None = None) -> Pairing:
    """From the live backward pass, and from the report where there is one. verdicts: None if no pass could be read."""
    live = verdicts or Verdicts()
    followed_by = {**pair_by_order(model, seen), **live.followed_by} if verdicts is None else dict(live.followed_by)
    handwritten = {path: Handwritten(None) for path in live.activating}
    free: dict[str, bool | None] = {name: live.scale_free.get(name) for name in weight_names(model)}
    notes = []
    if report is not None:
        handwritten = handwritten_in(report.numerics.graph, model)
        ends = scale_free_weights(report)
        for name in free:
            said, shown = name in ends, free[name]
            differ = shown is not None and shown != said  # a normalizer that is frozen since ends nothing
            hidden = name not in live.scale_free or name in live.beside  # the report saw the model's output, not the loss
            free[name] = None if differ or (said and shown is None and hidden) else said
            if free[name]:
                followed_by[name] = ends[name]
    elif live.dividing:
        notes.append(
            f"modules that divide by a root, as a normalizer does, are not recorded: {listed(sorted(live.dividing))}. To record "
            f"those that are normalizers, {ADVICE}"
        )
    if live.functions:
        notes.append(f"called as functions, so what enters them is not recorded: {', '.join(live.functions)}")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    unjudged = [name for name, known in free.items() if known is None and name not in frozen]
    if unjudged:
        why = (
            ""
            if verdicts is not None
            else "; no backward pass of the whole loss was seen, so weights are paired by the order of calls"
        )
        advice = "" if report is not None else f". To judge them, {ADVICE}"
        notes.append(f"not judged whether the loss ignores their scale: {listed(unjudged)}{why}{advice}")
    return Pairing(followed_by, free, live.multiplying, handwritten, tuple(notes))


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def scale_free_weights(report: SymmetryReport) -> dict[str, str]:
    """Weight → what ends its scale, for weights that a group scales whole, alone or with other parameters of their module.

    A group that scales weights against each other frees one where all others are free by themselves.
    """
    found: dict[str, str] = {}
    alone: set[str] = set()
    groups = [group for group in report.of_kind("scale", "joint-scale", "rescale", "linear") if group.whole]
    for _ in groups:
        for group in groups:
            rest = {action.parameter: action.degree for action in group.actions if action.parameter not in alone}
            if len({name.rpartition(".")[0] for name in rest}) == 1 and len(set(rest.values())) == 1:
                ends = [found[name] for name in group.parameters if name in found] or ["", *group.path][-1:]
                found |= {name: found.get(name, ends[0]) for name in rest}
                alone |= set(rest) if len(rest) == 1 else set()
    return found


def handwritten_in(graph: Graph, model: nn.Module) -> dict[str, Handwritten]:
    """Modules of the user's own that normalize or activate, as the graph of a report shows them."""
    modules, users = dict(model.named_modules()), graph.users
    found: dict[str, Handwritten] = {}
    for node in graph:
        module = modules.get(node.path)
        if module is None or is_observable(module) or any(True for _ in module.children()):
            continue
        if node.op == "standardize":
            found[node.path] = Handwritten(normalizer_of(node), _gamma(node, users[node]))
        elif node.op in ACTIVATING_OPERATIONS:
            found.setdefault(node.path, Handwritten(None))
    return found


ACTIVATING_OPERATIONS = (
    "relu", "relu6", "leaky_relu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardswish",
    "sigmoid", "log_sigmoid", "hardsigmoid", "tanh", "hardtanh", "softplus",
)  # fmt: skip


def _gamma(node: Node, readers: Sequence[Node]) -> str | None:
    """The parameter of the module that multiplies what it normalized, as it is."""
    if len(readers) != 1 or readers[0].op != "mul":
        return None
    names = [source.path for source in readers[0].inputs if source.op == "parameter"]
    return next((name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == node.path), None)


def pair_by_order(model: nn.Module, seen: Seen) -> dict[str, str]:
    """Each weight with the normalizer that is called next, before any other weight."""
    modules = dict(model.named_modules())
    followed_by = {}
    waiting: str | None = None
    for path, _ in seen.calls or [(path, 1) for path in modules]:
        module = modules[path]
        if isinstance(module, MULTIPLYING):
            waiting = f"{path}.weight".lstrip(".") if module._parameters.get("weight") is not None else None
        elif isinstance(module, NORMALIZING) and waiting is not None:
            followed_by[waiting], waiting = path, None
    return followed_by
