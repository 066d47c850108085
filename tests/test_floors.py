"""The floor of BN: shown for chains of exactly its form, below every product and every constant, and not for anything else."""

import copy
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import normscope as ns


def chain(*widths: int, activation: type[nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    """Linear → BN → activation again and again, then a head."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), activation()]
        model = nn.Sequential(*layers, nn.Linear(widths[-1], 3))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.uniform_(module.weight, 0.2, 2)
                nn.init.normal_(module.bias)
    return model


def data_of(width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(400, width, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.1, 2, width)


def calibrated(model: nn.Module, data: torch.Tensor) -> nn.Module:
    """Running statistics of exactly these data, layer by layer."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1.0
            module.train()
    with torch.no_grad():
        model(data)
    return model.eval()


def audited(model: nn.Module, data: torch.Tensor) -> ns.Audit:
    return ns.audit(model, data[:2], data=data, local=False)


@pytest.mark.parametrize("widths", [(4, 6), (5, 3, 8)])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_the_floor_is_below_the_product_and_the_constant(widths, activation):
    data = data_of(widths[0])
    model = calibrated(chain(*widths, activation=activation), data)
    floor = audited(model, data).floor
    normalizers = [module for module in model if isinstance(module, nn.BatchNorm1d)]
    expected = float(normalizers[-1].weight.detach().norm()) / float(data.var(0, correction=0).sum()) ** 0.5
    assert float(floor.value) == pytest.approx(expected, rel=1e-3) and floor.value <= floor.product
    trunk = model[: list(model).index(normalizers[-1]) + 1]
    with torch.no_grad():
        steepest = (torch.pdist(trunk(data)) / torch.pdist(data)).max()
    assert float(steepest) >= 0.99 * float(floor.value)  # running variances are unbiased, so 0.25 % larger


def test_intermediate_scales_do_not_move_it():
    data = data_of(4)
    model = calibrated(chain(4, 6, 5), data)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight.mul_(100)
        other[2].bias.add_(3)
    floors = [audited(calibrated(m, data), data).floor for m in (model, other)]
    assert float(floors[0].value) == pytest.approx(float(floors[1].value))


def test_it_is_printed_and_survives_json():
    data = data_of(4)
    audit = audited(calibrated(chain(4, 6), data), data)
    again = ns.Audit.from_dict(audit.to_dict())
    assert "no weights with these widths and data" in str(audit)
    assert again.floor.layer == audit.floor.layer and again.floor.value.log10 == pytest.approx(audit.floor.value.log10)


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return x + self.norm(self.first(x))


OTHERS = {
    "statistics of other data": lambda data: chain(4, 6).eval(),
    "layer norm": lambda data: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU()),
    "a steeper activation": lambda data: calibrated(
        nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 5), nn.BatchNorm1d(5)), data
    ),
    "a skip": lambda data: calibrated(Skip(), data),
    "no normalizer": lambda data: nn.Linear(4, 3),
    "batch norm of the input": lambda data: calibrated(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), data),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_have_no_floor(name):
    data = data_of(4)
    audit = audited(OTHERS[name](data), data)
    assert audit.floor is None and "no weights" not in str(audit)


def test_convolutions_have_none():
    data = torch.randn(64, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model.train()(data)
    assert audited(model.eval(), data).floor is None


def test_the_page_shows_what_its_code_prints(capsys):
    page = (Path(__file__).parents[1] / "docs" / "open-questions.md").read_text(encoding="utf-8")
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    with torch.random.fork_rng():
        exec(code, {})
    assert capsys.readouterr().out == printed
