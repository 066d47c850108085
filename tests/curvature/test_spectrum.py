"""Eigenvalues lie in their intervals, traces in theirs at the stated rate, and densities near the true distribution."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from scipy.integrate import trapezoid
from scipy.stats import binomtest
from torch import nn

import normscope as ns
from normscope.core.errors import InputError
from normscope.core.progress import Meter
from normscope.curvature.estimators import Density, Quadrature, trace
from normscope.curvature.lanczos import Krylov, extremes
from tests.curvature.models import CASES, dense_hessian


class Given:
    """A dense matrix as an operator that counts its products, and may be stopped or be inexact."""

    def __init__(self, matrix: torch.Tensor, dtype: torch.dtype = torch.float64, stop_after: int = 10**9) -> None:
        self.matrix, self.size, self.dtype, self.left = matrix.to(dtype), len(matrix), dtype, stop_after

    def product(self, vector: torch.Tensor) -> torch.Tensor:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return (self.matrix @ vector.to(self.dtype)).double()

    def normal(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(self.size, generator=generator, dtype=torch.float64)

    def signs(self, generator: torch.Generator) -> torch.Tensor:
        return self.normal(generator).sign()


def random_symmetric(eigenvalues: torch.Tensor, seed: int = 0) -> torch.Tensor:
    rotation = torch.linalg.qr(
        torch.randn(len(eigenvalues), len(eigenvalues), generator=torch.Generator().manual_seed(seed)).double()
    ).Q
    return (rotation * eigenvalues.double()) @ rotation.mT


def search(operator: Given, count: int, which: str = "largest", tolerance: float = 1e-8, capacity: int = 40, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return extremes(operator, count, which, tolerance, capacity, 3000, generator, Meter("", None))


SPECTRUM = torch.cat([torch.linspace(-1, 1, 150), torch.tensor([3.0, 3.5, 8, 20]), torch.tensor([-2.5, -4])])


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("capacity", [8, 20, 200])  # many restarts, few, none
def test_lanczos_finds_the_extremes_with_and_without_restarts(which, capacity):
    order = {
        "largest": SPECTRUM.sort(descending=True),
        "smallest": SPECTRUM.sort(),
        "magnitude": (SPECTRUM.abs().sort(descending=True)),
    }[which]
    exact = order.values[:3] if which != "magnitude" else SPECTRUM[order.indices[:3]]
    found = search(Given(random_symmetric(SPECTRUM)), 3, which, capacity=capacity)
    assert found.finished and torch.allclose(found.values, exact.double(), atol=1e-7)
    assert ((found.values - exact).abs() <= found.errors + 1e-12).all()


def test_a_rough_search_still_tells_the_truth_about_its_errors():
    matrix = random_symmetric(SPECTRUM)
    for seed in range(20):
        for tolerance in (0.3, 0.03):
            found = search(Given(matrix), 2, tolerance=tolerance, seed=seed)
            distances = (found.values[:, None] - SPECTRUM.double()).abs().min(1).values
            assert (distances <= found.errors).all()


def test_rounding_of_products_is_in_the_error():
    matrix = random_symmetric(SPECTRUM)
    found = search(Given(matrix, torch.float32), 4, tolerance=1e-12)
    exact = SPECTRUM.double().sort(descending=True).values[:4]
    assert ((found.values - exact).abs() <= found.errors).all() and found.errors.max() < 1e-3


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_tiny_matrices_and_scales_in_full(size, scale):
    eigenvalues = scale * torch.arange(1, size + 1).double()
    found = search(Given(random_symmetric(eigenvalues)), size)
    assert torch.allclose(found.values.sort().values, eigenvalues, rtol=1e-10)


def test_repeated_eigenvalues_and_zero_matrices_are_found_in_full_when_the_space_is():
    for eigenvalues in (torch.tensor([2.0, 2, 2, 1, 1, 0]), torch.zeros(4), torch.ones(3)):
        found = search(Given(random_symmetric(eigenvalues)), len(eigenvalues), tolerance=1e-12)
        assert torch.allclose(found.values, eigenvalues.double().sort(descending=True).values, atol=1e-12)


def test_an_interrupt_keeps_what_there_is_with_wider_errors():
    matrix = random_symmetric(SPECTRUM)
    found = search(Given(matrix, stop_after=12), 2, tolerance=1e-12)
    distances = (found.values[:, None] - SPECTRUM.double()).abs().min(1).values
    assert not found.finished and found.products == 12 and (distances <= found.errors).all()
    with pytest.raises(KeyboardInterrupt):
        search(Given(matrix, stop_after=1), 2)
    generator = torch.Generator().manual_seed(0)
    assert len(Quadrature.of(Given(matrix, stop_after=70), 5, 30, generator, Meter("", None)).nodes) == 2


def stopped(made: ns.curvature.Curvature, at: int) -> ns.curvature.Curvature:
    """The same matrix, with a Ctrl-C at a product."""

    def stop(what: str, done: int, total: int) -> None:
        if done == at:
            raise KeyboardInterrupt

    return ns.curvature.Curvature(made.objective, made.matrix, progress=stop)


def test_ctrl_c_keeps_what_there_is_in_every_computation(wide):
    made, matrix = wide
    exact = torch.linalg.eigvalsh(matrix)
    early = stopped(made, 12)
    pairs = early.top(2, tolerance=1e-9)
    assert all((exact - pair.value).abs().min() <= pair.error for pair in pairs) and max(pair.error for pair in pairs) > 1e-9
    assert not early.condition(products=60).exact
    with pytest.raises(KeyboardInterrupt):
        early.trace()  # no sample yet
    assert "largest:" in str(early) and "trace:" not in str(early)
    estimate = stopped(made, 40).trace()  # 32 products make the basis, 7 are samples
    assert estimate.low < float(matrix.trace()) < estimate.high and estimate != made.trace()
    one = stopped(made, 60).density(probes=3, steps=40)
    assert len(one.nodes) == 40 and np.isnan(one.sampling_error)
    part = stopped(made, 60).density()
    assert not part.complete and len(part.nodes) == 60 and part.wasserstein(exact.numpy()) < 0.1


def test_the_basis_is_orthonormal_and_the_relation_holds_after_restarts():
    matrix = random_symmetric(SPECTRUM)
    generator = torch.Generator().manual_seed(0)
    krylov = Krylov(Given(matrix), torch.randn(len(matrix), generator=generator).double(), 15, generator)
    for _ in range(3):
        while not krylov.full:
            krylov.extend()
        rows, n = krylov.basis, krylov.count
        assert (rows @ rows.mT - torch.eye(n + 1)).abs().max() < 1e-13
        left = rows[:n] @ matrix
        assert (left - krylov.projected[:n, :n] @ rows[:n] - krylov.coupling[:n, None] * rows[n]).abs().max() < 1e-12
        krylov.restart(krylov.ritz(), torch.arange(10, 15))


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", CASES)
def test_eigenvalues_of_every_model(name):
    case = CASES[name]
    exact = torch.linalg.eigvalsh(dense_hessian(case))
    made = ns.hessian(case.model(), case.loss, case.data(), mode=case.mode, batch_size=case.batch_size)
    for pairs, wanted in ((made.top(3, tolerance=1e-7), exact.flip(0)[:3]), (made.bottom(2, tolerance=1e-7), exact[:2])):
        values, errors = (
            torch.tensor([getattr(pair, field) for pair in pairs], dtype=torch.float64) for field in ("value", "error")
        )
        assert ((values - wanted).abs() <= 1e-6 * exact.abs().max()).all()
        assert ((values[:, None] - exact).abs().min(1).values <= errors + 1e-14).all()
    pair = made.top(1, tolerance=1e-7)[0]
    assert torch.cat([part.reshape(-1) for part in pair.vector.values()]).norm() == pytest.approx(1)


@pytest.fixture(scope="module")
def wide() -> tuple[ns.curvature.Curvature, torch.Tensor]:
    """A model of some hundred parameters, and its dense Hessian."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Linear(8, 15), nn.BatchNorm1d(15), nn.Tanh(), nn.Linear(15, 15), nn.LayerNorm(15), nn.GELU(), nn.Linear(15, 3))
        data = torch.randn(60, 8).double(), torch.randint(3, (60,))
    made = ns.hessian(nn.Sequential(*layers).double(), functional.cross_entropy, data, batch_size=30)
    return made, made.dense()


