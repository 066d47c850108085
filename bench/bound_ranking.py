"""Which bounds and measures rank a family of trained networks by their true gap: perceptrons on 400 digits."""

from __future__ import annotations

import copy
from itertools import product

import torch
from torch.nn.functional import cross_entropy

import normscope as ns
from normscope.lab.datasets import Labelled, digits
from normscope.lab.models import mlp

SAMPLES, STEPS, BATCH = 400, 150, 64
NORMALIZERS, WIDTHS, RATES = ("none", "batch"), (8, 32, 128), (0.02, 0.2)


def trained(normalizer: str, width: int, rate: float, data: Labelled) -> ns.bounds.Trained:
    inputs, classes = data
    model = mlp(inputs=64, width=width, depth=3, normalizer=normalizer)
    initial = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        index = torch.randint(len(inputs), (BATCH,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(inputs[index]), classes[index]).backward()
        optimizer.step()
    return ns.bounds.Trained(model.eval(), {"normalizer": normalizer, "width": width, "rate": rate}, initial)


def main() -> None:
    split = digits()
    train = split.train[0][:SAMPLES], split.train[1][:SAMPLES]
    family = [trained(*setup, train) for setup in product(NORMALIZERS, WIDTHS, RATES)]
    print(ns.bounds.compare(family, "ramp", train, held_out=split.test, progress=True))


if __name__ == "__main__":
    main()
