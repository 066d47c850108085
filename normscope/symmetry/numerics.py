"""A model as a function of its parameters, in float64: the model itself, and its traced graph with any ε."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.core.data import Call
from normscope.graph.exporting import in_mode
from normscope.graph.graph import Graph, Node
from normscope.rules.normalizers import normalizer_of

EPSILON_ARGUMENT = {"batch_norm": 7, "instance_norm": 7, "layer_norm": 4, "group_norm": 4, "rms_norm": 3, "standardize": 3}
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
        return copy.deepcopy(self.original).double()

    @cached_property
    def call(self) -> Call:
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
            (self.example.args, self.example.kwargs),
        )
        return Call(args, kwargs)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def outputs(self, parameters: Parameters) -> torch.Tensor:
        """All floating-point outputs of the model in a row; of its graph, where the model cannot compute in float64."""
        return self._run(self.graph, parameters, self.inputs) if self._single else self._of_model(parameters)

    @cached_property
    def _single(self) -> bool:
        """Whether the model holds float32 constants that are no buffers, so that it does not run in float64."""
        try:
            with torch.no_grad():
                self._of_model(self.parameters)
        except RuntimeError:
            return True
        return False

    def _of_model(self, parameters: Parameters) -> torch.Tensor:
        """Random layers draw the same numbers every time, and buffers stay as they are."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        state = {**parameters, **buffers}
        with in_mode(self.model, self.mode), torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
            torch.manual_seed(0)
            result = torch.func.functional_call(self.model, state, self.call.args, self.call.kwargs, tie_weights=True)
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
        return self._run(self._without_epsilon.up_to(same), parameters, self.inputs)

    @staticmethod
    def _run(graph: Graph, parameters: Parameters, inputs: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        values = [parameters[node.path] if node.op == "parameter" else inputs[node] for node in graph.inputs]
        return graph.run(values, torch.float64)[0]

    @cached_property
    def _without_epsilon(self) -> Graph:
        replaced = {}
        for node in self.graph:
            place, normalizer = EPSILON_ARGUMENT.get(node.op), normalizer_of(node)
            if place is not None and normalizer is not None and not normalizer.fixed:
                args = (*node.args[:place], TINY, *node.args[place + 1 :])
                replaced[node] = Node(
                    node.name, node.op, node.target, args, node.kwargs, node.path, node.source, node.shape, node.dtype
                )
        return self.graph.replace(replaced)

    @cached_property
    def inputs(self) -> dict[Node, torch.Tensor]:
        """The example, by the graph's input nodes; what the model draws at random is drawn once."""
        generator = torch.Generator().manual_seed(0)
        given = iter(leaf for leaf in tree_leaves((self.call.args, self.call.kwargs)) if isinstance(leaf, torch.Tensor))
        return {
            node: next(given) if node.op == "input" else torch.rand(node.shape, generator=generator, dtype=torch.float64)
            for node in self.graph.inputs
            if node.op != "parameter"
        }
