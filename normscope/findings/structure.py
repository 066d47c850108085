"""NS1xx: where normalizers stand, and what that makes useless, constant or unstable."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from normscope.findings.axes import feature_axes
from normscope.findings.residual import terms
from normscope.findings.subject import InstanceNorm, Subject
from normscope.findings.table import Hit, rule
from normscope.graph.graph import Constant, Node
from normscope.rules.normalizers import elements
from normscope.rules.readings import Activation, LinearMap, Normalizer, Permuting, Random, Reshaping, Scaling, Softmax
from normscope.rules.registry import registry

SHIFTED = 0.1  # dropout's rate from which the variance is a tenth larger in training: more than batches of 100 scatter
NEARBY = 6  # operations behind a tied normalizer in which its weights are looked for


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
            message = f"its bias is removed by the normalizer{'s'[: len(readers) > 1]} {removers}"
            yield Hit.at(node, message, parameters=bias.value.numel(), removed_by=removers)


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
        if source in subject.left and len(subject.readers[source]) == 1:
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
    node = subject.left.get(node, node)
    before = None if registry.reading(node, Normalizer) is None else registry.reading(node.inputs[0], LinearMap)
    if before is not None and before.output_axis == -1 and node.inputs[0].shape[-1] == node.shape[-1]:
        yield Hit.at(node, "the output of the last linear layer is normalized", outputs=node.shape[-1])


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
    """LayerNorm behind a convolution normalizes along the width of the picture, LayerNorm on transposed tokens along the
    sequence, and BatchNorm1d behind a Linear on (batch, tokens, features) keeps one statistic per token position: such mistakes
    train badly, and only for one length. The rule follows features from the linear layer that wrote them through whatever moves
    them."""
    assert subject.graph is not None
    features = feature_axes(subject.graph)
    for node, normalizer in subject.normalizers:
        own, rank = features[node.inputs[0]], len(node.shape)
        if rank < 3 or not own:
            continue
        where = " and ".join(map(str, sorted(own)))
        if normalizer.kind in ("layer", "rms") and not own & {axis % rank for axis in normalizer.axes}:
            axes = " and ".join(str(axis % rank) for axis in normalizer.axes)
            yield Hit.at(node, f"it normalizes along axis {axes}, and the features are axis {where}", axis=axes, features=where)
        elif normalizer.kind == "batch" and 1 not in own:
            message = f"it keeps one statistic per index of axis 1, and the features are axis {where}"
            yield Hit.at(node, message, axis=1, features=where)


@rule(
    "NS112", "different normalizers in one residual stream", "info",
    fix="Use one kind of normalizer for all branches that meet, unless the difference is meant.",
    reference="Akbar, section 9.1", needs=("graph",),
)  # fmt: skip
def mixed_kinds(subject: Subject) -> Iterator[Hit]:
    """Each of the branches that are added has the scale that its own normalizer gives it: with a batch normalizer it depends on
    the other samples, with a layer normalizer it does not. One branch then depends on the batch and the other does not, which is
    often left over from a port."""
    assert subject.graph is not None
    for node in subject.graph:
        if len(added := terms(node)) == 2:
            kinds = [_kind(source) for source in added]
            if "batch" in kinds and set(kinds) & {"layer", "group", "instance", "rms"}:
                yield Hit.at(node, f"a {kinds[0]} and a {kinds[1]} normalizer meet in a sum")


@rule(
    "NS113", "one layer normalizer used in several places", "warning",
    fix="Give each place its own normalizer: nn.ModuleList([norm() for _ in blocks]), not [norm] * depth.",
    reference="Ba, Kiros & Hinton 2016; Lan et al. 2020 (ALBERT, which ties whole blocks)", needs=("graph",),
)  # fmt: skip
def tied_normalizer(subject: Subject) -> Iterator[Hit]:
    """A layer normalizer has no statistics to mix, but its γ and β are then one compromise for places that want different scales.
    Usually one object was made once and put into every block. It is not reported where it is intended: where the layers behind it
    are tied too, as in ALBERT, or where no layer follows."""
    uses: dict[str, list[Node]] = {}
    for node, normalizer in subject.normalizers:
        if normalizer.kind != "batch" and isinstance(normalizer.gamma, Constant) and normalizer.gamma.learned:
            uses.setdefault(normalizer.gamma.sources[0], []).append(node)
    for nodes in uses.values():
        behind = [_weights_behind(node, subject) for node in nodes]
        if len(nodes) > 1 and all(behind) and len(set(behind)) == len(nodes):
            yield Hit.at(nodes[0], f"it is called {len(nodes)} times, each time before other layers", uses=len(nodes))


def _weights_behind(node: Node, subject: Subject) -> frozenset[str]:
    """The weights of the first linear layers that read a node, through what has none."""
    reached, found = {node}, set()
    for _ in range(NEARBY):
        readers = {reader for source in reached for reader in subject.readers[source]}
        found |= {name for reader in readers & subject.weighted.keys() for name in reader.parameters}
        reached = {reader for reader in readers if not reader.parameters or registry.reading(reader, Scaling) is not None}
    return frozenset(found)


@rule(
    "NS115", "dropout before a batch normalizer", "warning",
    fix="Put dropout behind the last batch normalizer, or drop it: batch statistics regularize already.",
    reference="Li et al. 2019 (variance shift)", needs=("train graph",),
)  # fmt: skip
def dropout_before_batch_norm(subject: Subject) -> Iterator[Hit]:
    """In training, dropout of rate p makes the mean square of what it passes 1/(1 − p) times as large; in evaluation it does not.
    The running variance behind it is that of training, so evaluation divides by too much. Reported where a batch normalizer reads
    what was dropped through linear layers, activations and scales alone, from p = 0.1 on."""
    for node in subject.train_graph or ():
        if _kind(node) != "batch" or (dropped := _dropped(node.inputs[0])) is None:
            continue
        before, rate = dropped
        place, factor = before.path or before.name, 1 / (1 - rate)
        message = f"{place} drops {rate:.0%} of what it normalizes: {factor:.3g} times the mean square, in training alone"
        yield Hit.at(node, message, rate=rate, dropout=place)


def _dropped(node: Node) -> tuple[Node, float] | None:
    """The dropout that a value comes from along one path of layers and entrywise functions."""
    while node.inputs:
        read = registry.reading(node)
        if isinstance(read, Random):
            return (node, read.rate) if read.rate is not None and SHIFTED <= read.rate < 1 else None
        if not isinstance(read, (LinearMap, Activation, Scaling, Reshaping, Permuting)) or len(node.inputs) > 1:
            return None
        node = node.inputs[0]
    return None


@rule(
    "NS116", "a normalizer directly before softmax", "warning",
    fix="Remove the normalizer, or multiply by a learned temperature behind it.",
    reference="Akbar, section 9.4", needs=("graph",),
)  # fmt: skip
def normalized_before_softmax(subject: Subject) -> Iterator[Hit]:
    """What leaves a normalizer over n entries is at most √(n − 1) |γ| above the mean, so softmax behind it can never be surer than
    that allows, whatever the input: probabilities have a ceiling, the loss a floor, and every row is made equally sharp."""
    assert subject.graph is not None
    for node in subject.graph:
        read = registry.reading(node, Softmax)
        source = None if read is None else read.input
        while source is not None and registry.reading(source, Reshaping) is not None:
            source = source.inputs[0]
        source = None if source is None else subject.left.get(source)
        if source is not None and _kind(source) != "l2":
            yield Hit.at(node, f"its input is the output of {source.path or source.op}, a {_kind(source)} normalizer")
