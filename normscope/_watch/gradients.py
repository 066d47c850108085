"""Gradients of a sampled step as they are at the end of the backward pass: whole, reduced, and not yet clipped."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from normscope._watch.layers import is_plain
from normscope._watch.unrecorded import aside
from normscope._watch.weights import dots, local, norms


class GradientView:
    """‖g‖ and ⟨g, w⟩ of some parameters. Every backward pass of the step reads again, so the last has all micro-batches."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], look: Callable[..., None], began: Callable[[], None] = lambda: None
    ) -> None:
        """began: called inside of the backward pass, at its first gradient."""
        self.parameters, self.look, self.began = parameters, look, began
        self.names: list[str] = []
        self.values: torch.Tensor | None = None  # (2, names)
        self.passes: Counter[str] = Counter()  # name → backward passes of the step that gave it a gradient
        self._handles: list[Any] = []

    def start(self, guarded: Callable[..., Any]) -> None:
        self.names, self.values = [], None
        self.passes = Counter()
        self._queued: Callable[[], Any] = lambda: None  # what waits for the end of a pass; if the pass fails, torch drops it
        self._guarded = guarded
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and parameter.is_leaf:
                hook = guarded(partial(self._accumulated, name))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def read_now(self) -> None:
        """At the optimizer's step, of a pass that was not followed: what the optimizer is given."""
        self.look(self._read)

    def forget(self, names: Collection[str]) -> None:
        """Parameters whose gradients mean nothing any more."""
        self.parameters = {name: parameter for name, parameter in self.parameters.items() if name not in names}
        self.names = ["" if name in names else name for name in self.names]

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        self.passes[name] += 1
        if self._queued() is None:
            engine = Variable._execution_engine
            ended = self._guarded(self._ended)
            self._queued, self.values = weakref.ref(ended), None
            # queued again when called: behind all that waits for the end of this pass, such as DDP's reduction
            engine.queue_callback(self._guarded(partial(engine.queue_callback, ended)))
            self.began()

    def _ended(self) -> None:
        self._queued = lambda: None
        self.look(self._read)

    @aside
    def _read(self) -> None:
        found = {name: p for name, p in self.parameters.items() if p.grad is not None and is_plain(p.grad)}
        gradients = [local(parameter.grad) for parameter in found.values()]
        weights = [local(parameter) for parameter in found.values()]
        self.names = list(found)
        self.values = torch.stack([norms(gradients), dots(gradients, weights).to(torch.float64)])
