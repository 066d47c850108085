"""What a model does with torch's stand-ins for tensors while it is exported, and would not do with tensors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from normscope.core.errors import Refusal, first_line
from normscope.graph.running import is_plain, memory

NUMBERS = {
    torch.SymBool: ("__bool__", "__int__"),
    torch.SymInt: ("__bool__", "__int__", "__index__"),
    torch.SymFloat: ("__bool__", "__int__", "__float__"),
}
NO_VALUE = (type(None), torch.dtype, torch.device, torch.layout)  # results that do not depend on the numbers in a tensor
ABOUT = ("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device", "type")
ONE_AT_A_TIME = threading.RLock()


class Observed(TorchFunctionMode):
    """failures: of each run of the model, what raised, and why; read: the tensors of the model's own that it takes numbers from,
    which an exported program holds as plain numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[list[tuple[str, str]]] = []
        self.read: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = function(*args, **(kwargs or {}))
        except Exception as error:
            self.failed(resolve_name(function) or getattr(function, "__name__", str(function)), error)
            raise
        name = getattr(function, "__name__", "")
        if name not in (*ABOUT, "__get__", "__len__", "__hash__") and not name.startswith("is_"):
            made = [leaf for leaf in tree_leaves(result) if not isinstance(leaf, NO_VALUE)]
            if made and not any(isinstance(leaf, torch.Tensor) for leaf in made):
                self.read += filter(is_plain, tree_leaves((args, kwargs)))
        return result

    def failed(self, name: str, error: Exception) -> None:
        self.failures[-1].append((name, f"{type(error).__name__}: {first_line(error).rstrip('.')}"))

    def check(self, model: torch.nn.Module, again: Callable[[], Observed]) -> None:
        """Refuse what the exported program does not show. again: what is observed of the model as it runs."""
        held = {memory(tensor): name for name, tensor in _registered(model)}
        for tensor in self.read:
            if tensor.numel() and memory(tensor) in held:
                name = held[memory(tensor)]
                raise Refusal(
                    f"the model keeps '{name}' under another name too, from which it takes plain numbers",
                    ["a graph would hold the numbers that are there now"],
                    f"Read it by the name '{name}'.",
                )
        for run in self.failures:
            names = [name for name, _ in run]
            if run and names not in [[name for name, _ in other] for other in again().failures]:
                raise Refusal(
                    "the model catches an exception that is raised while it is exported alone, and takes other steps then",
                    [f"{name} raised {why}" for name, why in run[:1]],
                    "Leave out the `try`, or give an operation of your own a fake implementation (torch.library.register_fake).",
                )


@contextmanager
def observed(model: torch.nn.Module) -> Iterator[Observed]:
    """Observe each run of the model inside, its hooks included."""
    found, call = Observed(), model._call_impl

    def observing(*args: Any, **kwargs: Any) -> Any:
        found.failures.append([])
        with found, _numbers(found):
            return call(*args, **kwargs)

    vars(model)["_call_impl"] = observing  # what torch calls with hooks, and without what a class does as attributes are set
    try:
        yield found
    finally:
        del vars(model)["_call_impl"]


@contextmanager
def _numbers(found: Observed) -> Iterator[None]:
    """Note where the model's own code, and not torch's, fails to make a number of a value that is not known."""

    def noting(name: str, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def convert(value: Any) -> Any:
            try:
                return own(value)
            except Exception as error:
                if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "torch":
                    found.failed(name, error)
                raise

        return convert

    with ONE_AT_A_TIME:
        before = [(kind, name, getattr(kind, name)) for kind, names in NUMBERS.items() for name in names]
        try:
            for kind, name, own in before:
                setattr(kind, name, noting(name.strip("_"), own))
            yield
        finally:
            for kind, name, own in before:
                setattr(kind, name, own)


def _registered(model: torch.nn.Module) -> Sequence[tuple[str, torch.Tensor]]:
    held = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in held if tensor.layout == torch.strided and tensor.device.type != "meta"]
