"""Ellipsoids around sums of columns: nothing that symbols can make lies outside, and whoever forgets a part is caught."""

from __future__ import annotations

import pytest
import torch

from normscope.certify import relays
from normscope.certify.bundles import Apart, Together
from normscope.certify.ellipsoids import Ellipsoids
from normscope.certify.forms import affine_forms
from normscope.certify.sweep import Sweep
from normscope.certify.symbols import Symbols
from normscope.core.region import Ball
from normscope.graph.trace import trace
from normscope.rules.remainder import Sets
from tests.certify.test_forms import violations
from tests.certify.test_relays import drawn
from tests.networks import Function

TOKENS, WIDTH = 3, 4
SETS, TOKEN = Sets.along((1, TOKENS, WIDTH), (-1,)), torch.arange(TOKENS * WIDTH) // WIDTH


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symbols(single: bool, scale: float) -> Symbols:
    """Of a node with three tokens of four entries; sizes of tokens, or of entries."""
    count = TOKENS * WIDTH
    sizes = random(count, seed=1).abs() * scale
    groups = torch.arange(count) if single else torch.arange(count) // WIDTH
    limits = sizes if single else random(TOKENS, seed=2).abs() * scale
    return Symbols(torch.arange(count), torch.ones(count, dtype=torch.float64), sizes, groups, limits)


def extreme(made: Symbols, seed: int) -> torch.Tensor:
    """Values of the symbols at the edge of what they may be."""
    drawn = random(len(made.sizes), seed=seed)
    if made.single:
        return drawn.sign() * made.sizes
    return torch.cat([part / part.norm() * size for part, size in zip(drawn.split(WIDTH), made.group_sizes, strict=True)])


def together(made: Symbols) -> Together:
    shape = (TOKENS, WIDTH) if made.single else (TOKENS,)
    return Together(made.sizes.reshape(TOKENS, WIDTH), made.group_sizes.reshape(shape), TOKEN)


def one_by_one(made: Symbols, columns: torch.Tensor) -> torch.Tensor:
    """The columns of all symbols."""
    return together(made).apart(columns, TOKEN, torch.arange(TOKENS * WIDTH) % WIDTH)


@pytest.mark.parametrize("scale", [1.0, 1e-90, 1e-160, 1e-250, 1e120])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_nothing_lies_outside(alike: bool, single: bool, scale: float) -> None:
    made = symbols(single, scale)
    shared = random(WIDTH, 1, TOKENS, WIDTH) if alike else None
    columns = random(TOKENS * WIDTH, 1, TOKENS, WIDTH) if shared is None else one_by_one(made, shared)
    found = Ellipsoids.none((1, TOKENS, WIDTH), SETS)
    found.add(
        Apart.of(made, slice(0, TOKENS * WIDTH)).ellipsoids(columns, SETS)
        if shared is None
        else together(made).ellipsoids(shared, SETS)
    )
    found.add_scaled(random(TOKENS, WIDTH, seed=5).abs(), torch.full((TOKENS, 1), scale, dtype=torch.float64))
    frames, matrix = found.frames(), random(7, WIDTH, seed=6)
    assert frames is not None
    for seed in range(40):
        own = random(TOKENS, WIDTH, seed=seed + 100)
        own = own / own.norm(dim=1, keepdim=True) * random(TOKENS, WIDTH, seed=5).abs()
        arrived = (extreme(made, seed) / scale) @ columns.reshape(-1, TOKENS * WIDTH)
        arrived = arrived.reshape(TOKENS, WIDTH) + own
        inside = torch.linalg.solve_triangular(frames / scale, arrived[..., None], upper=False)[..., 0]
        assert bool((inside.norm(dim=1) <= 1 + 1e-9).all())
        assert bool((arrived.norm(dim=1) <= found.norms() / scale * (1 + 1e-9)).all())
        assert bool(((arrived @ matrix.T).norm(dim=1) <= found.norms_behind(matrix) / scale * (1 + 1e-9)).all())


def test_around_one_block_it_is_that_block() -> None:
    made = symbols(False, 1.0)
    columns = random(WIDTH, 1, TOKENS, WIDTH)
    found = together(made).ellipsoids(columns, SETS)
    frames = found.frames()
    assert frames is not None
    blocks = columns[:, 0].permute(1, 2, 0) * made.group_sizes[:, None, None]
    assert torch.allclose(frames @ frames.mT, blocks @ blocks.mT, rtol=1e-6, atol=1e-6)
    assert torch.allclose(found.norms(), torch.linalg.matrix_norm(blocks, 2), rtol=1e-6)
    matrix = random(7, WIDTH, seed=6)
    assert torch.allclose(found.norms_behind(matrix), torch.linalg.matrix_norm(matrix @ blocks, 2), rtol=1e-6)


