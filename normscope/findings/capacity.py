"""NS4xx: which layers make the certified bound large."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from normscope.findings.subject import Subject
from normscope.findings.table import Hit, rule
from normscope.graph.graph import Constant, Node, cast
from normscope.rules.readings import Attention, LinearMap
from normscope.rules.registry import registry

HALF_OF_ALL = 0.5
FEW = 6  # layers, below which one of them carries a large share anyway
LARGE_GAIN, IN_A_ROW = 10.0, 3
LARGE_LOGIT = 50.0
POWER_STEPS = 6


@rule(
    "NS401", "one layer carries more than half of the product of norms", "info",
    fix="Look at this layer first: cap its norm (ns.optim.spectral_cap) or normalize before it.",
    reference="Than 2025, Lemma 5", needs=("graph",),
)  # fmt: skip
def dominant_layer(subject: Subject) -> Iterator[Hit]:
    """The product of the layers' norms bounds how much the network can amplify. If one layer of many has more than half of
    its logarithm, the sensitivity of the whole model is that layer's, and no other layer can mend it."""
    norms = {node: _estimated_norm(found) for node, found in subject.weighted.items()}
    logs = {node: max(math.log10(norm), 0.0) for node, norm in norms.items() if 0 < norm < math.inf}
    total = sum(logs.values())
    for node, log in logs.items() if len(logs) >= FEW and total > 1 else ():
        if log > HALF_OF_ALL * total:
            yield Hit.at(node, f"its norm is about 10^{log:.1f}, {log / total:.0%} of the product's logarithm", share=log / total)


@rule(
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
        gain = float(normalizer.affine[0].abs().max())
        row = [*row, (node, gain)] if gain > LARGE_GAIN else []
        if len(row) == IN_A_ROW:
            product = math.prod(gain for _, gain in row)
            yield Hit.at(row[0][0], f"{IN_A_ROW} normalizers in a row have gains above {LARGE_GAIN:g}", product_of_gains=product)


@rule(
    "NS404", "attention logits that saturate softmax", "warning",
    fix="Normalize queries and keys (QK-norm), or lower the norms of their weights.",
    reference="Dehghani et al. 2023; Zhai et al. 2023", needs=("graph",),
)  # fmt: skip
def saturated_attention(subject: Subject) -> Iterator[Hit]:
    """Logits of attention grow with the product of the query and the key weights. Beyond some tens softmax is a hard choice:
    gradients to queries and keys vanish, and training diverges soon after."""
    assert subject.graph is not None
    read = ((node, registry.reading(node, Attention)) for node in subject.graph)
    found = [(node, attention) for node, attention in read if attention is not None and len(node.inputs) >= 2]
    if not found:
        return
    dtype = subject.graph.compute_dtype
    operands = [part for _, attention in found for part in (attention.query, attention.key) if isinstance(part, Node)]
    with torch.no_grad():
        inputs = [value[:1] for value in subject.call.floats() or subject.call.tensors]
        values = subject.graph.run(inputs, dtype, capture=operands)[1]
    for node, attention in found:
        operands_of = (attention.query, attention.key)
        query, key = (values[part] if isinstance(part, Node) else cast(part.value, dtype) for part in operands_of)
        shared = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
        logits = query @ key.repeat_interleave(shared, -3).mT * attention.scale if query.dim() > 2 else query @ key.mT
        largest = float((logits.amax(-1) - logits.median(-1).values).max())
        if largest > LARGE_LOGIT:
            yield Hit.at(node, f"a logit on the example is {largest:.0f} above its row's median", largest=largest)


def _estimated_norm(found: LinearMap) -> float:
    """‖W‖ from below, by a few steps of power iteration in the weight's own type.

    There is one random vector: products with vectors read W much faster than those with matrices do.
    """
    assert isinstance(found.weight, Constant)
    value = found.weight.value.detach()
    matrix = value if value.dim() == 2 and found.kernel is None and value.dtype == torch.float32 else found.matrix().float()
    if not matrix.numel():
        return 0.0
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix)
    for _ in range(POWER_STEPS):
        image = matrix @ (vector / torch.linalg.vector_norm(vector))
        vector = matrix.mT @ (image / torch.linalg.vector_norm(image))
    return float(torch.linalg.vector_norm(vector))  # NaN of a weight of zeros, or with a NaN in it (NS209)
