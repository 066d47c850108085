"""A program without writes: what an in-place operation changes is a new value, wherever its memory is shared.

torch itself makes a program functional (`run_decompositions({})`), every view and every argument that is written included. It
is spared only where a write cannot be seen: on a tensor that nothing else reads, or on a counter that is not read at all.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.core.data import Call
from normscope.core.errors import Refusal
from normscope.graph.exporting import quiet
from normscope.graph.naming import label, operation_name
from normscope.graph.sharing import is_transform, undeclared_views

WRAPPERS = {"wrap_with_set_grad_enabled", "wrap_with_autocast"}
MOVING = {"batch_norm": (3, 4), "instance_norm": (3, 4)}  # running statistics, which train mode moves without saying so

# Operations that torch can write as others, which have rules: recurrent layers step by step, losses, the inverse of max-pooling.
WRITTEN_OUT = {
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy_loss", "hinge_embedding_loss", "huber_loss",
    "kl_div", "l1_loss", "mse_loss", "margin_ranking_loss", "multi_margin_loss", "nll_loss_nd", "nll_loss", "nll_loss2d",
    "poisson_nll_loss",
    "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss", "max_unpool2d", "max_unpool3d",
    "nll_loss_forward", "nll_loss2d_forward", "max_pool1d_with_indices",
}  # fmt: skip
# Composite operations may return their input itself, as dropout does in eval mode; these always compute something new.
COMPUTING = {"linear", "matmul", "batch_norm", "conv1d", "conv2d", "conv3d", "layer_norm", "group_norm"}


def functional(program: ExportedProgram, call: Call) -> ExportedProgram:
    """The same program without blocks such as no_grad, transforms such as vmap, and operations that write to memory."""
    program = _inlined(program)
    _check_lifted(program)
    sharing: set[Any] = set()
    if any(_is_seen(node) for node in program.graph.nodes):
        views, sharing = undeclared_views(program, call)
        program = _without(program, views)
    while apart := sharing | {node.target for node in program.graph.nodes if _is_written_out(node)}:
        program, sharing = _decomposed(program, {target: _written_out(target) for target in apart}), set()
    if any(_is_seen(node) or is_transform(node) for node in program.graph.nodes):
        with torch._C._AutoDispatchBelowAutograd():  # above it torch writes out some, such as softshrink
            program = _decomposed(program, {})
    left = [label(node) for node in program.graph.nodes if _is_seen(node)]
    if left:
        raise Refusal(
            "the model writes to memory in a way that no graph of values can show",
            left,
            "Write a new tensor instead of changing one in place.",
        )
    return program


def _check_lifted(program: ExportedProgram) -> None:
    """Refuse what is lifted but constants: the operation returns its argument itself, and torch.export writes a copy instead."""
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    lifting = [node for node in program.graph.nodes if operation_name(node.target).startswith("lift")]
    others = [
        label(node)
        for node in lifting
        if any(source.op != "get_attr" and source.name not in constants for source in node.all_input_nodes)
    ]
    if others:
        raise Refusal("the model lifts a tensor that is no constant, which torch.export takes for a copy", others, "Leave it out.")


def _decomposed(program: ExportedProgram, table: dict[Any, Any]) -> ExportedProgram:
    with quiet():
        return program.run_decompositions(table)


def _is_written_out(node: FxNode) -> bool:
    """Whether torch shall write it as other operations; a recurrent layer that draws dropout stays one that draws."""
    name = operation_name(node.target)
    recurrent = name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(node.args) > 6
    return name in WRITTEN_OUT and not (recurrent and node.args[5] and node.args[6])


def _written_out(target: Any) -> Any:
    """How torch writes an operation as others: as it is defined, where it is composite."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    table = torch.export.default_decompositions() if composite else torch._decomp.decomposition_table
    return table[target]


def functional_variant(target: Any) -> Any:
    """`aten.relu_` → `aten.relu`: what an operation that writes to its first argument alone returns; None for others."""
    name = target._schema.name.split("::")[1]
    written = [argument.name for argument in target._schema.arguments if _is_written(argument)]
    if target.namespace != "aten" or not name.endswith("_") or name.startswith("_") or len(written) != 1:
        return None
    return getattr(getattr(torch.ops.aten, name[:-1], None), target._overloadname, None)


