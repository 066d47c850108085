"""With the symmetries divided out, curvature does not depend on where on the orbit the weights stand."""

from __future__ import annotations

import pytest
import torch

import normscope as ns
from normscope.core.errors import InputError
from normscope.curvature.quotient import symmetries_of
from normscope.curvature.sharpness import sharpness
from normscope.curvature.slices import slice_of
from normscope.curvature.theory import scale_identities, zero_modes
from tests.curvature.models import CASES, Case

NAMES = ["batch norm", "batch norm, eval", "batch norm, relu", "two batch norms", "layer norm", "rms norm", "conv batch norm", "conv group norm", "residual", "attention", "weight norm", "mlp relu"]  # fmt: skip


def moved(case: Case, group, seed: int) -> torch.nn.Module:
    """The model after a random element of a group."""
    model = case.model()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    model.load_state_dict({**model.state_dict(), **group.transform(parameters, torch.Generator().manual_seed(seed))})
    return model


@pytest.mark.parametrize("name", NAMES)
def test_the_quotient_spectrum_is_invariant_under_every_detected_symmetry(name):
    case = CASES[name]
    made = ns.hessian(case.model(), case.loss, case.data(), case.mode, quotient=True)
    exact = torch.linalg.eigvalsh(made.dense())
    for seed, group in enumerate(made.symmetries.groups):
        other = ns.hessian(moved(case, group, seed), case.loss, case.data(), case.mode, quotient=True)
        change = (torch.linalg.eigvalsh(other.dense()) - exact).abs().max() / exact.abs().max()
        assert change <= 1e-5, (group.kind, group.parameters)


@pytest.mark.parametrize("name", ["batch norm", "layer norm", "attention"])
def test_projected_directions_are_zero_modes_and_lanczos_stays_among_the_others(name):
    case = CASES[name]
    made = ns.hessian(case.model(), case.loss, case.data(), case.mode, quotient=True)
    tangents = made.operator.vertical
    assert len(tangents) > 0 and all(made.product(row).norm() <= 1e-12 for row in tangents)
    exact = torch.linalg.eigvalsh(made.dense())
    assert made.top(1, tolerance=1e-8)[0].value == pytest.approx(float(exact[-1]), rel=1e-6)
    assert made.condition(products=made.size).exact
    assert "directions of" in str(made)


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


@pytest.mark.parametrize("name", NAMES)
def test_the_gauss_newton_matrix_is_zero_along_every_symmetry(name):
    case = CASES[name]
    found = zero_modes(ns.hessian(without_epsilon(case.model()), case.loss, case.data(), case.mode))
    assert found.null >= found.named and found.residual <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_the_hessian_along_scales_is_minus_the_gradient(name):
    case = CASES[name]
    made = ns.hessian(without_epsilon(case.model()), case.loss, case.data(), case.mode)
    assert all(identity.defect <= 1e-6 for identity in scale_identities(made))


def without_epsilon(model: torch.nn.Module) -> torch.nn.Module:
    """The laws are about ε = 0."""
    for part in model.modules():
        if hasattr(part, "eps"):
            part.eps = 1e-14
    return model


def test_slices_on_spheres_keep_the_norms_of_scale_free_weights():
    case = CASES["batch norm"]
    objective = ns.landscape(case.model(), case.loss, case.data()).objective
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
