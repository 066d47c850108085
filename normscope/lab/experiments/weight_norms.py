"""Figure 1 of Than 2025: norms of weights and their product while a network is trained."""

from __future__ import annotations

from collections.abc import Iterator

from normscope.lab.experiment import Comparison, Experiment, Plot, Results, power
from normscope.lab.training import TrainingSettings, trained_numbers, with_and_without

HEADLINE = 50.0  # log10 of ∏‖W‖ of ResNet-18 in the paper
NEAR = 5.0  # decades within which a headline is reproduced
NEAR_ONE = 0.95  # an accuracy
GROWN = 2.0  # decades that are orders of magnitude
SHOWN = 11  # layers, as in the paper's figure
PRODUCTS = {"weights_matrix": "∏‖W‖, spectral, as matrices", "weights_frobenius": "∏‖W‖_F"}
STUDIED = (("mlp", "none"), ("resnet18", "batch"), ("efficientnet-b3", "batch"))  # by the paper; of others it says nothing

QUICK = TrainingSettings(networks={"mlp": {"width": 64, "depth": 10, "epochs": 60}, "resnet18": {"stem": "imagenet", "epochs": 6}})
FULL = TrainingSettings(networks={"mlp": {"width": 512, "depth": 10}, "resnet18": {"stem": "imagenet"}})


def judge(results: Results) -> Iterator[Comparison]:
    for (network, normalizer), group in results.groups("network", "normalizer").items():
        what = f"{network}, {normalizer}"
        norms = _final_norms(group)
        large = sum(norm > 1 for norm in norms)
        studied = (network, normalizer) in STUDIED
        paper, agrees = ("most", large > len(norms) / 2) if studied else ("", None)
        yield Comparison(f"{what}: layers with ‖W‖ > 1", paper, f"{large} of {len(norms)}, largest {max(norms):.3g}", agrees)
        for product, name in PRODUCTS.items():
            start, end = (group.track("products", product)[1][index] for index in (0, -1))
            paper, agrees = _said(network, start, end) if studied and product == "weights_matrix" else ("", None)
            yield Comparison(f"{what}: {name}", paper, f"{power(start)} → {power(end)}", agrees)
        operators = group.mean("audit", "products", "weights_spectral")
        yield Comparison(f"{what}: ∏‖W‖, as operators on their inputs", "", power(operators))
        lower, upper = (power(group.mean("audit", "bracket", end)) for end in ("lower_log10", "upper_log10"))
        yield Comparison(f"{what}: certified bracket of the whole network", "", f"{lower} to {upper}")
        accuracy = group.mean("train_accuracy")
        paper, agrees = ("near 1", accuracy > NEAR_ONE) if studied else ("", None)
        yield Comparison(f"{what}: training accuracy", paper, f"{accuracy:.3f}", agrees)
        yield Comparison(f"{what}: test accuracy", "", f"{group.mean('test_accuracy'):.3f}")


def _said(network: str, start: float, end: float) -> tuple[str, bool]:
    """What the paper says of a product of spectral norms that has gone from one log10 to another, and whether it has."""
    if network == "resnet18":
        return f"up to 10^{HEADLINE:.0f}", abs(end - HEADLINE) <= NEAR
    return "grows by orders of magnitude", end - start >= GROWN


def plots(results: Results) -> dict[str, Plot]:
    groups = {f"{network}, {normalizer}": group for (network, normalizer), group in results.groups("network", "normalizer").items()}
    drawn = {
        "products": Plot(
            "Product of the weights' spectral norms", "epoch", "log10 ∏‖W‖",
            {what: group.track("products", "weights_matrix") for what, group in groups.items()},
            levels={"the paper's ResNet-18": HEADLINE} if results.where(network="resnet18", normalizer="batch") else {},
        ),
        "accuracy": Plot(
            "Training accuracy", "epoch", "accuracy",
            {what: _without_start(group.track("train_accuracy")) for what, group in groups.items()},
        ),
    }  # fmt: skip
    for what, group in groups.items():
        layers = list(group[0].numbers["history"][0]["weights"])[:SHOWN]
        series = {f"W{index} ({layer})": group.track("weights", layer, "spectral_norm") for index, layer in enumerate(layers, 1)}
        drawn[f"norms-{what.replace(', ', '-')}"] = Plot(
            f"Spectral norms of the weights, {what}", "epoch", "‖W‖", series, log_y=True
        )
    return drawn


def _final_norms(group: Results) -> list[float]:
    """The spectral norms of all layers at the end, over all seeds."""
    return [float(row["spectral_norm"]) for trial in group for row in trial.numbers["history"][-1]["weights"].values()]


def _without_start(track: tuple[list[int], list[float]]) -> tuple[list[int], list[float]]:
    """Before the first step there is no training accuracy."""
    return track[0][1:], track[1][1:]


EXPERIMENT = Experiment(
    name="weight-norms",
    source="Than 2025, Figure 1",
    statement="Norms of weights exceed 1 in training and their product becomes astronomically large, 10^50 for ResNet-18.",
    quick=QUICK,
    full=FULL,
    trials=with_and_without,
    measure=trained_numbers,
    judge=judge,
    plots=plots,
)
