"""Values at the middle in twice float64's precision: within their error of exact arithmetic, which is far below float64's rounding."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.certify import precise
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.forms import affine_forms
from normscope.certify.passing import Pass
from normscope.certify.precise import Precise, PreciseMiddle
from normscope.core.region import Ball
from normscope.graph.graph import Constant, Graph


class Residual(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.second(torch.relu(self.first(x)))))


class Scaled(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * (x * self.scale + 0.3 + self.scale)


def spread(model: nn.Module, scale: float = 1.0) -> nn.Module:
    """Weights of several orders of magnitude, statistics that are not those of a new normalizer."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn_like(parameter) * 10 ** torch.empty_like(parameter).uniform_(-3, 1))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(1e-4, 4.0)
    return model.eval()


NETWORKS = {
    "linear": lambda: (nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4), nn.Hardtanh(-0.7, 1.3), nn.Linear(4, 3)), (7,)),
    "factors": lambda: (nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.1), Scaled(), nn.Linear(6, 4), nn.LeakyReLU(-0.3), nn.LeakyReLU(7.0)), (6,)),
    "residual": lambda: (nn.Sequential(Residual(), Residual(), nn.Linear(6, 2)), (6,)),
    "convolution": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 4, 3, groups=2, dilation=2, padding=2),
            nn.ZeroPad2d(1), nn.ConvTranspose2d(4, 3, 2, 2), nn.Flatten(), nn.Linear(3 * 10 * 10, 2),
        ),
        (2, 6, 6),
    ),
}  # fmt: skip


def graph_of(model: nn.Module, shape: tuple[int, ...], scale: float = 1.0) -> tuple[Graph, Ball]:
    example = scale * torch.randn(1, *shape)
    return certifiable_graph(model, example, "eval", None), Ball(example[0].double(), 1e-6 * scale)


def exact(graph: Graph, region: Ball) -> dict:
    """Every node's value in rational numbers, and in 400 digits behind a root: by the definitions of torch's documentation."""
    values = {}
    with localcontext() as context:
        context.prec = 400
        for node in graph.nodes:
            if node.is_input:
                values[node] = [Decimal(x) for x in region.middle[0].reshape(-1).tolist()]
            elif node.op in ("relu", "relu6", "hardtanh"):
                low, high = {"relu": (0, "Infinity"), "relu6": (0, 6), "hardtanh": node.args[1:3]}[node.op]
                values[node] = [min(max(x, Decimal(low)), Decimal(high)) for x in values[node.input]]
            elif node.op == "batch_norm":
                gamma, beta, mean, variance = (part.double().tolist() for part in node.args[1:5])
                repeat = len(values[node.input]) // len(gamma)
                made = []
                for place, x in enumerate(values[node.input]):
                    c = place // repeat
                    root = (Decimal(variance[c]) + Decimal(node.args[7])).sqrt()
                    made.append((x - Decimal(mean[c])) / root * Decimal(gamma[c]) + Decimal(beta[c]))
                values[node] = made
            elif node.op == "leaky_relu":
                values[node] = [x if x > 0 else Decimal(node.args[1]) * x for x in values[node.input]]
            elif node.op in ("add", "mul"):
                parts = [values.get(part) or [Decimal(y) for y in operand(part, node.shape)] for part in node.args[:2]]
                values[node] = [x + y if node.op == "add" else x * y for x, y in zip(*parts, strict=True)]
            else:  # an affine map: its matrix entry by entry, from unit vectors, each of which a kernel moves without rounding
                source = node.inputs[0]
                size = torch.Size(source.shape).numel()
                offset = node.apply(torch.zeros(source.shape, dtype=torch.float64)).reshape(-1)
                plain = precise.without_offset(node)
                columns = [
                    plain.apply(unit.reshape(source.shape)).reshape(-1).tolist() for unit in torch.eye(size, dtype=torch.float64)
                ]
                values[node] = [
                    sum((Decimal(columns[j][i]) * values[source][j] for j in range(size) if columns[j][i]), Decimal(start))
                    for i, start in enumerate(offset.tolist())
                ]
    return values


def operand(part: Any, shape: tuple[int, ...]) -> list[float]:
    value = part.double() if isinstance(part, Constant) else torch.tensor(part, dtype=torch.float64)
    return value.expand(shape).reshape(-1).tolist()


