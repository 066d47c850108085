"""Time to the top eigenvalue and to the top five of the Hessian, in gradients, against pyhessian and curvlinops with SciPy.

Eval mode, by magnitude, one batch: what pyhessian can do. Its stopping rule (tolerance 1e-3) bounds no error, so every line
shows the largest relative error of its eigenvalues against ours in float64 with a residual of 1e-6.
"""

from __future__ import annotations

import contextlib
import copy
import io
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import normscope as ns
from normscope.lab.models import resnet18

REPEATS = 3
LOSS = nn.functional.cross_entropy
Data = tuple[torch.Tensor, torch.Tensor]
Search = Callable[[nn.Module, Data, int], list[float]]


def small() -> nn.Module:
    def block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, 16, 1), *block(16, 32, 2), *block(32, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


def ours(tolerance: float, dtype: torch.dtype | None = None) -> Search:
    def search(model: nn.Module, data: Data, count: int) -> list[float]:
        curvature = ns.hessian(model, LOSS, data, "eval", batch_size=len(data[0]), dtype=dtype)
        return [pair.value for pair in curvature.top(count, which="magnitude", tolerance=tolerance)]

    return search


def pyhessian(model: nn.Module, data: Data, count: int) -> list[float]:
    from pyhessian import hessian

    model = copy.deepcopy(model)
    with contextlib.redirect_stdout(io.StringIO()):
        return hessian(model, LOSS, data=data, cuda=False).eigenvalues(top_n=count, tol=1e-3)[0]


def curvlinops(model: nn.Module, data: Data, count: int) -> list[float]:
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    model = copy.deepcopy(model).eval()
    parameters = dict(model.named_parameters())
    operator = HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [data], check_deterministic=False)
    values = eigsh(operator.to_scipy(), k=count, which="LM", tol=3e-2, return_eigenvectors=False)
    return sorted(values.tolist(), key=abs, reverse=True)


def gradient(model: nn.Module, data: Data) -> object:
    return torch.autograd.grad(LOSS(model(data[0]), data[1]), list(model.parameters()))


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def searches() -> dict[str, Search]:
    found: dict[str, Search] = {"normscope, residual 0.03": ours(0.03), "normscope, residual 0.001": ours(0.001)}
    for name, peer in {"pyhessian": pyhessian, "curvlinops + eigsh": curvlinops}.items():
        try:
            __import__(name.split()[0])
            found[name] = peer
        except ImportError as error:
            print(f"{name} cannot be imported ({error}): skipped")
    return found


def median(action: Callable[[], object], repeats: int = 5) -> float:
    action()
    return statistics.median(seconds(action) for _ in range(repeats))


def compare(model: nn.Module, data: Data, count: int, found: dict[str, Search], unit: float) -> None:
    """Interleaved repeats of every search for `count` eigenvalues; unit: the seconds of a gradient."""
    exact = ours(1e-6, torch.float64)(model, data, count)
    times: dict[str, list[float]] = {name: [] for name in found}
    errors: dict[str, float] = {}
    for _ in range(REPEATS):
        for name, search in found.items():
            start = time.perf_counter()
            values = search(model, data, count)
            times[name].append(time.perf_counter() - start)
            errors[name] = max(abs(abs(value) - abs(true)) / abs(true) for value, true in zip(values, exact, strict=True))
    for name, spent in times.items():
        middle = statistics.median(spent)
        print(f"  top {count}: {name:<25} {middle:7.2f} s {middle / unit:7.1f} gradients   error {errors[name]:.1e}", flush=True)


def main() -> None:
    generator, found = torch.Generator().manual_seed(0), searches()
    for label, model, shape in (
        ("small BN conv net, batch 64", small(), (64, 3, 16, 16)),
        ("ResNet-18, batch 16", resnet18(classes=10, stem="small"), (16, 3, 32, 32)),
    ):
        model.eval()
        data = torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)
        unit = median(partial(gradient, model, data))
        curvature = ns.hessian(model, LOSS, data, "eval", batch_size=shape[0])
        product = median(partial(curvature.product, curvature.matrix.normal(generator)))
        print(f"{label}: a gradient takes {unit:.3f} s, a product {product / unit:.1f} gradients")
        del curvature
        for count in (1, 5):
            compare(model, data, count, found, unit)


if __name__ == "__main__":
    main()
