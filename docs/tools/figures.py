"""The figures of the concept pages: `python -m docs.tools.figures` writes them to docs/images/concepts."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import torch
from torch import nn

import normscope as ns
from normscope.report.svg import svg
from normscope.report.theme import figure

WHERE = Path(__file__).parent.parent / "images" / "concepts"
RADII = [10 ** (exponent / 4) for exponent in range(-12, 5)]
DEPTH = 10


def network(normalizer: type[nn.Module], depth: int = DEPTH, width: int = 32) -> nn.Sequential:
    """A chain of Linear, normalizer and ReLU, as initialized."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), normalizer(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10)).eval()


def inputs(width: int = 32) -> torch.Tensor:
    return torch.randn(64, width, generator=torch.Generator().manual_seed(1))


def lines(series: dict[str, tuple[list[float], list[float]]], **labels: object) -> go.Figure:
    drawn = [go.Scatter(name=name, x=x, y=y, mode="lines") for name, (x, y) in series.items()]
    return figure(*drawn, **labels)


def bracket() -> go.Figure:
    """Both sides of the bracket at every layer of a network with LN."""
    audit = ns.audit(network(nn.LayerNorm, depth=6), inputs()[:8], local=False)
    rows = [row for row in audit.layers if row.upper_here is not None and row.separation is not None]
    places = [float(place) for place in range(1, len(rows) + 1)]
    drawn = lines(
        {
            "proved: at most": (places, [float(row.upper_here) for row in rows if row.upper_here is not None]),
            "two inputs: at least": (places, [float(row.separation) for row in rows if row.separation is not None]),
        },
        title="The bracket at every layer", x="layer (Linear and LN alternate)", y="from the input to this layer", log_y=True,
    )  # fmt: skip
    return drawn.update_xaxes(tickvals=places, ticktext=[f"{place:.0f}" for place in places])


def region() -> go.Figure:
    """Both sides of the bracket on balls of growing radius."""
    model, x = network(nn.LayerNorm, depth=2), inputs()
    found = [ns.lipschitz(model, x[:1], region=ns.Ball(x[0], radius)) for radius in RADII]
    everywhere = ns.lipschitz(model, x[:1])
    return lines(
        {
            "proved: at most": (RADII, [float(each.proved) for each in found]),
            "two inputs: at least": (RADII, [float(each.lower) for each in found]),
            "over all inputs: at most": ([RADII[0], RADII[-1]], [float(everywhere.proved)] * 2),
        },
        title="The bracket against the radius", x="radius of the ball", y="Lipschitz constant", log_x=True, log_y=True,
    )  # fmt: skip


def symmetry() -> go.Figure:
    """The loss along the ray of a weight: before a normalizer it is constant."""
    x, factors = inputs(), [2.0 ** (exponent / 4) for exponent in range(-8, 9)]
    targets = torch.arange(len(x)) % 10
    series = {}
    for name, normalizer in (("without normalizer", nn.Identity), ("before BN", nn.BatchNorm1d)):
        model = network(normalizer, depth=2).train()
        weight = model[0].weight.detach().clone()
        losses = []
        for factor in factors:
            with torch.no_grad():
                model[0].weight.copy_(factor * weight)
                losses.append(float(nn.functional.cross_entropy(model(x), targets)))
        series[name] = (factors, losses)
    return lines(series, title="The loss when one weight is scaled", x="factor c of the weight c·W", y="loss", log_x=True)


def gain() -> go.Figure:
    """The product of the gains of BN by each definition, against depth, on the statistics of data."""
    x = inputs()
    names = {
        "normalizers_paper_affine": "paper with γ: ‖γ/σ‖", "normalizers_paper": "paper: ‖1/σ‖",
        "normalizers_tight": "tight: max |γ|/σ", "normalizers_layer": "layer: 1/√mean σ²",
    }  # fmt: skip
    depths = [1, 2, 4, 6, 8, 10]
    products = []
    for depth in depths:
        model = network(nn.BatchNorm1d, depth)
        products.append(ns.audit(ns.recalibrate(model, x), x[:8], data=x, local=False).products)
    series = {name: ([float(depth) for depth in depths], [found[key] for found in products]) for key, name in names.items()}
    return lines(series, title="What the normalizers contribute, by definition", x="number of BN layers", y="log10 of the product")


FIGURES = {"bracket": bracket, "region": region, "symmetry": symmetry, "gain": gain}


def main() -> None:
    torch.set_num_threads(1)
    WHERE.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        path = WHERE / f"{name}.svg"
        path.write_text(svg(draw()), encoding="utf-8")
        print(path.relative_to(WHERE.parent.parent.parent))


if __name__ == "__main__":
    main()
