"""Sensitivity to weights: above the autograd derivative at every sampled input; removal of normalizers."""

import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.certify import weights
from normscope.core.errors import UnforeseenError
from normscope.core.magnitude import Magnitude
from tests.networks import Function, randn

CASES = {
    "LN": (nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)), (4,)),
    "BN": (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)), (2, 4, 4)),
    "stride": (nn.Sequential(nn.Conv1d(2, 3, 3, stride=2), nn.GroupNorm(1, 3), nn.GELU(), nn.Flatten(), nn.Linear(9, 2)), (2, 7)),
    "tokens": (nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.SiLU(), nn.Linear(6, 2)), (5, 4)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("radius", [1e-3, 0.5])
def test_above_the_derivative_everywhere_in_the_region(name, radius):
    model, shape = CASES[name]
    generator = torch.Generator().manual_seed(0)
    model = model.double().eval()
    center = torch.randn(shape, generator=generator, dtype=torch.float64)
    rows = ns.certify.weight_sensitivities(model, center[None], region=ns.Ball(center, radius))
    parameters = dict(model.named_parameters())
    assert {row.parameter for row in rows} == set(parameters)
    for row in rows:
        assert row.bound.finite
        for _ in range(3):
            step = torch.randn(shape, generator=generator, dtype=torch.float64)
            x = center + radius * step / step.norm()
            jacobian = torch.autograd.functional.jacobian(
                lambda p, row=row, x=x: torch.func.functional_call(model, {row.parameter: p}, (x[None],)).flatten(),
                parameters[row.parameter],
            )
            assert float(torch.linalg.matrix_norm(jacobian.flatten(1), 2)) <= float(row.bound)


def test_without_a_region_only_what_follows_a_normalizer_is_finite():
    model, _ = CASES["LN"]
    rows = {row.parameter: row for row in ns.certify.weight_sensitivities(model.double(), torch.zeros(1, 4).double())}
    assert not rows["0.weight"].bound.finite and "region" in rows["0.weight"].reason
    assert rows["3.weight"].bound.finite and rows["1.weight"].bound.finite


def test_removing_all_normalizers_leaves_the_plain_network():
    generator = torch.Generator().manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = nn.Sequential(plain[0], nn.LayerNorm(4), plain[1], plain[2], nn.LayerNorm(2))
    x = torch.randn(2, 4, generator=generator)
    rows = ns.certify.normalizer_ablation(model, x)
    assert [row.removed for row in rows] == [0, 1, 2]
    assert float(rows[-1].bracket.upper) == pytest.approx(float(ns.lipschitz(plain, x, effort=0.1).upper), rel=1e-9)
    assert rows[0].bracket.upper > rows[-1].bracket.upper


