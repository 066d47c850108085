"""Whether replicated γ and β are the same on every rank, to the bit: hashes of them, compared through the group's store.

Each rank posts its hashes from the writer's thread; rank 0 compares a step when all have arrived, and never waits. Buffers are
compared for SyncBatchNorm alone: those of other normalizers differ between ranks by design.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from normscope._watch.distributed import TrainingProcesses, placement
from normscope._watch.layers import NORMALIZING
from normscope._watch.weights import local

MOST_WAITING = 8  # steps that wait for a slow rank
ODD = 0x9E3779B1  # an odd factor, so that places count
AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an entry
BUFFERS = ("running_mean", "running_var")


class Replicas:
    """tensors: by name, in the same order on every rank."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, torch.Tensor], processes: TrainingProcesses) -> None:
        self.processes = processes
        self.tensors = {}
        for path, module in model.named_modules() if processes.store is not None else ():
            own = module._parameters | (module._buffers if isinstance(module, nn.SyncBatchNorm) else {})
            for name in ("weight", "bias", *BUFFERS) if isinstance(module, NORMALIZING) else ():
                tensor, full = own.get(name), f"{path}.{name}".lstrip(".")
                known = full in parameters if name in ("weight", "bias") else True
                if tensor is not None and known and tensor.numel() and placement(tensor) is None:
                    self.tensors[full] = tensor
        self._waiting: dict[int, str] = {}  # of rank 0

    def hashes(self) -> torch.Tensor:
        """(tensors, 2): both halves of 64 bits for each, which float64 holds without a loss."""
        found = torch.stack([_hash(local(tensor)) for tensor in self.tensors.values()])
        return torch.stack([found >> 32, found & 0xFFFFFFFF], 1)

    def exchange(self, step: int, hashes: np.ndarray) -> list[tuple[int, dict[str, list[int]]]]:
        """Post those of a step; for each step that all ranks have posted by now, the names that differ and on which ranks."""
        store, said = self.processes.store, json.dumps(hashes.astype(np.int64).tolist())
        if store is None:
            return []
        if self.processes.rank != 0:
            store.set(f"replicas/{step}/{self.processes.rank}", said)
            return []
        self._waiting[step] = said
        while len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
        return [self._compared(step) for step in list(self._waiting) if self._is_there(step)]

    def _keys(self, step: int) -> list[str]:
        return [f"replicas/{step}/{rank}" for rank in range(1, self.processes.size)]

    def _is_there(self, step: int) -> bool:
        return bool(self.processes.store.check(self._keys(step)))

    def _compared(self, step: int) -> tuple[int, dict[str, list[int]]]:
        store = self.processes.store
        all_ranks: list[Any] = [json.loads(self._waiting.pop(step)), *(json.loads(store.get(key)) for key in self._keys(step))]
        for key in self._keys(step):
            store.delete_key(key)
        differing = {}
        for place, name in enumerate(self.tensors):
            here = [tuple(hashes[place]) for hashes in all_ranks]
            usual = Counter(here).most_common(1)[0][0]  # of equally many rank 0's
            ranks = [rank for rank, one in enumerate(here) if one != usual]
            if ranks:
                differing[name] = ranks
        return step, differing


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    """Σ bits_i · (1 + 2·i·ODD) modulo 2⁶⁴, on the tensor's device: one entry that differs always changes it."""
    bits = tensor.contiguous().view(AS_INTEGERS[tensor.element_size()]).reshape(-1).to(torch.int64)
    places = torch.arange(len(bits), device=bits.device, dtype=torch.int64)
    return (bits * (1 + 2 * ODD * places)).sum()
