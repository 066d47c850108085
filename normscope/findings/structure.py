"""NS1xx: where normalizers stand, and what that makes useless, constant or unstable."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from normscope.findings.subject import InstanceNorm, Subject
from normscope.findings.table import Hit, rule
from normscope.graph.graph import Constant, Node
from normscope.rules.normalizers import elements
from normscope.rules.readings import LinearMap, Normalizer, Reshaping, Scaling, Sum, learned
from normscope.rules.registry import registry

FEW_LAYERS = 8  # weight layers from which a stack without normalizers is deep
DEEP_STACK = 36  # post-norm sums from which training is known to need warm-up or worse (BERT-base has 24)
BARE_BRANCHES = 3  # residual sums without any scale control
LARGE_PRODUCT = 6.0  # log10 of the certified bound of a stack without normalizers


@rule(
    "NS101", "a bias that the next normalizer removes", "warning",
    fix="Pass bias=False to this layer (`.apply()` does it and folds the value into the running mean).",
    reference="Ioffe & Szegedy 2015, section 3.2", needs=("graph",),
)  # fmt: skip
def redundant_bias(subject: Subject) -> Iterator[Hit]:
    """Batch and instance normalization subtract each channel's mean, so a constant added to the channel before them has no
    effect on the output and no gradient. The bias costs memory and optimizer state, and weight decay on it is noise."""
    for node, applied in subject.weighted.items():
        bias, readers = applied.bias, subject.readers[node]
        second = applied.output_axis == 1 - len(node.shape)  # where the normalizers below have their channels
        if not (isinstance(bias, Constant) and bias.learned and second and readers):
            continue
        if all(_removes_shift(node, reader) for reader in readers):
            removers = ", ".join(reader.path or reader.op for reader in readers)
            yield Hit.at(node, f"its bias is removed by {removers}", parameters=bias.value.numel(), removed_by=removers)


def _removes_shift(node: Node, reader: Node) -> bool:
    """Whether a reader subtracts the mean of every index of axis 1 of `node`."""
    normalizer = registry.reading(reader, Normalizer)
    if normalizer is None or len(reader.inputs) != 1:
        return False
    return normalizer.kind in ("batch", "instance") or (normalizer.kind == "group" and normalizer.groups == node.shape[1] > 1)


@rule(
    "NS102", "a normalizer directly after another", "warning",
    fix="Keep one of the two.",
    reference="Ba, Kiros & Hinton 2016", needs=("graph",),
)  # fmt: skip
def repeated_normalizer(subject: Subject) -> Iterator[Hit]:
    """The second of two normalizers in a row sees inputs whose scale the first has already fixed: it can only undo the first
    one's affine parameters, adds a factor to the Lipschitz bound and costs a pass over the activations."""
    for node, _ in subject.normalizers:
        source = node.inputs[0]
        if registry.reading(source, Normalizer) is not None and len(subject.readers[source]) == 1:
            yield Hit.at(node, f"it normalizes what {source.path or source.op} has just normalized")


@rule(
    "NS103", "statistics over too few elements", "error",
    fix="Normalize over more elements: fewer groups, another normalizer, or a place where the feature map is larger.",
    reference="Wu & He 2018, section 3",
)  # fmt: skip
def few_elements(subject: Subject) -> Iterator[Hit]:
    """A centered normalizer over one element returns the constant β whatever it is given, over two elements it returns ±1: the
    layer's input is thrown away and no gradient passes. This happens with LN of width 2, with one channel per group at 1×1, and
    with instance normalization of a 1×1 feature map."""
    counted = {path: _elements(subject.torch_normalizers[path], shape) for path, shape in subject.shapes.items()}
    if subject.graph is not None:  # those written by hand
        written = ((node, found) for node, found in subject.normalizers if found.by_hand and found.centered)
        counted |= {node.path or node.name: elements(node, found) for node, found in written}
    for path, count in counted.items():
        if count is not None and count <= 2:
            over = "one element, so its output is constant" if count == 1 else "two elements, so its output is ±1"
            yield Hit(path, f"it normalizes over {over}", {"elements": count})


