"""The audit: every number of the ledger recomputed from the modules and the data, without normscope."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import normscope as ns
from normscope.ledger import PRODUCTS
from normscope.report.audit_page import audit_report
from tests.networks import randn

EPSILON = 1e-3


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """γ, β and running statistics far from their initial values; weights as torch draws them, but from a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                scale = 1 / math.sqrt(parameter[0].numel()) if name == "weight" and parameter.dim() > 1 else 1.0
                parameter.normal_(generator=generator).mul_(scale)
            for name, buffer in module.named_buffers(recurse=False):
                if name == "running_var":
                    buffer.uniform_(0.2, 3.0, generator=generator)
                elif name == "running_mean":
                    buffer.normal_(generator=generator)
    return model


def network() -> nn.Sequential:
    layers = [
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6, eps=EPSILON), nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(3, 6, eps=EPSILON), nn.ReLU(),
        nn.Flatten(2), nn.Linear(16, 8), nn.LayerNorm(8, eps=EPSILON), nn.Tanh(), nn.Linear(8, 4),
    ]  # fmt: skip
    return randomized(nn.Sequential(*layers)).double().eval()


def chain() -> nn.Sequential:
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)]
    return randomized(nn.Sequential(*layers)).eval()


DATA = 1.5 * randn(12, 2, 4, 4, seed=5).double() + 0.5
CHANNEL_LAST = (nn.Linear, nn.LayerNorm)


def inputs_of(model: nn.Sequential, data: Tensor) -> dict[str, Tensor]:
    """What enters each layer of a sequence, in float64."""
    entering, value = {}, data.double()
    with torch.no_grad():
        for name, module in copy.deepcopy(model).double().eval().named_children():
            entering[name] = value
            value = module(value)
    return entering


def standard_deviation(module: nn.Module, value: Tensor) -> float:
    """√ of the mean over channels of the variance over batch and positions."""
    channels = value.movedim(-1 if isinstance(module, CHANNEL_LAST) else 1, 0).flatten(1)
    return float(channels.var(1, correction=0).mean().sqrt())


def gains(module: nn.Module, value: Tensor) -> dict[str, float]:
    """DESIGN.md, "Gains by definition", from the module and what enters it."""
    gamma = module.weight.detach().double()
    if isinstance(module, nn.BatchNorm2d):
        variance = module.running_var.double()
        inverse, paper, mean = 1 / (variance + module.eps).sqrt(), None, variance.mean()
    elif isinstance(module, nn.GroupNorm):
        spread = value.reshape(len(value), module.num_groups, -1).var(2, correction=0)  # (samples, groups)
        least = 1 / (spread.amin(0) + module.eps).sqrt()
        inverse, paper, mean = least.repeat_interleave(len(gamma) // module.num_groups), least.sum(), spread.mean()
    else:
        spread = value.var(-1, correction=0)  # of every token
        least = 1 / (spread.min() + module.eps).sqrt()
        inverse, paper, mean = least.expand(len(gamma)), least, spread.mean()
    return {
        "gain": float((gamma * inverse).abs().max()),
        "gain_paper": float(inverse.norm() if paper is None else paper),
        "gain_paper_affine": float((gamma * inverse).norm()),
        "gain_layer": float(1 / (mean + module.eps).sqrt()),
    }


@pytest.fixture(scope="module")
def audited() -> ns.Audit:
    return ns.audit(network(), DATA[:1], data=DATA, effort=0.05)


def test_there_is_a_row_for_every_layer_in_order(audited):
    assert [row.name for row in audited.layers] == ["0", "1", "3", "4", "7", "8", "10"]
    kinds = ["conv2d", "batch_norm", "conv2d", "group_norm", "linear", "layer_norm", "linear"]
    assert [row.kind for row in audited.layers] == kinds


def test_every_gain_is_the_one_of_its_definition(audited):
    model = network()
    entering, seen = inputs_of(model, DATA), 0
    for row in audited.layers:
        module = model[int(row.name)]
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)):
            for column, expected in gains(module, entering[row.name]).items():
                assert math.isclose(float(getattr(row, column)), expected, rel_tol=1e-6), (row.name, column)
                seen += 1
            assert row.spectral_norm is row.matrix_norm is row.frobenius_norm is None
        else:
            assert row.gain is row.gain_paper is row.gain_paper_affine is row.gain_layer is None
    assert seen == 12


