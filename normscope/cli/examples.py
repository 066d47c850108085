"""--input on the command line: random examples of the shapes that a model takes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from normscope.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

SHAPE = re.compile(r"(?:([A-Za-z_]\w*)[=:])?([1-9]\d*(?:[x×][1-9]\d*)*)(:int)?")
FEW_IDS = 100  # token ids of a model without an embedding


def random_example(shapes: list[str], batch: int, dtype: torch.dtype, generator: torch.Generator, ids: int = FEW_IDS) -> Any:
    """Normal random inputs of the given shapes, or ids below `ids`: a tuple of arguments, or a dict where shapes have names."""
    import torch

    matches = [SHAPE.fullmatch(shape) for shape in shapes]
    named: dict[str, torch.Tensor] = {}
    plain: list[torch.Tensor] = []
    for text, match in zip(shapes, matches, strict=True):
        if match is None:
            raise InputError(
                f"--input {text!r} is not a shape: write that of one sample as 3x32x32, or name=3x32x32; of ids name:16:int"
            )
        sizes = [int(size) for size in re.split("[x×]", match[2])]
        if match[3] is None:
            value = torch.randn(batch, *sizes, generator=generator, dtype=dtype)
        else:
            value = torch.randint(ids, (batch, *sizes), generator=generator)
        if match[1] is None:
            plain.append(value)
        elif match[1] in named:
            raise InputError(f"--input {match[1]} is given twice: give each name once")
        else:
            named[match[1]] = value
    if named and plain:
        raise InputError("some --input have a name and some have none: name all of them or none")
    return named or tuple(plain)


def ids_of(model: torch.nn.Module) -> int:
    """How many ids every embedding of a model knows."""
    import torch

    return min((m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)), default=FEW_IDS)


def dtype_of(model: torch.nn.Module | ExportedProgram) -> torch.dtype:
    """The type of a model's floating-point parameters, float32 where it has none."""
    import torch

    state = model.state_dict if isinstance(model, torch.export.ExportedProgram) else model.state_dict()
    tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
    return next((value.dtype for value in tensors if value.is_floating_point()), torch.float32)
