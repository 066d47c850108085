"""Laws of the quotient: horizontal vectors are orthogonal to orbits, representatives do not depend on the point of the orbit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.geometry.groups import members, spread
from normscope.geometry.quotient import canonical, horizontal


@dataclass(frozen=True)
class Group:
    kind: str
    parameters: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]
    count: int
    blocks: tuple[int, ...] = (1, 1, 1)
    degrees: tuple[float, ...] = (1.0, 1.0, 1.0)

    def __post_init__(self):
        for name in ("blocks", "degrees"):
            object.__setattr__(self, name, getattr(self, name)[: len(self.parameters)])

    def scaled(self, parameters, logs):
        found = dict(parameters)
        for name, numbers, degree in zip(self.parameters, members(self, parameters), self.degrees, strict=True):
            found[name] = found[name] * spread(numbers, (degree * logs).exp(), elsewhere=1.0)
        return found

    def tangent(self, parameters, amounts):
        """Of the shifts here, which have all axes but one to themselves."""
        (name,), (axes,) = self.parameters, self.axes
        shape = [size if axis in axes else 1 for axis, size in enumerate(parameters[name].shape)]
        return {name: amounts.reshape(shape).expand(parameters[name].shape)}


@dataclass(frozen=True)
class Shifted(Group):
    """b → b + t with a later bias that takes W t back."""

    members = torch.arange(3), torch.tensor([-1])

    def tangent(self, parameters, amounts):
        return {"1.bias": amounts, "3.bias": -parameters["3.weight"] @ amounts}

    def directions(self, parameters):
        return torch.cat([torch.eye(self.count, dtype=torch.float64), -parameters["3.weight"].T], 1)


@dataclass(frozen=True)
class Report:
    groups: tuple[Group, ...]


def model(dtype=torch.float64):
    """relu between two layers, LN, relu, a layer before BN: rescaling, joint scale, shifts of weight and bias, and scales."""
    network = nn.Sequential(
        nn.Linear(4, 6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.LayerNorm(5, eps=0),
        nn.ReLU(),
        nn.Linear(5, 8),
        nn.BatchNorm1d(8, eps=1e-30),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return network.to(dtype)


REPORT = Report((
    Group("rescale", ("0.weight", "0.bias", "2.weight"), ((0,), (0,), (1,)), 6, degrees=(1.0, 1.0, -1.0)),
    Group("joint-scale", ("2.weight", "2.bias"), ((), ()), 1), Group("shift", ("2.bias",), ((),), 1),
    Group("weight-shift", ("2.weight",), ((1,),), 6), Group("scale", ("5.weight",), ((0,),), 8), Group("shift", ("5.bias",), ((0,),), 8),
    Group("rescale", ("3.weight", "3.bias", "5.weight"), ((0,), (0,), (1,)), 5, degrees=(1.0, 1.0, -1.0)),
))  # fmt: skip


def point(dtype=torch.float64):
    return {name: tensor.detach().clone() for name, tensor in model(dtype).named_parameters()}


def moved(parameters, seed=1):
    """A random point of the same orbit."""
    generator = torch.Generator().manual_seed(seed)

    def positive(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).exp()

    new = dict(parameters)
    for first, bias, second in (("0.weight", "0.bias", "2.weight"), ("3.weight", "3.bias", "5.weight")):
        factor = positive(len(new[bias]))
        new[first] = new[first] * factor.reshape(-1, *[1] * (new[first].dim() - 1))
        new[bias], new[second] = new[bias] * factor, new[second] / factor
    scale = positive()
    new["2.weight"], new["2.bias"] = new["2.weight"] * scale + positive(6), new["2.bias"] * scale + positive()
    new["5.weight"], new["5.bias"] = new["5.weight"] * positive(8, 1), new["5.bias"] + positive(8)
    return new


def outputs(parameters):
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return torch.func.functional_call(model(), parameters, (inputs,))


def test_the_representative_is_the_same_for_the_whole_orbit_and_computes_the_same():
    start, elsewhere = point(), moved(point())
    torch.testing.assert_close(outputs(start), outputs(elsewhere), rtol=1e-9, atol=1e-9)
    first, second = canonical(REPORT, start), canonical(REPORT, elsewhere)
    torch.testing.assert_close(outputs(first), outputs(start), rtol=1e-9, atol=1e-9)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(canonical(REPORT, first)[name], first[name], rtol=1e-10, atol=1e-10)


def test_the_representative_is_normal():
    found = canonical(REPORT, point())
    one = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(found["5.weight"].norm(dim=1), one.expand(8))
    torch.testing.assert_close(found["2.weight"].square().sum() + found["2.bias"].square().sum(), one)
    torch.testing.assert_close(found["5.bias"], torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(found["2.bias"].mean(), 0 * one)
    torch.testing.assert_close(found["2.weight"].mean(0), torch.zeros(6, dtype=torch.float64))
    before = found["0.weight"].square().sum(1) + found["0.bias"].square()
    torch.testing.assert_close(before, found["2.weight"].square().sum(0))


def tangents():
    """All directions of the orbits of REPORT at the point, by differences of finite moves; (directions, entries)."""
    start = point()
    names = list(start)
    rows = []
    for group in REPORT.groups:
        for number in range(group.count):
            row = {name: torch.zeros_like(start[name]) for name in names}
            for name, axes, degree in zip(group.parameters, group.axes, group.degrees, strict=True):
                move = degree * start[name] if "scale" in group.kind else torch.ones_like(start[name])
                if axes:
                    mask = torch.zeros_like(move).index_fill(axes[0], torch.tensor([number]), 1)
                    move = move * mask
                row[name] = row[name] + move
            rows.append(torch.cat([row[name].reshape(-1) for name in names]))
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(3))
def test_horizontal_is_the_orthogonal_projection(seed):
    start, generator = point(), torch.Generator().manual_seed(seed)
    vector = {name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for name, tensor in start.items()}
    flat = torch.cat([vector[name].reshape(-1) for name in start])
    basis = torch.linalg.svd(tangents(), full_matrices=False)
    basis = basis.Vh[1e-10 * basis.S[0] < basis.S]
    expected = flat - basis.T @ (basis @ flat)
    found = horizontal(REPORT, start, vector)
    torch.testing.assert_close(torch.cat([found[name].reshape(-1) for name in start]), expected, rtol=1e-9, atol=1e-10)
    again = horizontal(REPORT, start, found)
    for name in found:
        torch.testing.assert_close(again[name], found[name], rtol=1e-10, atol=1e-11)


def test_gradients_are_horizontal():
    network = model()
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    network(inputs).tanh().square().sum().backward()
    named = dict(network.named_parameters())
    gradients = {name: parameter.grad for name, parameter in named.items()}
    found = horizontal(REPORT, named, gradients)
    for name in found:
        torch.testing.assert_close(found[name], gradients[name], rtol=1e-7, atol=1e-9)


def test_float32_in_float32_out():
    start = point(torch.float32)
    found = horizontal(REPORT, start, start)
    assert all(tensor.dtype == torch.float32 for tensor in (*found.values(), *canonical(REPORT, start).values()))
    for name, tensor in canonical(REPORT, point()).items():
        torch.testing.assert_close(canonical(REPORT, start)[name].double(), tensor, rtol=1e-4, atol=1e-5)


def test_shifts_that_a_later_bias_takes_back():
    start = {
        "1.bias": torch.randn(3, dtype=torch.float64),
        "3.weight": torch.randn(2, 3, dtype=torch.float64),
        "3.bias": torch.zeros(2, dtype=torch.float64),
    }
    report = Report((Shifted("shift", ("1.bias", "3.bias"), ((0,), ()), 3),))
    found = canonical(report, start)
    torch.testing.assert_close(found["1.bias"], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(found["3.bias"], start["3.weight"] @ start["1.bias"])
    flat = horizontal(report, start, {"1.bias": torch.ones(3), "3.bias": torch.ones(2)})
    torch.testing.assert_close(flat["1.bias"].double(), start["3.weight"].T @ flat["3.bias"].double(), rtol=1e-5, atol=1e-6)


def test_members_that_do_not_cover_a_parameter():
    @dataclass(frozen=True)
    class Partial(Group):
        @property
        def members(self):
            return (torch.tensor([0, 0, -1, 1])[:, None],)

    start = {"w": torch.arange(1.0, 9, dtype=torch.float64).reshape(4, 2)}
    found = canonical(Report((Partial("scale", ("w",), ((0,),), 2),)), start)["w"]
    assert torch.equal(found[2], start["w"][2])
    torch.testing.assert_close(found[3].norm(), torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(found[:2].norm(), torch.ones((), dtype=torch.float64))


BETWEEN = Report((
    Group("rescale", ("w", "b", "v"), ((0,), (0,), (1,)), 3, degrees=(1.0, 1.0, -1.0)),
    Group("rescale", ("g", "w", "v"), ((), (), ()), 1, degrees=(1.0, -1.0, 1.0)),
))  # fmt: skip


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_a_scale_free_vector_between_two_rescalings_has_unit_norm(size):
    """Together they scale g and b, w and v stay: the sum of squares has no least value."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (3, 4), "b": (3,), "v": (2, 3), "g": (4,)}
    start = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    found = canonical(BETWEEN, {**start, "g": size * start["g"]})
    torch.testing.assert_close(found["w"].square().sum(1) + found["b"].square(), found["v"].square().sum(0))
    torch.testing.assert_close(found["g"].square().sum() + found["b"].square().sum(), torch.ones((), dtype=torch.float64))
    logs = torch.tensor([3.0, -4.0, 1.0]).double(), torch.tensor([2.0]).double()
    moved = {**start, "g": size * start["g"]}
    for group, own in zip(BETWEEN.groups, logs, strict=True):
        moved = group.scaled(moved, own)
    for point in (moved, found):
        for name, tensor in canonical(BETWEEN, point).items():
            torch.testing.assert_close(tensor, found[name], rtol=1e-9, atol=1e-12)