def test_every_weight_has_its_norms(audited):
    model = network()
    entering = inputs_of(model, DATA)
    for row in audited.layers:
        module = model[int(row.name)]
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            weight = module.weight.detach()
            assert math.isclose(float(row.frobenius_norm), float(weight.norm()), rel_tol=1e-6)
            assert math.isclose(float(row.matrix_norm), float(torch.linalg.matrix_norm(weight.flatten(1), 2)), rel_tol=2e-6)
            sample = entering[row.name][0] if isinstance(module, nn.Conv2d) else entering[row.name][0, 0]
            dense = torch.autograd.functional.jacobian(lambda x, module=module: module(x[None])[0], sample)
            exact = float(torch.linalg.matrix_norm(dense.reshape(-1, sample.numel()), 2))
            assert exact * (1 - 1e-9) <= float(row.spectral_norm) <= exact * 1.2
    assert all(row.spectral_norm is not None or row.gain is not None for row in audited.layers)


def test_input_deviations_are_those_of_the_data(audited):
    model = network()
    entering = inputs_of(model, DATA)
    for row in audited.layers:
        expected = standard_deviation(model[int(row.name)], entering[row.name])
        assert math.isclose(row.input_std, expected, rel_tol=1e-6), row.name
    assert audited.statistics == "data" and not any("variances are those of the example" in note for note in audited.notes)


def test_data_in_any_form_gives_the_same_audit(audited):
    pairs = TensorDataset(DATA, torch.zeros(len(DATA)))
    for data in (pairs, list(DATA.split(5)), [{"x": part} for part in DATA.split(7)]):
        rows = ns.audit(network(), DATA[:1], data=data, effort=0.05).layers
        for row, expected in zip(rows, audited.layers, strict=True):
            assert math.isclose(row.input_std, expected.input_std, rel_tol=1e-9)
            assert row.gain is None or math.isclose(row.gain.log, expected.gain.log, abs_tol=1e-9)


def test_data_changes_what_enters():
    example = randn(3, 4)
    alone = ns.audit(chain(), example, effort=0.05)
    wide = ns.audit(chain(), example, data=10 * randn(20, 4, seed=1), effort=0.05)
    assert alone.statistics == "example" and any("pass data=" in note for note in alone.notes)
    assert wide.layers[0].input_std > 5 * alone.layers[0].input_std
    assert math.isclose(alone.layers[0].input_std, standard_deviation(nn.Linear(1, 1), example.double()), rel_tol=1e-6)


def test_batch_statistics_are_those_of_the_batch():
    model = randomized(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, eps=EPSILON))).double()
    batch = randn(9, 4).double()
    row = ns.audit(model, batch, mode="batch", effort=0.05).layers[1]
    variance, gamma = model[0](batch).detach().var(0, correction=0), model[1].weight.detach()
    inverse = 1 / (variance + EPSILON).sqrt()
    assert math.isclose(float(row.gain), float((gamma * inverse).abs().max()), rel_tol=1e-6)
    assert math.isclose(float(row.gain_paper), float(inverse.norm()), rel_tol=1e-6)
    assert math.isclose(float(row.gain_paper_affine), float((gamma * inverse).norm()), rel_tol=1e-6)
    assert math.isclose(float(row.gain_layer), float(1 / (variance.mean() + EPSILON).sqrt()), rel_tol=1e-6)


def test_products_are_sums_of_logarithms(audited):
    assert set(audited.products) == set(PRODUCTS)
    for name, column in PRODUCTS.items():
        logs = [math.log10(float(value)) for row in audited.layers if (value := getattr(row, column)) is not None]
        assert len(logs) in (3, 4) and math.isclose(audited.products[name], sum(logs), rel_tol=1e-9, abs_tol=1e-9)


