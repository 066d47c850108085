"""Repairs do what they say: findings are gone, outputs stay or the change is measured, the model itself is untouched."""

import copy
import pickle

import pytest
import torch
from torch import nn

import normscope as ns
from tests.doctor.cases import CASES
from tests.doctor.patients import Block, begun, conv, micro, modes, randn, unmoved


class RootMeanSquare(nn.Module):
    """As in Llama: computed in float32, returned in the type of the input, times γ."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, RootMeanSquare], ids=lambda kind: kind.__name__)
def test_normalizers_in_float32_train_under_bfloat16(norm):
    model = nn.Sequential(nn.Linear(4, 8), norm(8), nn.GELU(), nn.Linear(8, 2)).bfloat16()
    x, optimizer = randn(16, 4).bfloat16(), torch.optim.Adam(model.parameters(), lr=1e-4)
    found = ns.doctor(model, x, optimizer=optimizer, select=["NS312"])
    mended = found.apply()
    (repair,) = found.repairs
    assert mended[1].weight.dtype == torch.float32 and model[1].weight.dtype == torch.bfloat16 and repair.change < 0.02
    mended, before = pickle.loads(pickle.dumps(mended)), copy.deepcopy(mended[1].weight)
    renewed = torch.optim.Adam(mended.parameters(), lr=1e-4)
    assert mended(x).dtype == torch.bfloat16
    mended(x).square().mean().backward()
    renewed.step()
    assert bool((mended[1].weight != before).any())
    assert not ns.doctor(mended, x, optimizer=renewed, select=["NS312"])


def test_biases_before_one_shared_normalizer_stay():
    """Its mean cannot take both of them in."""
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.ReLU(), nn.Linear(4, 4), shared, nn.ReLU()).eval()
    found = ns.doctor(model, randn(2, 4))
    assert torch.equal(found.apply()(randn(2, 4)), model(randn(2, 4))) and {"NS101", "NS104"} <= {finding.rule for finding in found}


def test_a_frozen_normalizer_stays_frozen_in_training():
    patient = modes(True, True, False)
    mended = ns.doctor(patient.model, patient.example, select=["NS206"]).apply()
    kept = copy.deepcopy(mended[4].state_dict())
    mended.train()(patient.example + 3)
    assert all(torch.equal(value, kept[name]) for name, value in mended[4].state_dict().items())
    assert not mended[4].training and mended[1].training and mended.state_dict().keys() == patient.model.state_dict().keys()


def test_statistics_are_estimated_anew_where_data_is_at_hand():
    patient = begun(60)
    found = ns.doctor(patient.model, patient.example, **patient.settings)
    mended = found.apply()
    assert [repair.rule for repair in found.repairs] == ["NS205"] and found.repairs[0].change > 0
    assert not ns.doctor(mended, patient.example, select=["NS205"], **patient.settings)
    without = ns.doctor(*_patient("NS201"), select=["NS201"])
    without.apply()
    assert without and not without.repairs


def test_group_norms_only_on_request_with_their_change():
    patient = micro(2)
    found = ns.doctor(patient.model, patient.example, **patient.settings)
    found.apply()
    assert "NS302" not in {repair.rule for repair in found.repairs}
    mended = found.apply(select=["NS302"])
    (repair,) = found.repairs
    assert isinstance(mended[1], nn.GroupNorm) and torch.equal(mended[1].weight, patient.model[1].weight)
    before, after = patient.model.eval()(patient.example), mended.eval()(patient.example)
    assert repair.change == pytest.approx(float((before - after).abs().max() / before.abs().max())) and repair.change > 0
    with pytest.raises(ns.InputError, match="no mechanical fix for NS102"):
        found.apply(select=["NS102"])


@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (32, 2), (64, 4), (100, 5), (17, 1)])
def test_groups_have_at_least_sixteen_channels_or_all(channels, groups):
    patient = micro(2)
    patient.model = nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU())
    mended = ns.doctor(patient.model, patient.example, micro_batch=2).apply(select=["NS302"])
    assert mended[1].num_groups == groups


def test_an_optimizer_without_harmful_decay_and_with_what_was_forgotten():
    model = nn.Sequential(Block(), nn.LayerNorm(4), nn.Linear(4, 2))
    held = [parameter for name, parameter in model.named_parameters() if name != "1.bias"]
    optimizer = torch.optim.AdamW(held, lr=3e-3, weight_decay=0.1, betas=(0.8, 0.9))
    x = randn(2, 5, 4)
    found = ns.doctor(model, x, optimizer=optimizer)
    assert {"NS301", "NS305"} <= {finding.rule for finding in found}
    mended = found.apply()
    renewed = found.optimizer_for(mended)
    names = {id(parameter): name for name, parameter in mended.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in renewed.param_groups for p in group["params"]}
    assert set(decay) == set(names.values()) and type(renewed) is torch.optim.AdamW
    assert {name for name, value in decay.items() if not value} == {name for name in decay if name.endswith("bias")}
    assert all(group["lr"] == 3e-3 and group["betas"] == (0.8, 0.9) for group in renewed.param_groups)
    after = ns.doctor(mended, x, optimizer=renewed)
    assert not [f for f in after if f.rule == "NS305" or (f.rule == "NS301" and f.severity != "info")]
    mended(x).square().mean().backward()
    renewed.step()


def test_an_optimizer_must_have_been_examined():
    with pytest.raises(ns.InputError, match="optimizer="):
        ns.doctor(*_patient("NS101")).optimizer_for(conv().model)


@pytest.mark.parametrize("norms", [1, 0])
def test_decay_is_judged_by_placement(norms):
    """γ that linear layers alone read is information; γ whose output is added to a stream is a warning."""
    inner = nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 4, bias=False))
    model = inner if norms else nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4, bias=False), nn.ReLU())
    found = ns.doctor(model, randn(2, 4), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), select=["NS301"])
    assert [finding.severity for finding in found] == ["info" if norms else "warning"]
    assert ("Leave it" in found[0].fix) == bool(norms)


def test_what_was_rounded_away_moves_after_the_repair():
    patient = unmoved(torch.bfloat16, 1e-4)
    mended = ns.doctor(patient.model, patient.example, **patient.settings).apply()
    assert mended[1].weight.dtype == torch.float32


def _patient(rule):
    patient = CASES[rule][0]()
    return patient.model, patient.example
