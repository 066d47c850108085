"""A module as torch.export sees it: in one mode, on one call, whatever wraps it or is returned beside tensors."""

from __future__ import annotations

import functools
import io
import logging
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from normscope.core.data import Call
from normscope.core.errors import ExportError, InputError, Refusal
from normscope.core.randomness import preserved_random_state
from normscope.graph.rebinding import rebind
from normscope.graph.restoring import Snapshot, untouched
from normscope.graph.standins import Observed, observed

EXPORTABLE = (torch.Tensor, bool, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)  # in what a model returns
TALKATIVE = ("torch.export", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


class Undistributed(torch.nn.Module):
    """What DistributedDataParallel computes, with its names, without its communication, which cannot be traced."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def module_of(model: torch.nn.Module | ExportedProgram) -> torch.nn.Module:
    """What runs, if it is something that can be traced."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError("a TorchScript module cannot be traced: pass the nn.Module that it was made from")
    if not isinstance(model, (torch.nn.Module, ExportedProgram)):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError(f"a model must be a torch.nn.Module, got {what}")
    lazy = [] if isinstance(model, ExportedProgram) else [name for name, value in model.named_parameters() if is_lazy(value)]
    if lazy:
        raise InputError(f"{lazy[0]} has no shape yet: call the model once, so that its lazy layers get theirs")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return Undistributed(model.module)
    return model.module() if isinstance(model, ExportedProgram) else model


@preserved_random_state()
def export(model: torch.nn.Module, call: Call, mode: str = "eval") -> ExportedProgram:
    """torch.export in the stated mode; the model comes back as it was.

    It runs once before: what it computes on its first call, and keeps where nobody sees it (in a function's cache or a class), must
    not be one of export's stand-ins for tensors, with gradients (as in graph/independence.py) or without. Random numbers go on
    between the runs, so that a model that draws is seen to differ.
    """
    model = module_of(model)
    before = Snapshot(model)
    for gradients in {True, torch.is_grad_enabled()}:
        with in_mode(model, mode, before), suppress(Exception), torch.set_grad_enabled(gradients):
            given = call.copied()
            model(*given.args, **given.kwargs)
    with in_mode(model, mode, before), tensors_alone(model), quiet(), observed(model) as seen:
        try:
            program = torch.export.export(model, call.args, call.kwargs, strict=False)
        except Exception as error:  # torch.export raises whatever the model or its own passes raise
            _check_groups(model, mode, error)
            check_runs(model, call)
            advice = (
                "" if mode == "eval" else '; mode="eval" leaves out what training alone does, such as dropping layers at random'
            )
            raise ExportError(
                f"{type(model).__name__} could not be traced in {mode} mode: {described(error)}; "
                f"a graph needs a model that torch.export accepts (no control flow that depends on values){advice}"
            ) from error

    def as_it_runs() -> Observed:
        with in_mode(model, mode, before), observed(model) as found, suppress(Exception):
            given = call.copied()
            model(*given.args, **given.kwargs)
        return found

    seen.check(model, as_it_runs)
    rebind(program)
    return program


def _check_groups(model: torch.nn.Module, mode: str, error: Exception) -> None:
    """Refuse batch statistics, and groups of one element: torch takes them in batches of two or more and raises for one sample."""
    if "more than 1 value per channel" not in str(error):
        return
    groups = [
        f"{type(part).__name__} at {path or 'the top level'}" for path, part in model.named_modules()
        if isinstance(part, torch.nn.GroupNorm) and part.num_groups == part.num_channels
    ]  # fmt: skip
    if mode == "eval" and groups:
        raise Refusal(
            "a normalizer with one element per group has no variance, and torch does not run it on one sample",
            groups,
            "Use fewer groups, so that each holds several elements.",
        ) from error
    advice = "a normalizer that tracks running statistics" if mode == "eval" else 'mode="eval" for running statistics'
    raise Refusal(
        "batch statistics make every sample depend on the others",
        [f"{type(model).__name__} in {mode} mode cannot take one sample alone"],
        f'Use {advice}, or mode="batch" for the whole batch as one input.',
    ) from error


def check_runs(model: torch.nn.Module, call: Call, hint: str = "") -> None:
    """Raise if the model does not even run on the example: then tracing is not what failed. hint: what else to say then."""
    try:
        with torch.no_grad(), preserved_random_state(), untouched(model):
            given = call.copied()  # it may be overwritten
            model(*given.args, **given.kwargs)
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in call.tensors)
        wants_ids = any(isinstance(part, torch.nn.Embedding) for part in model.modules())
        advice = "; ids must be integers (on the command line, input_ids:16:int)"
        advice = advice if wants_ids and all(tensor.is_floating_point() for tensor in call.tensors) else ""
        what = f"{type(model).__name__} does not run on inputs of shape {shapes}: {described(error)}{advice}{hint}"
        raise InputError(what) from error


@contextmanager
def in_mode(model: torch.nn.Module, mode: str, before: Snapshot | None = None) -> Iterator[None]:
    """The model as its own `train()` or `eval()` makes it, and then as it was; `before`: see `untouched`."""
    with _modes_kept(model), untouched(model, before=before), transforms_closed():
        if isinstance(model, torch.fx.GraphModule):  # an exported program has one mode, and raises when asked for another
            model.training = mode != "eval"
        elif mode == "eval":
            model.eval()
        else:
            model.train()
        yield


@contextmanager
def _modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Those of TorchScript are out of Python's sight, so that no snapshot has them."""
    before = [(part, part.training) for part in model.modules()]
    try:
        yield
    finally:
        for part, training in before:
            if part.training != training:
                part.training = training


@contextmanager
def transforms_closed() -> Iterator[None]:
    """Close what a failure inside of torch.vmap or torch.func.grad left open: all of torch would go on as if inside of it."""
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch.export from warning, logging and printing at length what an error then says in a line."""
    levels = {logger: logger.level for logger in map(logging.getLogger, TALKATIVE)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def tensors_alone(model: torch.nn.Module) -> Iterator[None]:
    """Let `model` return None for objects that torch.export does not know, such as the key-value caches of `transformers`."""
    forward = model.forward

    @functools.wraps(forward)
    def known(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda leaf: leaf if leaf is None or isinstance(leaf, EXPORTABLE) else None, forward(*args, **kwargs))

    own = vars(model).get("forward")
    model.forward = known
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def described(error: BaseException) -> str:
    """An error of somebody else as part of a one-line message: its type and its first line."""
    text = str(error).strip()
    return (
        f"{type(error).__name__}: {textwrap.shorten(text.splitlines()[0], 200, placeholder=' …')}" if text else type(error).__name__
    )


def tensors_beside_parameters(model: torch.nn.Module, call: Call) -> dict[str, torch.Tensor]:
    """The buffers, plain attributes, closures and literals that the outputs are computed with; numbers (one entry) are code."""
    program = export(model, call, "eval")
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    found: dict[str, torch.Tensor] = {}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if node.users and spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            store = program.state_dict if spec.target in program.state_dict else program.constants
            kind = "buffer" if spec.kind == InputKind.BUFFER else "tensor"
            found[f"{kind} {spec.target}"] = store[spec.target]
    for path, module in program.graph_module.named_modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            value = getattr(module, node.target, None) if node.op == "get_attr" else None
            if isinstance(value, torch.Tensor):
                found[f"tensor {path}.{node.target}".replace(" .", " ")] = value
    return {name: value for name, value in found.items() if value.numel() > 1}