@pytest.mark.parametrize("outputs", [3, 40])
def test_with_respect_to_all_weights_together(outputs):
    """On a ball the bracket holds the derivative in all parameters, at points of the ball, computed by autograd."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, outputs)).double()
    center, radius = torch.randn(4, dtype=torch.float64), 0.1
    bracket = ns.lipschitz(model, center[None], region=ns.Ball(center, radius), wrt="weights")
    assert {row.name for row in bracket.layers} == {name for name, _ in model.named_parameters()}
    assert float(bracket.lower) > 0
    parameters = dict(model.named_parameters())
    for away in torch.randn(20, 4, dtype=torch.float64):
        point = center + away * radius / away.norm()
        jacobian = torch.func.jacrev(lambda p, x=point: torch.func.functional_call(model, p, (x[None],))[0])(parameters)
        norm = torch.linalg.matrix_norm(torch.cat([part.flatten(1) for part in jacobian.values()], 1), 2)
        assert float(norm) <= float(bracket.upper)
        assert float(bracket.lower) <= 1.2 * float(norm)


class Uses(nn.Module):
    """Linear layers whose weights are used in ways of their own."""

    def __init__(self, use):
        super().__init__()
        self.use, self.first, self.second = use, nn.Linear(3, 3), nn.Linear(3, 3)
        self.sharpness = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.ones(3, 3).tril())

    def forward(self, x):
        return self.use(self, x)


USES = {
    "multiplied": lambda m, x: nn.functional.linear(x, 100 * m.first.weight),
    "in one more place": lambda m, x: m.first(x) + 50 * torch.inner(x, m.first.weight),
    "in one more product": lambda m, x: m.first(x) + 50 * (x @ m.first.weight),
    "repeated": lambda m, x: nn.functional.linear(x, m.first.weight[:1].expand(100, 3)),
    "tied": lambda m, x: m.second(m.first(x)),
    "in an activation": lambda m, x: m.first(x) * torch.sigmoid(m.sharpness * m.first(x)),
    "transposed": lambda m, x: nn.functional.linear(m.first(x), m.first.weight.T),
    "overlapping": lambda m, x: nn.functional.linear(x, m.first.weight.flatten().unfold(0, 3, 1)),
    "indexed twice": lambda m, x: nn.functional.linear(x, m.first.weight[[0, 0, 2, 1, 0]]),
    "beside itself": lambda m, x: nn.functional.linear(x, torch.cat([m.first.weight, m.first.weight.flip(0)])),
    "masked": lambda m, x: nn.functional.linear(x, m.first.weight * m.mask),
    "strided": lambda m, x: nn.functional.linear(x, m.first.weight.as_strided((7, 3), (1, 1))),
    "a Kronecker product": lambda m, x: nn.functional.linear(x, torch.kron(m.first.weight[:, :1], m.first.weight[:1])),
    "squared": lambda m, x: nn.functional.linear(x, m.first.weight**2),
    "as a plain number": lambda m, x: m.first(x) * m.sharpness.item(),
    "as a plain number alone": lambda m, x: x * m.sharpness.item(),
    "as weight and as input": lambda m, x: m.first(x + m.first.weight[0]),
    "in a stack": lambda m, x: torch.stack([m.first(x), m.first.weight[:1]]).sum(0),
    "beside another": lambda m, x: nn.functional.linear(x, m.first.weight + m.second.weight),
}
FINITE = (
    "tied",
    "transposed",
    "repeated",
    "overlapping",
    "indexed twice",
    "beside itself",
    "masked",
    "strided",
    "in one more product",
    "in one more place",
)


@pytest.mark.parametrize("name", USES)
def test_every_use_of_a_weight_counts(name):
    """Against the derivative in each parameter; a use without a rule makes a bound infinite, not zero."""
    torch.manual_seed(0)
    model, x = Uses(USES[name]).double(), torch.ones(1, 3).double()
    if name == "tied":
        model.second.weight = model.first.weight
    parameters = dict(model.named_parameters())
    rows = ns.certify.weight_sensitivities(model, x, region=ns.Ball(x[0], 0.1))
    assert {row.parameter for row in rows} == set(parameters)
    for row in rows:
        jacobian = torch.autograd.functional.jacobian(
            lambda p, row=row: torch.func.functional_call(model, {row.parameter: p}, (x,)).flatten(), parameters[row.parameter]
        )
        assert float(torch.linalg.matrix_norm(jacobian.reshape(jacobian.shape[0], -1), 2)) <= float(row.bound)
    assert all(row.bound.finite for row in rows) == (name in FINITE)


@pytest.mark.parametrize("make", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm,
                                  nn.utils.parametrizations.orthogonal])  # fmt: skip
def test_parametrized_weights_have_no_rule(make):
    x = torch.ones(1, 3).double()
    rows = {
        row.parameter: row for row in ns.certify.weight_sensitivities(make(nn.Linear(3, 3)).double(), x, region=ns.Ball(x[0], 0.1))
    }
    assert rows.pop("bias").bound.finite
    assert rows and all(not row.bound.finite and "parametrization" in row.reason for row in rows.values())


@pytest.mark.parametrize("attach", ["buffer", "attribute", "parameter"])
def test_a_parameter_that_shares_memory_is_not_moved_alone(attach):
    model, x = Uses(lambda m, x: nn.functional.linear(x, m.first.weight) + x @ m.view).double(), torch.ones(1, 3).double()
    view = model.first.weight.detach()[:, :3].T
    if attach == "buffer":
        model.register_buffer("view", view)
    else:
        model.view = nn.Parameter(view) if attach == "parameter" else view
    rows = {row.parameter: row for row in ns.certify.weight_sensitivities(model, x, region=ns.Ball(x[0], 0.1))}
    assert "shares memory with view" in rows["first.weight"].reason and not rows["first.weight"].bound.finite


def test_a_parameter_that_repeats_its_own_entries_has_no_bound():
    """To move one of them is to move the others."""
    model, x = nn.Linear(3, 3).double(), torch.ones(1, 3).double()
    model.weight = nn.Parameter(torch.ones(1, 3).double().expand(3, 3))
    rows = {row.parameter: row for row in ns.certify.weight_sensitivities(model, x, region=ns.Ball(x[0], 0.1))}
    assert "shares memory with itself" in rows["weight"].reason and not rows["weight"].bound.finite
    assert rows["bias"].bound.finite


def test_a_sparse_buffer_may_share_what_it_stores():
    model, x = nn.Linear(3, 3).double(), torch.ones(1, 3).double()
    model.register_buffer("apart", torch.eye(3).to_sparse())
    assert all(row.bound.finite for row in ns.certify.weight_sensitivities(model, x, region=ns.Ball(x[0], 0.1)))
    model.register_buffer("kept", torch.sparse_coo_tensor([[0, 1, 2]], model.bias.detach()))
    rows = {row.parameter: row for row in ns.certify.weight_sensitivities(model, x, region=ns.Ball(x[0], 0.1))}
    assert "shares memory with kept" in rows["bias"].reason and rows["weight"].bound.finite


def test_a_model_that_cannot_be_copied_is_refused():
    model, x = nn.Linear(3, 3), torch.ones(1, 3)
    model.lock = threading.Lock()
    with pytest.raises(ns.Refusal, match="the model cannot be copied: TypeError") as refused:
        ns.lipschitz(model, x, wrt="weights")
    assert not isinstance(refused.value, UnforeseenError)


def test_parameters_side_by_side_in_memory_are_apart():
    """As optimizers lay them out that keep all parameters in one vector."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), torch.ones(1, 3).double()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.data = part.view_as(parameter)
    assert all(row.bound.finite for row in ns.certify.weight_sensitivities(model, x, region=ns.Ball(x[0], 0.1)))


