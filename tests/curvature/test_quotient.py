"""With the symmetries divided out, curvature does not depend on where on the orbit the weights stand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.core.errors import InputError
from normscope.curvature.matrices import GaussNewton
from normscope.curvature.quotient import orthonormal_basis, symmetries_of
from normscope.curvature.sharpness import sharpness
from normscope.curvature.slices import slice_of
from normscope.curvature.theory import equilibrium, scale_identities, zero_modes
from normscope.symmetry.report import KINDS
from tests.curvature.models import CASES, Case

NAMES = ["batch norm", "batch norm, eval", "batch norm, relu", "two batch norms", "layer norm", "rms norm", "conv batch norm", "conv group norm", "residual", "attention", "weight norm", "mlp relu"]  # fmt: skip


OTHERS = ["batch norm, regression", "batch norm, no running statistics", "conv batch norm, eval", "conv instance norm", "residual, eval", "attention, eval", "attention, rms norm", "weight norm of a whole"]  # fmt: skip


class Encoder(nn.Module):
    """A post-norm layer: rescalings that hold a scale-free vector between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).mean(1))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.ViTConfig(
            hidden_size=4,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=5,
            image_size=4,
            patch_size=2,
            num_channels=1,
        )
        config.num_labels = 3
        self.model = transformers.ViTForImageClassification(config)
        for parameter in self.model.parameters():  # drawn with a deviation of 0.02, where all is almost linear
            parameter.data.add_(0.3 * torch.randn(parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits


TRANSFORMERS = {
    "encoder layer": Case(Encoder, (3, 4)), "encoder layer, eval": Case(Encoder, (3, 4), "eval"), "vision": Case(Vision, (1, 4, 4)),
}  # fmt: skip


def moved(case: Case, groups, seed: int = 0) -> nn.Module:
    """The model after a random element of each group."""
    model, generator = case.model(), torch.Generator().manual_seed(seed)
    for group in groups:
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        model.load_state_dict({**model.state_dict(), **group.transform(parameters, generator)})
    return model


def divided(case: Case, model: nn.Module) -> ns.curvature.Curvature:
    return ns.hessian(model, case.loss, case.data(), mode=case.mode, quotient=True, batch_size=case.batch_size)


def test_every_kind_of_symmetry_is_among_the_models():
    found = {group.kind for name in NAMES for group in ns.symmetries(CASES[name].model(), CASES[name].data()[0]).groups}
    assert found == set(KINDS)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.full) for name in (*OTHERS, *TRANSFORMERS))])
def test_the_quotient_spectrum_is_invariant_under_every_detected_symmetry(name):
    """Under each group by itself, and under all of them."""
    case = (CASES | TRANSFORMERS)[name]
    made = divided(case, case.model())
    exact, groups = torch.linalg.eigvalsh(made.dense()), made.symmetries.groups
    for seed, chosen in enumerate([*([group] for group in groups), groups]):
        other = divided(case, moved(case, chosen, seed))
        change = (torch.linalg.eigvalsh(other.dense()) - exact).abs().max() / exact.abs().max()
        assert change <= 1e-5, [(group.kind, group.parameters) for group in chosen]


@pytest.mark.parametrize("name", ["batch norm", "layer norm", "attention"])
def test_projected_directions_are_zero_modes_and_lanczos_stays_among_the_others(name):
    case = CASES[name]
    made = ns.hessian(case.model(), case.loss, case.data(), mode=case.mode, quotient=True)
    tangents = made.operator.vertical
    assert len(tangents) > 0 and all(made.product(row).norm() <= 1e-12 for row in tangents)
    exact = torch.linalg.eigvalsh(made.dense())
    assert made.top(1, tolerance=1e-8)[0].value == pytest.approx(float(exact[-1]), rel=1e-6)
    assert made.condition(products=made.size).exact
    assert "directions of" in str(made)


