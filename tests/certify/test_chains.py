"""Bounds on whole chains: above every activation pattern, below the product, and the papers' own numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.certify import chains
from normscope.certify.chains import Layer
from normscope.core.errors import Refusal
from normscope.core.magnitude import Magnitude, product
from normscope.operators.dense import spectral_norm
from tests.cases import Function, randn

SLOPES = {"relu": (0.0, 1.0), "leaky": (0.1, 1.0), "abs": (-1.0, 1.0), "gelu": (-0.129, 1.129), "steep": (0.5, 3.0)}


def weights_of(dims: list[int], seed: int = 0) -> list[Tensor]:
    return [randn(b, a, seed=100 * seed + i).double() for i, (a, b) in enumerate(itertools.pairwise(dims))]


def layers_of(weights: list[Tensor], slopes: tuple[float, float]) -> list[Layer]:
    """A chain with the same activation everywhere but behind the last map."""
    inner = [Layer(lambda w=w: w, spectral_norm(w), len(w), slopes) for w in weights[:-1]]
    return [*inner, Layer(lambda: weights[-1], spectral_norm(weights[-1]), len(weights[-1]))]


def value(method: str, layers: list[Layer]) -> float | None:
    """A method's bound on the chain as it is; methods themselves see it with every W divided by its norm."""
    found = chains.METHODS[method](layers)
    return None if found is None else float(found * product(layer.norm for layer in layers))


def largest_pattern(weights: list[Tensor], slopes: tuple[float, float]) -> float:
    """max ‖W_K D_{K−1} ⋯ D_1 W_1‖ over every choice of slopes at their ends, one by one."""
    hidden = [len(w) for w in weights[:-1]]
    largest = 0.0
    for corner in itertools.product(slopes, repeat=sum(hidden)):
        matrix, diagonals = weights[0].numpy(), np.split(np.array(corner), np.cumsum(hidden)[:-1])
        for weight, diagonal in zip(weights[1:], diagonals, strict=True):
            matrix = weight.numpy() @ (diagonal[:, None] * matrix)
        largest = max(largest, np.linalg.norm(matrix, 2))
    return largest


TINY = [[2, 3, 2], [3, 4, 3, 2], [1, 5, 1], [4, 2, 2, 2, 3], [2, 8, 1]]


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.parametrize("dims", TINY, ids=str)
def test_every_method_is_above_every_pattern(dims, name):
    weights = weights_of(dims)
    truth, layers = largest_pattern(weights, SLOPES[name]), layers_of(weights, SLOPES[name])
    assert value("patterns", layers) == pytest.approx(truth, rel=1e-7)
    for method in chains.METHODS:
        found = value(method, layers)
        assert found is None or found >= truth * (1 - 1e-12), method
    bound, method = chains.bound(layers)
    assert method == "patterns" and float(bound) == pytest.approx(truth, rel=1e-7)


@pytest.mark.parametrize("seed", range(6))
def test_every_method_is_above_sampled_patterns_of_larger_chains(seed):
    weights = weights_of([5, 16, 12, 9, 3], seed)
    generator = torch.Generator().manual_seed(seed)
    for slopes in SLOPES.values():
        layers = layers_of(weights, slopes)
        found = {method: value(method, layers) for method in chains.METHODS}
        smallest = min(v for v in found.values() if v is not None)
        for _ in range(200):
            matrix = weights[0]
            for weight in weights[1:]:
                inside = torch.rand(len(matrix), 1, generator=generator, dtype=torch.float64)
                ends = torch.where(inside < 0.5, *(torch.tensor(end, dtype=torch.float64) for end in slopes))
                matrix = weight @ (ends * matrix)
            assert float(torch.linalg.matrix_norm(matrix, 2)) <= smallest
        bound, _ = chains.bound(layers)
        assert float(bound) <= float(product(layer.norm * layer.steepest for layer in layers)) * (1 + 1e-12)


