"""Experiments: finished trials are kept, the numbers do not depend on where they are run, and what fails is tried again and told."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normscope.core.errors import InputError
from normscope.lab import runner
from normscope.lab.datasets import DATASETS
from normscope.lab.executors import InProcess, Processes
from normscope.lab.experiment import Comparison, Results, Settings, TrialResult, experiments, find
from normscope.lab.runner import judged, load_experiment, run_experiment, run_trials, verdict
from normscope.lab.tasks import Failure, Record, Task, tasks

TINY = {"networks": '{"mlp":{"width":8,"depth":3}}', "epochs": "2", "images": "200"}
SLOW = {**TINY, "epochs": "25", "images": "1400"}
PATIENCE = 300  # seconds, for processes that should have ended


def trial_records(out: Path) -> dict[str, object]:
    """What each trial measured, without how long it took."""
    found = {}
    for path in sorted((out / "trials").glob("*/result.json")):
        record = json.loads(path.read_text())
        found[path.parent.name] = {name: value for name, value in record.items() if name != "seconds"}
    return found


class Recording:
    """An executor that remembers what it was asked to run."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, tasks: Sequence[Task], progress: object) -> Iterator[tuple[Task, Record | Failure]]:
        self.asked += [task.label for task in tasks]
        yield from InProcess().run(tasks, lambda done: None)


def test_a_setting_that_is_given_holds_for_every_network() -> None:
    experiment = find("weight-norms")
    changed = experiment.quick.changed({"epochs": "3"})
    assert {trial.epochs for trial in experiment.trials(changed, 0).values()} == {3}
    own = experiment.quick.changed({"epochs": "3", "networks": '{"mlp":{"epochs":2}}'})
    assert {trial.epochs for trial in experiment.trials(own, 0).values()} == {2}, "unless the network is given its own, too"


@pytest.mark.full
def test_a_trial_that_two_processes_want_is_run_once(tmp_path: Path) -> None:
    experiment = find("weight-norms")
    task, *_ = tasks(experiment, experiment.quick.changed(TINY), tmp_path, None, threads=1)
    first, second = (record for _, record in Processes(2).run([task, task], lambda done: None))
    assert first == second, "the time that it took included"


def test_an_experiment_writes_its_result_and_figures(tmp_path: Path) -> None:
    outcome = run_experiment("weight-norms", settings=TINY, out=tmp_path)
    content = json.loads((tmp_path / "weight-norms" / "result.json").read_text())
    assert content == json.loads(outcome.to_json())
    assert {"settings", "versions", "comparisons", "verdict", "trials", "statement", "figures"} <= set(content)
    assert content["settings"]["seeds"] == [0] and not content["failures"]
    for name in content["figures"]:
        assert (tmp_path / "weight-norms" / "figures" / f"{name}.html").stat().st_size > 1000
        json.loads((tmp_path / "weight-norms" / "figures" / f"{name}.json").read_text())
    assert load_experiment("weight-norms", out=tmp_path).content == outcome.content
    assert "mlp, batch" in str(outcome)


def test_finished_trials_are_kept_and_shared(tmp_path: Path) -> None:
    first, second, third = Recording(), Recording(), Recording()
    run_experiment("weight-norms", settings=TINY, out=tmp_path, executor=first)
    run_experiment("input-variance", settings=TINY, out=tmp_path, executor=second)
    run_experiment("weight-norms", settings={**TINY, "epochs": "3"}, out=tmp_path, executor=third)
    assert first.asked == third.asked == ["mlp none", "mlp batch"] and second.asked == []


def test_trials_of_another_version_are_other_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_experiment("weight-norms", settings=TINY, out=tmp_path)
    monkeypatch.setattr("normscope.lab.tasks.__version__", "0.0.1")
    again = Recording()
    run_experiment("weight-norms", settings=TINY, out=tmp_path, executor=again)
    assert again.asked == ["mlp none", "mlp batch"]


@pytest.mark.quick(2)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 10**5, b'{"numbers": {}}'], ids=repr)
def test_a_damaged_trial_is_run_again(tmp_path: Path, content: bytes) -> None:
    name = "weight-norms"
    first = run_experiment(name, settings=TINY, out=tmp_path)
    whole = trial_records(tmp_path)
    (damaged, *_) = sorted((tmp_path / "trials").iterdir())
    for file in ("result.json", "checkpoint.pt", "progress.json"):
        (damaged / file).write_bytes(content)
    (tmp_path / name / "result.json").write_bytes(b"")
    with pytest.raises(InputError, match="is damaged: run the experiment again"):
        load_experiment(name, out=tmp_path)
    again = Recording()
    assert run_experiment(name, settings=TINY, out=tmp_path, executor=again).comparisons == first.comparisons
    assert len(again.asked) == 1 and trial_records(tmp_path) == whole


