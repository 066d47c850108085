"""`ns.symmetries`: from a model to the groups that leave its outputs unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map_only

from normscope.core.data import Call, Example
from normscope.core.deprecation import earlier
from normscope.core.errors import ExportError, InputError, boundary
from normscope.core.progress import Progress, shown
from normscope.core.vector_layout import movable
from normscope.graph.exporting import check_runs, in_mode, module_of
from normscope.graph.graph import Graph
from normscope.graph.parametric import trace_parameters
from normscope.rules.algebra import Fixed, Form, Forms, Parameter
from normscope.rules.registry import registry
from normscope.symmetry.absorbed import Absorbers
from normscope.symmetry.check import defect
from normscope.symmetry.degrees import Degrees
from normscope.symmetry.families import Paths, scale_groups, scale_members, shift_groups
from normscope.symmetry.gauges import bonds
from normscope.symmetry.groups import Group
from normscope.symmetry.hyperplanes import hyperplane_groups
from normscope.symmetry.matrices import linear_group, without_diagonals
from normscope.symmetry.numerics import Numerics
from normscope.symmetry.report import KINDS, SymmetryReport
from normscope.symmetry.shifts import Shifts

MODES = ("train", "eval")


@earlier(positional=1)
@boundary
def symmetries(
    model: torch.nn.Module | ExportedProgram, example: Example, *, mode: str = "train", progress: Progress = None
) -> SymmetryReport:
    """Find the groups of parameter changes that leave every output as it is; by default in train mode, where they shape training.

    >>> from torch import nn
    >>> report = symmetries(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 4))
    >>> [(group.kind, group.parameters, group.count) for group in report]
    [('scale', ('0.weight',), 8), ('shift', ('0.bias',), 8), ('rescale', ('1.weight', '1.bias', '3.weight'), 8)]

    example: a tensor, a tuple of arguments or a dict of keyword arguments, with axis 0 the batch; its shapes matter.
    mode: "train", where batch normalization uses batch statistics, or "eval", where it uses running ones.
    progress: True for a bar on stderr, or a callable (what, done, total).
    """
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    with shown("tracing", progress) as meter:
        meter.at("tracing")
        call, graph = _traced(model, Call.of(example), mode)
        meter.at("looking for groups")
        return _found(model, call, graph, mode)


def _found(model: torch.nn.Module | ExportedProgram, call: Call, graph: Graph, mode: str) -> SymmetryReport:
    module = module_of(model)
    for name, value in module.named_parameters():
        if not bool(value.isfinite().all()):
            raise InputError(f"{name} holds NaN or infinite values: load weights from before training diverged")
    numerics = Numerics(module, graph, call, mode)
    sizes = {name: value.numel() for name, value in movable(module.named_parameters()).items()}
    groups = _groups(forms_of(graph), numerics, list(sizes))
    used = {source.path for node in graph for source in node.inputs if source.is_parameter}
    unused = tuple(name for name in sizes if name not in used)
    with in_mode(module, mode):
        training = {path: part.training for path, part in module.named_modules()}
    return SymmetryReport(type(model).__name__, mode, tuple(groups), sizes, numerics, unused, training)


def _groups(forms: list[Form], numerics: Numerics, names: list[str]) -> list[Group]:
    """All groups, in the order of the model's parameters."""
    shapes = {form.name: form.shape for form in forms if isinstance(form, Parameter)}
    shifts = Shifts(forms)
    absorbers = Absorbers(forms, shifts, numerics)
    degrees = Degrees(forms, shifts, absorbers.shifts)
    paths = Paths(forms)
    matrices = [linear_group(bond, shapes, paths) for bond in bonds(forms)]
    members = without_diagonals(scale_members(degrees), matrices, degrees.leaves)
    found: list[Group] = [
        *(absorbers.completed(group, degrees.ignored) for group in scale_groups(members, degrees, shapes)),
        *shift_groups(forms, shifts), *absorbers.groups(), *hyperplane_groups(forms, absorbers), *matrices,
    ]  # fmt: skip
    order = {name: place for place, name in enumerate(names)}
    measured = [
        replace(group, mode=numerics.mode, path=group.path or paths.of(group), measure=lambda group: defect(group, numerics))
        for group in found
    ]
    return sorted(measured, key=lambda group: (order[group.parameters[0]], KINDS.index(group.kind)))


def forms_of(graph: Graph) -> list[Form]:
    """The graph in the vocabulary of rules/algebra.py, operands first; the last form gathers the outputs."""
    forms = Forms()
    for node in graph:
        forms.node = node
        if node.is_parameter:
            forms.made[node] = Parameter((), node.shape, node.path, node=node)
        elif node.is_input or node.is_drawn:
            forms.made[node] = Fixed((), node.shape, node=node)
        else:
            forms.made[node] = registry.form(node, forms)
    return _below(forms.made[graph.output])


def _below(root: Form) -> list[Form]:
    """All forms that a root is made of and itself, operands first."""
    order: list[Form] = []
    entered = {root}
    stack: list[tuple[Form, Iterator[Form]]] = [(root, iter(root.operands))]
    while stack:
        form, operands = stack[-1]
        for operand in operands:
            if operand not in entered:
                entered.add(operand)
                stack.append((operand, iter(operand.operands)))
                break
        else:
            stack.pop()
            order.append(form)
    return order


def _traced(model: torch.nn.Module | ExportedProgram, call: Call, mode: str) -> tuple[Call, Graph]:
    """The graph on several samples; on one alone, if it is given and the model takes no more."""
    if call.batch_size == 1:
        several = _with_several_samples(call)
        try:
            check_runs(module_of(model), several)
            return several, trace_parameters(model, several, mode)
        except (InputError, ExportError):
            pass
    return call, trace_parameters(model, call, mode)


def _with_several_samples(call: Call) -> Call:
    """The call with three more samples, different ones: batch statistics of a single sample have no variance."""
    generator = torch.Generator().manual_seed(0)

    def extended(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return tensor
        if not tensor.is_floating_point():
            return torch.cat([tensor] * 4)
        spread = tensor.std().nan_to_num(1.0) if tensor.numel() > 1 else torch.ones(())
        noise = torch.randn(3, *tensor.shape[1:], generator=generator).to(tensor)
        return torch.cat([tensor, tensor + (spread + (spread == 0)) * noise])

    args, kwargs = tree_map_only(torch.Tensor, extended, (call.args, call.kwargs))
    return Call(args, kwargs)
