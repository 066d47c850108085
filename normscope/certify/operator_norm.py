"""`ns.certify.operator_norm`: the norm of one linear map, or of any affine module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from normscope.certify.checking import check_bound
from normscope.certify.lower import Space, derivatives, quotient
from normscope.certify.relaxation import has_adjoint, is_adjoint, linear_part
from normscope.certify.upper import Upper, upper
from normscope.core.bracket import Bracket, Certificate, Step, Witness
from normscope.core.errors import InputError, boundary, first_line
from normscope.core.magnitude import ONE, Magnitude, total
from normscope.graph.exporting import module_of
from normscope.graph.graph import Graph, check_finite
from normscope.graph.trace import trace
from normscope.operators.dense import largest_eigenpair, spectral_norm
from normscope.rules.registry import registry

DENSE_INPUTS = 2000
CONVOLUTIONS = {
    (3, False): torch.nn.Conv1d, (4, False): torch.nn.Conv2d, (5, False): torch.nn.Conv3d,
    (3, True): torch.nn.ConvTranspose1d, (4, True): torch.nn.ConvTranspose2d, (5, True): torch.nn.ConvTranspose3d,
}  # fmt: skip


@boundary
def operator_norm(
    weight_or_module: torch.Tensor | torch.nn.Module,
    input_shape: int | Sequence[int] | None = None,
    *,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    transposed: bool = False,
) -> Bracket:
    """Bracket ‖A‖ (ℓ2 → ℓ2) for a matrix, a convolution kernel or an affine module.

    >>> import torch
    >>> print(operator_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]])))
    5.00 ≤ L ≤ 5.00

    input_shape: one sample's shape, without the batch: (channels, height, width) for a 2-D convolution; for a kernel the
    spatial part is enough.
    stride: of a kernel, as are all that follow; a module knows them itself.
    padding: a number, one per axis, "same" or "valid".
    dilation: the distance between taps.
    groups: of channels that are convolved apart.
    padding_mode: "zeros", "circular", "reflect" or "replicate".
    transposed: whether the kernel is that of a transposed convolution.
    """
    if isinstance(weight_or_module, torch.Tensor):
        settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": padding_mode}
        module, shape = _as_module(weight_or_module, input_shape, transposed, settings)
    else:
        module = module_of(weight_or_module)
        if input_shape is None:
            if not isinstance(module, torch.nn.Linear):
                raise InputError("operator_norm of a module needs input_shape, the shape of one sample without the batch")
            input_shape = (module.in_features,)
        shape = _sizes(input_shape, 1)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    graph = trace(module, torch.zeros(1, *shape, dtype=dtype))
    check_finite(graph)
    _check_affine(graph)
    return _bracket(graph)


def _sizes(input_shape: int | Sequence[int] | None, axes: int) -> tuple[int, ...]:
    shape = (input_shape,) * axes if isinstance(input_shape, int) else () if input_shape is None else input_shape
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise InputError(f"input_shape must be a whole number or several of them, each at least 0, got {input_shape!r}")
    return tuple(shape)


def _as_module(
    weight: torch.Tensor, input_shape: int | Sequence[int] | None, transposed: bool, settings: Mapping[str, Any]
) -> tuple[torch.nn.Module, tuple[int, ...]]:
    weight = weight.detach()
    if weight.is_complex():
        raise InputError("a weight is real, not complex; a complex map is a real one twice its size: pass [[Re, −Im], [Im, Re]]")
    if weight.layout != torch.strided:
        raise InputError(f"a weight is a dense tensor, not one in {weight.layout} layout")
    if not weight.is_floating_point():
        weight = weight.to(torch.float64)
    if weight.dim() == 2:
        module: torch.nn.Module = torch.nn.utils.skip_init(torch.nn.Linear, weight.shape[1], weight.shape[0], bias=False)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        return module, (weight.shape[1],)
    if weight.dim() not in (3, 4, 5):
        raise InputError(f"a weight is a matrix or a kernel (out, in/groups, *taps), not a tensor of shape {tuple(weight.shape)}")
    axes = weight.dim() - 2
    shape = _sizes(input_shape, axes)
    groups = settings["groups"]
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    out_channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if len(shape) == axes + 1:
        if shape[0] != channels:
            raise InputError(
                f"input_shape {shape} has {shape[0]} channels, the kernel of shape {tuple(weight.shape)} takes {channels}"
            )
        shape = shape[1:]
    if len(shape) != axes:
        raise InputError(f"a kernel of shape {tuple(weight.shape)} needs input_shape with its {axes} spatial sizes")
    kind = CONVOLUTIONS[(weight.dim(), transposed)]
    try:
        module = torch.nn.utils.skip_init(kind, channels, out_channels, tuple(weight.shape[2:]), bias=False, **settings)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{kind.__name__} does not take these settings: {first_line(error)}") from error
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module, (channels, *shape)


def _check_affine(graph: Graph) -> None:
    for node in graph:
        rule = registry.find(node)
        affine = rule is not None and (rule.linear(node) or ((slopes := rule.slopes(node)) is not None and slopes[0] == slopes[1]))
        if not node.is_input and not affine:
            raise InputError(f"{node.label} is not affine, so the module has no operator norm; use ns.lipschitz")


def _rounding(composed: Upper) -> Magnitude:
    """A bound on the error of A x in float64 for ‖x‖ = 1: what each node rounds, carried on along all paths together.

    Where branches cancel, this is what is left of their digits.
    """
    at = dict.fromkeys(composed.graph.inputs, ONE)
    for link in composed.layered:
        at[link.node] = total(factor * at[source] for factor, source in zip(link.gain.factors, link.sources, strict=True))
    rules = [(registry.find(node), node) for node in composed.graph if not node.is_input]
    return at[composed.graph.output] * (2 * sum(rule.roundoff(node) for rule, node in rules if rule is not None))


def _bracket(graph: Graph) -> Bracket:
    space = Space(graph)
    zero = torch.zeros(space.dimension, dtype=torch.float64)
    function = space.function(torch.float64)
    push, pull = derivatives(function, zero[None])  # A and Aᵀ: no large b takes their digits

    def gram(vector: torch.Tensor) -> torch.Tensor:
        return pull(push(vector[None]) / scale)[0] / scale  # neither squares overflow nor vanish

    composed = upper(graph)
    bound, certificate = composed.bound, composed.certificate
    if len(composed.links) > 1 and space.dimension <= DENSE_INPUTS:
        units = torch.eye(space.dimension, dtype=torch.float64)
        matrix = derivatives(function, torch.zeros_like(units))[0](units)
        dense = spectral_norm(matrix, float(_rounding(composed) * math.sqrt(space.dimension)))
        backward = dense < bound and all(has_adjoint(node, linear_part) for node in graph if not node.is_input)
        if backward and is_adjoint(lambda x: (function(x[None]) - function(zero[None]))[0], [matrix.T], [zero]):
            step = Step(graph.output.name, graph.output.path, "whole map", dense, "exact")
            bound, certificate = dense, Certificate((step,))
            check_bound(graph, bound, None)
    scale = float(bound) if bound.finite and 0 < float(bound) < float("inf") else 1.0
    _, vector = largest_eigenpair(gram, space.dimension, torch.float64, 1e-10)
    low = quotient(graph, space, zero, vector) if bool(bound) else Magnitude(0)
    witness = Witness(space.single(zero), space.single(vector), lambda: quotient(graph, space, zero, vector))
    return Bracket(low, bound, witness, certificate, certificate.steps, graph.notes)
