"""Laws of gradient flow: what symmetries conserve, with decay and in discrete steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.geometry.flow import Path, gradient_descent, gradient_flow
from tests.geometry.test_quotient import REPORT
from tests.geometry.test_quotient import model as network


def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(16, 4, generator=generator), torch.randn(16, 8, generator=generator)


def loss(outputs, targets):
    return nn.functional.mse_loss(outputs.tanh(), targets.tanh())


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_flow_keeps_the_law_of_every_charge(decay):
    path = gradient_flow(network(torch.float32), loss, batch(), duration=0.2, symmetries=REPORT, weight_decay=decay, tolerance=1e-9)
    assert path.defect <= 1e-9
    assert set(path.charges) == {
        f"{group.kind}: {' + '.join(group.parameters)}" for group in REPORT.groups if "scale" in group.kind
    }
    squares = path.charges["scale: 5.weight"]
    assert squares.shape == (21, 8) and (squares > 0).all()
    torch.testing.assert_close(squares[-1], squares[0] * math.exp(-2 * decay * 0.2), rtol=1e-9, atol=0)
    if not decay:
        assert (path.losses[1:] <= path.losses[:-1] + 1e-12).all() and path.losses[-1] < path.losses[0]


def test_flow_keeps_the_law_across_kinks():
    path = gradient_flow(network(), loss, batch(), duration=2.0, symmetries=REPORT)
    assert path.defect <= 1e-5 and path.losses[-1] < 0.9 * path.losses[0]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_of_descent_grows_norms_by_exactly_the_squared_step(decay):
    path = gradient_descent(network(), loss, batch(), lr=0.1, steps=30, symmetries=REPORT, weight_decay=decay)
    assert path.defect <= 1e-12 and path.losses[-1] < path.losses[0]
    squares = path.charges["scale: 5.weight"]
    assert ((squares[1:] > squares[:-1]).all()) == (decay == 0)


def test_small_steps_follow_the_flow():
    flow = gradient_flow(network(), loss, batch(), duration=0.2, symmetries=REPORT)
    gaps = []
    for steps in (40, 80):
        descent = gradient_descent(network(), loss, batch(), lr=0.2 / steps, steps=steps, symmetries=REPORT)
        gaps.append(max(float((descent.parameters[name] - flow.parameters[name]).abs().max()) for name in flow.parameters))
    assert gaps[1] < 0.6 * gaps[0]


def test_without_the_symmetry_the_charge_moves():
    """The same report for a network without its last normalizer is wrong, and the numbers say so."""
    bare = nn.Sequential(*list(network())[:-1])
    assert gradient_flow(bare, nn.functional.mse_loss, batch(), duration=0.5, symmetries=REPORT).defect > 1e-3


def test_the_model_and_the_random_state_are_untouched():
    model = network(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    gradient_flow(model, loss, batch(), duration=0.1, symmetries=REPORT)
    gradient_descent(model, loss, batch(), lr=0.1, steps=2, symmetries=REPORT)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_errors_say_what_to_do():
    noisy = nn.Sequential(nn.Dropout(0.5), network())
    with pytest.raises(InputError, match="dropout"):
        gradient_flow(noisy, loss, batch(), duration=1.0, symmetries=REPORT)
    with pytest.raises(InputError, match="no parameters"):
        gradient_flow(nn.ReLU(), loss, batch(), duration=1.0, symmetries=REPORT)
    with pytest.raises(InputError, match="positive duration"):
        gradient_flow(network(), loss, batch(), duration=0.0, symmetries=REPORT)
    with pytest.raises(InputError, match="which the report names"):
        gradient_descent(nn.Linear(4, 8), loss, batch(), lr=0.1, steps=1, symmetries=REPORT)


def test_a_flow_that_explodes_is_reported():
    class Rising(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, inputs):
            return -(self.weight**4)

    with pytest.raises(InputError, match="stopped"):
        gradient_flow(Rising(), lambda outputs, _: outputs.sum(), batch(), duration=10.0, symmetries=type(REPORT)(()))


def test_a_path_keeps_every_state_and_gradient_norm():
    moved = network().double()
    flow = gradient_flow(moved, loss, batch(), duration=0.2, symmetries=REPORT, points=3)
    descent = gradient_descent(moved, loss, batch(), lr=0.1, steps=2, symmetries=REPORT)
    inputs, targets = (part.double() for part in batch())
    for path in (flow, descent):
        assert len(path.states) == len(path.times) == len(path.gradient_norms) == 3
        for state, norm in zip(path.states, path.gradient_norms, strict=True):
            moved.load_state_dict({**moved.state_dict(), **state})
            found = torch.autograd.grad(loss(moved(inputs), targets), list(moved.parameters()))
            torch.testing.assert_close(torch.cat([part.flatten() for part in found]).norm(), norm)


@pytest.mark.parametrize(
    ("measured", "expected", "defect"), [(0.0, 0.0, 0.0), (1e-300, 0.0, 1.0), (0.0, 1.0, 1.0), (2.0, 1.0, 0.5)]
)
def test_charges_that_are_all_zero_obey_their_law(measured, expected, defect):
    line = torch.zeros(2)
    charges, laws = ({"scale: w": torch.tensor([[0.0], [value]], dtype=torch.float64)} for value in (measured, expected))
    path = Path(line, line, line, charges, laws, [])
    assert path.defect == defect and "nan" not in str(path.render())
