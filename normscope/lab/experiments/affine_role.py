"""What γ and β do to the constants and to generalization: Than 2025 leaves them out, and asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from normscope.lab.experiment import Comparison, Experiment, Plot, Results, power
from normscope.lab.training import Training, TrainingSettings, trained_numbers, with_and_without

VARIANTS = {"γ and β": (), "γ alone": ("shift",), "β alone": ("scale",), "neither": ("scale", "shift")}  # → what is frozen
NUMBERS = {
    "∏max|γ|/σ": ("audit", "products", "normalizers_tight"),
    "∏1/σ per layer": ("audit", "products", "normalizers_layer"),
    "∏‖W‖": ("audit", "products", "weights_matrix"),
    "certified constant": ("audit", "bracket", "upper_log10"),
}
USUAL = TrainingSettings(normalizers=("batch", "layer"))  # each trained with and without γ and β


def trials(settings: TrainingSettings, seed: int) -> dict[str, Training]:
    return with_and_without(settings, seed, {f", {variant}": {"frozen": frozen} for variant, frozen in VARIANTS.items()})


def judge(results: Results) -> Iterator[Comparison]:
    for label, group in results.by_label().items():
        constants = ", ".join(f"{name} {power(group.mean(*path))}" for name, path in NUMBERS.items())
        yield Comparison(f"{label}: constants", "", constants)
        ends = f"test accuracy {group.mean('test_accuracy'):.3f}, gap of the loss {group.mean('gap_loss'):.3f}"
        yield Comparison(f"{label}: generalization", "", ends)


def plots(results: Results) -> dict[str, Plot]:
    groups = results.by_label()
    constants = {name: (list(groups), [group.mean(*path) for group in groups.values()]) for name, path in NUMBERS.items()}
    gaps = {"gap": (list(groups), [group.mean("gap_loss") for group in groups.values()])}
    return {
        "constants": Plot("Constants with and without γ and β", "trial", "log10", constants, kind="bars"),
        "gap": Plot("Generalization gap with and without γ and β", "trial", "test loss − training loss", gaps, kind="bars"),
    }


EXPERIMENT = Experiment(
    name="affine-role",
    source="Than 2025, Section 6, the first open question",
    statement="The role of γ and β for the constants and for generalization is unclear.",
    quick=replace(USUAL, networks={"mlp": {"width": 64, "depth": 10}}, images=400, epochs=60),
    full=replace(USUAL, networks={"mlp": {"width": 512, "depth": 10}, "resnet18": {"stem": "imagenet"}}),
    trials=trials,
    measure=trained_numbers,
    judge=judge,
    plots=plots,
)
