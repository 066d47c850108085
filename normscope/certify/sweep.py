"""A sweep over a linearized graph: J and the columns of all symbols, carried forward in chunks, and the sizes that they give.

Columns are carried as soon as they are known, node by node, so that all that comes before a node is complete when its turn comes.
What is computed is taken as J and G themselves: where a node's kernel rounds, the difference is part of κ, which gains carry on
until a curved node, whose symbols take it in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from normscope.certify import rows
from normscope.certify.bundles import Apart, Bundle
from normscope.certify.columns import AttentionMap, Linearized, behind, rule_of
from normscope.certify.ellipsoids import Ellipsoids
from normscope.certify.jacobian import MOST_OUTPUTS, Jacobian, carried, half_widths, watched_sets
from normscope.certify.kernels import linear_map, matrix_of_tokens
from normscope.certify.known import Derivative
from normscope.certify.leftovers import Leftovers
from normscope.certify.passing import Pass
from normscope.certify.relays import Plan, framed, owners
from normscope.certify.symbols import Contribution, Symbols, Tally, multiplied, never_nan, symbols_of
from normscope.certify.tokens import Tokens
from normscope.core.rounding import SUMMED, above, length
from normscope.graph.graph import Node
from normscope.rules.registry import Rule
from normscope.rules.remainder import Remainder, Sets

MANY_SYMBOLS = 4096  # of one node, beyond which they are left to a matrix behind it, if that has fewer entries
MOST_SYMBOLS = 60_000  # per node


class Sweep:
    """One linearization of a graph, and the sizes of changes that it gives: `Sizes` of every node that a curved node reads.

    away: the sweep of distances from the computed middle, for the sweep of changes between any two points, per distance. None for
    that first sweep itself, in absolute terms.
    """

    def __init__(
        self,
        facts: Pass,
        away: Sweep | None,
        most_symbols: int,
        spend: Callable[[float], None],
        plan: Plan,
        chords: bool = False,
    ) -> None:
        """spend: told of work (`Linearized.work`) before it is done; it may raise.

        chords: whether linear parts are the middle of the slopes that are possible, which asks for a J of their own, instead of
        the derivative at the computed middle.
        """
        assert facts.region is not None
        self.facts, self.graph, self.away, self.most_symbols = facts, facts.graph, away, most_symbols
        self.plan, self.chords = plan, chords
        self.spend, self.folded = spend, 0  # symbols that became part of κ for want of room
        self.region, self.unit = facts.region, 1.0 if away is not None else facts.region.reach
        if away is None:
            self.linearized = self._derivative.linearized
        else:
            self.linearized = Linearized(self.graph, facts, away) if chords else away.linearized
        self.seen = self.linearized.seen
        self.watched = watched_sets(self.linearized, self.plan.relays)
        self.whole = Sets.whole(self.graph.output.shape)
        self.watched.setdefault(self.graph.output, set()).add(self.whole)
        self.bent: dict[Node, torch.Tensor] = {}
        self.bent_sets: dict[tuple[Node, Sets], torch.Tensor] = {}
        self.bent_behind: dict[Node, torch.Tensor] = {}  # ‖WGη‖ of each token, where a node multiplies those that it reads by W
        rounding = [node for node in self.graph.nodes if not node.is_input and (linear_map(node) or rule_of(node).terms(node))]
        self.carried = {source: 0.0 for node in rounding for source in node.inputs}  # Frobenius norms of all columns, times sizes
        self.most: dict[Node, torch.Tensor] = {}  # by what the pass knows without forms
        self.parts: list[Contribution] = []
        self.passed_on: dict[Node, Remainder] = {}
        self.brought: dict[Node, tuple[torch.Tensor, torch.Tensor]] = {}  # to relays, and the scale of their remainder
        self.spread = {
            (node, sets): Ellipsoids.none(node.shape, sets)
            for node, partitions in self.watched.items()
            for sets in partitions
            if Ellipsoids.affordable(node.shape, sets) and not any(one.within(sets) for one in partitions)
        }
        self.jacobian = Jacobian()
        self.kappa = Leftovers(facts, self.unit, self.carried, self._derivative.precise if away is None else None)

    @property
    def left(self) -> dict[Node, float]:
        return self.kappa.left

    def entries(self, node: Node) -> torch.Tensor:
        found = never_nan((self._straight(node) + self.bent[node]) * SUMMED + self.kappa[node])
        return torch.minimum(found.reshape(node.shape), self._most(node))

    def _most(self, node: Node) -> torch.Tensor:
        """What the pass knows without forms, entry by entry."""
        if node not in self.most:
            distances = self.facts.distances(node) if self.away is None and node in self.facts.facts else None
            whole = torch.full(node.shape, self._whole(node), dtype=torch.float64)
            self.most[node] = whole if distances is None else torch.minimum(whole, distances)
        return self.most[node]

    def _whole(self, node: Node) -> float:
        if node not in self.facts.facts:  # logits
            return math.inf
        return self.facts.deviation(node) if self.away is None else float(self.facts.at(node)) * SUMMED

    def sets(self, node: Node, sets: Sets) -> torch.Tensor:
        found = torch.minimum(length(sets.split(self.entries(node)), -1), self.without_left(node, sets) + self.kappa[node])
        return found.clamp(max=self._whole(node))

    def without_left(self, node: Node, sets: Sets) -> torch.Tensor:
        """Of JΔx + Gη: as columns give it, or, behind a matrix that acts on each token, what it makes of all that it reads."""
        found = torch.full((math.prod(node.shape) // sets.size,), math.inf, dtype=torch.float64)
        if (node, sets) in self.bent_sets:
            found = never_nan((self.straight_sets(node, sets) + self.bent_in(node, sets)) * SUMMED)
        source = matrix_of_tokens(node)
        if source is not None and sets == Sets.along(node.shape, (-1,)):
            tokens, factor = Sets.along(source.shape, (-1,)), float(self.facts.gain(node).factors[0])
            if tokens in self.watched.get(source, ()):  # κ has the rounding of columns
                straight, bent = (factor * part for part in (self.straight_sets(source, tokens), self.bent_in(source, tokens)))
                if node in self.bent_behind:
                    straight = torch.minimum(straight, self.jacobian.behind_matrix[node] * self.unit)
                    bent = torch.minimum(bent, self.bent_behind[node])
                read = torch.minimum(straight + bent, factor * self.without_left(source, tokens)) * SUMMED
                found = torch.minimum(found, never_nan(read + self.left[node]))
        return found

    def bent_in(self, node: Node, sets: Sets) -> torch.Tensor:
        """What columns bring to each set: source by source, by an ellipsoid around all of it, or by those of smaller sets."""
        found = self.bent_sets[node, sets]
        if (node, sets) in self.spread:
            found = torch.minimum(found, self.spread[node, sets].norms())
        for smaller in self.watched[node]:
            if smaller.within(sets):
                found = torch.minimum(found, length(self.bent_in(node, smaller).reshape(len(found), -1), 1))
        return found

    def run(self) -> Sweep:
        self.carry_inputs()
        for node in self.graph.nodes:
            self.settle(node)
        return self

    def carry_inputs(self) -> None:
        """J, or that of the first sweep where the linear parts are the same."""
        if self.away is None:
            self.jacobian = self._at_the_middle()
        elif not self.chords:
            self.jacobian = self.away.jacobian
        else:
            self.jacobian = carried(self.linearized, self.watched, self.carried, None, rows.wanted(self), self.spend)
        for node in self.carried:
            self.carried[node] = self.jacobian.size[node] * self.unit
        for node, partitions in self.watched.items():
            self.bent[node] = torch.zeros_like(self.jacobian.norms[node])
            for sets in partitions:
                self.bent_sets[node, sets] = torch.zeros_like(self.jacobian.sets[node, sets])

    @property
    def _derivative(self) -> Derivative:
        return self.facts.known.derivative_at(self.graph, self.region.middle, self.facts)

    def _at_the_middle(self) -> Jacobian:
        """J at the middle: that of an earlier region around it, if it has all that is asked for."""
        known, widths = self._derivative, half_widths(self.region)
        if widths is None and known.jacobian.has(self.watched, self.carried, rows.GUESSED * self.unit):
            return known.jacobian
        wanted, enough = rows.guessed(self)
        found = carried(self.linearized, self.watched, self.carried, widths, wanted, self.spend)
        found.enough = enough
        if widths is None:
            self.facts.known.derivative = replace(known, jacobian=found)
        return found

    def _straight(self, node: Node) -> torch.Tensor:
        return self.jacobian.straight(node, self.unit) if self.away is None else self.jacobian.norms[node]

    def straight_sets(self, node: Node, sets: Sets) -> torch.Tensor:
        return self.jacobian.sets[node, sets] * self.unit

    def settle(self, node: Node) -> None:
        """Everything before a node is known: what it leaves out becomes symbols, which are carried on."""
        rule = None if node.is_input else rule_of(node)
        factors = [] if rule is None else [float(factor) for factor in self.facts.gain(node).factors]
        self.kappa.settle(node, rule, factors)
        if rule is None:
            return
        made = self.linearized.maps[node]
        if isinstance(made, AttentionMap):
            self.kappa.see(node, rule, made)
        remainder = self.passed_on.pop(node, None) if rule.linear(node) else self._remainder(node, rule, factors)
        if node in self.plan.relays:
            self._relay(node, remainder)
        elif remainder is not None and not self._pass_on(node, remainder):
            self._carry_symbols(node, self._symbols(node, remainder))
        self._let_go(node)

    def _let_go(self, node: Node) -> None:
        """Of the ellipsoids of what a node reads, where it is the last to do so, and those of logits that it alone sees."""
        if node in self.jacobian.behind_matrix:
            product, tokens = linear_map(node), self.spread.get((node.input, Sets.along(node.input.shape, (-1,))))
            if product is not None and tokens is not None:
                self.bent_behind[node] = tokens.norms_behind(product.matrix())
        last = [self.seen(node), *(source for source in node.inputs if self.linearized.last_reader[source] is node)]
        for (one, _), around in self.spread.items():
            if one in last:
                around.close()

    def _pass_on(self, node: Node, remainder: Remainder) -> bool:
        """Leave a remainder of very many entries to the matrix that alone reads it and has fewer: W(scale ⊙ ε), token by token."""
        readers = self.facts.users[node]
        if node in self.watched or len(readers) != 1 or remainder.sets is None:
            return False
        last = self.plan.last(self.graph, node)
        reached = behind(self.graph, [node], last)
        if last is not None and len(owners(node, reached)) > len(reached):  # it costs little as it is
            return False
        (reader,), (sets, _) = readers, remainder.sets
        reading, many = linear_map(reader), math.prod(node.shape) > max(MANY_SYMBOLS, 2 * math.prod(reader.shape))
        if reading is None or matrix_of_tokens(reader) is None:
            return False
        if not many or sets != Sets.along(node.shape, (-1,)) or not bool(remainder.entries.isfinite().all()):
            return False
        self.passed_on[reader] = multiplied(remainder, reading.matrix(), reader.shape)
        return True

    def _remainder(self, node: Node, rule: Rule, factors: Sequence[float]) -> Remainder:
        if self.away is None:
            found = rule.remainder(node, self.facts, self, None)
            found = None if found is None else self.kappa.widened(node, found, factors)
        elif rule.multiples(node, self.facts, self.away, self.chords) is None:
            found = rule.remainder(node, self.facts, self.away, self)
        else:  # Δf = SΔy with ‖S‖ at most the gain: the part of Δy that is κ stays one error in ℓ2, whatever S is
            found = rule.remainder(node, self.facts, self.away, _Bare(self))
        if found is not None and bool(found.entries.isfinite().all() and found.scale.isfinite().all()):
            return found
        # by gains: of the change itself, and of the derivative at the middle
        arriving = [self.sets(source, Sets.whole(source.shape)) for source in node.inputs]
        parts = [above(2 * factor * part.to(torch.float64)) for factor, part in zip(factors, arriving, strict=True)]
        size = never_nan(above(sum(parts, torch.zeros(1, dtype=torch.float64))))
        return Remainder(torch.ones(node.shape, dtype=torch.float64), size.expand(node.shape), (Sets.whole(node.shape), size))

    def _symbols(self, node: Node, remainder: Remainder) -> Symbols | None:
        found, left, folded = symbols_of(remainder, self.left[node], self.most_symbols)
        self.kappa.change(node, left)
        self.folded += folded
        return found

    def _relay(self, node: Node, own: Remainder | None) -> None:
        """New symbols for all that arrives at a relay: one ellipsoid per token, or an entry each where those are multiples of J."""
        arrived, left = self.spread.get((node, Sets.along(node.shape, (-1,)))), self.left[node]
        whole = self._relayed(node, own)
        frames = self._frames(node, arrived, own) if arrived is not None and framed(node) else None
        if frames is None:
            self._carry_symbols(node, self._symbols(node, whole))
            return
        self.left[node] = 0.0
        self._carry_symbols(node, Symbols.framed(frames))
        assert whole.sets is not None
        self.bent[node] = torch.minimum(self.bent[node], (whole.entries.reshape(-1) + left) * SUMMED)  # both bound the same
        for sets in self.watched[node] & {whole.sets[0]}:
            self.bent_sets[node, sets] = torch.minimum(self.bent_sets[node, sets], (whole.sets[1] + left) * SUMMED)

    def _frames(self, node: Node, arrived: Ellipsoids, own: Remainder | None) -> torch.Tensor | None:
        sets = Sets.along(node.shape, (-1,))
        if own is not None:
            limits = sets.split(own.entries)
            if own.sets is not None and own.sets[0] in (sets, Sets.whole(node.shape)):
                limits = own.sets[1].expand(len(limits))[:, None]
            arrived.add_scaled(sets.split(own.scale), limits)
        ones = torch.ones(arrived.shapes.shape[:2], dtype=torch.float64)
        arrived.add_scaled(ones, self.left[node] * ones[:, :1])
        return arrived.frames()

    def _relayed(self, node: Node, own: Remainder | None) -> Remainder:
        """All that columns bring to a relay, and what the node itself leaves out, as a remainder of the node."""
        sets = Sets.along(node.shape, (-1,))
        entries, limits = self.bent[node].reshape(node.shape), self.bent_in(node, sets)
        if own is not None:
            scaled = own.scale * own.entries
            if own.sets is not None and own.sets[0] == sets:
                size = sets.split(own.scale).amax(-1) * own.sets[1]
            else:
                size = length(sets.split(scaled), -1)
            self.brought[node] = self.bent[node], own.scale.reshape(-1)
            entries, limits = entries + scaled, limits + size
        self.bent[node] = torch.zeros_like(self.bent[node])
        for partition in self.watched[node]:
            self.bent_sets[node, partition] = torch.zeros_like(self.bent_sets[node, partition])
            if (node, partition) in self.spread:
                self.spread[node, partition] = Ellipsoids.none(node.shape, partition)
        ones = torch.ones(node.shape, dtype=torch.float64)
        return Remainder(ones, never_nan(entries * SUMMED), (sets, never_nan(limits * SUMMED)))

    def _carry_symbols(self, node: Node, symbols: Symbols | None) -> None:
        """To the nodes behind, up to the next relay."""
        if symbols is None:
            return
        last = self.plan.last(self.graph, node)
        reached = behind(self.graph, [node], last)
        tally, at_output = Tally(), list[torch.Tensor]()
        last_alike = reached.index(self.graph.output) if self.graph.output in reached else None  # there they are one by one
        owned = owners(node, reached[:last_alike] if symbols.by_token(node.shape) else [])
        alike, rest = ([one for one in reached if (one in owned) is whole] for whole in (True, False))
        width, largest = node.shape[-1] if node.shape else 1, int(torch.bincount(symbols.groups).max())
        self.spend(self.linearized.work(width, alike) + self.linearized.work(len(symbols.places), rest, largest))
        by_token = bool(alike) or symbols.frames is not None
        if by_token:
            token = Tokens.of(symbols, width, owned)

            def show(one: Node, columns: torch.Tensor) -> None:
                self._visit(token.at(one), tally, None, one, columns)

            starts = {node: token.columns(node)}
            show(node, starts[node])
            token.starts = self.linearized.carry(starts, alike, show)
        for chunk in symbols.chunks(self.linearized.chunk([node, *rest], largest)) if rest or not by_token else ():
            visit = partial(self._visit, Apart.of(symbols, chunk), tally, at_output)
            if by_token:
                some = token.apart(self.linearized, rest, chunk, visit)
            else:
                places = symbols.places[chunk]
                some = {node: torch.zeros(len(places), math.prod(node.shape), dtype=torch.float64)}
                some[node][torch.arange(len(places)), places] = symbols.scale[chunk]
                some[node] = some[node].reshape(-1, *node.shape)
                visit(node, some[node])
            self.linearized.carry(some, [one for one in rest if one not in some], visit)
        for one, least in tally.entries.items():
            self.bent[one] += least
            for sets in self.watched[one]:
                self.bent_sets[one, sets] += torch.minimum(tally.sets[one, sets], length(sets.split(least.reshape(one.shape)), -1))
        if last is None and self.graph.output not in (node, *reached):  # a decision reads it, and the output does not
            return
        passed = 0.0 if last is None or last not in tally.entries else float(length(tally.entries[last]))
        part = Contribution(node, symbols, torch.cat(at_output) if at_output else None, last, passed)
        if self.away is not None and at_output:
            rows.find_multiples(self, part)
        self.parts.append(part)

    def _visit(self, bundle: Bundle, tally: Tally, at_output: list[torch.Tensor] | None, node: Node, columns: torch.Tensor) -> None:
        if node not in self.carried and node not in self.watched:
            return
        flat = columns.reshape(len(columns), -1)
        if node in self.carried:
            self.carried[node] += bundle.size(flat)
        if node in self.watched:
            tally.entries[node] = tally.entries.get(node, 0.0) + bundle.entries(flat)
            for sets in self.watched[node]:
                if (node, sets) in self.spread:
                    self.spread[node, sets].add(bundle.ellipsoids(columns, sets))
                tally.sets[node, sets] = tally.sets.get((node, sets), 0.0) + bundle.sets(columns, sets)
        if at_output is not None and node is self.graph.output and flat.shape[1] <= MOST_OUTPUTS:
            at_output.append(flat)


class _Bare:
    """The sizes of a sweep without κ: of JΔx + Gη."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.chords, self.seen = sweep, sweep.chords, sweep.seen

    def entries(self, node: Node) -> torch.Tensor:
        return never_nan((self.sweep._straight(node) + self.sweep.bent[node]) * SUMMED).reshape(node.shape)

    def sets(self, node: Node, sets: Sets) -> torch.Tensor:
        return torch.minimum(length(sets.split(self.entries(node)), -1), self.sweep.without_left(node, sets))
