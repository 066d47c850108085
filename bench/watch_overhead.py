"""What `ns.watch` costs: in steady state, in its dense first phase, for one sampled step, and beside a naive recorder.

    python -m bench watch_overhead

Three copies of one training take turns step by step, in an order that changes: two plain ones, whose ratio shows what the
measurement itself is worth (A/A), and a watched one. Time is the CPU time of all threads of the process, so other work on the
machine does not count; the recorder's writer is waited for before the next copy's turn. The budget is kept in the same time.
Steady state is as after 10,000 steps: short trainings have some samples and readings beyond the budget (docs/watch.md). It is
measured in cycles: all steps from one sample to the next, so each ratio has one sample in it, as often as the default budget
takes them. Ratios are medians over cycles, each with a 95 % bootstrap interval, and ratios of the whole time beside them.
In the environment, CASES (a part of a name) chooses, CYCLES says how many are measured, and SECONDS_EACH after how many seconds of
a copy it ends anyway; with fewer than five cycles there is no verdict.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import normscope as ns
from bench.failures import convolutional
from normscope._watch import store
from normscope._watch.budget import BESIDE, GROWTH
from normscope._watch.columns import schema
from normscope._watch.every_step import FREE
from normscope._watch.store import Writer
from normscope.lab.models import mlp, resnet18

CYCLES = int(os.environ.get("CYCLES", "12"))
SECONDS = float(os.environ.get("SECONDS_EACH", "180"))  # of CPU, of each copy in steady state, at most
FEWEST = 5  # cycles, for a verdict
LATER = 10_000  # steps, of which steady state is measured after
PROMISE, LEAST_STEP = 1.01, 0.02  # in steady state, for steps of so many seconds


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def transformer(layers: int, width: int) -> nn.Module:
    """Pre-norm encoder layers: residual streams, attention and blocks are all measured."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.LayerNorm(width), Mean(), nn.Linear(width, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, 4 layers of 64, batch 32": (lambda: mlp(64, 4, 32, normalizer="batch"), (32, 32)),
    "CNN, 3 layers, batch 16": (convolutional, (16, 3, 8, 8)),
    "transformer, 4 layers of 64, batch 8 x 32": (lambda: transformer(4, 64), (8, 32, 64)),
    "transformer, 6 layers of 128, batch 8 x 64": (lambda: transformer(6, 128), (8, 64, 128)),
    "transformer, 12 layers of 256, batch 4 x 64": (lambda: transformer(12, 256), (4, 64, 256)),
    "ResNet-18, batch 8 x 3 x 32 x 32": (lambda: resnet18(10, stem="small"), (8, 3, 32, 32)),
    "MLP, 100 layers of 512, batch 128": (lambda: mlp(512, 100, 512, normalizer="batch"), (128, 512)),
}


class Training:
    """One copy of a training, with clocks of CPU time that run only while it does."""

    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)
        self.y %= self.model(self.x[:2]).shape[-1]
        self.active, self.since = 0.0, None
        self.observe: Callable[[], None] = lambda: None  # before the optimizer's step
        self.recorder: ns.Watch | None = None
        self.handed = 0  # samples, to the writer

    def clock(self) -> float:
        return self.active + (0.0 if self.since is None else time.thread_time() - self.since)

    def step(self) -> float:
        start, self.since = time.process_time(), time.thread_time()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.observe()
        self.optimizer.step()
        if self.recorder is not None:
            self.recorder.step(loss=loss)
        self.active, self.since = self.active + time.thread_time() - self.since, None
        if self.recorder is not None and self.recorder.writer is not None and self.handed != self.recorder.sampled_steps:
            self.handed, written = self.recorder.sampled_steps, threading.Event()
            self.recorder.writer._waiting.put(written.set)
            written.wait()
        return time.process_time() - start

    def watch(self, **options) -> None:
        self.recorder = ns.watch(self.model, self.optimizer, run=tempfile.mkdtemp(), quiet=True, **options)
        self.recorder.budget.clock = self.clock
        self.recorder.budget.started = self.clock()


class Naive:
    """What one writes by hand: a `.item()` per tensor and statistic, and an exact SVD per weight."""

    def __init__(self, training: Training) -> None:
        self.model, self.found = training.model, {}
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.ReLU)):
                module.register_forward_pre_hook(lambda module, args, name=name: self.look(name, args[0]))
        training.observe = self.weights

    def look(self, name: str, x: Tensor) -> None:
        x = x.detach()
        self.found[name] = [x.var().item(), x.abs().max().item(), (x <= 0).float().mean().item()]

    def weights(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.dim() > 1:
                norm = torch.linalg.matrix_norm(parameter.detach().flatten(1), 2).item()
                self.found[name] = [norm, parameter.norm().item(), parameter.grad.norm().item()]


@dataclass(frozen=True)
class Ratio:
    """median: of the segments' ratios, with its interval. total: of all time."""

    median: float
    low: float
    high: float
    total: float

    @staticmethod
    def of(left: list[float], right: list[float]) -> Ratio:
        ratios = np.array(left) / np.array(right)
        draws = ratios[np.random.default_rng(0).integers(len(ratios), size=(2000, len(ratios)))]
        low, high = np.quantile(np.median(draws, 1), [0.025, 0.975])
        return Ratio(float(np.median(ratios)), float(low), float(high), sum(left) / sum(right))

    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f} to {self.high:.4f}; of all time {self.total:.4f})"


