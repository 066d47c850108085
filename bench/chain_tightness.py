"""How far below the product of norms the chain bounds are, on the random networks of the ECLipsE paper's kind."""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch

from normscope.certify import chains
from normscope.core.magnitude import product
from normscope.operators.dense import spectral_norm


def network(layers: int, width: int) -> list[torch.Tensor]:
    """dims [4, w, …, w, 1]; for each layer a norm uniform in [0.4, 1.8], then a Gaussian matrix scaled to it."""
    random = np.random.RandomState(7 * width + 13 * layers)
    dims = [4] + [width] * (layers - 1) + [1]
    weights = []
    for before, after in itertools.pairwise(dims):
        norm = random.uniform(0.4, 1.8)
        matrix = random.standard_normal((after, before))
        weights.append(torch.from_numpy(matrix * (norm / np.linalg.norm(matrix, 2))))
    return weights


def main() -> None:
    print(f"{'layers':>6} {'width':>5} {'product':>12} {'LipLT':>12} {'ECLipsE-Fast':>12} {'seconds':>8}")
    for layers, width in ((5, 60), (10, 60), (20, 60), (50, 60), (100, 60)):
        chain = [chains.Layer(lambda w=w: w, spectral_norm(w), len(w), (0.0, 1.0)) for w in network(layers, width)]
        plain = product(layer.norm for layer in chain)
        start = time.perf_counter()
        fast = chains.eclipse_fast(chain)
        spent = time.perf_counter() - start
        tree = chains.liplt(chain)
        assert fast is not None
        print(
            f"{layers:>6} {width:>5} {format(plain, '.5'):>12} {format(plain * tree, '.5') if tree else '(too deep)':>12} "
            f"{format(plain * fast, '.5'):>12} {spent:8.3f}"
        )


if __name__ == "__main__":
    main()
