"""Remainders: a node is its linear part plus no more than its rule says, entry by entry and set by set."""

import functools

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from normscope.certify.columns import AttentionMap, derivative_map
from normscope.certify.passing import Pass
from normscope.core.region import Ball
from normscope.core.rounding import length
from normscope.graph.trace import trace
from normscope.rules import attention as attention_rule
from normscope.rules.logits import Change, TokenSizes, Weighed
from normscope.rules.registry import registry
from normscope.rules.remainder import Sets
from tests.networks import Function


def attention(**options):
    def apply(x):
        q, k, v = x.unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        if options.get("enable_gqa"):
            k, v = k[:, :2], v[:, :2]
        return functional.scaled_dot_product_attention(q, k, v, **options)

    return Function(apply)


def with_fixed(place):
    """Attention with learned queries, keys or values."""

    def apply(x):
        operands = list(x.unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4))
        operands[place] = torch.linspace(-2, 2, 60, dtype=x.dtype).sin().reshape(1, 4, 5, 3)
        return functional.scaled_dot_product_attention(*operands)

    return Function(apply)


def softmax_of_keys(x):
    """Attention with queries and values that do not move: what is left out of its linear part is that of softmax alone."""
    fixed = 0 * x[..., None]
    values = fixed + torch.tensor([[1.0], [-1.0], [0.5]], dtype=x.dtype)
    return functional.scaled_dot_product_attention(fixed[:, :1] + 2.0, x[..., None], values)


CASES = {
    "relu": (nn.ReLU(), (1, 3, 5)),
    "gelu": (nn.GELU(), (1, 3, 5)),
    "silu": (nn.SiLU(), (1, 20)),
    "tanh": (nn.Tanh(), (1, 20)),
    "layer norm": (nn.LayerNorm(6), (1, 3, 6)),
    "rms norm": (nn.RMSNorm(6), (1, 3, 6)),
    "group norm": (nn.GroupNorm(2, 4), (1, 4, 3, 3)),
    "instance norm": (nn.InstanceNorm2d(3), (1, 3, 3, 3)),
    "softmax": (nn.Softmax(-1), (1, 3, 5)),
    "softmax over rows": (nn.Softmax(1), (1, 3, 5)),
    "gate": (Function(lambda x: x[:, :4] * x[:, 4:]), (1, 8)),
    "square": (Function(lambda x: x * x), (1, 8)),
    "broadcast gate": (Function(lambda x: x[:, :1] * x[:, 1:]), (1, 8)),
    "product of matrices": (Function(lambda x: x[:, :3] @ x[:, 3:].mT), (1, 6, 4)),
    "max pool": (nn.MaxPool2d(3, 2, padding=1), (1, 2, 6, 6)),
    "max pool along one axis": (nn.MaxPool1d(2), (1, 2, 6)),
    "attention": (attention(), (1, 5, 36)),
    "causal attention": (attention(is_causal=True), (1, 5, 36)),
    "attention with shared keys": (attention(enable_gqa=True), (1, 5, 36)),
    "attention of keys": (Function(softmax_of_keys), (1, 3)),
    "attention of fixed queries": (with_fixed(0), (1, 5, 36)),
    "attention to fixed keys": (with_fixed(1), (1, 5, 36)),
    "attention to fixed values": (with_fixed(2), (1, 5, 36)),
    "masked": (Function(lambda x: x.masked_fill(torch.arange(8) % 3 == 0, 5.0)), (1, 8)),
}

LOOKED = ("attention", "causal attention", "attention of keys")


class Given:
    """Sizes that are known entry by entry."""

    def __init__(self, values, chords=False):
        self.values, self.chords = values, chords

    def entries(self, node):
        return self.values[node]

    def sets(self, node, sets):
        return length(sets.split(self.values[node]), -1)

    def seen(self, node):
        return next((one for one in self.values if one.op == "logits"), None)


@functools.cache
def traced(name):
    generator = torch.Generator().manual_seed(0)
    model, shape = CASES[name]
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return trace(model, torch.randn(shape, generator=generator, dtype=torch.float64), "eval", None)


def drawn(name, seed):
    """The graph of a case, facts at a middle, and values of all nodes at two points nearby."""
    generator = torch.Generator().manual_seed(seed)
    graph = traced(name)
    shape = graph.inputs[0].shape
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    reach = float(torch.logspace(-3, 0.3, 6)[seed % 6])
    x.reshape(-1)[:: 1 + seed % 3] *= reach / 3  # some close to kinks
    facts = Pass(graph, Ball(x[0], reach))
    points = [x + reach * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) for _ in range(2)]
    return graph, facts, [graph.run([point], torch.float64, capture=graph.nodes)[1] for point in points]


