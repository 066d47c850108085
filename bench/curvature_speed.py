"""Time to the top eigenvalue and to the top five of the Hessian, in gradients, against pyhessian and curvlinops with SciPy.

At equal accuracy: each tool has the loosest of its tolerances that brings the largest relative error below ACCURACY. The truth is
ours in float64, with error bars far below that. Eval mode, by magnitude, one batch: what pyhessian can do. Digits, enlarged; the
small network is trained for a few steps, so that its spectrum has the outliers that a network in use has.

pyhessian, curvlinops and what they import need not be installed with their dependencies: pip install --no-deps into a directory
on PYTHONPATH is enough.
"""

from __future__ import annotations

import contextlib
import copy
import io
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import normscope as ns
from normscope.lab.datasets import digits
from normscope.lab.models import resnet18

ACCURACY = 1e-3
TRUTH = 1e-5  # relative: the error bars of the reference
PATIENCE = 60.0  # seconds: a tool that takes longer at one tolerance is not asked for the next
LOSS = nn.functional.cross_entropy
Data = tuple[torch.Tensor, torch.Tensor]
Found = list[tuple[float, float]]  # eigenvalues by magnitude, each with its stated error; inf if none is stated
Search = Callable[[nn.Module, Data, int, float], Found]


@dataclass(frozen=True)
class Tool:
    name: str
    search: Search
    tolerances: tuple[float, ...]


def ours(model: nn.Module, data: Data, count: int, tolerance: float, dtype: torch.dtype | None = None) -> Found:
    curvature = ns.hessian(model, LOSS, data, mode="eval", batch_size=len(data[0]), dtype=dtype)
    return [(pair.value, pair.error) for pair in curvature.top(count, which="magnitude", tolerance=tolerance)]


def pyhessian(model: nn.Module, data: Data, count: int, tolerance: float) -> Found:
    from pyhessian import hessian

    with contextlib.redirect_stdout(io.StringIO()):
        values = hessian(copy.deepcopy(model), LOSS, data=data, cuda=False).eigenvalues(1000, tolerance, count)[0]
    return [(value, float("inf")) for value in values]


def curvlinops(model: nn.Module, data: Data, count: int, tolerance: float) -> Found:
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    model = copy.deepcopy(model).eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    operator = HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [data], check_deterministic=False)
    values = eigsh(operator.to_scipy(), k=count, which="LM", tol=tolerance, return_eigenvectors=False)
    return [(value, float("inf")) for value in sorted(values.tolist(), key=abs, reverse=True)]


def tools() -> list[Tool]:
    found = [Tool("normscope", ours, (0.1, 0.03, 0.01, 0.003, 0.001))]
    peers = {"pyhessian": (pyhessian, (1e-3, 1e-4, 1e-5, 1e-6)), "curvlinops": (curvlinops, (0.1, 0.03, 0.01, 0.003, 0.001))}
    for name, (search, tolerances) in peers.items():
        try:
            __import__(name)
            found.append(Tool(name, search, tolerances))
        except ImportError as error:
            print(f"{name} cannot be imported ({error}): skipped")
    return found


def small() -> nn.Module:
    def block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [*block(3, 16, 1), *block(16, 32, 2), *block(32, 32, 1)]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def large() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return resnet18(classes=10, stem="small")


def images(count: int, side: int) -> Data:
    inputs, classes = digits().train
    inputs = nn.functional.interpolate(inputs[:count], size=(side, side), mode="bilinear").expand(-1, 3, -1, -1)
    return inputs.contiguous(), classes[:count]


def trained(model: nn.Module, data: Data, steps: int) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        LOSS(model.train()(data[0]), data[1]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


def gradient(model: nn.Module, data: Data) -> object:
    return torch.autograd.grad(LOSS(model(data[0]), data[1]), list(model.parameters()))


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def median(action: Callable[[], object], repeats: int = 5) -> float:
    action()
    return statistics.median(seconds(action) for _ in range(repeats))


def error(found: Found, truth: Found) -> float:
    return max(abs(abs(value) - abs(true)) / abs(true) for (value, _), (true, _) in zip(found, truth, strict=True))


def bars_hold(found: Found, truth: Found) -> bool:
    return all(abs(abs(value) - abs(true)) <= bar + own for (value, bar), (true, own) in zip(found, truth, strict=True))


def accurate(tool: Tool, model: nn.Module, data: Data, truth: Found) -> float:
    """The loosest tolerance with the accuracy wanted, or the last that patience allows."""
    for tolerance in tool.tolerances:
        start = time.perf_counter()
        found = tool.search(model, data, len(truth), tolerance)
        if error(found, truth) <= ACCURACY or time.perf_counter() - start > PATIENCE:
            break
    return tolerance


def compare(model: nn.Module, data: Data, count: int, chosen: list[Tool], unit: float, repeats: int) -> None:
    """Interleaved repeats of every search for `count` eigenvalues; unit: the seconds of a gradient."""
    truth = ours(model, data, count, TRUTH, torch.float64)
    assert all(bar <= 10 * TRUTH * abs(value) for value, bar in truth), "the reference is not accurate"
    tolerances = {tool.name: accurate(tool, model, data, truth) for tool in chosen}
    times: dict[str, list[float]] = {tool.name: [] for tool in chosen}
    found: dict[str, Found] = {}
    for _ in range(repeats):
        for tool in chosen:
            start = time.perf_counter()
            found[tool.name] = tool.search(model, data, count, tolerances[tool.name])
            times[tool.name].append(time.perf_counter() - start)
    own = statistics.median(times["normscope"])
    for name, spent in times.items():
        middle, reached = statistics.median(spent), error(found[name], truth)
        notes = ["" if reached <= ACCURACY else "accuracy not reached"]
        if name == "normscope":
            notes.append("within its error bars" if bars_hold(found[name], truth) else "OUTSIDE its error bars")
        print(
            f"  top {count}: {name:<11} tolerance {tolerances[name]:<6g} {middle:8.2f} s {middle / unit:8.1f} gradients "
            f"{middle / own:6.1f} × ours   error {reached:.1e} {', '.join(filter(None, notes))}",
            flush=True,
        )


def products(model: nn.Module, data: Data, unit: float) -> None:
    for compiled in (False, True):
        curvature = ns.hessian(model, LOSS, data, mode="eval", batch_size=len(data[0]), compiled=compiled)
        vector = curvature.matrix.normal(torch.Generator().manual_seed(0))
        first = seconds(partial(curvature.product, vector))
        each = median(partial(curvature.product, vector))
        kind = "compiled" if compiled else "eager"
        print(f"  {kind} product: {each / unit:.1f} gradients; the first one, which prepares the others: {first:.1f} s", flush=True)


def main() -> None:
    chosen = tools()
    for label, model, data, steps, repeats in (
        ("small BN conv net, batch 64", small(), images(64, 16), 40, 3),
        ("ResNet-18, batch 8", large(), images(8, 32), 0, 1),
    ):
        trained(model, data, steps)
        unit = median(partial(gradient, model, data))
        print(f"{label}: a gradient takes {unit:.3f} s", flush=True)
        products(model, data, unit)
        for count in (1, 5):
            compare(model, data, count, chosen, unit, repeats)


if __name__ == "__main__":
    main()
