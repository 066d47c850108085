"""Affine forms: no pair of points exceeds a bound, at the output or inside, and whoever leaves a part of them out is caught."""

import itertools

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns
from normscope.certify import grams, leftovers, sweep, totals
from normscope.certify.columns import AttentionMap
from normscope.certify.forms import affine_forms
from normscope.certify.known import Derivative, Known
from normscope.certify.perturbed import perturbed_norm
from normscope.certify.sweep import MOST_SYMBOLS, Sweep
from normscope.core.region import Ball, Box
from normscope.core.rounding import length
from normscope.graph.trace import trace
from normscope.operators.dense import gram_norms
from normscope.rules.activations import Entrywise
from normscope.rules.normalizers import NormalizerRule
from normscope.rules.registry import Gain, registry
from normscope.rules.remainder import Remainder, Sets
from tests.ascent import ascended, project
from tests.networks import Function, Joined


class Transformer(nn.Module):
    """One layer: attention and a gated MLP, each behind a normalizer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.mixed = nn.ModuleList([nn.LayerNorm(6), nn.RMSNorm(6)]), nn.Linear(6, 18)
        self.up, self.gate, self.down, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        q, k, v = self.mixed(self.norms[0](x)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = self.norms[1](x)
        return self.out((x + self.down(functional.silu(self.gate(y)) * self.up(y)))[:, -1])


def residual():
    inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    whole = Joined(lambda x, y: functional.relu(x + y), nn.Identity(), inner)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), whole, nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(36, 3))


NETWORKS = {
    "dense": (lambda: nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 8), nn.LeakyReLU(), nn.Linear(8, 3)), (1, 4)),
    "smooth": (lambda: nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)), (1, 4)),
    "residual": (residual, (1, 2, 5, 5)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)), (1, 2, 5, 5)),
    "softmax": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Softmax(-1), nn.Linear(6, 3)), (1, 5)),
    "transformer": (Transformer, (1, 3, 6)),
    "no remainder known": (lambda: nn.Sequential(nn.Linear(4, 6), Function(lambda x: torch.logsumexp(x.unflatten(-1, (2, 3)), -1))), (1, 4)),
}  # fmt: skip


def drawn(name, seed):
    make, shape = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().double().eval()
        with torch.no_grad():
            for part in model.modules():
                if isinstance(part, (nn.Linear, nn.Conv2d)):
                    part.weight.mul_(2)
                if isinstance(part, nn.BatchNorm2d):
                    part.running_mean.normal_()
                    part.running_var.uniform_(0.3, 2)
        x = torch.randn(shape, dtype=torch.float64)
    return model, x, trace(model, x, "eval", None)


def regions(x, radius):
    width = radius * (0.2 + torch.rand(x[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    return Ball(x[0], radius), Box(x[0] - width, x[0] + width)


def inside(region, points):
    return torch.cat([project(region, point[None]) for point in points])


def violations(graph, model, region, found, seed=0, pairs=6, steps=12):
    """What sampled and ascended pairs of the region show that the forms exclude."""
    generator = torch.Generator().manual_seed(seed)
    middle = region.middle[0][None]
    wrong = []
    for _ in range(pairs):
        away = torch.randn(2, *middle.shape[1:], generator=generator, dtype=torch.float64)
        first, second = inside(
            region, middle + away * region.reach / length(away.flatten(1), 1).reshape(2, *[1] * (away.dim() - 1))
        )
        first, second = first[None], second[None]
        reached = ascended(model, first, second, steps, lambda x: project(region, x))
        if reached > float(found.bound) * (1 + 1e-9):
            wrong.append(f"output: {reached} > {float(found.bound)}")
        ends = [graph.run([end], torch.float64, capture=graph.nodes)[1] for end in (first, second)]
        apart = float(length(first - second))
        middles = {node: found.away.facts.center(node) for node in graph.nodes}
        away, change = ({node: (ends[0][node] - other[node]).abs() for node in graph.nodes} for other in (middles, ends[1]))
        for sizes, moved, other, unit in ((found.away, away, middles, 1.0), (found.moves, change, ends[1], apart)):
            for node in graph.nodes:
                if isinstance(made := sizes.linearized.maps.get(node), AttentionMap):
                    parts = [(ends[0][source] - other[source])[None] for source in dict.fromkeys(node.inputs)]
                    moved[made.logits] = made.both(*parts)[1][0].abs()
            for node, partitions in sizes.watched.items():
                slack = 1e-12 * (1 + float(ends[0].get(node, moved[node]).abs().max()))
                if bool((moved[node] > sizes.entries(node) * unit + slack).any()):
                    wrong.append(f"an entry of {node.label}")
                for sets in partitions:
                    if bool((length(sets.split(moved[node]), -1) > sizes.sets(node, sets) * unit + slack).any()):
                        wrong.append(f"a set of {node.label}")
    return wrong


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_pair_of_points_exceeds_a_bound(name, seed):
    model, x, graph = drawn(name, seed)
    for radius, most_symbols in (
        (1e-6, MOST_SYMBOLS),
        (1e-2, 2),
        (0.1, MOST_SYMBOLS),
        (0.7, 2),
        (0.7, MOST_SYMBOLS),
    ):
        for region in regions(x, radius):
            found = affine_forms(graph, region, most_symbols=most_symbols)
            assert not violations(graph, model, region, found, seed, pairs=3)


def test_remainders_that_are_left_to_the_next_matrix(monkeypatch):
    monkeypatch.setattr(sweep, "MANY_SYMBOLS", 0)
    layers = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 12), nn.GELU(), nn.Linear(12, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    x = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    graph = trace(layers, x, "eval", None)
    for region in (*regions(x, 0.05), *regions(x, 0.5)):
        found = affine_forms(graph, region)
        assert [part.node.op for part in found.parts] == ["layer_norm", "linear"]
        assert not violations(graph, layers, region, found)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "no remainder known"])
def test_bounds_shrink_to_the_norm_of_the_jacobian(name):
    model, x, graph = drawn(name, 0)
    jacobian = torch.autograd.functional.jacobian(lambda v: model(v).reshape(-1), x).reshape(-1, x.numel())
    truth = float(torch.linalg.matrix_norm(jacobian, 2))
    uppers = [float(affine_forms(graph, Ball(x[0], radius)).bound) for radius in (0.1, 1e-2, 1e-4, 1e-7)]
    assert all(small <= large * (1 + 1e-6) for large, small in itertools.pairwise(uppers))
    assert truth * (1 - 1e-9) <= uppers[-1] <= truth * (1 + 1e-4)


# mutants: each leaves out a part of the proof, on a network where that part is all that keeps the bound


def kink(model):
    """A region whose middle is a kink: the bound is the constant itself."""
    return model.double(), torch.zeros(1, 3, dtype=torch.float64), 0.5


def scaled(factor):
    layer = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(factor * torch.eye(3))
    return layer


MUTATED = {
    "kink": lambda: kink(nn.Sequential(nn.ReLU(), scaled(10.0))),
    "square": lambda: kink(Function(lambda x: x * x)),
    "normalizer": lambda: (nn.LayerNorm(3).double(), torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64), 0.15),
}


def dropped_symbol(patch):
    original = Sweep._symbols

    def symbols(self, node, remainder):
        found = original(self, node, remainder)
        if found is not None:
            found.scale = torch.where(torch.arange(len(found.scale)) == 0, 0.0, found.scale)
        return found

    patch.setattr(Sweep, "_symbols", symbols)


def halved_sizes(patch):
    original = Sweep._remainder

    def remainder(self, *arguments):
        found = original(self, *arguments)
        return Remainder(found.scale / 2, found.entries, found.sets)

    patch.setattr(Sweep, "_remainder", remainder)


def no_curvature(patch):
    def remainder(self, node, context, away, moves):
        return Remainder(*torch.zeros(2, *node.shape, dtype=torch.float64))

    patch.setattr(NormalizerRule, "remainder", remainder)


def slopes_outside(patch):
    patch.setattr(Entrywise, "chord", lambda self, node, context, away: torch.zeros(node.shape, dtype=torch.float64))
    original = Entrywise.remainder

    def remainder(self, *arguments):
        found = original(self, *arguments)
        return None if found is None else Remainder(found.scale.clamp(max=0.5), found.entries, found.sets)

    patch.setattr(Entrywise, "remainder", remainder)


def kappa_without_its_norm(patch):
    patch.setattr(leftovers, "times", lambda factor, size: size)


def halved_columns(patch):
    patch.setattr(grams, "gram_norms", lambda made, terms: gram_norms(made, terms) / 2)
    patch.setattr(totals, "spectral_norm", lambda matrix: 0.5 * float(torch.linalg.matrix_norm(matrix, 2)))
    patch.setattr(totals, "perturbed_norm", lambda *arguments: perturbed_norm(*arguments) / 2)


def halved_sets(patch):
    original = Sweep.without_left
    patch.setattr(Sweep, "without_left", lambda self, node, sets: original(self, node, sets) / 2)


MUTANTS = {
    "sets halved": (halved_sets, "normalizer", {}),
    "a symbol dropped": (dropped_symbol, "kink", {}),
    "a symbol dropped, in a square": (dropped_symbol, "square", {}),
    "sizes halved": (halved_sizes, "kink", {}),
    "sizes halved, in a square": (halved_sizes, "square", {}),
    "no curvature": (no_curvature, "normalizer", {}),
    "slopes outside their interval": (slopes_outside, "kink", {}),
    "κ without its norm": (kappa_without_its_norm, "kink", {"most_symbols": 0}),
    "half of J": (halved_columns, "kink", {}),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    change, name, options = MUTANTS[mutant]
    model, x, radius = MUTATED[name]()
    graph, region = trace(model, x, "eval", None), Ball(x[0], radius)
    assert not violations(graph, model, region, affine_forms(graph, region, **options), pairs=12, steps=40)
    change(monkeypatch)
    assert violations(graph, model, region, affine_forms(graph, region, **options), pairs=12, steps=40)


def bent() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network with kinks and a normalizer, and two points."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = nn.Linear(4, 12), nn.ReLU(), nn.LayerNorm(12), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)
        return nn.Sequential(*layers).double(), *torch.randn(2, 1, 4, dtype=torch.float64)


def test_balls_around_one_point_share_their_derivative():
    """From small to large and back: what is found is as if each ball were alone, and J is made once, or anew for a larger one."""
    model, x, other = bent()
    graph, known, made = trace(model, x, "eval", None), Known(), []
    for middle, radius in ((x, 0.02), (x, 0.2), (x, 2.0), (x, 0.1), (x, 1e-4), (other, 0.1), (x, 0.1)):
        found, alone = affine_forms(graph, Ball(middle[0], radius), known), affine_forms(graph, Ball(middle[0], radius))
        assert float(found.bound) == pytest.approx(float(alone.bound), rel=1e-9)
        made.append(known.derivative)
    assert made[0] is made[1] is not made[2] is made[3] is made[4] and len({*made[4:]}) == 3
    box = Box(other[0] - 0.1, other[0] + 0.1)
    assert float(affine_forms(graph, box, known).bound) == pytest.approx(float(affine_forms(graph, box).bound), rel=1e-9)


def test_the_derivative_of_another_point_is_caught(monkeypatch):
    model, x, other = bent()
    graph, region = trace(model, x, "eval", None), Ball(other[0], 1e-3)
    monkeypatch.setattr(Derivative, "of", lambda *_: True)
    known = Known()
    affine_forms(graph, Ball(x[0], 1e-3), known)
    assert violations(graph, model, region, affine_forms(graph, region, known), pairs=6, steps=10)


def test_a_set_is_no_larger_than_the_sets_that_make_it_up(monkeypatch):
    """Where Gram matrices are too much work, norms of J come from smaller sets, and stay bounds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = Transformer().double(), torch.randn(1, 3, 6, dtype=torch.float64)
    graph, region = trace(model, x, "eval", None), Ball(x[0], 0.05)
    exact = affine_forms(graph, region)
    monkeypatch.setattr(grams, "LITTLE", 0.0)
    monkeypatch.setattr(grams, "SHARE", 0.0)
    some = affine_forms(graph, region)
    monkeypatch.setattr(grams, "SINGLE_SHARE", 0.0)
    none = affine_forms(graph, region)
    norms = [found.away.jacobian.sets for found in (exact, some, none)]
    for least, more, most in zip(*(made.values() for made in norms), strict=True):
        assert bool((least <= more * (1 + 1e-9) + 1e-140).all() and (more <= most * (1 + 1e-9) + 1e-140).all())  # some are 0
    assert any(not torch.allclose(least, most) for least, most in zip(norms[0].values(), norms[2].values(), strict=True))
    assert not violations(graph, model, region, none, pairs=6, steps=10)