@pytest.mark.parametrize("blocks", [[], [(1, 1)], [(3, 5), (4, 2), (1, 7)], [(2, 3)] * 6])
def test_a_basis_found_block_by_block_spans_what_all_rows_span(blocks):
    """Shuffled rows and columns, rows that depend on others, rows of zeros and of very different lengths."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in blocks]
    rows = torch.block_diag(*parts, torch.zeros(2, 3, dtype=torch.float64))
    rows = torch.cat([rows, 1e-6 * rows[:2] - 2 * rows[-1:]])
    rows = rows[torch.randperm(len(rows), generator=generator)][:, torch.randperm(rows.shape[1], generator=generator)]
    found = orthonormal_basis(rows)
    assert len(found) == sum(min(shape) for shape in blocks)
    assert torch.allclose(found @ found.T, torch.eye(len(found), dtype=torch.float64), rtol=0, atol=1e-13)
    assert torch.allclose(found.T @ found, torch.linalg.pinv(rows) @ rows, rtol=0, atol=1e-12)


def test_both_ways_of_projecting_agree(monkeypatch):
    case = CASES["two batch norms"]
    small = ns.hessian(case.model(), case.loss, case.data(), quotient=True).dense()
    monkeypatch.setattr("normscope.curvature.quotient.LARGEST_TANGENTS", 0)
    assert (ns.hessian(case.model(), case.loss, case.data(), quotient=True).dense() - small).abs().max() <= 1e-10


def test_sharpness_both_ways_when_weights_shrink():
    case = CASES["batch norm"]
    shrunk = case.model()
    with torch.no_grad():
        shrunk[0].weight.mul_(0.01)
        shrunk[0].bias.mul_(0.01)
    shrunk[1].eps *= 0.01**2
    before, after = (sharpness(model, case.loss, case.data()) for model in (case.model(), shrunk))
    assert after[0].largest.value > 100 * before[0].largest.value
    assert after[1].largest.value == pytest.approx(before[1].largest.value, rel=0.02)


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", NAMES)
def test_the_gauss_newton_matrix_is_zero_along_every_symmetry(name):
    case = CASES[name]
    found = zero_modes(ns.hessian(without_epsilon(case.model()), case.loss, case.data(), mode=case.mode))
    assert found.null >= found.named and found.residual <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_the_hessian_along_scales_is_minus_the_gradient(name):
    case = CASES[name]
    made = ns.hessian(without_epsilon(case.model()), case.loss, case.data(), mode=case.mode)
    assert all(identity.defect <= 1e-6 for identity in scale_identities(made))


def test_at_a_critical_point_of_a_batch_norm_network_the_hessian_is_zero_along_weights_and_biases():
    """Akbar's A.1.2 as far as it holds; the same directions are not flat before the gradient vanishes."""
    model, data = descended(steps=0)
    before = equilibrium(ns.hessian(model, nn.functional.mse_loss, data))
    assert before.gradient_norm > 1e-3 and before.modes.residual > 1e-4
    model, data = descended(steps=12)
    made = ns.hessian(model, nn.functional.mse_loss, data)
    found = equilibrium(made)
    assert found.gradient_norm <= 1e-12
    assert found.modes.named == found.modes.null == 6 and found.modes.residual <= 1e-10  # 3 weights and 3 biases, and no more
    point = {name: value.detach() for name, value in model.named_parameters()}
    for neuron in range(3):
        row = torch.zeros_like(point["0.weight"])
        row[neuron] = point["0.weight"][neuron]
        unit = torch.eye(3, dtype=torch.float64)[neuron]
        for direction in ({"0.weight": row}, {"0.bias": unit}):
            image = torch.cat([part.reshape(-1) for part in made.product(direction).values()])
            assert image.norm() <= 1e-10
    assert made.bottom(1, tolerance=1e-8)[0].value >= -1e-10  # a minimum: the rest of the spectrum is positive


def descended(steps: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A BN network near the one that made its noisy targets, after so many Gauss-Newton steps."""
    generator = torch.Generator().manual_seed(2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, eps=1e-14), nn.Tanh(), nn.Linear(3, 2)).double()
    inputs, noise, change = (torch.randn(*shape, generator=generator).double() for shape in ((60, 4), (60, 2), (29,)))
    data = inputs, model(inputs).detach() + 0.01 * noise
    objective = ns.curvature.landscape(model, nn.functional.mse_loss, data).objective
    point = objective.point + 0.005 * change
    for _ in range(steps):
        here = objective.at(point)
        inverse = torch.linalg.pinv(ns.curvature.Curvature(here, GaussNewton(here)).dense(), rtol=1e-6, hermitian=True)
        point = point - inverse @ here.gradient()
    model.load_state_dict({**model.state_dict(), **objective.layout.unflatten(point)})
    return model, data


def without_epsilon(model: nn.Module) -> nn.Module:
    """The laws are about ε = 0."""
    for part in model.modules():
        if hasattr(part, "eps"):
            part.eps = 1e-14
    return model


def test_slices_on_spheres_keep_the_norms_of_scale_free_weights():
    case = CASES["batch norm"]
    objective = ns.curvature.landscape(case.model(), case.loss, case.data()).objective
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    radial = {"0.weight": objective.layout.unflatten(objective.point)["0.weight"]}
    along = slice_of(objective, radial, radius=0.9, points=5, spheres=True)
    assert torch.allclose(torch.tensor(along.losses), torch.full((5,), objective.value()).double(), atol=1e-12)
    across = slice_of(objective, {"0.weight": weight}, radius=1.0, points=3, spheres=True)
    assert across.losses[0] != pytest.approx(objective.value())


def test_some_parameters_have_no_quotient():
    case = CASES["batch norm"]
    with pytest.raises(InputError, match="needs all parameters"):
        ns.hessian(case.model(), case.loss, case.data(), quotient=True, parameters="0")
    made = ns.hessian(case.model(), case.loss, case.data(), quotient=True)
    assert len(symmetries_of(made.objective).groups) == len(made.symmetries.groups)
    with pytest.raises(InputError, match="plain"):
        made.blocks()
    with pytest.raises(InputError, match="plain"):
        zero_modes(made)