@pytest.mark.quick(12)
@pytest.mark.parametrize(
    ("pairs", "chords"), [(False, False), (True, False), (True, True)], ids=["from the middle", "pairs", "chords"]
)
@pytest.mark.parametrize(("name", "looked"), [*((name, False) for name in CASES), *((name, True) for name in LOOKED)])
def test_a_node_is_its_linear_part_and_no_more_than_its_remainder(name, looked, pairs, chords):
    for seed in range(24):
        graph, facts, (first, second) = drawn(name, seed)
        if not pairs:
            second = {node: facts.center(node) for node in graph.nodes}
        ends = [{node: (end[node] - facts.center(node)).abs() * (1 + 1e-12) for node in graph.nodes} for end in (first, second)]
        away = Given({node: torch.maximum(ends[0][node], ends[1][node]) for node in graph.nodes})
        moves = Given({node: (first[node] - second[node]).abs() * (1 + 1e-12) for node in graph.nodes}, chords)
        if looked:
            look(graph, facts, first, second, away, moves)
        for node in graph.nodes:
            if node.is_input or registry.find(node).linear(node):
                continue
            found = registry.find(node).remainder(node, facts, away, moves if pairs else None)
            assert found is not None
            linear = linear_part(facts, node, away if chords else None)
            changes = [(first[source] - second[source])[None] for source in dict.fromkeys(node.inputs)]
            signed = first[node] - second[node] - linear(*changes)[0]
            left_out = signed.abs()
            slack = 1e-12 * (1 + first[node].abs())
            assert bool((left_out <= found.scale * found.entries + slack).all()), (name, seed)
            multiples = registry.find(node).multiples(node, facts, away, chords) if pairs else None
            if multiples is not None:
                change = (first[node.input] - second[node.input]).reshape(-1)
                whole = (multiples.weights * change[multiples.places]).sum(1) * found.scale.reshape(-1)
                ends = torch.stack([multiples.least * whole, multiples.most * whole])
                over = torch.maximum(signed.reshape(-1) - ends.amax(0), ends.amin(0) - signed.reshape(-1))
                assert not bool(((over > slack.reshape(-1)) & multiples.known).any()), (name, seed)
                assert bool((multiples.least >= -1).all() and (multiples.most <= 1).all())
            if found.sets is not None:
                sets, sizes = found.sets
                beyond = (left_out - slack).clamp(min=0)
                unscaled = torch.where(beyond > 0, beyond / found.scale, 0.0)
                assert bool((length(sets.split(unscaled), -1) <= sizes * (1 + 1e-12)).all()), (name, seed)


def look(graph, facts, first, second, away, moves):
    """How far the logits of attention move, less their mean."""
    node = next(node for node in graph.nodes if node.op == "scaled_dot_product_attention")
    made = derivative_map(node, facts.center)
    assert isinstance(made, AttentionMap)

    def logits(change):
        return made.both(*(change[source][None] for source in dict.fromkeys(node.inputs)))[1][0].abs() * (1 + 1e-12)

    ends = [logits({source: end[source] - facts.center(source) for source in node.inputs}) for end in (first, second)]
    away.values[made.logits] = torch.maximum(*ends)
    moves.values[made.logits] = logits({source: first[source] - second[source] for source in node.inputs})


def still(patch):
    """Probabilities that do not change."""

    def unchanged(p, away, tiny):
        nothing = Weighed(away.roots, torch.zeros_like(p), torch.zeros_like(tiny))
        return Change(nothing, nothing, p, torch.ones_like(tiny))

    patch.setattr(attention_rule, "change", unchanged)


def straight(patch):
    """Logits that are linear in queries and keys, and probabilities times values likewise."""
    patch.setattr(TokenSizes, "summed", lambda self, weights: torch.zeros(weights.shape[:-1], dtype=torch.float64))
    patch.setattr(TokenSizes, "weighed", lambda self, roots: torch.zeros(roots.shape[:-1], dtype=torch.float64))


def short(patch):
    """Logits that move by a tenth of what they do."""
    patch.setattr(Given, "entries", lambda self, node: self.values[node] * (0.1 if node.op == "logits" else 1.0))
    patch.setattr(Given, "sets", lambda self, node, sets: length(sets.split(self.entries(node)), -1))


@pytest.mark.parametrize("mutant", [still, straight, short])
def test_mutants_of_attention_are_caught(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        for name in LOOKED:
            test_a_node_is_its_linear_part_and_no_more_than_its_remainder(name, True, True, False)


def linear_part(facts, node, away):
    return registry.find(node).linear_part(node, facts, away) or derivative_map(node, facts.center)


def test_sets_are_cut_and_joined_again():
    values = torch.arange(24.0).reshape(2, 3, 4)
    sets = Sets.along((2, 3, 4), (0, 2))
    assert sets.split(values).shape == (3, 8)
    assert torch.equal(sets.split(values[None])[0], sets.split(values))
    assert torch.equal(sets.spread(torch.arange(3.0), (2, 3, 4)), torch.arange(3.0)[None, :, None].expand(2, 3, 4))
    assert torch.equal(Sets.whole((2, 3)).split(torch.ones(2, 3)), torch.ones(1, 6))
