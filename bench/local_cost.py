"""The cost of a local certificate of ResNet-18 for one sample, in forward-backward passes of the same model."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch

import normscope as ns
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.known import Known
from normscope.certify.upper import upper
from normscope.lab.models import resnet18

REPEATS = 5


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    print(f"{'':>9} {'seconds of a':>12} {'seconds of a pass in':>27} {'passes a certificate in':>29}")
    print(f"{'stem':>9} {'certificate':>12} {'float64':>13} {'float32':>13} {'float64':>14} {'float32':>14}")
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for stem in ("imagenet", "small"):
        model = resnet18(classes=10, stem=stem).eval()
        graph = certifiable_graph(model, x, "eval", None)
        known = Known()
        upper(graph, known=known)  # the norms, computed once for all samples
        twin, point = copy.deepcopy(model).double(), x.double()

        def certify(graph=graph, known=known) -> None:
            upper(graph, region=ns.Ball(x[0], 0.01), known=known)

        times = [
            (
                seconds(certify),
                seconds(lambda: twin(point.clone().requires_grad_()).sum().backward()),  # noqa: B023
                seconds(lambda: model(x.clone().requires_grad_()).sum().backward()),  # noqa: B023
            )
            for _ in range(REPEATS)
        ]
        own, double, single = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{stem:>9} {own:12.2f} {double:13.3f} {single:13.3f} {own / double:14.1f} {own / single:14.1f}")


if __name__ == "__main__":
    main()
