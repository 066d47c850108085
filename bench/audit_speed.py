"""`ns.audit` of ResNet-18 against weightwatcher's `analyze()` on the same weights, interleaved, medians.

weightwatcher is a peer for scale: it gives spectra and power-law fits of the weights, no bound of the network.
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import time
import warnings

import torch

import normscope as ns
from normscope.lab.models import resnet18

REPEATS = 3


def seconds(function) -> float:
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        function()
    return time.perf_counter() - start


def trained_looking(model: torch.nn.Module, generator: torch.Generator) -> torch.nn.Module:
    """Random running statistics and γ, so that no BN is a plain multiple of the identity (which is cheaper to fold)."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                for tensor in (module.running_var, module.weight):
                    tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return model


def main() -> None:
    try:
        import weightwatcher
    except ImportError:
        print("weightwatcher is not installed (docs/benchmarks.md says how): skipped")
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    fresh, trained = resnet18().eval(), trained_looking(resnet18(), generator).eval()
    small, large = (torch.randn(1, 3, n, n, generator=generator) for n in (32, 224))
    tasks = {
        "weightwatcher analyze()": lambda: weightwatcher.WeightWatcher(model=fresh).analyze(),
        "audit 3x32x32, as initialized": lambda: ns.audit(fresh, small),
        "audit 3x32x32, random BN statistics": lambda: ns.audit(trained, small),
        "audit 3x224x224, as initialized": lambda: ns.audit(fresh, large),
        "audit 3x224x224, random BN statistics": lambda: ns.audit(trained, large),
    }
    for task in tasks.values():
        seconds(task)  # warm-up
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(REPEATS):
        for name, task in tasks.items():
            times[name].append(seconds(task))
    base = statistics.median(times["weightwatcher analyze()"])
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:<40} {middle:6.2f} s   {middle / base:5.2f} × weightwatcher   (min {min(values):.2f}, max {max(values):.2f})")


if __name__ == "__main__":
    main()
