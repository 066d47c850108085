"""A short training in which one layer is known to be bad: its weight begins a thousand times too small."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import normscope as ns
from normscope.lab.datasets import digits

BAD = "blocks.6"
WIDTH, DEPTH = 48, 12


class Block(nn.Module):
    def __init__(self, normalized: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=not normalized)
        self.norm = nn.BatchNorm1d(WIDTH) if normalized else nn.Identity()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.linear(x)))


class Network(nn.Module):
    def __init__(self, normalized: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.Sequential(*(Block(normalized) for _ in range(DEPTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x.flatten(1))))


def network(normalized: bool = True, bad: float = 1e-3) -> Network:
    generator = torch.Generator().manual_seed(0)
    model = Network(normalized)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    with torch.no_grad():
        model.get_submodule(BAD).linear.weight.mul_(bad)
    return model


def train(path: Path, epochs: int = 4, normalized: bool = True, bad: float = 1e-3) -> nn.Module:
    """Record the training in `path`; the model as it is then."""
    inputs, classes = digits().train
    model, order = network(normalized, bad), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    with ns.watch(model, optimizer, run=path, every=1, quiet=True) as watch:
        for _ in range(epochs):
            for batch in torch.randperm(len(inputs), generator=order).split(64):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs[batch]), classes[batch])
                loss.backward()
                optimizer.step()
                watch.step(loss=loss)
    return model.eval()