REPEATS = 200


def assert_covered(matrix: torch.Tensor, products: int, confidence: float) -> None:
    """The trace lies in its interval as often as stated: fewer hits would have a probability below 1 in 10,000."""
    true, inside = math.fsum(matrix.diagonal().tolist()), 0
    for seed in range(REPEATS):
        estimate = trace(Given(matrix), products, confidence, torch.Generator().manual_seed(seed), Meter("", None))
        inside += estimate.low <= true <= estimate.high
    assert binomtest(inside, REPEATS, confidence, alternative="less").pvalue >= 1e-4, inside


@pytest.mark.quick(2)
@pytest.mark.parametrize("spectrum", ["model", "decaying", "signed"])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_traces_lie_in_their_interval_at_the_stated_rate(spectrum, confidence, wide):
    shapes = {"decaying": 1.0 / torch.arange(1, 301) ** 1.5, "signed": torch.linspace(-1, 1.5, 300)}
    assert_covered(wide[1] if spectrum == "model" else random_symmetric(shapes[spectrum]), 48, confidence)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", CASES)
def test_traces_of_every_model_lie_in_their_interval_at_the_stated_rate(name):
    assert_covered(dense_hessian(CASES[name]), 12, 0.95)


def test_a_trace_that_a_sketch_holds_whole_is_known_but_for_rounding():
    factor = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_covered(factor @ factor.mT, 24, 0.95)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("products", [12, 24, 48])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