def distance(found: torch.Tensor, low: torch.Tensor, true: list[Decimal]) -> float:
    with localcontext() as context:
        context.prec = 400
        pairs = zip(found.reshape(-1).tolist(), low.reshape(-1).tolist(), true, strict=True)
        return float(sum(((Decimal(a) + Decimal(b) - c) ** 2 for a, b, c in pairs), Decimal(0)).sqrt())


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("name", NETWORKS)
def test_errors_bound_the_distance_from_exact_arithmetic(name, scale, monkeypatch):
    torch.manual_seed(sum(map(ord, name)))
    model, shape = NETWORKS[name]()
    graph, region = graph_of(spread(model), shape, scale)
    seen: dict[int, Precise] = {}
    real = precise._precise

    def kept(node, values, facts):
        seen[node] = real(node, values, facts)
        return seen[node]

    monkeypatch.setattr(precise, "_precise", kept)
    facts, middle, true = Pass(graph, region), PreciseMiddle(graph), exact(graph, region)
    for node in graph.nodes:
        error = middle.error(node, facts)
        assert error is not None, node.label
        computed = facts.center(node)
        assert distance(computed, torch.zeros_like(computed), true[node]) <= error
        if not node.is_input:
            assert distance(seen[node].high, seen[node].low, true[node]) <= seen[node].error
            size = float(torch.linalg.vector_norm(computed))
            assert seen[node].error <= 1e-20 * size + 2.0**-800 and error <= 1e-12 * size + 2.0**-800
    assert error < 1e-2 * facts.error(graph.output)


