"""Attention: Lipschitz in its queries, keys and values wherever their norms are bounded.

o_i = Σ_j p_ij v_j with p_i = softmax(s K q_i + mask), n queries, ‖q‖ ≤ R_q, ‖k‖ ≤ R_k, ‖v‖ ≤ R_v. Then (docs/laws.md):
- in v: ‖PΔV‖ ≤ ‖P‖ ‖ΔV‖ ≤ √n ‖ΔV‖, because the rows of P sum to 1 and its columns to at most n;
- in q: ∂o_i/∂q_i = s Cov_{p_i}(v, k), of norm at most s R_v R_k;
- in k: ‖Δo_i‖ ≤ s R_q Σ_j p_ij ‖v_j − o_i‖ ‖Δk_j‖ ≤ s R_q R_v ‖ΔK‖/√2, summed over i at most √n times that.
An operand that serves c heads or batches is there in c copies, which adds a factor √c. Masks and additive biases of the
logits do not depend on the input and change nothing; heads are blocks of their own;
rotary embeddings and biases act on q and k before this, so they are counted in R_q and R_k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from normscope.core.interval import Interval
from normscope.core.magnitude import Magnitude, product
from normscope.core.rounding import FEW, SQUARES_LOST, UNDERFLOW, above, length
from normscope.graph.graph import Constant, Node
from normscope.graph.patterns.rotary import rotate_half
from normscope.rules import readings
from normscope.rules.algebra import Form, Forms, Rotation
from normscope.rules.logits import TokenSizes, Weighed, change, least, rounding, weights
from normscope.rules.registry import Context, Gain, Rule, rule
from normscope.rules.remainder import Remainder, Sets, Sizes

KEYS = math.sqrt(0.5)  # the largest √Σ p_j²‖v_j − o‖² for ‖v_j‖ ≤ 1, attained by two keys v = ±1 with p = ½ each


@rule("scaled_dot_product_attention")
class AttentionRule(Rule):
    def reading(self, node: Node) -> readings.Attention:
        query, key, value, mask = node.args[:4]
        fixed = not isinstance(mask, Node) and not node.argument(4, "dropout_p", 0.0)
        return readings.Attention(query, key, value, logit_scale(node), fixed)

    def gain(self, node: Node, context: Context) -> Gain:
        query, key, value = node.args[:3]
        if isinstance(node.args[3], Node):
            return Gain.infinite(node, "its mask depends on the input")
        if node.argument(4, "dropout_p", 0.0):
            return Gain.infinite(node, "dropout inside attention is random; use eval mode")
        scale = abs(logit_scale(node))
        weight = math.sqrt(query.shape[-2])  # √ of what one key can receive from all queries together
        factors = []
        for operand, others, own in (
            (query, (key, value), scale),
            (key, (query, value), KEYS * scale * weight),
            (value, (), weight),
        ):
            if isinstance(operand, Node):
                sizes = [_norm(other, context) for other in others]
                copies = math.prod(node.shape[:-2]) / max(math.prod(operand.shape[:-2]), 1)
                parts = [Magnitude(above(own)), Magnitude(above(math.sqrt(copies))), *map(Magnitude, sizes)]
                factors.append(product(parts).raised(*parts))
        if not all(factor.finite for factor in factors):
            return Gain.infinite(
                node, "attention is not Lipschitz on unbounded tokens; put a normalizer before it or give a region"
            )
        return Gain.of(*factors, method="attention")

    def interval(self, node: Node, context: Context) -> Interval:
        value = node.args[2]  # each output is an average of values
        bounds = context.interval(value) if isinstance(value, Node) else Interval(value.double(), value.double())
        low, high = bounds.low.amin(-2, keepdim=True), bounds.high.amax(-2, keepdim=True)
        if not _every_query_sees_a_key(node.args[3]):  # without one a query gets 0
            low, high = low.clamp(max=0), high.clamp(min=0)
        if low.dim() > 2 and low.shape[-3] != node.shape[-3]:
            repeats = node.shape[-3] // low.shape[-3]
            low, high = low.repeat_interleave(repeats, -3), high.repeat_interleave(repeats, -3)
        return Interval(low.expand(node.shape), high.expand(node.shape)).widened()

    def curvature(self, node: Node, context: Context) -> tuple[float, ...] | None:
        """By the product rule on s q kᵀ, the derivative of softmax, and the product rule on P V (docs/laws.md)."""
        query, key, value = node.args[:3]
        middles = [context.center(part) if isinstance(part, Node) else None for part in (query, key, value)]
        if any(middle is None for middle in middles) or isinstance(node.args[3], Node):
            return None
        if any(part.shape[:-2] != node.shape[:-2] for part in (query, key, value)):
            return None
        scale = abs(logit_scale(node))
        away_q, away_k, away_v = (context.deviation(part) for part in (query, key, value))
        size_q, size_k, size_v = (  # singular values err by a small multiple of their matrix's sides
            above(float(torch.linalg.matrix_norm(m, 2).max()), FEW * sum(m.shape[-2:])) for m in middles if m is not None
        )
        reach_q, reach_k = size_q + away_q, size_k + away_k
        away_p = scale * (away_q * size_k + away_k * reach_q) / 2  # ‖P − P̂‖, softmax being ½-Lipschitz
        in_q, in_k = (
            size_v * scale * (away / 2 + 3 * away_p * reach) + away_v * scale * reach / 2
            for away, reach in ((away_k, reach_k), (away_q, reach_q))
        )
        return tuple(above(factor) for factor in (in_q, in_k, away_p))

    def measured(self, node: Node) -> tuple[tuple[Sets, ...], ...]:
        return tuple((Sets.along(source.shape, (-1,)), Sets.along(source.shape, (-2, -1))) for source in node.inputs)

    def remainder(self, node: Node, context: Context, away: Sizes, moves: Sizes | None) -> Remainder | None:
        """One query of one head at a time (docs/laws.md), with y = Δz less its mean, and u = v̂ − ô.

        Δo − Ĵ = Σ(p − p̂)Δv + ΣΔp(v' − v̂) + Σp̂ εu + Σ(p − p̂)yu − Σ(p − p̂)y Σ(p − p̂)u, ε the part of Δz that is not linear.
        """
        query, key, value, mask = node.args[:4]
        middles = [context.center(part) if isinstance(part, Node) else part.double() for part in (query, key, value)]
        if isinstance(mask, Node) or any(middle is None for middle in middles) or query.shape[:-2] != node.shape[:-2]:
            return None
        scale, lost = abs(logit_scale(node)), rounding(key.shape[-2], query.shape[-1])
        moves_or_away = away if moves is None else moves
        (q, far_q, move_q), (k, far_k, move_k), (v, far_v, move_v) = (
            self._tokens(part, middle, node, away, moves_or_away) for part, middle in zip((query, key, value), middles, strict=True)
        )
        p, roots = weights(probabilities(node, middles))  # type: ignore[arg-type]
        size_q, size_k = length(q, -1), length(k, -1)
        reach_q, reach_k = size_q + far_q.each, size_k + far_k.each
        sizes = TokenSizes(size_k, length(size_k, -1)), TokenSizes(reach_k, length(reach_k, -1))

        def logits(own: Sizes, moved_q: TokenSizes, moved_k: TokenSizes, from_middle: bool) -> Weighed:
            """How far logits less their mean move: by what is linear in q and k, and what is not; or by norms of q and k."""
            keys = sizes[0] if from_middle else sizes[1]
            norms = scale * (reach_q[..., None] * moved_k.each[..., None, :] + moved_q.each[..., None] * keys.each[..., None, :])
            mean = scale * (reach_q * moved_k.summed(p) + moved_q.each * keys.summed(p))
            seen = own.seen(node)
            if seen is None:
                return Weighed.of(roots, norms + mean[..., None])
            pairs = ((far_q, moved_k),) if from_middle else ((far_q, moved_k), (moved_q, far_k))
            bent = sum(one.each[..., None] * other.each[..., None, :] for one, other in pairs)
            average = sum(one.each * other.summed(p) for one, other in pairs)
            together = sum(one.each * other.weighed(roots) for one, other in pairs)
            along = own.sets(seen, Sets.along(seen.shape, (-1,))).reshape(p.shape[:-1])
            each = own.entries(seen) / roots + scale * (bent + average[..., None])
            return Weighed.of(roots, least(each, norms + mean[..., None]), along + scale * together)

        tiny = lost * (2 * scale * reach_q * reach_k.amax(-1, keepdim=True) + _largest(mask))
        far = logits(away, far_q, far_k, True)
        far = Weighed.of(roots, far.each + tiny[..., None], far.whole + tiny)
        changed = change(p, far, tiny)
        y = far if moves is None else logits(moves, move_q, move_k, False)
        spread = v.shape[-1] + FEW
        apart = above(torch.cdist(p @ v, v, compute_mode="donot_use_mm_for_euclid_dist"), spread) + SQUARES_LOST
        values = lost * length(v, -1).amax(-1, keepdim=True)
        u = Weighed.of(roots, apart + values[..., None])
        curved = changed.on_the_way if moves is None else changed.relative
        drift = lost * scale * (reach_q * move_k.each.amax(-1, keepdim=True) + move_q.each * reach_k.amax(-1, keepdim=True))
        average = changed.relative.times(y) + drift  # of Δz less its mean, with any q in place of p
        bent = curved.times(y, u) + average * (curved.times(u) + values) + drift / lost * values
        far_values, move_values = (
            Weighed.of(roots, part.each[..., None, :].expand(p.shape), part.weighed(roots)) for part in (far_v, move_v)
        )
        moved = least(changed.relative.times(move_values), move_v.summed(p * changed.relative.each))
        pu = p * u.each
        if moves is None:
            terms = moved + scale * far_q.each * far_k.summed(pu) + bent
        else:
            shifted = least((changed.most * y.each * far_v.each[..., None, :]).sum(-1), changed.factor * y.times(far_values))
            shifted = shifted + average * far_v.summed(changed.most)
            linear = far_q.each * move_k.summed(pu) + move_q.each * far_k.summed(pu)
            terms = moved + shifted + scale * linear + bent
        size = (above(terms, 8 * (p.shape[-1] + FEW)) + UNDERFLOW).reshape(-1)  # sums over keys, up to three of them in each other
        sets = Sets.along(node.shape, (-1,))
        return Remainder(torch.ones(node.shape, dtype=torch.float64), sets.spread(size, node.shape), (sets, size))

    @staticmethod
    def _tokens(
        part: Node | Constant, middle: torch.Tensor, node: Node, away: Sizes, moves: Sizes
    ) -> tuple[torch.Tensor, TokenSizes, TokenSizes]:
        """The middle of an operand, and sizes of its tokens, as many heads as the output has; 0 of what is fixed."""
        heads, copies, rank = node.shape[:-2], 1, len(part.shape)
        if rank > 2 and part.shape[-3] not in (1, node.shape[-3]):
            copies = node.shape[-3] // part.shape[-3]

        def shaped(values: torch.Tensor, inner: int) -> torch.Tensor:
            values = values.reshape(part.shape[: rank - 2 + inner])
            values = values.repeat_interleave(copies, rank - 3) if copies > 1 else values
            return values.expand((*heads, *part.shape[rank - 2 : rank - 2 + inner]))

        single, whole = Sets.along(part.shape, (-1,)), Sets.along(part.shape, (-2, -1))
        found = shaped(middle, 2)
        if isinstance(part, Constant):
            still = TokenSizes(torch.zeros(found.shape[:-1], dtype=torch.float64), torch.zeros(heads, dtype=torch.float64))
            return found, still, still
        sizes = (TokenSizes(shaped(known.sets(part, single), 1), shaped(known.sets(part, whole), 0)) for known in (away, moves))
        return found, *sizes  # type: ignore[return-value]

    def computed_on_the_way(self, node: Node, context: Context) -> float:
        """Probabilities times values, and logits as large as a mask where it covers all keys of a query."""
        return math.sqrt(math.prod(node.shape[:-1])) * _norm(node.args[2], context) * (1 + float(_largest(node.args[3]).max()))

    def norm(self, node: Node, context: Context) -> float:
        return _norm(node.args[2], context)

    def form(self, node: Node, forms: Forms) -> Form:
        """softmax(q kᵀ) v, written out; masks and scales are fixed and change no symmetry."""
        query, key, value = map(forms.of, node.args[:3])
        if node.kwargs.get("enable_gqa"):
            key, value = (self._repeated(operand, query.shape[-3], forms) for operand in (key, value))
        turned = forms.moved([key], lambda values: values[0].mT, (*key.shape[:-2], key.shape[-1], key.shape[-2]))
        logits = forms.matmul(query, turned)
        if isinstance(node.args[3], Node):
            logits = forms.sum(logits, forms.of(node.args[3]))
        weights = forms.softmax(logits, -1)
        if node.argument(4, "dropout_p", 0.0):
            weights = forms.entrywise(weights)
        return forms.matmul(weights, value)

    @staticmethod
    def _repeated(x: Form, heads: int, forms: Forms) -> Form:
        """Keys or values that several heads share, one copy per head."""
        copies = heads // x.shape[-3]
        shape = (*x.shape[:-3], heads, *x.shape[-2:])
        return forms.moved([x], lambda values: values[0].repeat_interleave(copies, -3), shape)


def probabilities(node: Node, middles: Sequence[torch.Tensor]) -> torch.Tensor:
    """(*heads, queries, keys) for these queries, keys and values: the node itself with unit vectors for values."""
    query, key, value = middles
    unit = torch.eye(key.shape[-2], dtype=torch.float64).expand(*value.shape[:-2], -1, -1)
    target = node.target
    assert target is not None
    rest = [part.stored_double() if isinstance(part, Constant) else part for part in node.args[3:]]
    return target(query, key, unit, *rest, **{**node.kwargs, "scale": logit_scale(node)}).nan_to_num(0)


def _every_query_sees_a_key(mask: Node | Constant | None) -> bool:
    if not isinstance(mask, Constant):
        return mask is None
    seen = mask.value if mask.value.dtype == torch.bool else mask.value > -math.inf
    return bool(seen.any(-1).all())


def _largest(mask: Node | Constant | None) -> torch.Tensor:
    """How large the logits of each query are by a mask alone, where it covers all keys."""
    if isinstance(mask, Constant) and mask.value.is_floating_point():
        return mask.double().amax(-1).abs().nan_to_num(0, 0, 0)
    return torch.zeros(1, dtype=torch.float64)


def logit_scale(node: Node) -> float:
    """What q·k is multiplied by: 1/√d unless it is given."""
    given = node.kwargs.get("scale")
    return 1 / math.sqrt(node.args[0].shape[-1]) if given is None else float(given)


def _norm(operand: Node | Constant, context: Context) -> float:
    if isinstance(operand, Node):
        return context.norm(operand)
    return float(length(operand.double(), -1).max())


@rule("rotary")
class Rotary(Rule):
    """x ⊙ cos + rotate_half(x) ⊙ sin: a rotation of every plane, scaled by √(cos² + sin²)."""

    @staticmethod
    def _scale(node: Node) -> float:
        _, cos, sin = node.args
        return float(length(torch.stack(torch.broadcast_tensors(cos.double(), sin.double())), 0).max())

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(self._scale(node), method="rotation")

    def interval(self, node: Node, context: Context) -> Interval:
        x, cos, sin = context.interval(node.input), *(operand.double() for operand in node.args[1:])
        turned = Interval(rotate_half(x.low), rotate_half(x.high))  # (−x₂, x₁): the negated half swaps its sides
        turned = Interval(torch.minimum(turned.low, turned.high), torch.maximum(turned.low, turned.high))
        return x * Interval(cos, cos) + turned * Interval(sin, sin)

    def norm(self, node: Node, context: Context) -> float:
        return above(self._scale(node) * context.norm(node.input)) + UNDERFLOW

    def form(self, node: Node, forms: Forms) -> Form:
        return Rotation((forms.of(node.input),), node.shape, node=node)

    def linear(self, node: Node) -> bool:
        return True

    def tokenwise(self, node: Node) -> bool:
        return node.input.shape == node.shape