def _is_seen(node: FxNode) -> bool:
    """Whether a node writes to memory that something else may read."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    if not schema.is_mutable:
        return _moves_what_is_read(node)
    written = [leaf for value in _written(node) for leaf in tree_leaves(value) if isinstance(leaf, FxNode)]
    if not node.users and all(leaf.op == "placeholder" and not any(user.users for user in leaf.users) for leaf in written):
        return False  # a counter such as num_batches_tracked
    return functional_variant(node.target) is None or not (len(written) == 1 and _is_fresh(written[0]))


def _moves_what_is_read(node: FxNode) -> bool:
    """Whether a normalizer moves running statistics that something else in the model reads."""
    places = MOVING.get(operation_name(node.target), ())
    moved = [node.args[i] for i in places if isinstance(node.args[i], FxNode)] if node.args[5:] and node.args[5] else []
    return any(operation_name(user.target) not in MOVING or not user.args[5] for leaf in moved for user in leaf.users)


def _is_fresh(node: FxNode) -> bool:
    """Whether a tensor is new memory, of which the only reader is the operation that overwrites it."""
    if node.op != "call_function" or len(node.users) != 1 or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    if schema.is_mutable:
        return functional_variant(node.target) is not None and isinstance(node.args[0], FxNode) and _is_fresh(node.args[0])
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), "CompositeImplicitAutograd")
    aliases = len(schema.returns) != 1 or schema.returns[0].alias_info is not None or "unsafe" in schema.name
    return not aliases and node.target.namespace == "aten" and (not composite or operation_name(node.target) in COMPUTING)


def _written(node: FxNode) -> list[Any]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    positional = [node.args[i] for i, argument in enumerate(arguments) if i < len(node.args) and _is_written(argument)]
    return positional + [
        node.kwargs[argument.name] for argument in arguments if argument.name in node.kwargs and _is_written(argument)
    ]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _inlined(program: ExportedProgram) -> ExportedProgram:
    """The program with the bodies of no_grad and autocast blocks in place of the blocks: the same function."""
    if not _wrappers(program):
        return program
    program = _copied(program)
    module = program.graph_module
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        while wrappers := _wrappers(program):
            _inline(module, wrappers[0])
    return program


def _without(program: ExportedProgram, same: dict[str, str]) -> ExportedProgram:
    """The program without nodes that return an argument itself, each given with that argument by name."""
    if not same:
        return program
    program = _copied(program)
    module = program.graph_module
    nodes = {node.name: node for node in module.graph.nodes}
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for name, source in same.items():
            while source in same:
                source = same[source]
            nodes[name].replace_all_uses_with(nodes[source])
            module.graph.erase_node(nodes[name])
    return program


def _copied(program: ExportedProgram) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own about a class in its own copy
        return copy.deepcopy(program)


def _wrappers(program: ExportedProgram) -> list[FxNode]:
    return [node for node in program.graph.nodes if node.op == "call_function" and operation_name(node.target) in WRAPPERS]


def _inline(module: GraphModule, block: FxNode) -> None:
    at, name = next((i, arg) for i, arg in enumerate(block.args) if isinstance(arg, FxNode) and arg.op == "get_attr")
    body: Any = module.get_submodule(str(name.target))
    values: dict[FxNode, Any] = {}
    given = iter(block.args[at + 1 :])
    outputs: Any = ()
    for node in body.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            outputs = tree_map_only(FxNode, values.__getitem__, node.args[0])
        else:
            with module.graph.inserting_before(block):
                values[node] = module.graph.node_copy(node, values.__getitem__)
            if node.op == "get_attr":
                values[node].target = _adopted(module, body, node.target)
    for user in list(block.users):
        user.replace_all_uses_with(outputs[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(block)
    if not name.users:
        module.graph.erase_node(name)


def _adopted(module: GraphModule, body: torch.nn.Module, target: str) -> str:
    """A name in `module` for what `body` calls `target`."""
    name = target.replace(".", "_")
    while hasattr(module, name):
        name += "_"
    value: Any = body
    for part in target.split("."):
        value = getattr(value, part)
    setattr(module, name, value)
    return name
