"""From a module and an example to a `Graph`, through torch.export (non-strict)."""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only, tree_unflatten

from normscope.core.data import Call, Example
from normscope.core.errors import InputError, Refusal
from normscope.core.randomness import preserved_random_state, random_states
from normscope.graph.canonical import FUNCTIONAL_BATCH_NORMS, canonical, is_float, is_identity
from normscope.graph.exporting import export, module_of
from normscope.graph.graph import Constant, Graph, Node
from normscope.graph.patterns import recognise

MODES = ("eval", "train", "batch")

WRAPPERS = {"wrap_with_set_grad_enabled", "wrap_with_autocast"}


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
    ids: where no input is a floating-point tensor, the integer ones are inputs: a graph for its structure, without a metric.
    """
    if mode not in MODES:
        raise InputError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    call = Call.of(example)
    size = call.batch_size
    if mode != "batch" and size > 1:
        call = call.samples(slice(0, 1))
    program = model if isinstance(model, ExportedProgram) and _takes(model, call) else export(module_of(model), call, mode)
    graph = Conversion(program, call, mode, output, ids=ids and not call.floats()).graph()
    graph.validate()
    return recognise(graph)


def _takes(program: ExportedProgram, call: Call) -> bool:
    """Whether an exported program has exactly the shapes of the call (one with a dynamic batch has not)."""
    names = set(program.graph_signature.user_inputs)
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in names and hasattr(node.meta["val"], "shape")]
    return [tuple(shape) for shape in shapes] == [tuple(tensor.shape) for tensor in call.tensors]


class Conversion:
    """One pass over an exported program: constants folded, identities dropped, arguments completed."""

    def __init__(self, program: ExportedProgram, call: Call, mode: str, output: str | int | None = None, ids: bool = False) -> None:
        if _mutates_shared(program.graph):
            program = program.run_decompositions({})
        self.program, self.call, self.mode, self.wanted, self.ids = program, call, mode, output, ids
        self.inputs: list[Node] = []
        self.nodes: list[Node] = []
        self.notes: list[str] = []

    def graph(self) -> Graph:
        values = self._placeholders()
        module = self.program.graph_module
        self._convert(module, values)
        chosen = self._output(values)
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
            else:
                values[placeholder] = Constant(program.constants[spec.target])
        if not self.inputs:
            raise InputError(
                "no input is a floating-point tensor: ids and masks are not a metric space; "
                "pass embeddings (for transformers models, inputs_embeds) as the example"
            )
        return values

    def _parameter(self, placeholder: FxNode, name: str) -> Any:
        return Constant(self.program.state_dict[name].detach(), (name,), learned=True)

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
            values[fx] = self._operation(fx, args, dict(kwargs))
        return None

    def _operation(self, fx: FxNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = operation_name(fx.target)
        if op in WRAPPERS:  # a no_grad or autocast block: the same function, inlined
            body = next(i for i, arg in enumerate(args) if isinstance(arg, GraphModule))
            inner = [node for node in args[body].graph.nodes if node.op == "placeholder"]
            return self._convert(args[body], dict(zip(inner, args[body + 1 :], strict=False)))
        if op == "getitem" and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        target, args, kwargs = _functional(fx.target, args, kwargs)
        dynamic = any(isinstance(leaf, Node) for leaf in torch.utils._pytree.tree_leaves((args, kwargs)))
        if not dynamic:
            return self._fold(fx, target, args, kwargs)
        meta = fx.meta.get("val")
        if is_identity(op, args, meta):
            return args[0]
        several = op in FUNCTIONAL_BATCH_NORMS
        meta = meta[0] if several else meta
        op, target, args = canonical(op, target, args, meta)
        tensor = isinstance(meta, torch.Tensor)
        shape, dtype = (tuple(meta.shape), meta.dtype) if tensor else ((), None)
        node = Node(fx.name, op, target, args, kwargs, _module_path(fx), _source_line(fx), shape, dtype)
        self.nodes.append(node)
        return [node, None, None, None, None] if several else node

    def _fold(self, fx: FxNode, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Evaluate an operation that does not depend on the input, in the model's own precision."""
        sources: list[str] = []
        learned: list[bool] = []

        def value(constant: Constant) -> torch.Tensor:
            sources.extend(constant.sources)
            learned.append(constant.learned)
            schema = getattr(target, "_schema", None)
            return constant.value.clone() if schema is not None and schema.is_mutable else constant.value

        args, kwargs = tree_map_only(Constant, value, (args, kwargs))
        with torch.no_grad():
            result = _undrawn(fx, target, args, kwargs) if is_random(target) else target(*args, **kwargs)
        names = tuple(dict.fromkeys(sources))
        return tree_map_only(torch.Tensor, lambda tensor: Constant(tensor, names, any(learned)), result)

    def _output(self, values: dict[FxNode, Any]) -> Any:
        names = {fx.name: fx for fx in values}
        flat = [values[names[n]] if n in names else None for n in self.program.graph_signature.user_outputs]
        return chosen_output(tree_unflatten(flat, self.program.call_spec.out_spec), self.wanted)


