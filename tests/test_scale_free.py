"""Whether a weight is scale-free: symmetries, doctor and watch give one answer, or say that they did not judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import normscope as ns
from normscope.symmetry.report import SymmetryReport
from tests.networks import Function, randn
from tests.scale_freeness import agree, answers, watched
from tests.symmetry.cases import CASES, Case
from tests.symmetry.layers import TANH, Shared, linear
from tests.symmetry.random_graphs import random_graph


@pytest.mark.quick(15)
@pytest.mark.parametrize("name", CASES)
def test_the_parts_agree_on_every_case(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    agree(answers(case.model(), case.example, case.mode, tmp_path))


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU(), layer, nn.BatchNorm1d(3))


def tied(model: nn.Sequential) -> nn.Module:
    model[-1].weight = model[0].weight
    return model


def in_eval_mode(model: nn.Sequential, place: int) -> nn.Module:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    model[place] = Frozen(model[place].num_features)
    return model


def before(*between: nn.Module, norm: nn.Module | None = None, bias: bool = False) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(linear(3, 4, bias), *between, norm or nn.BatchNorm1d(4), TANH(), linear(4, 2))


class Scaled(nn.Module):
    """A chain of torch's own modules, and what a module of the user's own does to it with the first weight, unseen by autograd."""

    def __init__(self, spoil: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        super().__init__()
        self.chain, self.spoil = nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), spoil

    def forward(self, x: Tensor) -> Tensor:
        return self.spoil(self.chain, x)


W, MASK = "0.weight", Function(lambda h: h * (h > 0.3))
NASTY: dict[str, tuple[Callable[[], nn.Module], str, bool, bool | None]] = {  # model, weight, symmetries, watch by itself
    "ReLU": (before(nn.ReLU()), W, True, True),
    "ReLU and a bias": (before(nn.ReLU(), bias=True), W, True, True),
    "twice the value": (before(Function(lambda h: 2 * h)), W, True, None),
    "a constant added": (before(Function(lambda h: h + torch.arange(4.0))), W, True, None),
    "a constant added, before LN": (before(Function(lambda h: h + torch.arange(4.0)), norm=nn.LayerNorm(4)), W, False, None),
    "a mask with a threshold": (before(MASK), W, False, None),
    "a mask without a threshold": (before(Function(lambda h: h * (h > 0))), W, False, None),
    "a detached norm": (before(Function(lambda h: h * h.detach().norm())), W, True, None),
    "divided by a detached norm": (before(Function(lambda h: h / h.detach().norm()), norm=nn.Identity()), W, True, None),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(linear(3, 4)), TANH()),
                    "0.parametrizations.weight.original1", True, None),
    "weight norm, its length": (lambda: nn.Sequential(parametrizations.weight_norm(linear(3, 4)), TANH()),
                                "0.parametrizations.weight.original0", False, None),
    "dropout": (before(nn.Dropout(0.5)), W, True, True),
    "LeakyReLU": (before(nn.LeakyReLU(0.1)), W, True, True),
    "an identity": (before(nn.Identity()), W, True, True),
    "sigmoid": (before(nn.Sigmoid()), W, False, None),
    "ELU": (before(nn.ELU()), W, False, None),
    "a large ε": (before(norm=nn.BatchNorm1d(4, eps=10.0)), W, True, True),
    "no affine parameters": (before(norm=nn.BatchNorm1d(4, affine=False), bias=True), W, True, True),
    "no running statistics": (before(norm=nn.BatchNorm1d(4, track_running_stats=False)), W, True, True),
    "LN": (before(norm=nn.LayerNorm(4), bias=True), W, True, True),
    "RMSNorm": (before(norm=nn.RMSNorm(4), bias=True), W, True, True),
    "GN": (before(norm=nn.GroupNorm(2, 4), bias=True), W, True, True),
    "GN with one entry in a group": (before(norm=nn.GroupNorm(4, 4)), W, True, True),
    "statistics that stay": (lambda: in_eval_mode(before()(), 1), W, False, None),
    "another weight between": (lambda: nn.Sequential(linear(3, 4), linear(4, 4), nn.BatchNorm1d(4), TANH()), W, True, None),
    "the same layer twice": (lambda: twice(linear(3, 3, False)), W, True, None),
    "the same layer twice, with a bias": (lambda: twice(linear(3, 3)), W, True, None),
    "the same layer, elsewhere": (lambda: nn.Sequential(Shared(linear(3, 3, False), TANH(), nn.BatchNorm1d(3))), "0.layer.weight",
                                  False, None),
    "tied to the head": (lambda: tied(nn.Sequential(linear(3, 3), nn.BatchNorm1d(3), TANH(), linear(3, 3))), W, False, None),
    "the head": (before(), "3.weight", False, None),
    "a factor of the weight's norm": (
        lambda: Scaled(lambda chain, x: chain(x) * chain[0].weight.detach().norm()), "chain.0.weight", False, None),
    "an input of the weight's norm": (
        lambda: Scaled(lambda chain, x: chain(x + chain[0].weight.detach().norm())), "chain.0.weight", True, None),
}  # fmt: skip


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", NASTY)
def test_the_parts_agree_where_it_is_hard(name: str, tmp_path: Path) -> None:
    make, weight, free, alone = NASTY[name]
    found = answers(Case(make, (9, 3), ()).model(), randn(9, 3), "train", tmp_path)
    agree(found)
    assert found["symmetries"][weight] is free and found["watch"][weight] is alone


CHAINS: dict[str, tuple[nn.Module, nn.Module, nn.Module, bool | None]] = {  # a convolution, what follows, watch by itself
    "nothing": (nn.Conv2d(2, 4, 3), nn.Identity(), nn.BatchNorm2d(4), True),
    "transposed": (nn.ConvTranspose2d(2, 4, 3), nn.Identity(), nn.BatchNorm2d(4), True),
    "max-pool": (nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2), nn.BatchNorm2d(4), True),
    "average": (nn.Conv2d(2, 4, 3, padding=1), nn.AvgPool2d(2), nn.BatchNorm2d(4), True),
    "adaptive average": (nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(4), True),
    "dropout of channels": (nn.Conv2d(2, 4, 3), nn.Dropout2d(0.3), nn.BatchNorm2d(4), True),
    "flat": (nn.Conv2d(2, 4, 3), nn.Flatten(2), nn.BatchNorm1d(4), True),
    "a bounded rectifier": (nn.Conv2d(2, 4, 3), nn.ReLU6(), nn.BatchNorm2d(4), None),
    "GN": (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4), True),
    "IN": (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.InstanceNorm2d(4), True),
    "IN with statistics": (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.InstanceNorm2d(4, track_running_stats=True), True),
    "taps that read padding alone": (nn.Conv2d(2, 4, 9, padding=4), nn.Identity(), nn.BatchNorm2d(4), True),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", CHAINS)
def test_the_parts_agree_on_convolutions(name: str, tmp_path: Path) -> None:
    *layers, alone = CHAINS[name]
    found = answers(nn.Sequential(*layers, TANH()), randn(5, 2, 4, 4), "train", tmp_path)
    agree(found)
    assert found["watch"] == {"0.weight": alone}


class Residual(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Named(nn.LayerNorm):
    """Its forward is torch's."""


