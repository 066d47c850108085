"""A model of 124 million parameters, GPT-2 from its configuration, on 16 tokens: audit and symmetries in time and memory.

    python -m bench wild_scale [--only audit|symmetries]

Each in a process of its own. Seconds are of the clock and of all cores together (a busy machine only adds to the first); memory is
what the process holds at most above what it held with the model loaded, in units of the model's size in float64.
"""

from __future__ import annotations

import argparse
import resource
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch

TOKENS = 16
TASKS = ("audit", "symmetries")


def resident() -> int:
    """Bytes that this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Peak:
    """The largest `resident` from the start of a `with` block to its end, looked at every 10 ms."""

    def __enter__(self) -> Peak:
        self.before = self.most = resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()
        return self

    def _follow(self) -> None:
        while not self.done.wait(0.01):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


def measured(name: str) -> None:
    from transformers import GPT2Config, GPT2Model

    import normscope as ns

    torch.manual_seed(0)
    model = GPT2Model(GPT2Config()).eval()
    size = sum(value.numel() for value in model.parameters())
    example = {"inputs_embeds": torch.randn(1, TOKENS, 768, generator=torch.Generator().manual_seed(0))}
    first: list[tuple[float, float]] = []
    start, processor = time.perf_counter(), time.process_time()

    def report(what: str, done: int, expected: int) -> None:
        first.append((time.perf_counter() - start, time.process_time() - processor))

    tasks: dict[str, Callable[[], object]] = {
        "audit": lambda: ns.audit(model, example, progress=report),
        "symmetries": lambda: ns.symmetries(model, example, progress=report),
    }
    with Peak() as peak:
        tasks[name]()
    clock, used = time.perf_counter() - start, time.process_time() - processor
    said = "; first word of progress after {:.2f} s, {:.2f} s of a core".format(*first[0]) if first else ""
    held = (peak.most - peak.before) / (8 * size)
    print(
        f"{name:<12} {size / 1e6:.0f}M parameters: {clock:6.1f} s, {used:6.1f} s of a core, {held:.2f} × its float64 size{said}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench wild_scale")
    parser.add_argument("--only", choices=TASKS)
    given, _ = parser.parse_known_args()
    for name in TASKS if given.only is None else (given.only,):
        process = get_context("spawn").Process(target=measured, args=(name,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{name} ended with status {process.exitcode}")