@pytest.mark.quick(3)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.Tanh(), nn.LeakyReLU(0.3), nn.SiLU()], ids=str)
def test_sound_for_networks(activation):
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 20), activation, nn.Linear(20, 20), activation, nn.Linear(20, 3)).double()
        upper = float(ns.lipschitz(model, torch.zeros(1, 4).double(), effort=0.1).upper)
        points = torch.randn(300, 4).double() * torch.logspace(-2, 2, 300)[:, None]
        jacobians = torch.vmap(torch.func.jacrev(lambda x: model(x)))(points)  # noqa: B023
        largest = float(torch.linalg.matrix_norm(jacobians, 2).max())
        apart = math.prod(float(torch.linalg.matrix_norm(model[i].weight, 2)) for i in (0, 2, 4))
        assert largest <= upper < 1.13**2 * apart


# ECLipsE ---------------------------------------------------------------------------------------------------------------

ECLIPSE = {(5, 60): (3.8642, 1.3607), (10, 60): (0.36344, 0.034751), (20, 60): (0.28169, 0.0026726), (50, 60): (104.37, 5.4515e-4), (100, 60): (0.50035, 1.1934e-11)}  # fmt: skip


@pytest.mark.parametrize("depth, width", ECLIPSE)
def test_eclipse_fast_gives_the_numbers_of_the_theory(depth, width):
    generator = np.random.RandomState(7 * width + 13 * depth)
    weights = []
    for before, after in itertools.pairwise([4, *[width] * (depth - 1), 1]):
        norm, matrix = generator.uniform(0.4, 1.8), generator.standard_normal((after, before))
        weights.append(torch.from_numpy(matrix * (norm / np.linalg.norm(matrix, 2))))
    layers = layers_of(weights, (0.0, 1.0))
    plain, expected = ECLIPSE[depth, width]
    assert float(product(layer.norm for layer in layers)) == pytest.approx(plain, rel=5e-5)
    assert value("ECLipsE-Fast", layers) == pytest.approx(expected, rel=5e-5)
    assert float(chains.bound(layers)[0]) <= expected * (1 + 5e-5)


@pytest.mark.parametrize("dims", [[3, 50, 4], [2, 30, 60, 5], [1, 7, 1], [6, 6, 20, 3]], ids=str)
def test_a_layer_that_widens_is_bounded_as_if_its_metric_were_inverted(dims):
    weights = weights_of(dims)
    metric, squared = np.eye(dims[0]), 1.0
    for weight in weights[:-1]:
        gram = weight.numpy() @ np.linalg.inv(metric) @ weight.numpy().T
        metric = np.eye(len(gram)) - gram / (2 * np.linalg.norm(gram, 2))
        squared *= np.linalg.norm(gram, 2) / 2
    squared *= np.linalg.norm(weights[-1].numpy() @ np.linalg.inv(metric) @ weights[-1].numpy().T, 2)
    found = value("ECLipsE-Fast", layers_of(weights, (0.0, 1.0)))
    assert squared**0.5 * (1 - 1e-9) <= found <= squared**0.5 * (1 + 1e-6)


def test_negative_slopes_are_not_for_eclipse():
    weights = weights_of([3, 14, 2])
    layers = layers_of(weights, SLOPES["gelu"])
    assert chains.eclipse_fast(layers) is None
    assert value("LipLT", layers) >= float(torch.linalg.matrix_norm(weights[1] @ weights[0], 2))


# LipSDP ----------------------------------------------------------------------------------------------------------------


