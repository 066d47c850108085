"""A product with a matrix as one flat graph, compiled: what a tape computes, without the tape.

torch.compile has no second derivatives. But H v is linear in v, so that recording the backward pass over a tape while v alone is
unknown gives a graph without derivatives, in which all that does not depend on v is a constant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from normscope.core.errors import InputError, first_line

Parts = list[torch.Tensor]
PartialProduct = Callable[[Parts], Parts]  # of one batch

REASON_LENGTH = 200


def without_tape(product: PartialProduct, example: Parts, backend: str = "inductor") -> PartialProduct:
    """The same function of vectors with the shapes and dtypes of the example, compiled at once."""
    try:
        graph = make_fx(product)(example)
        fast = torch.compile(graph, backend=backend, fullgraph=True, dynamic=False)
        flat = torch.no_grad()(fast)
        flat(example)
    except Exception as error:  # whatever a compiler or its absence may raise
        raise InputError(f"the product cannot be compiled ({_reason(error)}): use compiled=False") from error
    return flat


def _reason(error: BaseException) -> str:
    """The innermost cause: compilers wrap what went wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"[:REASON_LENGTH]
