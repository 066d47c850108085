"""The inputs on which an optimizer that was given a model alone finds its symmetries."""

from __future__ import annotations

from typing import Any

import torch

from normscope.core.errors import InputError


class FirstExample:
    """Keeps the inputs of a model's first forward pass in training mode, from which its symmetries can be found."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inputs: Any = None
        self._handle = model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training or torch.compiler.is_compiling():
            return
        if args and kwargs:
            raise InputError("detection needs a model called with positional or with keyword arguments only; pass symmetries=…")
        self.inputs = kwargs or args
        self._handle.remove()
