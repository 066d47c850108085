"""Akbar, Sections 5.1 and 9.5: noise at a saddle, steps on the sphere, normalized gradients, and networks without normalizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

import torch
from torch import Tensor

from normscope.claims.akbar.derivatives import scale_free_loss
from normscope.claims.akbar.discussion import linear_neuron
from normscope.claims.akbar.dynamics import integrated
from normscope.claims.calculus import Map, chain, gradient, hessian, jacobian, normal, scalar, standardize
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, identity

HEIGHTS = (-1.5, -0.4, 0.3, 2.0)  # of z at the saddle, before they are standardized
RATE, STEPS, RUNS = 0.1, 200, 9  # of the descent from the saddle
THRESHOLD = 0.5  # of clipping, as a part of the gradient at the start
DEPTH = 50


@claim("A-S5.1-saddle")
def noise_at_a_saddle_without_symmetry(
    generator: torch.Generator, stated: Callable[[int], float] = lambda size: 1 / size
) -> Ruling:
    """L(w, γ) = ½ mean (γẑ − t)² with t = x₁ = ±1 independent of x₂, at w = (0, 1), γ = 0: a saddle, no units being equal.

    There ∂L/∂w = 0 and ∂L/∂γ = −mean(tẑ) in every batch, a push that has a part along the way down. Given the ẑ of a batch, its t
    are independent, so the mean square is Σẑ²/m² = 1/m. All batches of m draws but those of one height. stated: of m.
    By hand: a batch of 2 has ẑ = (1, −1), so that mean(tẑ) is 1, −1, 0 or 0, each as often.
    With the statistics of all data it is 1/m too: the samples push, and BN's statistics add nothing. Where |t| depends on |ẑ| they
    add or take away. Evidence: that ratio for batches of 4; steps from the exact saddle to a loss 5 % lower, median of 9 runs.
    """
    heights = standardize(torch.tensor(HEIGHTS, dtype=torch.float64), 0, 0.0)
    even = torch.ones_like(heights)
    cases = [
        Case(f"batches of {size}, {whose} statistics", scalar(stated(size)), mean_square_push(heights, even, size, own))
        for size in (2, 3, 4)
        for whose, own in (("their own", True), ("the data's", False))
    ]
    sizes = {"|t| = 1": even, "|t| = |ẑ|": heights.abs(), "|t| = 1/|ẑ|": 1 / heights.abs()}
    known = {
        f"push, own over the data's, {name}": float(mean_square_push(heights, t, 4, True) / mean_square_push(heights, t, 4, False))
        for name, t in sizes.items()
    }
    x = torch.tensor([*product((-1.0, 1.0), heights.tolist())], dtype=torch.float64)
    loss, saddle = linear_neuron(x, x[:, 0]), torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    known["gradient of all data"] = round(float(gradient(loss, saddle).norm()), 12)
    known["least curvature"] = round(float(torch.linalg.eigvalsh(hessian(loss, saddle))[0]), 12)
    for whose, own in (("their own", True), ("the data's", False)):
        known[f"steps with {whose} statistics"] = median(steps_off(x, saddle, own, generator) for _ in range(RUNS))
    return identity(cases, **known)


def mean_square_push(heights: Tensor, targets: Tensor, size: int, own: bool) -> Tensor:
    """The mean of mean(tẑ)² over all batches of draws (height, ±t), with their own statistics or with the data's."""
    draws = torch.cartesian_prod(*[torch.arange(len(heights))] * size)
    if own:
        draws = draws[draws.amin(1) < draws.amax(1)]
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * size)
    z = standardize(heights[draws], 1, 0.0) if own else heights[draws]
    return ((z * targets[draws]) @ signs.T / size).square().mean()


def steps_off(x: Tensor, saddle: Tensor, own: bool, generator: torch.Generator) -> int:
    """Steps with batches of 4 until the loss of all data is 5 % lower than at the saddle."""
    point, whole = saddle, linear_neuron(x, x[:, 0])
    for step in range(STEPS):
        if float(whole(point)) < 0.95 * float(whole(saddle)):
            return step
        batch = x[torch.randint(len(x), (4,), generator=generator)]
        if bool((batch @ point[:-1]).std() > 0):
            point = point - RATE * gradient(partial(_batch_loss, batch, x, own), point)
    return STEPS


