"""One thread per process: the test runner is what uses the cores. Hypothesis draws the same every time; which tests are quick."""

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("anew", deadline=None)  # pytest --hypothesis-profile anew searches elsewhere
settings.load_profile("same")

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}  # of a Ray cluster

# tests that share what takes long to set up: one process runs all of them
TOGETHER = ("tests/claims/", "tests/browser/", "tests/cli/test_demo.py", "tests/test_results.py", "tests/report/test_results.py")

# they wait for other processes: begun late, they would be waited for at the end
FIRST = ("tests/browser/", "tests/cli/", "tests/watch/test_damage.py")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray cluster on this machine, with one node of one processor; tests add another one, which may be killed."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # a busy machine takes longer than Ray's minute
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByPart(LoadScopeScheduling):
        """Test by test, but for the parts that stay together."""

        def _split_scope(self, nodeid: str) -> str:
            return next((part for part in TOGETHER if nodeid.startswith(part)), nodeid)

    return ByPart(config, log)


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("full"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for table in tables.values():
        _thin(table)
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


def _thin(table: list[pytest.Item]) -> None:
    """Of a table marked `quick(n)`, n cases drawn once and for all are quick; the others belong to the full suite."""
    mark = table[0].get_closest_marker("quick")
    assert mark is not None
    count = min(mark.args[0], len(table))
    quick = random.Random(0).sample(range(len(table)), count)
    for index, item in enumerate(table):
        if index not in quick:
            item.add_marker(pytest.mark.full)
