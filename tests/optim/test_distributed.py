"""Two processes with DistributedDataParallel end with the same parameters, which are those of one process with both batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from normscope.optim import SGDG, AdamP
from tests.optim.standin import Group, Report, batch, drawn, train

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
REPORT = Report((Group("joint-scale", ("0.weight", "0.bias"), ((), ()), (1, 1), (1.0, 1.0)),))


def model():
    return drawn(
        torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)), torch.float64, 0
    )


def optimizers(network):
    return [SGDG(network, lr=0.01, momentum=0.9, symmetries=REPORT), AdamP(network, symmetries=REPORT)]


def work(rank, store, which, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    network = model()
    optimizer = optimizers(network)[which]
    inputs, targets = batch("dense", torch.float64)
    train(torch.nn.parallel.DistributedDataParallel(network), optimizer, (inputs[rank::2], targets[rank::2]), 5)
    torch.save([p.detach() for p in network.parameters()], f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("which", [0, 1], ids=["SGDG", "AdamP"])
def test_ranks_agree(which, tmp_path):
    mp.spawn(work, (str(tmp_path / "store"), which, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    alone = model()
    train(alone, optimizers(alone)[which], batch("dense", torch.float64), 5)
    for one, other in zip(first, alone.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-9)
