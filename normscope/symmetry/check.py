"""Falsification: every group is applied, differentiated along and, where it scales, held against H w = −∇L, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from normscope.core.rounding import euclidean_norm
from normscope.symmetry.groups import Group
from normscope.symmetry.numerics import Numerics

TOLERANCE = 1e-8  # relative, where a model's own rounding is not larger
SHRUNK = 1e-3  # a defect that falls to this share of itself when ε does is the work of ε
ULP = 2.0**-52
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
    with torch.no_grad():
        after = numerics.outputs(group.transform(numerics.parameters, torch.Generator().manual_seed(SEED)))
    return _relative(after - numerics.unmoved, numerics.unmoved)


def check(groups: Iterable[Group], numerics: Numerics) -> list[Refutation]:
    """Every group that fails a test by more than rounding once ε is taken out of the normalizers."""
    trial = _Trial(numerics)
    found: list[Refutation] = []
    for group in groups:
        for test, measure in {"outputs": trial.outputs, "gradient": trial.gradient, "Hessian": trial.hessian}.items():
            value = measure(group)
            if not value <= TOLERANCE:
                found.append(Refutation(group, test, value))
                break
    return found


class _Trial:
    """One model, one random loss of its outputs, and the error of each test beyond what rounding explains."""

    def __init__(self, numerics: Numerics) -> None:
        self.numerics, self.parameters = numerics, numerics.parameters
        self.generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            self.reference = numerics.without_epsilon(self.parameters)
        self.size = _largest(self.reference) or 1.0
        self.weights = torch.randn(self.reference.shape, generator=self.generator, dtype=torch.float64)
        self.slopes = self._slopes(self.parameters)
        nearby = self._slopes(_off_by_some_ulps(self.parameters, self.generator))
        self.steepness = _length(self.slopes.values())
        rounding = _ratio(ULP * float(self._terms(self.reference).abs().sum()), _length(self.parameters.values()))
        change = _length(nearby[name] - self.slopes[name] for name in nearby)  # may be 0 by chance where every slope is
        self.noise = _ratio(max(change, rounding), self.steepness)

    def outputs(self, group: Group) -> float:
        """max |Δ output| / max |output|: of the model itself and, where ε makes a difference, of its graph without ε."""
        if group.defect <= TOLERANCE:
            return group.defect
        moved = group.transform(self.parameters, self.generator)
        with torch.no_grad():
            after, again = map(self.numerics.without_epsilon, (moved, _off_by_some_ulps(moved, self.generator)))
        value = _beyond(_relative(after - self.reference, self.reference), _relative(again - after, self.reference))
        return 0.0 if value <= SHRUNK * group.defect else value

    def gradient(self, group: Group) -> float:
        """|∇L · u| / ‖∇L‖‖u‖ for a random tangent u of the orbit."""
        tangent = group.tangent(self.parameters, torch.randn(group.count, generator=self.generator, dtype=torch.float64))
        length = _length(tangent.values())
        if not (length and self.steepness):
            return 0.0
        inner = sum(float((self.slopes[name] / self.steepness * (part / length)).sum()) for name, part in tangent.items())
        return _beyond(abs(inner), self.noise)

    def hessian(self, group: Group) -> float:
        """‖H w + ∇L‖ / ‖∇L‖ on the entries w that a scale group moves: from L(c w) = L(w), ∇L(c w) = ∇L(w)/c.

        0 where torch has no second derivative, as of hardsigmoid.
        """
        if group.kind != "scale" or set(group.degrees) != {1.0}:
            return 0.0
        name = group.parameters[0]
        moved = torch.stack([action.spread(torch.ones(group.count).double()) for action in group.actions]).sum(0)
        try:
            product = self._hessian_product(name, moved * self.parameters[name])
        except (RuntimeError, NotImplementedError) as error:
            if "not implemented" not in str(error):
                raise
            return 0.0
        return _beyond(_ratio(_length([(product + self.slopes[name]) * moved]), self.steepness), self.noise)

    def _loss(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Nonlinear in the outputs, whatever their size, so that second derivatives are not those of the network alone."""
        return self._terms(self.numerics.without_epsilon(parameters)).sum()

    def _terms(self, outputs: torch.Tensor) -> torch.Tensor:
        outputs = outputs / self.size
        return self.weights * (outputs + 0.5 * outputs.square())

    def _slopes(self, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return torch.func.grad(self._loss)(parameters)

    def _hessian_product(self, name: str, direction: torch.Tensor) -> torch.Tensor:
        """The block of H of one parameter, times a direction, by differentiating ∇L · u."""
        slope = torch.func.grad(lambda value: self._loss({**self.parameters, name: value}))
        along = torch.func.grad(lambda value: (slope(value) * direction).sum())
        return along(self.parameters[name])


def _off_by_some_ulps(parameters: Mapping[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        name: value * (1 + 1e-15 * torch.randn(value.shape, generator=generator, dtype=torch.float64))
        for name, value in parameters.items()
    }


def _beyond(value: float, noise: float) -> float:
    """A value, unless rounding is enough to explain it."""
    return 0.0 if value <= 100 * noise else value


def _length(parts: Iterable[torch.Tensor]) -> float:
    found = [euclidean_norm(part) for part in parts]
    return float(euclidean_norm(torch.stack(found))) if found else 0.0


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _ratio(value: float, size: float) -> float:
    """What is 0/0 is 0."""
    return value / size if size else math.inf if value else 0.0


def _relative(change: torch.Tensor, reference: torch.Tensor) -> float:
    return _largest(change) / (_largest(reference) or 1.0)
