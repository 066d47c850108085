"""On Ray: the numbers of the local run, and a node killed in the middle of a sweep loses nothing but its running trials."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normscope.core.errors import InputError
from normscope.lab.cluster import OnRay, run_and_collect
from normscope.lab.experiment import find
from normscope.lab.runner import run_experiment
from normscope.lab.tasks import RESULT, tasks
from tests.lab.test_runner import SLOW, TINY, trial_records

ray = pytest.importorskip("ray")

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of one processor each, on this machine; the second may be killed."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_trial_sends_its_files_back(tmp_path: Path) -> None:
    experiment = find("weight-norms")
    task = tasks(experiment, experiment.quick.changed(TINY), tmp_path, None, 1)[0]
    files = run_and_collect(task)
    assert {RESULT, "run/manifest.json", "run/events.jsonl"} <= set(files)
    assert all((task.directory / name).read_bytes() == content for name, content in files.items())


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
