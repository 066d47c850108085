"""Models that run in float64, on an example and on random inputs like it, and how far their outputs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.core.data import Call
from normscope.core.errors import InputError, first_line
from normscope.core.rounding import euclidean_norm
from normscope.core.twins import twin_of
from normscope.graph.canonical import grouped_mm

TOLERANCE = 1e-9  # of outputs in float64, relative to their size
EPSILONS = ("eps", "epsilon", "variance_epsilon")  # what normalizers call ε
TINY = 1e-30
INPUTS = 4  # random ones beside the example
HALVED = (torch.float32, torch.float16, torch.bfloat16)
Outputs = list[torch.Tensor]


class KeepDouble(TorchDispatchMode):
    """Casts to less than float64, as normalizers of transformers make them, keep float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in HALVED and args[0].dtype == torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:  # torch has none for float64
            return grouped_mm(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        return func(*args, **kwargs)


def in_mode(model: nn.Module, mode: str) -> nn.Module:
    """A copy in float64 in the mode, without what is random."""
    return without_dropout(twin_of(model).double().requires_grad_(True).train(mode == "train"))


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
            module.p = 0.0  # which attention may read for a dropout of its own
    return model


def inputs_like(call: Call, fresh: int = INPUTS, wide: float = 1.0) -> list[Call]:
    """The example and random inputs like it: of the same mean, `wide` times its spread, ids of the same range."""
    generator = torch.Generator().manual_seed(0)

    def like(value: Any, fresh: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach().cpu()
        if not value.is_floating_point():
            if not fresh or value.dtype == torch.bool or value.is_complex():
                return value
            return torch.randint(int(value.min()), int(value.max()) + 1, value.shape, generator=generator).to(value.dtype)
        value = value.double()
        spread = float(value.std()) if value.numel() > 1 else 0.0
        return (
            value
            if not fresh
            else torch.randn(value.shape, generator=generator, dtype=torch.float64) * wide * (spread or 1.0) + value.mean()
        )

    def of(fresh: bool) -> Call:
        return Call(tuple(like(arg, fresh) for arg in call.args), {name: like(arg, fresh) for name, arg in call.kwargs.items()})

    return [of(False), *(of(True) for _ in range(fresh))]


def ran(model: nn.Module, call: Call, state: Mapping[str, torch.Tensor] | None = None) -> Outputs:
    """Every output of real or complex numbers, buffers left as they are; state: other values for some parameters.

    What is random is so alike in every run; the random state of the process stays as it is.
    """
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    values = {**dict(model.named_parameters()), **buffers, **(state or {})}
    try:
        with KeepDouble(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            result = functional_call(model, values, call.args, call.kwargs)
    except (RuntimeError, TypeError) as error:  # NotImplementedError is one: a kernel that torch does not have
        raise InputError(
            f"{type(model).__name__} does not run on the example in float64: {first_line(error)}; possible causes: "
            "(a) the example does not fit the model, (b) an operation has no float64 kernel"
        ) from error
    leaves = torch.utils._pytree.tree_leaves(dict(result) if isinstance(result, Mapping) else result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensors = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in tensors]
    found = [leaf for leaf in tensors if leaf.is_floating_point()]
    if not found:
        raise InputError("a model returns no floating-point tensor, so there is nothing to compare")
    return found


def outputs_apart(one: list[Outputs], other: list[Outputs]) -> float:
    """The largest difference, relative to the size of the output; infinite where shapes or NaN differ."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        if [x.shape for x in mine] != [y.shape for y in theirs]:
            return math.inf
        for x, y in zip(mine, theirs, strict=True):
            if not bool(x.isfinite().all()) or not bool(y.isfinite().all()):
                return math.inf
            moved, size = float(euclidean_norm(x.double() - y.double())), float(euclidean_norm(x))
            worst = max(worst, moved / size if size else math.inf if moved else 0.0)
    return worst


@contextmanager
def plain_attention() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def differing_epsilons(one: nn.Module, other: nn.Module) -> list[str]:
    """Modules of both whose ε differ."""
    return [path for path, name in _epsilons(one, other) if _epsilon(one, path, name) != _epsilon(other, path, name)]


def set_epsilons(one: nn.Module, other: nn.Module) -> None:
    """ε → 0 in what has one in both; a normalizer that is folded away left its own ε in the weights."""
    for path, name in _epsilons(one, other):
        for model in (one, other):
            setattr(model.get_submodule(path), name, TINY)


def _epsilons(one: nn.Module, other: nn.Module) -> list[tuple[str, str]]:
    """Modules of both that have an ε in both, and its name."""
    shared = dict(one.named_modules()).keys() & dict(other.named_modules()).keys()
    own = [(path, name) for path, _ in one.named_modules() if path in shared for name in EPSILONS]
    return [(path, name) for path, name in own if all(isinstance(_epsilon(model, path, name), float) for model in (one, other))]


def _epsilon(model: nn.Module, path: str, name: str) -> Any:
    return getattr(model.get_submodule(path), name, None)
