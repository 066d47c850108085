"""What the papers assert in passing: every experiment runs to a verdict and figures, tiny by default and as shipped in full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normscope.core.errors import InputError
from normscope.lab.runner import INCOMPLETE, load_experiment, run_experiment

ONE_SEED = {"seeds": "0"}
SHORT = {**ONE_SEED, "epochs": "1", "images": "64"}
SMALL = {**SHORT, "networks": '{"mlp":{"width":8,"depth":3}}'}
TINY = {
    "adversarial": {**SMALL, "attacked": "20", "certified": "1"},
    "batch-leakage": SMALL,
    "bound-prediction": {**SHORT, "depths": "2", "widths": "8"},
    "capacity-count": {
        **SHORT,
        "networks": '{"mlp":{"width":8,"depth":3,"skip":true},"vit":{"patch":4,"width":8,"depth":1,"heads":2}}',
        "shares": "0.0,1.0",
    },
    "capacity-penalty": {**SMALL, "penalties": "0.0,0.1"},
    "dead-relus": {**SMALL, "rates": "0.001"},
    "decay-and-normalizer": {**SMALL, "decays": "0.0,0.01"},
    "deep-linear": {**SHORT, "networks": '{"mlp":{"width":4,"activation":"linear"}}', "depths": "2"},
    "dropout-batchnorm": {**SMALL, "rates": "0.0,0.5"},
    "floors": {**SHORT, "depths": "2,4", "width": "8"},
    "gradient-explosion": {**ONE_SEED, "width": "16", "depth": "12", "batch_size": "16"},
    "prenorm-depth": {**SHORT, "networks": '{"gpt":{"width":4,"heads":2},"vit":{"width":4,"heads":2,"patch":4}}', "depths": "1,2"},
    "radial-momentum": {"steps": "20", "width": "8", "depth": "3", "momenta": "0.0,0.9"},
    "scale-cues": SMALL,
    "sgd-adam": {**SMALL, "sgd_rates": "0.01", "adam_rates": "0.001"},
    "small-batches": {**SMALL, "normalizers": "batch,group", "sizes": "2,32"},
    "test-shift": SMALL,
    "whitening": {**SMALL, "rates": "0.1"},
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", TINY)
def test_runs_to_a_verdict(name: str, tmp_path: Path) -> None:
    outcome = run_experiment(name, settings=TINY[name], out=tmp_path)
    assert outcome.verdict != INCOMPLETE and outcome.comparisons and name in str(outcome)
    assert load_experiment(name, out=tmp_path).content == outcome.content
    for figure in outcome.content["figures"]:
        assert json.loads((tmp_path / name / "figures" / f"{figure}.json").read_text())["data"]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "name", ["batch-leakage", "scale-cues", "test-shift", "whitening", "deep-linear", "sgd-adam", "dead-relus"]
)
def test_a_normalizer_that_is_left_out_decides_nothing(name: str, tmp_path: Path) -> None:
    alone = {**TINY[name], "normalizers": "none"}
    rows = run_experiment(name, settings=alone, out=tmp_path).comparisons
    assert all(row.agrees is None for row in rows if "nan" in row.ours)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("adversarial", {"certified": "0"}, "must be at least 1"),
        ("gradient-explosion", {"depth": "4"}, "depth of at least 6"),
        ("gradient-explosion", {"small_batch": "3"}, "batches of at least 4"),
        ("radial-momentum", {"momenta": "0.5,1.0"}, "from 0 to below 1"),
        ("radial-momentum", {"steps": "0"}, "at least 1"),
        ("small-batches", {"sizes": "1,128"}, "at least 2"),
        ("capacity-count", {"normalizers": "batch"}, "one per network: 2, got 1"),
        ("dropout-batchnorm", {"rates": "1.0"}, "less than 1"),
        ("capacity-penalty", {"penalties": "0.1"}, "must hold 0 and at least one other"),
        ("decay-and-normalizer", {"decays": "0.0"}, "must hold 0 and at least one other"),
        ("prenorm-depth", {"networks": '{"mlp":{}}'}, "about transformers, gpt and vit, not mlp"),
        ("conditioning", {"normalizers": "batch"}, "must hold none and at least one other"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(name: str, changes: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        run_experiment(name, settings=changes, out=tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
