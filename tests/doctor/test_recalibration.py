"""`ns.recalibrate`: statistics of the data, and nothing else changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normscope as ns


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2))


def test_statistics_are_those_of_the_data_and_nothing_else_changes():
    model, inputs = network(), torch.randn(512, 4) * 3 + 1
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    made = ns.recalibrate(model, (inputs, torch.zeros(512)))
    hidden = model[0](inputs)
    torch.testing.assert_close(made[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made[1].running_var, hidden.var(0), rtol=0.1, atol=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and made.training and made[1].momentum == 0.1
    rest = [name for name in before if "1." not in name]
    assert all(torch.equal(made.state_dict()[name], before[name]) for name in rest)


def test_batches_need_an_example():
    batches = [{"input": torch.randn(8, 4)} for _ in range(3)]
    with pytest.raises(ns.InputError, match="example="):
        ns.recalibrate(network(), batches)
    assert ns.recalibrate(network(), batches, example={"input": torch.randn(2, 4)})[1].num_batches_tracked == 3


def test_without_batch_normalizers_there_is_nothing_to_do():
    with pytest.raises(ns.InputError, match="no batch normalizer"):
        ns.recalibrate(nn.Linear(4, 2), torch.randn(8, 4))


def test_statistics_that_were_never_set_are_not_far_from_the_data():
    model = network()
    assert not [f for f in ns.doctor(model, torch.randn(8, 4), data=torch.randn(64, 4) * 30 + 9) if f.rule == "NS205"]
