"""Time of an audit against depth, for a plain ReLU network: linear."""

from __future__ import annotations

import time

import torch

import normscope as ns
from normscope.lab.models import mlp


def main() -> None:
    print(f"{'layers':>6} {'seconds':>8} {'ms/layer':>10} {'log10 upper':>12}")
    for depth in (125, 250, 500, 1000):
        model = mlp(width=64, depth=depth, inputs=64, normalizer="none")
        start = time.perf_counter()
        audit = ns.audit(model, torch.randn(1, 64, generator=torch.Generator().manual_seed(0)))
        spent = time.perf_counter() - start
        print(f"{depth:>6} {spent:8.2f} {1000 * spent / depth:10.1f} {audit.bracket.upper.log10:12.1f}")


if __name__ == "__main__":
    main()
