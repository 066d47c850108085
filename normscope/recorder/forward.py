"""The forward pass of a sampled step, through torch's global module hooks: nothing is attached to the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from normscope.core.data import Call
from normscope.recorder.layers import CHANNELS_SECOND, MULTIPLYING, NORMALIZING, Handwritten, Seen, is_observable
from normscope.recorder.statistics import input_statistics

DEVICES = ("cpu", "cuda")


@contextmanager
def unrecorded() -> Iterator[None]:
    """No gradient and no autocast: what is computed here is the recorder's own."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile returned, or was compiled in place."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


class ForwardView:
    """Statistics of what enters every normalizer and activation in the first training pass of a step.

    Later passes of the step (micro-batches, recomputation under checkpointing) and passes without gradients (evaluation)
    are not looked at. look: called as look(function, *args) so that the caller can guard and time it.
    """

    def __init__(self, model: nn.Module, look: Callable[..., None], passed: Callable[[], None] = lambda: None) -> None:
        self.model, self.look, self.passed = model, look, passed
        self.paths = {module: path for path, module in model.named_modules()}
        self.handwritten: Mapping[str, Handwritten] = {}
        self.seen = Seen()
        self.inputs: dict[tuple[str, int], torch.Tensor] = {}
        self._handles: list[Any] = []

    def start(self) -> None:
        """Look at the next training pass."""
        self.seen, self.inputs = Seen(), {}
        self._calls: Counter[str] = Counter()
        self._inside = self._outside_training = False
        self._channel_axis = 1
        self._last: tuple[str, torch.Tensor, int] | None = None
        self._handles = [
            register_module_forward_pre_hook(self._entering),
            register_module_forward_hook(self._leaving, with_kwargs=True),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._last = [], None

    def _entering(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # in a compiled region this traces to nothing
            return
        path = self.paths.get(module)
        if path is None or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        training = torch.is_grad_enabled()
        if path == "":
            self._inside, self._outside_training = training, not training
        if self._outside_training or not (training or self._inside):  # inside, checkpointed parts run without gradients
            return
        self._calls[path] += 1
        self.seen.calls.append((path, self._calls[path]))
        if args and isinstance(args[0], torch.Tensor) and (is_observable(module) or path in self.handwritten):
            self.look(self._statistics, module, path, args[0])
        if isinstance(module, (*MULTIPLYING, *NORMALIZING)):
            self._channel_axis = 1 if isinstance(module, CHANNELS_SECOND) else -1

    def _statistics(self, module: nn.Module, path: str, value: torch.Tensor) -> None:
        if value.numel() == 0 or not value.is_floating_point():
            return
        if self._last is not None and isinstance(module, NORMALIZING) and _is_the_same(value, *self._last[1:]):
            self.seen.direct[path] = self._last[0]
        known = self.handwritten.get(path)
        with unrecorded():
            statistics = input_statistics(module, value, self._channel_axis, known.now(module) if known else None)
        self.inputs[path, self._calls[path]] = statistics

    def _leaving(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        path = self.paths.get(module)
        if path == "":
            if self._inside:
                self.seen.example = Call(tuple(args), dict(kwargs))
                self.stop()
                self.passed()
            self._inside = self._outside_training = False
        elif path is not None and isinstance(module, MULTIPLYING) and isinstance(output, torch.Tensor):
            self._last = path, output.detach(), output._version


def _is_the_same(value: torch.Tensor, output: torch.Tensor, version: int) -> bool:
    """Whether a module reads what another returned, unchanged since (a view of it counts)."""
    return value.data_ptr() == output.data_ptr() and value.numel() == output.numel() and value._version == version
