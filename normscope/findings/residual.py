"""NS1xx, part two: residual streams, where normalizers stand in them, and depth without any."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from normscope.findings.subject import Subject
from normscope.findings.table import Hit, rule
from normscope.graph.graph import Node
from normscope.rules.readings import Activation, Attention, Normalizer, Scaling, Sum, learned
from normscope.rules.registry import registry

FEW_LAYERS = 8  # weight layers from which a stack without normalizers is deep
DEEP_STACK = 36  # post-norm sums: 18 encoder layers, at which post-norm diverges in spite of warm-up (Liu et al. 2020)
NEEDS_WARM_UP = 12  # post-norm sums: the 6 encoder layers that fail without warm-up (Xiong et al. 2020)
BARE_BRANCHES = 3  # residual sums without any scale control
LARGE_PRODUCT = 6.0  # log10 of the certified bound of a stack without normalizers
PRE_NORM = 2  # sums that a normalizer and a later sum read: one alone may be an accident
OWN_WARM_UP = (torch.optim.RAdam,)


@rule(
    "NS106", "post-norm residuals in a deep stack", "info",
    fix="Put the normalizer inside the branch: x + f(norm(x)); or warm the learning rate up over some thousand steps. "
        "Either changes the learning rate that is best: retune it.",
    reference="Xiong et al. 2020, section 3; Liu et al. 2020, figure 1", needs=("graph",),
)  # fmt: skip
def post_norm(subject: Subject) -> Iterator[Hit]:
    """norm(x + f(x)) divides the skip path by a standard deviation in every block, so gradients shrink or grow with depth and
    training depends on a learning-rate warm-up; x + f(norm(x)) leaves the skip path alone. Six encoder layers (12 sums) already
    fail without warm-up, so an optimizer or a run that shows none is a warning; beyond 18 layers (36 sums) training is known to
    diverge in spite of it, which is reported in any case."""
    sums = [
        source for node, _ in subject.normalizers if len(terms(source := node.inputs[0])) == 2 and len(subject.readers[source]) == 1
    ]
    warmed = warm_up(subject)
    if len(sums) >= NEEDS_WARM_UP and warmed is False:
        message = f"{len(sums)} residual sums are normalized behind the sum, and the learning rate starts at its full height"
        yield Hit.at(sums[0], message, severity="warning", sums=len(sums))
    elif len(sums) > DEEP_STACK:
        yield Hit.at(sums[0], f"{len(sums)} residual sums are normalized behind the sum", sums=len(sums))


def warm_up(subject: Subject) -> bool | None:
    """Whether the learning rate starts low: by the rows of a run, else by an optimizer before its first steps; None if unknown.

    A scheduler of torch leaves `initial_lr` in every group and sets the first rate when it is made, so make it before you ask.
    """
    if subject.run is not None and "learning_rate" in subject.run.columns:
        rates = subject.run.arrays("learning_rate")["learning_rate"]
        rates = rates[rates == rates]
        if len(rates) > 1:
            return bool(rates[0] < 0.5 * rates.max())
    if subject.optimizer is None or subject.stepped:
        return None
    if isinstance(subject.optimizer, OWN_WARM_UP):
        return True
    return any(float(group["lr"]) < float(group.get("initial_lr", group["lr"])) for group in subject.optimizer.param_groups)


@rule(
    "NS107", "residual branches without scale control", "warning",
    fix="Normalize inside the branch, or scale it by a small or zero-initialised factor.",
    reference="De & Smith 2020; Zhang, Dauphin & Ma 2019", needs=("graph",),
)  # fmt: skip
def bare_branches(subject: Subject) -> Iterator[Hit]:
    """Without a normalizer or a small factor in the branch, each x + f(x) about doubles the variance at initialisation, so
    activations grow exponentially with the number of blocks."""
    assert subject.graph is not None
    bare = [
        node
        for node in subject.graph
        if _is_residual(node)
        and not _controlled(node)
        and not any(registry.reading(reader, Normalizer) is not None for reader in subject.readers[node])
    ]
    if len(bare) >= BARE_BRANCHES:
        yield Hit.at(bare[0], f"{len(bare)} residual sums add a branch that nothing normalizes or scales", sums=len(bare))


def _is_residual(node: Node) -> bool:
    """x + f(x): a sum of two values of which one is computed from the other."""
    if len(set(terms(node))) != 2:
        return False
    return any(_reaches(branch, skip)[0] for branch, skip in (node.inputs, node.inputs[::-1]))


def terms(node: Node) -> tuple[Node, ...]:
    """What a sum adds up that depends on the input; nothing if a node is no sum."""
    found = registry.reading(node, Sum)
    return () if found is None else found.terms


def _controlled(node: Node) -> bool:
    sides = (_reaches(branch, skip) for branch, skip in (node.inputs, node.inputs[::-1]))
    return any(found and controlled for found, controlled in sides)


def _reaches(branch: Node, skip: Node) -> tuple[bool, bool]:
    """Whether `branch` is computed from `skip` by weights, and whether a normalizer or a learned scale lies in between."""
    stack, seen = [branch], {branch}
    found = weights = controlled = False
    while stack:
        node = stack.pop()
        if node is skip:
            found = True
            continue
        weights = weights or any(constant.learned and constant.value.dim() > 1 for constant in node.constants)
        reading = registry.reading(node)
        scaled = isinstance(reading, Scaling) and learned(reading.factor)
        controlled = controlled or scaled or isinstance(reading, Normalizer)
        if len(seen) > 200:  # a branch is local; a whole network behind a long skip is none
            return False, False
        for source in node.inputs:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return found and weights, controlled


@rule(
    "NS108", "depth without any normalizer, and a bound that explodes", "warning",
    fix="Add normalizers, or residual branches that start at zero, or lower the weights' norms (ns.optim.spectral_cap).",
    reference="Than 2025, Theorem 9", needs=("graph",),
)  # fmt: skip
def no_normalizer(subject: Subject) -> Iterator[Hit]:
    """Nothing in this network fixes the scale of activations, and its Lipschitz bound is a product that grows with
    every layer: gradients can explode or vanish exponentially with depth. A bounded function with a learned scale, such as
    γ tanh(α x) in the place of a normalizer, does fix the scale, and such networks are not reported."""
    assert subject.graph is not None
    if subject.normalizers or len(subject.weighted) < FEW_LAYERS or any(_squashes(node, subject) for node in subject.graph):
        return
    if subject.bound is None:
        return
    size = subject.bound.log10
    if size > LARGE_PRODUCT:
        yield Hit(
            "", f"{len(subject.weighted)} layers, no normalizer, and a Lipschitz bound of 10^{size:.1f}",
            {"layers": len(subject.weighted), "log10_upper": size if math.isfinite(size) else "inf"},
        )  # fmt: skip


def _squashes(node: Node, subject: Subject) -> bool:
    """φ(α x) with a bounded φ and a learned α, or γ φ(x) with a learned γ (Zhu et al. 2025)."""
    read = registry.reading(node, Activation)
    if read is None or not read.bounded:
        return False
    around = (*node.inputs, *subject.readers[node])
    return any(learned(found.factor) for part in around if (found := registry.reading(part, Scaling)) is not None)


@rule(
    "NS114", "a pre-norm transformer without a final normalizer", "warning",
    fix="Normalize the residual stream once more before the last layer: head(norm(x)).",
    reference="Xiong et al. 2020, section 3.1; Radford et al. 2019, section 2.3", needs=("graph",),
)  # fmt: skip
def no_final_norm(subject: Subject) -> Iterator[Hit]:
    """In x + f(norm(x)) nothing ever divides the stream itself, so it grows with every block. What leaves the last block has a
    scale that depends on depth and on training; without a last normalizer the head sees that scale, and so do its gradients. Only
    models with attention and at least two such blocks are judged, unless they have a normalizer beside this output."""
    assert subject.graph is not None
    nodes = list(subject.graph)
    attends = any(registry.reading(node, Attention) is not None for node in nodes)
    stream = [node for node in nodes if _is_residual(node)] if attends else []
    before = [node for node in stream if any(_normalizes(reader) for reader in subject.readers[node])]
    read_on = [node for node in before if any(terms(reader) for reader in subject.readers[node])]
    if len(read_on) < PRE_NORM or _others(subject):
        return
    last = stream[-1]
    behind = {last}
    for node in nodes:
        if behind.intersection(node.inputs):
            behind.add(node)
    if not any(map(_normalizes, behind)):
        yield Hit.at(last, f"{len(read_on)} blocks normalize what they read, and nothing normalizes what the last one leaves",
                     blocks=len(read_on))  # fmt: skip


def _normalizes(node: Node) -> bool:
    return registry.reading(node, Normalizer) is not None


def _others(subject: Subject) -> list[str]:
    """Modules with nothing but vectors that this output does not read: normalizers of another output, perhaps."""
    assert subject.graph is not None
    read = {name for node in subject.graph for constant in node.constants for name in constant.sources} | set(
        subject.graph.absorbed
    )
    return [
        path for path, module in subject.model.named_modules() if _vectors_alone(module, path) and not read & _names(module, path)
    ]


def _names(module: nn.Module, path: str) -> set[str]:
    return {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}


def _vectors_alone(module: nn.Module, path: str) -> bool:
    own = [parameter.dim() for parameter in module.parameters(recurse=False)]
    return bool(own) and max(own) == 1 and not any(module.children())
