"""Columns of a linearized graph: unit vectors at some node, carried forward through every node behind it.

Forward only: a node's linear part is the operation itself without what it adds, a slope per entry, or torch's forward-mode
derivative at the computed middle, so that nothing depends on torch's backward being the adjoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.certify.kernels import linear_map, terms
from normscope.core.rounding import SUMMED, length
from normscope.graph.graph import Graph, Node, _OverBatch
from normscope.rules.affine import without_offset
from normscope.rules.attention import probabilities
from normscope.rules.logits import weights
from normscope.rules.normalizers import channel_tensor
from normscope.rules.readings import Attention, LinearMap, Normalizer
from normscope.rules.registry import Context, Rule, registry
from normscope.rules.remainder import Sizes

LARGE = 2.0**300  # a change beside which few offsets count
CALL = 30_000  # entries that cost as much as one call of a node's map
PRODUCTS = 40  # of a sum, that cost as much as an entry
MOST_ENTRIES = 2_000_000  # of the columns of one node that are carried together
CACHED = 250_000  # entries of columns that are carried together, if that is enough: they stay in the cache
PATCHES = 600_000  # entries of the patches that are multiplied by a kernel in one go: they stay in the cache

SCORES = 200_000  # entries of the attention scores that are changed in one go

Map = Callable[..., torch.Tensor]  # of (columns, *shape) for each distinct input
Visit = Callable[[Node, torch.Tensor], None]


def rule_of(node: Node) -> Rule:
    rule = registry.find(node)
    assert rule is not None, f"{node.label} has no rule"
    return rule


def middle_of(facts: Context, node: Node) -> torch.Tensor:
    middle = facts.center(node)
    assert middle is not None, f"{node.label} has no value at the middle"
    return middle


def slope_map(slope: torch.Tensor) -> Map:
    return lambda columns: columns * slope


def zero_map(node: Node) -> Map:
    return lambda *columns: torch.zeros((len(columns[0]), *node.shape), dtype=torch.float64)


def derivative_map(node: Node, center: Callable[[Node], torch.Tensor | None]) -> Map:
    """The linear part of a node at the middle; of an affine node, what it does without what it adds."""
    sources = list(dict.fromkeys(node.inputs))
    rule, normalizer = registry.find(node), registry.reading(node, Normalizer)
    if normalizer is not None and normalizer.fixed:
        return slope_map(channel_tensor(node, normalizer, normalizer.affine[0], 1.0))
    product = linear_map(node)
    if product is not None and _plainly_convolved(product):
        return _convolution_map(product)
    written = _attention_map(node, center) or _normalizer_map(node, normalizer, center)
    if written is not None:
        return written
    plain = without_offset(node)
    if rule is not None and rule.linear(node) and not bool(plain.apply(*(_zeros(source) for source in sources)).any()):
        return _OverBatch(plain.apply)
    found = [center(source) for source in sources]
    middles = tuple(middle.contiguous() for middle in found if middle is not None)  # some kernels refuse what was expanded

    def derivative(*changes: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode derivative
            return torch.func.jvp(node.apply, middles, changes)[1]

    if rule is not None and rule.linear(node):
        _check(node, derivative)
    return _OverBatch(derivative)


def _plainly_convolved(product: LinearMap) -> bool:
    how = product.kernel
    plain = how is not None and how.groups == 1 and not how.transposed and how.mode == "zeros" and how.pad is None
    return plain and how is not None and len(how.size) == 2 and set(how.dilation) == {1}


def _convolution_map(product: LinearMap) -> Map:
    """A convolution as patches times a matrix, which is two to three times as fast in float64 as torch's kernel.

    Columns of one entry reach few others in the first layers: only the rectangle that is not 0 is convolved.
    """
    how, weight = product.kernel, product.matrix()
    assert how is not None
    (down, right), (top, left), (rows, columns) = how.stride, how.padding, product.weight.shape[2:]
    matrix = weight.reshape(len(weight), -1, rows, columns).permute(0, 2, 3, 1).reshape(len(weight), -1).T

    def convolved(batch: torch.Tensor) -> torch.Tensor:
        """(columns, 1, channels, height, width), kept in memory with channels last."""
        image = batch.squeeze(1).permute(0, 2, 3, 1)
        padded = functional.pad(image, (0, 0, *left, *top))
        across, along = (padded.shape[1] - rows) // down + 1, (padded.shape[2] - columns) // right + 1
        used = (image != 0).any(-1).any(0)
        (y, below), (x, beyond) = (
            _reached(used.any(1), top[0], rows, down, across),
            _reached(used.any(0), left[0], columns, right, along),
        )
        if (below - y) * (beyond - x) == across * along:
            return product_of(padded.contiguous()).permute(0, 3, 1, 2)[:, None]
        made = padded.new_zeros(len(padded), across, along, matrix.shape[1])
        if below > y and beyond > x:
            part = padded[:, y * down : (below - 1) * down + rows, x * right : (beyond - 1) * right + columns]
            made[:, y:below, x:beyond] = product_of(part.contiguous())
        return made.permute(0, 3, 1, 2)[:, None]

    def product_of(padded: torch.Tensor) -> torch.Tensor:
        count, height, width, channels = padded.shape
        across, along = (height - rows) // down + 1, (width - columns) // right + 1
        one, line, pixel, _ = padded.stride()
        shape = (count, across, along, rows, columns * channels)
        patches = padded.as_strided(shape, (one, down * line, right * pixel, line, 1))
        step = max(1, PATCHES // max(math.prod(shape[1:]), 1))
        made = padded.new_empty(count, across, along, matrix.shape[1])
        buffer = padded.new_empty(min(step, count), *shape[1:])
        for first in range(0, count, step):
            part = patches[first : first + step]
            copied = buffer[: len(part)].copy_(part)
            torch.mm(copied.view(-1, len(matrix)), matrix, out=made[first : first + step].view(-1, matrix.shape[1]))
        return made

    return convolved


def _reached(used: torch.Tensor, padding: int, size: int, stride: int, count: int) -> tuple[int, int]:
    """From which output to which, along one axis, a kernel of some size reads entries that are used."""
    places = used.nonzero()
    if not len(places):
        return 0, 0
    first, last = int(places[0]), int(places[-1])
    return max(-((size - 1 - first - padding) // stride), 0), min((last + padding) // stride + 1, count)


class AttentionMap:
    """ΔO = (P ⊙ ΔZ)V − (P ⊙ ΔZ)1·O + PΔV, ΔZ = s(ΔQKᵀ + QΔKᵀ): without what torch's derivative computes anew for every column.

    logits: stands for √P ⊙ (ΔZ − (P ⊙ ΔZ)1), which remainders ask for (`Sizes.seen`); it is in no graph. factors: by how much it
    changes at most with ΔQ and with ΔK, in ℓ2 over the keys of a query.
    """

    def __init__(self, node: Node, scale: float, operands: Sequence[Node], middles: Sequence[torch.Tensor]) -> None:
        self.shape, (query, key, self.value) = node.shape, middles
        self.chances = probabilities(node, (query, key, self.value))
        self.mean, self.turned, self.asked = self.chances @ self.value, key.mT.contiguous() * scale, query * scale
        self.order = [list(dict.fromkeys(node.inputs)).index(part) for part in operands]
        self.roots = weights(self.chances)[1]
        self.logits = Node(
            f"{node.name} logits", "logits", args=tuple(operands[:2]), path=node.path, shape=tuple(self.chances.shape)
        )
        self.factors = tuple(abs(scale) * float(length(part, -1).max()) * SUMMED for part in (key, query))

    def __call__(self, *changes: torch.Tensor) -> torch.Tensor:
        return self.both(*changes)[0]

    def both(self, *changes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ΔO, and what `logits` stands for."""
        made = changes[0].new_empty(len(changes[0]), *self.shape)
        seen = changes[0].new_empty(len(made), *self.chances.shape)
        step = max(1, SCORES // max(self.chances.numel(), 1))
        for first in range(0, len(made), step):
            query, key, value = (changes[place][first : first + step] for place in self.order)
            moved = torch.matmul(query, self.turned).add_(torch.matmul(self.asked, key.mT))
            weighed = moved * self.chances
            mean = weighed.sum(-1, keepdim=True)
            torch.mul(moved.sub_(mean), self.roots, out=seen[first : first + step])
            part = torch.matmul(weighed, self.value).sub_(mean * self.mean)
            made[first : first + step] = part.add_(torch.matmul(self.chances, value))
        return made, seen

    def changed_by(self, sizes: Mapping[Node, float]) -> float:
        """How far `logits` changes at most, over the keys of a query, with changes of queries and keys of these sizes in ℓ2."""
        parts = zip(self.factors, self.logits.inputs, strict=True)
        return sum(factor * sizes[one] for factor, one in parts if factor and sizes[one])

    def takes(self, owners: Sequence[torch.Tensor]) -> bool:
        """Whether the tokens that own what it reads are those that attend to each other."""
        return all(torch.equal(owner, torch.arange(owner.shape[-2])[:, None].expand(owner.shape)) for owner in owners)

    def by_token(
        self, changes: Sequence[torch.Tensor], token: torch.Tensor, entry: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of columns that are 0 at all tokens but one: column c is `changes[entry[c]]` at token[c].

        A change of one key or value reaches all queries by P alone, that of a query only its own output.
        """
        query, key, value = (changes[place].movedim(-2, 1)[entry, token] for place in self.order)  # (columns, …, size of a head)
        share, column = self.chances.movedim(-1, 0)[token], torch.arange(len(token))  # (columns, …, queries)
        moved = torch.einsum("c...d,...qd->c...q", key, self.asked)
        weighed = share * moved
        made = weighed[..., None] * (self.value.movedim(-2, 0)[token][..., None, :] - self.mean)
        made += share[..., None] * value[..., None, :]
        turned = torch.einsum("c...d,...dk->c...k", query, self.turned)
        own = self.chances.movedim(-2, 0)[token] * turned
        mean = own.sum(-1, keepdim=True)
        made.movedim(-2, 1)[column, token] += (
            torch.einsum("c...k,...kd->c...d", own, self.value) - mean * self.mean.movedim(-2, 0)[token]
        )
        seen = -weighed[..., None] * self.roots
        seen.movedim(-1, 1)[column, token] += moved * self.roots.movedim(-1, 0)[token]
        seen.movedim(-2, 1)[column, token] += (turned - mean) * self.roots.movedim(-2, 0)[token]
        return made, seen


def _attention_map(node: Node, center: Callable[[Node], torch.Tensor | None]) -> Map | None:
    reading = registry.reading(node, Attention)
    if reading is None or not reading.fixed:
        return None
    operands = [part for part in (reading.query, reading.key, reading.value) if isinstance(part, Node)]
    middles = [center(part) for part in operands]
    shapes = [None if middle is None else middle.shape[:-2] for middle in middles]
    if shapes != [node.shape[:-2]] * 3:
        return None
    return AttentionMap(node, reading.scale, operands, [middle for middle in middles if middle is not None])


def _normalizer_map(node: Node, normalizer: Normalizer | None, center: Callable[[Node], torch.Tensor | None]) -> Map | None:
    """Δy = γ/s (Δc − z mean(z Δc)), z = c/s, c = x less its mean if it is centered: several times as fast as torch's derivative."""
    middle = center(node.input) if len(node.inputs) == 1 else None
    plain = normalizer is not None and normalizer.kind in ("layer", "rms") and normalizer.placement == "inside"
    if normalizer is None or middle is None or not plain or isinstance(normalizer.gamma, Node):
        return None
    axes, centered = tuple(axis % len(node.shape) - len(node.shape) for axis in normalizer.axes), normalizer.centered
    away = middle - middle.mean(axes, keepdim=True) if centered else middle
    scale = (away.square().mean(axes, keepdim=True) + normalizer.epsilon).rsqrt()
    units, factor = away * scale, scale * channel_tensor(node, normalizer, normalizer.weight, 1.0)

    def derivative(changes: torch.Tensor) -> torch.Tensor:
        along = (changes * units).mean(axes, keepdim=True)
        made = changes - changes.mean(axes, keepdim=True) if centered else changes.clone()
        return made.addcmul_(units, along, value=-1).mul_(factor)

    change = torch.randn(node.input.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.func.jvp(node.apply, (middle.contiguous(),), (change,))[1]
    added = change.abs() + change.mean(axes, keepdim=True).abs() + (units * (change * units).mean(axes, keepdim=True)).abs()
    close = (derivative(change[None])[0] - expected).abs() <= 1e-9 * factor.abs() * added
    return derivative if bool(close.all()) else None


def _check(node: Node, derivative: Map) -> None:
    """Torch's derivative of an affine node is what the node does to differences, also to large ones, beside which no offset counts.

    Every entry is compared with its own size. It is refused if it differs at both of two random points: a sum may cancel at one.
    """
    generator = torch.Generator().manual_seed(0)
    sources = list(dict.fromkeys(node.inputs))
    offset = node.apply(*map(_zeros, sources))

    def differs(size: float) -> torch.Tensor:
        change = [torch.randn(source.shape, generator=generator, dtype=torch.float64) * size for source in sources]
        moved, found = node.apply(*change), derivative(*change)
        close = ((moved - offset) - found).abs() <= 1e-9 * (moved.abs() + offset.abs())
        return ~close & (moved.isfinite() | (size == 1))

    if any(bool((differs(size) & differs(size)).any()) for size in (1.0, LARGE)):
        raise NotImplementedError("torch has no forward-mode derivative of it that is what it does to differences")


def _zeros(node: Node) -> torch.Tensor:
    return torch.zeros(node.shape, dtype=torch.float64)


def products(node: Node) -> int:
    """How many products one column takes at a node."""
    product, attention = linear_map(node), registry.reading(node, Attention)
    if attention is not None and isinstance(attention.key, Node):
        return 4 * math.prod(node.shape) * attention.key.shape[-2]
    return 0 if product is None else math.prod(node.shape) * terms(product)


def cost(node: Node) -> float:
    """What one column costs at a node, in entries."""
    return math.prod(node.shape) + products(node) / PRODUCTS


class Linearized:
    """A graph whose every node is replaced by a linear map."""

    def __init__(self, graph: Graph, facts: Context, away: Sizes | None = None) -> None:
        """By its derivative at the middle, or, given distances from there, by the middle of the slopes that they leave possible."""
        self.graph, self.maps = graph, {node: _map(node, facts, away) for node in graph.nodes if not node.is_input}
        self.last_reader = {source: node for node in graph.nodes for source in node.inputs}
        self.costs = {node: cost(node) for node in graph.nodes}
        self.products = sum(products(node) for node in graph.nodes)

    def seen(self, node: Node) -> Node | None:
        """As in `Sizes`."""
        made = self.maps.get(node)
        return made.logits if isinstance(made, AttentionMap) else None

    def chunk(self, nodes: Sequence[Node], wanted: int = 1) -> int:
        """How many columns go together: as many as the cache holds, or as many as are wanted if memory allows it."""
        entries = max((math.prod(node.shape) for node in nodes), default=1)
        return max(1, CACHED // entries, min(wanted, MOST_ENTRIES // entries))

    def work(self, columns: int, nodes: Sequence[Node], wanted: int = 1) -> float:
        """What it costs to carry so many columns through these nodes, in entries: those of all columns, and a fee per call."""
        chunks = -(-columns // self.chunk(nodes, wanted))
        return sum(columns * self.costs[node] + chunks * CALL for node in nodes)

    def carry_inputs(self, columns: torch.Tensor, visit: Visit) -> None:
        """Show `visit` columns over all inputs, (columns, entries), there and at every node behind."""
        inputs = self.graph.inputs
        parts = columns.split([math.prod(node.shape) for node in inputs], 1)
        starts = {node: part.reshape(-1, *node.shape) for node, part in zip(inputs, parts, strict=True)}
        for node, part in starts.items():
            visit(node, part)
        self.carry(starts, behind(self.graph, inputs), visit)

    def carry(self, starts: Mapping[Node, torch.Tensor], nodes: Sequence[Node], visit: Visit) -> dict[Node, torch.Tensor]:
        """Show `visit` the columns at every node behind the starting ones; return those that something else may read."""
        values = dict(starts)
        count = len(next(iter(values.values())))
        with torch.no_grad():
            for node in nodes:
                arriving = [
                    values[source] if source in values else torch.zeros((count, *source.shape), dtype=torch.float64)
                    for source in dict.fromkeys(node.inputs)
                ]
                made = self.maps[node]
                if isinstance(made, AttentionMap):
                    values[node], logits = made.both(*arriving)
                    visit(made.logits, logits)
                else:
                    values[node] = made(*arriving)
                visit(node, values[node])
                for source in set(node.inputs):
                    if self.last_reader[source] is node:
                        values.pop(source, None)
        return values


def _map(node: Node, facts: Context, away: Sizes | None) -> Map:
    rule = rule_of(node)
    own = rule.linear_part(node, facts, away)
    if own is not None:
        return own
    curves = type(rule).remainder is not Rule.remainder or type(rule).curvature is not Rule.curvature
    return derivative_map(node, facts.center) if rule.linear(node) or curves else zero_map(node)


def behind(graph: Graph, starts: Sequence[Node], last: Node | None = None) -> list[Node]:
    """The nodes that depend on some of `starts`, in order, up to the last one."""
    reached, found = set(starts), []
    for node in graph.nodes:
        if node not in reached and any(source in reached for source in node.inputs):
            reached.add(node)
            found.append(node)
        if node is last:
            break
    return found
