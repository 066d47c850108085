"""Every Python block of the reference pages runs, one page as one session, on the models and files of a reader who has some."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import normscope as ns
from tests.documents import blocks

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if blocks(page.read_text(encoding="utf-8"), "python", "py")]


def reader() -> dict[str, Any]:
    """What a reader has: a classifier, batches, an optimizer, checkpoints."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    x, y = torch.randn(24, 4), torch.arange(24) % 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for name in ("model", "before", "after"):
        Path(name).mkdir()
        save_file(model.state_dict(), f"{name}/model.safetensors")
    cross_entropy = nn.functional.cross_entropy
    names = {"ns": ns, "torch": torch, "model": model, "optimizer": optimizer, "loss": cross_entropy, "criterion": cross_entropy}
    names |= dict.fromkeys(("x", "example", "batch", "images", "inputs", "more_images"), x)
    names |= dict.fromkeys(("y", "labels", "classes", "targets", "more_classes"), y)
    return names | dict.fromkeys(("data", "train", "held_out"), (x, y)) | {"batches": [(x, y)] * 3}


def recorded() -> dict[str, Any]:
    """A run in runs/name, and an audit."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, run="runs/name", quiet=True) as watch:
        for _ in range(3):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return {"audit": ns.audit(model, x, region=ns.Ball(x[0], 0.1), within=2)}


def an_operation() -> dict[str, Any]:
    """An operation that torch knows and normscope does not."""

    @torch.library.custom_op("mylib::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return 2.0 * torch.tanh(x)

    op.register_fake(torch.empty_like)

    class UsesIt(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.mylib.op(x)

    return {"module_that_uses_it": UsesIt()}


def a_family() -> dict[str, Any]:
    return {"trained": {(width, rate): nn.Linear(4, 4) for width, rate in itertools.product((1, 2), (0.1, 0.2))}}


MORE: dict[str, Callable[[], dict[str, Any]]] = {  # what a page supposes beside that
    "doctor": recorded,
    "generalization": a_family,
    "geometry": lambda: {"weight": torch.randn(3, 4), "gradient": torch.randn(3, 4)},
    "report": recorded,
    "rules": an_operation,
    "watch": lambda: {"save": lambda model, step: None},
}


@pytest.fixture
def tables(monkeypatch):
    """Rules and bounds that a page registers are gone when it ends."""
    from normscope.bounds import table
    from normscope.rules.registry import registry

    for holder, name in ((registry, "rules"), (table, "TABLE")):
        monkeypatch.setattr(holder, name, dict(getattr(holder, name)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_reference_page_shows_runs(page, monkeypatch, tmp_path, tables):
    monkeypatch.chdir(tmp_path)
    names = reader() | MORE.get(page.stem, dict)()
    for block in blocks(page.read_text(encoding="utf-8"), "python", "py"):
        exec(compile(block, str(page), "exec"), names)
