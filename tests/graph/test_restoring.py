"""A model is as it was after every call, whatever it writes to itself."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope.graph.restoring import untouched
from tests.networks import Function


class Writing(nn.Module):
    """A linear layer that does one thing to itself in every call."""

    def __init__(self, write) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.table = nn.Embedding(6, 4, max_norm=0.5, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(()))
        self.write, self.calls = write, 0
        self.held, self.queue, self.tags = {"a": [], "b": {"c": (1, [2])}}, deque([1, 2], maxlen=2), {1, 2}
        self.plain = SimpleNamespace(calls=0, inner=SimpleNamespace(seen=[]), tensor=torch.zeros(2))
        self.generator, self.chance = torch.Generator().manual_seed(0), random.Random(0)
        self.numpy, self.array = np.random.default_rng(0), np.zeros(3)
        with torch.no_grad():
            self.linear.weight[0, 0], self.linear.weight[1, 1] = -0.0, 3.0

    def forward(self, x):
        self.write(self, x)
        return self.linear(x)


def clamped(self, x):
    with torch.no_grad():
        self.linear.weight.clamp_(-1, 1)


def moved(self, x):
    self.linear.weight.data = 2 * self.linear.weight.data


def replaced(self, x):
    self.linear.weight = nn.Parameter(2 * self.linear.weight.detach())


WRITES = {
    "clamped": clamped,
    "other memory": moved,
    "another parameter": replaced,
    "data": lambda self, x: self.linear.weight.data.clamp_(-1, 1),
    "the sign of zero": lambda self, x: self.linear.weight.data.add_(0.0),
    "renormalized": lambda self, x: self.table(torch.arange(6)),
    "frozen": lambda self, x: self.linear.weight.requires_grad_(False),
    "nested list": lambda self, x: self.held["a"].append(1),
    "list in a tuple": lambda self, x: self.held["b"]["c"][1].append(1),
    "new key": lambda self, x: self.held.update(d=2),
    "queue": lambda self, x: self.queue.append(3),
    "set": lambda self, x: self.tags.add(3),
    "plain object": lambda self, x: setattr(self.plain, "calls", self.plain.calls + 1),
    "object in an object": lambda self, x: self.plain.inner.seen.append(1),
    "tensor of an object": lambda self, x: self.plain.tensor.add_(1),
    "attribute": lambda self, x: setattr(self, "calls", self.calls + 1),
    "buffer": lambda self, x: self.count.add_(1),
    "generator": lambda self, x: torch.rand(1, generator=self.generator),
    "python's generator": lambda self, x: self.chance.random(),
    "numpy's generator": lambda self, x: self.numpy.random(),
    "array": lambda self, x: self.array.__iadd__(1),
}  # fmt: skip


def shown(model):
    state = {name: (id(value), value.detach().numpy().tobytes(), value.requires_grad) for name, value in model.named_parameters()}
    plain = model.plain
    return copy.deepcopy(
        (
            state, model.count.item(), model.calls, model.held, list(model.queue), model.tags, plain.calls, plain.inner.seen,
            plain.tensor.tolist(), model.generator.get_state().tolist(), model.chance.getstate(), model.numpy.bit_generator.state,
            model.array.tolist(),
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_what_a_call_writes_is_undone(name):
    model = Writing(WRITES[name])
    before = shown(model)
    with untouched(model):
        model(torch.ones(2, 4, dtype=torch.float64))
        assert shown(model) != before
    assert shown(model) == before


@pytest.mark.parametrize("name", WRITES)
def test_a_model_that_writes_is_refused_or_certified_and_stays_as_it_was(name):
    model = Writing(WRITES[name])
    before, x = shown(model), torch.ones(2, 4, dtype=torch.float64)
    with contextlib.suppress(ns.Refusal, ns.ExportError):
        bracket = ns.lipschitz(model, x)
        assert shown(model) == before
        copied = copy.deepcopy(model)
        copied(x)  # in exact terms: the weights that a call computes with
        assert float(torch.linalg.matrix_norm(copied.linear.weight.detach(), 2)) in bracket
    assert shown(model) == before


def test_nothing_is_written_where_nothing_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
    with untouched(model):
        model(torch.zeros(2, 4))
    assert [tensor._version for tensor in (*model.parameters(), *model.buffers())] == versions


@functools.lru_cache
def table(size):
    return torch.arange(size).sin()


class Kept(nn.Linear):
    """Reads a table that a function of the module's keeps, and one that the class keeps."""

    tables = {}

    def forward(self, x):
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1]).cos()
        return super().forward(x + table(x.shape[1]) + self.tables[x.shape[1]])


