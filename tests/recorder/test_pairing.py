"""Which weights are scale-free: what the live pass says is what `ns.symmetries` says, or it says nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import normscope as ns
from normscope.core.data import Call
from normscope.recorder.pairing import scale_free_weights
from tests.recorder.loops import Loop, Transformer, convolutional
from tests.symmetry.cases import CASES
from tests.symmetry.random_graphs import random_graph


def judged(model: nn.Module, example: Any, run: Path, **options: Any) -> dict[str, Any]:
    """Weight → whether it is scale-free, as one step under the watch found it; the loss is linear in all outputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    call = Call.of(example)
    with ns.watch(model, optimizer, run, every=1, quiet=True, **options):
        outputs = [o for o in tree_leaves(model(*call.args, **call.kwargs)) if isinstance(o, Tensor) and o.requires_grad]
        sum((output * torch.randn_like(output)).sum() for output in outputs).backward()
        optimizer.step()
    recorded = ns.load_run(run)
    assert not recorded.events("error")
    return {layer["parameter"]: layer["scale_free"] for layer in recorded.layers if layer["role"] == "weight"}


def agree(model: nn.Module, example: Any, mode: str, run: Path) -> list[bool]:
    """Whether each weight was judged; those that were are judged as the report has them."""
    model.train(mode == "train")
    report = ns.symmetries(model, example, mode)
    free = scale_free_weights(report)
    found = judged(model, example, run)
    assert {name: known for name, known in found.items() if known is not None and known != (name in free)} == {}
    return [known is not None for known in found.values()]


@pytest.mark.parametrize("name", CASES)
def test_the_live_pass_agrees_with_the_symmetries_of_every_case(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    agree(case.model(), case.example, case.mode, tmp_path)


def test_the_live_pass_agrees_with_the_symmetries_of_random_networks_and_judges_most(tmp_path: Path) -> None:
    known = [one for seed in range(10) for one in agree(*random_graph(seed), tmp_path / str(seed))]
    assert sum(known) > 0.6 * len(known)


@pytest.mark.full
def test_the_live_pass_agrees_with_the_symmetries_of_many_random_networks(tmp_path: Path) -> None:
    known = [one for seed in range(10, 400) for one in agree(*random_graph(seed), tmp_path / str(seed))]
    print(f"{sum(known)} of {len(known)} weights judged")


def test_a_report_answers_what_the_live_pass_cannot_tell(tmp_path: Path) -> None:
    for seed in range(6):
        model, example, mode = random_graph(seed)
        report = ns.symmetries(model.train(mode == "train"), example, mode)
        found = judged(model, example, tmp_path / str(seed), symmetries=report)
        assert {name for name, known in found.items() if known} == set(scale_free_weights(report)) & set(found)


class Net(nn.Module):
    """A convolution whose output `tail` takes to the loss."""

    def __init__(self, tail: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.tail = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.first(x), self.norm)


TAILS: dict[str, tuple[Callable[[Tensor, nn.Module], Tensor], bool | None]] = {
    "a normalizer": (lambda h, norm: norm(h), True),
    "a rectifier and a pool before it": (lambda h, norm: norm(functional.max_pool2d(functional.relu(h), 2)), True),
    "a function that normalizes": (lambda h, norm: functional.layer_norm(h, h.shape[1:]), True),
    "a constant before it": (lambda h, norm: norm(0.5 * h), True),
    "both halves of a split": (lambda h, norm: norm(torch.cat(h.chunk(2, 1)[::-1], 1)), True),
    "division by its own norm": (lambda h, norm: h / h.flatten(1).norm(dim=1)[:, None, None, None], True),
    "nothing": (lambda h, norm: h, False),
    "an activation before it": (lambda h, norm: norm(torch.tanh(h)), False),
    "a normalizer and a bypass": (lambda h, norm: norm(h) + h, False),
    "a penalty beside the normalizer": (lambda h, norm: norm(h) * h.square().mean(), False),
    "a shift, which batch statistics take away": (lambda h, norm: norm(h + 1.0), None),
    "an operation without a rule": (lambda h, norm: norm(torch.cummax(h, 1).values), None),
}


@pytest.mark.parametrize("name", TAILS)
def test_every_path_to_the_loss_counts(name: str, tmp_path: Path) -> None:
    tail, expected = TAILS[name]
    assert judged(Net(tail), torch.randn(4, 3, 8, 8), tmp_path) == {"first.weight": expected}


def test_a_path_that_leaves_the_model_through_a_hook_counts(tmp_path: Path) -> None:
    model = Net(lambda h, norm: norm(h))
    kept: dict[str, Tensor] = {}
    model.first.register_forward_hook(lambda module, args, output: kept.update(h=output))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, tmp_path, every=1, quiet=True):
        (model(torch.randn(4, 3, 8, 8)).square().mean() + kept["h"].square().mean()).backward()
        optimizer.step()
    assert ns.load_run(tmp_path).layers[0]["scale_free"] is False


def test_a_frozen_normalizer_ends_no_scale_whatever_a_report_says(tmp_path: Path) -> None:
    model, example = Net(lambda h, norm: norm(h)), torch.randn(4, 3, 8, 8)
    report = ns.symmetries(model, example)
    model.norm.eval()
    assert judged(model, example, tmp_path / "live") == {"first.weight": False}
    assert judged(model, example, tmp_path / "both", symmetries=report) == {"first.weight": None}


def test_what_a_nested_backward_pass_shows_is_not_taken_for_the_loss(tmp_path: Path) -> None:
    loop = Loop(lambda: Transformer(checkpointed=True))
    for _ in loop.watched(tmp_path, 2):
        pass
    run = ns.load_run(tmp_path)
    inside = [layer["scale_free"] for layer in run.layers if layer["role"] == "weight" and layer["name"].startswith("blocks")]
    assert inside and set(inside) == {None} and "not judged" in run.events("note")[-1]["message"]


def test_a_report_of_another_model_is_refused_and_old_keywords_are_deprecated(tmp_path: Path) -> None:
    loop = Loop(convolutional)
    with pytest.raises(ns.InputError, match="another model"):
        loop.watch(tmp_path, symmetries=ns.symmetries(nn.Linear(3, 2), torch.randn(4, 3)))
    with pytest.raises(ns.InputError, match=r"ns\.symmetries"):
        loop.watch(tmp_path, symmetries=True)
    for old in ({"graph": True}, {"example": loop.batch()[0]}):
        with pytest.deprecated_call():
            loop.watch(tmp_path / "run", **old).close()
