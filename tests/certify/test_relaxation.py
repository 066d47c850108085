"""Regions: the local bound is never above the global one, shrinks with the radius, and ends at the Jacobian's norm."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.certify import columns
from normscope.graph.trace import trace
from normscope.rules.readings import Normalizer
from normscope.rules.registry import registry
from tests.networks import Function, randn


def network(seed: int, kind: type[nn.Module] = nn.ReLU) -> tuple[nn.Sequential, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 10), kind(), nn.Linear(10, 8), kind(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.randn(4, generator=generator, dtype=torch.float64)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", [nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_shrinks_to_the_norm_of_the_jacobian(seed, kind):
    model, center = network(seed, kind)
    jacobian = torch.autograd.functional.jacobian(model, center)
    truth = float(torch.linalg.matrix_norm(jacobian, 2))
    everywhere = ns.lipschitz(model, center[None], effort=0.1).upper
    uppers = [ns.lipschitz(model, center[None], region=ns.Ball(center, r), effort=0.1).upper for r in (10.0, 1.0, 0.1, 1e-3, 1e-6)]
    assert all(small <= large * (1 + 1e-6) for large, small in zip([everywhere, *uppers], uppers, strict=False))
    assert truth * (1 - 1e-9) <= float(uppers[-1]) <= truth * (1 + 1e-4)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.sigmoid(self.gate(x)) * self.value(x))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 3)

    def forward(self, x):
        q, k, v = self.attention(self.norm(x)).unflatten(-1, (3, 2, 3)).transpose(1, 3).unbind(2)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


CURVED = {
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)), (1, 6)),
    "two normalizers": (lambda: nn.Sequential(nn.Linear(6, 9), nn.RMSNorm(9), nn.GELU(), nn.Linear(9, 9), nn.LayerNorm(9), nn.Linear(9, 3)), (1, 6)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)), (1, 3, 5, 5)),
    "softmax": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Softmax(-1)), (1, 6)),
    "gate": (Gated, (1, 6)),
    "attention": (Attentive, (1, 4, 6)),
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CURVED)
def test_curved_networks_shrink_to_the_norm_of_the_jacobian_too(name):
    make, shape = CURVED[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda v: model(v).reshape(-1), x).reshape(-1, x.numel())
    truth = float(torch.linalg.matrix_norm(jacobian, 2))
    uppers = [float(ns.lipschitz(model, x, region=ns.Ball(x[0], r), effort=0.1).upper) for r in (1.0, 0.1, 1e-2, 1e-4, 1e-8)]
    assert all(small <= large * (1 + 1e-6) for large, small in itertools.pairwise(uppers))
    assert truth * (1 - 1e-9) <= uppers[-1] <= truth * (1 + 1e-4)


@pytest.mark.quick(4)
@pytest.mark.parametrize("seed", range(8))
def test_close_to_the_exact_constant_of_a_box(seed):
    """Exact from inside by all patterns that dense sampling finds; small boxes within 1.5, medium ones within 3."""
    model, center = network(seed)
    jacobians = torch.vmap(torch.func.jacrev(model))
    generator = torch.Generator().manual_seed(seed)
    for radius, factor in ((0.01, 1.5), (0.3, 3.0)):
        points = center + radius * (2 * torch.rand(4000, 4, generator=generator, dtype=torch.float64) - 1)
        exact = float(torch.linalg.matrix_norm(jacobians(points), 2).max())
        bracket = ns.lipschitz(model, center[None], region=ns.Box(center - radius, center + radius), effort=0.2)
        assert exact * (1 - 1e-9) <= float(bracket.upper) <= factor * max(exact, float(bracket.lower))


def test_the_witness_lies_in_the_region():
    model, center = network(0)
    ball = ns.Ball(center, 0.5)
    bracket = ns.lipschitz(model, center[None], region=ball, effort=0.5)
    assert all(ball.contains(tuple(part[0] for part in end)) for end in bracket.witness)


def test_layer_norm_on_a_ball_is_close_to_the_sampled_supremum():
    generator = torch.Generator().manual_seed(0)
    center = torch.randn(64, generator=generator, dtype=torch.float64)
    norm = nn.LayerNorm(64).double()
    sigma = float(center.std(correction=0)) * 8
    for share in (0.05, 0.2, 0.45):
        radius = share * sigma
        bracket = ns.lipschitz(norm, center[None], region=ns.Ball(center, radius), effort=0.1)
        inward = center - radius * (center - center.mean()) / (center - center.mean()).norm()
        jacobian = torch.autograd.functional.jacobian(norm, inward)
        sampled = float(torch.linalg.matrix_norm(jacobian, 2))
        assert sampled <= float(bracket.upper) <= 1.02 * sampled


def test_gates_are_finite_on_a_region_only():
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return x * torch.sigmoid(self.inner(x))

    model, x = Gate(), torch.randn(1, 4)
    assert not ns.lipschitz(model, x, effort=0.1).upper.finite
    assert ns.lipschitz(model, x, region=ns.Ball(x[0], 1.0), effort=0.1).upper.finite


def test_a_region_of_another_shape_is_refused():
    model, center = network(0)
    with pytest.raises(ns.InputError, match="region"):
        ns.lipschitz(model, center[None], region=ns.Ball(torch.zeros(5), 1.0))


@torch.library.custom_op("normscope_tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


@thrice.register_fake
def _(x):
    return torch.empty_like(x)


class Thrice(ns.rules.Rule):
    """A linear operation of a user's own, which has no derivative."""

    def gain(self, node, context):
        return ns.rules.Gain.of(3)

    def linear(self, node):
        return True


