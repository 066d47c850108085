"""Akbar, Section 8: the four synthetic experiments, in the sizes that the paper gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from normscope.claims.calculus import normal, standardize
from normscope.claims.ledger import AKBAR, claim
from normscope.claims.training import accuracy, batches, digits_mlp, flat_digits, train
from normscope.claims.verdicts import Outcome, measured

Numbers = dict[str, float]
Says = Callable[[Numbers], bool]
RELATIVE_ZERO = 1e-6  # eigenvalues below this part of the largest count as zero


@lru_cache
def norm_changes(seed: int) -> Numbers:
    """The relative change of ‖w‖ in 300 steps of a linear classifier in the plane, for small and large starts."""
    generator = torch.Generator().manual_seed(seed)
    x = normal(generator, 100, 2)
    labels = (x @ torch.tensor([1.0, -0.5], dtype=torch.float64) > 0).double()
    direction = normal(generator, 2)
    changes = {}
    for kind in ("BN", "plain"):
        for size in (0.3, 1.0, 3.0):
            w = nn.Parameter(size * direction / direction.norm())
            optimizer = torch.optim.SGD([w], lr=0.1)
            for _ in range(300):
                optimizer.zero_grad()
                z = standardize(x @ w, 0) if kind == "BN" else x @ w
                nn.functional.binary_cross_entropy_with_logits(z, labels).backward()
                optimizer.step()
            changes[f"{kind}, start {size:g}"] = abs(float(w.detach().norm()) / size - 1)
    return changes


def norm_is_kept(changes: Numbers) -> bool:
    """‖w‖ changes by less than 1 % with BN from every start."""
    return all(change < 0.01 for name, change in changes.items() if name.startswith("BN"))


@claim("A-E1", AKBAR, "Experiment 1", "With BN the norm of w changes by less than 1 % in training; without, it moves.")
def toy_flow(generator: torch.Generator, stated: Says = norm_is_kept) -> Outcome:
    """A step adds η²‖∇L‖² ∝ η²/‖w‖² to ‖w‖²: the norm is kept where the start is large, not where it is small."""
    changes = norm_changes(generator.initial_seed())
    return measured("less than 1 % with BN", stated(changes), "100 points in the plane, logistic loss, 300 steps of 0.1", **changes)


def tiny_network(kind: str, sizes: tuple[int, ...], generator: torch.Generator) -> nn.Sequential:
    """Linear maps with ReLUs between them, BN of batch statistics and no bias where BN follows; float64."""
    layers: list[nn.Module] = []
    for last, (before, after) in zip(range(2 - len(sizes), 1), pairwise(sizes), strict=True):
        hidden = last < 0
        linear = nn.utils.skip_init(nn.Linear, before, after, bias=kind == "plain" or not hidden, dtype=torch.float64)
        nn.init.kaiming_normal_(linear.weight, generator=generator)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
        norm = nn.BatchNorm1d(after, track_running_stats=False, dtype=torch.float64) if kind == "BN" else nn.Identity()
        layers += [linear, norm, nn.ReLU()] if hidden else [linear]
    return nn.Sequential(*layers)


@lru_cache
def conditioning_numbers(seed: int) -> Numbers:
    """λ_max, κ without zero modes at the end, and iterations until the loss is a tenth of its start."""
    numbers: Numbers = {}
    for kind in ("BN", "plain"):
        generator = torch.Generator().manual_seed(seed)
        x = normal(generator, 64, 4)
        y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
        model = tiny_network(kind, (4, 10, 10, 1), generator)
        losses = train(
            model, batches(x, y, 64, 400, generator), torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss
        )
        eigenvalues = torch.linalg.eigvalsh(loss_hessian(model, x, y)).abs()
        kept = eigenvalues[eigenvalues > RELATIVE_ZERO * eigenvalues.max()]
        numbers |= {f"λ_max, {kind}": float(eigenvalues.max()), f"κ, {kind}": float(kept.max() / kept.min())}
        reached = [step for step, loss in enumerate(losses) if loss <= losses[0] / 10]
        numbers |= {f"iterations, {kind}": float(reached[0]) if reached else float("inf"), f"final loss, {kind}": losses[-1]}
    return numbers


def loss_hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The dense Hessian of the mean squared error in all parameters."""
    names = [name for name, _ in model.named_parameters()]
    sizes = [parameter.shape for parameter in model.parameters()]

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split([size.numel() for size in sizes])
        values = {name: part.reshape(size) for name, part, size in zip(names, parts, sizes, strict=True)}
        return nn.functional.mse_loss(torch.func.functional_call(model, values, (x,)), y)

    start = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    matrix: Tensor = torch.func.jacfwd(torch.func.jacrev(loss))(start)
    return matrix.detach()


