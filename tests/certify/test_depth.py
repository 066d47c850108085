"""The bracket with depth: at every layer a bound on that part of the network, and a separation that it never falls below."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.lab.models import mlp, resnet18


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.norm(self.first(x)))


def audited(model: nn.Module, *shape: int) -> ns.Audit:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_var.uniform_(0.1, 3.0, generator=generator)
    return ns.audit(model.eval(), torch.randn(4, *shape, generator=generator), effort=0.2, generator=generator)


MODELS = {
    "chain": lambda: (mlp(16, 5, 12, normalizer="batch", generator=torch.Generator().manual_seed(0)), 12),
    "residual": lambda: (Residual(), 6),
}


@pytest.mark.parametrize("name", MODELS)
def test_separations_lie_below_bounds(name):
    found = audited(*MODELS[name]())
    for row in found.layers:
        assert row.separation <= row.upper_here.widened(1e-9)
    assert found.bracket.lower <= found.layers[-1].upper_here or found.residual


@pytest.mark.full
def test_separations_lie_below_bounds_in_a_deep_network():
    found = ns.audit(resnet18(generator=torch.Generator().manual_seed(0)).eval(), torch.randn(2, 3, 32, 32), effort=0.2)
    assert all(row.separation <= row.upper_here.widened(1e-9) for row in found.layers)


def test_every_prefix_is_bounded():
    """upper_here is at least the bracket's lower side of the network cut off behind the layer."""
    model, width = MODELS["chain"]()
    rows = audited(model, width).layers
    for row in rows:
        part = nn.Sequential(*list(model)[: int(row.name) + 1])
        assert ns.lipschitz(part, torch.randn(4, width), effort=0.2).lower <= row.upper_here.widened(1e-9)


def test_without_gains_is_the_product_of_the_weights():
    rows = audited(*MODELS["chain"]()).layers
    product = ns.Magnitude(1)
    for row in rows:
        if row.spectral_norm is not None:
            product = product * row.spectral_norm
        assert abs(row.upper_without_gains.log10 - product.log10) < 1e-9


def test_rows_know_what_they_read():
    rows = {row.name: row.reads for row in audited(Residual(), 6).layers}
    assert rows == {"first": (), "norm": ("first",), "second": ("norm",)}