def lipsdp(weights: list[Tensor], slopes: tuple[float, float]) -> float:
    """Fazlyab et al. 2019, Theorem 2, as printed: minimize ρ with [A; B]ᵀ Q(T) [A; B] + diag(−ρI, 0, W_KᵀW_K) ⪯ 0."""
    cvxpy = pytest.importorskip("cvxpy")
    matrices = [w.numpy() for w in weights]
    before, hidden = matrices[0].shape[1], sum(len(w) for w in matrices[:-1])
    widths = [before, *(len(w) for w in matrices[:-1])]
    ends = np.cumsum([0, *widths])
    top = np.zeros((hidden, before + hidden))  # A: what enters every neuron
    for k, matrix in enumerate(matrices[:-1]):
        top[ends[k + 1] - before : ends[k + 2] - before, ends[k] : ends[k + 1]] = matrix
    bottom = np.hstack([np.zeros((hidden, before)), np.eye(hidden)])  # B: what leaves it
    low, high = slopes
    multiplier, squared = cvxpy.Variable(hidden, nonneg=True), cvxpy.Variable()
    scaling = cvxpy.diag(multiplier)
    middle = cvxpy.bmat([[-2 * low * high * scaling, (low + high) * scaling], [(low + high) * scaling, -2 * scaling]])
    joined = np.vstack([top, bottom])
    energy = np.zeros((before + hidden,) * 2)
    energy[ends[-2] :, ends[-2] :] = matrices[-1].T @ matrices[-1]
    first = np.diag(np.arange(before + hidden) < before).astype(float)
    whole = joined.T @ middle @ joined + energy - squared * first
    cvxpy.Problem(cvxpy.Minimize(squared), [(whole + whole.T) / 2 << 0]).solve(solver=cvxpy.CLARABEL)
    return math.sqrt(squared.value)


@pytest.mark.parametrize("name", ["relu", "leaky", "gelu"])
@pytest.mark.parametrize("dims", [[2, 6, 2], [3, 5, 4, 2], [4, 12, 1], [2, 4, 4, 4, 2]], ids=str)
def test_no_looser_than_lipsdp(dims, name):
    weights = weights_of(dims)
    published, layers = lipsdp(weights, SLOPES[name]), layers_of(weights, SLOPES[name])
    assert value("LipSDP-Neuron", layers) == pytest.approx(published, rel=1e-4)
    assert float(chains.bound(layers)[0]) <= published * (1 + 1e-4)


def test_lipsdp_is_used_where_patterns_are_too_many():
    pytest.importorskip("cvxpy")
    layers = layers_of(weights_of([3, 10, 8, 2]), (0.0, 1.0))
    assert chains.bound(layers)[1] == "LipSDP-Neuron"
    assert value("LipSDP-Neuron", layers) < value("ECLipsE-Fast", layers)


# caps, scales, degenerate chains -----------------------------------------------------------------------------------------


def test_caps(monkeypatch):
    deep = layers_of(weights_of([3] * (chains.LIPLT_DEPTH + 2)), (0.0, 1.0))
    assert chains.liplt(deep) is None and chains.liplt(deep[: chains.LIPLT_DEPTH]) is not None
    layers = layers_of(weights_of([3, 20, 2]), (0.0, 1.0))
    assert chains.liplt(layers) is not None and chains.patterns(layers) is None
    monkeypatch.setattr(chains, "LIPLT_WORK", 2**2 * 20**3 - 1)
    assert chains.liplt(layers) is None


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("dims", [[3, 5, 2], [4, 15, 12, 3], [2] * 40], ids=["tiny", "small", "deep"])
def test_homogeneous_in_every_weight(dims, scale):
    weights = weights_of(dims)
    plain, _ = chains.bound(layers_of(weights, (0.0, 1.0)))
    for k in range(len(weights)):
        scaled, _ = chains.bound(layers_of([w * scale if i == k else w for i, w in enumerate(weights)], (0.0, 1.0)))
        assert (scaled / plain).log == pytest.approx(math.log(scale), abs=1e-6)


def test_extreme_scales_neither_overflow_nor_vanish():
    weights = [w * 1e200 for w in weights_of([3, 15, 12, 2])]
    bound, _ = chains.bound(layers_of(weights, (0.0, 1.0)))
    plain, _ = chains.bound(layers_of(weights_of([3, 15, 12, 2]), (0.0, 1.0)))
    assert (bound / plain).log10 == pytest.approx(600, abs=1e-6)


