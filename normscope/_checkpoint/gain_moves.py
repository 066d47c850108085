"""γ and β that moved between a norm and the weights that read it: the same function, though every number involved differs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from normscope._checkpoint.equality import COARSE, FINE, apart
from normscope._checkpoint.hypotheses import Inquiry
from normscope._checkpoint.structure import Pair
from normscope._checkpoint.views import Views
from normscope.core.rounding import UNIT_ROUNDOFF, gamma

FOLDED = "γ is folded into the weights that read it"
ROUNDINGS = 4.0  # of W and of γ, where whoever moved γ worked in the type that it is stored in


def folded(found: Inquiry) -> None:
    """γ (and β) moved between a norm and all weights that read it: W diag γ, and W β + b, are the same on both sides.

    Where some weights agree and others do not, γ moved if most entries of each of its columns agree and more tensors differ as they
    stand; then the other weights are named. Where no weight and no bias differs, γ did not move: it changed.
    """
    moved = 0
    for pair in found.pairs:
        names = (pair.gamma, *pair.readers)
        here = all(name in found.one and name in found.other for name in names)
        if not pair.complete or not here or (pair.gamma in found.how and (pair.beta is None or pair.beta in found.how)):
            continue
        masks = _agreeing(found, pair)
        if masks is None or (not _differing(found, pair) and not _exact(found, pair)):
            continue
        whole = [reader for reader, mask in zip(pair.readers, masks, strict=True) if bool(mask.all())]
        offset = [reader for reader in whole if not _same_offsets(found, pair, reader)]
        columns = torch.cat([mask.reshape(-1, mask.shape[-1]) for mask in masks]).double().mean(0)
        blamed = [reader for reader in pair.readers if reader not in whole] + _blamed(found, pair, offset)
        plainly = sum(name in found.left for name in (pair.gamma, pair.beta, *pair.readers))
        if not bool((columns >= 0.5).all()) or (blamed and len(blamed) >= plainly):
            continue
        moved += 1
        if not blamed and not _rounded_once(found, pair):
            found.unsaid.append(
                f"{pair.gamma} and the weights that read it differ by rounding alone, which could hide a change of 1 %"
            )
        for name in (pair.gamma, pair.beta, *pair.readers, *map(_bias, pair.readers)):
            if name is None or (name not in found.one and name not in found.other):
                continue
            if name in blamed:
                found.how.pop(name, None)
                found.against[name] = "differs, even with γ folded into the weights that read it"
            else:
                found.accept(name, FOLDED, _defect(found, pair, name) if name in whole else 0.0)
    if moved:
        found.said.append(f"γ of {moved} norms moved into the weights that read it")


def _blamed(found: Inquiry, pair: Pair, offset: Sequence[str]) -> list[str]:
    """Where W diag γ agrees but W β + b does not: biases that differ, if β moved as γ did, else β."""
    if not offset:
        return []
    differing = [_bias(reader) for reader in offset if _bias(reader) not in found.how and _bias(reader) in found.one]
    if pair.beta is None or pair.beta not in found.one or pair.beta not in found.other:
        return differing or list(offset)
    (gamma, _), (other_gamma, _) = _parts(found, pair, offset[0])
    x, y = found.one[pair.beta].value() * other_gamma, found.other[pair.beta].value() * gamma
    follows = bool(((x - y).abs() <= 1.01 * ROUNDINGS * _roundoff(found, pair) * torch.maximum(x.abs(), y.abs()) + 1e-42).all())
    return differing if follows and differing else [pair.beta]


def _roundoff(found: Inquiry, pair: Pair) -> float:
    """The largest among those of γ and its readers on both sides; NaN where one of them is quantized."""
    sizes = [views[name].roundoff for views in (found.one, found.other) for name in (pair.gamma, *pair.readers)]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)


def _differing(found: Inquiry, pair: Pair) -> list[str]:
    """The weights and biases behind γ that are not the same as they stand."""
    named = [name for reader in pair.readers for name in (reader, _bias(reader))]
    return [name for name in named if (name in found.one or name in found.other) and name not in found.how]


def _exact(found: Inquiry, pair: Pair) -> bool:
    """Whether all products are equal to the last bit, as where every weight that reads a changed entry of γ is 0."""
    return all(torch.equal(*_effective(found, pair, reader)) for reader in pair.readers)


def _rounded_once(found: Inquiry, pair: Pair) -> bool:
    """Whether rounding explains it all: in few bits it can hide a change of 1 %, unless one side is the other rounded once."""
    if _roundoff(found, pair) <= FINE:
        return True
    if pair.beta is not None:
        return False
    return any(
        all(torch.equal(made[reader].rounded(product / gain), weight) for reader, product, gain, weight in sides)
        for made, sides in (
            (found.other, [(r, _effective(found, pair, r)[0], *_parts(found, pair, r)[1]) for r in pair.readers]),
            (found.one, [(r, _effective(found, pair, r)[1], *_parts(found, pair, r)[0]) for r in pair.readers]),
        )
    )


def _parts(found: Inquiry, pair: Pair, reader: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """γ and W on both sides, γ along the last axis of W."""
    reads = found.gammas.get(pair.gamma, (pair.plus_one, pair.plus_one))
    sides = []
    for views, read in ((found.one, reads[0]), (found.other, reads[1])):
        gamma = views[pair.gamma].value()
        gamma = gamma + 1 if read and "γ" not in views[pair.gamma].steps else gamma
        weight = views[reader].value()
        weight = weight.T if reader in pair.transposed else weight.movedim(1, -1)
        sides.append((gamma, weight))
    return sides


def _effective(found: Inquiry, pair: Pair, reader: str) -> tuple[torch.Tensor, torch.Tensor]:
    """W diag γ on both sides."""
    (gamma, weight), (other_gamma, other_weight) = _parts(found, pair, reader)
    return weight * gamma, other_weight * other_gamma


def _bias(reader: str) -> str:
    return reader.removesuffix("weight") + "bias"


def _defect(found: Inquiry, pair: Pair, reader: str) -> float:
    return apart(*_effective(found, pair, reader))


def _agreeing(found: Inquiry, pair: Pair) -> list[torch.Tensor] | None:
    """For each reader, which entries of W diag γ agree; None where the numbers cannot be compared.

    What stands in one file is exact; the other was made of it with at most two roundings each of W and γ, or one in few bits. That
    of 1 + w is one of a number near 1, however small γ is.
    """
    masks = []
    roundoff = _roundoff(found, pair)
    if not roundoff <= COARSE:
        return None
    tolerance = 1.01 * ((ROUNDINGS if roundoff <= FINE else 2) * roundoff + 4 * UNIT_ROUNDOFF)
    for reader in pair.readers:
        one, other = found.one[reader], found.other[reader]
        finite = all(bool(views[pair.gamma].value().isfinite().all()) for views in (found.one, found.other))
        if one.shape != other.shape or not finite:
            return None
        if found.one[pair.gamma].shape != found.other[pair.gamma].shape:
            return None
        x, y = _effective(found, pair, reader)
        size = torch.maximum(x.abs(), y.abs())
        if pair.plus_one:
            size = size + torch.maximum(*(weight.abs() for _, weight in _parts(found, pair, reader)))
        masks.append((x - y).abs() <= tolerance * size + 1e-42)
    return masks


def _offset(views: Views, pair: Pair, reader: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """W β + b of a reader, and what was added up to make it."""
    weight = views[reader].value()
    weight = weight.T if reader in pair.transposed else weight.flatten(2).sum(2) if weight.dim() > 2 else weight
    total, size = torch.zeros(len(weight), dtype=torch.float64), torch.zeros(len(weight), dtype=torch.float64)
    if pair.beta is not None:
        if pair.beta not in views or (views[reader].shape[2:] and bool(views[pair.beta].value().any())):
            return None  # a kernel with padding reads β at some taps only
        total, size = weight @ views[pair.beta].value(), weight.abs() @ views[pair.beta].value().abs()
    bias = _bias(reader)
    if bias in views:
        total, size = total + views[bias].value(), size + views[bias].value().abs()
    return total, size


def _same_offsets(found: Inquiry, pair: Pair, reader: str) -> bool:
    one, other = _offset(found.one, pair, reader), _offset(found.other, pair, reader)
    if one is None or other is None:
        return False
    roundoff = _roundoff(found, pair)
    allowed = ((ROUNDINGS if roundoff <= FINE else 2) * roundoff + gamma(64)) * torch.maximum(one[1], other[1]) + 1e-42
    return bool(((one[0] - other[0]).abs() <= allowed).all())
