"""A worker that is killed at work, a process or a node of Ray, loses nothing: its tensor is done again, the answer is the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import normscope as ns
from normscope.core.errors import InputError
from tests.checkpoint.files import write
from tests.conftest import NODE


def test_no_cluster_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    path = write(tmp_path, "safetensors", {"weight": torch.ones(3, 2)})
    with pytest.raises(InputError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        ns.checkpoint(path, ray="127.0.0.1:1")


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a node's workers are found in /proc")
def test_a_killed_node_loses_nothing(cluster: Any, tmp_path: Path) -> None:
    state = {f"layers.{i}.weight": torch.randn(1200 + 100 * (i % 5), 1400) for i in range(30)}
    path = write(tmp_path, "shards", {**state, "norm.weight": torch.rand(1400)})
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    raylet = node.all_processes["raylet"][0].process.pid
    at_the_kill: list[int] = []
    ended = threading.Event()

    def kill() -> None:
        while not at_the_kill and not ended.wait(0.05):
            at_the_kill.extend(children(raylet, b"_on_node"))
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    names = []
    found = ns.checkpoint(path, ray=cluster.address, progress=lambda name, *_: names.append(name))
    ended.set()
    thread.join(120)
    assert at_the_kill, "the second node never worked"
    assert sorted(names) == sorted(row.name for row in found.tensors)
    assert found.to_dict() == ns.checkpoint(path).to_dict()


def children(parent: int, word: bytes) -> list[int]:
    """Processes of a parent that live and have this word in their command line: Ray names its own after what they do."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = path.read_text().rpartition(")")
            title = (path.parent / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        state, started_by = rest.split()[:2]
        if int(started_by) == parent and state != "Z" and word in title:
            found.append(int(path.parent.name))
    return found


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="workers are found in /proc")
def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """Three times when a tensor is done, a worker is killed."""
    state = {f"layers.{i}.weight": torch.randn(500, 400 + i, generator=torch.Generator().manual_seed(i)) for i in range(10)}
    path = write(tmp_path, "shards", state)
    killed: list[int] = []
    names = []

    def done(name: str, *_: int) -> None:
        names.append(name)
        # none where what was done before the last kill is still being told; a killed one may be on its way out
        alive = [worker for worker in children(os.getpid(), b"spawn_main") if worker not in killed]
        if len(killed) < 3 and alive:
            killed.append(alive[0])
            os.kill(alive[0], signal.SIGKILL)

    found = ns.checkpoint(path, workers=2, progress=done)
    assert len(killed) == 3
    assert sorted(names) == sorted(state)
    assert found.to_dict() == ns.checkpoint(path).to_dict()


@pytest.mark.full
def test_the_command_starts_a_cluster_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    path = write(tmp_path, "safetensors", {f"layers.{i}.weight": torch.randn(40, 30) for i in range(3)})
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "normscope", "checkpoint", str(path), "--ray", "local", "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(ns.__file__).parents[1])}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=300)
    rows = json.loads(out.read_text())["tensors"]
    assert [row["spectral_norm"] for row in rows] == [row.spectral_norm for row in ns.checkpoint(path).tensors]
