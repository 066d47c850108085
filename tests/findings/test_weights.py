"""Rules on weights alone run on tensors without a model, and find what they find in the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.findings.catalogue import RULES, chosen_rules, judged
from normscope.findings.weights import StoredNormalizer, WeightsAlone

ALONE = {id for id, rule in RULES.items() if rule.needs == ("weights",)}


@dataclass
class Tensors:
    """The tensors of a state dictionary."""

    held: dict[str, Tensor]
    trained: bool = False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor) for name, tensor in self.held.items() if tensor.is_floating_point())

    def normalizers(self) -> Mapping[str, StoredNormalizer]:
        paths = {name.rpartition(".")[0] for name, tensor in self.held.items() if tensor.dim() == 1 and name.endswith("weight")}
        names = ("weight", "bias", "running_mean", "running_var")
        return {path: StoredNormalizer(*(self.held.get(f"{path}.{name}") for name in names)) for path in paths}


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    with torch.no_grad():
        for place in (1, 4):
            model[place].weight.add_(0.1 * torch.randn(8))
        model[1].running_var.fill_(2.0)
    return model


def planted(where: str, entries: slice, value: float) -> nn.Module:
    model = network()
    with torch.no_grad():
        model.get_parameter(where)[entries] = value
    return model


CASES = {
    "NaN in any weight": ("NS209", planted("3.weight", slice(0, 1), float("nan"))),
    "γ gone in 2 of 8": ("NS202", planted("4.weight", slice(0, 2), 0.0)),
    "γ gone in 5 of 8": ("NS202", planted("4.weight", slice(0, 5), 0.0)),
    "γ gone in all": ("NS202", planted("4.weight", slice(0, 8), 0.0)),
    "γ that never moved": ("NS210", planted("4.weight", slice(0, 8), 1.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_is_found_in_a_model_and_in_its_tensors(name: str) -> None:
    rule, model = CASES[name]
    alone = {
        (finding.rule, finding.where, finding.message)
        for finding in judged(WeightsAlone(Tensors(model.state_dict())), chosen_rules())[0]
    }
    whole = {(f.rule, f.where, f.message) for f in ns.doctor(model, torch.zeros(2, 4)) if f.rule in ALONE}
    assert rule in {found for found, _, _ in alone} and alone == whole


def test_healthy_weights_have_no_finding_and_the_rest_says_what_it_needs() -> None:
    found, checked, not_checked = judged(WeightsAlone(Tensors(network().state_dict())), chosen_rules())
    assert not found and set(checked) == ALONE and set(checked) | set(not_checked) == set(RULES)
    assert all(not_checked.values())


def test_weights_of_a_training_whose_scales_are_all_one() -> None:
    still = {"a.weight": torch.ones(8, dtype=torch.bfloat16), "b.weight": torch.ones(8, dtype=torch.bfloat16)}
    for trained in (False, True):
        found = judged(WeightsAlone(Tensors(still, trained)), ["NS210"])[0]
        assert bool(found) == trained
    assert "2 of 2 normalizers, 2 of them in bfloat16" in found[0].message