def _batch_loss(batch: Tensor, x: Tensor, own: bool, point: Tensor) -> Tensor:
    z, source = batch @ point[:-1], (batch if own else x) @ point[:-1]
    hat = (z - source.mean()) / source.std(correction=0)
    return (point[-1] * hat - batch[:, 0]).square().mean() / 2


@claim("A-S9.5-tangent")
def steps_in_the_tangent_plane(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = lambda w: w) -> Ruling:
    """∇L − (∇L·w)w/‖w‖² = ∇L for a neuron before BN: leaving out the radial part leaves out nothing. stated: what is left out.

    Without BN it does (evidence: the part of ‖∇L‖ that is radial).
    """
    cases = []
    for inputs in (3, 8):
        loss, w = scale_free_loss(generator, inputs), normal(generator, inputs)
        slope, along = gradient(loss, w), stated(w)
        cases.append(Case(f"{inputs} weights", slope - (slope @ along) / (along @ along) * along, slope))
    plain = gradient(plain_loss(generator, 8), w)
    return identity(cases, **{"radial part without BN": abs(float(plain @ w)) / float(plain.norm() * w.norm())})


def plain_loss(generator: torch.Generator, inputs: int) -> Map:
    """The loss of a tanh neuron without BN."""
    x, targets = normal(generator, 40, inputs), normal(generator, 40)
    return lambda w: ((x @ w).tanh() - targets).square().mean()


def on_the_sphere(start: Tensor, plain: Tensor) -> Tensor:
    """What BN does: ‖w‖ is kept."""
    return plain * start.norm() / plain.norm()


@claim("A-S9.5-clipping")
def normalized_gradients(generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = on_the_sphere) -> Ruling:
    """−∇L/‖∇L‖ and the clipped gradient have the direction of −∇L, so their flows run along the same curves at another speed.

    By hand: L = ½‖w‖² from (1, 0); plain flow goes straight to 0 and so does normalized flow, with ‖w‖ = 1 − t. Plain flow to time
    1, then the others for the time ∫‖∇L‖/speed dt that the same way takes them. stated: where they arrive, of the start and of
    where plain flow does. Evidence: the least part of ‖w‖ that is kept; and with BN, where normalized steps of size η give
    ‖w_t‖² = ‖w_0‖² + tη², and so turn w less and less, as a learning rate that falls as 1/√t.
    """
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    arrived = integrated(partial(_at_speed, _half_square, torch.ones_like), start, 0.5)
    cases, kept = [Case("½‖w‖² from (1, 0), half of the way to 0 (‖w‖)", stated(start, start / 2).norm(), arrived.norm())], 1.0
    for inputs in (3, 6):
        loss, start = plain_loss(generator, inputs), normal(generator, inputs)
        most = THRESHOLD * gradient(loss, start).norm()
        for name, speed in (("normalized", torch.ones_like), ("clipped", partial(_clipped, most))):
            *plain, time = integrated(partial(_timed, loss, speed), torch.cat([start, scalar(0.0)[None]]))
            arrived = integrated(partial(_at_speed, loss, speed), start, float(time))
            cases.append(Case(f"{name}, {inputs} weights", stated(start, torch.stack(plain)), arrived, torch.stack(plain)))
            kept = min(kept, float(arrived.norm() / start.norm()))
    free, first = scale_free_loss(generator, 5), normal(generator, 5)
    w = first
    for _ in range(100):
        w = w + 0.1 * _at_speed(free, torch.ones_like, w)
    known = {"least part of ‖w‖ that is kept": kept, "‖w_100‖²/(‖w_0‖² + 100η²) with BN": float(w @ w / (first @ first + 1))}
    return identity(cases, **known)


def _half_square(w: Tensor) -> Tensor:
    return w @ w / 2


def _clipped(most: Tensor, size: Tensor) -> Tensor:
    """About the lesser of both; smooth, so that the flow can be integrated to high order."""
    return size * most / (size**2 + most**2).sqrt()


def _at_speed(loss: Map, speed: Map, w: Tensor) -> Tensor:
    """−∇L with another length, of ‖∇L‖."""
    slope = gradient(loss, w)
    return -speed(slope.norm()) * slope / slope.norm()


def _timed(loss: Map, speed: Map, point: Tensor) -> Tensor:
    """−∇L, and the rate at which time passes for those that run at another speed."""
    slope = gradient(loss, point[:-1])
    return torch.cat([-slope, (slope.norm() / speed(slope.norm()))[None]])


