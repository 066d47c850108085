"""A model as a function of its parameters, in float64: the model itself, and its traced graph with any ε."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.core.data import Call
from normscope.core.randomness import preserved_random_state, seed_generators
from normscope.core.twins import twin_of
from normscope.core.vector_layout import movable
from normscope.graph.exporting import in_mode
from normscope.graph.graph import Evaluate, Graph, Node, cast
from normscope.rules.normalizers import with_epsilon
from normscope.rules.readings import Normalizer
from normscope.rules.registry import registry

TINY = 1e-24  # an ε that hardly any variance notices, and still above the rounding of a variance that is zero

Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Numerics:
    """Where groups are tried: a model, its traced graph and one example, all in float64 once a number is asked for."""

    original: torch.nn.Module
    graph: Graph
    example: Call
    mode: str

    @cached_property
    def model(self) -> torch.nn.Module:
        """A copy in float64, of the model as it is when it is first needed."""
        return twin_of(self.original).double()

    @cached_property
    def call(self) -> Call:
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
            (self.example.args, self.example.kwargs),
        )
        return Call(args, kwargs)

    @cached_property
    def parameters(self) -> dict[str, torch.Tensor]:
        """As they are when they are first needed; those of whole numbers cannot move and are left out."""
        stored = movable(self.original.named_parameters())
        return {name: cast(parameter.detach(), torch.float64).clone() for name, parameter in stored.items()}

    def outputs(self, parameters: Parameters) -> torch.Tensor:
        """All floating-point outputs of the model in a row; of its graph, where the model cannot compute in float64."""
        return self._run(self.graph, parameters, self.inputs) if self._single else self._of_model(parameters)

    @cached_property
    def unmoved(self) -> torch.Tensor:
        """The outputs at the parameters as they are."""
        with torch.no_grad():
            return self.outputs(self.parameters)

    @cached_property
    def _single(self) -> bool:
        """Whether the model cannot be copied, or does not run in float64: it may hold float32 constants that are not buffers."""
        try:
            with torch.no_grad():
                self._of_model(self.parameters)
        except Exception:  # a model's own code may raise anything
            return True
        return False

    def _of_model(self, parameters: Parameters) -> torch.Tensor:
        """Random layers draw the same numbers every time, and buffers stay as they are.

        Parameters are written to in place, wherever else the model keeps them, and are then as they were.
        """
        with in_mode(self.model, self.mode), torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(parameters.get(name, parameter))
            seed_generators(0)
            result = self.model(*self.call.args, **self.call.kwargs)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        return torch.cat([leaf.reshape(-1) for leaf in leaves])

    def without_epsilon(self, parameters: Parameters, inputs: Mapping[Node, torch.Tensor] | None = None) -> torch.Tensor:
        """The outputs of the traced graph with ε → 0 wherever statistics are the input's own (and without dropout)."""
        return self._run(self._without_epsilon, parameters, inputs or self.inputs)

    def derivative(self, parameters: Parameters, steps: Parameters, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
        """The value of a node on the example, and how it changes along a step of some parameters."""
        point = {name: parameters[name].detach().double() for name in steps}
        tangent = {name: step.detach().double() for name, step in steps.items()}
        return torch.func.jvp(lambda moved: self.value({**parameters, **moved}, node), (point,), (tangent,))

    def value(self, parameters: Parameters, node: Node) -> torch.Tensor:
        """The value of a node on the example, with ε → 0: what an absorber takes back is exact there, as its group is."""
        same = next(other for other in self._without_epsilon if other.name == node.name)
        return self._run(self._without_epsilon.up_to(same), parameters, self.inputs, _solid)

    @staticmethod
    def _run(
        graph: Graph, parameters: Parameters, inputs: Mapping[Node, torch.Tensor], evaluate: Evaluate = Node.evaluate
    ) -> torch.Tensor:
        values = [parameters[node.path] if node.is_parameter else inputs[node] for node in graph.inputs]
        return graph.run(values, torch.float64, evaluate=evaluate)[0]

    @cached_property
    def _without_epsilon(self) -> Graph:
        readings = ((node, registry.reading(node, Normalizer)) for node in self.graph)
        own = [node for node, normalizer in readings if normalizer is not None and not normalizer.fixed]
        return self.graph.replace({node: with_epsilon(node, TINY) for node in own})

    @cached_property
    def inputs(self) -> dict[Node, torch.Tensor]:
        """The example, by the graph's input nodes; what the model draws at random is drawn once."""
        given = iter(leaf for leaf in tree_leaves((self.call.args, self.call.kwargs)) if isinstance(leaf, torch.Tensor))
        with preserved_random_state():
            seed_generators(0)
            return {
                node: next(given) if node.is_input else node.apply()
                for node in self.graph.inputs
                if not node.is_parameter
            }  # fmt: skip


def _solid(node: Node, values: Mapping[Node, Any], dtype: torch.dtype) -> Any:
    """A node evaluated on contiguous tensors: torch has no forward derivative of group norm on others."""
    return node.evaluate(values, dtype, lambda value: value.contiguous() if isinstance(value, torch.Tensor) else value)