def _elements(module: nn.Module, shape: tuple[int, ...]) -> int | None:
    """How many entries of a sample share a mean and a variance; None where that depends on the batch, or nothing is centered."""
    if isinstance(module, nn.LayerNorm):
        return math.prod(module.normalized_shape)
    if isinstance(module, nn.GroupNorm):
        return math.prod(shape[1:]) // module.num_groups
    return math.prod(shape[2:]) if isinstance(module, InstanceNorm) and module.running_var is None else None


@rule(
    "NS104", "one batch normalizer used in several places", "error",
    fix="Give each place its own normalizer.",
    reference="Ioffe & Szegedy 2015, algorithm 2", needs=("graph",),
)  # fmt: skip
def shared_statistics(subject: Subject) -> Iterator[Hit]:
    """Running statistics of a BN that is called in several places are an average over inputs with different distributions. In
    training each call uses its own batch statistics, in eval mode all use the average, so the two modes compute different
    functions."""
    uses: dict[str, list[Node]] = {}
    for node, normalizer in subject.normalizers:
        if normalizer.kind == "batch" and normalizer.fixed:
            statistics = normalizer.statistics
            stored = isinstance(statistics, Constant) and statistics.sources
            uses.setdefault(stored[0] if stored else node.name, []).append(node)
    for nodes in uses.values():
        if len(nodes) > 1:
            yield Hit.at(nodes[0], f"it is called {len(nodes)} times with one set of running statistics", uses=len(nodes))


@rule(
    "NS105", "a normalizer after the last layer", "warning",
    fix="Remove it, or put it before the last layer.",
    reference="Akbar, section 9.4", needs=("graph",),
)  # fmt: skip
def normalized_logits(subject: Subject) -> Iterator[Hit]:
    """Logits that leave a normalizer have a fixed mean and variance over the batch or the classes, so the model cannot be
    confident for one input and unsure for another, and the loss has a floor above zero."""
    assert subject.graph is not None
    node = subject.graph.output
    while registry.reading(node, Reshaping) is not None and len(subject.readers[node.input]) == 1:
        node = node.input
    before = None if registry.reading(node, Normalizer) is None else registry.reading(node.inputs[0], LinearMap)
    if before is not None and before.output_axis == -1 and node.inputs[0].shape[-1] == node.shape[-1]:
        yield Hit.at(node, "the output of the last linear layer is normalized", outputs=node.shape[-1])


@rule(
    "NS106", "post-norm residuals in a deep stack", "info",
    fix="Put the normalizer inside the branch: x + f(norm(x)); or use a long warm-up.",
    reference="Xiong et al. 2020", needs=("graph",),
)  # fmt: skip
def post_norm(subject: Subject) -> Iterator[Hit]:
    """norm(x + f(x)) divides the skip path by a standard deviation in every block, so gradients shrink or grow with depth and
    training depends on a learning-rate warm-up; x + f(norm(x)) leaves the skip path alone."""
    sums = [
        source
        for node, _ in subject.normalizers
        if len(_terms(source := node.inputs[0])) == 2 and len(subject.readers[source]) == 1
    ]
    if len(sums) > DEEP_STACK:
        yield Hit.at(sums[0], f"{len(sums)} residual sums are normalized behind the sum", sums=len(sums))


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
    if len(set(_terms(node))) != 2:
        return False
    return any(_reaches(branch, skip)[0] for branch, skip in (node.inputs, node.inputs[::-1]))


def _terms(node: Node) -> tuple[Node, ...]:
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
    """Nothing in this network fixes the scale of activations, and its certified Lipschitz bound is a product that grows with
    every layer: gradients can explode or vanish exponentially with depth."""
    assert subject.graph is not None
    if subject.normalizers or len(subject.weighted) < FEW_LAYERS or subject.bound is None:
        return
    size = subject.bound.log10
    if size > LARGE_PRODUCT:
        yield Hit(
            "", f"{len(subject.weighted)} layers, no normalizer, and a certified bound of 10^{size:.1f}",
            {"layers": len(subject.weighted), "log10_upper": size if math.isfinite(size) else "inf"},
        )  # fmt: skip