UNDERIVED = {
    "an operation without a derivative": lambda x: thrice(x),
    "nearest upsampling": lambda x: nn.functional.interpolate(x[:, None], scale_factor=2.3)[:, 0],  # its backward is another map's
}


@pytest.mark.parametrize("name", UNDERIVED)
def test_linear_operations_without_a_derivative_are_relaxed_as_they_run(name, monkeypatch):
    """On a ball within which no unit changes sides the bound is the norm of the map, by differences of what runs forward."""
    monkeypatch.setitem(ns.rules.registry.rules, "normscope_tests.thrice", Thrice())
    torch.manual_seed(0)
    size = UNDERIVED[name](torch.zeros(1, 8)).shape[1]
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Function(UNDERIVED[name]), nn.Linear(size, 3)).double()
    center = randn(4, seed=1).double()
    step = 1e-4 * torch.eye(4, dtype=torch.float64)
    with torch.no_grad():
        jacobian = (model(center + step) - model(center - step)).T / 2e-4
    truth = float(torch.linalg.matrix_norm(jacobian, 2))
    bracket = ns.lipschitz(model, center[None], region=ns.Ball(center, 1e-6), effort=0.1)
    assert truth * (1 - 1e-6) <= float(bracket.upper) <= truth * (1 + 1e-3)


@torch.library.custom_op("normscope_tests::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


sine.register_fake(torch.empty_like)
sine.register_autograd(
    lambda context, slope: slope * context.saved_tensors[0].cos(),
    setup_context=lambda context, inputs, output: context.save_for_backward(inputs[0]),
)


class Sine(ns.rules.Rule):
    """A user's rule that knows how far the derivative is from that at the middle."""

    def gain(self, node, context):
        return ns.rules.Gain.of(1)

    def curvature(self, node, context):
        return (context.deviation(node.input),)


def test_an_operation_with_a_backward_alone_has_no_linear_part(monkeypatch):
    """Torch's forward mode takes its derivative for 0, without a word."""
    monkeypatch.setitem(ns.rules.registry.rules, "normscope_tests.sine", Sine())
    x = torch.full((1, 2), 0.5, dtype=torch.float64)
    found = ns.lipschitz(Function(torch.ops.normscope_tests.sine), x, region=ns.Ball(x[0], 0.01))
    assert 0.87 <= found.lower <= found.upper <= 1.01


@torch.library.custom_op("normscope_tests::tripled_and_moved", mutates_args=())
def tripled_and_moved(x: torch.Tensor) -> torch.Tensor:
    return 3 * x + 1


tripled_and_moved.register_fake(torch.empty_like)
tripled_and_moved.register_autograd(lambda context, slope: 3 * slope, setup_context=lambda context, inputs, output: None)


class TripledAndMoved(ns.rules.Rule):
    def gain(self, node, context):
        return ns.rules.Gain.of(3)

    def linear(self, node):
        return True


def test_an_affine_operation_with_a_backward_alone_is_bounded_by_its_gain(monkeypatch):
    monkeypatch.setitem(ns.rules.registry.rules, "normscope_tests.tripled_and_moved", TripledAndMoved())
    x = torch.full((1, 2), 0.5, dtype=torch.float64)
    model = Function(lambda x: torch.tanh(torch.ops.normscope_tests.tripled_and_moved(x)))
    found = ns.lipschitz(model, x, region=ns.Ball(x[0], 0.01))
    assert found.lower <= found.upper <= 3.001


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e-200, 1e200])
def test_a_wrong_backward_is_seen_at_every_scale(size):
    """Nearest upsampling by 1.03 sends entry 4 nowhere and entry 3 twice, but torch's backward is another map's."""
    matrix = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 1, 0, 0]], dtype=torch.float64)

    def upsampled(x):
        return size * torch.tanh(nn.functional.interpolate(torch.tanh(x)[:, None], scale_factor=1.03)[:, 0] @ matrix.T)

    x = torch.zeros(1, 5, dtype=torch.float64)
    move = 1e-6 * torch.eye(5, dtype=torch.float64)
    truth = float(torch.linalg.matrix_norm((upsampled(move) - upsampled(-move)) / size / 2e-6, 2))
    found = ns.lipschitz(Function(upsampled), x, region=ns.Ball(x[0], 0.01))
    assert truth * (1 - 1e-9) <= float(found.upper) / size <= truth * 1.01


