"""Mistakes that tools of this kind make, and the papers' slips: each is a number that would be wrong here."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import normscope as ns
from tests.networks import Function, randn

UP = 1 + 1e-6  # what a dense reference and a certified bound may differ by


def filled(module: nn.Module, seed: int = 0, variance: tuple[float, float] = (0.2, 3.0)) -> nn.Module:
    """Weights, γ, β and running statistics far from their initial values; float64, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(*variance, generator=generator)
            elif name.endswith("running_mean"):
                buffer.normal_(generator=generator)
    return module


def jacobian_norm(function, x: Tensor) -> float:
    """The dense Jacobian's norm at one sample, in float64."""
    flat = torch.autograd.functional.jacobian(lambda v: function(v.reshape(1, *x.shape)).reshape(-1), x.double().reshape(-1))
    return float(torch.linalg.matrix_norm(flat, 2))


def is_exactly(bracket: ns.Bracket, value: float, slack: float = UP) -> bool:
    """Both sides within rounding of a constant that is known."""
    return value / slack <= float(bracket.lower) <= value * UP and value / UP <= float(bracket.upper) <= value * slack


def test_normalizers_are_not_skipped():
    """A tool that sees only linear layers reports the product of their norms: here far below the truth."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    with torch.no_grad():
        model[1].running_var.fill_(1e-4)
    product = math.prod(float(torch.linalg.matrix_norm(model[i].weight.detach(), 2)) for i in (0, 3))
    sampled = max(jacobian_norm(model, randn(4, seed=seed)) for seed in range(20))
    assert sampled > 10 * product
    upper = float(ns.lipschitz(model, randn(2, 4).double()).upper)
    assert sampled <= upper <= product / math.sqrt(1e-4) * UP


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_of_a_convolution_take_the_maximum(groups):
    """Not the product: the groups act side by side."""
    conv = filled(nn.Conv2d(4, 8, 3, padding=1, groups=groups, bias=False))
    with torch.no_grad():
        conv.weight[: 8 // groups] *= 0.05  # one group that would pull a product far down
    norms = [
        jacobian_norm(lambda x, kernel=kernel: functional.conv2d(x, kernel, padding=1), randn(4 // groups, 5, 5))
        for kernel in conv.weight.detach().chunk(groups)
    ]
    assert abs(math.prod(norms) / max(norms) - 1) > 0.1
    assert is_exactly(ns.certify.operator_norm(conv, (4, 5, 5)), max(norms))
    assert is_exactly(ns.lipschitz(conv, randn(1, 4, 5, 5).double()), max(norms))


def test_the_gain_of_batch_norm_has_a_square_root():
    model = nn.BatchNorm1d(3, eps=1e-5).double().eval()
    with torch.no_grad():
        model.running_var.copy_(torch.tensor([4.0, 9.0, 16.0]))
        model.weight.copy_(torch.tensor([1.0, -6.0, 2.0]))
    exact = 6 / math.sqrt(9 + 1e-5)
    assert is_exactly(ns.lipschitz(model, randn(2, 3).double()), exact)
    found = ns.audit(model, randn(2, 3).double(), effort=0.1).layers[0]
    assert math.isclose(float(found.gain), exact, rel_tol=1e-12)  # not 6/9 = weight/running_var


@pytest.mark.parametrize(
    "layers, shape",
    [
        ((nn.Linear(5, 6), nn.BatchNorm1d(6, eps=0.1)), (5,)),
        ((nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3, eps=0.1)), (2, 4, 4)),
        ((nn.ConvTranspose2d(2, 3, 3, stride=2), nn.BatchNorm2d(3, eps=0.1)), (2, 3, 3)),
        ((nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4, eps=0.1, affine=False)), (4, 4, 4)),
    ],
    ids=["linear", "convolution", "transposed", "grouped"],
)
def test_epsilon_is_folded_with_the_variance(layers, shape):
    """With ε as large as the variance, a fold without it is far off; the dense Jacobian of the eval model is not."""
    model = filled(nn.Sequential(*layers), seed=1, variance=(0.01, 0.2))
    exact = jacobian_norm(model, torch.zeros(shape))
    without = copy.deepcopy(model)
    without[1].eps = 0.0
    assert jacobian_norm(without, torch.zeros(shape)) > 1.1 * exact
    assert is_exactly(ns.lipschitz(model, randn(2, *shape).double()), exact)


def test_windows_that_overlap_repeat_an_entry():
    for pool, length, exact in [
        (nn.MaxPool1d(3, stride=1), 7, math.sqrt(3)),
        (nn.MaxPool1d(3, stride=2), 7, math.sqrt(2)),
        (nn.MaxPool1d(3), 9, 1.0),
        (nn.MaxPool1d(2, stride=3), 8, 1.0),
    ]:
        assert is_exactly(ns.lipschitz(pool, randn(2, 2, length)), exact, slack=1.001), (pool, exact)
    assert is_exactly(ns.lipschitz(nn.MaxPool2d(3, stride=2, padding=1), randn(1, 1, 8, 8)), 2.0, slack=1.001)
    assert is_exactly(ns.lipschitz(nn.AvgPool2d(2), randn(1, 1, 4, 4)), 0.5)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.copy_(0.5 * torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.relu(self.first(x))
        return x + torch.relu(self.second(x))


def test_a_product_of_norms_is_no_bound_of_a_residual_network():
    """∏‖W‖ = 1/4, yet on the positive orthant the network is x ↦ 2.25 x."""
    audit = ns.audit(Residual(), randn(4, 4).abs(), effort=0.2)
    assert math.isclose(10 ** audit.products["weights_spectral"], 0.25, rel_tol=1e-5)
    assert is_exactly(audit.bracket, 2.25, slack=1.01) and audit.residual


@pytest.mark.parametrize("copies", [2, 5])
def test_expanding_to_copies_costs_a_root(copies):
    for function in (
        lambda x: x[:, None].expand(-1, copies, -1),
        lambda x: x.repeat(1, copies),
        lambda x: torch.cat([x] * copies, 1),
        lambda x: x[:, None] + torch.zeros(copies, 3),
    ):
        assert is_exactly(ns.lipschitz(Function(function), randn(2, 3)), math.sqrt(copies))


def test_the_slope_of_autograd_at_a_kink_is_no_lower_bound():
    """x − relu(x) + relu(−x) is 0 everywhere; autograd says 1 at 0."""

    def zero(x: Tensor) -> Tensor:
        return x - torch.relu(x) + torch.relu(-x)

    assert jacobian_norm(zero, torch.zeros(3)) == 1.0
    for example in (torch.zeros(1, 3), randn(4, 3), 1e6 * randn(4, 3)):
        assert ns.lipschitz(Function(zero), example).lower == 0


def circular_norm(kernel: Tensor, grid: int) -> float:
    """The norm of the circular convolution on a grid, one matrix a frequency."""
    return float(torch.linalg.matrix_norm(torch.fft.fft2(kernel, (grid, grid)).permute(2, 3, 0, 1), 2).max())


def test_the_circular_norm_on_the_grid_of_the_input_is_no_bound():
    """Zero padding: on the grid n a kernel can be longer than its circular twin, on n + p none is."""
    size, caught = 5, 0
    for seed in itertools.count():
        kernel = randn(1, 1, 3, 3, seed=seed).double()
        exact = jacobian_norm(lambda x, kernel=kernel: functional.conv2d(x, kernel, padding=1), torch.zeros(1, size, size))
        assert exact <= circular_norm(kernel, size + 1) * UP
        if exact > circular_norm(kernel, size) * (1 + 1e-4):
            caught += 1
            found = ns.certify.operator_norm(kernel, (1, size, size), padding=1)
            assert float(found.lower) <= exact * UP and exact <= float(found.upper) * UP
        if caught == 3:
            break
        assert seed < 2000, "no such kernel found"


def test_a_bound_from_frequencies_holds_on_large_maps():
    """Where the dense matrix is too large for an exact norm: the bound stands above a dense reference all the same."""
    for seed in range(2):
        kernel = randn(3, 3, 3, 3, seed=seed).double()
        exact = jacobian_norm(lambda x, kernel=kernel: functional.conv2d(x, kernel, padding=1), torch.zeros(3, 12, 12))
        found = ns.lipschitz(nn.Sequential(conv_of(kernel), nn.ReLU()), randn(1, 3, 12, 12).double(), effort=0.1)
        assert exact <= float(found.upper) * UP and float(found.upper) <= 1.1 * exact


def conv_of(kernel: Tensor) -> nn.Conv2d:
    conv = nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[2], padding=1, bias=False).double()
    with torch.no_grad():
        conv.weight.copy_(kernel)
    return conv


def test_layer_norm_does_not_shrink_with_its_width():
    """The slides' (1 − 1/n)/σ is too small: J·σ has norm 1 for every n ≥ 3 (Than 2025, slides)."""
    for width in (3, 8):
        model = nn.LayerNorm(width, eps=1e-2, elementwise_affine=False)
        found = ns.lipschitz(model, 1e-4 * randn(4, width))
        assert is_exactly(found, 1 / math.sqrt(1e-2), slack=1.01)
        assert float(found.lower) > (1 - 1 / width) / math.sqrt(1e-2)


def test_the_slope_of_gelu_exceeds_one():
    """GELU rises faster than 1: the slope of its steepest point is reached, and not exceeded."""
    model = nn.Sequential(nn.Linear(1, 1), nn.GELU()).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    assert is_exactly(ns.lipschitz(model, randn(4, 1).double()), 1.128904, slack=1.001)
