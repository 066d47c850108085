"""The lower bound is a pair of points: always attained, close to the truth, and found without touching anything."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from tests.cases import Function, network, randn
from tests.networks import double, is_deep


def bracket(function, example: Tensor, **settings) -> ns.Bracket:
    return ns.lipschitz(function if isinstance(function, nn.Module) else Function(function), example, **settings)


# kinks and cancellation ------------------------------------------------------------------------------------------------


def test_a_kink_of_autograd_is_no_witness():
    """x − relu(x) + relu(−x) ≡ 0, though autograd says slope 1 at 0."""
    found = bracket(lambda x: x - torch.relu(x) + torch.relu(-x), torch.zeros(1, 3))
    assert found.lower == 0 and found.upper >= 0


CANCELLING = {
    "shift": lambda x: (x + 1e8) - 1e8,
    "large shift": lambda x: (x + 1e16) - 1e16,
    "scale": lambda x: (x * 1e-8 + 1.0) * 1e8 - 1e8,
    "difference": lambda x: (x[:, :1] * 1e8 - x[:, 1:2] * 1e8) * 1e-8,
    "logarithm": lambda x: torch.log1p(torch.sigmoid(x)),
    "norm": lambda x: x.norm(dim=1),
    "std": lambda x: x.std(1),
    "centered": lambda x: (x + 1e8) - (x + 1e8).mean(1, keepdim=True),
    "layer norm": lambda x: nn.functional.layer_norm(x + 1e8, (4,), eps=1.0),
    "row": nn.Linear(4, 1),
    "zero row": lambda x: x @ torch.tensor([[1e8], [-1e8], [1.0], [0.0]], dtype=x.dtype),
    "sum": lambda x: x.sum(1),
    "sine": lambda x: torch.sin(1e6 * x) * 1e-6,
    "softplus at its threshold": lambda x: nn.functional.softplus(x + 20.0),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", CANCELLING)
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_never_lifts_lower_above_upper(name, scale, dtype):
    """Wherever the search starts; the constructor of a Bracket raises otherwise."""
    module = CANCELLING[name] if isinstance(CANCELLING[name], nn.Module) else Function(CANCELLING[name])
    for seed in range(3):
        found = ns.audit(copy.deepcopy(module).to(dtype), (scale * randn(1, 4, seed=seed)).to(dtype), local=False).bracket
        assert found.upper is None or found.lower <= found.upper


@pytest.mark.parametrize("scale", [1e-160, 1e-155, 1e-100, 1e100, 1e160])
def test_weights_at_the_edge_of_float64(scale):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    found = bracket(model, randn(1, 3).double())
    assert found.lower <= found.upper
    assert found.upper.finite and found.upper > 0


# close to the truth ----------------------------------------------------------------------------------------------------


def largest_reachable_jacobian(model: nn.Sequential, features: int, generator: torch.Generator) -> float:
    """Over the activation patterns of very many points at every scale, and of points beside every kink."""
    count = 60_000
    scales = 10 ** (6 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 3)
    points = scales * torch.randn(count, features, generator=generator, dtype=torch.float64)
    first = model[0]
    with torch.no_grad():  # onto a random kink of the first layer, then a little off it
        row = torch.randint(len(first.weight), (count // 2,), generator=generator)
        normal, offset = first.weight[row], first.bias[row]
        away = ((points[: count // 2] * normal).sum(1) + offset) / normal.square().sum(1)
        points[: count // 2] -= normal * (away * (1 + 1e-3 * torch.randn(count // 2, generator=generator)))[:, None]
        values, patterns = points, []
        for layer in model:
            values = layer(values)
            if isinstance(layer, nn.ReLU):
                patterns.append(values > 0)
    _, where = np.unique(torch.cat(patterns, 1).numpy(), axis=0, return_index=True)
    jacobians = torch.vmap(torch.func.jacrev(lambda x: model(x)))(points[torch.from_numpy(where)])
    return float(torch.linalg.matrix_norm(jacobians, 2).max())


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", range(18))
def test_within_one_percent_of_the_largest_reachable_jacobian(seed):
    generator = torch.Generator().manual_seed(seed)
    features, widths = 2 + seed % 2, [(10,), (5, 5), (4, 3, 3)][seed % 3]
    layers: list[nn.Module] = []
    for before, after in zip((features, *widths), widths, strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    truth = largest_reachable_jacobian(model, features, generator)
    found = bracket(model, torch.randn(1, features, generator=generator, dtype=torch.float64))
    assert 0.99 * truth <= float(found.lower)
    assert truth <= float(found.upper)


def test_the_search_starts_from_the_data():
    """A bump so narrow that nothing points to it from afar."""
    place = torch.tensor([300.0, -200.0, 100.0])
    model = Function(lambda x: torch.exp(-50 * (x - place).square().sum(1, keepdim=True)))
    blind = ns.audit(model, torch.zeros(1, 3), local=False).bracket
    told = ns.audit(model, torch.zeros(1, 3), data=(place + 0.1).expand(4, 3), local=False).bracket
    assert float(told.lower) == pytest.approx(10 * math.exp(-0.5), rel=1e-2) and blind.lower < 1e-3


def test_constant_and_identity():
    assert bracket(lambda x: x * 0.0 + 1, randn(1, 3)).lower == 0
    found = bracket(nn.Identity(), randn(1, 3))
    assert float(found.lower) == pytest.approx(1) and float(found.upper) == pytest.approx(1)


# witnesses -------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", [seed for seed in range(18) if not is_deep(seed)])
def test_the_model_itself_attains_the_lower_bound_at_the_witness(seed):
    module, example, mode = network(seed)
    found = bracket(module, example, mode=mode)
    if found.witness is None:
        assert found.lower == 0
        return
    (first,), (second,) = found.witness
    twin = double(module, mode)
    with torch.no_grad():
        change = torch.linalg.vector_norm(twin(first.double()) - twin(second.double()))
    assert float(change / torch.linalg.vector_norm(first - second)) >= float(found.lower) * (1 - 1e-5)
    assert found.witness.replay() == found.lower


def test_two_inputs_share_one_distance():
    model = Function(lambda x, y: torch.cat([3 * x, 4 * y], 1))
    found = ns.lipschitz(model, (randn(1, 2), randn(1, 3)))
    assert float(found.lower) == pytest.approx(4) and len(found.witness.first) == 2


# nothing is touched ------------------------------------------------------------------------------------------------------


def stateful() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2))
    )
    model[0].weight.grad = torch.ones(6, 4)
    model[0].bias.requires_grad_(False)
    model[1].train()
    model[2].eval()
    return model


@pytest.mark.parametrize("mode", ["eval", "train", "batch"])
def test_the_model_comes_back_as_it_was(mode):
    model, example = stateful(), randn(4, 4)
    before, shown = copy.deepcopy(model), example.clone()
    flags = [module.training for module in model.modules()]
    try:
        bracket(model, example, mode=mode)
    except ns.Refusal:
        assert mode != "eval"
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(example, shown)
    for (name, was), (_, now) in zip(before.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(was, now), name
    for (name, was), (_, now) in zip(before.named_parameters(), model.named_parameters(), strict=True):
        assert was.requires_grad == now.requires_grad, name
        assert (now.grad is None) == (name != "0.weight"), name
    assert torch.equal(model[0].weight.grad, torch.ones(6, 4))


def test_global_random_state_is_untouched():
    model = stateful()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    bracket(model, randn(1, 4))
    ns.certify.operator_norm(randn(4, 3))
    ns.audit(model, randn(4, 4))
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert states[2] == random.getstate()


def test_the_same_generator_gives_the_same_answer():
    model = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 3))
    found = [bracket(model, randn(1, 4), generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert found[0].lower == found[1].lower and found[0].upper == found[1].upper


def test_gradient_mode_makes_no_difference():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    plain = bracket(model, randn(1, 4))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert bracket(model, randn(1, 4)).lower == plain.lower


@pytest.mark.parametrize("size", [1e-8, 1e-5, 1e-3])
def test_rounding_inside_of_a_kernel_is_no_difference(size):
    """x − tanh(x) is x³/3 near zero, and float64 returns the rounding of x instead."""
    center = torch.full((3,), size, dtype=torch.float64)
    found = ns.lipschitz(torch.nn.Tanhshrink(), center[None], region=ns.Ball(center, size / 100))
    assert found.lower <= found.upper and float(found.upper) == pytest.approx(size**2, rel=0.05)


def test_a_derivative_that_reaches_the_bound_does_not_end_the_search():
    """Where values cancel, points that lie farther apart show more than those where the derivative is largest."""
    torch.manual_seed(3)
    example, linear, norm = torch.randn(2, 4, dtype=torch.float64), nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
    with torch.no_grad():
        linear.bias.fill_(1e9)
        norm.running_mean.fill_(1e9)
    bracket = ns.lipschitz(nn.Sequential(linear, norm).eval(), example)
    assert float(bracket.lower) > 0.9 * float(bracket.upper)
