"""Experiment 3 of Akbar: margins on the training points, and accuracy there under noise in the weights, with and without BN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from normscope.bounds.flatness import flatness
from normscope.bounds.margins import margins
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, side_by_side
from normscope.lab.training import Training, TrainingSettings, ends, train, with_and_without
from normscope.lab.workspace import Workspace

BINS = 30
SIGMAS = tuple(float(sigma) for sigma in np.logspace(-2, 0.5, 11))
NOISE = {"plain": "noise σ", "filter": "noise σ relative to filters", "quotient": "noise σ with symmetries divided out"}
USUAL = TrainingSettings(
    data="products",
    networks={"mlp": {"width": 20, "depth": 2}},
    seeds=(0, 1, 2),
    unit_ball=False,
    learning_rate=0.01,
    weight_decay=0.0,
    batch_size=100,
    epochs=130,
)


def measure(training: Training, workspace: Workspace) -> Numbers:
    trained = train(training, workspace)
    found = margins(trained.model, trained.split.train)
    noisy = flatness(trained.model, trained.split.train, sigmas=SIGMAS, kinds=tuple(NOISE), seed=training.seed)
    return {
        **ends(trained),
        "mean": float(found.values.mean()),
        "deviation": float(found.values.std()),
        "normalized_mean": float(found.normalized.mean()),
        "margins": found.values.tolist(),
        "tolerance": {kind: noisy[kind].tolerance() for kind in NOISE},
        "accuracies": {kind: noisy[kind].accuracies.mean(1).tolist() for kind in NOISE},
    }


def judge(results: Results) -> Iterator[Comparison]:
    for (network,), own in results.groups("network").items():
        yield _compared(
            own, f"{network}: training accuracy", "1 in both", lambda bn, plain: min(bn, plain) > 0.999, "train_accuracy"
        )
        yield _compared(own, f"{network}: mean margin", "1.8 BN, 1.2 no BN", _larger, "mean")
        yield _compared(own, f"{network}: deviation of the margins", "smaller with BN", lambda bn, plain: bn < plain, "deviation")
        yield _compared(own, f"{network}: mean margin over √2 times the certified constant", "", None, "normalized_mean")
        yield _compared(own, f"{network}: test accuracy", "", None, "test_accuracy")
        for kind, name in NOISE.items():
            paper, says = ("larger with BN", _larger) if kind == "plain" else ("", None)
            yield _compared(own, f"{network}: {name}, that costs a tenth of the accuracy", paper, says, "tolerance", kind)


def _larger(with_bn: float, without: float) -> bool:
    return with_bn > without


def _compared(own: Results, quantity: str, paper: str, says: Callable[[float, float], bool] | None, *path: str) -> Comparison:
    """A number with and without BN, and whether the two are as the paper says."""
    with_bn, without = (own.where(normalizer=kind).mean(*path) for kind in ("batch", "none"))
    return Comparison(quantity, paper, side_by_side(with_bn, without), None if says is None else says(with_bn, without))


def plots(results: Results) -> dict[str, Plot]:
    drawn = {}
    for (network,), own in results.groups("network").items():
        first = {kind: group[0].numbers for (kind,), group in own.groups("normalizer").items()}
        edges = np.histogram_bin_edges([value for numbers in first.values() for value in numbers["margins"]], BINS)
        middles = ((edges[1:] + edges[:-1]) / 2).tolist()
        counts = {kind: (middles, np.histogram(numbers["margins"], edges)[0].tolist()) for kind, numbers in first.items()}
        drawn[f"margins-{network}"] = Plot(f"Margins on the training points, {network}", "margin", "points", counts, "bars")
        series = {
            f"{kind}, {name}": (SIGMAS, numbers["accuracies"][noise])
            for kind, numbers in first.items()
            for noise, name in NOISE.items()
        }
        title = f"Training accuracy under noise in the weights, {network}"
        drawn[f"noise-{network}"] = Plot(title, "σ", "accuracy", series, "lines+points", log_x=True)
    return drawn


EXPERIMENT = Experiment(
    name="margins",
    source="Akbar, Experiment 3 and Figure 8.2",
    statement="With BN the mean margin is 1.8 instead of 1.2, margins are more uniform, accuracy survives more noise in weights.",
    quick=USUAL,
    full=replace(USUAL, seeds=tuple(range(10)), epochs=1000),
    trials=with_and_without,
    measure=measure,
    judge=judge,
    plots=plots,
)
