"""One pass: what is known of a node does not depend on who asks, or when."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.certify.upper import composed, forward_pass
from normscope.graph.graph import Graph, Node
from normscope.graph.trace import trace
from tests.cases import RULE_CASES, VARIANTS
from tests.certify.test_relaxation import CURVED
from tests.networks import Function, is_deep, network, randn

QUESTIONS = ("gain", "interval", "norm", "deviation", "distances", "error", "center")


def two_normalizers() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double(), randn(
        1, 6
    ).double()


def plain(answer: object) -> object:
    """An answer as something that is equal bit for bit, NaN included."""
    if isinstance(answer, torch.Tensor):
        return answer.dtype, tuple(answer.shape), answer.contiguous().numpy().tobytes()
    if isinstance(answer, ns.rules.Gain):
        return tuple(factor.log for factor in answer.factors), answer.method, answer.separate, answer.reason
    if hasattr(answer, "low"):
        return plain(answer.low), plain(answer.high)
    return repr(answer)


def questions(graph) -> list[tuple[str, object]]:
    return [(question, node) for question in QUESTIONS for node in graph if node.dtype is not None and node.dtype.is_floating_point]


def answers(graph, region, asked) -> dict[tuple[str, object], object]:
    facts = forward_pass(graph, region=region)
    found = {}
    for question, node in asked:
        if question != "gain" or node.op != "input":
            found[question, node] = plain(getattr(facts, question)(node))
    return found | {("at", node): facts.at(node).log for node in graph}


def regions(example: torch.Tensor, mode: str) -> list[object]:
    center = example.double() if mode == "batch" else example[0].double()
    return [None, ns.Ball(center, 0.01), ns.Box(center - 0.1, center + 0.2)]


def check(module: nn.Module, example: torch.Tensor, mode: str = "eval", seeds: int = 1) -> None:
    """Every answer, asked in random orders, is the one that the first order gives."""
    graph = trace(module, example, mode)
    asked = questions(graph)
    for region in regions(example, mode):
        expected = answers(graph, region, asked)
        for seed in range(seeds):
            shuffled = random.Random(seed).sample(asked, len(asked))
            assert answers(graph, region, shuffled) == expected


@pytest.mark.parametrize("seed", [6, 27, 44, 98, 110, 134])
def test_facts_agree_with_each_other(seed):
    """No bound is above what the pass knows of the output, and no value farther from the middle than the node can deviate."""
    module, example, mode = network(seed)
    graph = trace(module, example, mode)
    for region in regions(example, mode):
        facts = forward_pass(graph, region=region)
        assert composed(facts).bound <= facts.at(graph.output).widened(1e-9)
        for node in graph:
            if (away := facts.distances(node)) is not None and not node.is_input:
                assert float(away.max()) <= facts.deviation(node) * (1 + 1e-9) + 1e-12 * float(facts.center(node).abs().max())


def test_a_normalizer_behind_another_has_its_gain_at_once():
    """Whether the composition was made before or not: the first question is about the last normalizer."""
    module, x = two_normalizers()
    graph = trace(module, x)
    second = [node for node in graph if node.op == "layer_norm"][1]
    facts = forward_pass(graph, region=ns.Ball(x[0], 1e-3))
    assert float(facts.gain(second).factors[0]) < 10
    assert math.isfinite(facts.deviation(second.input))


@pytest.mark.parametrize("name", CURVED)
def test_any_order_of_questions_on_curved_networks(name):
    make, shape = CURVED[name]
    torch.manual_seed(0)
    check(make().double(), torch.randn(shape, dtype=torch.float64), seeds=2)


@pytest.mark.quick(5)
@pytest.mark.parametrize("seed", [seed for seed in range(0, 18, 2) if not is_deep(seed)])
def test_any_order_of_questions_on_random_networks(seed):
    check(*network(seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", [seed for seed in range(18, 180) if not is_deep(seed)])
def test_any_order_of_questions_on_more_networks(seed):
    check(*network(seed), seeds=3)


ALL_CASES = {**RULE_CASES, **VARIANTS}


@pytest.mark.quick(12)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 12 == 0 else pytest.mark.full) for i, name in enumerate(ALL_CASES)]
)
def test_any_order_of_questions_on_every_rule(name):
    case = ALL_CASES[name]
    check(
        nn.Sequential(nn.Tanh(), case.module, Function(lambda x: torch.relu(x) if x.is_floating_point() else x)),
        case.example,
        case.mode,
    )


@pytest.mark.parametrize(
    "region", [None, pytest.param(ns.Ball(torch.ones(2), 0.1), marks=pytest.mark.full)], ids=["everywhere", "ball"]
)
def test_thousands_of_nodes_are_no_recursion(region):
    """Norms of a chain of residual sums, each known from the one before it."""
    nodes = [Node("x", "input", shape=(1, 2), dtype=torch.float32)]
    for i in range(1000):
        nodes.append(Node(f"t{i}", "tanh", torch.tanh, (nodes[-1],), shape=(1, 2), dtype=torch.float32))
        nodes.append(Node(f"s{i}", "add", torch.add, (nodes[-2], nodes[-1]), shape=(1, 2), dtype=torch.float32))
    facts = forward_pass(Graph(tuple(nodes), (nodes[0],), nodes[-1]), region=region)
    assert facts.norm(nodes[-1]) > 0 and facts.interval(nodes[-1]).shape == (1, 2)


class Frozen(ns.rules.Rule):
    """A rule that asks for the interval of its own node while its gain is being bounded."""

    def gain(self, node, context):
        context.norm(node)
        return ns.rules.Gain.of(min(2.0, context.interval(node).magnitude))

    def interval(self, node, context):
        return context.interval(node.input).map(node.apply)


def test_a_rule_may_ask_about_its_own_node(monkeypatch):
    """It then sees what its own interval says, and nothing of that is kept."""
    monkeypatch.setitem(ns.rules.registry.rules, "relu", Frozen())
    check(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), randn(1, 3))