class KeptApart(nn.Linear):
    """Reads a table for each layout of its input, with gradients or without."""

    tables = {}

    def forward(self, x):
        key = x.is_contiguous(), x.stride(0) > 0, torch.is_grad_enabled()
        if key not in self.tables:
            self.tables[key] = torch.arange(4).cos()
        return super().forward(x + self.tables[key])


def test_what_is_kept_for_each_layout_is_no_stand_in():
    for look in (ns.lipschitz, ns.audit, ns.symmetries):
        KeptApart.tables.clear()
        look(KeptApart(4, 4), torch.randn(2, 4))
        assert {*map(type, KeptApart.tables.values())} == {torch.Tensor}


def test_what_is_kept_outside_of_a_model_is_no_stand_in():
    model, x = Kept(4, 4), torch.randn(2, 4)
    assert ns.lipschitz(model, x).upper.finite
    assert type(table(4)) is type(Kept.tables[4]) is torch.Tensor and table(4).dtype == torch.float32
    assert type(model(x)) is torch.Tensor


@functools.lru_cache
def mask(batch, length):
    return torch.ones(batch, length, length).tril()


class Masked(nn.Linear):
    """Reads a table for every size of batch, which a function keeps."""

    def forward(self, x):
        return mask(len(x), x.shape[1]) @ super().forward(x)


def test_what_is_kept_for_batches_of_every_size_is_of_the_model_s_own_type():
    model, x = Masked(4, 4).eval(), torch.randn(2, 3, 4)
    for look in (ns.lipschitz, ns.audit, ns.doctor, ns.symmetries):
        look(model, x)
    assert {mask(size, 3).dtype for size in range(1, 6)} == {torch.float32}
    assert model(x).dtype == torch.float32


@pytest.mark.parametrize("forget", [lambda model: model.zero_grad(), lambda model: model.zero_grad(set_to_none=False)])
def test_gradients_are_as_they_were(forget):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model(torch.randn(2, 4)).sum().backward()
    gradient = model[0].weight.grad
    before = gradient.clone()
    model.register_forward_pre_hook(lambda module, args: forget(module))
    with contextlib.suppress(ns.ExportError, ns.Refusal):
        ns.lipschitz(model, torch.randn(2, 4))
    assert model[0].weight.grad is gradient and torch.equal(gradient, before)


def test_a_backward_pass_that_is_still_to_come_is_not_disturbed():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.randn(8, 4)
    model.register_buffer("scale", torch.ones(4))
    model.register_forward_hook(lambda module, args, output: module.scale.mul_(2).div_(2) * output)
    loss = (model(x) * model.scale).sum()
    for look in (ns.doctor, ns.symmetries, ns.lipschitz, ns.audit):
        with contextlib.suppress(ns.NormscopeError):
            look(model, x)
    loss.backward()


FAILING = {
    "in a gradient": lambda x: torch.func.grad(lambda z: torch.vmap(lambda row: row.relu().square().sum())(z).sum())(x),
    "caught by the model": lambda x: (_caught(x), 2 * x)[1],
}


def _caught(x):
    with contextlib.suppress(RuntimeError):
        torch.vmap(lambda row: torch.ones(3) @ row)(x)


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("look", [ns.lipschitz, ns.audit, ns.doctor, ns.symmetries])
def test_no_transform_of_torch_stays_open(name, look):
    with contextlib.suppress(ns.NormscopeError):
        look(Function(FAILING[name]), torch.randn(2, 4))
    assert torch.randn(2).shape == (2,)