def test_a_product_that_cancels_all_of_its_digits():
    """x − x computed by a matrix: float64 returns rounding alone, two numbers the difference itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1e8, -1e8, 1.0, 0.0]]))
        model[0].weight[1] = model[0].weight[0] * (1 + 2**-50)
    example = torch.randn(1, 4).double()
    graph, region = certifiable_graph(model, example, "eval", None), Ball(example[0], 1e-6)
    facts, middle = Pass(graph, region), PreciseMiddle(graph)
    errors = [middle.error(node, facts) for node in graph.nodes]
    (x,) = region.middle
    inner = [
        sum(Fraction(w) * Fraction(v) for w, v in zip(row, x.reshape(-1).tolist(), strict=True)) for row in model[0].weight.tolist()
    ]
    true = sum(Fraction(w) * v for w, v in zip(model[1].weight[0].tolist(), inner, strict=True))
    assert abs(Fraction(float(facts.center(graph.output))) - true) <= Fraction(errors[-1])
    assert errors[-1] <= 1e-6


def test_a_kernel_that_does_more_than_multiply_and_add_is_not_trusted(monkeypatch):
    """Exact parts are multiples of a power of two: what a transform rounds is not."""
    torch.manual_seed(0)
    graph, region = graph_of(spread(nn.Sequential(nn.Linear(5, 3))), (5,))
    node, facts = graph.output, Pass(graph, region)
    assert PreciseMiddle(graph)._found(graph.inputs[0], facts) == 0.0
    value = Precise(facts.center(node.input), torch.zeros_like(facts.center(node.input)), 0.0)
    assert precise._precise(node, [value], facts) is not None
    real = type(node).apply
    monkeypatch.setattr(type(node), "apply", lambda self, *values: real(self, *values) * (1 + 2**-52))
    assert precise._precise(node, [value], facts) is None


@pytest.mark.parametrize("activation", [nn.ELU(0.5), nn.Tanh(), nn.Softshrink(), nn.PReLU(), nn.GELU()])
def test_only_what_moves_entries_is_cut_off(activation):
    """Everything else rounds: its value is not known more precisely than float64 computes it."""
    torch.manual_seed(0)
    graph, region = graph_of(nn.Sequential(nn.Linear(5, 5), activation).eval(), (5,))
    facts, middle = Pass(graph, region), PreciseMiddle(graph)
    *before, last = [middle.error(node, facts) for node in graph.nodes]
    assert all(error is not None for error in before) and last is None


@pytest.mark.parametrize("activation", [nn.Softshrink(0.1), nn.Softshrink(1e-20), nn.PReLU(3)])
def test_entries_that_are_shifted_or_scaled_are_not_cut_off(activation):
    """An input is one number, but what becomes of it is rounded, though slopes are in [0, 1] and nothing else is seen of it."""
    if isinstance(activation, nn.PReLU):
        activation.weight.data = torch.tensor([0.0, 0.3, 1.0])
    x = torch.tensor([-0.5, -0.7, 2.3])
    graph = certifiable_graph(activation, x[None], "eval", None)
    facts, middle = Pass(graph, Ball(x.double(), 1e-6)), PreciseMiddle(graph)
    assert [middle.error(node, facts) for node in graph.nodes] == [0.0, None]


def test_no_bound_is_about_the_rounding_of_a_shift():
    """x − 0.1 − c is below 0 as float64 computes it, and above as it is: the slope on a small region is 1."""
    x = torch.tensor([2.3], dtype=torch.float64)
    shrunk = float(nn.functional.softshrink(x, 0.1))
    lacking = float(Fraction(2.3) - Fraction(0.1) - Fraction(shrunk))
    assert lacking > 0
    model = nn.Sequential(nn.Softshrink(0.1), nn.Linear(1, 1), nn.Linear(1, 1), nn.ReLU()).double()
    for layer, bias in ((model[1], -shrunk), (model[2], -lacking / 2)):
        layer.weight.data.fill_(1.0)
        layer.bias.data.fill_(bias)
    assert float(affine_forms(certifiable_graph(model, x[None], "eval", None), Ball(x, 1e-19)).bound) >= 1


@pytest.mark.parametrize("limit", ["tensor", "node"])
def test_clamps_by_other_limits_than_numbers_have_bounds(limit):
    class Clamped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.clamp(x, min=torch.tensor([0.1, -0.2, 0.3]) if limit == "tensor" else x.flip(-1))

    x = torch.tensor([1.0, 0.5, -0.7])
    assert float(affine_forms(certifiable_graph(Clamped(), x[None], "eval", None), Ball(x.double(), 1e-3)).bound) >= 1


def test_an_entry_at_a_kink_is_not_cut_off():
    torch.manual_seed(0)
    graph, region = graph_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU6()), (3,))
    node, facts = graph.output, Pass(graph, region)
    high = torch.tensor([[6.0, 1.0, -1.0]], dtype=torch.float64)
    for low, known in ((1e-17, False), (0.0, True)):
        value = Precise(high, torch.tensor([[low, 1e-17, -1e-17]], dtype=torch.float64), 0.0)
        assert (precise._precise(node, [value], facts) is not None) is known


def alternating(x: torch.Tensor, near: float, layers: int = 8) -> nn.Module:
    """Two layers together do nothing, each stretches some directions by 10; the last units are near their kink."""
    turn = torch.linalg.qr(torch.randn(len(x), len(x)))[0]
    factors = torch.tensor([10.0, 0.1]).repeat(len(x) // 2)
    model = nn.Sequential()
    for layer in range(layers):
        model.append(nn.Linear(len(x), len(x), bias=False)).append(nn.Hardtanh(-1e9, 1e9))
        model[-2].weight.data = turn @ torch.diag(factors if layer % 2 else 1 / factors) @ turn.T
    offset = near - model.double()(x.double())
    model.append(nn.Linear(len(x), len(x))).append(nn.ReLU())
    model[-2].weight.data, model[-2].bias.data = torch.eye(len(x)), offset.detach()
    return model.float()


def test_rounding_is_not_multiplied_by_the_norms_of_layers_behind():
    """Products of norms, 10^8 here, made the signs of units uncertain whose values are known to many more digits."""
    x = torch.arange(1.0, 9.0)
    model, region = alternating(x, near=1e-5), ns.Ball(x, 1e-7)
    forms = affine_forms(certifiable_graph(model, x[None], "eval", None), Ball(x.double(), 1e-7))
    assert forms.symbols == 0 and float(forms.bound) < 1.001
    found = ns.lipschitz(model, x[None], region=region)
    assert float(found.upper) < 1.05 * float(found.lower)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_sums_with_a_factor_are_no_plain_sums(alpha, constant):
    class Added(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.add(x, torch.ones(3) if constant else x.flip(-1), alpha=alpha)

    graph = certifiable_graph(Added(), torch.randn(1, 3), "eval", None)
    reading = ns.rules.registry.reading(graph.output)
    assert reading.plain is (alpha == 1.0)
    middle = PreciseMiddle(graph)
    facts = Pass(graph, Ball(torch.randn(3).double(), 1e-3))
    *_, error = [middle.error(node, facts) for node in graph.nodes]
    assert (error is not None) is (alpha == 1.0)
