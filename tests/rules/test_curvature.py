"""On a ball, ‖f(y) − f(y') − J(middle)(y − y')‖ ≤ curvature · ‖y − y'‖; and the factor is not far above what is found."""

import math

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns
from normscope.certify.upper import forward_pass
from normscope.graph.trace import trace
from normscope.rules.normalizers import BEND
from normscope.rules.registry import registry
from tests.networks import Function


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 3.0])
def test_no_normalizer_bends_more_than_stated_and_some_bend_as_much(epsilon):
    """√d s² ‖D²(u/s)[h, h]‖ for ‖h‖ = 1, all angles between u and h: at most `BEND`, and that at ρ² = ‖u‖²/(d s²) ≥ 1/3."""
    u = torch.tensor([1.5, 0.0, 0.0], dtype=torch.float64)
    scale = (u.square().mean() + epsilon).sqrt()

    def normalized(x):
        return x / (x.square().mean() + epsilon).sqrt()

    def bend(angle):
        h = torch.stack([angle.cos(), angle.sin(), torch.zeros_like(angle)])
        return torch.func.jvp(lambda x: torch.func.jvp(normalized, (x,), (h,))[1], (u,), (h,))[1].norm() * math.sqrt(3) * scale**2

    largest = max(float(bend(angle)) for angle in torch.linspace(0, math.pi, 400, dtype=torch.float64))
    assert largest <= BEND * (1 + 1e-12)
    if float(u.square().mean() / scale**2) >= 1 / 3:
        assert largest >= BEND * (1 - 1e-3)


# function, input shape, how far above the largest sampled value the factor may be
CASES = {
    "layer_norm": (nn.LayerNorm(6), (1, 6), 4),
    "layer_norm with weights": (nn.LayerNorm(6), (1, 2, 6), 8),
    "rms_norm": (nn.RMSNorm(6, eps=1e-3), (1, 6), 4),
    "group_norm": (nn.GroupNorm(2, 4), (1, 4, 3), 8),
    "unit vectors": (lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-3), (1, 6), 4),
    "sample deviation": (lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-3), (1, 6), 4),
    "product": (lambda x: x[:, :3] * x[:, 3:], (1, 6), 4),
    "square": (lambda x: x * x, (1, 6), 4),
    "broadcast product": (lambda x: x[:, :1] * x[:, 1:], (1, 6), 4),
    "matmul": (lambda x: x @ x.mT, (1, 3, 3), 10),
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x), (1, 3, 3), 10),
    "softmax": (lambda x: x.softmax(-1), (1, 6), 12),
    "attention": (lambda x: functional.scaled_dot_product_attention(x, x, x), (1, 2, 4, 3), 120),
    "causal attention": (lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True), (1, 2, 4, 3), 120),
}  # fmt: skip


@pytest.mark.quick(6)
@pytest.mark.parametrize("radius", [1e-4, 0.1, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_the_derivative_is_as_close_as_stated(name, radius):
    function, shape, slack = CASES[name]
    model = (function if isinstance(function, nn.Module) else Function(function)).double()
    generator = torch.Generator().manual_seed(0)
    if name.endswith("weights"):
        with torch.no_grad():
            model.weight.copy_(torch.randn(6, generator=generator))
    center = torch.randn(shape, generator=generator, dtype=torch.float64)
    graph = trace(model, center, "eval", None)
    context = forward_pass(graph, region=ns.Ball(center[0], radius))
    node = graph.output
    factors = registry[node.op].curvature(node, context)
    arriving = {source: float(context.at(source)) for source in node.inputs}
    stated = sum(factor * arriving[source] for factor, source in zip(factors, node.inputs, strict=True))

    away = torch.randn(2, 400, *shape, generator=generator, dtype=torch.float64)
    away[:, :100] = torch.autograd.functional.jacobian(lambda x: model(x).square().sum(), center) * (1 + 0.1 * away[:, :100])
    away *= (radius / away.flatten(2).norm(dim=2)).reshape(2, 400, *[1] * len(shape))
    away[1, ::2] = away[0, ::2] * (1 - 1e-3)  # close to each other, far from the middle
    first, second = center + away

    def rest(y, other):
        return model(y) - model(other) - torch.func.jvp(model, (center,), (y - other,))[1]

    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = torch.stack([rest(y, other) for y, other in zip(first, second, strict=True)]).flatten(1).norm(dim=1)
    largest = float((found / (first - second).flatten(1).norm(dim=1)).max())
    assert largest <= stated * (1 + 1e-6) + 1e-9
    assert math.isfinite(stated)
    if radius <= 0.1:
        assert stated <= slack * largest + 1e-9
