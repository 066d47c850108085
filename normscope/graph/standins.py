"""What a model does with torch's stand-ins for tensors while it is exported, and would not do with tensors."""

from __future__ import annotations

import builtins
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from normscope.core.errors import Refusal, first_line
from normscope.graph.running import is_plain, memory

NUMBERS = {torch.SymBool: bool, torch.SymInt: int, torch.SymFloat: float}  # what they are where a model runs
CONVERTED = ("__bool__", "__int__", "__index__", "__float__", "__hash__")  # which raise where a value is not known
SHOWN = ("__str__", "__repr__", "__format__", "__reduce_ex__")
OTHERS = ("torch", "sympy", "normscope", "logging", "copy")  # whose code is not the model's own
NO_VALUE = (type(None), torch.dtype, torch.device, torch.layout)  # results that do not depend on the numbers in a tensor
ABOUT = ("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device", "type")
ONE_AT_A_TIME = threading.RLock()


class Failure(NamedTuple):
    """own: the type of the exception, if it is not built in: kernels raise different ones of those for the same mistake."""

    name: str
    line: tuple[str, int]
    own: type | None
    why: str

    @property
    def place(self) -> tuple[Any, ...]:
        return self[:3]


class Observed(TorchFunctionMode):
    """failures: of each run of the model, what raised.

    shown: how its own code looks at numbers that stand-ins do not know.

    read: the tensors of the model's own that it takes numbers from, which an exported program holds as plain numbers.

    elsewhere: operations on stand-ins in other threads, where nobody writes them down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[list[Failure]] = []
        self.shown: list[str] = []
        self.read: list[torch.Tensor] = []
        self.elsewhere: list[str] = []

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
                given = tree_leaves((args, kwargs))
                self.read += filter(is_plain, given)
                if isinstance(result, str) and any(isinstance(one, FakeTensor) for one in given) and _is_own(sys._getframe(1)):
                    self.shown.append(name.strip("_"))
        return result

    def failed(self, name: str, error: Exception) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and _package(frame) in OTHERS:
            frame = frame.f_back
        own = None if type(error).__module__ == "builtins" else type(error)
        why = f"{name} raised {type(error).__name__}: {first_line(error).rstrip('.')}"
        self.failures[-1].append(Failure(name, (frame.f_code.co_filename, frame.f_lineno), own, why))

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
        if self.elsewhere:
            raise Refusal(
                "the model computes in another thread, which its graph does not show",
                [*dict.fromkeys(self.elsewhere)],
                "Compute in the thread that calls the model.",
            )
        if self.shown:
            raise Refusal(
                "the model's own code looks at numbers of tensors, which its graph does not know",
                [*dict.fromkeys(self.shown)],
                "Compute with tensors, or move what only logs out of the forward.",
            )
        for run in filter(None, self.failures):
            others = [_alone(run, other) for other in again().failures]
            if all(others):
                raise Refusal(
                    "the model catches an exception that is raised while it is exported alone, and takes other steps then",
                    [failure.why for failure in min(others, key=len, default=run)[:1]],
                    "Leave out the `try`, move what only logs out of the forward, or give an operation of your own a fake "
                    "implementation (torch.library.register_fake).",
                )


def _alone(run: list[Failure], other: list[Failure]) -> list[Failure]:
    """The failures of a run that another one does not have, or has less often."""
    left = Counter(failure.place for failure in other)
    left.subtract(failure.place for failure in run)
    return [failure for failure in run if left[failure.place] < 0]


def _is_own(frame: types.FrameType) -> bool:
    """Whether code of the model's own has called torch here."""
    while frame.f_back is not None and _package(frame) == "torch":
        frame = frame.f_back
    return _package(frame) not in OTHERS


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


@contextmanager
def observed(model: torch.nn.Module) -> Iterator[Observed]:
    """Observe each run of the model inside, its hooks included."""
    found, kind = Observed(), type(model)
    # torch calls `_call_impl` with hooks, if the class has no `__call__` of its own
    owner, name = (model, "_call_impl") if kind.__call__ is torch.nn.Module.__call__ else (kind, "__call__")
    call = getattr(owner, name)

    def observing(*args: Any, **kwargs: Any) -> Any:
        if owner is kind and args[0] is not model:
            return call(*args, **kwargs)
        found.failures.append([])
        with found, numbers_as_they_run(found), _threads_seen(found):
            return call(*args, **kwargs)

    with ONE_AT_A_TIME, _set(owner, name, observing):
        yield found


@contextmanager
def numbers_as_they_run(found: Observed) -> Iterator[None]:
    """Note where the model's own code fails to convert a number that is not known, or asks for its text.

    It is told that the class of such a number is what it is where the model runs.
    """

    def converting(name: str, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def convert(value: Any) -> Any:
            try:
                return own(value)
            except Exception as error:
                if _package(sys._getframe(1)) not in OTHERS:
                    found.failed(name.strip("_"), error)
                raise

        return convert

    def showing(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def show(value: Any, *args: Any) -> Any:
            if _package(sys._getframe(1)) not in OTHERS:
                found.shown.append(name.strip("_"))
            return own(value, *args)

        return show

    def asking(plain: type) -> Callable[[Any, str], Any]:
        def ask(value: Any, name: str) -> Any:
            package = _package(sys._getframe(1)) if name == "__class__" else "torch"
            if package == "json":  # it asks for the name of a class that it does not take
                found.shown.append(package)
            return object.__getattribute__(value, name) if package in OTHERS else plain

        return ask

    own_print = print

    def printing(*args: Any, **kwargs: Any) -> None:  # the model's own code does not see the text
        own_print(*args, **kwargs)

    with ONE_AT_A_TIME, ExitStack() as stack:
        stack.enter_context(_set(builtins, "print", printing))
        for kind, plain in NUMBERS.items():
            noted = {name: converting(name, getattr(kind, name)) for name in CONVERTED if hasattr(kind, name)}
            noted |= {name: showing(name, getattr(kind, name)) for name in SHOWN}
            for name, method in {**noted, "__getattribute__": asking(plain)}.items():
                stack.enter_context(_set(kind, name, method))
        yield


@contextmanager
def _threads_seen(found: Observed) -> Iterator[None]:
    """Note operations on stand-ins in other threads: those of torch's modes that record what runs are entered in one alone."""
    own, here = FakeTensor.__torch_dispatch__, threading.get_ident()

    def dispatched(kind: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() != here:
            found.elsewhere.append(str(function))
        return own(function, types, args, kwargs or {})

    with _set(FakeTensor, "__torch_dispatch__", classmethod(dispatched)):
        yield


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Whatever the class of the owner does as attributes are set."""
    base: Any = type if isinstance(owner, type) else object
    missing = object()
    before = vars(owner).get(name, missing)
    base.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            base.__delattr__(owner, name)
        else:
            base.__setattr__(owner, name, before)


def _registered(model: torch.nn.Module) -> Sequence[tuple[str, torch.Tensor]]:
    held = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in held if tensor.layout == torch.strided and tensor.device.type != "meta"]
