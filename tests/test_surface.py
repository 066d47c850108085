"""One vocabulary: what public functions call their parameters, how they are passed, and that calls of the last release work."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch
from torch import nn

import normscope as ns
from docs.tools.docstrings import sections
from docs.tools.surface import public
from normscope.core.progress import Meter, reporting, shown

FUNCTIONS = {
    f"{place}.{name}": value
    for place, module in {"ns": ns, **{f"ns.{name}": value for name, value in public(ns) if inspect.ismodule(value)}}.items()
    for name, value in public(module)
    if inspect.isroutine(value)
}
POSITIONAL = {  # what may be passed without its name: the subjects of a function, and nothing that is an option
    "ns.audit": "model, example",
    "ns.lipschitz": "model, example",
    "ns.symmetries": "model, example",
    "ns.doctor": "model, example",
    "ns.fold": "model, example",
    "ns.hessian": "model, loss, data",
    "ns.generalization": "model, loss, data",
    "ns.recalibrate": "model, data",
    "ns.watch": "model, optimizer",
    "ns.load_run": "path",
    "ns.checkpoint": "path",
    "ns.diff": "a, b",
    "ns.bounds.compare": "models, loss, data",
    "ns.bounds.flatness": "model, data",
    "ns.bounds.generalization": "model, loss, data",
    "ns.bounds.margins": "model, data",
    "ns.bounds.training_cost": "model, example",
    "ns.certify.certify_radius": "model, example, data",
    "ns.certify.local_brackets": "model, example, data",
    "ns.certify.normalizer_ablation": "model, example",
    "ns.certify.operator_norm": "weight_or_module, input_shape",
    "ns.certify.weight_sensitivities": "model, example",
    "ns.claims.run_claims": "select",
    "ns.curvature.hessian": "model, loss, data",
    "ns.curvature.landscape": "model, loss, data",
    "ns.geometry.canonical": "symmetries, parameters",
    "ns.geometry.effective_learning_rate": "norms, lr",
    "ns.geometry.gradient_descent": "model, loss, batch",
    "ns.geometry.gradient_flow": "model, loss, batch",
    "ns.geometry.horizontal": "symmetries, parameters, vector",
    "ns.lab.load_experiment": "name",
    "ns.lab.run_experiment": "name",
    "ns.optim.spectral_cap": "model, limit",
    "ns.rules.register": "op, rule",
}
ANNOTATED = {  # one name for one thing
    "data": ("Data", "Data | None"),
    "region": ("Region | None",),
    "progress": ("Progress",),
    "generator": ("torch.Generator | None",),
    "select": ("Sequence[str]", "Sequence[str] | None"),
    "seed": ("int",),  # where the same numbers are drawn again: on every pass, for every model
}
FORMER = ("report", "only", "batches", "train", "callback", "rng", "loader")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_are_passed_by_name(name):
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    assert ", ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == POSITIONAL[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_name_for_one_thing(name):
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        assert parameter.name not in FORMER
        assert parameter.annotation in ANNOTATED.get(parameter.name, (parameter.annotation,))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_mode_than_eval_is_said_in_the_first_line(name):
    mode = inspect.signature(FUNCTIONS[name]).parameters.get("mode")
    first = (inspect.getdoc(FUNCTIONS[name]) or "").splitlines()[0]
    assert mode is None or mode.default == "eval" or f"by default in {mode.default} mode" in first


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_has_its_line_in_the_reference(name):
    """What the docs' tool makes of a docstring names each option; subjects, such as the model, are the first line's."""
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    options = {parameter.name for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY}
    page = sections(inspect.getdoc(FUNCTIONS[name]) or "", parameters.keys(), "Args")
    assert not options - set(re.findall(r"^    (\w+): ", page, re.MULTILINE))


# calls of the last release ---------------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
X, Y = torch.eye(3), torch.arange(3) % 2
LOSS = nn.functional.cross_entropy
ONE = ["held-out Hoeffding"]
EARLIER = {  # the old call, the new one
    "a region": (lambda: ns.lipschitz(MODEL, X, ns.Ball(X[0], 0.1)), lambda: ns.lipschitz(MODEL, X, region=ns.Ball(X[0], 0.1))),
    "a mode": (lambda: ns.symmetries(MODEL, X, "eval"), lambda: ns.symmetries(MODEL, X, mode="eval")),
    "only": (
        lambda: ns.generalization(MODEL, "ramp", (X, Y), (X, Y), 0.1, only=ONE),
        lambda: ns.generalization(MODEL, "ramp", (X, Y), held_out=(X, Y), delta=0.1, select=ONE),
    ),
    "train": (
        lambda: ns.generalization(MODEL, "ramp", train=(X, Y), held_out=(X, Y), select=ONE),
        lambda: ns.generalization(MODEL, "ramp", (X, Y), held_out=(X, Y), select=ONE),
    ),
    "batches": (
        lambda: ns.curvature.landscape(MODEL, LOSS, batches=(X, Y), mode="eval"),
        lambda: ns.curvature.landscape(MODEL, LOSS, (X, Y), mode="eval"),
    ),
    "report": (lambda: ns.audit(MODEL, X, report=print_nothing), lambda: ns.audit(MODEL, X, progress=print_nothing)),
    "progress of one number": (
        lambda: ns.certify.local_brackets(MODEL, X, X, radius=0.1, progress=lambda done: None),
        lambda: ns.certify.local_brackets(MODEL, X, X, radius=0.1),
    ),
}


def print_nothing(what: str, done: int, total: int) -> None:
    assert isinstance(what, str) and done >= 0 and total >= 0


@pytest.mark.parametrize("name", EARLIER)
def test_calls_of_the_last_release_work_and_warn(name):
    old, new = EARLIER[name]
    with pytest.warns(DeprecationWarning, match="until the next release") as caught:
        found = old()
    assert caught[0].filename == __file__ or "progress is called" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert str(found) == str(new())


def test_a_value_is_not_given_twice():
    with pytest.raises(TypeError, match="two values for region"):
        ns.lipschitz(MODEL, X, None, region=None)
    with pytest.raises(TypeError, match="positional"):
        ns.symmetries(MODEL, X, "eval", 3)


# progress --------------------------------------------------------------------------------------------------------------


def test_a_meter_tells_what_is_done():
    told: list[tuple[str, float, float]] = []
    with shown("parts", lambda *all: told.append(all), 3) as meter:
        meter.at("first")
        meter.advance()
        meter.advance(2)
    assert told == [("first", 0, 3), ("parts", 1, 3), ("parts", 3, 3)]


def test_callbacks_are_called_with_what_they_take():
    told: list[object] = []
    for given, expected in ((lambda done: told.append(done), 2), (lambda done, total: told.append((done, total)), (2, 5))):
        with pytest.warns(DeprecationWarning):
            report = reporting(given)
        assert report is not None
        report("parts", 2, 5)
        assert told[-1] == expected
    assert reporting(told.append) is not None and reporting(None) is None
    for wrong in (5, "bar", lambda: None, lambda a, b, c, d: None):
        with pytest.raises(ns.InputError, match="progress must"):
            reporting(wrong)
    assert Meter("parts", None).report is None
