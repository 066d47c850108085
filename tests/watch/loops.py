"""Small trainings that the tests of the recorder share: a model, its data and one step of its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normscope as ns


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5),
    )  # fmt: skip


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(4, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 5),
    )  # fmt: skip


class Transformer(nn.Module):
    """Tokens are the rows of the image; post-norm encoder blocks with dropout, a final RMSNorm."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, activation=nn.GELU()) for _ in range(2)
        )
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 5)
        self.reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2))
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x).mean(1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def filling(write_all: Callable[[Any, Any], None], most: int = 20_000) -> Callable[[Any, Any], None]:
    """The store's `write_all` on a disk that takes so many bytes."""
    written = 0

    def write(file: Any, content: Any) -> None:
        nonlocal written
        written += memoryview(content).nbytes
        if written > most:
            raise OSError(28, "No space left on device")
        write_all(file, content)

    return write


@dataclass
class Loop:
    """A training that is the same every time; `steps` yields the loss before each optimizer step is final."""

    make: Callable[[], nn.Module] = mlp
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = sgd
    autocast: bool = False
    accumulate: int = 1
    clip: float | None = None
    compile: bool = False
    scaler: bool = False
    seed: int = 0
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = self.make()
        self.optimizer = self.optimizer_of(self.model.parameters())
        self.forward = torch.compile(self.model, backend="eager") if self.compile else self.model
        self.gradient_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=self.scaler)
        self.data = torch.Generator().manual_seed(7)

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(8, 3, 4, 4, generator=self.data), torch.randint(5, (8,), generator=self.data)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        for _ in range(self.accumulate):
            x, y = self.batch()
            with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
                loss = nn.functional.cross_entropy(self.forward(x), y) / self.accumulate
            self.gradient_scaler.scale(loss).backward()
        if self.clip is not None:
            self.gradient_scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.gradient_scaler.step(self.optimizer)
        self.gradient_scaler.update()
        return loss

    def watch(self, run: Path, **options: Any) -> ns.Watch:
        """Sampled on every step; into a directory that holds a run already it goes on, unless told otherwise."""
        return ns.watch(
            self.model, self.optimizer, run=run, **{"every": 1, "quiet": True, "resume": "overwrite" not in options, **options}
        )

    def watched(self, run: Path, steps: int, **options: Any) -> Iterator[ns.Watch]:
        """Train under the watch; yields it before every step."""
        with self.watch(run, **options) as watch:
            for _ in range(steps):
                yield watch
                watch.step(loss=self.step())