@claim("A-S9.5-free")
def initialization_without_normalizers(
    generator: torch.Generator, stated: Callable[[int], float] = lambda depth: 1.0, gain: float = 1.0
) -> Ruling:
    """W_1 = [V; −V], W_k = [V, −V; −V, V] with orthogonal V: h_k = (relu(u), relu(−u)) with u = V⋯Vx, so ‖h_k‖ = ‖x‖ for every x.

    One of each pair of units is on, so the Jacobian is an isometry almost everywhere: no gradient explodes or vanishes. It is the
    looks-linear start of Balduzzi et al. 2017, at which the network is linear up to its last ReLU.
    stated: ‖h_K‖/‖x‖ and every singular value, of the depth. gain: of the weights; no other value will do.
    """
    cases = []
    for depth in (2, 10, DEPTH):
        weights, x = [gain * weight for weight in mirrored(4, depth, generator)], normal(generator, 4)
        values = torch.linalg.svdvals(jacobian(partial(chain, weights), x))
        claimed = scalar(stated(depth))
        cases.append(Case(f"{depth} layers, ‖h‖/‖x‖", claimed, chain(weights, x).norm() / x.norm()))
        cases += [Case(f"{depth} layers, singular value of the Jacobian", claimed, value) for value in (values[0], values[-1])]
    return identity(cases)


def mirrored(width: int, depth: int, generator: torch.Generator) -> list[Tensor]:
    """W_1 = [V; −V], then [V, −V; −V, V], each with an orthogonal V of its own."""
    turns = [torch.linalg.qr(normal(generator, width, width))[0] for _ in range(depth)]
    pairs = [torch.cat([turn, -turn]) for turn in turns]
    return [torch.cat([pair, -pair], 1) if k else pair for k, pair in enumerate(pairs)]


@claim("A-S9.5-training")
def variance_during_training(
    generator: torch.Generator, stated: Callable[[float, float], float] = lambda size, share: 1.0
) -> Ruling:
    """z = w·x on whitened inputs, t = c·x₁, gradient descent on ½ mean (z − t)²: the only minimum has z = t, of variance c².

    By hand: x = ±1, t = 2x, w = 1 has variance 1; descent brings w to 2 and the variance to 4. Then K such weights in a chain, all
    1 at the start: they stay equal and end at c^(1/K), so that hidden layer k has the variance c^(2k/K). stated: the variance
    at the end, of c and k/K. Evidence: with w = v/‖v‖, as weight normalization has it, it is 1 all the way.
    """
    x = whitened(normal(generator, 30, 3))
    start = normal(generator, 3)
    cases, unit = [], 0.0
    for size in (0.5, 2.0, 10.0):
        targets = size * x[:, 0]
        w = v = start / start.norm()
        for _ in range(60):
            w = w - 0.5 * gradient(partial(_squared_error, x, targets), w)
            v = v - 0.5 * gradient(partial(_error_of_unit, x, targets), v)
            unit = max(unit, abs(float((x @ (v / v.norm())).var(correction=0)) - 1))
        ends = [("", 1.0, (x @ w).var(correction=0))]
        for depth in (2, 3):
            weights = trained_chain(size, depth)
            ends += [(f", layer {k} of {depth}", k / depth, weights[:k].prod().square()) for k in range(1, depth)]
        for where, share, variance in ends:
            right = scalar(variance_of_target(size, share))
            cases.append(Case(f"c = {size:g}{where}", scalar(stated(size, share)), variance, right))
    return identity(cases, **{"largest |variance − 1| with w = v/‖v‖": round(unit, 12)})


def variance_of_target(size: float, share: float) -> float:
    """c^(2k/K)."""
    return size ** (2 * share)


def trained_chain(size: float, depth: int) -> Tensor:
    """The weights of w_K⋯w_1x, all 1 at first, after gradient descent on x = ±1 with targets c·x."""
    weights, rate = torch.ones(depth, dtype=torch.float64), 0.25 / max(size, 1.0) ** (2 - 2 / depth)
    for _ in range(150):
        weights = weights - rate * gradient(lambda w: (w.prod() - size).square() / 2, weights)
    return weights


def whitened(x: Tensor) -> Tensor:
    """The same samples with mean 0 and covariance I."""
    return torch.linalg.qr(x - x.mean(0))[0] * len(x) ** 0.5


def _squared_error(x: Tensor, targets: Tensor, w: Tensor) -> Tensor:
    return (x @ w - targets).square().mean() / 2


def _error_of_unit(x: Tensor, targets: Tensor, v: Tensor) -> Tensor:
    return _squared_error(x, targets, v / v.norm())
