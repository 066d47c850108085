"""Random networks of dense layers: normalizers, activations, residual, summed, concatenated, shared and reparametrized parts.

Networks of even seeds are smooth, so that what holds at one point and on some inputs holds everywhere, and every null
direction has a name. Those of odd seeds have kinks: a ReLU that is never reached looks like a symmetry to any numeric test.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.networks import Draw, Function, Joined
from tests.symmetry.layers import Residual, rms, standard, unit

WIDTHS = (2, 3, 4, 4)
SAMPLES = 12


SMOOTH = (nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus)
KINKED = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Tanh, nn.GELU)


class GraphDraw(Draw):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.activations = KINKED if seed % 2 else SMOOTH


def random_graph(seed: int) -> tuple[nn.Module, Tensor, str]:
    """A network of a few hundred parameters, an example, and the mode in which to look at it."""
    draw = GraphDraw(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs = draw(5, 6)
        layers: list[nn.Module] = []
        width = inputs
        if draw.chance(0.2):
            layers, width = [parametrizations.weight_norm(nn.Linear(inputs, 4), dim=draw(0, None)), nn.Tanh()], 4
        for _ in range(draw(1, 2, 3)):
            part, width = _part(draw, width)
            layers.append(part)
        layers.append(nn.Linear(width, draw(2, 3)))
        if draw.chance(0.2):
            layers.append(draw(nn.Softmax, nn.LogSoftmax)(1))
        model = nn.Sequential(*layers)
    return model, torch.randn(SAMPLES, inputs, generator=draw.generator), draw("train", "eval")


def _part(draw: GraphDraw, width: int) -> tuple[nn.Module, int]:
    after = draw(*(size for size in WIDTHS if size <= width))  # a wider layer without a kink spans no more than its input
    kind = draw("plain", "plain", "plain", "residual", "sum", "concatenation", "shared")
    if kind == "residual":
        first = _layer(draw, width, after)
        inside = [
            _normalizer(draw, after),
            nn.Linear(after, after),
            _normalizer(draw, after),
            _activation(draw),
            nn.Linear(after, after),
        ]
        return nn.Sequential(*first, Residual(*inside), _normalizer(draw, after), _activation(draw)), after
    if kind == "sum":
        branches = (nn.Sequential(*_layer(draw, width, after)), nn.Sequential(nn.Tanh(), nn.Linear(width, after)))
        return nn.Sequential(Joined(torch.add, *branches), _normalizer(draw, after), _activation(draw)), after
    if kind == "concatenation":
        branches = (nn.Sequential(*_layer(draw, width, 2)), nn.Sequential(nn.Tanh(), nn.Linear(width, 2)))
        joined = Joined(lambda a, b: torch.cat([a, b], 1), *branches)
        return nn.Sequential(joined, draw(nn.BatchNorm1d(4), nn.RMSNorm(4), nn.Identity()), _activation(draw)), 4
    if kind == "shared":
        layer = nn.Linear(after, after, bias=draw(True, False))
        return nn.Sequential(
            *_layer(draw, width, after), nn.Tanh(), layer, nn.Tanh(), layer, _normalizer(draw, after), _activation(draw)
        ), after
    return nn.Sequential(*_layer(draw, width, after)), after


def _layer(draw: GraphDraw, before: int, after: int) -> list[nn.Module]:
    layer: nn.Module = nn.Linear(before, after, bias=draw(True, True, False))
    order = [_normalizer(draw, after), _activation(draw)]
    return [layer, *(order if draw.chance(0.8) else order[::-1])]


def _normalizer(draw: GraphDraw, width: int) -> nn.Module:
    return draw(
        lambda: nn.BatchNorm1d(width), lambda: nn.BatchNorm1d(width), lambda: nn.BatchNorm1d(width, affine=False),
        lambda: nn.LayerNorm(width) if width > 2 else nn.RMSNorm(width), lambda: nn.RMSNorm(width), nn.Identity,
        lambda: Function(rms), lambda: Function(standard) if width > 2 else nn.Identity(), lambda: Function(unit),
    )()  # fmt: skip


def _activation(draw: GraphDraw) -> nn.Module:
    return draw(*draw.activations)()
