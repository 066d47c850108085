"""Which arguments are inputs of a graph, and which of a model's outputs is its own."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import normscope as ns
from normscope.core.errors import InputError
from normscope.graph.trace import trace
from tests.cases import Function, randn
from tests.graph.test_trace import operations


class Keywords(nn.Module):
    def forward(self, first: Tensor, second: Tensor | None = None, weight: float = 1.0) -> Tensor:
        return first * weight if second is None else first.sum(1, keepdim=True) * weight + second


def test_keyword_arguments_in_any_order():
    model, short, long = Keywords(), randn(1, 2), randn(1, 3)
    for example in ({"first": short, "second": long}, {"second": long, "first": short}, (short, long)):
        graph = trace(model, example)
        shapes = {node.shape for node in graph.inputs}
        assert shapes == {(1, 2), (1, 3)}
        found = ns.lipschitz(model, example)
        assert sorted(tuple(part.shape) for part in found.witness.first) == [(1, 2), (1, 3)]
    assert float(ns.lipschitz(model, {"weight": 3.0, "first": short}).upper) == pytest.approx(3)


def test_arguments_of_equal_shape_are_not_swapped():
    model = Function(lambda a, b: 5 * a + 0 * b)
    found = ns.lipschitz(model, {"b": randn(1, 2), "a": randn(1, 2)})
    graph = trace(model, {"b": randn(1, 2), "a": randn(1, 2)})
    names = [node.name for node in graph.inputs]
    moved = {name: float((x - y).norm()) for name, x, y in zip(names, *found.witness, strict=True)}
    assert moved["kwargs_a" if "kwargs_a" in moved else "a"] > 10 * moved["kwargs_b" if "kwargs_b" in moved else "b"]


class Several(nn.Module):
    def forward(self, x: Tensor) -> dict:
        return {"logits": 2 * x, "parts": (3 * x, x.argmax(1)), "hidden": [4 * x]}


@pytest.mark.parametrize("output, expected", [("logits", 2), (0, 2), (1, 3), (2, 4), ("parts.0", 3)])
def test_output_chooses(output, expected):
    assert float(ns.lipschitz(Several(), randn(1, 3), output=output).upper) == pytest.approx(expected)


@pytest.mark.parametrize("output", ["nothing", 7])
def test_output_must_be_chosen_from_what_there_is(output):
    with pytest.raises(InputError, match="logits"):
        trace(Several(), randn(1, 3), output=output)


class Named(OrderedDict):
    """As diffusers' outputs: torch knows how to take it apart, but not the names of its parts."""


torch.utils._pytree.register_pytree_node(
    Named, lambda found: (list(found.values()), list(found)), lambda values, names: Named(zip(names, values, strict=True))
)


@pytest.mark.parametrize(
    "returned, main, others",
    [
        (lambda x: {"last_hidden_state": 2 * x, "pooler_output": x}, "last_hidden_state", "pooler_output"),
        (lambda x: {"hidden": x, "logits": 2 * x, "last_hidden_state": x}, "logits", "hidden, last_hidden_state"),
        (lambda x: Named(extra=x, logits=2 * x), "logits", "extra"),
    ],
)
def test_of_several_outputs_the_main_one_is_taken_and_said(returned, main, others):
    found = ns.lipschitz(Function(returned), randn(1, 3))
    assert float(found.upper) == pytest.approx(2)
    assert f"the output is {main}; output= chooses another: {others}" in found.notes


def test_without_a_main_output_one_must_be_chosen():
    with pytest.raises(InputError, match=r"2 floating-point tensors \(mean, scale\): choose one with output="):
        trace(Function(lambda x: {"mean": x, "scale": 2 * x}), randn(1, 3))


@pytest.mark.parametrize("wrt, expected", [("input", 13**0.5), ("input:a", 2), ("input:b", 3)])
def test_of_several_inputs_all_count_unless_one_is_named(wrt, expected):
    """A constant for two inputs together is at most √(2² + 3²)."""
    example = {"a": randn(2, 4), "b": randn(2, 4)}
    found = ns.lipschitz(TwoInputs(), example, wrt=wrt)
    assert float(found.lower) <= expected * (1 + 1e-6) and float(found.upper) >= expected * (1 - 1e-9)
    assert float(found.upper) <= (5 if wrt == "input" else expected) * (1 + 1e-6)
    assert any("with respect to" in note and ("alone" in note) == (":" in wrt) for note in found.notes)


def test_an_input_held_fixed_is_that_of_the_first_sample():
    example = {"a": randn(2, 4), "b": randn(2, 4)}
    product = Function(lambda a, b: a * b.sin())
    name = trace(product, example).inputs[0].name
    bracket = ns.lipschitz(product, example, wrt=f"input:{name}")
    assert float(bracket.upper) == pytest.approx(float(example["b"][0].sin().abs().max()), rel=1e-6)


def test_an_input_that_does_not_exist_is_refused_by_name():
    with pytest.raises(InputError, match=r'no input "c".*one of a, b'):
        ns.lipschitz(TwoInputs(), {"a": randn(1, 4), "b": randn(1, 4)}, wrt="input:c")


class TwoInputs(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return 2 * a + 3 * b


def test_integer_inputs_are_held_fixed_with_a_note():
    model = Function(lambda x, ids: x + functional.embedding(ids, torch.ones(5, 3)))
    graph = trace(model, (randn(1, 3), torch.tensor([2])))
    assert len(graph.inputs) == 1 and any("fixed" in note for note in graph.notes)
    assert graph.notes == tuple(ns.audit(model, (randn(1, 3), torch.tensor([2]))).notes[: len(graph.notes)])


def test_ids_are_inputs_of_a_graph_for_its_structure():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    assert operations(trace(model, torch.tensor([[2, 0]]), ids=True)) == ["embedding", "layer_norm", "linear"]
    with pytest.raises(InputError, match="metric"):
        trace(model, torch.tensor([[2, 0]]))


class Cached(nn.Module):
    """Returns an object that is no tensor, as models with a key-value cache do."""

    class Cache:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    def forward(self, x: Tensor) -> dict:
        return {"logits": 2 * x, "cache": self.Cache(x), "loss": None, "size": 3}


def test_objects_that_are_no_tensors_are_no_outputs():
    model = Cached()
    assert float(ns.lipschitz(model, randn(1, 3)).upper) == pytest.approx(2)
    assert isinstance(model(randn(1, 3))["cache"], Cached.Cache) and "forward" not in vars(model)