def test_a_parameter_of_another_output_does_not_matter():
    class Two(Uses):
        def forward(self, x):
            return self.first(x), self.second(x)

    x = torch.ones(1, 3)
    rows = {row.parameter: row for row in ns.certify.weight_sensitivities(Two(None), x, region=ns.Ball(x[0], 0.1), output=0)}
    assert rows["first.weight"].bound.finite and rows["second.weight"].bound == 0


def test_weights_without_a_region_are_unbounded_and_it_says_so():
    bracket = ns.lipschitz(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.zeros(1, 4), wrt="weights")
    assert not bracket.upper.finite and "region" in bracket.reason


@pytest.mark.parametrize("settings", [{"wrt": "gradients"}, {"wrt": "weights", "mode": "batch"}])
def test_what_cannot_be_asked_is_refused(settings):
    with pytest.raises(ns.InputError, match="wrt"):
        ns.lipschitz(nn.Linear(4, 2), torch.zeros(1, 4), **settings)


def halved(x):
    if x.element_size() != 4:
        raise ValueError("single precision only")
    return x / 2


def test_a_model_that_does_not_run_in_float64_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), Function(halved))
    with pytest.raises(ns.Refusal, match="in float64 the model raises ValueError"):
        ns.certify.weight_sensitivities(model, torch.zeros(1, 3), region=ns.Ball(torch.zeros(3), 0.1))


class InSingle(nn.Module):
    """Normalizes in float32 whatever it is given, as the models of transformers do."""

    def forward(self, x):
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.factors).real


@pytest.mark.parametrize("part", [InSingle, Complex])
def test_models_that_compute_in_their_own_type_have_a_lower_bound(part):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), part(), nn.Linear(8, 2)), randn(1, 8)
    found = ns.lipschitz(model, x, region=ns.Ball(x[0], 1e-6), wrt="weights")
    own = {name: value for name, value in model.named_parameters() if not value.is_complex()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,))[0])(own)
    norm = float(torch.linalg.matrix_norm(torch.cat([part.flatten(1) for part in jacobian.values()], 1), 2))
    assert float(found.lower) >= norm * (1 - 1e-3)
    assert not any("no lower bound" in note for note in found.notes)


def test_hooks_see_nothing_of_it():
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    ns.lipschitz(model, randn(1, 4), region=ns.Ball(torch.zeros(4), 0.1), wrt="weights")
    assert not seen


def test_notes_of_the_graph_reach_the_bracket():
    model = nn.Sequential(nn.Linear(4, 3), Function(torch.Tensor.float)).to(torch.bfloat16)
    found = ns.lipschitz(model, torch.zeros(1, 4, dtype=torch.bfloat16), wrt="weights")
    assert any(note.startswith("casts to float32") for note in found.notes)


def test_bounds_are_rounded_up():
    """Fifty sums of two equal terms: the derivative in the bias is 2^50, and logarithms round it off."""
    first, doubled = nn.Linear(1, 1).double(), Function(lambda h: h + torch.relu(h))
    model = nn.Sequential(first, *[doubled] * 50)
    nn.init.ones_(first.weight)
    rows = {row.parameter: row for row in ns.certify.weight_sensitivities(model, torch.ones(1, 1).double())}
    assert float(rows["0.bias"].bound) >= 2.0**50