def chain(norm: nn.Module | None = None, change: Callable[[nn.Sequential], object] = lambda model: None) -> nn.Sequential:
    model = nn.Sequential(linear(3, 4), norm or nn.LayerNorm(4), TANH(), linear(4, 2))
    change(model)
    return model


def added(module: nn.Module, before: bool) -> None:
    """A hook that adds to what enters a module, or to what leaves it."""
    if before:
        module.register_forward_pre_hook(lambda m, args: (args[0] + torch.arange(4.0),))
    else:
        module.register_forward_hook(lambda m, args, output: output + args[0])


def returns_its_input(model: nn.Sequential) -> None:
    model[1].forward = lambda x: x  # type: ignore[method-assign, assignment]


def in_one_memory(model: nn.Sequential) -> None:
    model[3] = linear(3, 4)
    model[3].weight = nn.Parameter(model[0].weight.data)
    model.insert(3, linear(4, 3))


FOREIGN: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # code or memory that is not the chain's own; symmetries
    "a subclass that adds its input": (lambda: chain(Residual(4)), False),
    "a subclass with torch's forward": (lambda: chain(Named(4)), True),
    "a forward that was put in place": (lambda: chain(change=returns_its_input), False),
    "a hook before": (lambda: chain(change=lambda model: added(model[1], True)), False),
    "a hook behind": (lambda: chain(change=lambda model: added(model[1], False)), False),
    "two parameters in one memory": (lambda: chain(change=in_one_memory), False),
    "a parametrization": (lambda: chain(change=lambda model: parametrizations.orthogonal(model[3])), True),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_where_other_code_has_a_part_the_chain_proves_nothing(name: str, tmp_path: Path) -> None:
    make, free = FOREIGN[name]
    found = answers(make(), randn(9, 3), "train", tmp_path)
    agree(found)
    assert found["symmetries"]["0.weight"] is free and set(found["watch"].values()) == {None}


