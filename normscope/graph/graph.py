"""A small typed graph: what a traced model computes, one node an operation, with its module path and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from normscope.core.errors import EvaluationError, InputError, first_line

Shape = tuple[int, ...]
Read = Callable[[Any], Any]  # what becomes of a value when it is read
SWITCHES = ("dropout", "dropout_p", "train", "training")  # arguments that, where they are 0, leave no randomness
Evaluate = Callable[["Node", "Mapping[Node, Any]", torch.dtype], Any]


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that does not depend on the input; `sources` are the parameters and buffers it was made from.

    learned: whether a parameter is among them (an infinite mask is a buffer, an infinite weight is a mistake).
    rank: the most axes that one of them has; a row of a matrix is still part of a matrix.
    """

    value: torch.Tensor
    sources: tuple[str, ...] = ()
    learned: bool = False
    rank: int = 0

    def __repr__(self) -> str:
        return f"Constant({', '.join(self.sources) or 'literal'}: {tuple(self.value.shape)})"

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape)

    def double(self) -> torch.Tensor:
        return self.value.detach().to(torch.float64)

    def stored_double(self) -> torch.Tensor:
        """In float64, or in complex numbers of it; integers and truth values as they are."""
        return cast(self.value.detach(), torch.float64)


@dataclass(eq=False)
class Node:
    """One operation. `op` is its family's name (`conv2d`, `batch_norm`, …), the key of its rule.

    `args` and `kwargs` hold nodes, constants and plain values, in the order of torch's own signature.
    """

    name: str
    op: str
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    source: str = ""  # "file.py:12", where known
    shape: Shape = ()
    dtype: torch.dtype | None = None
    inputs: tuple[Node, ...] = field(init=False)  # the tensors that depend on the input, in argument order

    def __post_init__(self) -> None:
        self.inputs = tuple(leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Node))

    @property
    def is_input(self) -> bool:
        """Whether it is one of the model's inputs."""
        return self.op == "input"

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, called `path`, of a graph that is a function of its parameters too."""
        return self.op == "parameter"

    @property
    def is_drawn(self) -> bool:
        """Whether it is a random tensor that such a graph takes as an input."""
        return self.op == "random"

    @property
    def draws(self) -> bool:
        """Whether torch says that it draws random numbers; recurrent layers, say, do so only with dropout and in train mode."""
        if torch.Tag.nondeterministic_seeded not in getattr(self.target, "tags", ()):
            return False
        arguments = enumerate(self.target._schema.arguments)  # type: ignore[union-attr]
        given = [self.argument(i, own.name, own.default_value) for i, own in arguments if own.name in SWITCHES]
        return all(value is None or bool(value) for value in given)

    @property
    def is_foreign(self) -> bool:
        """Whether it is an operation of another library than torch."""
        return "." in self.op

    @property
    def constants(self) -> tuple[Constant, ...]:
        return tuple(leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Constant))

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for constant in self.constants for name in constant.sources))

    @property
    def input(self) -> Node:
        """The only input of a one-input operation."""
        if len(self.inputs) != 1:
            raise ValueError(f"{self.label} has {len(self.inputs)} inputs that depend on the model's input")
        return self.inputs[0]

    @property
    def label(self) -> str:
        """How a message names this node: operation, then module path, then source line."""
        place = " ".join(filter(None, [f"at {self.path}" if self.path else "", f"({self.source})" if self.source else ""]))
        return f"{self.op} {place}".strip()

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at `position` or called `name`."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def evaluate(self, values: Mapping[Node, Any], dtype: torch.dtype, read: Read = lambda value: value) -> Any:
        """This node's value from those of its inputs, in `dtype`: floating-point constants and `dtype=` arguments become that.

        `read` is applied to every tensor that the operation reads.
        """

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                return read(values[leaf])
            if isinstance(leaf, Constant):
                return read(cast(leaf.value, dtype))
            if isinstance(leaf, torch.dtype):
                return cast_type(leaf, dtype)
            if isinstance(leaf, (list, tuple)) and any(isinstance(item, (Node, Constant)) for item in leaf):
                return type(leaf)(value(item) for item in leaf)
            return leaf

        assert self.target is not None, f"{self.name} is an input"
        try:
            return self.target(*map(value, self.args), **{name: value(leaf) for name, leaf in self.kwargs.items()})
        except MemoryError:
            raise
        except Exception as error:  # of torch, of functorch, or of an operation of the user's own
            said = f"{self.label}: {type(error).__name__}: {first_line(error)}"
            raise EvaluationError("an operation cannot be evaluated", [said]) from error

    def apply(self, *inputs: torch.Tensor, dtype: torch.dtype = torch.float64) -> Any:
        """This operation alone, on given values of its (distinct) inputs."""
        return self.evaluate(dict(zip(dict.fromkeys(self.inputs), inputs, strict=True)), dtype)

    def __repr__(self) -> str:
        return f"Node({self.name}: {self.label} {self.shape})"


@dataclass(eq=False)
class Graph:
    """Nodes in topological order, from `inputs` to `output`. `mode` is the mode in which the model was traced.

    Axis 0 of every input is a batch of one sample, unless `whole_batch`, where the batch is one single input. absorbed: the
    parameters and buffers of which some use is now a plain number of a recognised pattern.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    output: Node
    mode: str = "eval"
    whole_batch: bool = False
    dtype: torch.dtype = torch.float32  # the dtype the model computes in
    notes: tuple[str, ...] = ()
    absorbed: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def users(self) -> dict[Node, list[Node]]:
        """For every node, the nodes that read it (twice if they read it twice)."""
        readers: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for source in node.inputs:
                readers[source].append(node)
        return readers

    @property
    def compute_dtype(self) -> torch.dtype:
        """Where searches run: the model's own precision, but never below float32."""
        return self.dtype if self.dtype == torch.float64 else torch.float32

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        dtype: torch.dtype,
        capture: Iterable[Node] = (),
        evaluate: Evaluate = Node.evaluate,
    ) -> tuple[torch.Tensor, dict[Node, torch.Tensor]]:
        """The output for one input, computed in `dtype` throughout, and the values of the nodes in `capture`.

        Values are dropped after their last use. evaluate: how each node is computed, if not as it stands (graph/perturbing.py).
        """
        wanted = set(capture)
        last_reader = {source: node for node in self.nodes for source in node.inputs}
        read = {*last_reader, *wanted, self.output}  # of a model's parameters, some inputs are read by no node
        given = zip(self.inputs, inputs, strict=True)
        values: dict[Node, Any] = {node: cast(value, dtype) if node in read else value for node, value in given}
        captured = {node: values[node] for node in self.inputs if node in wanted}
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode derivative
            for node in self.nodes:
                if node in values:
                    continue
                value = values[node] = evaluate(node, values, dtype)
                if node in wanted:
                    captured[node] = value
                for source in set(node.inputs):
                    if last_reader[source] is node and source is not self.output:
                        del values[source]
        return values[self.output], captured

    def batched(self, dtype: torch.dtype | None = None) -> _OverBatch:
        """The traced function on a batch: (batch, …) tensors in, (batch, …) out, one sample independent of the next."""
        compute = dtype or self.compute_dtype

        def one(*sample: torch.Tensor) -> torch.Tensor:
            inputs = sample if self.whole_batch else tuple(value.unsqueeze(0) for value in sample)
            return self.run(inputs, compute)[0]

        return _OverBatch(one)

    def batched_capture(self, nodes: Sequence[Node], dtype: torch.dtype | None = None) -> _OverBatch:
        """The values of some nodes on a batch, each (batch, …)."""
        compute = dtype or self.compute_dtype

        def one(*sample: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs = sample if self.whole_batch else tuple(value.unsqueeze(0) for value in sample)
            captured = self.run(inputs, compute, capture=nodes)[1]
            return tuple(captured[node] for node in nodes)

        return _OverBatch(one)

    def validate(self) -> None:
        """Raise unless every node reads only nodes before it and the output is among them."""
        seen: set[Node] = set()
        for node in self.nodes:
            unknown = [source.name for source in node.inputs if source not in seen]
            if unknown:
                raise AssertionError(f"{node.name} reads {', '.join(unknown)} before they are computed")
            seen.add(node)
        if self.output not in seen:
            raise AssertionError("the output is not a node of the graph")

    def replace(self, replacements: Mapping[Node, Node]) -> Graph:
        """This graph with some nodes replaced by others that read the same or fewer nodes; dead nodes are dropped."""
        renewed: dict[Node, Node] = {}

        def renew(node: Node) -> Node:
            stack = [node]
            while stack:  # depth first without recursion: a chain may be thousands of nodes long
                top = stack[-1]
                chosen = replacements.get(top, top)
                waiting = [source for source in chosen.inputs if source not in renewed]
                if chosen is not top and chosen in self._members:
                    waiting = [chosen] if chosen not in renewed else []
                if waiting:
                    stack.extend(waiting)
                    continue
                stack.pop()
                if top in renewed:
                    continue
                if chosen is not top and chosen in self._members:
                    renewed[top] = renewed[chosen]
                elif all(renewed[source] is source for source in chosen.inputs):
                    renewed[top] = chosen
                else:
                    args, kwargs = tree_map_only(Node, renewed.__getitem__, (chosen.args, chosen.kwargs))
                    renewed[top] = Node(
                        chosen.name, chosen.op, chosen.target, args, kwargs, chosen.path, chosen.source, chosen.shape, chosen.dtype
                    )
            return renewed[node]

        for source in self.inputs:
            renewed[source] = source
        output = renew(self.output)
        return Graph(
            (*self.inputs, *_ordered(output, self.inputs)),
            self.inputs, output, self.mode, self.whole_batch, self.dtype, self.notes, self.absorbed,
        )  # fmt: skip

    def up_to(self, node: Node) -> Graph:
        """The part of this graph that computes one of its nodes."""
        nodes = (*self.inputs, *_ordered(node, self.inputs))
        return Graph(nodes, self.inputs, node, self.mode, self.whole_batch, self.dtype, self.notes, self.absorbed)

    @property
    def _members(self) -> set[Node]:
        if not hasattr(self, "_member_set"):
            self._member_set = set(self.nodes)
        return self._member_set


def cast_type(own: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """The wanted type for a floating-point one, complex numbers of it for a complex one, any other as it is."""
    return wanted if own.is_floating_point else wanted.to_complex() if own.is_complex else own


def cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` in `dtype` if it is a floating-point or complex tensor, else as it is."""
    return value.to(cast_type(value.dtype, dtype))


class _OverBatch:
    """A function of one sample on a batch: by vmap, or one by one where an operation has no batching rule."""

    def __init__(self, one: Callable[..., Any]) -> None:
        self.one, self.mapped = one, torch.vmap(one)
        self.one_by_one = False

    def __call__(self, *batch: torch.Tensor) -> Any:
        if not self.one_by_one:
            try:
                with _without_slow_vmap():
                    return self.mapped(*batch)
            except (RuntimeError, NotImplementedError):
                pass
        results = [self.one(*sample) for sample in zip(*batch, strict=True)]
        self.one_by_one = True  # only now: a derivative that no sample has is no reason to give up vmap elsewhere
        if isinstance(results[0], tuple):
            return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return torch.stack(results)


@contextmanager
def _without_slow_vmap() -> Iterator[None]:
    """Make vmap raise, instead of warn and loop, where an operation has no batching rule."""
    enabled = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(enabled)


def _ordered(output: Node, inputs: Sequence[Node]) -> list[Node]:
    """The nodes that `output` needs, each after those it reads."""
    order: list[Node] = []
    done = set(inputs)
    stack = [output]
    while stack:
        top = stack[-1]
        waiting = [source for source in top.inputs if source not in done]
        if waiting:
            stack.extend(reversed(waiting))
            continue
        stack.pop()
        if top not in done:
            done.add(top)
            order.append(top)
    return order


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _leaves(item)
    else:
        yield tree


def check_finite(graph: Graph) -> None:
    """Refuse a model with a NaN or infinite parameter or buffer."""
    for node in graph:
        for constant in node.constants:
            if not constant.sources or not constant.value.is_floating_point():
                continue
            value = constant.value
            if bool(value.isnan().any()) or (constant.learned and not bool(value.isfinite().all())):
                raise InputError(
                    f"{', '.join(constant.sources)} holds NaN or infinite values ({node.label}): no bound exists; "
                    "load weights from before training diverged"
                )