class Upsampled(nn.Module):
    """Nearest upsampling by 1.03 leaves out the last entry, but torch's backward is another map's and does not."""

    def __init__(self, size):
        super().__init__()
        self.scale, self.size = nn.Conv1d(1, 1, 1, bias=False).double(), size
        nn.init.ones_(self.scale.weight)

    def forward(self, x):
        return self.size * nn.functional.interpolate(self.scale(x), scale_factor=1.03)


@pytest.mark.parametrize("size", [1.0, 1e-150, 1e150])
def test_a_wrong_backward_gives_no_lower_bound_and_contradicts_none(size, monkeypatch):
    x = torch.tensor([[[0.0, 0, 0, 0, 10]]], dtype=torch.float64)
    region = ns.Ball(x[0], 1e-3)
    found = ns.lipschitz(Upsampled(size), x, region=region, wrt="weights")
    assert float(found.lower) / size <= 0.01
    monkeypatch.setattr(weights, "_input_size", lambda *_: Magnitude(0.01))  # what it is with the forward's last entry left out
    assert float(ns.certify.weight_sensitivities(Upsampled(size), x, region=region)[0].bound) / size < 1


@pytest.mark.parametrize("size", [1e-150, 1.0, 1e150])
def test_the_lower_bound_for_weights_is_there_at_every_scale(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), Function(lambda x: size * x)).double()
    x = torch.randn(1, 4, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,))[0])(dict(model.named_parameters()))
    norm = torch.linalg.matrix_norm(torch.cat([part.flatten(1) / size for part in jacobian.values()], 1), 2)
    found = ns.lipschitz(model, x, region=ns.Ball(x[0], 1e-6), wrt="weights")
    assert float(found.lower) / size == pytest.approx(float(norm), rel=1e-4)


def test_the_root_of_many_squares_is_rounded_up():
    """3,000 biases of one size: every addition of logarithms may round down."""
    sizes = [Magnitude(1.1)] * 3000
    assert (weights.length_of(sizes) ** 2).log >= math.log(3000) + 2 * math.log(1.1)
    for seed in range(20):
        drawn = torch.rand(3000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
        assert float(weights.length_of(map(Magnitude, drawn))) >= math.sqrt(math.fsum(value * value for value in drawn))


class Jumping(nn.Module):
    """Its weight is the parameter where that is 1 exactly, as torch's Householder products look at a diagonal of ±1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.w * (self.w.int() == self.w)) * torch.relu(x[:, :1] - 0.95)


class Bent(nn.Module):
    """A scale made of its parameter by a function that bends where entries are equal, or zero, or one."""

    def __init__(self, w: list[float], function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.tensor(w)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (3,), self.function(self.w))


BENT = {
    "a minimum": ([1.0] * 3, lambda w: torch.minimum(w, w[0])),
    "a choice": ([1.0] * 3, lambda w: torch.where(w[0] >= w[2], w, w[2].expand(3))),
    "a running maximum": ([1.0] * 3, lambda w: w.flip(0).cummax(0)[0]),
    "a limit": ([1.0] * 3, lambda w: w.clamp(max=1)[:1].expand(3)),
    "ReLU": ([0.0] * 3, lambda w: w.relu()[1:2].expand(3)),
    "steps": ([1.0] * 3, lambda w: w.floor()[:1].expand(3)),
    "the largest": ([1.0] * 3, lambda w: w * torch.zeros(3).scatter(0, w.topk(1).indices, 1.0)),
    "a bump": ([1e6, 0.0, 0.0], lambda w: w * (1 + 10 * torch.relu(1 - w.abs()))),
}


@pytest.mark.parametrize(
    "model", [Jumping(), nn.utils.parametrizations.orthogonal(nn.Linear(3, 1)), *(Bent(*BENT[name]) for name in BENT)]
)
def test_what_happens_at_the_stored_numbers_alone_counts(model):
    rows = ns.certify.weight_sensitivities(model, torch.zeros(1, 3), region=ns.Ball(torch.zeros(3), 1.0))
    assert rows[0].bound == math.inf and "no rule for weights" in rows[0].reason


def test_what_is_linear_in_a_parameter_has_a_bound():
    """Masks of pruned weights, slices, transposes and casts."""
    mask = torch.tensor([1.0, 0.0, 1.0])
    for function in (
        lambda w: w * mask,
        lambda w: w.flip(0),
        lambda w: torch.cat([w[1:], w[:1]]),
        lambda w: w.double().float()[None][0],
    ):
        rows = ns.certify.weight_sensitivities(Bent([1.0, 2.0, 3.0], function), torch.randn(1, 3))
        assert rows[0].bound.finite, rows[0].reason