def test_products_of_nothing_are_one():
    found = ns.audit(nn.Sequential(nn.Linear(3, 2)), randn(1, 3), effort=0.05).products
    assert all(found[name] == 0.0 for name in PRODUCTS if name.startswith("normalizers"))


LINEAR_CHAINS = {
    "dense": lambda: randomized(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), 1),
    "one layer": lambda: randomized(nn.Sequential(nn.Linear(4, 8)), 2),
    "normalized": chain,
    "smooth": lambda: randomized(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)), 3),
}


@pytest.mark.parametrize("name", LINEAR_CHAINS)
def test_shares_of_a_chain_add_up_to_one(name):
    found = ns.audit(LINEAR_CHAINS[name](), randn(3, 4), effort=0.05)
    shares = [row.share_of_log_upper for row in found.layers]
    assert math.isclose(sum(shares), 1, rel_tol=1e-6) and not found.residual


def test_shares_are_in_proportion_to_logarithms():
    """Two scalars, kept apart by a layer of gain 1: log‖W_k‖ / Σ log‖W‖."""
    model = nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.MaxPool1d(2), nn.Conv1d(1, 1, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[2].weight.fill_(8.0)
    first, second = ns.audit(model, randn(2, 1, 4).double(), effort=0.05).layers
    assert math.isclose(first.share_of_log_upper, 0.25, rel_tol=1e-6)
    assert math.isclose(second.share_of_log_upper, 0.75, rel_tol=1e-6)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.linear(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x + torch.relu(self.inner(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(torch.tanh(self.step(x)))
        return x


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def parsed(audit: ns.Audit) -> dict:
    return json.loads(audit.to_json(), parse_constant=refuse)


def test_the_json_is_the_audit(audited, tmp_path):
    found = parsed(audited)
    assert math.isclose(found["bracket"]["upper_log10"], audited.bracket.upper.log10)
    assert math.isclose(found["bracket"]["lower_log10"], audited.bracket.lower.log10)
    assert [row["name"] for row in found["layers"]] == [row.name for row in audited.layers]
    assert math.isclose(found["layers"][1]["gain"], float(audited.layers[1].gain)) and found["layers"][0]["gain"] is None
    assert found["products"] == pytest.approx(audited.products) and found["inputs"] == [[2, 4, 4]] and found["mode"] == "eval"
    audited.to_json(tmp_path / "audit.json")
    assert json.loads((tmp_path / "audit.json").read_text()) == found


def test_infinity_is_a_word_with_a_reason():
    audit = ns.audit(Gate(), randn(2, 3), effort=0.05)
    found = parsed(audit)["bracket"]
    assert found["upper_log10"] == "inf" and found["reason"] and audit.bracket.reason == found["reason"]
    assert "infinite because" in str(audit) and all(row.share_of_log_upper is None for row in audit.layers)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_extreme_weights_give_valid_json_and_a_report(scale):
    """The product of twelve such norms is outside the range of floats."""
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(12)], nn.BatchNorm1d(2)).eval()
    with torch.no_grad():
        for layer in model[:-1]:
            layer.weight.copy_(scale * torch.eye(2))
    audit = ns.audit(model, randn(2, 2), effort=0.05)
    found = parsed(audit)
    upper = found["bracket"]["upper_log10"]
    assert upper == "-inf" if scale == 0 else math.isclose(upper, 12 * math.log10(scale), abs_tol=1e-3)
    overflows = [row["input_std"] is None for row in found["layers"]]  # what enters is infinite in float32, so it has no deviation
    assert any(overflows) == (scale > 1) and not overflows[0]


def huge() -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)])
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(1e6)
    return model