def test_traces_at_every_confidence(name, products, confidence):
    assert_covered(dense_hessian(CASES[name]), products, confidence)


def test_a_trace_is_exact_where_products_suffice():
    made = ns.hessian(CASES["batch norm"].model(), functional.cross_entropy, CASES["batch norm"].data(), batch_size=14)
    estimate = made.trace(products=made.size)
    assert estimate.low == estimate.value == estimate.high == pytest.approx(float(made.dense().trace()), abs=1e-12)


def test_density_is_near_the_true_distribution(wide):
    made, matrix = wide
    exact = torch.linalg.eigvalsh(matrix).numpy()
    density = made.density(probes=9)
    assert not density.complete and density.wasserstein(exact) < 0.02 and density.sampling_error < 0.02
    grid = np.linspace(exact.min() - 1, exact.max() + 1, 20001)
    assert trapezoid(density.at(grid), grid) == pytest.approx(1, abs=1e-6)
    assert len(density.figure().data) == 1


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", CASES)
def test_densities_of_every_model(name):
    """All eigenvalues are within reach."""
    case = CASES[name]
    density = ns.hessian(case.model(), case.loss, case.data(), mode=case.mode, batch_size=case.batch_size).density()
    assert density.complete and density.sampling_error == 0
    assert density.wasserstein(torch.linalg.eigvalsh(dense_hessian(case)).numpy()) < 1e-6


FEW = ("linear", "batch norm", "attention")


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_sampled_densities_of_every_model(name):
    """As for a model that is large."""
    matrix = dense_hessian(CASES[name])
    exact = torch.linalg.eigvalsh(matrix).numpy()
    distances = [sampled_density(matrix, seed).wasserstein(exact) for seed in range(3)]
    assert max(distances) < 0.02, distances


