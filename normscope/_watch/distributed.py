"""Several processes: one directory each, one schedule, and spectral norms of weights that no process holds whole."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from normscope._watch.budget import Budget
from normscope._watch.schedule import OwnSchedule, Schedule, SharedSchedule
from normscope._watch.weights import FIRST_STEPS, LATER_STEPS, first_vectors, local, orthonormal, top_singular_value

TIMEOUT = timedelta(seconds=60)
START = timedelta(seconds=10)  # for rank 0 to say where it starts, which it never does where it does not record
ENDED = "ended"  # in place of a number: that process records no more
MOST_WAITING = 4  # samples whose shards are kept for a slow process

_watches = itertools.count()  # the same in every process, because each starts its watches in the same order


@dataclass
class TrainingProcesses:
    """This process among those that train together.

    store: None where the others cannot be reached, or where there are none; problem: why. Waiting for others has a time limit, and
    one that does not answer costs only what needs it.
    """

    directory: Path
    rank: int = 0
    size: int = 1
    store: Any = None
    group: Any = None
    problem: str = ""
    agreed: bool = False  # on the first step

    @classmethod
    def here(cls, model: nn.Module, run: Path) -> TrainingProcesses:
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return cls(run)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        here = cls(run / f"rank-{rank}", rank, size)
        try:
            default = distributed.distributed_c10d._get_default_store()
            here.store = distributed.PrefixStore(f"normscope/{next(_watches)}", default)
            if any(placement(parameter) is not None for parameter in model.parameters()):
                here.group = distributed.new_group(backend="gloo", timeout=TIMEOUT)
        except Exception as error:  # torch's errors of communication are of many kinds; none may stop a training
            here.alone(error)
        return here

    def alone(self, error: Exception | str) -> None:
        """From now on this process does without the others."""
        self.store, self.group, self.problem = None, None, f"the other processes are not reached, so this one goes alone: {error}"

    def agree(self, step: int) -> int:
        """Rank 0's number of the last step, for everybody; this process's own where rank 0 does not say."""
        if self.store is None:
            return step
        try:
            if self.rank == 0:
                self.store.set("start", str(step))
            self.store.wait(["start"], START)
            said = self.store.get("start").decode()
            self.agreed = True
        except Exception as error:  # likewise
            self.alone(error)
            return step
        if said == ENDED:
            self.alone("rank 0 does not record")
            return step
        return int(said)

    def leave(self) -> None:
        """Say that this process records no more, before or after the start, so that nobody waits for it."""
        if self.store is not None:
            self.store.set("ended", str(self.rank))
            if self.rank == 0 and not self.agreed:
                self.store.set("start", ENDED)

    def schedule(self, budget: Budget) -> Schedule:
        return OwnSchedule(budget) if self.store is None else SharedSchedule(budget, self.rank, self.store)


@dataclass(frozen=True)
class Placement:
    """How a weight is cut: along its rows (the first axis) or otherwise, and how many whole copies there are."""

    by_rows: bool
    replicas: int


def placement(parameter: torch.Tensor) -> Placement | None:
    """Of a weight that lies in shards; None where each process holds it whole."""
    cuts = parameter.placements if type(parameter).__module__.startswith("torch.distributed.tensor") else None
    if not cuts or not any(cut.is_shard() for cut in cuts):
        return None
    sizes = parameter.device_mesh.shape
    replicas = math.prod(size for size, cut in zip(sizes, cuts, strict=True) if not cut.is_shard())
    return Placement(all(cut.is_shard(0) for cut in cuts if cut.is_shard()), replicas)


class ShardedSpectra:
    """Power iteration on weights that are cut by rows: WᵀWV = Σ_r W_rᵀW_rV, one sum over processes per iteration.

    It runs on the writer's thread in a group of its own, so a slow process delays nobody's training, and an error or a
    timeout there ends only this metric. Every sum carries the step's number: processes that disagree find out.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor], processes: TrainingProcesses) -> None:
        self.weights, self.processes = weights, processes
        self.vectors = {row: first_vectors(weight, row).double() for row, weight in weights.items()}
        self.steps = FIRST_STEPS
        self.waiting = 0

    def shards(self) -> dict[int, torch.Tensor]:
        """Copies of what this process holds now, for `norms` to work on later."""
        self._check_others()
        if self.waiting >= MOST_WAITING:
            raise TimeoutError(f"the other processes are {MOST_WAITING} samples behind")
        self.waiting += 1
        return {row: local(weight).flatten(1).float().clone() for row, weight in self.weights.items()}

    def norms(self, shards: Mapping[int, torch.Tensor], step: int) -> dict[int, tuple[float, float]]:
        """Row → (σ, residual) of the whole weight."""
        self.waiting -= 1
        for _ in range(self.steps):
            images = {row: (self.vectors[row].to(shard) @ shard.mT).double() for row, shard in shards.items()}
            grams = {row: (image @ image.mT).cpu() for row, image in images.items()}
            backs = {row: (images[row] @ shard.double()).cpu() for row, shard in shards.items()}
            self._add_up([*grams.values(), *backs.values()], step)
            found = {row: self._renew(row, grams[row], backs[row]) for row in shards}
        self.steps = LATER_STEPS
        return found

    def _check_others(self) -> None:
        if self.processes.store is None or self.processes.store.check(["ended"]):
            raise RuntimeError("another process has stopped recording")

    def _add_up(self, tensors: Sequence[torch.Tensor], step: int) -> None:
        """Replace each tensor by its sum over all processes, divided by the number of replicas, in one message."""
        together = torch.cat([torch.tensor([step], dtype=torch.float64), *(tensor.reshape(-1) for tensor in tensors)])
        work = distributed.all_reduce(together, group=self.processes.group, async_op=True)
        while not work.is_completed():  # the group's timeout ends it at the latest
            self._check_others()
            time.sleep(0.002)
        work.wait()
        if int(together[0]) != step * self.processes.size:
            raise RuntimeError("the processes do not sample the same steps")
        for tensor, total in zip(tensors, together[1:].split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.reshape(tensor.shape))

    def _renew(self, row: int, gram: torch.Tensor, back: torch.Tensor) -> tuple[float, float]:
        replicas = found.replicas if (found := placement(self.weights[row])) is not None else 1
        if not gram.any():
            return 0.0, math.nan
        sigma, residual = top_singular_value(gram / replicas, back / replicas, self.vectors[row], torch.ones(()))
        basis = orthonormal(back)
        if basis.isfinite().all():
            self.vectors[row] = basis
        return float(sigma), float(residual)