MODELS = {
    "network": lambda: (network(), DATA),
    "gate": lambda: (Gate(), randn(2, 3)),
    "residual": lambda: (Residual(), randn(2, 3)),
    "recurrent": lambda: (Recurrent(), randn(2, 3)),
    "huge": lambda: (huge(), randn(2, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_report_fits_100_columns_and_names_every_layer(name):
    model, example = MODELS[name]()
    audit = ns.audit(model, example, effort=0.05)
    lines = str(audit).splitlines()
    assert max(map(len, lines)) <= 100
    table = [line.split()[0] for line in lines if line.split()]
    assert all(row.name in table for row in audit.layers)
    assert str(audit.bracket.upper) in str(audit) and str(audit.bracket.lower) in str(audit)


def test_a_residual_network_has_no_product_that_bounds_it():
    note = "in a residual network no such product is a bound"
    residual = ns.audit(Residual(), randn(2, 3), effort=0.05)
    assert residual.residual and note in str(residual) and parsed(residual)["residual"] is True
    plain = ns.audit(chain(), randn(2, 4), effort=0.05)
    assert not plain.residual and note not in str(plain)


def test_shared_modules_have_a_row_for_every_use():
    found = ns.audit(Recurrent(), randn(2, 3), effort=0.05).layers
    assert [row.name for row in found] == ["step", "norm", "step#2", "norm#2", "step#3", "norm#3"]
    assert found[0].spectral_norm == found[2].spectral_norm == found[4].spectral_norm
    assert len({row.input_std for row in found[::2]}) == 3


def test_the_page_holds_the_report(audited, tmp_path):
    audited.to_html(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>") and "http" not in page.split("<body>")[1]
    for row in audited.layers:
        assert row.kind in page
    assert str(audited.bracket.upper) in page


def test_an_audit_is_the_same_twice():
    first, second = (ns.audit(network(), DATA[:2], effort=0.05).to_json() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("mode", ["eval", "batch"])
def test_an_audit_leaves_no_trace(mode):
    model = randomized(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    model.train()
    model[3].eval()
    model[0].weight.requires_grad_(False)
    model(randn(6, 4)).sum().backward()
    example = randn(6, 4, seed=3)
    flags = [module.training for module in model.modules()]
    needs = [parameter.requires_grad for parameter in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    shown, random = example.clone(), torch.get_rng_state()
    ns.audit(model, example, data=None if mode == "batch" else randn(20, 4), mode=mode, effort=0.05)
    assert torch.equal(random, torch.get_rng_state()) and torch.equal(shown, example) and not example.requires_grad
    assert flags == [module.training for module in model.modules()]
    assert needs == [parameter.requires_grad for parameter in model.parameters()]
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for parameter, before in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is before is None or torch.equal(parameter.grad, before)


def test_the_doctor_is_one_attribute_away():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
    assert [finding.rule for finding in ns.audit(model, torch.zeros(1, 4), effort=0.1).findings] == ["NS101"]


def test_a_bound_that_is_too_loose_says_so_and_why_after_the_local_one():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())]
    found = ns.audit(nn.Sequential(*layers), torch.randn(4, 8))
    assert found.bracket.ratio > 1e3 and "4 × layer_norm make" in found.too_loose
    steps, rows = found.bracket.certificate.steps, found.layers
    worst = max(step.gain for step in steps if step.operation == "layer_norm")
    here = max(row.gain for row in rows if row.kind == "layer_norm")
    assert worst > 2 * here and f"each up to ×{worst}" in found.too_loose and f"at most ×{here} on the example" in found.too_loose
    lines = str(found).splitlines()
    assert lines[1].startswith("around the first input") and str(found.bracket.upper) not in lines[1]
    assert " ".join(lines).index("too loose to use as a bound") > " ".join(lines).index("around the first input")
    page = audit_report(found)
    assert 'class="verdict bad"' in page and page.index("too loose") > page.index("first input")
    tight = ns.audit(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
    assert tight.too_loose == "" and str(tight.bracket) == f"{tight.bracket.lower} ≤ L ≤ {tight.bracket.upper}"
    assert str(found.bracket).endswith("(too loose to use as a bound; region= asks about inputs like yours)")
    elsewhere = replace(found.bracket, everywhere=False)
    assert str(elsewhere).endswith("(too loose to use as a bound; see .notes, or try a smaller region)")
