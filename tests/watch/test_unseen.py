"""Steps that no hook of the optimizer sees are said once, with what to do; what only looks like them is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import normscope as ns


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("other", [True, False], ids=["another optimizer", "compiled"])
def test_steps_of_a_compiled_function_or_another_optimizer_are_said(
    other: bool, before: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """before: steps that were seen."""
    model = nn.Linear(4, 2)
    optimizer, another = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
    unseen = another.step if other else torch.compile(lambda: optimizer.step(), backend="eager")
    with ns.watch(model, optimizer, run=tmp_path, every=1) as watch:
        for step in range(before + 12):
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            unseen() if step >= before else optimizer.step()
            watch.step(loss=loss)
    (note,) = [event["message"] for event in ns.load_run(tmp_path).events("note") if "no step" in event["message"]]
    assert "outside of the compiled function" in note and capsys.readouterr().err.count(note) == 1


def test_micro_batches_are_no_unseen_steps(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ns.watch(model, optimizer, run=tmp_path, every=1, quiet=True) as watch:
        for batch in range(60):
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            watch.step(loss=loss)
            if batch % 20 == 19:
                optimizer.step()
    assert not [event for event in ns.load_run(tmp_path).events("note") if "no step" in event["message"]]
