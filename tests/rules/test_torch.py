"""Everything in torch.nn and torch.nn.functional has a bound, a refusal that says why, or a reason not to be looked at."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns
from normscope.certify.upper import upper
from normscope.core.errors import NormscopeError
from normscope.graph.trace import trace
from tests.rules.torch_table import CALLED_BY, FUNCTIONS, MODULES, NO_FUNCTION, NOWHERE, REFUSED


def modules() -> list[str]:
    found = inspect.getmembers(nn, lambda value: isinstance(value, type) and issubclass(value, nn.Module))
    return [name for name, _ in found]


def functions() -> list[str]:
    """What is a function of its own in torch.nn.functional, in-place variants aside."""
    own = {name for name in dir(functional) if callable(getattr(functional, name)) and not name.startswith("_")}
    helpers = {"assert_int_or_pair", "boolean_dispatch"}  # and classes, which begin with a capital letter
    plain = (name for name in own - helpers if not name.endswith("_") and "torch_function" not in name)
    return sorted(name for name in plain if name[0].islower())


@pytest.mark.parametrize("name", modules())
def test_every_module_is_in_a_table(name):
    assert (name in MODULES) != (name in NO_FUNCTION)


@pytest.mark.parametrize("name", functions())
def test_every_function_is_in_a_table(name):
    by_module = CALLED_BY.get(name) or next((other for other in MODULES if other.lower() == name), None)
    assert (by_module in MODULES) or name in FUNCTIONS or name in NO_FUNCTION, name


CASES = {**MODULES, **FUNCTIONS}


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", CASES)
def test_each_has_a_bound_or_says_why_not(name):
    """Globally, or on a small ball; never an exception of torch."""
    model, shape = CASES[name]
    example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    try:
        graph = trace(model.eval(), example)
        found = upper(graph)
        near = found if found.bound.finite else upper(graph, region=ns.Ball(example[0], 1e-4), effort=0.1)
    except NormscopeError as error:
        assert name in REFUSED, error
        assert REFUSED[name] in str(error)
        return
    assert name not in REFUSED
    assert near.bound.finite == (name not in NOWHERE)
    assert found.bound.finite or NOWHERE.get(name, "") in found.certificate.reason