def better_conditioned(numbers: Numbers) -> bool:
    """λ_max and κ are smaller with BN, which converges in under 100 iterations."""
    smaller = all(numbers[f"{name}, BN"] < numbers[f"{name}, plain"] for name in ("λ_max", "κ"))
    return smaller and numbers["iterations, BN"] < 100


@claim(
    "A-E2",
    AKBAR,
    "Experiment 2",
    "With BN λ_max is 5 times smaller, κ about 20 instead of 200, and training takes under 100 iterations.",
)
def conditioning(generator: torch.Generator, stated: Says = better_conditioned) -> Outcome:
    """The dense Hessian of a 4-10-10-1 network for regression after training; both numbers depend on ‖w‖, which BN leaves free."""
    numbers = conditioning_numbers(generator.initial_seed())
    return measured(
        "λ_max 5 × smaller, κ 20 against 200, under 100 iterations", stated(numbers), "64 points, 400 steps of 0.1", **numbers
    )


@lru_cache
def margin_numbers(seed: int) -> Numbers:
    """Mean margin on the training set, and accuracy there under noise in the weights."""
    numbers: Numbers = {}
    for kind in ("BN", "plain"):
        generator = torch.Generator().manual_seed(seed)
        x = normal(generator, 300, 50)
        labels = (x[:, 0] * x[:, 1] + x[:, 2] > 0).double()[:, None]
        model = tiny_network(kind, (50, 20, 1), generator)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, batches(x, labels, 100, 400, generator), optimizer, nn.functional.binary_cross_entropy_with_logits)
        with torch.no_grad():
            margins = (model(x) * (2 * labels - 1))[:, 0]
        numbers |= {f"mean margin, {kind}": float(margins.mean()), f"accuracy, {kind}": float((margins > 0).double().mean())}
        for noise in (0.1, 0.5):
            numbers[f"accuracy under noise {noise:g}, {kind}"] = noisy_accuracy(model, x, labels, noise, generator)
    return numbers


def noisy_accuracy(model: nn.Module, x: Tensor, labels: Tensor, noise: float, generator: torch.Generator) -> float:
    """The mean accuracy over ten draws of noise of that deviation on every parameter."""
    results = []
    for _ in range(10):
        values = {name: p.detach() + noise * normal(generator, *p.shape) for name, p in model.named_parameters()}
        margins = torch.func.functional_call(model, values, (x,)) * (2 * labels - 1)
        results.append(float((margins > 0).double().mean()))
    return sum(results) / len(results)


def wider_margins(numbers: Numbers) -> bool:
    """The mean margin and the accuracy under noise are larger with BN."""
    names = ("mean margin", "accuracy under noise 0.1", "accuracy under noise 0.5")
    return all(numbers[f"{name}, BN"] > numbers[f"{name}, plain"] for name in names)


@claim(
    "A-E3",
    AKBAR,
    "Experiment 3",
    "With BN the mean margin is 1.8 instead of 1.2 and training accuracy survives more noise in the weights.",
)
def margins(generator: torch.Generator, stated: Says = wider_margins) -> Outcome:
    """A 50-20-1 ReLU network, trained to zero error on labels that no plane separates; margins are raw logits times labels."""
    numbers = margin_numbers(generator.initial_seed())
    return measured(
        "mean margin 1.8 against 1.2, flatter", stated(numbers), "300 points in ℝ⁵⁰, Adam 0.01, 400 steps of 100", **numbers
    )


@lru_cache
def bad_starts(seed: int) -> Numbers:
    """Training accuracy on digits after a start with all weights 100 times too large or 1000 times too small."""
    inputs, classes, _, _ = flat_digits()
    results = {}
    for kind, normalizer in (("BN", "batch"), ("plain", "none")):
        for factor in (100.0, 1e-3):
            generator = torch.Generator().manual_seed(seed)
            model = digits_mlp(5, 32, normalizer, generator)
            with torch.no_grad():
                for layer in model.modules():
                    if isinstance(layer, nn.Linear):
                        layer.weight.mul_(factor)
            train(model, batches(inputs, classes, 128, 200, generator), torch.optim.SGD(model.parameters(), lr=0.1))
            results[f"{kind}, weights × {factor:g}"] = accuracy(model, inputs, classes)
    return results


def survives_bad_starts(results: Numbers) -> bool:
    """Above 80 % from both starts with BN, below from both without."""
    return all((result > 0.8) == name.startswith("BN") for name, result in results.items())


@claim(
    "A-E4",
    AKBAR,
    "Experiment 4",
    "With BN a 5-layer network trains smoothly from weights far too large or too small; without, it fails.",
)
def bad_initialization(generator: torch.Generator, stated: Says = survives_bad_starts) -> Outcome:
    """The gradient is ∝ 1/‖w‖, so with BN a large start is slow rather than explosive, and a small one makes a first jump."""
    results = bad_starts(generator.initial_seed())
    return measured("trains from either start", stated(results), "digits, 5 layers of 32, SGD 0.1, 200 steps of 128", **results)