@rule(
    "NS109", "weight or spectral norm under a batch normalizer", "warning",
    fix="Drop the parametrization (`.apply()` does, keeping the weight).",
    reference="Salimans & Kingma 2016", needs=("graph",),
)  # fmt: skip
def parametrized_under_batch_norm(subject: Subject) -> Iterator[Hit]:
    """BN removes the scale of the weight before it, so fixing that scale by weight or spectral normalization changes nothing
    in what the network computes; it only costs time and makes the effective learning rate harder to reason about."""
    for node, applied in subject.weighted.items():
        readers, weight = subject.readers[node], applied.weight
        assert isinstance(weight, Constant)
        parametrized = any(".parametrizations." in f".{name}" or name.endswith(("_g", "_orig")) for name in weight.sources)
        if parametrized and readers and all(_kind(reader) == "batch" for reader in readers):
            yield Hit.at(node, f"its weight is renormalized and {readers[0].path or 'a BN'} removes its scale again")


def _kind(node: Node) -> str:
    normalizer = registry.reading(node, Normalizer)
    return "" if normalizer is None else normalizer.kind


@rule(
    "NS110", "GroupNorm with one channel per group, or with one group", "info",
    fix="If it is meant, say so by name: InstanceNorm for one channel per group, LayerNorm for one group.",
    reference="Wu & He 2018", needs=("graph",),
)  # fmt: skip
def degenerate_groups(subject: Subject) -> Iterator[Hit]:
    """With as many groups as channels GroupNorm is instance normalization, with one group it is layer normalization over all
    positions. Either is often an accident of a width that was changed while the number of groups was not."""
    for node, normalizer in subject.normalizers:
        channels = node.shape[1] if normalizer.kind == "group" else 0
        if channels > 1 and normalizer.groups == channels:
            yield Hit.at(node, f"{channels} groups of one channel each", groups=normalizer.groups, channels=channels)


@rule(
    "NS111", "the normalized axis is not the channel axis", "warning",
    fix="Move the channels to the axis that the normalizer expects, or normalize over the channel axis.",
    reference="torch.nn.LayerNorm, torch.nn.BatchNorm1d", needs=("graph",),
)  # fmt: skip
def wrong_axis(subject: Subject) -> Iterator[Hit]:
    """LayerNorm straight behind a convolution normalizes along the width of the picture, and BatchNorm1d straight behind a
    Linear on (batch, tokens, features) keeps one statistic per token position: channels_last mistakes that train, badly."""
    for node, normalizer in subject.normalizers:
        before = registry.reading(node.inputs[0], LinearMap)
        rank = len(node.shape)
        if before is None:
            continue
        if before.kernel is not None and normalizer.kind in ("layer", "rms") and 1 not in normalizer.axes and rank > 2:
            yield Hit.at(node, f"it normalizes axis {rank - 1} behind a convolution, whose channels are axis 1", axis=rank - 1)
        if before.kernel is None and before.output_axis == -1 and normalizer.kind == "batch" and rank > 2:
            message = f"it keeps one statistic an index of axis 1 behind a Linear, whose features are axis {rank - 1}"
            yield Hit.at(node, message, axis=1)


@rule(
    "NS112", "different normalizers in one residual stream", "info",
    fix="Use one kind of normalizer for all branches that meet, unless the difference is meant.",
    reference="Akbar, section 9.1", needs=("graph",),
)  # fmt: skip
def mixed_kinds(subject: Subject) -> Iterator[Hit]:
    """Branches that are added have scales of their own normalizer's making: a batch normalizer's depends on the other samples,
    a layer normalizer's does not. Adding them makes one branch batch-dependent and the other not, often left over from a port."""
    assert subject.graph is not None
    for node in subject.graph:
        if len(terms := _terms(node)) == 2:
            kinds = [_kind(source) for source in terms]
            if "batch" in kinds and set(kinds) & {"layer", "group", "instance", "rms"}:
                yield Hit.at(node, f"a {kinds[0]} and a {kinds[1]} normalizer meet in a sum")
