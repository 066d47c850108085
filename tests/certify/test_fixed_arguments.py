"""Ids, masks and numbers are held fixed: samples that have others are refused, not certified with the example's."""

import pytest
import torch
from torch import nn

import normscope as ns


class Chosen(nn.Module):
    """x times the matrix that an id names."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.stack([torch.eye(2), 100 * torch.eye(2)]))
        self.shifts = nn.Parameter(torch.eye(2))

    def forward(self, x, ids):
        return torch.einsum("boi,bi->bo", self.matrices[ids], x) + self.shifts[ids]


class Scaled(nn.Module):
    def forward(self, x, by):
        return x * by


POINTS, IDS = torch.zeros(2, 2), torch.tensor([0, 1])


@pytest.mark.parametrize(
    "ask",
    [
        lambda: ns.certify.certify_radius(Chosen(), (POINTS[:1], IDS[:1]), (POINTS, IDS, torch.tensor([0, 0]))),
        lambda: ns.certify.local_brackets(Chosen(), (POINTS[:1], IDS[:1]), [(POINTS, IDS)], radius=0.1),
        lambda: ns.audit(Chosen(), (POINTS[:1], IDS[:1]), data=[(POINTS, IDS)]),
        lambda: ns.certify.local_brackets(Scaled(), (POINTS[:1], torch.tensor(1.0)), [(POINTS, torch.tensor(70.0))], radius=0.1),
        lambda: ns.certify.local_brackets(Scaled(), (POINTS[:1], 1.0), [(POINTS, 70.0)], radius=0.1),
    ],
)
def test_samples_with_another_fixed_argument_are_refused(ask):
    with pytest.raises(ns.InputError, match="holds it fixed"):
        ask()


def test_samples_with_the_same_are_certified():
    found = ns.certify.certify_radius(Chosen(), (POINTS[:1], IDS[:1]), (POINTS, torch.tensor([0, 0]), torch.tensor([0, 0])))
    assert min(found.radius) > 0.7
    assert len(ns.audit(Chosen(), (POINTS, IDS)).layers) >= 0  # the example's own samples may differ: the first one counts
