"""An audit of a model that has no certificate: everything but the upper bound is given, and true."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.core.errors import EvaluationError
from normscope.core.interval import Interval
from normscope.graph.trace import trace
from normscope.report.results import shown_results
from tests.networks import randn


class Bessel(nn.Module):
    """An operation without a rule, and without a derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i0e(x)


class Spectrum(nn.Module):
    """|sin z| of complex z, a function with a kink that none of its real parts changes sign at."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x, dim=-1).sin().abs()


class Powered(nn.Module):
    """An operation whose rule refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) ** (1.5 + x.abs())


def convolutional(*odd: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)]
    return nn.Sequential(*first, *odd, nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()


IMAGES = randn(6, 2, 4, 4).double()
MISSING = {
    "one": ((Bessel(),), "1 operation without a rule", ["special_bessel_j0 at 4"]),
    "two": ((Bessel(), Scaled()), "2 operations without a rule", ["special_bessel_j0 at 4", "special_i0e at 5"]),
    "complex numbers on the way": ((Spectrum(),), "3 operations without a rule", ["view_as_complex at 4", "sin at 4", "abs at 4"]),
    "its rule refuses": ((Powered(),), "an exponent depends on the input", ["pow at 4"]),
    "both": ((Powered(), Bessel()), "2 operations without a bound", ["special_bessel_j0 at 5", "pow at 4"]),
}


@pytest.fixture(scope="module")
def degraded() -> ns.Audit:
    return ns.audit(convolutional(*MISSING["two"][0]), IMAGES, effort=0.05)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("region", [None, ns.Ball(IMAGES[0], 0.1)], ids=["everywhere", "a ball"])
def test_only_the_upper_bound_is_absent(name, region):
    layers, reason, operations = MISSING[name]
    model = convolutional(*layers)
    found = ns.audit(model, IMAGES, region=region, effort=0.05)
    assert found.bracket.upper is None and found.bracket.reason == reason
    assert len(found.bracket.certificate.causes) == len(operations)
    assert all(cause.startswith(op) for cause, op in zip(found.bracket.certificate.causes, operations, strict=True))
    assert found.bracket.lower > 0 and found.bracket.witness is not None
    assert found.bracket.witness.replay() == found.bracket.lower
    assert [finding.rule for finding in found.findings] == [f.rule for f in ns.doctor(model, IMAGES)]
    with pytest.raises(ns.Refusal) as caught:
        ns.lipschitz(model, IMAGES, region=region, effort=0.05)
    assert all(op in str(caught.value) for op in operations) or name == "both"  # what has no rule is listed first
    with pytest.raises(ns.Refusal, match=operations[0]):
        _ = found.bracket.proved


def test_the_ledger_is_that_of_the_covered_model(degraded):
    """Every number but shares and what lies behind the operations, and what they change of the data."""
    covered = ns.audit(convolutional(nn.Identity(), nn.Identity()), IMAGES, effort=0.05)
    assert [row.name for row in degraded.layers] == [row.name for row in covered.layers] == ["0", "1", "3", "7", "8", "9"]
    for row, other in zip(degraded.layers, covered.layers, strict=True):
        for column in ("kind", "spectral_norm", "matrix_norm", "frobenius_norm", "reads"):
            assert getattr(row, column) == getattr(other, column), (row.name, column)
        assert row.share_of_log_upper is None and row.separation is not None and row.input_std is not None
        if row.name in ("0", "1", "3"):  # before the operations
            assert math.isclose(row.upper_here.log, other.upper_here.log, abs_tol=1e-9) and row.input_std == other.input_std
            assert row.separation <= row.upper_here
        else:
            assert row.upper_here is row.upper_without_gains is None
    assert set(degraded.products) == set(covered.products) and all(map(math.isfinite, degraded.products.values()))


def test_it_is_printed_as_none(degraded):
    for text in (str(degraded), str(degraded.bracket), degraded._repr_html_(), degraded.bracket._repr_html_()):
        assert "none: 2 operations without a rule" in text
    for text in (str(degraded), degraded._repr_html_(), degraded.bracket._repr_html_()):
        assert "special_bessel_j0 at 4" in text and "special_i0e at 5" in text
    assert max(map(len, str(degraded).splitlines())) <= 100


def test_json_has_null_and_a_reason(degraded):
    found = json.loads(degraded.to_json())
    bracket = found["bracket"]
    assert bracket["upper_log10"] is None and bracket["certified"] is False and bracket["certificate"] == []
    assert bracket["reason"] == "2 operations without a rule" and len(bracket["causes"]) == 2 and "register" in bracket["advice"]
    again = ns.Audit.from_dict(found)
    assert again.bracket.upper is None and again.to_dict()["bracket"] == bracket and str(again) == str(degraded)


def test_the_page_says_what_is_absent(degraded, tmp_path):
    degraded.to_html(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert (
        "there is no upper bound: 2 operations without a rule" in page
        and "special_i0e at 5" in page
        and "normscope.rules.register" in page
    )
    degraded.to_json(tmp_path / "audit.json")
    section = shown_results(tmp_path / "audit.json").section
    assert section is not None and "no upper bound: 2 operations without a rule" in section.headline
    note = degraded.figure("depth").layout.annotations[0].text
    assert "no upper bound" in note and degraded.figure("graph").data


def test_a_bracket_without_an_upper_side(degraded):
    bracket = degraded.bracket
    assert bracket.ratio == math.inf and bracket.lower * 2 in bracket and bracket.lower / 2 not in bracket


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))


