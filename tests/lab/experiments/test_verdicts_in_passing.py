"""Verdicts follow from the numbers: a number that is changed past its limit turns the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from normscope.lab.experiment import Results, TrialResult, find

Make = Callable[..., Results]


def made(*trials: tuple[str, Mapping[str, Any], Mapping[str, Any]]) -> Results:
    """Results from (label, parameters, numbers)."""
    return Results([TrialResult(label, 0, parameters, dict(numbers)) for label, parameters, numbers in trials])


def by_normalizer(numbers: Mapping[str, Mapping[str, Any]], **parameters: Any) -> Results:
    return made(*((name, {"normalizer": name, **parameters}, found) for name, found in numbers.items()))


def adversarial(attacked: float = 0.3, noisy: float = 0.98, margin: float = 5.0) -> Results:
    shared = {"certified_radius": 0.01, "lower_log10": 1.0, "upper_log10": 2.0, "test_accuracy": 0.95}
    plain = {"attacked": {"0.1": 0.4}, "noisy": {"0.1": 0.95}, "margin": 4.0, **shared}
    return by_normalizer(
        {"none": plain, "batch": {"attacked": {"0.1": attacked}, "noisy": {"0.1": noisy}, "margin": margin, **shared}}
    )


def batch_leakage(batch: float = 0.9, layer: float = 0.5) -> Results:
    found = {"none": 0.5, "batch": batch, "layer": layer}
    return by_normalizer({name: {"blank_accuracy": a, "blank_eval_accuracy": 0.5, "chance": 0.5} for name, a in found.items()})


def bound_prediction(order: tuple[float, ...] = (1, 2, 3, 4), batch: float = 0.5) -> Results:
    """Four networks of falling gap; `order` is what is predicted of them."""
    gaps = (0.1, 0.2, 0.3, 0.4)
    names = ("none", "none", "batch", "batch")
    rows = []
    for name, gap, value in zip(names, gaps, order, strict=True):
        predicted = dict.fromkeys(("bound", "training", "local", "global", "gradient"), value)
        local = value if name == "none" else batch + value / 100
        rows.append((name, {"normalizer": name}, {"gap": gap, "predicted": {**predicted, "local": local}, "vacuous": True}))
    return made(*rows)


def capacity_count(upper: float = 1.0, lower: float = 0.5, product: float = -2.0) -> Results:
    def numbers(count: int, up: float, low: float, log10: float) -> dict[str, Any]:
        audit = {"products": {"normalizers_tight": log10}}
        return {"normalizers": count, "upper_log10": up, "lower_log10": low, "audit": audit, "gap_accuracy": 0.0}

    none, everything = numbers(0, 5.0, 2.0, 0.0), numbers(10, upper, lower, product)
    parameters = {"network": "mlp"}
    return made(("0", {**parameters, "share": 0.0}, none), ("1", {**parameters, "share": 1.0}, everything))


def dead_relus(batch: float = 0.0, plain: float = 0.2) -> Results:
    found = {"none": {"dead": plain, "test_accuracy": 0.9}, "batch": {"dead": batch, "test_accuracy": 0.9}}
    return by_normalizer(found, learning_rate=0.01)


def deep_linear(batch: float = 0.1, saddle: float = 2.3, flat: int = 5) -> Results:
    def trial(label: str, depth: int, normalizer: str, scale: float, loss: float, free: int) -> tuple[str, Any, Any]:
        parameters = {"depth": depth, "normalizer": normalizer, "initial_scale": scale}
        return label, parameters, {"train_loss": loss, "flat": free, "parameters": 100, "chance_loss": 2.3}

    return made(
        trial("1 layer", 1, "none", 1.0, 0.5, 0),
        trial("4 layers, none", 4, "none", 1.0, 0.5, 10),
        trial("4 layers, none, near 0", 4, "none", 0.3, saddle, 10),
        trial("4 layers, batch", 4, "batch", 1.0, batch, flat),
    )


def dropout_batchnorm(ratio: float = 1.5, still: float = 1.0, gain: float = -0.1) -> Results:
    def trial(normalizer: str, rate: float, accuracy: float, ratios: list[float]) -> tuple[str, Any, Any]:
        numbers = {"test_accuracy": accuracy, "corrected_test_accuracy": accuracy, "ratios": ratios}
        return f"{normalizer} {rate}", {"normalizer": normalizer, "dropout": rate}, numbers

    return made(
        trial("none", 0.0, 0.9, []), trial("none", 0.5, 0.9, []),
        trial("batch", 0.0, 0.9, [1.0, still]), trial("batch", 0.5, 0.9 + gain, [1.0, ratio]),
    )  # fmt: skip


def gradient_explosion(relu: float = 1.467, linear: float = 1.2, skip: float = 1.0) -> Results:
    factors = {"relu, BN": (relu, False), "linear, BN": (linear, False), "relu, BN, skip": (skip, True)}
    return made(*((label, {"batch_size": 8, "skip": skips}, {"factor": factor}) for label, (factor, skips) in factors.items()))


def radial_momentum(
    gradient: float = 1e-6, share: float = 1e-2, growth: float = 18.9, left: float = 1e-5, changed: float = 1e-8
) -> Results:
    numbers = {"gradient_share": gradient, "momentum_share": share, "growth": growth, "predicted": 18.9, "norm": 1.1}
    return made(("momentum", {"momentum": 0.9, "projected": False}, {**numbers, "speed_left": left, "loss_change": changed}))


def scale_cues(accuracy: float = 0.5, reliance: float = 0.1) -> Results:
    trials = []
    for name, right, relied in (("none", 0.99, 0.5), ("batch", accuracy, reliance)):
        trials.append((name, {"normalizer": name, "cue": "norm"}, {"test_accuracy": right}))
        trials.append((name, {"normalizer": name, "cue": "brightness"}, {"reliance": relied}))
    return made(*trials)


def sgd_adam(sgd_with: float = 0.96, sgd_without: float = 0.9) -> Results:
    found = {("none", "sgd"): sgd_without, ("none", "adam"): 0.95, ("batch", "sgd"): sgd_with, ("batch", "adam"): 0.96}
    trials = []
    for (normalizer, optimizer), accuracy in found.items():
        parameters = {"normalizer": normalizer, "optimizer": optimizer}
        trials.append(("good", {**parameters, "learning_rate": 0.1}, {"test_accuracy": accuracy, "train_loss": 0.1}))
        trials.append(("bad", {**parameters, "learning_rate": 1.0}, {"test_accuracy": 1.0, "train_loss": "nan"}))
    return made(*trials)


def small_batches(batch: float = 0.7, group: float = 0.94, renorm: float = 0.8) -> Results:
    tiny = {"batch": batch, "group": group, "renorm": renorm, "layer": 0.9}
    large = made(("large", {"normalizer": "batch", "batch_size": 128}, {"test_accuracy": 0.95}))
    small = by_normalizer({name: {"test_accuracy": accuracy} for name, accuracy in tiny.items()}, batch_size=2)
    return Results([*large, *small])


def shift_at_test(shifted: float = 0.4, adapted: float = 0.9) -> Results:
    def numbers(trained: float, corrected: float) -> dict[str, Any]:
        shifts = ("contrast", "brightness", "negative", "noise")
        values = {name: {"trained_accuracy": trained, "adapted_accuracy": corrected} for name in shifts}
        return {"shifts": {"none": {"trained_accuracy": 0.95, "adapted_accuracy": 0.95}, **values}}

    return by_normalizer({"none": numbers(0.8, 0.8), "batch": numbers(shifted, adapted)})


def whitening(bn_condition: float = 0.5, white: float = 0.1, bn_loss: float = 0.2, white_loss: float = 0.1) -> Results:
    found = {
        "none": ("none", False, 9.0, 0.5),
        "BN": ("batch", False, bn_condition, bn_loss),
        "w": ("batch", True, white, white_loss),
    }
    return made(
        *(
            (label, {"normalizer": name, "whiten": whiten, "learning_rate": 0.1},
             {"log10_conditions": [condition], "train_loss": loss, "test_accuracy": 0.9})
            for label, (name, whiten, condition, loss) in found.items()
        )
    )  # fmt: skip


MAKERS: dict[str, Make] = {
    "adversarial": adversarial,
    "batch-leakage": batch_leakage,
    "bound-prediction": bound_prediction,
    "capacity-count": capacity_count,
    "dead-relus": dead_relus,
    "deep-linear": deep_linear,
    "dropout-batchnorm": dropout_batchnorm,
    "gradient-explosion": gradient_explosion,
    "radial-momentum": radial_momentum,
    "scale-cues": scale_cues,
    "sgd-adam": sgd_adam,
    "small-batches": small_batches,
    "test-shift": shift_at_test,
    "whitening": whitening,
}

TURNS: list[tuple[str, dict[str, Any], str]] = [
    ("adversarial", {"attacked": 0.5}, "some: BN slightly reduces"),
    ("adversarial", {"attacked": 0.39}, "some: BN slightly reduces"),
    ("adversarial", {"noisy": 0.9}, "random noise"),
    ("adversarial", {"margin": 3.0}, "mean margin"),
    ("batch-leakage", {"batch": 0.52}, "batch: accuracy on blank samples in their batch"),
    ("batch-leakage", {"layer": 0.9}, "layer: accuracy on blank samples in their batch"),
    ("bound-prediction", {"order": (4, 3, 2, 1)}, "value of Theorem 20"),
    ("bound-prediction", {"order": (1, 1, 1, 1)}, "value of Theorem 20"),
    ("bound-prediction", {"batch": 5.0}, "none → batch"),
    ("capacity-count", {"upper": 5.5}, "certified upper bound"),
    ("capacity-count", {"lower": 1.9}, "witnessed lower bound"),
    ("capacity-count", {"product": 0.7}, "∏max"),
    ("dead-relus", {"batch": 0.1}, "with BN"),
    ("dead-relus", {"plain": 0.0}, "without"),
    ("deep-linear", {"batch": 1.0}, "4 layers, batch"),
    ("deep-linear", {"saddle": 1.0}, "near 0"),
    ("deep-linear", {"flat": 11}, "flat directions"),
    ("dropout-batchnorm", {"ratio": 1.05}, "dropout 0.5: variance"),
    ("dropout-batchnorm", {"still": 1.5}, "dropout 0: variance"),
    ("dropout-batchnorm", {"gain": -0.01}, "what dropout adds"),
    ("gradient-explosion", {"relu": 1.2}, "relu, BN:"),
    ("gradient-explosion", {"linear": 1.0}, "linear, BN:"),
    ("gradient-explosion", {"skip": 1.3}, "skip"),
    ("radial-momentum", {"gradient": 0.1, "share": 0.5}, "part of the gradient"),
    ("radial-momentum", {"share": 1e-7}, "part of the momentum"),
    ("radial-momentum", {"growth": 10.0}, "growth"),
    ("radial-momentum", {"left": 0.5}, "speed left"),
    ("radial-momentum", {"changed": 0.1}, "change of the loss"),
    ("scale-cues", {"accuracy": 0.98}, "batch: accuracy where ‖x‖ alone tells"),
    ("scale-cues", {"reliance": 0.6}, "batch: accuracy that brightness decides"),
    ("sgd-adam", {"sgd_with": 0.9}, "with BN: test accuracy"),
    ("sgd-adam", {"sgd_without": 0.95}, "without BN: test accuracy"),
    ("sgd-adam", {"sgd_with": 0.8}, "Adam's lead"),
    ("small-batches", {"batch": 0.945}, "BN: test accuracy"),
    ("small-batches", {"group": 0.7}, "group normalization"),
    ("small-batches", {"renorm": 0.71}, "batch renormalization"),
    ("test-shift", {"shifted": 0.8}, "accuracy lost"),
    ("test-shift", {"adapted": 0.4}, "statistics of training"),
    ("whitening", {"bn_condition": 3.0}, "BN: condition number"),
    ("whitening", {"white": 2.0}, "whitening: condition number"),
    ("whitening", {"bn_loss": 0.6}, "BN: training loss"),
    ("whitening", {"white_loss": 0.3}, "whitening: training loss"),
]


def agrees(name: str, row: str, **changes: Any) -> bool | None:
    """What the experiment says of the first row that is called so."""
    rows = list(find(name).judge(MAKERS[name](**changes)))
    return next(comparison.agrees for comparison in rows if row in f"{comparison.quantity} ({comparison.paper})")


@pytest.mark.parametrize(("name", "changes", "row"), TURNS)
def test_a_changed_number_turns_the_verdict(name: str, changes: dict[str, Any], row: str) -> None:
    assert agrees(name, row) is True
    assert agrees(name, row, **changes) is False
