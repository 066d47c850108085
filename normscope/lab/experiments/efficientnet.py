"""Figure 3 of Than 2025: norms of weights and input variances of EfficientNet-B3 while it is trained."""

from __future__ import annotations

from normscope.lab.experiment import Comparison, Experiment, Plot, Results
from normscope.lab.experiments import input_variance, weight_norms
from normscope.lab.training import TrainingSettings, trained_numbers, with_and_without


def judge(results: Results) -> list[Comparison]:
    return [*weight_norms.judge(results), *input_variance.judge(results)]


def plots(results: Results) -> dict[str, Plot]:
    weights = {f"weights-{name}": plot for name, plot in weight_norms.plots(results).items()}
    return {**weights, **{f"inputs-{name}": plot for name, plot in input_variance.plots(results).items()}}


EXPERIMENT = Experiment(
    name="efficientnet",
    source="Than 2025, Figure 3",
    statement="Weight norms and input variances of EfficientNet-B3 consistently grow in training, to huge products.",
    quick=TrainingSettings(networks={"efficientnet-b3": {}}, normalizers=("batch",), epochs=2),
    full=TrainingSettings(networks={"efficientnet-b3": {}}, normalizers=("batch",)),
    trials=with_and_without,
    measure=trained_numbers,
    judge=judge,
    plots=plots,
)
