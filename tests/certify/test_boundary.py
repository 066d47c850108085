"""No exception but ours leaves the library, whatever the model, the region and the data are."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import normscope as ns
from normscope.core.deprecation import earlier
from normscope.core.errors import InternalError, UnforeseenError, boundary
from tests.cases import INFINITE, RULE_CASES, VARIANTS, Function, randn
from tests.networks import network
from tests.symmetry.cases import CASES as SYMMETRY_CASES

DOUBLE = torch.float64
ONES = torch.ones(4, dtype=DOUBLE)


def with_statistics(mean: float = 0.0, variance: float = 1.0, bias: float = 0.0) -> nn.Module:
    layer, normalizer = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
    nn.init.constant_(layer.bias, bias)
    normalizer.running_mean.fill_(mean)
    normalizer.running_var.fill_(variance)
    return nn.Sequential(layer, normalizer).eval()


AWKWARD = {  # on (1, 4): operations with rare arguments, at the limits of what rules foresee
    "a constant mask": lambda x: x[:, torch.tensor([True, False, True, True])],
    "repeats that differ": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1]), 1),
    "a clamp by a value": lambda x: x * torch.clamp(x, max=x.flip(1)),
    "copies before a normalizer": lambda x: functional.group_norm(x.unsqueeze(1).expand(-1, 2, -1), 1),
    "a weight of one axis": lambda x: functional.linear(x, ONES),
    "a weight from the input": lambda x: functional.batch_norm(
        functional.linear(torch.ones(3, 4, dtype=DOUBLE), x), torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)
    ),
    "a kernel from the input": lambda x: functional.conv1d(torch.ones(1, 1, 6, dtype=DOUBLE), x[:, None]).transpose(0, 1),
    "overwritten by a constant": lambda x: (x * 2).copy_(ONES) + x,
    "powers of a tensor": lambda x: torch.pow(torch.tensor([2.0, 3.0, 4.0, 5.0], dtype=DOUBLE), x),
    "the power infinity": lambda x: x ** math.inf,
    "the power NaN": lambda x: x ** math.nan,
    "times NaN": lambda x: x * math.nan,
    "times infinity": lambda x: x * math.inf,
    "divided by zero": lambda x: x / 0.0,
    "slopes from the input": lambda x: functional.prelu(torch.ones(1, 1, 4, dtype=DOUBLE), x[0, :1]),
    "an empty padding": lambda x: functional.conv1d(functional.pad(x[:, None], []), torch.ones(1, 1, 3, dtype=DOUBLE)),
    "limits of more entries": lambda x: torch.clamp(x[:, :1], min=torch.zeros(9, dtype=DOUBLE)),
    "no output entry": lambda x: x[:, :0],
    "one number": lambda x: x.sum(),
    "a quotient": lambda x: x[:, :2] / x[:, 2:],
    "another precision": lambda x: functional.softmax(x, 1, dtype=torch.float32) @ torch.ones(4, 4),
}  # fmt: skip
MODELS = {
    **{name: Function(function) for name, function in AWKWARD.items()},
    "digits that cancel": with_statistics(1e9, 1.0, 1e9),
    "a negative variance": with_statistics(variance=-1.0),
    "a variance of zero": with_statistics(variance=0.0),
    "an infinite mean": with_statistics(mean=math.inf),
    "a huge variance": with_statistics(variance=1e300),
}
SAMPLE = randn(4).double()
REGIONS = {
    "everywhere": None,
    "a ball": ns.Ball(SAMPLE, 0.1),
    "a point": ns.Ball(SAMPLE, 0.0),
    "a tiny ball": ns.Ball(torch.zeros(4), 1e-300),
    "a huge ball": ns.Ball(torch.zeros(4), 1e300),
    "a box": ns.Box(1e160 * ONES, 2e160 * ONES),
    "a box at the end": ns.Box(1e308 * ONES, 1.7e308 * ONES),
    "another shape": ns.Ball(torch.zeros(3), 1.0),
}
ENTRY_POINTS = {
    "audit": lambda model, x: ns.audit(model, x, effort=0.01),
    "local_brackets": lambda model, x: ns.certify.local_brackets(model, x, x, radius=0.1, effort=0.01),
    "certify_radius": lambda model, x: ns.certify.certify_radius(model, x, (x, torch.zeros(len(x), dtype=torch.long)), radii=(0.1,)),
    "weight_sensitivities": lambda model, x: ns.certify.weight_sensitivities(model, x, region=ns.Ball(x[0], 0.1)),
    "wrt weights": lambda model, x: ns.lipschitz(model, x, region=ns.Ball(x[0], 0.1), wrt="weights"),
    "normalizer_ablation": lambda model, x: ns.certify.normalizer_ablation(model, x, effort=0.01),
    "operator_norm": lambda model, x: ns.certify.operator_norm(model, tuple(x.shape[1:])),
    "symmetries": lambda model, x: ns.symmetries(model, x).check(),
    "doctor": lambda model, x: ns.doctor(model, x),
    "training_cost": lambda model, x: ns.bounds.training_cost(model, x),
}  # fmt: skip


def answer(call, *arguments, **settings) -> object:
    """The result, or None for an error in one line that says what is wrong; no case may be unforeseen."""
    try:
        return call(*arguments, **settings)
    except (InternalError, UnforeseenError):
        raise
    except ns.NormscopeError as error:
        assert str(error) and "\n" not in str(error)
        return None


QUICK = ("everywhere", "a ball", "a box", "a box at the end")


@pytest.mark.quick(40)
@pytest.mark.parametrize("region", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in REGIONS])
@pytest.mark.parametrize("name", MODELS)
def test_brackets_of_awkward_models(name, region):
    found = answer(ns.lipschitz, MODELS[name], SAMPLE[None], REGIONS[region], effort=0.01)
    assert found is None or found.lower <= found.upper


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("name", ["digits that cancel", "a clamp by a value", "a constant mask", "no output entry", "times NaN"])
def test_entry_points_on_awkward_models(name, entry):
    answer(ENTRY_POINTS[entry], MODELS[name], SAMPLE[None])


@pytest.mark.full
@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_entry_point_on_every_awkward_model(name, entry):
    answer(ENTRY_POINTS[entry], MODELS[name], SAMPLE[None])


@pytest.mark.full
@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("table", [RULE_CASES, VARIANTS, INFINITE], ids=["rules", "variants", "infinite"])
def test_every_case_of_the_tables(table, entry):
    for case in table.values():
        answer(ENTRY_POINTS[entry], case.module, case.example)


@pytest.mark.full
@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("start", range(0, 120, 20))
def test_random_networks(start, entry):
    for seed in range(start, start + (4 if entry == "normalizer_ablation" else 20)):  # which makes a bracket per normalizer
        module, example, _ = network(seed)
        answer(ENTRY_POINTS[entry], module, example)


@pytest.mark.full
@pytest.mark.parametrize("name", SYMMETRY_CASES)
def test_every_case_of_symmetries(name):
    case = SYMMETRY_CASES[name]
    for entry in ENTRY_POINTS.values():
        answer(entry, case.model(), case.example)


# the boundary itself ---------------------------------------------------------------------------------------------------


class Broken(ns.rules.Rule):
    """A rule that fails in the way it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def gain(self, node, context):
        raise self.error


