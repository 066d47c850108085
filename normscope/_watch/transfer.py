"""Small tensors that leave their device together."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

HOST = ("cpu",)  # devices whose numbers can be read without waiting


class Transfer:
    """Collects vectors under keys; `fetch` concatenates those of each device and copies once a device."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, torch.Tensor] = {}

    def add(self, key: Hashable, tensor: torch.Tensor) -> None:
        self._waiting[key] = tensor.detach()

    def fetch(self) -> dict[Any, np.ndarray]:
        found = {}
        groups: dict[torch.device, list[Hashable]] = {}
        for key, tensor in self._waiting.items():
            groups.setdefault(tensor.device, []).append(key)
        for device, keys in groups.items():
            dtype = torch.float32 if device.type == "mps" else torch.float64
            together = torch.cat([self._waiting[key].reshape(-1).to(dtype) for key in keys]).cpu().numpy()
            ends = np.cumsum([self._waiting[key].numel() for key in keys])[:-1]
            for key, part in zip(keys, np.split(together, ends), strict=True):
                found[key] = part.reshape(tuple(self._waiting[key].shape))
        return found
