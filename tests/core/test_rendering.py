"""Every result reads the same when printed and when shown by a notebook or by IPython."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normscope as ns
from tests.cases import randn

DATA = (randn(8, 4), torch.arange(8) % 3)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


RESULTS = {
    "bracket": lambda: ns.lipschitz(model(), randn(1, 4)),
    "audit": lambda: ns.audit(model(), randn(1, 4)),
    "findings": lambda: ns.doctor(model(), randn(1, 4)),
    "symmetries": lambda: ns.symmetries(model(), randn(2, 4)),
    "curvature": lambda: ns.hessian(model(), nn.functional.cross_entropy, DATA),
    "landscape": lambda: ns.curvature.landscape(model(), nn.functional.cross_entropy, DATA),
    "margins": lambda: ns.bounds.margins(model(), DATA),
}


class Printer:
    def __init__(self) -> None:
        self.shown = ""

    def text(self, shown: str) -> None:
        self.shown += shown


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shows_what_it_prints(name):
    result, printer = RESULTS[name](), Printer()
    result._repr_pretty_(printer, False)
    assert printer.shown == str(result) and "array(" not in printer.shown and "object at" not in printer.shown
    assert result._repr_html_().startswith("<pre")
