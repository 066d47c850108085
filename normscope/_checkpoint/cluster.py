"""Where the work is done: here, in processes, or on a Ray cluster; one task per tensor, largest first."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from normscope._checkpoint.entries import Held
from normscope._checkpoint.work import Result, Work
from normscope.core.errors import InputError
from normscope.core.ray import connected

ATTEMPTS = 3  # of a tensor whose worker was killed
Done = Iterator[tuple[int, str, Result]]  # (place, key, result) of a work, as they end
KNOWN: Mapping[str, Result] = {}  # of a worker's process


def execute(works: Sequence[Work], known: Mapping[str, Result], workers: int = 0, ray: str | None = None) -> Done:
    """All works, wherever they are done. workers: processes, 0 for none. ray: a cluster's address, "" for one of this machine."""
    order = sorted(range(len(works)), key=lambda place: -works[place].cost)
    if (workers or ray is not None) and any(isinstance(work.entry, Held) for work in works):
        raise InputError("a module's tensors live in this process: leave out workers and ray, or save the module to a file")
    if ray is not None:
        return _on_ray(works, order, known, ray)
    return _in_processes(works, order, known, workers) if workers else _here(works, order, known)


def _here(works: Sequence[Work], order: Sequence[int], known: Mapping[str, Result]) -> Done:
    for place in order:
        yield (place, *works[place].run(known))


def _in_processes(works: Sequence[Work], order: Sequence[int], known: Mapping[str, Result], workers: int) -> Done:
    """A pool that a killed worker breaks is started again with what is left, ATTEMPTS times without any progress."""
    left, lost = list(order), 0
    while left:
        threads = max(1, (os.cpu_count() or 1) // workers)
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (dict(known), threads))
        running: dict[Future[Any], int] = {}
        try:
            waiting = iter(list(left))
            for place in waiting:
                running[pool.submit(_run, works[place])] = place
                if len(running) < 2 * workers:
                    continue
                yield from _ended(running, left)
                lost = 0
            while running:
                yield from _ended(running, left)
                lost = 0
        except BrokenProcessPool:
            lost += 1
            if lost >= ATTEMPTS:
                raise InputError(
                    f"a worker was killed {ATTEMPTS} times while working on {works[left[0]].entry.name} or a later tensor: "
                    "take fewer --workers, or a machine with more memory"
                ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ended(running: dict[Future[Any], int], left: list[int]) -> Done:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        key, result = future.result()
        place = running.pop(future)
        left.remove(place)
        yield place, key, result


def _start(known: Mapping[str, Result], threads: int) -> None:
    global KNOWN
    KNOWN = known
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the parent alone answers


def _run(work: Work) -> tuple[str, Result]:
    return work.run(KNOWN)


def _on_ray(works: Sequence[Work], order: Sequence[int], known: Mapping[str, Result], address: str) -> Done:
    """Files are read by the node that works, under the same path; Ray itself does a lost tensor again."""
    with connected(address or None) as ray:
        table = ray.put(dict(known))
        remote: Callable[..., Any] = ray.remote(max_retries=ATTEMPTS, retry_exceptions=False)(_on_node).remote
        running = {remote(works[place], table): place for place in order}
        while running:
            ready, _ = ray.wait(list(running), timeout=1.0)
            for reference in ready:
                place = running.pop(reference)
                try:
                    key, result = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise InputError(f"{works[place].entry.name}: {str(error.cause).splitlines()[0]}") from None
                except ray.exceptions.RayError as error:
                    raise InputError(f"{works[place].entry.name} was lost with {ATTEMPTS} nodes: {type(error).__name__}") from None
                yield place, key, result


def _on_node(work: Work, known: Mapping[str, Result]) -> tuple[str, Result]:
    return work.run(known)
