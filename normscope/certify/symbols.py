"""The symbols of an affine form: what single entries of one node leave out of its linear part, and what they add at the output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from normscope.core.rounding import SQUARES_LOST, SUMMED, length
from normscope.graph.graph import Node, Shape
from normscope.operators.dense import gram_norms
from normscope.rules.remainder import Remainder, Sets

LEAST_SCALE = 1e-3  # of a set's scales, so that what is left over can become part of its symbols


@dataclass
class Symbols:
    """The symbols of one node: where they are, what they are multiplied by, and how large they are."""

    places: torch.Tensor  # flat entries of the node
    scale: torch.Tensor
    sizes: torch.Tensor  # a_u
    groups: torch.Tensor  # which set each belongs to, 0, 1, 2, … in order
    group_sizes: torch.Tensor  # A
    added: float = 0.0  # the part of all sizes that was κ
    frames: torch.Tensor | None = (
        None  # (tokens, width, width): columns of each token's symbols, in place of scale times unit vectors
    )

    @classmethod
    def framed(cls, frames: torch.Tensor) -> Symbols:
        """P of each token: one set per token, of size 1."""
        tokens, width = frames.shape[:2]
        places, groups = torch.arange(tokens * width), torch.arange(tokens).repeat_interleave(width)
        ones = torch.ones(tokens * width, dtype=torch.float64)
        return cls(places, ones, ones, groups, torch.ones(tokens, dtype=torch.float64), frames=frames)

    @property
    def length(self) -> float:
        """Of all that they add to their node, at most."""
        return float(length(self.scale * self.sizes if self.frames is None else self.frames))

    @property
    def single(self) -> bool:
        return len(self.group_sizes) == len(self.sizes)

    def by_token(self, shape: Shape) -> bool:
        """Whether every entry of several tokens has a symbol, in order, and sets are tokens or single symbols."""
        width, count = (shape[-1], math.prod(shape)) if shape else (1, 1)
        if len(self.places) != count or count <= width or not bool((self.places == torch.arange(count)).all()):
            return False
        return self.single or bool((self.groups == torch.arange(count) // width).all())

    def chunks(self, most: int) -> list[slice]:
        """Whole sets together, up to `most` symbols; a larger set is cut, which keeps its bound for each piece."""
        cuts, start = [], 0
        ends = torch.bincount(self.groups).cumsum(0).tolist()
        last = 0
        for end in ends:
            if end - start > most and last > start:
                cuts.append(slice(start, last))
                start = last
            while end - start > most:
                cuts.append(slice(start, start + most))
                start += most
            last = end
        if last > start:
            cuts.append(slice(start, last))
        return cuts


@dataclass
class Tally:
    """What the columns of one node add up to at others: entry by entry, and per set of entries."""

    entries: dict[Node, torch.Tensor] = field(default_factory=dict)
    sets: dict[tuple[Node, Sets], torch.Tensor] = field(default_factory=dict)


@dataclass
class Contribution:
    """The columns of one node's symbols at the output, and the bound on what they add there.

    relay: where they end instead. passed: how large what they bring there is.
    """

    node: Node
    symbols: Symbols
    columns: torch.Tensor | None  # (symbols, outputs)
    relay: Node | None = None
    passed: float = 0.0
    rows: torch.Tensor | None = None  # (symbols, d): the rows of J that the symbols are multiples of
    rest: torch.Tensor | None = None  # and what is left of their sizes
    least: torch.Tensor | None = None  # which multiples
    most: torch.Tensor | None = None
    bound: float = 0.0


def added(symbols: Symbols, columns: torch.Tensor) -> float:
    """sup ‖Gη‖ at the output: per entry, or set by set."""
    together = float(length(symbols.sizes @ columns.abs()))
    counts = torch.bincount(symbols.groups).tolist()
    apart = 0.0
    blocks = columns.split(counts)
    if symbols.single:
        apart = float(symbols.group_sizes @ length(columns, 1))
    elif len(set(counts)) == 1:
        stacked = torch.stack(blocks)  # (sets, symbols, outputs)
        small = stacked.mT @ stacked if stacked.shape[2] <= stacked.shape[1] else stacked @ stacked.mT
        apart = float(symbols.group_sizes @ gram_norms(small, max(stacked.shape[1:])))
    else:
        for limit, block in zip(symbols.group_sizes.tolist(), blocks, strict=True):
            gram = block.mT @ block if block.shape[1] <= len(block) else block @ block.mT
            apart += limit * float(gram_norms(gram[None], max(block.shape))[0])
    return min(together, apart) * SUMMED


def never_nan(sizes: torch.Tensor) -> torch.Tensor:
    """Sizes, none of which is NaN: a bound that is 0·∞ says nothing."""
    return torch.where(sizes.isnan(), math.inf, sizes)


def multiplied(remainder: Remainder, matrix: torch.Tensor, shape: Shape) -> Remainder:
    """W(scale ⊙ ε), token by token, of this shape; the remainder has one bound per token. matrix: (outputs, inputs)."""
    assert remainder.sets is not None
    sets, sizes = remainder.sets
    scale = sets.split(remainder.scale)  # (tokens, inputs)
    entries = never_nan((scale * sets.split(remainder.entries)) @ matrix.abs().T * SUMMED)
    scaled = matrix * scale[:, None]
    limits = never_nan(sizes * gram_norms(scaled @ scaled.mT, matrix.shape[1]))
    return Remainder(torch.ones(shape, dtype=torch.float64), entries.reshape(shape), (Sets.along(shape, (-1,)), limits * SUMMED))


def symbols_of(remainder: Remainder, left: float, most: int) -> tuple[Symbols | None, float, int]:
    """The symbols that a remainder needs, at most so many, κ behind the node, from κ = `left` without, and how many went into it.

    Where most entries have symbols, κ becomes part of their sizes, and starts anew.
    """
    scale, sizes = (part.reshape(-1).to(torch.float64) for part in (remainder.scale, remainder.entries))
    used = (scale > 0) & (sizes > 0)
    if not bool(scale.isfinite().all() and sizes.isfinite().all()):
        return None, math.inf, 0
    if not bool(used.any()):
        return None, left, 0
    if remainder.sets is None:
        labels, limits = torch.arange(len(scale)), sizes
        left = _forget(scale * sizes, used, left)
    else:
        sets, limits = remainder.sets
        labels = sets.spread(torch.arange(len(limits)), remainder.entries.shape).reshape(-1)
    added = 0.0
    if int(used.sum()) > len(scale) // 2 and len(scale) <= most:
        scale = scale.clamp(min=LEAST_SCALE * float(scale.max()))
        added = left / float(scale.min()) * SUMMED
        sizes, limits, used = sizes + added, limits + added, torch.ones_like(used)
        left = 0.0
    places, folded = used.nonzero().reshape(-1), 0
    if len(places) > most:
        ranked = places[(scale * sizes)[places].argsort(descending=True)]
        places, dropped = ranked[:most], ranked[most:]
        left, folded = _more(left, float(length((scale * sizes)[dropped]))), len(dropped)
    if not len(places):
        return None, left, folded
    places = places[labels[places].argsort(stable=True)]
    kept, groups = labels[places].unique_consecutive(return_inverse=True)
    own = torch.zeros(len(kept), dtype=torch.float64).index_add(0, groups, sizes[places].square()).sqrt() * SUMMED + SQUARES_LOST
    return Symbols(places, scale[places], sizes[places], groups, torch.minimum(limits[kept], own), added), left, folded


def _forget(sizes: torch.Tensor, used: torch.Tensor, left: float) -> float:
    """Symbols that together are no larger than κ, as those of rounding alone are, become part of it."""
    places = used.nonzero().reshape(-1)
    order = places[sizes[places].argsort()]
    together = sizes[order].square().cumsum(0).sqrt() * SUMMED + SQUARES_LOST
    forgotten = together <= left
    if not bool(forgotten.any()):
        return left
    used[order[forgotten]] = False
    return _more(left, float(together[forgotten].max()))


def _more(left: float, part: float) -> float:
    """Their sum, rounded up: never κ as it was, by which no symbol would be seen to have become part of it."""
    return math.nextafter(left + part, math.inf)
