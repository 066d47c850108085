"""The forward pass of a sampled step, through torch's global module hooks: nothing is attached to the model itself."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from normscope._watch.attention import ModuleCall, attentions
from normscope._watch.backward import Span, key_of_tensor, next_number
from normscope._watch.blocks import BlockView, block_paths
from normscope._watch.layers import (
    CHANNELS_SECOND,
    MULTIPLYING,
    NORMALIZING,
    PLAIN,
    FirstForward,
    Handwritten,
    is_observable,
    is_own_leaf,
)
from normscope._watch.statistics import input_statistics
from normscope._watch.unrecorded import unrecorded

OWN_HOOKS: set[int] = set()  # on all modules, of every recording that is under way
CALL = nn.Module._call_impl.__code__
OUTSIDE = -1  # of any backward pass, in place of its number


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile returned, or was compiled in place."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def is_traced() -> bool:
    """Whether somebody traces or transforms the code that runs, so that what a hook computes would become a part of it."""
    return bool(torch._C._get_tracing_state()) or torch._C._functorch.peek_interpreter_stack() is not None


def calls_under_way(module: nn.Module) -> int:
    """How many calls of a module this thread is in. A call that raised is not among them, although no hook saw its end."""
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None:
        found += frame.f_code is CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return found


class ForwardView:
    """Statistics of what enters every normalizer and activation in the first training pass of a step.

    Later passes of the step (micro-batches, recomputation under checkpointing), passes without gradients (evaluation) and those
    of other threads are not looked at. A pass that raised is forgotten when the next begins. look: called as
    look(what, function, *args) so that the caller can guard and time it.
    """

    def __init__(self, model: nn.Module, look: Callable[..., None]) -> None:
        self.model, self.look = model, look
        self.paths = {module: path for path, module in model.named_modules()}
        self.handwritten: Mapping[str, Handwritten] = {}
        self.seen = FirstForward()
        self.inputs: dict[tuple[str, int], torch.Tensor] = {}
        self.blocks = BlockView(block_paths(model), look)
        self.attentions: dict[tuple[str, int], torch.Tensor] = {}
        self.passes = 0  # calls of modules with gradients, outside of backward passes, while spans are noted
        self.attending = True  # whether attention is looked for: no longer if the first sample had none
        self._handles: list[Any] = []

    def start(self, guarded: Callable[..., Any], spans: bool = False) -> None:
        """Look at the next training pass. spans: note what each call added to autograd's graph, in all passes until `stop`."""
        self.seen, self._spans, self._guarded = FirstForward(), spans, guarded
        self._begin_pass()
        self._began: dict[str, int] = {}
        self._over = False  # the first training pass
        self._pass = threading.local()  # inside: a training pass of the whole model; outside: one without gradients
        self._thread: int | None = None  # the first that trains
        self._handles.append(register_module_forward_pre_hook(guarded(self._entering)))
        self._handles.append(register_module_forward_hook(guarded(self._leaving)))
        _global_forward_hooks.move_to_end(self._handles[-1].id, last=False)  # others may change what a module returns
        OWN_HOOKS.update(handle.id for handle in self._handles)

    def _begin_pass(self) -> None:
        """Nothing was seen yet, or what was seen is of a pass that failed."""
        self.seen = replace(self.seen, calls=[], training={})
        self.forget()
        self._made, self._open = list[ModuleCall](), list[tuple[str, int, int]]()
        self._calls: Counter[str] = Counter()
        self._channel_axis = 1

    def stop(self) -> None:
        self._open, self._made = [], []
        while self._handles:
            handle = self._handles.pop()
            handle.remove()
            OWN_HOOKS.discard(handle.id)

    def forget(self) -> None:
        """What was seen of an earlier pass."""
        self.inputs, self.attentions = {}, {}
        self.blocks.forget()

    def measured(self) -> Iterator[tuple[tuple[str, str, int], torch.Tensor]]:
        """(what, module path, call) and the numbers of everything that was seen in the pass."""
        for what, found in (
            ("input", self.inputs), ("block", self.blocks.measured), ("gain", self.blocks.gains()), ("attention", self.attentions),
        ):  # fmt: skip
            for (path, call), numbers in found.items():
                yield (what, path, call), numbers

    def _entering(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        path = self.paths.get(module)
        if path is None or is_traced():
            return
        if self._spans and self._thread in (None, threading.get_ident()):
            self._began[path] = next_number()
            self.passes += torch.is_grad_enabled() and torch._C._current_graph_task_id() == OUTSIDE
        if self._over:
            return
        training = torch.is_grad_enabled()
        inside, outside = getattr(self._pass, "inside", False), getattr(self._pass, "outside", False)
        if path == "":
            if inside and self._thread == threading.get_ident() and calls_under_way(module) < 2:  # the last one raised
                self._begin_pass()
            self._pass.inside, self._pass.outside = inside, outside = training, not training
        elif inside and not training and not calls_under_way(self.model):
            inside = self._pass.inside = False
        if outside or not (training or inside):  # inside, checkpointed parts run without gradients
            return
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            return
        self._calls[path] += 1
        self.seen.calls.append((path, self._calls[path]))
        self.seen.training.setdefault(path, bool(vars(module).get("training")))
        self._open.append((path, self._calls[path], next_number()))
        value = args[0] if args and type(args[0]) in PLAIN else None
        if value is not None and (is_observable(module) or path in self.handwritten):
            self.look("input statistics", self._statistics, module, path, value)
        if value is not None:
            self.blocks.enter((path, self._calls[path]), value)
        if isinstance(module, (*MULTIPLYING, *NORMALIZING)):
            self._channel_axis = 1 if isinstance(module, CHANNELS_SECOND) else -1

    def _statistics(self, module: nn.Module, path: str, value: torch.Tensor) -> None:
        if value.numel() == 0 or not value.is_floating_point() or value.is_meta or value.is_sparse:
            return
        known = self.handwritten.get(path)
        with unrecorded():
            statistics = input_statistics(module, value, self._channel_axis, known.now(module) if known else None)
        self.inputs[path, self._calls[path]] = statistics

    def _leaving(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        path = self.paths.get(module)
        if path is None or is_traced() or self._thread != threading.get_ident():
            return
        if not self._over:
            self._close_call(path, output)
        if self._spans:
            self._add_span(module, path, args, output)
        if path == "" and getattr(self._pass, "inside", False):
            self.seen.whole = self._over = True
            self.seen.hooked = not OWN_HOOKS.issuperset((*_global_forward_hooks, *_global_forward_pre_hooks))
            if not self._spans:
                self.stop()
        if path == "":
            self._pass.inside = self._pass.outside = False

    def _close_call(self, path: str, output: Any) -> None:
        """Of the call that was entered last, or of one that others within it never left."""
        while self._open:
            opened, call, began = self._open.pop()
            if opened == path:
                self._made.append(ModuleCall(path, call, began, next_number()))
                self.blocks.leave((path, call), output, self._guarded, self._channel_axis)
                break
        if path == "" and getattr(self._pass, "inside", False) and self.attending:
            roots = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
            self.look("attention", self._attend, roots)

    def _attend(self, roots: list[Any]) -> None:
        with unrecorded():
            self.attentions = attentions(roots, self._made)

    def _add_span(self, module: nn.Module, path: str, args: tuple[Any, ...], output: Any) -> None:
        """args: as the module's own hooks left them."""
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.seen.parameters.setdefault(id(parameter), (prefix + name, parameter))
        spans = self.seen.spans
        if path == "":
            spans.outputs |= {key for tensor in tensors_in(output) if (key := key_of_tensor(tensor)) is not None}
        if not args or type(args[0]) not in PLAIN or type(output) not in PLAIN or output.grad_fn is None or path not in self._began:
            return
        left = key_of_tensor(output)
        assert left is not None
        span = Span(path, self._began[path], key_of_tensor(args[0]), left)
        if is_observable(module):
            spans.observed.append(span)
        elif is_own_leaf(module):
            spans.others.append(span)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those of tuples, lists and dictionaries, whose own methods are not run."""
    if type(value) in PLAIN:
        yield value
    kinds = [kind for kind in (tuple, list, dict) if isinstance(value, kind)]
    for entry in dict.values(value) if isinstance(value, dict) else kinds[0].__iter__(value) if kinds else ():
        yield from tensors_in(entry)
