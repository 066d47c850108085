"""What `ns.watch` costs: the budget against the wall clock, one fully sampled step against a plain one, and a naive recorder.

Two copies of one training, interleaved step by step or segment by segment on the same machine; ratios of medians, with
bootstrap intervals. SECONDS and REPEATS in the environment make it longer or shorter.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import normscope as ns
from normscope._watch.columns import schema
from normscope._watch.store import Writer
from normscope.lab.models import mlp, resnet18

SECONDS = float(os.environ.get("SECONDS_EACH", "120"))  # of each budgeted training
REPEATS = int(os.environ.get("REPEATS", "12"))  # of each sampled step
SEGMENT = 4.0  # seconds between changes from one copy to the other


def transformer() -> nn.Module:
    """Twelve pre-norm encoder layers of width 256 on 64 tokens."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.LayerNorm(256), Mean(), nn.Linear(256, 10)
    )


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-18, 3x32x32, batch 128, small stem": (lambda: resnet18(10, stem="small"), (128, 3, 32, 32)),
    "ResNet-18, 3x32x32, batch 128, imagenet stem": (lambda: resnet18(10), (128, 3, 32, 32)),
    "transformer, 12 layers": (transformer, (16, 64, 256)),
    "MLP, 100 layers of 512": (lambda: mlp(512, 100, 512, normalizer="batch"), (128, 512)),
}


class Training:
    """One copy of a training, with a clock that runs only while it does."""

    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)
        self.active, self.since = 0.0, None
        self.after_backward: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return self.active + (0.0 if self.since is None else time.perf_counter() - self.since)

    def step(self) -> float:
        self.since = start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.after_backward()
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.active, self.since = self.active + seconds, None
        return seconds

    def watch(self, **options) -> ns.Watch:
        watch = ns.watch(self.model, self.optimizer, tempfile.mkdtemp(), quiet=True, **options)
        watch.budget.clock = self.clock
        watch.budget.started = self.clock()
        return watch


class Naive:
    """What one writes by hand: a `.item()` a tensor and statistic, and an exact SVD a weight."""

    def __init__(self, training: Training) -> None:
        self.model, self.found = training.model, {}
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.ReLU)):
                module.register_forward_pre_hook(lambda module, args, name=name: self.look(name, args[0]))
        training.after_backward = self.weights

    def look(self, name: str, x: Tensor) -> None:
        x = x.detach()
        self.found[name] = [x.var().item(), x.abs().max().item(), (x <= 0).float().mean().item()]

    def weights(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.dim() > 1:
                norm = torch.linalg.matrix_norm(parameter.detach().flatten(1), 2).item()
                self.found[name] = [norm, parameter.norm().item(), parameter.grad.norm().item()]


def interval(left: list[float], right: list[float], average=np.median) -> tuple[float, float, float]:
    """average(left)/average(right) and its 95 % bootstrap interval, pairs drawn together."""
    pairs, random = np.array([left, right]), np.random.default_rng(0)
    draws = pairs[:, random.integers(len(left), size=(2000, len(left)))]
    low, high = np.quantile(average(draws[0], 1) / average(draws[1], 1), [0.025, 0.975])
    return float(average(pairs[0], 0) / average(pairs[1], 0)), float(low), float(high)


def sampled_step(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    plain, watched, naive = (Training(make, shape) for _ in range(3))
    watch = watched.watch(every=1)
    Naive(naive)
    times: dict[str, list[float]] = {"plain": [], "watched": [], "naive": []}
    for repeat in range(REPEATS + 2):
        for name, training in (("plain", plain), ("watched", watched), ("naive", naive)):
            if name == "naive" and repeat > 3:
                continue  # it takes too long to repeat it often
            seconds = training.step()
            if repeat >= 2:
                times[name].append(seconds)
    watch.close()
    ratio, low, high = interval(times["watched"], times["plain"])
    slow = statistics.median(times["naive"]) / statistics.median(times["plain"])
    extra = f"{ratio - 1:+.3f} of a plain step (95 % {low - 1:+.3f} to {high - 1:+.3f})"
    print(f"  every step sampled: {extra}; naive recorder {slow - 1:+.2f}", flush=True)


def budgeted(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    plain, watched = (Training(make, shape) for _ in range(2))
    watch = watched.watch()
    for training in (plain, watched):
        for _ in range(2):
            training.step()
    left, right = [], []
    begin = time.perf_counter()
    while time.perf_counter() - begin < 2 * SECONDS:
        start, pair = time.perf_counter(), (0.0, 0.0)
        steps = 0
        while time.perf_counter() - start < SEGMENT or steps < 2:
            pair = pair[0] + watched.step(), pair[1] + plain.step()
            steps += 1
        left.append(pair[0] / steps)
        right.append(pair[1] / steps)
    summary = watch.summary()
    watch.close()
    bounds = interval(left, right, np.mean)
    print(
        f"  budget 1 %: accounted {100 * summary['overhead']:.2f} %, {summary['sampled_steps']} of {summary['steps']} steps "
        f"sampled, set-up {summary['setup_seconds']:.1f} s; wall clock {bounds[0]:.4f} (95 % {bounds[1]:.4f} to {bounds[2]:.4f})",
        flush=True,
    )


def storage(rows: int = 2000, layers: int = 500) -> None:
    """Flush time, size and time to the first figure's data of a long run."""
    path = Path(tempfile.mkdtemp())
    table = [{"name": f"layer{i}"} for i in range(layers)]
    fields = schema(table)
    values = {field.name: np.random.default_rng(0).random(layers) for field in fields if field.name not in ("step", "time")}
    values = {name: value if "list" in str(fields.field(name).type) else 1.0 for name, value in values.items()}
    writer = Writer(path, print)
    writer.begin({"layers": table}, fields)
    times = []
    for step in range(rows):
        before = writer.cost
        writer.row({"step": step, "time": 0.0, **values})
        while writer.rows <= step:
            time.sleep(0)
        times.append(writer.cost - before)
    writer.close()
    size = sum(file.stat().st_size for file in path.iterdir())
    start = time.perf_counter()
    ns.load_run(path).matrix("spectral_norm")
    opened = time.perf_counter() - start
    print(
        f"storage, {layers} layers: {1000 * statistics.median(times):.2f} ms a flush "
        f"(99 %: {1000 * np.quantile(times, 0.99):.2f}), "
        f"{size / rows * 1e4 / 1e6:.0f} MB for 10,000 steps, first figure's data of {rows} rows after {opened:.2f} s"
    )


def main() -> None:
    storage()
    for name, (make, shape) in CASES.items():
        print(name, flush=True)
        sampled_step(make, shape)
        budgeted(make, shape)


if __name__ == "__main__":
    main()