def test_sets_that_are_no_tokens_get_what_all_tokens_add() -> None:
    made, whole = symbols(False, 1.0), Sets.whole((1, TOKENS, WIDTH))
    columns = random(WIDTH, 1, TOKENS, WIDTH)
    found = together(made).ellipsoids(columns, whole)
    arrived = one_by_one(made, columns).reshape(TOKENS * WIDTH, -1)
    for seed in range(20):
        assert float((extreme(made, seed) @ arrived).norm()) <= float(found.norms()[0])


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("sets", [SETS, Sets.whole((1, TOKENS, WIDTH)), Sets.along((1, TOKENS, WIDTH), (-2,))], ids=str)
def test_together_or_one_by_one_is_the_same(sets: Sets, single: bool) -> None:
    """Whatever the sets: whole tokens, all of them, or one entry of each."""
    made, columns = symbols(single, 1.0), random(WIDTH, 1, TOKENS, WIDTH)
    alone, apart = Apart.of(made, slice(0, TOKENS * WIDTH)), one_by_one(made, columns)
    flat, flat_apart = columns.reshape(WIDTH, -1), apart.reshape(TOKENS * WIDTH, -1)
    assert together(made).size(flat) == pytest.approx(alone.size(flat_apart), rel=1e-8)
    assert torch.allclose(together(made).entries(flat), alone.entries(flat_apart), rtol=1e-8)
    assert torch.allclose(together(made).sets(columns, sets), alone.sets(apart, sets), rtol=1e-8)


def test_what_is_not_finite_has_no_ellipsoid() -> None:
    found = Ellipsoids.none((1, 2, 2), Sets.along((1, 2, 2), (-1,)))
    found.add_scaled(torch.ones(2, 2, dtype=torch.float64), torch.full((2, 1), torch.inf, dtype=torch.float64))
    assert found.frames() is None and bool(found.norms().isinf().all())


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "radius"), [("pre-norm", 0.02), ("post-norm", 0.03)])
def test_relays_with_a_shape_lose_little(name: str, radius: float, monkeypatch: pytest.MonkeyPatch) -> None:
    _, x, graph = drawn(name, 0)
    region, bounds = Ball(x[0], radius), []
    for strides, shaped in (((1,), True), ((0,), True), ((1,), False)):
        monkeypatch.setattr(relays, "STRIDES", strides)
        if not shaped:
            monkeypatch.setattr("normscope.certify.sweep.framed", lambda node: False)
        bounds.append(float(affine_forms(graph, region).bound))
    with_shapes, without_relays, without_shapes = bounds
    assert with_shapes <= 1.05 * without_relays and 1.1 * with_shapes < without_shapes


# mutants: squares at their middle 0, where the derivative is 0 and the remainder is all there is


def squared_then_relayed() -> Function:
    """The relay has columns from the square before it, and no remainder of its own."""
    return Function(lambda x: (lambda y: y + 0.5 * y)((x * x).flip(-1) + 0.0 * x))


def relayed_square() -> Function:
    """The relay is the square."""
    return Function(lambda x: (lambda y: y + 0.5 * y)(x * x))


TURNED = torch.linalg.qr(random(3, 3))[0]


def multiplied(x: torch.Tensor) -> torch.Tensor:
    """A relay whose one token is multiplied by a matrix that keeps lengths, in front of a curve."""
    return x + torch.tanh(x @ TURNED.to(x.dtype))


def shortens_behind_matrices(patch: pytest.MonkeyPatch) -> None:
    original = Ellipsoids.norms_behind
    patch.setattr(Ellipsoids, "norms_behind", lambda self, matrix: 0.1 * original(self, matrix))


def forgets_columns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ellipsoids, "add", lambda self, other: None)


def forgets_its_own(patch: pytest.MonkeyPatch) -> None:
    original = Sweep._frames
    patch.setattr(Sweep, "_frames", lambda self, node, arrived, own: original(self, node, arrived, None))


def shrinks_frames(patch: pytest.MonkeyPatch) -> None:
    original = Ellipsoids.frames
    patch.setattr(Ellipsoids, "frames", lambda self: 0.1 * original(self))


@pytest.mark.parametrize(
    ("change", "make"),
    [
        (forgets_columns, squared_then_relayed), (forgets_its_own, relayed_square), (shrinks_frames, squared_then_relayed),
        (shortens_behind_matrices, lambda: Function(lambda x: multiplied(2.0 * x))),
        (shortens_behind_matrices, lambda: Function(lambda x: multiplied((x * x)[:, :1] + 0.0 * x[:, :1]))),
    ],
)  # fmt: skip
def test_mutants_are_caught(change, make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "STRIDES", (1,))
    monkeypatch.setattr(relays, "_mixes", lambda node: True)
    model, x = make(), torch.zeros(1, 1 if change is shortens_behind_matrices else 2, 3, dtype=torch.float64)
    graph, region = trace(model, x, "eval", None), Ball(x[0], 0.5)
    found = affine_forms(graph, region)
    assert found.plan.relays and not violations(graph, model, region, found, pairs=6, steps=30)
    change(monkeypatch)
    assert violations(graph, model, region, affine_forms(graph, region), pairs=6, steps=30)
