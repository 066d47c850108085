"""Local upper bounds against the exact constant on boxes, for ReLU networks small enough to enumerate."""

from __future__ import annotations

import itertools
import statistics

import torch
from torch import nn

import normscope as ns
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.upper import upper
from normscope.testing import exact_relu_constant

SEEDS = 10


def relu_network(widths: tuple[int, ...], seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    """A random network, and a point of size 1 to put a box around."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs).double()
        with torch.no_grad():
            layer.weight.copy_(torch.randn(outputs, inputs, generator=generator) * (2 / inputs) ** 0.5)
            layer.bias.copy_(0.3 * torch.randn(outputs, generator=generator))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(widths[0], generator=generator, dtype=torch.float64)


def main() -> None:
    print(f"{'widths':>14} {'half-width':>10} {'median':>8} {'largest':>8}   upper / exact on a box, {SEEDS} networks")
    for widths in ((3, 8, 6, 2), (2, 10, 10, 10, 3)):
        for radius in (0.01, 0.1, 0.4, 1.0):
            ratios = []
            for seed in range(SEEDS):
                model, center = relu_network(widths, seed)
                box = ns.Box(center - radius, center + radius)
                found = upper(certifiable_graph(model, center[None], "eval", None), region=box)
                ratios.append(float(found.bound) / exact_relu_constant(model, box))
            print(f"{'-'.join(map(str, widths)):>14} {radius:>10} {statistics.median(ratios):8.3f} {max(ratios):8.3f}")


if __name__ == "__main__":
    main()