def up_and_down(function, size):
    return Function(lambda x: function(x * size) / size)


@pytest.mark.parametrize(
    ("function", "radius"),
    [
        (lambda x: x @ torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64), 1.0),
        (functional.relu, 1.0),
        (lambda x: functional.leaky_relu(x.flip(-1) + x, -0.5), 1.0),
        (lambda x: functional.relu(x.unflatten(-1, (2, 1))), 1.0),
        (lambda x: functional.max_pool1d(x, 2), 1.0),
        (lambda x: (x * 1e170) * x.flip(-1), 1e-170),
        (lambda x: functional.layer_norm(x * 1e170, (2,)) * x.flip(-1), 1e-170),
    ],
    ids=["linear", "relu", "sum", "tokens", "max-pool", "product", "normalizer"],
)
@pytest.mark.parametrize("size", [1e-100, 1e-170, 1e-300])
def test_no_scale_is_too_small(function, radius, size):
    """Squares of columns and of sizes may underflow; what they measure does not."""
    model, x = up_and_down(function, size if radius == 1 else 1.0), torch.zeros(1, 2, dtype=torch.float64)
    found = affine_forms(trace(model, x, "eval", None), Ball(x[0], radius))
    generator = torch.Generator().manual_seed(0)
    ends = functional.normalize(torch.randn(2, 200, 2, generator=generator, dtype=torch.float64), dim=-1) * radius
    moved = length((model(ends[0]) - model(ends[1])).flatten(1), 1)
    assert float((moved / length(ends[0] - ends[1], 1)).max()) <= float(found.bound) * (1 + 1e-9)


