"""On Ray: the numbers of the local run, and a node killed in the middle of a sweep loses nothing but its running trials."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from normscope.core.errors import InputError
from normscope.lab.cluster import OnRay, _write, run_and_collect
from normscope.lab.experiment import find
from normscope.lab.runner import run_experiment
from normscope.lab.tasks import RESULT, tasks
from tests.conftest import NODE
from tests.lab.test_runner import SLOW, TINY, trial_records

pytest.importorskip("ray")


def test_a_trial_sends_its_files_back(tmp_path: Path) -> None:
    experiment = find("weight-norms")
    task = tasks(experiment, experiment.quick.changed(TINY), tmp_path, None, 1)[0]
    files = run_and_collect(task)
    assert {RESULT, "run/manifest.json", "run/events.jsonl"} <= set(files)
    assert all((task.directory / name).read_bytes() == content for name, content in files.items())


def test_what_a_killed_attempt_left_is_replaced(tmp_path: Path) -> None:
    """A node's files are the trial, not a part of them beside older ones."""
    experiment = find("weight-norms")
    task = tasks(experiment, experiment.quick.changed(TINY), tmp_path, None, 1)[0]
    files = run_and_collect(task)
    (segment,) = (name for name in files if name.endswith(".arrows"))
    shutil.rmtree(task.directory)
    (task.directory / "run").mkdir(parents=True)
    (task.directory / segment).write_bytes(files[segment][: len(files[segment]) // 2])
    for stale in ("checkpoint.pt", "run/metrics-0009.arrows"):
        (task.directory / stale).write_bytes(b"older")
    _write(files, task.directory)
    assert {
        str(path.relative_to(task.directory)): path.read_bytes() for path in task.directory.rglob("*") if path.is_file()
    } == files


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="listening sockets are read from /proc")
def test_a_local_cluster_listens_on_loopback_alone() -> None:
    """In a process of its own, as Ray decides when it is imported."""
    code = "from normscope.core.ray import connect, imported; ray = imported(True); connect(ray, None); print('up', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        found = {address.partition(":")[0] for address in listening(process.pid)}
    finally:
        process.communicate("\n", timeout=60)
    assert found and found <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listening(pid: int) -> set[str]:
    """The addresses, in hexadecimal, where a process and its children accept connections (state 0A)."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]": line[1] for line in lines if line[3] == "0A"}
    parents = {
        int(path.parent.name): int(path.read_text().rpartition(")")[2].split()[1]) for path in Path("/proc").glob("[0-9]*/stat")
    }
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    opened = {os.readlink(path) for member in family for path in Path(f"/proc/{member}/fd").iterdir() if path.is_symlink()}
    return {sockets[name] for name in opened if name in sockets}


@pytest.mark.full
def test_a_killed_node_loses_only_its_running_trials(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    settings = {**SLOW, "seeds": "0,1"}
    finished_before_the_kill: list[str] = []

    def kill() -> None:
        while len(list(tmp_path.glob("ray/trials/*/checkpoint.pt"))) < 2 or not list(tmp_path.glob("ray/trials/*/result.json")):
            time.sleep(0.02)
        finished_before_the_kill.extend(path.parent.name for path in tmp_path.glob("ray/trials/*/result.json"))
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    outcome = run_experiment("weight-norms", settings=settings, out=tmp_path / "ray", executor=OnRay(cluster.address))
    thread.join(60)
    run_experiment("weight-norms", settings=settings, out=tmp_path / "local")
    assert not outcome.failures and finished_before_the_kill
    assert len(outcome.content["retried"]) == 1 and "lost with its node" in outcome.content["retried"][0]["error"]
    assert trial_records(tmp_path / "ray") == trial_records(tmp_path / "local") and len(trial_records(tmp_path / "ray")) == 4


@pytest.mark.full
def test_what_the_user_can_mend_is_one_line(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 1"):
        wrong = {**TINY, "networks": '{"mlp":{"width":0}}'}
        run_experiment("weight-norms", settings=wrong, out=tmp_path, executor=OnRay(cluster.address))


def test_no_cluster_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        run_experiment("weight-norms", settings=TINY, out=tmp_path, executor=OnRay("127.0.0.1:1"))
