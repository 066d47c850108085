"""Folding leaves the function as it is, layers have the norms of their matrices, and the representative is that of the function."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import normscope as ns
from normscope.bounds.folding import ChannelScale, as_double, canonical_form, difference, folded
from normscope.bounds.network import MatrixLayer, network
from tests.bounds.models import MODELS, seeded


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Linear(2 * 16, 3)

    def forward(self, x):
        return self.last((x + torch.relu(self.norm(self.first(x)))).flatten(1))


class Shared(nn.Module):
    """One map before two normalizers: neither can be folded into it."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.one, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.two(torch.relu(self.map(torch.relu(self.one(self.map(x))))))


class Applied(nn.Module):
    """A function of x and of one parameter."""

    def __init__(self, function, parameter: torch.Tensor) -> None:
        super().__init__()
        self.function, self.parameter = function, nn.Parameter(parameter)

    def forward(self, x):
        return self.function(x, self.parameter)


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), (4,)),
    "without bias": (lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)), (4,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)), (2, 8, 8)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(2, 4, 3, groups=2), nn.BatchNorm1d(4), nn.Flatten()), (2, 5)),
    "normalizer first": (lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3)), (2, 4, 4)),
    "behind the activation": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3)), (4,)),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), (4,)),
    "instance": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten()), (2, 5, 5)),
    "residual": (Residual, (2, 4, 4)),
    "shared": (Shared, (4,)),
}  # fmt: skip


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_folding_preserves_the_function_and_leaves_no_statistics(name, dtype):
    make, shape = CASES[name]
    model = seeded(make()).to(dtype)
    before = copy.deepcopy(model.state_dict())
    example = torch.randn(6, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    made = folded(model, example)
    assert difference(copy.deepcopy(model).double().eval(), made, example) < 1e-9
    assert not any(getattr(part, "running_var", None) is not None for part in made.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_what_cannot_be_folded_is_counted_once():
    model = seeded(Shared())
    made = folded(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    assert isinstance(made.one, ChannelScale) and isinstance(made.two, ChannelScale)
    layers = network(made, torch.zeros(1, 4, dtype=torch.float64)).layers
    assert [layer.name for layer in layers] == ["map", "one", "map", "two"]
    assert float(layers[1].spectral) == pytest.approx(float(made.one.weight.detach().abs().max())) and layers[0].shared


def matrix_of(function, shape: tuple[int, ...]) -> torch.Tensor:
    """The matrix of an affine function on one sample, bias apart."""
    size = math.prod(shape)
    zero = function(torch.zeros(1, *shape, dtype=torch.float64)).flatten(1)
    return (function(torch.eye(size, dtype=torch.float64).reshape(size, *shape)).flatten(1) - zero).T.detach()


@pytest.mark.parametrize(
    ("module", "shape", "exact"),
    [
        (nn.Linear(5, 4), (5,), True),
        (nn.Linear(5, 4), (3, 5), True),
        (nn.Conv2d(2, 3, 3), (2, 6, 5), True),
        (nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2), (2, 6, 6), False),
        (nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 4, 4), True),
        (Applied(torch.mul, torch.ones(5)), (1,), True),
        (nn.Sequential(nn.Linear(5, 4), Applied(lambda x, p: torch.add(x, p, alpha=7.0), torch.ones(4))), (5,), False),
    ],
)
def test_norms_are_those_of_the_dense_matrix(module, shape, exact):
    module = seeded(module).double()
    (layer,) = network(module, torch.zeros(1, *shape, dtype=torch.float64)).layers
    matrix, zero = matrix_of(module, shape), module(torch.zeros(1, *shape, dtype=torch.float64)).detach()
    assert (layer.outputs, layer.inputs) == matrix.shape
    truths = {
        "spectral": torch.linalg.matrix_norm(matrix, 2),
        "frobenius": matrix.norm(),
        "rows": matrix.norm(dim=1).sum(),
        "bias": zero.norm(),
    }
    for norm, truth in truths.items():
        found = float(getattr(layer, norm))
        assert found >= float(truth) * (1 - 1e-9)
        if exact and not (norm == "rows" and isinstance(module, nn.ConvTranspose2d)) and norm != "spectral":
            assert found == pytest.approx(float(truth))
    augmented = torch.cat([torch.cat([matrix, zero.flatten()[:, None]], 1), torch.eye(matrix.shape[1] + 1)[-1:].double()])
    whole = layer.augmented(last=False)
    assert float(whole.spectral) >= float(torch.linalg.matrix_norm(augmented, 2)) * (1 - 1e-9)
    assert float(whole.frobenius) >= float(augmented.norm()) * (1 - 1e-9)
    assert float(whole.rows) >= float(augmented.norm(dim=1).sum()) * (1 - 1e-9)


def test_augmented_norms_do_not_overflow():
    huge = ns.Magnitude.from_log10(300)
    layer = MatrixLayer("x", huge, huge, huge, huge, 3, 3, 12)
    assert layer.augmented(True).spectral.log10 == pytest.approx(300 + math.log10(2) / 2)


@pytest.mark.parametrize(
    ("module", "shape", "what"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (4,), "statistics of its input"),
        (nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)), (4,), "does not map 0 to 0"),
        (Residual(), (2, 4, 4), "not a chain"),
        (nn.Sequential(nn.Linear(4, 4), Applied(lambda x, p: x * torch.sigmoid(p * x), torch.tensor(1.5))), (4,), "is a parameter"),
    ],
)
def test_obstacles_are_named(module, shape, what):
    model = seeded(module)
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    found = network(folded(model, example), as_double(example))
    assert any(what in obstacle for obstacle in found.obstacles) and any(what in note for note in found.notes)


