"""What cannot be certified is refused in one line that says why and what to do."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import normscope as ns
from normscope.certify import lower
from normscope.rules.registry import registry
from normscope.testing import check_rule
from tests.cases import Function, randn


@torch.library.custom_op("normscope_tests::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return 3 * x


@torch.library.custom_op("normscope_tests::warp", mutates_args=())
def warp(x: Tensor) -> Tensor:
    return torch.tanh(x)


for _op in (triple, warp):
    _op.register_fake(torch.empty_like)
    _op.register_vmap(lambda info, dims, x, op=_op: (op(x), dims[0]))
triple.register_autograd(lambda ctx, grad: 3 * grad)
warp.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0].tanh() ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Function(triple), Function(warp)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.first(x)


class NotANumber(nn.Linear):
    def __init__(self, entry: float) -> None:
        super().__init__(4, 3)
        nn.init.constant_(self.weight, entry)


def added_numbers(x: Tensor) -> Tensor:
    """Mixes the samples, and raises for NaN where it is run rather than traced."""
    if not torch.compiler.is_exporting() and x.isnan().any():
        raise ValueError("not a number")
    return x.cumsum(0)


def batch_norm_in_train_mode() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3))


REFUSED = {  # a model, an example, the mode, the class of the error, words that it must contain
    "control flow": (Function(lambda x: x if x.sum() > 0 else -x), randn(1, 4), "eval", ns.ExportError, ["could not be traced"]),
    "unknown operations": (Custom(), randn(1, 4), "eval", ns.Refusal, ["normscope_tests.triple", "normscope_tests.warp", "first", "second", "register"]),
    "batch norm in train mode": (batch_norm_in_train_mode(), randn(3, 4, 2), "train", ns.Refusal, ["batch statistics", 'mode="batch"', 'mode="eval"']),
    "dense batch norm in train mode": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), randn(3, 4), "train", ns.Refusal, ["batch statistics"]),
    "batch norm without running statistics": (nn.BatchNorm1d(4, track_running_stats=False), randn(3, 4, 2), "eval", ns.Refusal, ["batch statistics"]),
    "dropout in train mode": (nn.Sequential(nn.Linear(4, 3), nn.Dropout()), randn(1, 4), "train", ns.Refusal, ["random"]),
    "random leaky slopes": (nn.RReLU(), randn(1, 4), "train", ns.Refusal, ["random"]),
    "noise": (Function(lambda x: x + torch.randn(4)), randn(1, 4), "eval", ns.Refusal, ["random"]),
    "NaN weights": (NotANumber(math.nan), randn(1, 4), "eval", ns.InputError, ["weight", "NaN"]),
    "infinite weights": (NotANumber(math.inf), randn(1, 4), "eval", ns.InputError, ["weight", "infinite"]),
    "ids": (nn.Embedding(5, 3), torch.tensor([[1, 2]]), "eval", ns.InputError, ["embeddings", "floating-point"]),
    "mixed samples": (Function(lambda x: x - x.mean(0)), randn(3, 4), "eval", ns.Refusal, ["samples", 'mode="batch"']),
    "samples added up": (Function(lambda x: x.cumsum(0)), randn(3, 4), "eval", ns.Refusal, ["samples"]),
    "samples added up, numbers only": (Function(added_numbers), randn(3, 4), "eval", ns.Refusal, ["samples"]),
    "samples added up, from NaN": (Function(lambda x: x.cumsum(0)), randn(3, 4) * math.nan, "eval", ns.Refusal, ["samples"]),
    "sorted samples": (Function(lambda x: x.sort(0)[0]), randn(3, 4), "eval", ns.Refusal, ["samples"]),
    "the larger of two samples": (Function(lambda x: torch.fmax(x, x.flip(0))), randn(2, 4), "eval", ns.Refusal, ["samples"]),
    "a loss": (Function(lambda x: x.sum()), randn(3, 4), "eval", ns.Refusal, ["samples"]),
    "not a module": (lambda x: x, randn(1, 4), "eval", ns.InputError, ["torch.nn.Module", "function"]),
    "an empty batch": (nn.Linear(4, 3), torch.zeros(0, 4), "eval", ns.InputError, ["batch", "(0, 4)"]),
    "unequal batches": (Function(lambda x, y: x), (randn(2, 4), randn(3, 4)), "eval", ns.InputError, ["(2, 4)", "(3, 4)"]),
    "not an example": (nn.Linear(4, 3), "text", "eval", ns.InputError, ["str"]),
    "a wrong shape": (nn.Linear(4, 3), randn(1, 5), "eval", ns.InputError, ["does not run", "(1, 5)"]),
    "an unknown mode": (nn.Linear(4, 3), randn(1, 4), "test", ns.InputError, ["eval, train, batch"]),
    "a constant": (Function(lambda x: torch.ones(1, 3)), randn(1, 4), "eval", ns.InputError, ["does not depend"]),
    "TorchScript": (torch.jit.script(nn.Linear(4, 3)), randn(1, 4), "eval", ns.ExportError, ["TorchScript"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, capfd):
    model, example, mode, kind, words = REFUSED[name]
    with pytest.raises(kind) as caught:
        ns.lipschitz(model, example, mode=mode)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []
    assert isinstance(caught.value, ns.NormscopeError)
    assert capfd.readouterr().err == ""


def test_a_refusal_lists_every_cause_once():
    with pytest.raises(ns.Refusal) as caught:
        ns.lipschitz(Custom(), randn(1, 4))
    assert len(caught.value.causes) == 2


UNBOUNDED = {  # models without a finite constant, and the word that says why
    "a product": (lambda x: x * x.flip(1), "unbounded"),
    "a square": (torch.square, "slope is unbounded"),
    "a gate": (functional.glu, "gate"),
    "a step": (torch.floor, "jump"),
    "a quotient": (lambda x: 1 / (x + 1), "unbounded"),
    "no epsilon": (lambda x: functional.layer_norm(x, (4,), eps=0.0), "ε = 0"),
    "attention": (lambda x: functional.scaled_dot_product_attention(*[x.reshape(-1, 1, 2, 2)] * 3), "attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNBOUNDED)
def test_infinity_comes_with_its_reason(name):
    function, word = UNBOUNDED[name]
    found = ns.lipschitz(Function(function), randn(1, 4))
    assert not found.upper.finite and word in found.reason and "shown by" in found.reason and "\n" not in found.reason


UNPROVED = {  # no rule bounds them, and no inputs rule a bound out: the first two have one
    "sorting": (lambda x: x.gather(1, x.sort(1).indices), "jump"),
    "attention to one token": (
        lambda x: functional.scaled_dot_product_attention(x[:, None], x[:, None], 1 * x[:, None]),
        "attention",
    ),
    "a logarithm": (torch.log, "slope is unbounded"),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_infinity_is_not_claimed_without_evidence(name):
    function, word = UNPROVED[name]
    with pytest.raises(ns.Refusal) as caught:
        ns.lipschitz(Function(function), randn(1, 4))
    assert word in str(caught.value) and "region" in str(caught.value)
    audit = ns.audit(Function(function), randn(1, 4), effort=0.1)
    assert audit.bracket.upper is None and "region" in str(audit)


# rules of one's own ------------------------------------------------------------------------------------------------------


@pytest.fixture
def rules(monkeypatch):
    """The registry, put back after the test; torch has no batching rule for these operations, so few points are searched."""
    monkeypatch.setattr(lower, "MOST_POINTS", 32)
    monkeypatch.setattr(registry, "rules", dict(registry.rules))
    return registry


def test_with_rules_a_custom_operation_is_certified(rules):
    ns.rules.register(torch.ops.normscope_tests.triple, 3.0)
    ns.rules.register("normscope_tests::warp", lambda node: 1.0)
    found = check_rule(Custom(), randn(1, 4), tight=1.1)
    assert float(found.upper) == pytest.approx(6)


def test_registering_twice_needs_overwrite(rules):
    ns.rules.register("normscope_tests.triple", 3.0)
    with pytest.raises(ns.InputError, match="overwrite=True"):
        ns.rules.register("normscope_tests.triple", 4.0)
    ns.rules.register("normscope_tests.triple", 4.0, overwrite=True)
    assert float(ns.lipschitz(Function(triple), randn(1, 4)).upper) == pytest.approx(4)


@pytest.mark.parametrize("gain", [-1.0, math.nan])
def test_a_gain_is_not_negative(rules, gain):
    with pytest.raises(ns.InputError):
        ns.rules.register("normscope_tests.triple", gain)


def test_a_rule_that_is_too_small_is_caught(rules):
    ns.rules.register("normscope_tests.triple", 2.9)
    with pytest.raises(AssertionError, match="unsound"):
        check_rule(Function(triple), randn(1, 4))


def test_a_rule_that_is_too_large_is_not_tight(rules):
    ns.rules.register("normscope_tests.triple", 3.5)
    with pytest.raises(AssertionError, match="not tight"):
        check_rule(Function(triple), randn(1, 4), tight=1.1)


def test_a_rule_with_the_wrong_number_of_factors_is_named(rules):
    class Wrong(ns.rules.Rule):
        def gain(self, node, context):
            return ns.rules.Gain.of(1, 1)

    ns.rules.register("normscope_tests.triple", Wrong())
    with pytest.raises(ns.InputError, match=r"Wrong\.gain gave 2 factors for the 1 inputs of"):
        ns.lipschitz(Function(triple), randn(1, 4))


def test_a_model_that_cannot_be_copied_runs_all_the_same():
    model = Function(lambda x: x if x.sum() > 0 else -x)
    model.lock = threading.Lock()
    with pytest.raises(ns.ExportError, match="could not be traced"):
        ns.lipschitz(model, randn(1, 4))


GENERATOR = torch.Generator()
NODES = torch.tensor([0, 2, 1])
CAUSES = {
    "a generator": (lambda x: x + torch.randn(x.shape, generator=GENERATOR), "draws random numbers from a generator"),
    "a transform": (lambda x: torch.func.grad(lambda z: torch.sin(z).sum())(x), "inside a transform, such as torch.func.grad"),
    "a graph of nodes": (lambda x: x[NODES] * 2, r'does not run on inputs of shape \(1, 4\).*pass mode="batch"'),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named(name):
    function, cause = CAUSES[name]
    with pytest.raises(ns.NormscopeError, match=cause):
        ns.lipschitz(Function(function), randn(3, 4))


def test_a_number_from_a_buffer_is_not_taken_for_the_size_of_the_batch():
    scale = torch.tensor(2.0)
    (note,) = ns.lipschitz(Function(lambda x: x * scale.item()), randn(2, 4)).notes
    assert "a number taken from a tensor" in note and "size of the batch" not in note
