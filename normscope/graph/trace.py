"""From a module and an example to a `Graph`, through torch.export (non-strict)."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_map_only, tree_unflatten

from normscope.core.data import Call, Example
from normscope.core.errors import ExportError, InputError, NormscopeError, Refusal
from normscope.core.randomness import preserved_random_state, random_states
from normscope.graph.agreement import Agreement, float_inputs
from normscope.graph.canonical import CASTS, FUNCTIONAL_BATCH_NORMS, canonical, is_float, is_identity, strided
from normscope.graph.complex_numbers import Pairs, in_pairs
from normscope.graph.double import in_double
from normscope.graph.expansion import expanded
from normscope.graph.exporting import described, export, module_of, transforms_closed
from normscope.graph.functional import functional, functional_variant
from normscope.graph.graph import Constant, Graph, Node, cast
from normscope.graph.naming import is_view, label, module_path, operation_name, source_line
from normscope.graph.outputs import chosen_output, which_output
from normscope.graph.patterns import recognise
from normscope.graph.rebinding import same_tensors
from normscope.graph.unfollowed import check_size, unfollowed

MODES = ("eval", "train", "batch")
STRIDED = ("as_strided", "as_strided_copy")


@dataclass(frozen=True)
class Unread:
    """A result that no graph holds; whatever reads it is refused."""

    what: str


def trace(
    model: torch.nn.Module | ExportedProgram,
    example: Example,
    mode: str = "eval",
    output: str | int | None = None,
    *,
    ids: bool = False,
) -> Graph:
    """Trace `model` on `example` into a graph.

    mode: "eval" and "train" trace one sample with the model in that mode; "batch" traces the whole example in train
    mode, the batch as one input (what batch statistics need). output: which one, where the model returns several.
    ids: where no input is a floating-point tensor, the integer ones are inputs: a graph for its structure, without a metric, in
    which samples may influence each other.

    The graph is compared with the model as it runs (agreement.py); where they differ, a Refusal says where and why.
    """
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    whole = Call.of(example)
    check_flat(whole)
    call = whole if whole.batch_size == 1 or mode == "batch" else whole.samples(slice(0, 1))
    call = call.copied()  # memory of its own: the model may write to it, or read beyond a view
    structure, ids = ids, ids and not call.floats()
    with in_one_line(model):
        module = module_of(model)
        program = model if isinstance(model, ExportedProgram) and _takes(model, call) else export(module, call, mode)
        graph = Conversion(program, call, mode, output, ids=ids).graph()
        graph.validate()
        inputs, select = partial(float_inputs, ids=ids), partial(chosen_output, wanted=output)
        agreement = Agreement(graph, module, mode, inputs, select, structure=structure)
        return recognise(agreement.whole(whole) if mode == "batch" else agreement.per_sample(whole))


@contextmanager
def in_one_line(model: Any) -> Iterator[None]:
    """No exception of torch or of a model leaves a trace: what is not ours already becomes an error of one line."""
    try:
        with transforms_closed():
            yield
    except NormscopeError:
        raise
    except Exception as error:
        raise ExportError(f"{type(model).__name__} could not be turned into a graph: {described(error)}") from error


def check_flat(call: Call) -> None:
    named = {**{f"argument {i}": value for i, value in enumerate(call.args)}, **call.kwargs}
    for name, value in named.items():
        inner = torch.utils._pytree.tree_leaves(value)
        if not isinstance(value, torch.Tensor) and any(isinstance(leaf, torch.Tensor) for leaf in inner):
            raise InputError(
                f"{name} of the example is a {type(value).__name__} of tensors: every tensor is an argument of its own here; "
                "wrap the model in a module that takes them one by one"
            )


def _takes(program: ExportedProgram, call: Call) -> bool:
    """Whether an exported program has exactly the shapes of the call (one with a dynamic batch has not) and no tensor twice."""
    names = set(program.graph_signature.user_inputs)
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in names and hasattr(node.meta["val"], "shape")]
    return [tuple(shape) for shape in shapes] == [tuple(tensor.shape) for tensor in call.tensors] and not [*same_tensors(program)]


class Conversion:
    """One pass over an exported program: constants folded, identities dropped, arguments completed."""

    def __init__(self, program: ExportedProgram, call: Call, mode: str, output: str | int | None = None, ids: bool = False) -> None:
        program = functional(program, call)
        self.program, self.call, self.mode, self.wanted, self.ids = program, call, mode, output, ids
        stored = reversed(program.state_dict.items())
        self.first_names = {id(tensor): name for name, tensor in stored}  # of tied tensors, as in `named_parameters()`
        self.inputs: list[Node] = []
        self.nodes: list[Node] = []
        self.notes: list[str] = []

    def graph(self) -> Graph:
        values = self._placeholders()
        module = self.program.graph_module
        self._convert(module, values)
        chosen = self._output(values)
        empty = tuple(chosen.shape) if isinstance(chosen, (Node, Constant)) and 0 in chosen.shape else None
        if empty is not None:
            raise InputError(f"the output has no entries (its shape is {empty}): its constant is 0")
        if not isinstance(chosen, Node):
            raise InputError("the output does not depend on any floating-point input: its constant is 0")
        floats = [node.dtype for node in self.inputs if node.dtype is not None and node.dtype.is_floating_point]
        return Graph(
            (*self.inputs, *self.nodes), tuple(self.inputs), chosen, self.mode, self.mode == "batch",
            torch.float64 if torch.float64 in floats else next(iter(floats), torch.float32), tuple(self.notes),
        ).replace({})  # fmt: skip

    def _placeholders(self) -> dict[FxNode, Any]:
        program, signature = self.program, self.program.graph_signature
        given = iter(torch.utils._pytree.tree_leaves((self.call.args, self.call.kwargs)))
        values: dict[FxNode, Any] = {}
        for placeholder, spec in zip(
            (node for node in program.graph.nodes if node.op == "placeholder"), signature.input_specs, strict=True
        ):
            if spec.kind == InputKind.PARAMETER:
                values[placeholder] = self._parameter(placeholder, spec.target)
            elif spec.kind == InputKind.BUFFER:
                store = program.state_dict if spec.target in program.state_dict else program.constants
                values[placeholder] = Constant(store[spec.target].detach(), (spec.target,))
            elif spec.kind == InputKind.USER_INPUT:
                values[placeholder] = self._user_input(placeholder, next(given, None))
            elif isinstance(program.constants[spec.target], torch.Generator):
                raise Refusal("the model draws random numbers from a generator of its own", [str(spec.target)])
            else:
                values[placeholder] = Constant(program.constants[spec.target])
        if not self.inputs:
            raise InputError(
                "no input is a floating-point tensor: ids and masks are not a metric space; "
                "pass embeddings as the example (transformers models take inputs_embeds; on the command line, "
                "--input inputs_embeds=TOKENSxWIDTH)"
            )
        return values

    def _parameter(self, placeholder: FxNode, name: str) -> Any:
        stored = self.program.state_dict[name]
        return Constant(stored.detach(), (self.first_names[id(stored)],), learned=True)

    def _user_input(self, placeholder: FxNode, given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        variable = given.is_floating_point() or self.ids
        if not variable or given.dim() == 0:
            what = "has no batch axis" if variable else "is not floating-point"
            self.notes.append(f"{placeholder.name} {what} and is held fixed at the example's value")
            return Constant(given)
        shape = tuple(placeholder.meta["val"].shape)
        if shape != tuple(given.shape):
            raise InputError(
                f"the exported program takes {placeholder.name} of shape {shape}, the example gives {tuple(given.shape)}"
            )
        node = Node(placeholder.name, "input", shape=shape, dtype=given.dtype)
        self.inputs.append(node)
        return node

    def _convert(self, module: GraphModule, values: dict[FxNode, Any]) -> Any:
        """Convert the nodes of one (sub)graph; returns what it outputs."""
        needed = _needed(module)
        for fx in module.graph.nodes:
            if fx.op == "placeholder" or fx not in needed:
                continue
            if fx.op == "output":
                return tree_map_only(FxNode, values.__getitem__, fx.args[0])
            if fx.op == "get_attr":
                attribute = operator.attrgetter(fx.target)(module)
                values[fx] = Constant(attribute) if isinstance(attribute, torch.Tensor) else attribute
                continue
            args, kwargs = tree_map_only(FxNode, values.__getitem__, (fx.args, fx.kwargs))
            try:
                values[fx] = self._operation(fx, args, dict(kwargs))
            except NormscopeError:
                raise
            except Exception as error:  # whatever torch raises for one operation
                raise unfollowed(fx, values, error) from error
        return None

    def _operation(self, fx: FxNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = operation_name(fx.target)
        if op.startswith("auto_functionalized"):  # torch's wrapper of a custom operation
            op = f"{operation_name(args[0])}, which writes to an argument"
        if op == "getitem" and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        if op == "sym_size" and isinstance(args[0], (Node, Pairs)):
            return args[0].shape[args[1]]
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        self._check(fx, leaves)
        target, args, kwargs = _functional(fx.target, args, kwargs)
        dynamic = any(isinstance(leaf, (Node, Pairs)) for leaf in leaves)
        meta = fx.meta.get("val")
        between_floats = op in CASTS and is_identity(op, args, meta)
        if between_floats or op not in CASTS:
            self._note_casts(fx, leaves, meta if between_floats else None)
        if not dynamic:
            return args[0] if between_floats else self._fold(fx, target, args, kwargs)
        args, kwargs = in_double(target, *tree_map_only(Constant, _dense, (args, kwargs)))
        if is_identity(op, args, meta):
            return args[0]
        make = partial(self._part, fx)
        taken_apart = expanded(op, target, args, kwargs, make)
        taken_apart = in_pairs(op, target, args, kwargs, meta, make) if taken_apart is None else taken_apart
        if taken_apart is not None:
            return taken_apart
        check_size(fx, target, args)
        several = op in FUNCTIONAL_BATCH_NORMS
        meta = meta[0] if several else meta
        if isinstance(meta, torch.Tensor) and not all(isinstance(size, int) for size in meta.shape):
            meta = _concrete(target, args, kwargs)
        if op in STRIDED:
            op, target, args = "as_strided", strided, self._inside(fx, args)
        else:
            op, target, args = canonical(op, target, args, meta)
        if op == "div" and kwargs.get("rounding_mode") is not None:
            op = "rounded_div"  # so that no pattern takes it for a quotient
        if not any(isinstance(leaf, Node) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
            return self._fold(fx, target, args, kwargs)
        tensor = isinstance(meta, torch.Tensor)
        shape, dtype = (tuple(meta.shape), meta.dtype) if tensor else ((), None)
        if 0 in shape and not several:  # what has no entries depends on nothing
            return Constant(torch.zeros(shape, dtype=dtype))
        node = Node(fx.name, op, target, args, kwargs, module_path(fx), source_line(fx), shape, dtype)
        self.nodes.append(node)
        return [node, *[Unread(f"what {node.label} makes of its running statistics")] * 4] if several else node

    def _part(self, fx: FxNode, target: Any, *args: Any, **kwargs: Any) -> Any:
        """One of the operations that an operation was taken apart to."""
        target, args, kwargs = _functional(target, args, kwargs)
        if not any(isinstance(leaf, Node) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
            return self._fold(fx, target, args, kwargs)
        meta = _concrete(target, args, kwargs)
        op, target, args = canonical(operation_name(target), target, args, meta)
        name = f"{fx.name}_part_{len(self.nodes)}"
        node = Node(name, op, target, args, kwargs, module_path(fx), source_line(fx), tuple(meta.shape), meta.dtype)
        self.nodes.append(node)
        return node

    def _check(self, fx: FxNode, leaves: list[Any]) -> None:
        """Refuse what an operation reads or does that a graph of float64 values cannot show."""
        for leaf in leaves:
            if isinstance(leaf, Unread):
                raise Refusal("statistics that move in training are read again", [f"{label(fx)} reads {leaf.what}"])
            if isinstance(leaf, float) and math.isnan(leaf):
                raise InputError(f"{label(fx)} computes with the number NaN: no bound exists; replace it by a number")
        reinterprets = getattr(fx.target, "_overloadname", "") == "dtype" and operation_name(fx.target) == "view"
        if reinterprets and fx.args[0].meta["val"].dtype != fx.meta["val"].dtype:  # type: ignore[union-attr]
            raise Refusal("bits are read as numbers of another type, which is not a function of numbers", [label(fx)])

    def _note_casts(self, fx: FxNode, leaves: list[Any], cast: torch.Tensor | None) -> None:
        """Say once for each type that casts to it, and computing in it as `dtype=` asks, are left out."""
        before = [node.meta["val"].dtype for node in fx.all_input_nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        types = {leaf for leaf in leaves if isinstance(leaf, torch.dtype)} | ({cast.dtype} if cast is not None else set())
        for dtype in sorted(types - set(before[:1]), key=str):
            note = f"casts to {str(dtype).removeprefix('torch.')} are identities here: all arithmetic is in float64"
            if before and dtype.is_floating_point and torch.finfo(dtype).bits < 64 and note not in self.notes:
                self.notes.append(note)

    def _inside(self, fx: FxNode, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of as_strided, if its input is all of the memory that is read, in order."""
        source: torch.Tensor = fx.args[0].meta["val"]  # type: ignore[union-attr]
        whole = source.is_contiguous() and source.storage_offset() == 0
        if not whole or source.untyped_storage().nbytes() != source.numel() * source.element_size():
            raise Refusal("memory is read that is not that of the tensor given", [label(fx)], "Index the tensor itself instead.")
        return (*args[:3], args[3] or 0)

    def _fold(self, fx: FxNode, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Evaluate an operation that does not depend on the input: in float64, on the numbers as they are stored.

        A view computes nothing and stays a view of what is stored, so that a weight is still seen to be the same tensor.
        """
        sources: list[str] = []
        learned: list[bool] = []
        ranks: list[int] = [0]
        exact = is_view(target) and operation_name(target) not in CASTS

        def value(constant: Constant) -> torch.Tensor:
            sources.extend(constant.sources)
            learned.append(constant.learned)
            ranks.append(max(constant.rank, constant.value.dim()))
            return constant.value if exact else constant.stored_double()

        if not exact:
            args, kwargs = in_double(target, args, kwargs, fx.meta.get("val"))
        args, kwargs = tree_map_only(Constant, value, (args, kwargs))
        with torch.no_grad():
            result = _undrawn(fx, target, args, kwargs) if is_random(target) else target(*args, **kwargs)
        names = tuple(dict.fromkeys(sources))
        return tree_map_only(torch.Tensor, lambda tensor: Constant(tensor, names, any(learned), max(ranks)), result)

    def _output(self, values: dict[FxNode, Any]) -> Any:
        names = {fx.name: fx for fx in values}
        flat = [values[names[n]] if n in names else None for n in self.program.graph_signature.user_outputs]
        outputs = tree_unflatten(flat, self.program.call_spec.out_spec)
        self.notes += which_output(outputs, self.wanted)
        return chosen_output(outputs, self.wanted)


def _dense(constant: Constant) -> Constant:
    """What multiplies an input, without a sparse layout; the same numbers."""
    return constant if constant.value.layout == torch.strided else replace(constant, value=constant.value.to_dense())


def is_random(target: Any) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _undrawn(fx: FxNode, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation that may draw random numbers but, like attention or dropout in eval mode, draws none here."""
    with preserved_random_state():
        states = random_states()
        result = target(*args, **kwargs)
        if not all(map(torch.equal, states, random_states())):
            raise Refusal("the model draws random numbers", [label(fx)])
    return result


def _functional(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The out-of-place variant of `target`, with every argument of its signature filled in."""
    if not isinstance(target, torch._ops.OpOverload):
        return target, args, kwargs
    if target._schema.is_mutable:
        target = functional_variant(target) or target
    full: list[Any] = []
    named: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if argument.kwarg_only:
            if argument.name in kwargs:
                named[argument.name] = kwargs[argument.name]
        elif position < len(args):
            full.append(args[position])
        else:
            full.append(kwargs.get(argument.name, argument.default_value))
    return target, tuple(full), named


def _concrete(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A result whose shape torch.export does not say: of zeros in float64, for its shape and type."""
    first = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Node))
    zeros = tree_map_only(Node, lambda node: cast(torch.zeros(node.shape, dtype=node.dtype), torch.float64), (args, kwargs))
    args, kwargs = tree_map_only(Constant, lambda constant: constant.stored_double(), zeros)
    with torch.no_grad():
        return cast(target(*args, **kwargs), first.dtype if is_float(first) else torch.float64)


def _needed(module: GraphModule) -> set[FxNode]:
    """The nodes that the output depends on."""
    needed: set[FxNode] = set()
    stack = [next(node for node in module.graph.nodes if node.op == "output")]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed
