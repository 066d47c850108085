"""What the network reads beside its parameters is refused, unless training has left it as it was; NaN is no right answer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.bounds.losses import NAMED
from normscope.core.answers import right_answers

X, Y = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 2


class Memory(nn.Module):
    """The nearest training point's label, kept where no bound on parameters looks."""

    def __init__(self, where: str, data: torch.Tensor = X) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        if where == "buffer":
            self.register_buffer("memory", data)
        elif where == "attribute":
            self.memory = data
        else:
            self.read = lambda: data
        self.where = where

    def forward(self, x):
        data = self.read() if self.where == "closure" else self.memory
        near = torch.exp(-((x[:, None] - data.to(x)) ** 2).sum(-1))
        return self.weight * torch.stack([near[:, 0::2].sum(1), near[:, 1::2].sum(1)], 1)


@pytest.mark.parametrize("where", ["attribute", "buffer", "closure"])
def test_a_memory_of_the_data_is_no_hypothesis_of_few_parameters(where):
    found = ns.generalization(Memory(where), "zero-one", (X, Y), select=["PAC-Bayes"])
    assert len(found) == 0 and "could hold training data" in str(found.to_dict())
    other = ns.generalization(Memory(where), "zero-one", (X, Y), select=["PAC-Bayes"], initial=Memory(where, torch.zeros_like(X)))
    assert len(other) == 0 and "training has changed" in str(other.to_dict())


def test_tensors_that_training_left_alone_are_part_of_the_architecture():
    initial = Memory("buffer", torch.randn(200, 8))
    trained = Memory("buffer", initial.memory.clone())
    trained.weight.data += 0.5
    assert len(ns.generalization(trained, "zero-one", (X, Y), select=["PAC-Bayes"], initial=initial)) == 2


def test_running_statistics_are_counted_as_parameters():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    assert len(ns.generalization(model, "zero-one", (X, Y), select=["PAC-Bayes"])) == 2


class Lost(nn.Linear):
    """A network of which one output is lost."""

    def __init__(self, value: float) -> None:
        super().__init__(8, 2)
        self.value = value

    def forward(self, x):
        return super().forward(x) + torch.tensor([self.value, 0.0])


def own(outputs, targets):
    """A loss that does not mind what it is given."""
    return outputs.argmax(1).ne(targets).double()


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("loss", [*NAMED, own], ids=lambda loss: loss if isinstance(loss, str) else loss.__name__)
def test_outputs_that_are_not_finite_are_refused_by_every_loss(loss, value, held_out):
    settings = {"loss_bound": 1.0} if loss is own else {}
    with pytest.raises(ns.InputError, match=r"outputs of the model on .* data are nan or infinite"):
        ns.generalization(Lost(value), loss, (X, Y), held_out=(X + 1, Y) if held_out else None, **settings)


def test_no_answer_is_no_right_answer():
    assert not right_answers(torch.full((3, 2), torch.nan), torch.zeros(3, dtype=torch.long)).any()