def test_the_parts_agree_on_random_networks(tmp_path: Path) -> None:
    for seed in range(4):
        agree(answers(*random_graph(seed), tmp_path / str(seed)))


@pytest.mark.full
def test_the_parts_agree_on_many_random_networks(tmp_path: Path) -> None:
    for seed in range(4, 200):
        agree(answers(*random_graph(seed), tmp_path / str(seed)))


def test_weights_that_are_not_judged_are_named_with_the_line_that_judges_them(tmp_path: Path) -> None:
    watched(before(nn.Sigmoid())(), randn(9, 3), tmp_path)
    (note,) = [event["message"] for event in ns.load_run(tmp_path).events("note") if "not judged" in event["message"]]
    assert "0.weight, 4.weight" in note and "symmetries=ns.symmetries(model, example)" in note


def test_the_doctor_searches_once_and_not_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from normscope.findings import subject

    calls: list[nn.Module] = []

    def counted(model: nn.Module, example: Any) -> SymmetryReport:
        calls.append(model)
        return ns.symmetries(model, example)

    monkeypatch.setattr(subject, "symmetries", counted)
    model, example = before(nn.ReLU(), bias=True)(), randn(9, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = ns.doctor(model, example, optimizer=optimizer)
    assert "NS303" in [finding.rule for finding in found] and "NS304" in found.checked and len(calls) == 1
    assert ns.doctor(model, example).not_checked["NS303"].startswith("pass optimizer=") and len(calls) == 1
    monkeypatch.setattr(subject, "MOST_MODULES", 3)
    large = ns.doctor(model, example, optimizer=optimizer)
    assert large.not_checked["NS303"] == large.not_checked["NS304"] and "symmetries=ns.symmetries" in large.not_checked["NS303"]
    told = ns.doctor(model, example, optimizer=optimizer, symmetries=ns.symmetries(model, example))
    assert [finding.rule for finding in told] == [finding.rule for finding in found] and len(calls) == 1


def test_the_doctor_says_why_it_did_not_look() -> None:
    class Branching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) > 0 else x.new_zeros(len(x), 2)

    model = Branching(*before()())
    found = ns.doctor(model, randn(9, 3).abs(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert found.not_checked["NS303"].startswith("scale-free weights were not looked for: ") and "NS301" in found.checked


def test_a_report_of_another_model_or_mode_is_refused_by_the_doctor() -> None:
    model, example = before()(), randn(9, 3)
    with pytest.raises(ns.InputError, match="another model"):
        ns.doctor(model, example, symmetries=ns.symmetries(nn.Linear(3, 4), example))
    with pytest.raises(ns.InputError, match="eval mode"):
        ns.doctor(model, example, symmetries=ns.symmetries(model, example, mode="eval"))
    with pytest.raises(ns.InputError, match=r"ns\.symmetries"):
        ns.doctor(model, example, symmetries=True)  # type: ignore[arg-type]


def test_a_run_without_judged_weights_is_no_clean_run(tmp_path: Path) -> None:
    model, example = before(nn.Sigmoid())(), randn(9, 3)
    watched(model, example, tmp_path)
    assert "symmetries=" in ns.doctor(model, example, run=tmp_path).not_checked["NS309"]


def test_a_normalizer_that_is_called_twice_ends_a_scale_at_its_next_call(tmp_path: Path) -> None:
    norm, linear = nn.LayerNorm(4), nn.Linear(4, 4)
    model = nn.Sequential(norm, nn.Tanh(), linear, nn.Identity(), norm, nn.Linear(4, 2))
    told = watched(model, randn(9, 4), tmp_path, symmetries=ns.symmetries(model, randn(9, 4)))
    assert (told["2.weight"]["scale_free"], told["2.weight"]["normalizer"]) == (True, "0#2")