def test_a_charge_that_the_other_charges_leave_no_room_for_is_smaller():
    """Two rows of w have unit norm, so that ‖w‖² = ‖g‖² = 2, and h and g together cannot have unit norm."""
    report = Report((
        Group("scale", ("w",), ((0,),), 2),
        Group("rescale", ("g", "w"), ((0,), (1,)), 2, degrees=(1.0, -1.0)),
        Group("rescale", ("h", "g"), ((), ()), 1, degrees=(-1.0, -1.0)),
    ))  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    start = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in (("w", (2, 2)), ("g", (2,)), ("h", (3,)))
    }
    found = canonical(report, start)
    torch.testing.assert_close(found["w"].norm(dim=1), torch.ones(2, dtype=torch.float64))
    for name, tensor in canonical(report, report.groups[2].scaled(start, torch.tensor([1.5]).double())).items():
        torch.testing.assert_close(tensor, found[name], rtol=1e-9, atol=1e-12)


def test_no_groups_and_zero_vectors():
    start = {"w": torch.zeros(3, 2)}
    assert torch.equal(canonical(Report((Group("scale", ("w",), ((0,),), 3),)), start)["w"], start["w"])
    vector = {"w": torch.ones(3, 2)}
    assert torch.equal(horizontal(Report((Group("scale", ("w",), ((0,),), 3),)), start, vector)["w"], vector["w"])
    assert torch.equal(horizontal(Report(()), start, vector)["w"], vector["w"])
    assert torch.equal(canonical(Report(()), start)["w"], start["w"])
    with pytest.raises(InputError, match="lack 'v'"):
        horizontal(Report((Group("scale", ("v",), ((0,),), 3),)), start, vector)
