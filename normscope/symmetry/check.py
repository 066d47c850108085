"""Falsification: every group is applied, differentiated along and, where it scales, held against H w = −∇L, in float64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from normscope.symmetry.groups import Group
from normscope.symmetry.numerics import Numerics

ROUNDING = 1e-8  # of float64 after a whole network, relative
SEED = 0


@dataclass(frozen=True)
class Refutation:
    """A group that the numbers contradict: a bug of normscope, with its case."""

    group: Group
    test: str
    value: float

    def __str__(self) -> str:
        return (
            f"a bug of normscope: the {self.group.kind} group of {', '.join(self.group.parameters)} ({self.group.mode} mode) "
            f"fails the test of its {self.test} by {self.value:.3g}, and not because of ε; please report it with this model"
        )


def defect(group: Group, numerics: Numerics) -> float:
    """max |Δ output| / max |output| under a random element of the group."""
    parameters = numerics.parameters
    with torch.no_grad():
        before = numerics.outputs(parameters)
        after = numerics.outputs(group.transform(parameters, torch.Generator().manual_seed(SEED)))
    return _relative(after - before, before)


def check(groups: Iterable[Group], numerics: Numerics) -> list[Refutation]:
    """Every group that fails a test by more than rounding once ε is taken out of the normalizers."""
    with torch.no_grad():
        reference = numerics.without_epsilon(numerics.parameters)
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.randn(reference.shape, generator=generator, dtype=torch.float64)
    gradient = _gradient(numerics, weights, numerics.parameters)
    found: list[Refutation] = []
    for group in groups:
        tests = {
            "outputs": lambda group=group: _moved_outputs(group, numerics, reference, generator),
            "gradient": lambda group=group: _radial_gradient(group, numerics, gradient, generator),
            "Hessian": lambda group=group: _hessian_identity(group, numerics, weights, gradient),
        }
        for test, measure in tests.items():
            value = measure()
            if not value <= ROUNDING:
                found.append(Refutation(group, test, value))
                break
    return found


def _moved_outputs(group: Group, numerics: Numerics, reference: torch.Tensor, generator: torch.Generator) -> float:
    """Of the model itself; where ε makes a difference, of its graph without ε."""
    if group.defect <= ROUNDING:
        return group.defect
    with torch.no_grad():
        moved = numerics.without_epsilon(group.transform(numerics.parameters, generator))
    return _relative(moved - reference, reference)


def _radial_gradient(group: Group, numerics: Numerics, gradient: dict[str, torch.Tensor], generator: torch.Generator) -> float:
    """|∇L · u| / ‖∇L‖‖u‖ for a random tangent u of the orbit."""
    amounts = torch.randn(group.count, generator=generator, dtype=torch.float64)
    tangent = group.tangent(numerics.parameters, amounts)
    inner = sum(float((gradient[name] * part).sum()) for name, part in tangent.items())
    sizes = [
        sum(float(part.square().sum()) for part in parts) ** 0.5
        for parts in (tangent.values(), [gradient[name] for name in tangent])
    ]
    return abs(inner) / (sizes[0] * sizes[1] + 1e-30) if sizes[0] * sizes[1] > 1e-12 else 0.0


def _hessian_identity(group: Group, numerics: Numerics, weights: torch.Tensor, gradient: dict[str, torch.Tensor]) -> float:
    """‖H w + ∇L‖ / ‖∇L‖ on the entries w that one scale group moves together."""
    if group.kind != "scale" or set(group.degrees) != {1.0}:
        return 0.0
    name = group.parameters[0]
    parameters = numerics.parameters
    moved = sum(action.spread(torch.ones(group.count, dtype=torch.float64)) for action in group.actions)
    direction = {name: (moved * parameters[name]).expand_as(parameters[name])}
    product = _hessian_product(numerics, weights, parameters, direction)[name]
    error = ((product + gradient[name]) * moved).norm()
    return float(error / (gradient[name].norm() + product.norm())) if float(gradient[name].norm()) > 1e-9 else 0.0


def _gradient(numerics: Numerics, weights: torch.Tensor, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return torch.func.grad(lambda point: (weights * _bent(numerics.without_epsilon(point))).sum())(parameters)


def _hessian_product(
    numerics: Numerics, weights: torch.Tensor, parameters: dict[str, torch.Tensor], direction: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """H u by differentiating ∇L · u."""
    leaves = {name: value.clone().requires_grad_(True) for name, value in parameters.items()}
    loss = (weights * _bent(numerics.without_epsilon(leaves))).sum()
    names = list(direction)
    slopes = torch.autograd.grad(loss, [leaves[name] for name in names], create_graph=True)
    along = sum((slope * direction[name]).sum() for slope, name in zip(slopes, names, strict=True))
    products = torch.autograd.grad(along, [leaves[name] for name in names])
    return dict(zip(names, products, strict=True))


def _bent(outputs: torch.Tensor) -> torch.Tensor:
    """A nonlinear loss of the outputs, so that second derivatives are not those of the network alone."""
    return outputs + 0.5 * outputs.square()


def _relative(change: torch.Tensor, reference: torch.Tensor) -> float:
    size = float(reference.abs().max()) if reference.numel() else 0.0
    return float(change.abs().max()) / size if size else float(change.abs().max()) if change.numel() else 0.0