def test_a_dead_layer_gives_zero():
    weights = weights_of([3, 4, 2])
    assert chains.bound(layers_of([weights[0], torch.zeros(2, 4).double()], (0.0, 1.0)))[0] == 0
    assert chains.bound(layers_of(weights, (0.0, 0.0)))[0] == 0


def test_linear_activations_give_the_product_of_the_matrices():
    weights = weights_of([3, 30, 30, 2])
    exact = float(torch.linalg.matrix_norm(weights[2] @ weights[1] @ weights[0], 2))
    assert float(chains.bound(layers_of(weights, (1.0, 1.0)))[0]) == pytest.approx(exact, rel=1e-6)


def test_one_layer_is_its_norm():
    weight = randn(3, 4).double()
    layer = Layer(lambda: weight, spectral_norm(weight), 3, (0.0, 2.0))
    assert chains.bound([layer]) == (spectral_norm(weight) * 2.0, "product")
    assert isinstance(chains.bound([layer])[0], Magnitude)


@pytest.mark.parametrize("dims", [[96, 2, 96], [40, 5, 300], [300, 5, 3], [2, 6, 200], [30, 4, 4, 50]], ids=str)
@pytest.mark.parametrize("scale", [1e-160, 1.0, 1e160])
def test_patterns_of_a_bottleneck_are_those_of_its_small_factors(dims, scale):
    """Wide ends are replaced by triangular factors; what QR rounds is paid for."""
    weights = [weight * scale for weight in weights_of(dims)]
    truth = largest_pattern([weight / scale for weight in weights], SLOPES["leaky"])
    found = chains.patterns(layers_of(weights, SLOPES["leaky"]))
    found = found * product(spectral_norm(weight) for weight in weights) / Magnitude(scale) ** len(weights)
    assert truth * (1 - 1e-12) <= float(found) <= truth * (1 + 1e-7)


def test_patterns_are_held_in_blocks(monkeypatch):
    weights = weights_of([30, 10, 30])
    whole = chains.patterns(layers_of(weights, SLOPES["relu"]))
    monkeypatch.setattr(chains, "PATTERN_ENTRIES", 700)
    largest = []
    monkeypatch.setattr(chains, "spectral_norm", lambda stack, *rest: largest.append(stack.numel()) or spectral_norm(stack, *rest))
    assert float(chains.patterns(layers_of(weights, SLOPES["relu"]))) == pytest.approx(float(whole), rel=1e-7)
    assert max(largest) <= 700
    monkeypatch.setattr(chains, "PATTERN_WORK", 1e4)
    assert chains.patterns(layers_of(weights, SLOPES["relu"])) is None


@pytest.mark.parametrize("dims", [(96, 2, 96), (100, 12, 4096)], ids=str)
def test_narrow_autoencoders_have_a_bracket(dims):
    """The all-zero pattern among them."""
    model = nn.Sequential(nn.Linear(dims[0], dims[1]), nn.ReLU(), nn.Linear(dims[1], dims[2])).eval()
    assert float(ns.lipschitz(model, torch.zeros(1, dims[0]), effort=0.01).upper) > 0


def test_entrywise_functions_that_broadcast_are_no_part_of_a_chain():
    limits, first, second = torch.full((50, 5), -100.0), nn.Linear(4, 5), nn.Linear(5, 2)
    for region in (None, ns.Ball(torch.zeros(4), 0.1)):
        found = ns.lipschitz(
            Function(lambda x: second(torch.clamp(first(x[:, None]), min=limits))), torch.zeros(1, 4), region=region
        )
        copies = math.sqrt(50) * float(torch.linalg.matrix_norm((second.weight @ first.weight).double(), 2))
        assert float(found.upper) >= copies * (1 - 1e-6)


def test_a_bias_that_depends_on_the_input_is_no_matrix():
    weight = randn(3, 3)
    model = Function(lambda x: nn.functional.linear(torch.relu(nn.functional.linear(torch.ones(1, 3), weight, x[0])), weight))
    with pytest.raises(Refusal, match="bias depends on the input"):
        ns.lipschitz(model, torch.zeros(1, 3))
