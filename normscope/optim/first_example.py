"""The inputs on which an optimizer that was given a model alone finds its symmetries."""

from __future__ import annotations

import inspect
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
        self.inputs = _by_name(model, args, kwargs) if args and kwargs else kwargs or args
        self._handle.remove()


def _by_name(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments, all by the names that the forward pass gives them."""
    signature = inspect.signature(model.forward)
    named: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise InputError(f"detection cannot pass {name!r} by name, as {type(model).__name__} is called: pass symmetries=…")
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named
