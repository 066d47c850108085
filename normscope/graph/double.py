"""A model as it runs, but in float64 throughout: the function that a certificate is about.

Weights, buffers and inputs are the stored numbers, casts between floating-point types are identities, and so is every
`dtype=`; what the model asks of its tensors (`x.dtype`, `torch.finfo(x.dtype).min`, a default ε) is answered as always.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from normscope.graph.graph import cast, cast_type
from normscope.graph.running import is_plain, view_of

FACTORIES = (torch.arange, torch.linspace, torch.logspace, torch.full, torch.range)
LITERALS = (torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.Tensor.new_tensor)  # numbers of the source, rounded as there
ASKS_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
READERS = (  # they neither write to an argument nor return a view of one
    torch.addmm, torch.matmul, torch.mm, torch.bmm, torch.baddbmm, torch.Tensor.matmul, torch.Tensor.__matmul__,
    torch.nn.functional.linear, torch.nn.functional.embedding, torch.conv1d, torch.conv2d, torch.conv3d,
)  # fmt: skip
NARROWING = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


def softplus_threshold(threshold: float, dtype: torch.dtype) -> float:
    """Where softplus becomes x itself. Beyond its threshold t torch returns x, a shortcut that is e^-t/t off, relatively: a jump.

    Where that is no more than the rounding of the dtype that the model runs in, the smooth function is meant, and a threshold of 40
    makes the shortcut exact in float64. Otherwise the jump is part of the function.
    """
    within_rounding = threshold > 0 and math.exp(-threshold) / threshold <= torch.finfo(dtype).eps / 2
    return max(threshold, 40) if within_rounding else threshold


def in_double(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation that computes in float64: every floating-point `dtype` of them is.

    made: the fake result of an operation on no tensor, such as linspace: where it is floating-point, float64 is asked for.
    """
    args, kwargs = tree_map_only(torch.dtype, partial(cast_type, wanted=torch.float64), (args, kwargs))
    schema = getattr(target, "_schema", None)
    if schema is None or not isinstance(made, torch.Tensor) or not made.is_floating_point():
        return args, kwargs
    names = [argument.name for argument in schema.arguments]
    factory = "dtype" in names and not any("Tensor" in str(argument.type) for argument in schema.arguments)
    if factory and names.index("dtype") >= len(args):
        kwargs = {**kwargs, "dtype": torch.float64}
    return args, kwargs


class InDouble(TorchFunctionMode):
    """Every call of torch gets float64 in place of other floating-point tensors and types.

    A tensor of another type is read and written through one copy, its shadow, so that nothing of the model's own changes, and so is
    another that is the same view of its memory; what the large products alone read is copied for each of them, so that not all
    weights are there twice.
    dtype: what the model computes in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.shadows: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function == ASKS_DTYPE:  # a wrapper made anew at every access
            asked = function(*args)
            return cast_type(asked, self.dtype) if asked in (torch.float64, torch.complex128) else asked
        if function in LITERALS:
            if function is torch.Tensor.new_tensor and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": self.dtype if args[0].is_floating_point() else args[0].dtype}
            return function(*args, **kwargs)
        args, kwargs = tree_map(partial(self.double, kept=function not in READERS or "out" in kwargs), (args, kwargs))
        if function in NARROWING:
            return args[0].double()
        if function in (torch.rms_norm, torch.nn.functional.rms_norm) and len(args) < 4 and kwargs.get("eps") is None:
            kwargs = {**kwargs, "eps": torch.finfo(self.dtype if self.dtype == torch.float64 else torch.float32).eps}
        if function is torch.nn.functional.softplus:
            given = dict(zip(("input", "beta", "threshold"), args, strict=False)) | kwargs
            args, kwargs = (), {**given, "threshold": softplus_threshold(given.get("threshold", 20), self.dtype)}
        result = function(*args, **kwargs)
        if function in FACTORIES and result.is_floating_point() and kwargs.get("dtype") is None:
            return function(*args, **{**kwargs, "dtype": torch.float64})
        return result

    def double(self, value: Any, kept: bool = True) -> Any:
        """float64 for any other floating-point type, and the shadow of a tensor of such a type, kept where it may be written to."""
        if isinstance(value, torch.dtype):
            return cast_type(value, torch.float64)
        if not isinstance(value, torch.Tensor) or value.dtype == cast_type(value.dtype, torch.float64):
            return value
        place = view_of(value) if is_plain(value) else id(value)
        if place in self.shadows:
            return self.shadows[place][1]
        made = cast(value.detach(), torch.float64)
        if kept:
            self.shadows[place] = value, made
        return made