@pytest.fixture
def broken(monkeypatch):
    def make(error: BaseException) -> nn.Module:
        monkeypatch.setitem(ns.rules.registry.rules, "erf", Broken(error))
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Function(torch.erf)))

    return make


@pytest.mark.parametrize("error", [ValueError("odd"), KeyError(3), ZeroDivisionError(), AssertionError("2 ≠ 3"), MemoryError()])
def test_an_exception_becomes_a_refusal_that_names_the_node(broken, error):
    with pytest.raises(UnforeseenError) as caught:
        ns.lipschitz(broken(error), torch.zeros(1, 4))
    assert "lipschitz" in str(caught.value) and "erf at 1.0" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is error
    if isinstance(error, MemoryError):
        assert "memory" in str(caught.value)
    else:
        assert type(error).__name__ in str(caught.value) and "test_boundary.py" in str(caught.value)  # whose code it was


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2)])
def test_what_stops_a_program_passes(broken, error):
    with pytest.raises(type(error)):
        ns.lipschitz(broken(error), torch.zeros(1, 4))


def test_our_own_code_is_reported_as_a_limitation(monkeypatch):
    monkeypatch.setattr("normscope.certify.upper.dense_runs", None)
    with pytest.raises(UnforeseenError, match="please report it"):
        ns.lipschitz(nn.Linear(4, 4), torch.zeros(1, 4))


def test_a_wrong_call_is_a_type_error():
    with pytest.raises(TypeError):
        ns.lipschitz(nn.Linear(2, 2))
    with pytest.raises(TypeError):
        ns.lipschitz(nn.Linear(2, 2), torch.zeros(1, 2), colour="red")


def test_the_boundary_keeps_name_signature_and_documentation():
    assert "wrt" in inspect.signature(ns.lipschitz).parameters and ns.lipschitz.__doc__ and ns.lipschitz.__name__ == "lipschitz"


PUBLIC = [
    ns.audit, ns.doctor, ns.generalization, ns.hessian, ns.lipschitz, ns.symmetries, ns.certify.certify_radius,
    ns.certify.local_brackets, ns.certify.normalizer_ablation, ns.certify.operator_norm, ns.certify.weight_sensitivities,
    ns.curvature.landscape, ns.bounds.compare, ns.bounds.flatness, ns.bounds.margins, ns.bounds.training_cost,
]  # fmt: skip


@pytest.mark.parametrize("guarded", PUBLIC, ids=lambda function: function.__name__)
def test_public_functions_are_inside_the_boundary(guarded):
    if guarded.__code__ is earlier()(lambda: None).__code__:  # which renames arguments and does no more
        guarded = guarded.__wrapped__
    assert guarded.__code__ is boundary(lambda: None).__code__ and callable(guarded.__wrapped__)


def test_a_model_that_raises_is_a_wrong_input():
    def raises(x: Tensor) -> Tensor:
        raise KeyError("no such thing")

    with pytest.raises(ns.InputError, match="no such thing"):
        ns.lipschitz(Function(raises), torch.zeros(1, 2))