def test_maps_that_are_not_homogeneous_or_piecewise_are_listed():
    found = network(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.zeros(1, 4))
    assert not found.obstacles and found.not_homogeneous == found.not_piecewise == ("tanh at 1",)
    pooled = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2))
    found = network(pooled, torch.zeros(1, 1, 6, 6))
    assert not found.obstacles and len(found.not_homogeneous) == 1


@pytest.mark.parametrize("name", MODELS)
def test_the_canonical_form_is_the_same_all_along_an_orbit(name):
    model = MODELS[name](3, 2).double()
    example = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made = folded(model, example)
    report = ns.symmetries(made, example, mode="eval")
    moved, point = copy.deepcopy(made), dict(made.named_parameters())
    for number, group in enumerate(report.groups):
        point = group.transform(point, torch.Generator().manual_seed(number))
    moved.load_state_dict({key: value.detach() for key, value in point.items()})
    first, second = (canonical_form(each, example) for each in (made, moved))
    for key, value in first.model.named_parameters():
        torch.testing.assert_close(value, second.model.get_parameter(key), rtol=1e-6, atol=1e-8)
    if name != "LN":
        assert difference(made, first.model, example) < 1e-9 and first.notes == ()
    else:
        assert "unit norm" in first.notes[0]


def test_rescalings_that_make_up_a_scale_meet_an_epsilon_and_the_canonical_form_says_so():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True).eval()
    example = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = canonical_form(folded(seeded(layer), example), example)
    assert "unit norm" in found.notes[0] and "linear symmetries" in found.notes[1]


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_matrices_without_biases_compute_the_function(scale):
    """[[A, b], [0, 1]] and maps that pass on the 1: their norms bound what a perturbed class of such networks can do.

    With a map of constant below 1 between layers, b must not be counted smaller than it is.
    """
    model = seeded(nn.Sequential(nn.Linear(2, 3), nn.AvgPool1d(3), nn.Linear(1, 2))).double()
    with torch.no_grad():
        model[0].weight *= 1e-6
        model[0].bias.zero_()
        model[2].bias.fill_(scale)
    found = network(model, torch.zeros(1, 2, dtype=torch.float64))
    assert found.slope < 1 and found.without_biases.slope == 1
    output = model(torch.zeros(1, 2, dtype=torch.float64)).detach().norm()
    for norm in ("spectral", "frobenius"):
        assert float(found.without_biases.product(norm)) >= float(output) * (1 - 1e-9)


def test_an_activation_behind_the_last_layer_is_no_output_unit():
    found = network(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU()), torch.zeros(1, 4))
    assert not found.obstacles and not found.not_homogeneous and "behind the last layer" in found.not_piecewise[0]


def test_buffers_are_assumed_to_be_independent_of_the_data():
    class Standardized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("spread", torch.tensor([1.0, 2.0]))
            self.last = nn.Linear(2, 2)

        def forward(self, x):
            return self.last(x / self.spread)

    found = network(Standardized(), torch.zeros(1, 2))
    assert any("spread" in note for note in found.notes) and not found.obstacles