UNDEFINED = {
    "random": (Random(), randn(5, 4), "dropout at drop"),
    "batch statistics": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 2)), randn(5, 2, 5, 5), "batch_norm at 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDEFINED)
def test_what_is_no_function_of_a_sample_has_its_weights_in_the_ledger(name):
    """No lower bound, no statistics: neither is defined. Norms of weights, and bounds before the operation, are."""
    model, example, operation = UNDEFINED[name]
    state = torch.get_rng_state()
    found = ns.audit(model, example, mode="train", effort=0.05)
    assert torch.equal(state, torch.get_rng_state())
    assert found.bracket.upper is None and found.bracket.lower == 0 and found.bracket.witness is None
    assert found.bracket.certificate.causes[0].startswith(operation) and any("not a function" in note for note in found.notes)
    first, *_, last = found.layers
    assert math.isclose(first.upper_here.log, first.spectral_norm.log, abs_tol=1e-9) and last.upper_here is None
    for row in (first, last):
        weight = model.get_submodule(row.name).weight.detach()
        assert math.isclose(float(row.frobenius_norm), float(weight.norm()), rel_tol=1e-5)
    assert all(row.input_std is row.separation is row.gain is None for row in found.layers)
    assert "no lower bound" in str(found) and str(ns.Audit.from_dict(json.loads(found.to_json()))) == str(found)
    with pytest.raises(ns.Refusal, match=operation):
        ns.lipschitz(model, example, mode="train")


def test_a_graph_that_is_not_the_model_is_refused_as_before():
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.compiler.is_exporting() else 2 * x

    with pytest.raises(ns.Refusal, match="not the model"):
        ns.audit(Branching(), randn(2, 3))


# exceptions of torch ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("normscope_tests::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        raise TypeError("no float64 here")
    return x.clone()


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.normscope_tests.picky(x)


@pytest.mark.parametrize("entry", [ns.audit, ns.lipschitz, ns.symmetries])
def test_an_operation_that_does_not_run_is_named_with_its_module(entry):
    with pytest.raises(ns.NormscopeError) as caught:
        entry(nn.Sequential(nn.Linear(3, 3), nn.Sequential(Picky())), randn(2, 3))
    assert "normscope_tests.picky at 1.0" in str(caught.value) and "no float64 here" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_evaluation_names_its_node():
    """Whatever torch raises for one node, in any function that evaluates a graph, is an error of ours with its path."""
    from normscope.graph.trace import trace

    graph = trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), randn(1, 3))
    for run in (lambda x: graph.run([x], torch.float64), graph.batched(), graph.batched_capture(graph.nodes)):
        with pytest.raises(EvaluationError, match="linear at 0"):
            run(randn(1, 7))


class Recurrent(nn.Module):
    def __init__(self, **options: float) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"num_layers": 2, "dropout": 0.5}, marks=pytest.mark.full)], ids=["plain", "dropout"]
)
def test_a_recurrent_layer_draws_nothing_in_eval_mode(options):
    found = ns.audit(Recurrent(**options).eval(), randn(2, 3, 3), effort=0.05)
    assert found.bracket.upper is not None and 0 < found.bracket.lower <= found.bracket.upper
    in_training = ns.audit(Recurrent(num_layers=2, dropout=0.5), randn(2, 3, 3), mode="train", effort=0.05)
    assert in_training.bracket.reason == "the answer changes from call to call"


def broken(name: str, *answer: object) -> ns.rules.Rule:
    """A rule of a user's that raises, or gives an answer of the wrong kind, where it is asked for `name`."""

    def wrong(*_: object) -> object:
        return answer[0] if answer else 1 / 0

    right = {"gain": lambda self, node, context: ns.rules.Gain.of(1.0)}
    return type("Broken", (ns.rules.Rule,), {**right, name: wrong})()


BROKEN = {
    "gain raises": broken("gain"),
    "gain is a number": broken("gain", 2.0),
    "interval raises": broken("interval"),
    "interval of another shape": broken("interval", Interval.unbounded((7,))),
    "interval is None": broken("interval", None),
    "center_error raises": broken("center_error"),
    "linear raises": broken("linear"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_that_is_broken_leaves_the_rest_of_the_audit(name, monkeypatch):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.SELU(), nn.Linear(3, 2)).double(), randn(2, 3).double()
    op = next(node.op for node in trace(model, x) if node.op.startswith("elu") or "selu" in node.op)
    monkeypatch.setitem(ns.rules.registry.rules, op, BROKEN[name])
    found = ns.audit(model, x, region=ns.Ball(x[0], 0.1), effort=0.05)
    assert found.bracket.upper is None and found.bracket.lower > 0 and len(found.layers) == 2
    assert any(op in cause for cause in found.bracket.certificate.causes)
    with pytest.raises(ns.NormscopeError):
        ns.lipschitz(model, x, region=ns.Ball(x[0], 0.1), effort=0.05)