def in_turns(trainings: list[Training], number: int) -> list[float]:
    """One step of each, in an order that changes with the number. Per copy, its time."""
    spent = [0.0] * len(trainings)
    for place in range(len(trainings)):
        which = (place + number) % len(trainings)
        spent[which] = trainings[which].step()
    return spent


def one_step(trainings: list[Training], steps: int) -> list[list[float]]:
    times = [in_turns(trainings, number) for number in range(steps)]
    return [list(column) for column in zip(*times, strict=True)]


def cycles(trainings: list[Training], recorder: ns.Watch) -> list[np.ndarray]:
    """Per cycle, the time of each copy from after one sample until after the next. A last one without a sample is left out."""
    found: list[np.ndarray] = []
    spent, whole, number, samples = np.zeros(len(trainings)), 0.0, 0, recorder.sampled_steps
    while len(found) < CYCLES and whole < SECONDS:
        times = np.array(in_turns(trainings, number))
        spent, whole, number = spent + times, whole + times[0], number + 1
        if recorder.sampled_steps > samples:
            found, spent, samples = [*found, spent], np.zeros(len(trainings)), recorder.sampled_steps
    return found


def _go_on(recorder: ns.Watch) -> None:
    """Tell it that LATER steps have passed: what it allows itself beyond its budget in short trainings is used up."""
    recorder.budget.begun -= LATER
    recorder.budget._latest = (LATER + recorder.budget.dense) * GROWTH
    recorder.every._spent = FREE / BESIDE


def measured(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[float, Ratio | None]:
    """Seconds of a plain step, and the ratio in steady state, where there were cycles enough; prints the rest."""
    _, _, watched = trainings = [Training(make, shape) for _ in range(3)]
    one_step(trainings, 3)
    watched.watch()
    recorder = watched.recorder
    one_step(trainings, 1)  # the first sample is the set-up
    dense = one_step(trainings, recorder.budget.dense - 1)
    _go_on(recorder)
    began = recorder.step_number
    found = cycles(trainings, recorder)
    summary, step = recorder.summary(), statistics.median(dense[0])
    recorder.close()
    steady = None
    if len(found) >= FEWEST:
        plain, other, ours = (list(column) for column in zip(*found, strict=True))
        steady = Ratio.of(ours, plain)
        print(f"  plain step {1000 * step:.2f} ms; A/A {Ratio.of(other, plain)}")
        print(f"  steady state {steady}, accounted {1 + summary['overhead']:.4f}")
    else:
        print(f"  plain step {1000 * step:.2f} ms; steady state not judged: fewer than {FEWEST} samples")
    print(
        f"  {len(found)} cycles with a sample each in {recorder.step_number - began} steps; gradients read in "
        f"{summary['gradients_read']} of {summary['steps']} steps in all"
    )
    print(f"  dense first phase {Ratio.of(dense[2], dense[0])}, set-up {summary['setup_seconds']:.2f} s", flush=True)
    return step, steady


def sampled_step(make: Callable[[], nn.Module], shape: tuple[int, ...], repeats: int = 12) -> None:
    plain, watched, naive = trainings = [Training(make, shape) for _ in range(3)]
    watched.watch(every=1)
    Naive(naive)
    one_step(trainings, 2)
    times = one_step(trainings, 2)
    slow = statistics.median(times[2]) / statistics.median(times[0])
    times = one_step([plain, watched], repeats)
    watched.recorder.close()
    print(f"  every step sampled {Ratio.of(times[1], times[0])}; naive recorder {slow:.2f}", flush=True)


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
        f"storage, {layers} layers: {1000 * statistics.median(times):.2f} ms per flush "
        f"(99 %: {1000 * np.quantile(times, 0.99):.2f}), "
        f"{size / rows * 1e4 / 1e6:.0f} MB for 10,000 steps, first figure's data of {rows} rows after {opened:.2f} s"
    )


def sign_of_life(repeats: int = 20) -> None:
    """Prints what one costs. There is one per BEAT seconds of wall time, of which a loaded machine has many per second of CPU: so
    they are left out of what follows."""
    writer = Writer(Path(tempfile.mkdtemp()), print)
    writer.event("started")
    while not writer._status:
        time.sleep(0.01)
    start = time.process_time()
    for _ in range(repeats):
        writer._beat()
    each = (time.process_time() - start) / repeats
    writer.close()
    print(
        f"a sign of life takes {1000 * each:.2f} ms of CPU, {each / store.BEAT:.5f} of the time; it is not counted below",
        flush=True,
    )
    store.BEAT = 1e6


def main() -> None:
    torch.set_num_threads(1)
    sign_of_life()
    wanted = os.environ.get("CASES", "")
    chosen = {name: case for name, case in CASES.items() if wanted in name}
    if not wanted:
        storage()
    kept, long = 0, 0
    for name, case in chosen.items():
        print(name, flush=True)
        step, steady = measured(*case)
        sampled_step(*case)
        long += step >= LEAST_STEP and steady is not None
        kept += step >= LEAST_STEP and steady is not None and steady.median <= PROMISE
    print(f"steady state at most {PROMISE:g} in the median: {kept} of {long} cases with steps of {1000 * LEAST_STEP:g} ms or more")


if __name__ == "__main__":
    main()
