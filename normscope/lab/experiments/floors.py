"""The floor of BN on trained networks: how far above it the product of the layers' constants is, by depth and with γ or without."""

from __future__ import annotations

from dataclasses import dataclass, replace

from normscope.auditing import audit
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, power
from normscope.lab.recalibration import recalibrated
from normscope.lab.training import Training, TrainingSettings, ends, train
from normscope.lab.workspace import Workspace

FROZEN = {"γ and β": (), "neither": ("scale", "shift")}  # → what is not trained


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """depths: of the networks, Linear → BN → ReLU and a head. width: of their layers."""

    depths: tuple[int, ...] = (3, 6, 12)
    width: int = 32


def trials(settings: Settings, seed: int) -> dict[str, Training]:
    def training(depth: int, frozen: tuple[str, ...]) -> Training:
        made = settings.training("mlp", "batch", seed, frozen=frozen)
        return replace(made, options={"width": settings.width, "depth": depth})

    return {f"depth {depth}, {name}": training(depth, frozen) for depth in settings.depths for name, frozen in FROZEN.items()}


def measure(training: Training, workspace: Workspace) -> Numbers:
    """The floor and the product up to the last BN, its statistics those of the training data."""
    trained = train(training, workspace)
    inputs = trained.split.train[0]
    model = recalibrated(trained.model, inputs)
    found = audit(model, inputs[:2], data=inputs, effort=0.1, generator=workspace.generator("audit"), local=False).floor
    assert found is not None, "a chain with the data's statistics has a floor"
    return {**ends(trained), "floor_log10": found.value.log10, "product_log10": found.product.log10}


def judge(results: Results) -> list[Comparison]:
    rows = []
    for label, group in results.by_label().items():
        floor, made, accuracy = group.mean("floor_log10"), group.mean("product_log10"), group.mean("test_accuracy")
        ours = f"product {power(made)}, floor {power(floor)}; test accuracy {accuracy:.3f}"
        above = all(trial.numbers["product_log10"] >= trial.numbers["floor_log10"] for trial in group)
        rows.append(Comparison(f"{label}: ∏‖ΓD⁻¹W‖", "above the floor", ours, above))
    return rows


def plots(results: Results) -> dict[str, Plot]:
    groups = results.by_label()
    series = {
        name: (list(groups), [group.mean(path) for group in groups.values()])
        for name, path in (("product", "product_log10"), ("floor", "floor_log10"))
    }
    return {"floors": Plot("Product of layer constants and its floor", "trial", "log10", series, kind="bars")}


EXPERIMENT = Experiment(
    name="floors",
    source="our answer to Than 2025, Section 6 (docs/open-questions.md)",
    statement="No weights bring the product of a chain with BN below ‖γ_K‖/√tr Cov x, whatever the depth.",
    quick=Settings(epochs=10),
    full=Settings(epochs=60, depths=(3, 6, 12, 24), width=128, seeds=(0, 1, 2)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