def test_a_matrix_of_any_scale():
    generator = torch.Generator().manual_seed(0)
    jacobian, columns, rows = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    exact = float(torch.linalg.matrix_norm(jacobian + columns.T @ rows, 2))
    for size in (1e-160, 1e-200, 1e-300, 1e120, 1e155, 1e200, 1e300):
        found = perturbed_norm(size * jacobian, size * columns, rows)
        assert size * exact <= found <= 1e3 * max(size, 1e-147)


def test_a_network_of_large_weights_has_a_bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e120)
    x = torch.randn(1, 4, dtype=torch.float64)
    found = ns.lipschitz(model, x, region=Ball(x[0], 1.0))
    assert 0 < found.lower <= found.upper < 1e242


def test_an_operation_without_a_bound_leaves_none(monkeypatch):
    monkeypatch.setattr(type(registry["flip"]), "gain", lambda rule, node, context: Gain.infinite(node, "nothing is known"))
    x = torch.zeros(1, 2, dtype=torch.float64)
    assert not affine_forms(trace(Function(lambda x: x.flip(-1)), x, "eval", None), Ball(x[0], 1.0)).bound.finite


def test_entrywise_operations_on_several_tensors():
    x = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Function(lambda x: torch.clamp(x, min=x.mean(-1, keepdim=True)))
    assert affine_forms(trace(model, x, "eval", None), Ball(x[0], 0.1)).bound.finite


def test_boxes_are_measured_along_their_own_sides():
    """A wide box around one entry only: its diagonal says little about the others."""
    model = nn.Sequential(scaled(1.0), nn.ReLU(), scaled(1.0)).double()
    x = torch.tensor([[1.0, 1.0, 1.0]], dtype=torch.float64)
    width = torch.tensor([5.0, 0.1, 0.1], dtype=torch.float64)
    graph = trace(model, x, "eval", None)
    found = affine_forms(graph, Box(x[0] - width, x[0] + width))
    assert found.symbols == 1 and len(found.away.watched) == 2
    assert Sets.whole((1, 3)) in found.moves.watched[graph.output]
