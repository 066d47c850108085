"""Two processes over gloo: the same training, one schedule, one directory each, and true norms of sharded weights."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

import normscope as ns
from normscope._watch.replicas import Replicas
from tests.watch.loops import adamw, filling, sgd

STEPS = 12


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 20), nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, 15, bias=False), nn.LayerNorm(15), nn.ReLU(), nn.Linear(15, 5),
    )  # fmt: skip


def replicated(made: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(made)


def fully_sharded(made: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in made:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


Wrap = Callable[[nn.Module], nn.Module]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(wrap: Wrap, optimizer_of: Any, run: Path | None) -> list[dict[str, tuple[torch.Tensor, ...]]]:
    """Weights before each step, gradients before clipping, and weights after it."""
    wrapped = wrap(model())
    optimizer = optimizer_of(wrapped.parameters())
    data = torch.Generator().manual_seed(distributed.get_rank())
    watch = None if run is None else ns.watch(wrapped, optimizer, run=run, every=2, quiet=True)
    history = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = torch.randn(4, 3, 4, 4, generator=data), torch.randint(5, (4,), generator=data)
        nn.functional.cross_entropy(wrapped(x), y).backward()
        names = {name.removeprefix("module."): p for name, p in wrapped.named_parameters()}
        before = {name: (whole(p), whole(p.grad)) for name, p in names.items()}
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-2)
        optimizer.step()
        history.append({name: (*before[name], whole(p)) for name, p in names.items()})
    if watch is not None:
        watch.close()
    return history


def train_twice(rank: int, path: Path, wrap: Wrap, optimizer_of: Any) -> None:
    join(rank, path)
    histories = [train(wrap, optimizer_of, run) for run in (path / "run", None)]
    if rank == 0:
        torch.save(histories, path / "histories.pt")
    distributed.destroy_process_group()


def join(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=rank, world_size=2)


def started(function: Callable[..., None], *args: Any) -> list[Any]:
    """Two processes, forked from a server that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["normscope", __name__])
    processes = [context.Process(target=function, args=(rank, *args), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("wrap", [replicated, fully_sharded])
def test_two_processes(wrap: Wrap, tmp_path: Path) -> None:
    assert started(train_twice, tmp_path, wrap, sgd if wrap is replicated else adamw) == [0, 0]
    watched, plain = torch.load(tmp_path / "histories.pt")
    for left, right in zip(watched, plain, strict=True):
        assert all(torch.equal(a, b) for name in left for a, b in zip(left[name], right[name], strict=True))
    run = ns.load_run(tmp_path / "run")
    table = run.table()
    steps = table["step"].to_pylist()
    assert steps == [1, 6, 8, 10, 12]  # the first announcement is for step 2 + LEAD or later
    for part in run.parts:
        assert part.table()["step"].to_pylist() == steps
        assert not [event for event in part.events() if event["kind"] == "error"]
    check_norms(run, [watched[step - 1] for step in steps])


def check_norms(run: ns.Run, history: list[dict[str, tuple[torch.Tensor, ...]]]) -> None:
    for index, layer in enumerate(run.layers):
        if not layer["parameter"]:
            assert np.isfinite(run.matrix("input_variance")[:, index]).all()
            continue
        for row, state in enumerate(history):
            before, gradient, after = (tensor.double().flatten() for tensor in state[layer["parameter"]])
            expected = {
                "frobenius_norm": before.norm(), "gradient_norm": gradient.norm(), "update_norm": (after - before).norm(),
                "update_ratio": (after - before).norm() / before.norm(),
            }  # fmt: skip
            for name, value in expected.items():
                assert run.matrix(name)[row, index] == pytest.approx(float(value), rel=1e-4), (name, layer["name"])
            if layer["role"] == "weight":
                exact = torch.linalg.matrix_norm(state[layer["parameter"]][0].double(), 2)
                assert run.matrix("spectral_norm")[row, index] == pytest.approx(float(exact), rel=2e-2)
            else:
                assert run.matrix("gamma_max")[row, index] == pytest.approx(float(before.max()), rel=1e-5)
            if layer["scale_free"]:
                lr = 1e-2 / before.norm() if layer["effective_power"] == 1 else 1.0 / before.norm() ** 2
                assert run.matrix("effective_lr")[row, index] == pytest.approx(float(lr), rel=1e-4)


def uneven(rank: int, path: Path) -> None:
    """Two processes that train apart, one slow and then dead: the other goes on."""
    join(rank, path)
    made = model()
    optimizer = sgd(made.parameters())
    watch = ns.watch(made, optimizer, run=path / "run", every=1, quiet=True)
    for step in range(10):
        if rank == 1:
            time.sleep(0.2)
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        made(torch.ones(4, 3, 4, 4)).sum().backward()
        optimizer.step()
    (path / "done").write_text(str(watch.steps))
    watch.close()
    os._exit(0)  # leaving the group would wait for the dead


def test_a_slow_and_then_dead_process_ends_only_its_own_record(tmp_path: Path) -> None:
    assert started(uneven, tmp_path) == [0, -signal.SIGKILL]
    assert (tmp_path / "done").read_text() == "10"
    run = ns.load_run(tmp_path / "run")
    assert run.table()["step"].to_pylist()[-1] == 10
    own = run.parts[1].table()
    assert own is not None and len(own) >= 1 and own["step"].to_pylist()[-1] <= 5


def failing(rank: int, path: Path, wrap: Wrap, failing_rank: int, late: bool) -> None:
    """One process cannot write, from the start or after some rows; the training of both is that without the watch."""
    from normscope._watch import store

    join(rank, path)
    if rank == failing_rank and not late:
        (path / "run").mkdir(parents=True, exist_ok=True)
        (path / "run" / f"rank-{rank}").write_text("in the way")
    if rank == failing_rank and late:
        store.write_all = filling(store.write_all)
    histories = [train(wrap, adamw, run) for run in (path / "run", None)]
    torch.save(histories, path / f"histories-{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("wrap", "rank", "late"), [(replicated, 0, False), (replicated, 0, True), (fully_sharded, 0, False), (fully_sharded, 1, True)]
)
def test_a_process_that_cannot_write_ends_only_its_own_record(wrap: Wrap, rank: int, late: bool, tmp_path: Path) -> None:
    assert started(failing, tmp_path, wrap, rank, late) == [0, 0]
    for number in range(2):
        watched, plain = torch.load(tmp_path / f"histories-{number}.pt")
        for left, right in zip(watched, plain, strict=True):
            assert all(torch.equal(a, b) for name in left for a, b in zip(left[name], right[name], strict=True))
    other = ns.load_run(tmp_path / "run" / f"rank-{1 - rank}")
    assert other.table()["step"].to_pylist()[-1] == STEPS, "the other goes on"
    if not late:
        assert "goes alone" in other.events("note")[0]["message"]


def drifting(rank: int, path: Path, planted: bool) -> None:
    """Two processes that train the same model; from step 9 on β of one normalizer is another on rank 1, if so planted.

    Each rank goes on when its writer has posted the hashes of the step, so that all but the last are compared for certain.
    """
    join(rank, path)
    hashed, posted = counted(Replicas, "hashes"), counted(Replicas, "exchange")
    wrapped = replicated(model())
    optimizer = sgd(wrapped.parameters())
    data = torch.Generator().manual_seed(rank)
    with ns.watch(wrapped, optimizer, run=path / "run", every=2, quiet=True) as watch:
        for step in range(1, 31):
            if planted and step == 9 and rank == 1:
                with torch.no_grad():
                    wrapped.module[5].bias[3] += 1e-6
            optimizer.zero_grad()
            loss = wrapped(torch.randn(4, 3, 4, 4, generator=data)).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
            latest = time.monotonic() + 60
            while len(posted) < len(hashed) and time.monotonic() < latest:
                time.sleep(0.001)
            distributed.barrier()
    distributed.destroy_process_group()


def counted(owner: type, name: str) -> list[None]:
    """One entry for each call of a method that has returned."""
    method, calls = getattr(owner, name), []

    def called(*args: Any) -> Any:
        found = method(*args)
        calls.append(None)
        return found

    setattr(owner, name, called)
    return calls


@pytest.mark.parametrize("planted", [True, False])
def test_a_rank_that_differs_is_named_with_its_parameter(planted: bool, tmp_path: Path) -> None:
    assert started(drifting, tmp_path, planted) == [0, 0]
    run = ns.load_run(tmp_path / "run")
    assert not run.events("error")
    found = {finding.where: finding for finding in run.findings if finding.name == "rank-divergence"}
    judged = run.judged["NS515"]
    assert judged.steps >= 10 and judged.last <= 30  # the last may end before the other rank's
    said = str(run)
    if not planted:
        assert not found and ("γ and β were the same on all ranks" in said)
        return
    assert "γ and β were the same" not in said
    assert "5.bias" in found and "differs on rank 1" in found["5.bias"].message and (found["5.bias"].first_step or 0) >= 10
    assert "5.bias differs on rank 1" in said


def test_a_hash_knows_every_entry_and_its_place() -> None:
    from normscope._watch.replicas import _hash

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.linspace(-1, 1, 33, dtype=torch.float64).to(dtype)
        seen = {int(_hash(x))} | {int(_hash(x.roll(1)))}
        for place in range(33):
            changed = x.clone()
            changed[place] += 0.5
            seen.add(int(_hash(changed)))
        assert len(seen) == 35 and int(_hash(x.clone())) == int(_hash(x))