def chosen_output(outputs: Any, wanted: str | int | None) -> Any:
    """The only floating-point leaf of what a model returns, or the one of that name or position."""
    leaves = [(_name(path), leaf) for path, leaf in tree_flatten_with_path(outputs)[0]]
    floats = [(name, leaf) for name, leaf in leaves if is_float(leaf)]
    if wanted is None:
        if len(floats) == 1:
            return floats[0][1]
        listed = ", ".join(name or "0" for name, _ in floats) or "none"
        raise InputError(f"the model returns {len(floats)} floating-point tensors ({listed}): choose one with output=")
    for position, (name, leaf) in enumerate(floats):
        if wanted in (name, position) or str(wanted) == name:
            return leaf
    raise InputError(f"no output {wanted!r}: choose from {', '.join(name or '0' for name, _ in floats) or 'none'}")


def _name(path: Any) -> str:
    """['parts'][0] → parts.0"""
    return keystr(path).replace("'", "").replace("][", ".").strip("[].")


def is_random(target: Any) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _undrawn(fx: FxNode, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation that may draw random numbers but, like attention or dropout in eval mode, draws none here."""
    with preserved_random_state():
        states = random_states()
        result = target(*args, **kwargs)
        if not all(map(torch.equal, states, random_states())):
            raise Refusal("the model draws random numbers", [f"{operation_name(target)} at {_module_path(fx) or 'the top level'}"])
    return result


def operation_name(target: Any) -> str:
    """`torch.ops.aten.relu_.default` → "relu"; operations of other libraries keep their namespace: "mylib.op"."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target.namespace, target._schema.name.split("::")[1]
    elif isinstance(target, torch._ops.OpOverloadPacket):
        namespace, name = target._qualified_op_name.split("::")
    else:
        return str(getattr(target, "__name__", None) or getattr(target, "_name", target))
    if name.endswith("_") and not name.startswith("_"):
        name = name[:-1]
    return name if namespace == "aten" else f"{namespace}.{name}"


def _functional(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The out-of-place variant of `target`, with every argument of its signature filled in."""
    if not isinstance(target, torch._ops.OpOverload):
        return target, args, kwargs
    name = target._schema.name.split("::")[1]
    if name.endswith("_") and not name.startswith("_") and target.namespace == "aten":
        packet = getattr(torch.ops.aten, name[:-1], None)
        target = getattr(packet, target._overloadname, target)
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


def _mutates_shared(graph: torch.fx.Graph) -> bool:
    """Whether an in-place operation changes a tensor that something else also reads (then functionalize)."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable or not node.args:
            continue
        changed = node.args[0]
        if operation_name(node.target) == "batch_norm" or not isinstance(changed, FxNode):
            continue
        if changed.op == "placeholder" and not node.users:
            continue  # a counter such as num_batches_tracked
        while len(changed.users) == 1 and _is_view(changed) and isinstance(changed.args[0], FxNode):
            changed = changed.args[0]  # what is viewed is changed, too
        if len(changed.users) > 1 or changed.op == "placeholder":
            return True
    return False


def _is_view(node: FxNode) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)


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


def _module_path(fx: FxNode) -> str:
    stack = fx.meta.get("nn_module_stack")
    return re.sub(r"@\d+$", "", list(stack.values())[-1][0]) if stack else ""


def _source_line(fx: FxNode) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', fx.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if "/torch/nn/" not in file.replace("\\", "/")]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
