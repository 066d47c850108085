"""Akbar, Sections 5 and 6: what is asserted about noise, learning rates and smoothness, measured in small."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from normscope.claims.calculus import gradient, hessian, normal, standardize
from normscope.claims.ledger import AKBAR, claim
from normscope.claims.training import batches, digits_mlp, flat_digits, train
from normscope.claims.verdicts import Outcome, measured

Numbers = dict[str, float]
Says = Callable[[Numbers], bool]
LONGEST = 1500  # steps in which a saddle may be left
RATES = (0.02, 0.1, 0.5, 2.5, 12.5, 62.5)


def two_neurons(w: Tensor, x: Tensor, kind: str) -> Tensor:
    """Σ_j r_j tanh(BN(v_j·x)) + c with two hidden neurons; w holds v₁, v₂, r and c."""
    z = x @ w[:4].reshape(2, 2).T
    return (standardize(z, 0) if kind == "BN" else z).tanh() @ w[4:6] + w[6]


def two_neuron_loss(w: Tensor, x: Tensor, y: Tensor, kind: str) -> Tensor:
    return (two_neurons(w, x, kind) - y).square().mean()


def descend(
    w: Tensor, x: Tensor, y: Tensor, kind: str, batch: int, steps: int, generator: torch.Generator, below: float = 0.0
) -> tuple[Tensor, int]:
    """SGD of rate 0.2 until the squared error on all data falls below `below`: the weights and the steps taken."""
    for step, (inputs, targets) in enumerate(batches(x, y, batch, steps, generator)):
        if float(two_neuron_loss(w, x, y, kind)) < below:
            return w, step
        w = w - 0.2 * gradient(partial(two_neuron_loss, x=inputs, y=targets, kind=kind), w)
    return w, steps


@lru_cache
def saddle_numbers(seed: int) -> Numbers:
    """Steps to leave the saddle where both neurons are equal, from it exactly and from 10^-6 beside it."""
    numbers: Numbers = {}
    for kind in ("BN", "plain"):
        generator = torch.Generator().manual_seed(seed)
        x = normal(generator, 128, 2)
        y = x.tanh().sum(1)
        v, r = normal(generator, 2), normal(generator, 1)
        equal, _ = descend(torch.cat([v, v, r, r, 0 * r]), x, y, kind, len(x), 1000, generator)
        level = 0.95 * float(two_neuron_loss(equal, x, y, kind))
        curvature = hessian(partial(two_neuron_loss, x=x, y=y, kind=kind), equal)
        numbers[f"{kind}, least curvature at the saddle"] = float(torch.linalg.eigvalsh(curvature)[0])
        beside = equal + 1e-6 * normal(generator, 7)
        for name, start, batch in (
            ("mini-batch, exact", equal, 32),
            ("mini-batch, beside", beside, 32),
            ("full batch, beside", beside, 128),
        ):
            _, steps = descend(start, x, y, kind, batch, LONGEST, generator, level)
            numbers[f"{kind}, {name}"] = float(steps) if steps < LONGEST else float("inf")
    return numbers


def noise_helps(numbers: Numbers) -> bool:
    """With BN mini-batches leave the saddle, and sooner than full batches and than a plain network."""
    own = numbers["BN, mini-batch, beside"]
    return numbers["BN, mini-batch, exact"] < LONGEST and own < min(
        numbers["BN, full batch, beside"], numbers["plain, mini-batch, beside"]
    )


@claim(
    "A-noise", AKBAR, "Section 5, saddle-point escape", "The noise of BN's mini-batch statistics pushes parameters off saddles.",
    "Not off a saddle of symmetry: equal neurons see the same noise and stay equal. What leaves it is a difference that is there "
    "already, and it grows without noise too.",
)  # fmt: skip
def saddle_escape(generator: torch.Generator, stated: Says = noise_helps) -> Outcome:
    """Two hidden tanh neurons on tanh x₁ + tanh x₂, brought to rest with both neurons equal; steps until the loss is 5 % lower."""
    numbers = saddle_numbers(generator.initial_seed())
    return measured(
        "BN seldom stays at a saddle", stated(numbers), f"128 points, SGD 0.2, batch 32, at most {LONGEST} steps", **numbers
    )


@lru_cache
def stable_rates(seed: int) -> Numbers:
    """The largest learning rate at which the loss on digits halves in 80 steps."""
    inputs, classes, _, _ = flat_digits()
    largest = {}
    for kind, normalizer in (("BN", "batch"), ("plain", "none")):
        stable = [0.0]
        for rate in RATES:
            generator = torch.Generator().manual_seed(seed)
            model = digits_mlp(5, 48, normalizer, generator)
            losses = train(model, batches(inputs, classes, 128, 80, generator), torch.optim.SGD(model.parameters(), lr=rate))
            if len(losses) == 80 and sum(losses[-5:]) / 5 < losses[0] / 2:
                stable.append(rate)
        largest[f"largest rate, {kind}"] = max(stable)
    return largest


@claim(
    "A-large-lr",
    AKBAR,
    "Sections 1.1 and 5, after Bjorck et al.",
    "BN widens the range of learning rates at which training is stable.",
)
def large_learning_rates(
    generator: torch.Generator, stated: Says = lambda largest: largest["largest rate, BN"] > largest["largest rate, plain"]
) -> Outcome:
    """The loss must halve in 80 steps; rates are five-fold steps from 0.02 to 62.5."""
    largest = stable_rates(generator.initial_seed())
    return measured("much larger rates with BN", stated(largest), "digits, 5 layers of 48, SGD, batch 128", **largest)


@lru_cache
def smoothness_numbers(seed: int) -> Numbers:
    """Means over training of the spread of the loss and of the change of the gradient along the descent direction."""
    inputs, classes, _, _ = flat_digits()
    numbers: Numbers = {}
    for kind, normalizer in (("BN", "batch"), ("plain", "none")):
        generator = torch.Generator().manual_seed(seed)
        model = digits_mlp(5, 48, normalizer, generator)
        spreads, changes = [], []
        for x, y in batches(inputs, classes, 256, 25, generator):
            parameters = list(model.parameters())
            start = [parameter.detach().clone() for parameter in parameters]
            slope = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters)
            losses, turns = [], []
            for length in (0.1, 0.3, 0.5):
                with torch.no_grad():
                    for parameter, first, step in zip(parameters, start, slope, strict=True):
                        parameter.copy_(first - length * step)
                value = nn.functional.cross_entropy(model(x), y)
                there = torch.autograd.grad(value, parameters)
                losses.append(value.item())
                turns.append(_norm([a - b for a, b in zip(there, slope, strict=True)]) / _norm(slope))
            with torch.no_grad():
                for parameter, first, step in zip(parameters, start, slope, strict=True):
                    parameter.copy_(first - 0.1 * step)
            spreads.append(max(losses) - min(losses))
            changes.append(max(turns))
        numbers[f"spread of the loss, {kind}"] = sum(spreads) / len(spreads)
        numbers[f"relative change of the gradient, {kind}"] = sum(changes) / len(changes)
    return numbers


def smoother(numbers: Numbers) -> bool:
    return all(
        numbers[f"{name}, BN"] < numbers[f"{name}, plain"] for name in ("spread of the loss", "relative change of the gradient")
    )


@claim(
    "A-smooth",
    AKBAR,
    "Sections 2.3 and 6, after Santurkar et al.",
    "With BN the loss and the gradient vary less along the descent direction.",
)
def smoothness(generator: torch.Generator, stated: Says = smoother) -> Outcome:
    """At 25 steps of SGD: the spread of the loss over 0.1 to 0.5 times the gradient, and how much the gradient changes there."""
    numbers = smoothness_numbers(generator.initial_seed())
    return measured("smoother with BN", stated(numbers), "digits, 5 layers of 48, SGD 0.1, batch 256, 25 steps", **numbers)


def _norm(parts: list[Tensor] | tuple[Tensor, ...]) -> float:
    return float(torch.stack([part.norm() for part in parts]).norm())
