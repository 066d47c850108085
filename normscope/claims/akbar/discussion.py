"""Akbar, Sections 7 and 9: saddles of linear networks with BN, a bound in norms, noise and shift."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normscope.claims.akbar.dynamics import VISIBLE, minibatch_loss
from normscope.claims.calculus import Map, gradient, hessian, normal, random_weights, scalar, standardize
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, identity, implication, presence

HIDDEN_CONSTANT = 1e6  # of O
SAMPLES = 20  # of a training set, from a population of 400
SCALES = (1.0, 1e-2, 1e-4)  # of the weights before BN


@claim("A-S7.1-saddles")
def saddles_of_linear_batch_norm(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = lambda least, variance: least
) -> Ruling:
    """One linear neuron with BN and a trained γ: L(w, γ) = ½ mean (γẑ − t)² with t of mean 0. At γ = 0 and w orthogonal to mean(tx)
    the gradient is 0 and the loss ½ mean t², whatever the least loss is.

    By hand: x = (±1, ±1), t = x₁, w = (0, 1), γ = 0: gradient 0, loss ½; at w = (1, 0), γ = 1 the loss is 0. The Hessian has a
    negative eigenvalue there, and no units are equal: it is a saddle, and not one of symmetry. stated: the loss at a critical
    point, of the least loss and ½ mean t². Evidence: with γ = 1 held, −w of the minimum is critical too, and the maximum.
    """
    cases, slopes, lowest, highest = [], 0.0, 0.0, 0.0
    for inputs in (2, 5):
        x = standardize(normal(generator, 40, inputs), 0, 0.0)
        targets = standardize(x[:, 0] + 0.3 * normal(generator, 40), 0, 0.0)
        loss = linear_neuron(x, targets)
        best = torch.linalg.lstsq(x, targets[:, None]).solution[:, 0]
        least = (x @ best - targets).square().mean() / 2
        moment, free = targets @ x, normal(generator, inputs)
        point = torch.cat([free - (free @ moment) / (moment @ moment) * moment, scalar(0.0)[None]])
        slopes = max(slopes, float(gradient(loss, point).norm()))
        lowest = min(lowest, float(torch.linalg.eigvalsh(hessian(loss, point))[0]))
        turned = torch.cat([-best, scalar(1.0)[None]])
        highest = max(highest, float(loss(turned)))
        cases.append(Case(f"{inputs} inputs, w ⟂ mean(tx), γ = 0", stated(least, scalar(0.5)), loss(point), scalar(0.5)))
    known = {"largest gradient there": slopes, "least eigenvalue there": lowest, "loss at −w of the minimum, γ = 1": highest}
    return identity(cases, **known)


def linear_neuron(x: Tensor, targets: Tensor) -> Map:
    """L of (w, γ) in one vector."""
    return lambda p: (p[-1] * standardize(x @ p[:-1], 0, 0.0) - targets).square().mean() / 2


Norms = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def sum_of_norms(weights: Sequence[Tensor], deviations: Sequence[Tensor]) -> Tensor:
    """(1/N) Σ_l ‖W_l‖²_{2,1} ∏_{j≠l} ‖W_j‖²_{2,∞}, of norms of rows."""
    rows = [weight.norm(dim=1) for weight in weights]
    sums = [part.sum() ** 2 for part in rows]
    largest = [part.max() ** 2 for part in rows]
    terms = [sums[k] * torch.stack([*largest[:k], *largest[k + 1 :]]).prod() for k in range(len(rows))]
    return torch.stack(terms).sum() / SAMPLES


def sum_of_scale_free_norms(weights: Sequence[Tensor], deviations: Sequence[Tensor]) -> Tensor:
    """The same of D_l⁻¹W_l."""
    return sum_of_norms([weight / deviation[:, None] for weight, deviation in zip(weights, deviations, strict=True)], deviations)


@claim("A-S7.2-norms")
def bound_in_norms(generator: torch.Generator, stated: Norms = sum_of_norms) -> Ruling:
    """W → cW before BN leaves the function, and its gap, as they are, and multiplies the sum by c^2K: a small c refutes any O.

    400 points with random labels, 20 of them the sample; of 50 random networks with two BN layers and statistics of the
    population, that with the largest gap of the 0-1 loss. The constant of O is a million; c from 1 to 1e-4.
    """
    x, labels = normal(generator, 400, 6), normal(generator, 400).sign()
    found = []
    for _ in range(50):
        weights = random_weights((6, 8, 1), generator)
        outputs, deviations = _calibrated(weights, x)
        wrong = (outputs.sign() != labels).double()
        found.append((wrong.mean() - wrong[:SAMPLES].mean(), weights, deviations))
    gap, weights, deviations = max(found, key=lambda row: float(row[0]))
    cases = []
    for c in SCALES:
        bound = HIDDEN_CONSTANT * stated([c * weight for weight in weights], [c * deviation for deviation in deviations])
        cases.append(Case(f"two BN layers, weights × {c:g} (bound on the gap)", bound, gap))
    return implication(cases, {"constant of O": HIDDEN_CONSTANT, "sharpness": "not sharp here: a hidden constant is allowed"})


def _calibrated(weights: Sequence[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of a ReLU network with BN of the data's statistics, and the deviations before each BN."""
    deviations = []
    for k, weight in enumerate(weights):
        z = (x.relu() if k else x) @ weight.T
        deviations.append(z.std(0, correction=0))
        x = (z - z.mean(0)) / deviations[-1]
    return x[:, 0], deviations