def sampled_density(matrix: torch.Tensor, seed: int) -> Density:
    """From probes with so many entries together as a model with 800 parameters has in 10."""
    probes = -(-8000 // len(matrix))
    return Density.of(Quadrature.sampled(Given(matrix), probes, 40, torch.Generator().manual_seed(seed), Meter("", None)))


def test_spectral_sums(wide):
    made, matrix = wide
    exact = float(torch.linalg.eigvalsh(matrix).square().add(1).log().sum())
    estimate = made.spectral_sum(lambda x: np.log1p(x**2), probes=20, steps=20, confidence=0.999)
    assert estimate.low < exact < estimate.high and estimate.high - estimate.low < 0.5 * exact


def test_spectral_sums_of_small_models_are_exact():
    case = CASES["batch norm"]
    made = ns.hessian(case.model(), case.loss, case.data(), batch_size=case.batch_size)
    found = made.spectral_sum(lambda x: np.log1p(x**2))
    exact = float(torch.linalg.eigvalsh(dense_hessian(case)).square().add(1).log().sum())
    assert found.low == found.high == pytest.approx(exact, rel=1e-10)


def test_condition_is_exact_for_small_models_and_a_lower_bound_for_others(wide):
    made, matrix = wide
    sizes = torch.linalg.eigvalsh(matrix).abs()
    true = float(sizes.max() / sizes[sizes > 1e-3 * sizes.max()].min())
    rough, exact = made.condition(), made.condition(products=made.size)
    assert not rough.exact and 1 <= rough.value <= true * (1 + 0.2)
    assert exact.exact and exact.value == pytest.approx(true, rel=1e-6)


def test_no_curvature_has_no_condition():
    model = nn.Linear(2, 1)
    flat = ns.hessian(model, lambda output, target: output.sum(), (torch.randn(4, 2), torch.zeros(4, 1)))
    assert "κ is not defined" in str(flat.condition())


def test_the_report_states_what_was_measured(wide):
    made = wide[0]
    made.top(2)
    made.trace()
    text, content = str(made), json.loads(json.dumps(made.to_dict()))
    for said in (
        "train mode",
        "60 samples in batches: 2 of 30",
        "1 normalizers with the statistics of each batch",
        "largest:",
        "trace:",
    ):
        assert said in text
    assert (
        content["batch_sizes"] == [30, 30] and content["batch_statistics"] == ["1"] and len(content["eigenvalues"]["largest"]) == 2
    )


def test_the_same_generator_gives_the_same_numbers(wide):
    made = wide[0]
    for measure in (lambda g: made.top(2, generator=g)[1].value, lambda g: made.trace(generator=g).value):
        assert measure(torch.Generator().manual_seed(3)) == measure(torch.Generator().manual_seed(3))


def test_progress_is_reported_in_products(wide):
    calls: list[tuple[str, int, int]] = []
    made = ns.curvature.Curvature(wide[0].objective, wide[0].matrix, progress=lambda *call: calls.append(call))
    made.top(1)
    assert [done for _, done, _ in calls] == list(range(1, len(calls) + 1)) and all(total >= done for _, done, total in calls)
    made.trace()
    assert calls[-1] == ("trace", 48, 48)


@pytest.mark.parametrize(
    "call",
    [
        lambda made: made.top(0),
        lambda made: made.top(made.size + 1),
        lambda made: made.top(1, which="biggest"),
        lambda made: made.trace(products=5),
        lambda made: made.trace(confidence=1.0),
        lambda made: made.density(probes=0),
        lambda made: made.spectral_sum(np.exp, probes=1),
        lambda made: made.spectral_sum(np.exp, confidence=2),
        lambda made: made.condition(threshold=0),
        lambda made: made.product(torch.ones(3)),
        lambda made: made.product({"nothing": torch.ones(3)}),
        lambda made: made.product({"0.bias": torch.ones(3)}),
    ],
)
def test_mistakes_are_one_line(call, wide):
    with pytest.raises(InputError) as caught:
        call(wide[0])
    assert "\n" not in str(caught.value)


def test_plain_curvature_scales_as_one_over_the_square_of_the_weights():
    case = CASES["batch norm"]
    model = case.model()
    model[1].eps = 1e-14  # the law is about ε = 0
    before = ns.hessian(model, case.loss, case.data(), parameters="0.weight").dense()
    for factor in (0.1, 3.0, 100.0):
        scaled = case.model()
        scaled[1].eps = 1e-14
        with torch.no_grad():
            scaled[0].weight.mul_(factor)
            scaled[0].bias.mul_(factor)
        after = ns.hessian(scaled, case.loss, case.data(), parameters="0.weight").dense()
        assert torch.allclose(after * factor**2, before, rtol=1e-6, atol=1e-9)
