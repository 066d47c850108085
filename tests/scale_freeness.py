"""What symmetries, doctor and watch say of the weights of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import normscope as ns
from normscope.core.data import Call
from normscope.findings.subject import Subject


def watched(model: nn.Module, example: Any, run: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """The weights of one step under the watch, by parameter; the loss is linear in all outputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    call = Call.of(example)
    with ns.watch(model, optimizer, run=run, every=1, quiet=True, **options):
        outputs = [o for o in tree_leaves(model(*call.args, **call.kwargs)) if isinstance(o, Tensor) and o.requires_grad]
        sum((output * torch.randn_like(output)).sum() for output in outputs).backward()
        optimizer.step()
    recorded = ns.load_run(run)
    assert not recorded.events("error")
    return {layer["parameter"]: layer for layer in recorded.layers if layer["role"] == "weight"}


def answers(model: nn.Module, example: Any, mode: str, run: Path) -> dict[str, dict[str, bool | None]]:
    """For each part, weight → its answer."""
    model.train(mode == "train")
    report = ns.symmetries(model, example, mode=mode)
    alone = watched(model, example, run / "alone")
    told = watched(model, example, run / "told", symmetries=report)
    pairs = {name: layer["normalizer"] for name, layer in alone.items() if layer["scale_free"]}
    assert pairs == {name: told[name]["normalizer"] for name in pairs}
    found = {
        "symmetries": {name: name in report.scale_free_weights for name in alone},
        "watch": {name: layer["scale_free"] for name, layer in alone.items()},
        "watch, with a report": {name: layer["scale_free"] for name, layer in told.items()},
    }
    if mode == "train":
        found["doctor"] = {name: name in Subject(model, example).scale_free for name in alone}
    return found


def agree(found: dict[str, dict[str, bool | None]]) -> None:
    right = found["symmetries"]
    for part, said in found.items():
        assert {name: known for name, known in said.items() if known is not None and known != right[name]} == {}, part
    assert found["watch, with a report"] == right
