"""NS4xx: which layers make the certified bound large, and where products explode in a recorded run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from normscope.checkup.checks import Hit, check
from normscope.checkup.subject import Subject
from normscope.graph.graph import Node, cast
from normscope.rules.attention import logit_scale
from normscope.rules.normalizers import running_scale

HALF_OF_ALL = 0.5
FEW = 6  # layers, below which one of them carries a large share anyway
LARGE_GAIN, IN_A_ROW = 10.0, 3
LARGE_LOGIT = 50.0
DECADES = 3.0  # of a depth product, from which a run explodes or vanishes


@check(
    "NS401", "one layer carries more than half of the product of norms", "info",
    fix="Look at this layer first: cap its norm (ns.optim.spectral_cap) or normalize before it.",
    reference="Than 2025, Lemma 5", needs=("graph",),
)  # fmt: skip
def dominant_layer(subject: Subject) -> Iterator[Hit]:
    """The product of the layers' norms bounds how much the network can amplify. If one layer of many has more than half of
    its logarithm, the sensitivity of the whole model is that layer's, and no other layer can mend it."""
    logs = {node: max(norm.log10, 0.0) for node, norm in subject.weight_norms.items() if norm.finite}
    total = sum(logs.values())
    for node, log in logs.items() if len(logs) >= FEW and total > 1 else ():
        if log > HALF_OF_ALL * total:
            yield Hit.at(node, f"its norm is 10^{log:.1f}, {log / total:.0%} of the product's logarithm", share=log / total)


@check(
    "NS402", "a row of normalizers with large gains", "warning",
    fix="Look for collapsed variances before them (NS204, NS203) or for grown γ.",
    reference="Than 2025, Corollary 10", needs=("graph",),
)  # fmt: skip
def large_gains(subject: Subject) -> Iterator[Hit]:
    """A normalizer whose gain is above one amplifies. Several in a row above ten multiply the bound by a thousand and more,
    the opposite of what they are there for; eval-mode BN with tiny running variances is the usual cause."""
    row: list[tuple[Node, float]] = []
    for node, normalizer in subject.normalizers:
        if not normalizer.fixed:  # the others divide by what the input has
            continue
        gain = float(running_scale(normalizer).abs().max())
        row = [*row, (node, gain)] if gain > LARGE_GAIN else []
        if len(row) == IN_A_ROW:
            product = math.prod(gain for _, gain in row)
            yield Hit.at(row[0][0], f"{IN_A_ROW} normalizers in a row have gains above {LARGE_GAIN:g}", product_of_gains=product)


@check(
    "NS403", "a depth product that explodes or vanishes in a run", "warning",
    fix="Lower the learning rate, add weight decay or normalizers; the step says where to look.",
    reference="Than 2025, figures 1 and 2", needs=("run",),
)  # fmt: skip
def exploding_run(subject: Subject) -> Iterator[Hit]:
    """The product of all weights' norms, and that of all normalizers' gains, bound how gradients scale with depth. A run in
    which one of them moves by thousands has left the range in which a learning rate can fit all layers."""
    for name in ("log10_weight_product", "log10_gain_tight"):
        steps, values = subject.scalar(name)
        pairs = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None and math.isfinite(value)]
        begun = next((step for step, value in pairs if abs(value - pairs[0][1]) > DECADES), None)
        if begun is not None:
            yield Hit("", f"{name} moved from {pairs[0][1]:.1f} to {pairs[-1][1]:.1f}, by {DECADES:g} decades at step {begun}",
                      {"first": pairs[0][1], "last": pairs[-1][1], "step": int(begun)})  # fmt: skip


@check(
    "NS404", "attention logits that saturate softmax", "warning",
    fix="Normalize queries and keys (QK-norm), or lower the norms of their weights.",
    reference="Dehghani et al. 2023; Zhai et al. 2023", needs=("graph",),
)  # fmt: skip
def saturated_attention(subject: Subject) -> Iterator[Hit]:
    """Logits of attention grow with the product of the query and the key weights. Beyond some tens softmax is a hard choice:
    gradients to queries and keys vanish, and training diverges soon after."""
    assert subject.graph is not None
    nodes = [node for node in subject.graph if node.op == "scaled_dot_product_attention" and len(node.inputs) >= 2]
    if not nodes:
        return
    dtype = subject.graph.compute_dtype
    operands = [part for node in nodes for part in node.args[:2] if isinstance(part, Node)]
    with torch.no_grad():
        inputs = [value[:1] for value in subject.call.floats() or subject.call.tensors]
        values = subject.graph.run(inputs, dtype, capture=operands)[1]
    for node in nodes:
        query, key = (values[part] if isinstance(part, Node) else cast(part.value, dtype) for part in node.args[:2])
        shared = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
        logits = query @ key.repeat_interleave(shared, -3).mT * logit_scale(node) if query.dim() > 2 else query @ key.mT
        largest = float((logits.amax(-1) - logits.median(-1).values).max())
        if largest > LARGE_LOGIT:
            yield Hit.at(node, f"a logit on the example is {largest:.0f} above its row's median", largest=largest)
