"""Models that answer differently from call to call are refused for that, and keep nothing of a call."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import normscope as ns
from normscope.core.errors import Refusal


class Counting(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.last = kind, 0, None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.kind == "attribute":
            self.calls += 1
            return x * self.calls
        if self.kind == "buffer":
            self.count += 1
            return x * self.count
        if self.kind == "drift":
            self.count += 1e-5
            return x * (1 + self.count)
        if self.kind == "first":
            self.calls += 1
            return x if self.calls == 1 else 2 * x
        if self.kind == "memory":
            last, self.last = self.last, x
            return x if last is None else x + last
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("attribute", "attribute calls"),
        ("buffer", "buffer count"),
        ("drift", "buffer count"),
        ("first", "attribute calls"),
        ("memory", "attribute last"),
        ("random", "random numbers"),
    ],
)
def test_a_model_that_answers_differently_every_time_is_refused_for_that(kind, cause):
    model, x = Counting(kind), torch.randn(3, 4)
    with pytest.raises(Refusal, match=f"from call to call.*{cause}"):
        ns.lipschitz(model, x)
    assert model.calls == 0 and model.last is None and float(model.count) == 0  # the model is as it was


class Remembering(nn.Module):
    """Keeps the last batch, which must be one that it was given, and no stand-in."""

    kept = None

    def forward(self, x):
        assert not isinstance(self.kept, FakeTensor)
        self.kept = x.tanh()
        return self.kept


def test_what_a_model_keeps_of_a_proof_is_gone_after_it():
    model = Remembering()
    assert float(ns.lipschitz(model, torch.randn(3, 4)).upper) == pytest.approx(1) and model.kept is None
