"""Figure 2 of Than 2025: variances of what enters the layers, and the product of 1/σ under every definition of σ."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normscope.lab.experiment import Comparison, Experiment, Plot, Results, power
from normscope.lab.experiments.weight_norms import FULL, NEAR, QUICK, SHOWN, STUDIED
from normscope.lab.training import trained_numbers, with_and_without

HEADLINE = -25.0  # log10 of ∏1/σ of ResNet-18 in the paper
SLIDES = math.log10(1.35e-8)  # log10 of ∏‖γ/σ‖ in the slides
DEFINITIONS = {
    "normalizers_layer": "∏1/σ, one σ per layer",
    "normalizers_paper": "∏‖1/σ‖, Lemma 1",
    "normalizers_paper_affine": "∏‖γ/σ‖, slides",
    "normalizers_tight": "∏max|γ|/σ, sharp",
    "activations_layer": "∏1/σ before activations",
}
HEADLINES = {"normalizers_layer": HEADLINE, "normalizers_paper": HEADLINE, "normalizers_paper_affine": SLIDES}


def judge(results: Results) -> Iterator[Comparison]:
    for (network, normalizer), group in results.groups("network", "normalizer").items():
        what = f"{network}, {normalizer}"
        start, end = (_variances(group, index) for index in (0, -1))
        grown = sum(after > before for before, after in zip(start, end, strict=True))
        large = sum(value > 1 for value in end)
        studied = (network, normalizer) in STUDIED
        for name, count, more in (
            ("whose input variance grew", grown, ""),
            ("with σ² > 1 at the end", large, f", largest {max(end):.3g}"),
        ):
            paper, agrees = ("several", count > 1) if studied else ("", None)
            yield Comparison(f"{what}: layers {name}", paper, f"{count} of {len(end)}{more}", agrees)
        for product, name in DEFINITIONS.items():
            if (normalizer == "none") == product.startswith("normalizers"):
                continue
            first, last = (group.track("products", product)[1][index] for index in (0, -1))
            paper, agrees = _said(network, product, last) if studied else ("", None)
            yield Comparison(f"{what}: {name}", paper, f"{power(first)} → {power(last)}", agrees)
        tight = group.mean("audit", "products", "normalizers_tight")
        if normalizer != "none":
            yield Comparison(f"{what}: ∏max|γ|/σ in eval mode", "", power(tight))


def _said(network: str, product: str, log10: float) -> tuple[str, bool | None]:
    """What the paper says of a product, and whether it is so: headlines for ResNet-18, else that one σ per layer makes it small."""
    if network == "resnet18" and product in HEADLINES:
        return power(HEADLINES[product]), abs(log10 - HEADLINES[product]) <= NEAR
    return ("exponentially small", log10 < 0) if product.endswith("_layer") else ("", None)


def plots(results: Results) -> dict[str, Plot]:
    drawn = {}
    for (network, normalizer), group in results.groups("network", "normalizer").items():
        part = _part(group)
        layers = list(group[0].numbers["history"][0][part])[:SHOWN]
        series = {f"σ²{index} ({layer})": group.track(part, layer, "input_variance") for index, layer in enumerate(layers, 1)}
        title = f"Variance before {part}, {network}, {normalizer}"
        drawn[f"variances-{network}-{normalizer}"] = Plot(title, "epoch", "σ²", series, log_y=True)
        definitions = {name: key for key, name in DEFINITIONS.items() if key.startswith(part)}
        series = {name: group.track("products", key) for name, key in definitions.items()}
        levels = {"the paper's ResNet-18": HEADLINE, "the slides": SLIDES} if (network, normalizer) == ("resnet18", "batch") else {}
        title = f"Product over layers by definition, {network}, {normalizer}"
        drawn[f"products-{network}-{normalizer}"] = Plot(title, "epoch", "log10 of the product", series, levels=levels)
    return drawn


def _part(group: Results) -> str:
    """Whose inputs the paper looks at: those of normalizers, of activations in a network without."""
    return "normalizers" if group[0].numbers["history"][0]["normalizers"] else "activations"


def _variances(group: Results, epoch: int) -> list[float]:
    part = _part(group)
    return [float(row["input_variance"]) for trial in group for row in trial.numbers["history"][epoch][part].values()]


EXPERIMENT = Experiment(
    name="input-variance",
    source="Than 2025, Figure 2",
    statement="Input variances grow past 1 in training, so that ∏1/σ is exponentially small, 10^-25 for ResNet-18 with 20 BN.",
    quick=QUICK,
    full=FULL,
    trials=with_and_without,
    measure=trained_numbers,
    judge=judge,
    plots=plots,
)
