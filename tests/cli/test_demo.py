"""`normscope demo`: three networks that differ in the normalizer, one table, and sentences that follow from its numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.cli import demo
from normscope.cli.demo import DemoNetwork
from normscope.curvature.sharpness import Sharpness
from normscope.curvature.spectrum import Condition, Eigenpair
from normscope.digits import digits
from normscope.ledger import LayerRow
from tests.cli.commands import normscope

KEYS = ("gain", "gain_paper", "gain_paper_affine", "gain_layer")


def run(runs: Path, *words: str) -> str:
    result = normscope("demo", "--runs", str(runs), *words)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found() -> dict[str, DemoNetwork]:
    """Filled by the demo that `content` runs."""
    return {}


@pytest.fixture(scope="module")
def content(runs: Path, found: dict[str, DemoNetwork]) -> dict[str, Any]:
    before, as_json = torch.random.get_rng_state(), demo.as_json

    def seen(networks: dict[str, DemoNetwork], seed: int, epochs: int) -> str:
        found.update(networks)
        return as_json(networks, seed, epochs)

    with pytest.MonkeyPatch.context() as patch:  # what is asserted of it does not depend on how long was searched
        patch.setattr(demo, "EFFORT", 0.1)
        patch.setattr(demo, "CURVED", 64)
        patch.setattr(demo, "as_json", seen)
        parsed: dict[str, Any] = json.loads(run(runs, "--epochs", "2", "--json"))
    assert torch.equal(torch.random.get_rng_state(), before)
    return parsed


@pytest.mark.usefixtures("content")
def test_one_table_that_fits_and_says_how_to_go_on(
    runs: Path, found: dict[str, DemoNetwork], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command again, with the networks that are trained and audited already."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    (tmp_path / "report.html").unlink()
    monkeypatch.setattr(demo, "train", lambda _data, normalizer, *_, **__: normalizer)
    by_normalizer = {normalizer: found[name] for name, normalizer in demo.NETWORKS.items()}
    monkeypatch.setattr(ns, "audit", lambda network, *_, **__: by_normalizer[network].audit)
    monkeypatch.setattr(demo, "accuracy", lambda network, _: by_normalizer[network].accuracy)
    monkeypatch.setattr(demo, "curvature", lambda network, _: by_normalizer[network].sharpness)
    printed = run(tmp_path, "--epochs", "2")
    assert max(map(len, printed.splitlines())) <= 100
    for words in ("plain", "with BN", "with LN", "accuracy", "at least", "at most", "tight", "paper", "1/σ", "normscope audit"):
        assert words in printed
    joined = "".join(line.strip() for line in printed.splitlines())  # a long path is folded
    assert str(tmp_path / "report.html") in joined and f"normscope serve {tmp_path}" in joined
    assert "3 runs: plain, BN, LN" in (tmp_path / "report.html").read_text()


def test_json_holds_the_three_audits(content: dict[str, Any]) -> None:
    kinds = {name: {row["kind"] for row in network["audit"]["layers"]} for name, network in content["networks"].items()}
    assert kinds == {"plain": {"linear"}, "BN": {"linear", "batch_norm"}, "LN": {"linear", "layer_norm"}}
    for network in content["networks"].values():
        bracket = network["audit"]["bracket"]
        assert 0 <= network["accuracy"] <= 1 and bracket["lower_log10"] <= bracket["upper_log10"]
        assert len([row for row in network["audit"]["layers"] if row["kind"] == "linear"]) == 10
    assert content["setting"] == {"width": 128, "depth": 10, "epochs": 2, "seed": 0}


def test_the_three_trainings_are_recorded(content: dict[str, Any], runs: Path) -> None:
    for name in content["networks"]:
        recorded = ns.load_run(runs / name)
        assert recorded.table()["step"].to_pylist()[0] == 1 and not recorded.events("error")
        assert len([layer for layer in recorded.layers if layer["in_product"]]) == 10
        assert [layer["role"] for layer in recorded.layers].count("normalizer") == (0 if name == "plain" else 9)


def test_the_same_seed_gives_the_same_numbers(content: dict[str, Any], runs: Path) -> None:
    again = demo.train(digits()[0], "batch", seed=0, epochs=2, run=runs / "BN")
    assert demo.accuracy(again, digits()[1]) == content["networks"]["BN"]["accuracy"]


def test_one_thread_and_then_as_many_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError), demo.one_thread():
            assert torch.get_num_threads() == 1
            raise RuntimeError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_plain_network_trains(tmp_path: Path) -> None:
    learned, unseen = digits()
    assert demo.accuracy(demo.train(learned, "none", seed=0, epochs=8, run=tmp_path), unseen) > 0.9


def trained(gains: list[float], lower: float = 1.0, upper: float = 100.0, accuracy: float = 0.9) -> DemoNetwork:
    """A network with one normalizer of the given gains and one linear layer of norm 1."""
    audit = ns.audit(nn.Linear(3, 2), torch.zeros(1, 3), effort=0.1)
    row = LayerRow("normalizer", "batch_norm", **{key: ns.Magnitude(gain) for key, gain in zip(KEYS, gains, strict=False)})
    bracket = replace(audit.bracket, lower=ns.Magnitude(lower), upper=ns.Magnitude(upper))
    sharpness = Sharpness(Eigenpair(2.0, 0.0, {}), Condition(10.0, 1e-6, False), False)
    return DemoNetwork(accuracy, replace(audit, bracket=bracket, layers=(row,)), sharpness)


@pytest.mark.parametrize(
    ("gains", "cells", "said"),
    [
        ([0.01] * 4, "removes 10^2.0", "all four say that it removes"),
        ([1000.0] * 4, "adds 10^3.0", "all four say that it adds"),
        ([0.1, 10, 10, 10], "removes 10^1.0", "1 of four say that it removes"),
        ([1.0] * 4, "changes nothing", "from 10^0.0"),
    ],
)
def test_verdicts_follow_the_numbers(gains: list[float], cells: str, said: str) -> None:
    found = {"plain": trained([]), "BN": trained(gains), "LN": trained([1.0] * 4)}
    assert demo.effect(found["BN"].audit, "normalizers_tight") == cells
    assert demo.effect(found["plain"].audit, "normalizers_tight") == "–"
    assert said in " ".join(demo.sentences(found))


@pytest.mark.parametrize(
    ("upper", "said"),
    [(100.0, "about as large"), (300.0, "3.0 times larger"), (1e6, "10^4.0 times larger"), (10.0, "10.0 times smaller")],
)
def test_the_comparison_of_bounds_follows_the_numbers(upper: float, said: str) -> None:
    found = {"plain": trained([]), "BN": trained([1.0] * 4, upper=upper), "LN": trained([1.0] * 4)}
    assert f"With BN the proved bound is {said}" in " ".join(demo.sentences(found))