@claim("A-S9.2-noise")
def minibatches_keep_invariance(generator: torch.Generator, statistics: str = "batch", power: float = 1.0) -> Ruling:
    """The loss of a mini-batch at w and at 7w, the statistics being those of the batch, ε = 0: the same, for every batch.

    What mini-batches do is another thing: their mean gradient is not that of all data (evidence, as a part of its norm).
    statistics: "data" normalizes every batch with the statistics of all data at w; then there is a change. power: of σ in BN.
    """
    x, targets, w = normal(generator, 240, 5), normal(generator, 240), normal(generator, 5)
    of_batch = minibatch_loss(x, targets, w, statistics, power)
    every = gradient(of_batch(slice(None)), w)
    effects, biases = {}, {}
    for size in (4, 12, 60):
        losses = {start: of_batch(slice(start, start + size)) for start in range(0, len(x), size)}
        for start, loss in losses.items():
            effects[f"batch of {size} from {start}"] = abs(float(loss(7 * w) / loss(w)) - 1)
        mean = torch.stack([gradient(loss, w) for loss in losses.values()]).mean(0)
        biases[f"bias of the gradient, batches of {size}"] = float((mean - every).norm() / every.norm())
    return presence(effects, VISIBLE, max(effects.values()) < VISIBLE, **biases)


@claim("A-S9.3-shift")
def standardized_inputs(generator: torch.Generator, stated: tuple[float, float] = (0.0, 1.0)) -> Ruling:
    """Mean and variance of ẑ over the batch, for weights of three scales and inputs that are far from normal; ε = 0.

    They are two numbers, not the distribution: ẑ = ±1 has mean ½ behind a ReLU, and ẑ = 2 in one of five samples, −½ else, 0.4,
    both with mean 0 and variance 1 (evidence). stated: mean and variance.
    """
    cases = []
    for scale in (1e-3, 1.0, 1e3):
        x = normal(generator, 50, 4).pow(3) + 5
        hat = standardize(scale * x @ normal(generator, 4, 3), 0, 0.0)
        for unit, values in enumerate(hat.T):
            true = torch.stack([values.mean(), values.var(correction=0)])
            cases.append(Case(f"weights × {scale:g}, unit {unit + 1}", torch.tensor(stated, dtype=torch.float64), true, scale=1.0))
    even, uneven = (standardize(torch.tensor(z, dtype=torch.float64), 0, 0.0) for z in ((1.0, -1.0), (4.0, -1.0, -1.0, -1.0, -1.0)))
    after = {"mean behind a ReLU, ẑ = ±1": float(even.relu().mean()), "ẑ = 2 or −½": float(uneven.relu().mean())}
    return identity(cases, **after)