def test_fresh_runs_again(tmp_path: Path) -> None:
    run_experiment("weight-norms", settings=TINY, out=tmp_path)
    again = Recording()
    run_experiment("weight-norms", settings=TINY, out=tmp_path, executor=again, fresh=True)
    assert len(again.asked) == 2


@pytest.mark.full
def test_processes_measure_what_one_process_does(tmp_path: Path) -> None:
    seen: list[float] = []
    for workers in (1, 2):
        run_experiment(
            "weight-norms",
            settings=TINY,
            out=tmp_path / str(workers),
            workers=workers,
            progress=lambda done, total: seen.append(done / total),
        )
    assert trial_records(tmp_path / "1") == trial_records(tmp_path / "2") != {}
    assert seen[-1] == 1


class Flaky:
    """Fails every trial the first `failures` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def run(self, tasks: Sequence[Task], progress: object) -> Iterator[tuple[Task, Record | Failure]]:
        self.failures -= 1
        if self.failures >= 0:
            yield from ((task, Failure(task, "lost")) for task in tasks)
        else:
            yield from InProcess().run(tasks, lambda done: None)


def test_what_fails_is_tried_again_and_told(tmp_path: Path) -> None:
    outcome = run_experiment("weight-norms", settings=TINY, out=tmp_path, executor=Flaky(1))
    assert [lost["error"] for lost in outcome.content["retried"]] == ["lost", "lost"] and not outcome.failures


def test_what_fails_every_time_is_told(tmp_path: Path) -> None:
    outcome = run_experiment("weight-norms", settings=TINY, out=tmp_path, executor=Flaky(1 + runner.RETRIES))
    assert outcome.verdict == "incomplete" and len(outcome.failures) == 2 and "failed: lost" in str(outcome)


@pytest.mark.full
def test_a_killed_process_costs_nothing(tmp_path: Path) -> None:
    """The first trial's process is killed on the way; the experiment ends as one that was not disturbed."""
    killed = []

    def kill() -> None:
        while not killed:
            progressed = list(tmp_path.glob("killed/trials/*/checkpoint.pt"))
            children = multiprocessing.active_children()
            if progressed and children:
                os.kill(children[0].pid or 0, signal.SIGKILL)
                killed.append(True)
            time.sleep(0.02)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    disturbed = run_experiment("weight-norms", settings=SLOW, out=tmp_path / "killed", executor=Processes(2))
    run_experiment("weight-norms", settings=SLOW, out=tmp_path / "whole")
    assert killed and "exit code -9" in disturbed.content["retried"][0]["error"] and not disturbed.failures
    assert trial_records(tmp_path / "killed") == trial_records(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_killed_runner_goes_on_where_it_stopped(tmp_path: Path, workers: str) -> None:
    """Three times SIGKILL at whatever it is doing, then to the end."""
    changes = [word for name, value in SLOW.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "normscope", "lab", "run", "weight-norms", *changes, "--workers", workers]
    command += ["--out", str(tmp_path / "killed")]
    for checkpoints in (1, 2, 2):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("killed/trials/*/checkpoint.pt")}
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        while running.poll() is None:
            now = {path: path.stat().st_mtime_ns for path in tmp_path.glob("killed/trials/*/checkpoint.pt") if path.exists()}
            if len(now) >= min(checkpoints, int(workers)) and now != before:
                break
            time.sleep(0.01)
        running.kill()
        running.communicate(timeout=PATIENCE)  # the trials' own processes hold the pipe until they have noticed, and ended
    assert subprocess.run(command, capture_output=True).returncode == 0
    run_experiment("weight-norms", settings=SLOW, out=tmp_path / "whole")
    assert trial_records(tmp_path / "killed") == trial_records(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_the_user_can_mend_is_one_line(tmp_path: Path, workers: int) -> None:
    wrong = {**TINY, "networks": '{"mlp":{"width":0}}'}
    with pytest.raises(InputError, match="at least 1"):
        run_experiment("weight-norms", settings=wrong, out=tmp_path, workers=workers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epoch": "3"}, "no setting epoch: choose from data, seeds, networks"),
        ({"epochs": "many"}, "epochs must be a value such as 100, got 'many'"),
        ({"networks": "lenet"}, "networks has no 'lenet': choose from mlp, resnet18"),
        ({"seeds": "[]"}, "at least one seed"),
        ({"data": "mnist"}, "no data set 'mnist': choose from digits"),
        ({"normalizers": "bath"}, "no normalizer 'bath'"),
        ({"seeds": "first"}, "seeds must be whole numbers from 0"),
        ({"seeds": "0.5"}, "seeds must be whole numbers from 0"),
        ({"seeds": "-1"}, "seeds must be whole numbers from 0"),
        ({"epochs": "-1"}, "epochs must be a whole number from 0, got -1"),
        ({"batch_size": "0"}, "batch_size must be a whole number from 1, got 0"),
        ({"images": "all"}, "images must be a whole number from 1, got all"),
        ({"learning_rate": "NaN"}, "learning_rate must be a number from 0, got nan"),
        ({"networks": '{"mlp":3}'}, "networks must give mlp its options"),
    ],
)
def test_errors_name_the_choices(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        run_experiment("weight-norms", settings=changes, out=tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a directory")
    with pytest.raises(InputError, match=r"cannot write .*taken.*: Not a directory; make room there or choose another --out"):
        run_experiment("weight-norms", settings=TINY, out=tmp_path / "taken")


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the first trial writes its result; with room again, the run goes on from its checkpoint."""
    honest = Path.open

    class Full(io.FileIO):
        def write(self, content: bytes) -> int:
            super().write(content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        full = path.name.startswith("result.json") and mode == "wb"
        return Full(path, mode) if full else honest(path, mode, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", opened)
        with pytest.raises(InputError, match="No space left on device; make room") as caught:
            run_experiment("weight-norms", settings=TINY, out=tmp_path / "full")
    assert "\n" not in str(caught.value) and not list(tmp_path.rglob("*.tmp"))
    run_experiment("weight-norms", settings=TINY, out=tmp_path / "full")
    run_experiment("weight-norms", settings=TINY, out=tmp_path / "whole")
    assert trial_records(tmp_path / "full") == trial_records(tmp_path / "whole")


def test_unknown_and_unrun_experiments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no experiment 'weights': choose from"):
        run_experiment("weights", out=tmp_path)
    with pytest.raises(InputError, match="run it first with `normscope lab run weight-norms --full`"):
        load_experiment("weight-norms", full=True, out=tmp_path)


def test_settings_from_words() -> None:
    settings = find("weight-norms").full.changed({"seeds": "3", "images": "100", "networks": "mlp", "learning_rate": "1"})
    assert settings.seeds == (3,) and settings.images == 100 and list(settings.networks) == ["mlp"] and settings.learning_rate == 1


def test_a_trial_is_its_parameters(tmp_path: Path) -> None:
    experiment = find("weight-norms")

    def names(**changes: str) -> list[str]:
        return [task.directory.name for task in tasks(experiment, experiment.quick.changed(changes), tmp_path, None, 1)]

    assert names() == names(batch_size="128") != names(batch_size="64")
    assert len(set(names(seeds="0,1"))) == 2 * len(names())


@pytest.mark.parametrize(
    ("agreements", "word"),
    [([True, None], "agrees"), ([True, False], "agrees in part"), ([False], "differs"), ([None], "measured"), ([], "measured")],
)
def test_verdicts(agreements: list[bool | None], word: str) -> None:
    assert verdict([Comparison("", "", "", agrees) for agrees in agreements]) == word


def test_answers_are_counted_seed_by_seed() -> None:
    """On average 2 is larger than 1, but only in two of three seeds; a row of which the paper says nothing has no count."""

    def judge(results: Results) -> list[Comparison]:
        return [Comparison("x", "above 1", "", results.mean("x") > 1), Comparison("y", "", "")]

    experiment = replace(find("weight-norms"), judge=judge)
    results = Results([TrialResult("", seed, {}, {"x": x}) for seed, x in enumerate((0.0, 2.0, 4.0))])
    assert [row.seeds for row in judged(experiment, results)] == ["2 of 3", ""]
    assert [row.seeds for row in judged(experiment, Results(results[:1]))] == ["", ""]


def test_of_networks_that_the_paper_does_not_show_it_says_nothing(tmp_path: Path) -> None:
    for name in ("weight-norms", "input-variance"):
        groups = run_trials(name, TINY, tmp_path).groups("network", "normalizer")
        said = {kinds: [row.agrees for row in find(name).judge(own) if row.agrees is not None] for kinds, own in groups.items()}
        assert said["mlp", "none"] and not said["mlp", "batch"]


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_is_complete(name: str) -> None:
    experiment = find(name)
    assert experiment.statement.endswith((".", "?")) and experiment.source
    for settings in (experiment.quick, experiment.full):
        assert isinstance(settings, Settings) and not DATASETS[settings.data].files  # needs no download
        trials = experiment.trials(settings, 0)
        assert trials and pickle.loads(pickle.dumps(trials)) == trials


@pytest.mark.full
@pytest.mark.parametrize("name", experiments())
def test_every_experiment_runs_on_digits(name: str, tmp_path: Path) -> None:
    outcome = run_experiment(name, out=tmp_path)
    assert not outcome.failures and outcome.comparisons and outcome.content["figures"]


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    experiments()["my-gap"] = names["EXPERIMENT"]
    try:
        outcome = run_experiment("my-gap", settings=TINY, out=tmp_path)
    finally:
        del experiments()["my-gap"]
    assert outcome.content["figures"] == ["loss"] and outcome.verdict in ("agrees", "differs")
