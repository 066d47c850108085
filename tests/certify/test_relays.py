"""Columns that end at relays, or travel together: bounds hold all the same, and whoever forgets a part is caught."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns
from normscope.certify import forms, relays, sweep
from normscope.certify.bundles import Together
from normscope.certify.columns import AttentionMap, behind, derivative_map
from normscope.certify.forms import AffineForms, affine_forms
from normscope.certify.relays import Plan, cut_vertices, owners, plan
from normscope.certify.sweep import Sweep
from normscope.certify.tokens import Tokens
from normscope.core.region import Ball
from normscope.graph.graph import Graph
from normscope.graph.trace import trace
from normscope.rules.registry import registry
from normscope.rules.remainder import Remainder
from tests.certify.test_forms import Transformer, regions, residual, violations
from tests.networks import Function


class Encoder(nn.Module):
    """Two layers, normalizers behind the branches, tokens averaged."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(6, 2, 10, 0.0, activation, batch_first=True) for activation in ("gelu", "relu")]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def stacked() -> nn.Module:
    """Two pre-norm layers with a gate; their residual streams are read by all that follows."""
    return nn.Sequential(Stream(), Stream(), Transformer())


class Stream(Transformer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mixed(self.norms[0](x)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        x = x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


CASES = {"pre-norm": (stacked, (1, 3, 6)), "post-norm": (Encoder, (1, 4, 6)), "residual": (residual, (1, 2, 5, 5))}


def drawn(name: str, seed: int) -> tuple[nn.Module, torch.Tensor, Graph]:
    make, shape = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().double().eval()
        return model, (x := torch.randn(shape, dtype=torch.float64)), trace(model, x, "eval", None)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay wherever one can be, whatever it costs in tightness."""
    monkeypatch.setattr(forms, "plan", lambda graph, most, shares: Plan(tuple(cut_vertices(graph))))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))])
@pytest.mark.parametrize("name", CASES)
def test_no_pair_of_points_exceeds_a_bound(name: str, seed: int, always: None) -> None:
    model, x, graph = drawn(name, seed)
    for radius in (1e-3, 0.3):
        for region in regions(x, radius):
            found = affine_forms(graph, region)
            assert found.plan.relays and not violations(graph, model, region, found, seed, pairs=2, steps=6)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CASES)
def test_relays_cost_little_where_nothing_bends(name: str, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, x, graph = drawn(name, 0)
    with_relays = affine_forms(graph, Ball(x[0], 1e-7))
    monkeypatch.setattr(forms, "plan", lambda graph, most, shares: Plan())
    without = affine_forms(graph, Ball(x[0], 1e-7))
    assert with_relays.plan.relays and not without.plan.relays
    assert float(with_relays.bound) == pytest.approx(float(without.bound), rel=1e-3)
    shares = [part.bound for part in with_relays.parts]
    assert all(share >= 0 for share in shares) and (sum(shares) > 0 or name == "residual")


class Pixels(nn.Module):
    """Blocks as in ConvNeXt: a normalizer over the channels of each pixel, between permutations."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.mixed = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mixed, norm in zip(self.mixed, self.norms, strict=True):
            x = x + norm(mixed(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x.mean((2, 3))


def test_relays_stand_where_vectors_along_the_last_axis_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ellipsoids around rows of an image save a little work there and lose much of the bound."""
    monkeypatch.setattr(relays, "estimate", lambda graph, relays, shares: -float(len(relays)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = Pixels().double(), torch.randn(1, 4, 5, 5, dtype=torch.float64)
    graph = trace(model, x, "eval", None)
    assert cut_vertices(graph) and not plan(graph, math.inf).relays
    for name in ("pre-norm", "post-norm"):
        assert plan(drawn(name, 0)[2], math.inf).relays


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CASES)
def test_tokens_that_travel_together_arrive_as_if_alone(name: str, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, x, graph = drawn(name, 0)
    region = Ball(x[0], 0.02)
    one = affine_forms(graph, region)
    monkeypatch.setattr(sweep, "owners", lambda node, _: owners(node, []))
    other = affine_forms(graph, region)
    assert float(one.bound) == pytest.approx(float(other.bound), rel=1e-6)
    seen = [(one.moves.seen(node), other.moves.seen(node)) for node in graph if one.moves.seen(node)]
    for node, same in [*((node, node) for node in one.away.watched if node in graph.nodes), *seen]:
        assert torch.allclose(one.moves.entries(node), other.moves.entries(same), rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_tokenwise_nodes_keep_tokens_apart(name: str) -> None:
    _, x, graph = drawn(name, 0)
    values = graph.run([x], torch.float64, capture=graph.nodes)[1]
    generator, seen = torch.Generator().manual_seed(0), 0
    for node in graph.nodes:
        if node.is_input or not registry.find(node).tokenwise(node):
            continue
        sources = list(dict.fromkeys(node.inputs))
        if any(source.shape[:-1] != node.shape[:-1] for source in sources):
            continue
        moved = [values[source].clone() for source in sources]
        for part in moved:
            part.reshape(-1, part.shape[-1])[0] += torch.randn(part.shape[-1], generator=generator, dtype=torch.float64)
        changed = (node.apply(*moved) - node.apply(*(values[source] for source in sources))).abs()
        assert float(changed.reshape(-1, changed.shape[-1])[1:].sum()) == 0
        seen += 1
    assert seen or name == "residual"


@pytest.mark.parametrize("name", CASES)
def test_a_token_changes_what_it_owns_alone(name: str) -> None:
    """Through heads that are split off and turned around, up to where tokens meet."""
    _, x, graph = drawn(name, 0)
    values = graph.run([x], torch.float64, capture=graph.nodes)[1]
    generator, farthest = torch.Generator().manual_seed(0), 0
    for start in cut_vertices(graph):
        reached = behind(graph, [start])
        owned = owners(start, reached)
        width, (first, last) = start.shape[-1], (0, math.prod(start.shape[:-1]) - 1)
        for token in (first, last):
            moved = {start: values[start].clone()}
            change = torch.randn(width, generator=generator, dtype=torch.float64)
            moved[start].reshape(-1, width)[token] += change
            for node in list(owned)[1:]:
                moved[node] = node.apply(*(moved.get(source, values[source]) for source in dict.fromkeys(node.inputs)))
                changed = moved[node] != values[node]
                assert bool((owned[node] == token)[changed].all()), node.label
        stop = next((node for node in reached if node not in owned), None)
        farthest += stop is not None and "attention" in stop.op
    assert farthest or name == "residual"


def test_owners_of_what_is_repeated_or_meets() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        y = x + x.tanh()
        wide = torch.cat([y, y.flip(-1)], -1)  # still one owner per token
        return wide.reshape(1, 3, 2, 4).permute(0, 2, 1, 3).softmax(-1).sum(2)  # heads, whose tokens then are added up

    graph = trace(Function(mixed), torch.randn(1, 3, 4, dtype=torch.float64), "eval", None)
    start = next(node for node in graph if node.op == "add")
    owned = owners(start, behind(graph, [start]))
    ops = [node.op for node in owned]
    assert "permute" in ops and "sum" not in ops
    for node in owned:
        if node.op == "permute":
            assert bool((owned[node] == torch.arange(3)[:, None]).all())


def test_a_relay_is_on_every_path() -> None:
    for name in CASES:
        _, _, graph = drawn(name, 0)
        for cut in cut_vertices(graph):
            reached = set(graph.inputs)  # without passing the cut
            for node in graph.nodes:
                if node is not cut and any(source in reached for source in node.inputs):
                    reached.add(node)
            assert graph.output not in reached


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (1, 2, 0), ((2, 3), (1, 2), (0, 1)), (3, 1, "same"), (2, 3, 0)]
)
def test_convolutions_of_columns(kernel: object, stride: object, padding: object) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 5, kernel, stride, padding).double()
    graph = trace(model, torch.randn(1, 2, 6, 7, dtype=torch.float64), "eval", None)
    convolved = derivative_map(graph.output, lambda node: torch.zeros(node.shape, dtype=torch.float64))
    whole = torch.randn(4, 1, 2, 6, 7, dtype=torch.float64)
    rows, columns = torch.arange(6)[:, None], torch.arange(7)
    for top, left, height, width in itertools.product((0, 2, 5), (0, 3, 6), (0, 1, 4, 6), (1, 2, 7)):
        used = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
        part = whole * used  # what is not 0 is a rectangle, at a side or inside, or nothing
        expected = functional.conv2d(part[:, 0], model.weight, None, stride, padding)
        assert torch.allclose(convolved(part)[:, 0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": -0.7}, {"attn_mask": torch.arange(12.0).reshape(3, 4)}], ids=str
)
def test_attention_of_columns(options: dict[str, object]) -> None:
    """As torch's own derivative has it, queries and keys of another number and values of another width."""
    generator = torch.Generator().manual_seed(0)
    count = 3 if options.get("is_causal") else 4
    shapes = (3, 2), (count, 2), (count, 5)

    def attend(x: torch.Tensor) -> torch.Tensor:
        parts = x.split([2 * tokens * width for tokens, width in shapes], 1)
        operands = (part.reshape(-1, 2, *shape) for part, shape in zip(parts, shapes, strict=True))
        return functional.scaled_dot_product_attention(*operands, **options)

    x, change = torch.randn(2, 1, sum(2 * a * b for a, b in shapes), generator=generator, dtype=torch.float64)
    graph = trace(Function(attend), x, "eval", None)
    values = graph.run([x], torch.float64, capture=graph.nodes)[1]
    node = next(node for node in graph if "attention" in node.op)
    moved = graph.run([change], torch.float64, capture=graph.nodes)[1]
    found = derivative_map(node, values.get)(*(moved[source][None] for source in node.inputs))
    expected = torch.func.jvp(
        node.apply, tuple(values[source] for source in node.inputs), tuple(moved[source] for source in node.inputs)
    )[1]
    assert torch.allclose(found[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": -0.7}, {"attn_mask": torch.arange(9.0).reshape(3, 3)}], ids=str
)
def test_attention_of_columns_at_one_token_each(options: dict[str, object]) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*x.reshape(1, 3, 2, 3, 4).unbind(1), **options)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 72, generator=generator, dtype=torch.float64)
    graph = trace(Function(attend), x, "eval", None)
    values = graph.run([x], torch.float64, capture=graph.nodes)[1]
    node = next(node for node in graph if "attention" in node.op)
    found = derivative_map(node, values.get)
    assert isinstance(found, AttentionMap)
    changes = [torch.randn(5, *source.shape, generator=generator, dtype=torch.float64) for source in node.inputs]
    token, entry = torch.arange(15) % 3, torch.arange(15) // 3
    alone = [torch.zeros(15, *part.shape[1:], dtype=torch.float64) for part in changes]
    for part, change in zip(alone, changes, strict=True):
        for column in range(15):
            part[column][..., token[column], :] = change[entry[column]][..., token[column], :]
    for made, expected in zip(found.by_token(changes, token, entry), found.both(*alone), strict=True):
        assert torch.allclose(made, expected, rtol=1e-12, atol=1e-12)
    tokens = torch.arange(3)[:, None].expand(1, 2, 3, 4)
    assert found.takes([tokens] * 3) and not found.takes([tokens, tokens, tokens.flip(-2)])


# mutants of a relay: the middle is a kink or curved, and a relay stands behind it


def behind_a_relay() -> nn.Module:
    """Twice x ↦ relu(x) + relu(x)/2, which is 1.5-Lipschitz with 0.75 ± 0.75 at the kink."""
    return Function(lambda x: (lambda y: y + 0.5 * y * 1.0)(functional.relu(x)) * 2.0)


def forgets_columns(patch: pytest.MonkeyPatch) -> None:
    original = Sweep._relayed

    def relayed(self, node, own):
        found = original(self, node, own)
        return Remainder(found.scale, found.entries * 0.01, (found.sets[0], found.sets[1] * 0.01))

    patch.setattr(Sweep, "_relayed", relayed)


def halves_blocks(patch: pytest.MonkeyPatch) -> None:
    original = Sweep._visit

    def visit(self, bundle, tally, at_output, node, columns):
        original(self, bundle, tally, at_output, node, columns / 2)

    patch.setattr(Sweep, "_visit", visit)


def tokens_in_heads() -> nn.Module:
    """Squares, 0 with their derivative at the middle, whose tokens attend to each other behind a relay."""

    def attended(x: torch.Tensor) -> torch.Tensor:
        y = x * x + 0.0 * x
        heads = y.unflatten(-1, (2, 3)).transpose(1, 2)
        return y + functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    return Function(attended)


def gives_all_to_one_token(patch: pytest.MonkeyPatch) -> None:
    original = Tokens.apart
    patch.setattr(Tokens, "apart", lambda self, *rest: {node: 0.1 * part for node, part in original(self, *rest).items()})


def forgets_other_owners(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Together, "entries", lambda self, flat: (self.sizes.T[:, self.owner * 0] * 0.01 * flat.abs()).sum(0))
    patch.setattr(Together, "sets", lambda self, columns, sets: 0 * self._norms(*self._split(columns, sets)).sum(1))


@pytest.mark.parametrize(
    ("change", "make", "shape"),
    [
        (gives_all_to_one_token, tokens_in_heads, (3, 6)), (forgets_other_owners, tokens_in_heads, (3, 6)),
        (forgets_columns, behind_a_relay, (2, 3)), (halves_blocks, behind_a_relay, (2, 3)),
    ],
)  # fmt: skip
def test_mutants_are_caught(change, make, shape, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make(), torch.zeros(1, *shape, dtype=torch.float64)
    graph, region = trace(model, x, "eval", None), Ball(x[0], 0.5)
    found = affine_forms(graph, region)
    assert found.plan.relays and not violations(graph, model, region, found, pairs=6, steps=30)
    change(monkeypatch)
    assert violations(graph, model, region, affine_forms(graph, region), pairs=6, steps=30)


def test_a_first_bound_outlives_an_interrupt_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, graph = drawn("residual", 0)
    region, whole = Ball(x[0], 0.3), AffineForms._bound
    calls = []

    def bound(self, facts, chords):
        calls.append(chords)
        if chords:
            raise KeyboardInterrupt
        whole(self, facts, chords)

    monkeypatch.setattr(AffineForms, "_bound", bound)
    found = affine_forms(graph, region)
    assert calls == [False, True] and found.bound.finite and any("best so far" in note for note in found.notes)
    assert not violations(graph, model, region, found, pairs=3)


def test_too_little_effort_keeps_the_first_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    _, x, graph = drawn("residual", 0)
    region = Ball(x[0], 0.3)
    first = affine_forms(graph, region)
    monkeypatch.setattr(forms, "MOST_WORK", first.work * 0.7)
    found = affine_forms(graph, region, effort=1.0)
    assert found.bound.finite and any("may give a smaller bound" in note for note in found.notes)


@pytest.mark.parametrize("slope", [3.0, -2.0])
def test_symbols_of_a_relay_are_no_multiples_of_its_input(slope: float, always: None) -> None:
    """Those of an activation are; a relay's are that times how far slopes differ, and what columns bring."""
    model = Function(lambda x: (lambda y: y + 0.5 * y)(functional.leaky_relu(x, slope)))
    x = torch.full((1, 2, 3), 0.1, dtype=torch.float64)
    found = affine_forms(trace(model, x, "eval", None), Ball(x[0], 0.5))
    assert found.plan.relays and 1.5 * abs(slope) <= float(found.bound) <= 1.5 * abs(slope) * (1 + 1e-6)


def test_where_columns_end() -> None:
    _, _, graph = drawn("pre-norm", 0)
    cuts = cut_vertices(graph)
    plan = Plan(tuple(cuts))
    assert plan.last(graph, graph.inputs[0]) is cuts[0] and plan.last(graph, cuts[0]) is cuts[1]
    assert plan.last(graph, graph.output) is None and list(owners(graph.output, [])) == [graph.output]


def test_a_number_without_axes_may_bend():
    weights = torch.tensor([1.0, 2.0, 3.0])
    model = Function(lambda x: torch.tanh(torch.dot(torch.tanh(x[0]), weights))[None])
    found = ns.lipschitz(model, torch.ones(1, 3), region=ns.Ball(torch.zeros(3), 0.3))
    assert found.lower <= found.upper and float(found.upper) == pytest.approx(14**0.5, rel=1e-3)


def test_padding_of_a_convolution_is_no_relay():
    """Its gain is about padded values, and the symbols of a relay are any values."""
    convolution = nn.Conv1d(2, 2, 3)
    pad = lambda x: functional.pad(torch.tanh(x), (1, 1), mode="circular")  # noqa: E731
    twice = lambda padded: convolution(padded) + convolution(2 * padded)  # noqa: E731
    assert not cut_vertices(trace(Function(lambda x: twice(pad(x))), torch.randn(1, 2, 5)))