@torch.library.custom_op("normscope_tests::shrunk_and_moved", mutates_args=())
def shrunk_and_moved(x: torch.Tensor) -> torch.Tensor:
    return 1e-11 * x + 1e-11


shrunk_and_moved.register_fake(torch.empty_like)
shrunk_and_moved.register_autograd(lambda context, slope: 1e-11 * slope, setup_context=lambda context, inputs, output: None)


@pytest.mark.parametrize("upsampled", [True, False])
def test_a_wrong_backward_is_seen_beside_what_is_larger(upsampled):
    torch.manual_seed(0)
    added = Function(
        lambda x: x + 1e-10 * (nn.functional.interpolate(x[:, None], scale_factor=1.03)[:, 0] if upsampled else x.flip(1))
    )
    model = nn.Sequential(nn.Linear(5, 5), added, nn.Linear(5, 5)).double()
    found = ns.certify.operator_norm(model, (5,))
    assert any(step.operation == "whole map" for step in found.certificate.steps) != upsampled


def test_nodes_without_axes_have_an_adjoint():
    weight = randn(4)
    model = Function(lambda x: (torch.dot(x[0], weight) - torch.dot(x[0], weight / 2))[None])
    assert float(ns.certify.operator_norm(model, (4,)).upper) == pytest.approx(float(weight.norm()) / 2, rel=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e-200])
def test_a_normalizer_that_is_misread_is_seen_at_every_scale(size):
    model = nn.LayerNorm(4).double()
    with torch.no_grad():
        model.weight.mul_(size)
    (node,) = (node for node in trace(model, torch.zeros(1, 4, dtype=torch.float64)) if not node.is_input)
    middle, right = torch.tensor([[1.0, 2, 4, 9]], dtype=torch.float64), registry.reading(node, Normalizer)
    assert columns._normalizer_map(node, right, lambda _: middle) is not None
    assert columns._normalizer_map(node, replace(right, epsilon=0.5), lambda _: middle) is None


class ShrunkAndMoved(TripledAndMoved):
    def gain(self, node, context):
        return ns.rules.Gain.of(1e-11)


def test_a_small_affine_operation_with_a_backward_alone_is_bounded_by_its_gain(monkeypatch):
    monkeypatch.setitem(ns.rules.registry.rules, "normscope_tests.shrunk_and_moved", ShrunkAndMoved())
    x = torch.zeros(1, 2, dtype=torch.float64)
    model = Function(lambda x: torch.tanh(torch.ops.normscope_tests.shrunk_and_moved(x) * 1e11))
    found = ns.lipschitz(model, x, region=ns.Ball(x[0], 0.01))
    assert 0.4 <= found.lower <= found.upper <= 0.5


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_rounded_division_is_not_linear_where_it_does_not_count(mode):
    """Log-softmax over one entry is 0 whatever enters it."""
    model = Function(lambda x: torch.log_softmax(torch.div(x, 2, rounding_mode=mode), 1))
    x = torch.full((1, 1), 0.8, dtype=torch.float64)
    assert float(ns.lipschitz(model, x, region=ns.Ball(x[0], 0.01)).upper) == 0
    with pytest.raises(ns.InputError, match="is not affine"):
        ns.certify.operator_norm(Function(lambda x: torch.div(x, 2, rounding_mode=mode)), (1,))
