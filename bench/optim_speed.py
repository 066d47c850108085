"""One step of AdamP and SGDP on ResNet-18's parameters against torch's Adam and SGD and the `adamp` package, interleaved, medians.

Gradients are orthogonal to the scale-free vectors, as real ones are, so that the cosine test of `adamp` fires. `adamp` is compared
where it is installed (docs/benchmarks.md says how).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from normscope.geometry.sphere import Spheres
from normscope.lab.models import resnet18
from normscope.optim import SGDG, SGDP, AdamG, AdamP

REPEATS = 25
LR = 1e-3


def model_with_gradients() -> tuple[torch.nn.Module, SimpleNamespace]:
    """ResNet-18 and its scale groups: every kernel before its BN, one vector per output channel."""
    model, generator = resnet18(), torch.Generator().manual_seed(0)
    groups = []
    for name, parameter in model.named_parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 4:
            parameter.grad = Spheres((0,)).project(parameter.detach(), parameter.grad)
            described = {"parameters": (name,), "axes": ((0,),), "blocks": (1,), "degrees": (1.0,), "count": len(parameter)}
            groups.append(SimpleNamespace(kind="scale", **described))
    return model, SimpleNamespace(groups=tuple(groups))


def ours(kind: type[torch.optim.Optimizer], **settings) -> Callable[[], object]:
    model, report = model_with_gradients()
    return kind(model.named_parameters(), lr=LR, symmetries=report, **settings).step


def theirs(kind: type[torch.optim.Optimizer], **settings) -> Callable[[], object]:
    return kind(model_with_gradients()[0].parameters(), lr=LR, **settings).step


def tables() -> list[dict[str, Callable[[], object]]]:
    """Two tables; the first line of each is what the others are divided by."""
    momentum = {"momentum": 0.9}
    adam = {
        "torch Adam(foreach=True)": theirs(torch.optim.Adam, foreach=True),
        "torch Adam()": theirs(torch.optim.Adam),
        "AdamP()": ours(AdamP),
        "AdamP(foreach=True)": ours(AdamP, foreach=True),
        "AdamG()": ours(AdamG),
    }
    sgd = {
        "torch SGD(foreach=True)": theirs(torch.optim.SGD, foreach=True, **momentum),
        "torch SGD()": theirs(torch.optim.SGD, **momentum),
        "SGDP()": ours(SGDP, **momentum),
        "SGDP(foreach=True)": ours(SGDP, foreach=True, **momentum),
        "SGDG()": ours(SGDG, **momentum),
    }
    try:
        import adamp
    except ImportError:
        print("adamp is not installed (docs/benchmarks.md says how): left out")
    else:
        adam["adamp.AdamP()"] = theirs(adamp.AdamP)
        sgd["adamp.SGDP()"] = theirs(adamp.SGDP, **momentum)
    return [adam, sgd]


def main() -> None:
    for table in tables():
        times: dict[str, list[float]] = {name: [] for name in table}
        for repeat in range(REPEATS + 2):
            for name, step in table.items():
                start = time.perf_counter()
                step()
                if repeat >= 2:  # the first steps allocate the states
                    times[name].append(time.perf_counter() - start)
        medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        base, default = list(medians)[:2]
        for name, middle in medians.items():
            ratios = middle / medians[base], middle / medians[default]
            print(f"{name:<26} {middle:7.2f} ms   {ratios[0]:5.2f} × foreach   {ratios[1]:5.2f} × default")


if __name__ == "__main__":
    main()
