"""A training that goes on until its standard input is closed: python -m tests.browser.training RUN."""

from __future__ import annotations

import select
import sys
import time

import torch
from torch import nn

import normscope as ns
from tests.browser.planted import network


def main() -> None:
    torch.set_num_threads(1)
    model, data = network(bad=1.0), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with ns.watch(model, optimizer, run=sys.argv[1], every=1, quiet=True) as watch:
        while not select.select([sys.stdin], [], [], 0)[0]:
            inputs, classes = torch.randn(16, 64, generator=data), torch.randint(10, (16,), generator=data)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), classes)
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
            time.sleep(0.1)


if __name__ == "__main__":
    main()
