"""Complex numbers inside a real function: bounds that the dense Jacobian confirms, and refusals where nothing is known."""

import pytest
import torch
from torch import fft, nn

import normscope as ns
from normscope.core.errors import Refusal
from tests.networks import Function
from tests.sweep.search import largest_quotient

TURNS = torch.polar(torch.tensor([[1.0, 2.0], [0.5, 1.5], [1.0, 1.0]]), torch.arange(6.0).view(3, 2))


def planes(x):
    return torch.view_as_complex(x.view(-1, 3, 2, 2))


LINEAR = {  # of three tokens of four numbers
    "rotary positions": lambda x: torch.view_as_real(planes(x) * TURNS).flatten(2),
    "quotient": lambda x: torch.view_as_real(planes(x) / (3 - 1j)),
    "real factor": lambda x: torch.view_as_real(planes(x) * torch.tensor([2.0, 3.0])),
    "imaginary factor of real numbers": lambda x: (x * torch.tensor([1j, 2j, 3j, 1.0])).imag,
    "cast": lambda x: (x.to(torch.complex64) * 1j).imag,
    "cast to its real part": lambda x: planes(x).to(torch.float64),
    "parts": lambda x: torch.view_as_real(torch.complex(x, -2 * x)),
    "conjugate": lambda x: torch.view_as_real(planes(x).conj().resolve_conj()),
    "sum with real numbers": lambda x: torch.view_as_real(torch.add(fft.fft(x), x, alpha=2)),
    "shapes": lambda x: torch.view_as_real((planes(x).transpose(-1, 1)[:, 1:].unsqueeze(1) + 2.1 - 1j) / 3),
    "fft": lambda x: torch.view_as_real(fft.fft(x)),
    "orthonormal fft": lambda x: torch.view_as_real(fft.fft(x, norm="ortho")),
    "Fourier mixing": lambda x: fft.fftn(x, dim=(1, 2)).real,
    "fft2": lambda x: fft.fft2(x, norm="forward").imag,
    "ifft": lambda x: fft.ifft(x, dim=1).real,
    "rfft": lambda x: torch.view_as_real(fft.rfft(x)),
    "irfft": lambda x: fft.irfft(planes(x), n=5),
    "hfft": lambda x: fft.hfft(planes(x)),
    "ihfft": lambda x: torch.view_as_real(fft.ihfft(x).resolve_conj()),
    "rfftn": lambda x: torch.view_as_real(fft.rfftn(x, dim=(1, 2))),
    "padded and cut": lambda x: torch.view_as_real(fft.fftn(x, s=(5, 2), dim=(2, 1))),
    "all axes of a sample": lambda x: torch.stack([torch.view_as_real(fft.fftn(sample)) for sample in x]),
    "the last axes": lambda x: torch.view_as_real(fft.fftn(x, s=(3, 5))),
    "one size kept": lambda x: fft.fftn(x, s=(-1, 6), dim=(1, 2)).real,
}
LOOSE = {  # several steps: the product of their norms
    "broadcast": (lambda x: torch.view_as_real(planes(x).select(-1, 0).unsqueeze(-1) * TURNS), 2 * 2**0.5),
    "filter": (lambda x: fft.irfft(fft.rfft(x, dim=1) * torch.tensor([1.0, 2j])[:, None], n=3, dim=1), 2 * 2**0.5),
    "there and back": (lambda x: fft.irfftn(fft.rfftn(x, dim=(1, 2)), s=(3, 4), dim=(1, 2)), 2**0.5),
}
UNKNOWN = {
    "square": lambda x: (planes(x) ** 2).real,
    "product": lambda x: (planes(x) * planes(x)).real,
    "quotient": lambda x: (2 / planes(x)).real,
    "choice": lambda x: torch.where(x > 0, x, torch.tensor(1j)).abs(),
    "many": lambda x: fft.fft(x, n=4096).real,
}


def bracket(function):
    torch.manual_seed(0)
    return ns.lipschitz(Function(function), torch.randn(2, 3, 4), effort=0.2)


@pytest.mark.quick(6)
@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("name", LINEAR)
def test_the_bound_is_the_norm_of_the_map(name):
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    norm = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(LINEAR[name], x).reshape(-1, 12), 2)
    found = bracket(LINEAR[name])
    assert float(found.lower) <= float(found.upper) == pytest.approx(float(norm), rel=1e-5)
    assert float(found.upper) >= float(norm) * (1 - 1e-12)


def test_a_transform_of_the_batch_axis_has_a_norm_for_the_whole_batch_alone():
    model, x = Function(lambda x: torch.view_as_real(fft.fftn(x))), torch.randn(2, 3, 4)
    with pytest.raises(Refusal, match="influence each other"):
        ns.lipschitz(model, x, effort=0.2)
    assert float(ns.lipschitz(model, x, mode="batch", effort=0.2).upper) == pytest.approx(24**0.5, rel=1e-5)


@pytest.mark.parametrize("name", LOOSE)
def test_the_bound_of_several_steps(name):
    function, expected = LOOSE[name]
    found = bracket(function)
    assert found.lower <= found.upper and float(found.upper) == pytest.approx(expected, rel=1e-5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused(name):
    with pytest.raises(Refusal, match="without a rule"):
        bracket(UNKNOWN[name])


class Rotary(nn.Module):
    """As some models compute it: angles in the precision of the model, then complex numbers of that type."""

    def forward(self, x):
        angles = torch.arange(3).float()[:, None] * torch.tensor([1.0, 1 / 3])
        turns = torch.polar(torch.ones_like(angles), angles) * 1.0
        return torch.view_as_real(planes(x) * turns.to(x.device)).flatten(2)


def test_complex_constants_are_computed_in_float64():
    x = torch.randn(2, 3, 4)
    found = ns.lipschitz(Rotary(), x, effort=0.2)
    assert float(found.upper) == pytest.approx(1, rel=1e-12)


class Mixing(nn.Module):
    """Positions turned as complex numbers, tokens mixed by a Fourier transform, and its absolute values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("turns", TURNS.clone())

    def forward(self, x):
        turned = torch.view_as_real(planes(self.first(x)) * self.turns).flatten(2)
        return self.second(self.norm(x + fft.fft2(turned).abs()))


@pytest.mark.parametrize("radius", [None, 0.05])
def test_no_pair_breaks_the_bound(radius):
    torch.manual_seed(0)
    model, x = Mixing(), torch.randn(1, 3, 4)
    region = None if radius is None else ns.Ball(x[0].double(), radius)
    found = ns.lipschitz(model, x, region=region, effort=0.2)
    twin = Mixing().double()
    twin.load_state_dict(model.state_dict())
    twin.turns = model.turns.to(torch.complex128)
    largest, _ = largest_quotient(twin, x[0].double(), region, seed=1)
    assert found.upper.finite and 0 < largest <= float(found.upper)
