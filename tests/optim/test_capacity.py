"""Laws of the cap and the penalty: the certified norm obeys the limit, and the penalty is its dense reference."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.core.errors import InputError
from normscope.operators.conv import Convolution
from normscope.operators.dense import spectral_norm
from normscope.optim.capacity import LogCapacity, reuse, spectral_cap
from tests.optim.standin import batch, convolutional, dense, drawn, train

CONVOLUTIONS = [
    (nn.Conv2d(3, 8, 3, padding=1), (3, 9, 9)), (nn.Conv2d(3, 8, 3, stride=2), (3, 11, 8)), (nn.Conv2d(4, 8, 3, groups=2), (4, 7, 7)),
    (nn.Conv2d(4, 4, 3, dilation=2, stride=2, padding=2), (4, 12, 12)), (nn.Conv1d(2, 3, 5, stride=3, dilation=2), (2, 30)),
    (nn.Conv2d(2, 8, 1), (2, 5, 5)), (nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 5, 5)), (nn.Conv3d(1, 2, 2), (1, 4, 4, 4)),
    (nn.Conv2d(4, 4, 3, padding="same", groups=4), (4, 6, 6)), (nn.ConvTranspose1d(4, 6, 4, groups=2, dilation=2), (4, 9)),
]  # fmt: skip


@pytest.mark.quick(8)
@pytest.mark.parametrize("module, shape", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_capped_convolutions_obey_the_limit_on_any_input(module, shape, dtype):
    module = drawn(module, dtype, 3)
    spectral_cap(module, limit=0.7)
    upper = float(ns.certify.operator_norm(module, shape).upper)
    assert upper <= 0.7 * (1 + 1e-6)
    assert upper >= 0.3  # and the cap is not far below either


@pytest.mark.parametrize("module, shape", CONVOLUTIONS, ids=str)
def test_reuse_bounds_a_convolution_by_its_kernel_matrix(module, shape):
    module = drawn(module, torch.float64, 4)
    exact = float(ns.certify.operator_norm(module, shape).lower)
    matrices = module.weight.detach().flatten(1).unflatten(0, (module.groups, -1))
    assert exact <= math.sqrt(reuse(module)) * float(torch.linalg.matrix_norm(matrices, 2).max()) * (1 + 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (1, 7), (7, 1)])
def test_capped_layers_obey_the_limit(shape, dtype):
    layer = drawn(nn.Linear(*shape), dtype, 0)
    spectral_cap(layer, limit=0.25)
    norm = float(spectral_norm(layer.weight))
    assert 0.25 * (1 - 2e-2) <= norm <= 0.25 * (1 + 1e-6)


def test_a_small_weight_is_left_alone():
    layer = nn.Linear(5, 5)
    before = layer.weight.detach().clone()
    spectral_cap(layer, limit=100.0)
    assert torch.equal(before, layer.weight)
    with torch.no_grad():
        layer.weight.zero_()
    spectral_cap(layer, limit=1.0)
    assert torch.equal(layer.weight, torch.zeros(5, 5))


@pytest.mark.parametrize("make, name", [(dense, "dense"), (convolutional, "convolutional")])
def test_the_cap_follows_an_optimizer(make, name):
    model = make(epsilon=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    cap = spectral_cap(model, 1.0, optimizer=optimizer)
    for _ in range(6):
        train(model, optimizer, batch(name), 1)
        for layer in cap.layers:
            assert float(layer.norm()) <= 1 + 1e-6
    cap.remove()
    before = [layer.weight.detach().clone() for layer in cap.layers]
    for parameter in model.parameters():
        parameter.grad = 10 * parameter.detach()
    optimizer.step()  # -4 times the weights
    assert float(cap.layers[0].norm()) > 1.5
    torch.testing.assert_close(cap.layers[0].weight.detach(), -4 * before[0])


def test_norms_are_bounded_again_only_when_needed(monkeypatch):
    layer = drawn(nn.Linear(6, 6), torch.float64, 0)
    cap = spectral_cap(layer, limit=10.0)
    calls = []
    monkeypatch.setattr("normscope.optim.capacity.spectral_norm", lambda weight: calls.append(1) or spectral_norm(weight))
    with torch.no_grad():
        layer.weight.add_(0.1)
    cap()
    assert not calls
    with torch.no_grad():
        layer.weight.add_(5.0)
    cap()
    assert calls and float(spectral_norm(layer.weight)) <= 10 * (1 + 1e-6)


def test_limits_by_name():
    model = dense()
    before = model[0].weight.detach().clone()
    spectral_cap(model, {"3": 0.1})
    assert torch.equal(before, model[0].weight) and float(spectral_norm(model[3].weight)) <= 0.1 * (1 + 1e-6)
    with pytest.raises(InputError, match="choose from 0, 3, 6"):
        spectral_cap(model, {"4": 1.0})


def test_a_weight_shared_by_convolutions_of_different_strides_obeys_in_both():
    first, second = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, stride=2)
    second.weight = first.weight
    spectral_cap(nn.ModuleList([first, second]), limit=0.2)
    for module in (first, second):
        operator = Convolution(module.weight, (9, 9), module.stride, ((0, 0),) * 2, module.dilation)
        assert float(operator.norm()[0]) <= 0.2 * (1 + 1e-6)


def test_what_is_not_capped_is_named():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.attention, self.last = nn.Embedding(5, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    cap = spectral_cap(Network(), 1.0)
    assert [layer.name for layer in cap.layers] == ["attention.out_proj", "last"]
    assert cap.left_out == ("table.weight", "attention.in_proj_weight")


def test_a_penalty_of_zero_weights_is_finite():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Conv2d(1, 1, 3))
    with torch.no_grad():
        model[1].weight.zero_()
        model[2].weight.zero_()
    value = LogCapacity(model)()
    value.backward()
    assert value.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_what_cannot_be_capped_is_refused():
    with pytest.raises(InputError, match="parametrized"):
        spectral_cap(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), 1.0)
    with pytest.raises(InputError, match="reflect"):
        spectral_cap(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), 1.0)
    for limit in (0.0, math.nan, "a", None):
        with pytest.raises(InputError, match="positive number"):
            spectral_cap(nn.Linear(3, 3), limit)
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        spectral_cap(layer, 1.0)
    with pytest.raises(InputError, match="no capacity"):
        LogCapacity(nn.ReLU())


def reference(model):
    total = torch.zeros(())
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            total = total + torch.linalg.matrix_norm(module.weight.flatten(1), 2).log() + math.log(reuse(module)) / 2
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            total = total + (module.weight.abs() / (module.running_var + module.eps).sqrt()).max().log()
        elif isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            total = total + module.weight.abs().max().log()
    return total


@pytest.mark.parametrize("make", [dense, convolutional])
def test_the_penalty_and_its_gradient_equal_the_dense_reference(make):
    model = make(torch.float64)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_var.copy_(torch.linspace(0.2, 3, len(module.running_var)))
    penalty = LogCapacity(model, iterations=500)
    torch.testing.assert_close(penalty().double(), reference(model).double(), rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad(penalty(), model.parameters(), allow_unused=True)
    theirs = torch.autograd.grad(reference(model), model.parameters(), allow_unused=True)
    for first, second in zip(ours, theirs, strict=True):
        assert (first is None) == (second is None)
        if first is not None:
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)


def test_the_penalty_lowers_the_certified_bound():
    uppers = []
    for weight in (0.0, 0.1):
        model, data = dense(), batch("dense")
        penalty, optimizer = LogCapacity(model), torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(data[0]), data[1]) + weight * penalty()).backward()
            optimizer.step()
        uppers.append(ns.lipschitz(model.eval(), data[0][:1], region=ns.Ball(data[0][0], 0.1)).upper.log10)
    assert uppers[1] < uppers[0]
    assert not list(LogCapacity(dense()).parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size, limit", [(1.0, 1e-300), (1e-40, 1e-44), (1.0, 0.5), (0.0, 1.0), (1e30, 1e-30)])
def test_scaling_ends_at_every_size(dtype, size, limit):
    layer = nn.Linear(3, 3, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3) * size)
    spectral_cap(layer, limit)()
    assert float(torch.linalg.matrix_norm(layer.weight.double(), 2)) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("dtype, size, limit", [
    (torch.float32, 1e20, 1e-20), (torch.float32, 1e38, 1e-36), (torch.bfloat16, 1e38, 1e-36), (torch.float64, 1e200, 1e-120),
    (torch.float64, 1e150, 1e-200),
])  # fmt: skip
def test_a_cap_that_is_far_below_the_weight_is_held_and_reached(dtype, size, limit):
    """The factor itself is subnormal or 0."""
    layer = drawn(nn.Linear(6, 5), dtype, 0)
    with torch.no_grad():
        layer.weight.mul_(size)
    spectral_cap(layer, limit)
    norm = float(torch.linalg.matrix_norm(layer.weight.double() / limit, 2))
    assert 0.98 <= norm <= 1


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_a_layer_without_entries_is_within_every_cap(shape):
    spectral_cap(nn.Linear(*shape), 0.5)()


@pytest.mark.parametrize("dtype, before, after", [(torch.float64, 1e-200, 1e-170), (torch.complex128, 0.1, 5j)])
def test_every_move_of_a_weight_is_seen(dtype, before, after):
    """Also one whose square underflows, and one of imaginary parts."""
    layer = nn.Linear(3, 3, bias=False, dtype=dtype)
    limit = 10 * before
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3, dtype=dtype) * before)
        cap = spectral_cap(layer, limit)
        layer.weight.copy_(torch.eye(3, dtype=dtype) * after)
    cap()
    assert float(spectral_norm(layer.weight)) <= limit * (1 + 1e-6)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-43), (torch.float64, 1e-321)])
def test_a_cap_among_subnormal_numbers_is_held_or_refused(dtype, limit):
    layer = drawn(nn.Linear(30, 30), dtype, 0)
    try:
        spectral_cap(layer, limit)
    except InputError:
        return
    assert float(spectral_norm(layer.weight)) <= limit * (1 + 1e-6)


@pytest.mark.parametrize("weight", [[[1.0, 1.0]], [[1.0], [1.0]], [[1.0, 0.0], [1.0, 0.0]], [[1.0, 2.0], [2.0, 1.0]], [[1.0]]])
def test_a_cap_at_the_smallest_number_is_held_or_refused(weight):
    """√2 η is more than η, though both are the same float."""
    layer = nn.Linear(len(weight[0]), len(weight), dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight, dtype=torch.float64) * 5e-324)
    with contextlib.suppress(InputError):
        spectral_cap(layer, 5e-324)
        assert float(torch.linalg.matrix_norm(layer.weight.detach() * 2.0**1000 * 2.0**74, 2)) <= 1.0 + 1e-12
