"""What the live passes add to what is known of a model: the loss that it is trained with, and the modes of its modules."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.symmetry.report import SymmetryReport
from tests.scale_freeness import watched
from tests.watch.loops import Loop, Transformer, convolutional, mlp

Model = nn.Sequential


def network(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> Model:
    """Torch's own modules alone, so that watch needs no report."""
    return nn.Sequential(nn.Linear(8, 8), norm(8), nn.Tanh(), nn.Linear(8, 3))


def trained(
    losses: Callable[[Model, Tensor], list[Tensor]], run: Path, model: Model, report: SymmetryReport | None
) -> dict[str, bool | None]:
    """Weight → whether it is scale-free, after one step with one backward pass per loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, run=run, every=1, quiet=True, symmetries=report):
        for loss in losses(model, torch.randn(16, 8)):
            loss.backward()
        optimizer.step()
    recorded = ns.load_run(run)
    assert not recorded.events("error")
    return {layer["parameter"]: layer["scale_free"] for layer in recorded.layers if layer["role"] == "weight"}


def spectral_penalty(model: Model) -> Tensor:
    return torch.linalg.matrix_norm(model[0].weight, 2)


def squared(model: Model) -> Tensor:
    return model[0].weight.square().sum()


LOSSES: dict[str, tuple[Callable[[Model, Tensor], list[Tensor]], bool | None]] = {
    "one": (lambda m, x: [m(x).square().mean()], True),
    "one for each part of the batch": (lambda m, x: [m(x[:8]).square().mean(), m(x[8:]).square().mean()], True),
    "a penalty in the loss": (lambda m, x: [m(x).square().mean() + squared(m)], None),
    "a penalty of its own": (lambda m, x: [m(x).square().mean(), squared(m)], None),
    "a penalty first": (lambda m, x: [squared(m), m(x).square().mean()], None),
    "a penalty without a formula": (lambda m, x: [m(x).square().mean() + spectral_penalty(m)], None),
    "a penalty on the bias": (lambda m, x: [m(x).square().mean() + m[0].bias.sum()], None),
    "a penalty on another weight": (lambda m, x: [m(x).square().mean() + m[3].weight.square().sum()], True),
    "a value on the way": (lambda m, x: [m(x).square().mean() + m[0](x).square().mean()], None),
    "parts of the model alone": (lambda m, x: [m[2:](m[:2](x)).square().mean()], None),
    "any function of the output": (lambda m, x: [m(x).cummax(0).values.square().mean()], True),
}


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.RMSNorm])
def test_only_weights_that_the_loss_sees_through_the_output_are_judged(
    name: str, norm: Callable[[int], nn.Module], tmp_path: Path
) -> None:
    losses, expected = LOSSES[name]
    model = network(norm)
    report = ns.symmetries(model, torch.randn(16, 8))
    assert trained(losses, tmp_path / "alone", model, None) == {"0.weight": expected, "3.weight": None}
    assert trained(losses, tmp_path / "told", model, report) == {"0.weight": expected, "3.weight": False}


def test_a_path_that_leaves_the_model_through_a_hook_counts(tmp_path: Path) -> None:
    model, kept = network(), dict[str, Tensor]()
    model[0].register_forward_hook(lambda module, args, output: kept.update(h=output))
    report = ns.symmetries(model, torch.randn(16, 8))

    def losses(model: Model, x: Tensor) -> list[Tensor]:
        return [model(x).square().mean() + kept["h"].square().mean()]

    assert trained(losses, tmp_path, model, report)["0.weight"] is None


def test_hooks_on_all_modules_count(tmp_path: Path) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, args, output: output + args[0] if isinstance(m, nn.BatchNorm1d) else None
    )
    try:
        assert trained(LOSSES["one"][0], tmp_path, network(), None)["0.weight"] is None
    finally:
        handle.remove()


def test_another_recording_is_nobody_elses_hook(tmp_path: Path) -> None:
    other = network()
    with ns.watch(other, torch.optim.SGD(other.parameters(), 0.1), run=tmp_path / "other"):
        assert watched(network(), torch.randn(16, 8), tmp_path / "run")["0.weight"]["scale_free"] is True


def frozen(model: Model) -> None:
    model[1].eval()


def frozen_behind(model: Model) -> None:
    model[4].eval()


MODES: dict[str, tuple[Callable[[Model], object], str, dict[str, bool | None]]] = {  # after a report in a mode
    "as they were": (lambda model: None, "train", {"0.weight": True, "3.weight": True}),
    "a normalizer is frozen": (frozen, "train", {"0.weight": None, "3.weight": True}),
    "a later one is frozen": (frozen_behind, "train", {"0.weight": None, "3.weight": None}),
    "all are in eval mode": (lambda model: model.eval(), "train", {"0.weight": None, "3.weight": None}),
    "all are in train mode": (lambda model: None, "eval", {"0.weight": None, "3.weight": None}),
    "all are in eval mode, as before": (lambda model: model.eval(), "eval", {"0.weight": False, "3.weight": False}),
}


@pytest.mark.parametrize("name", MODES)
def test_a_report_says_nothing_of_weights_before_a_module_in_another_mode(name: str, tmp_path: Path) -> None:
    change, mode, expected = MODES[name]
    model, x = nn.Sequential(*network(), nn.BatchNorm1d(3), nn.Tanh()), torch.randn(16, 8)
    report = ns.symmetries(model, x, mode=mode)
    change(model)
    assert {name: layer["scale_free"] for name, layer in watched(model, x, tmp_path, symmetries=report).items()} == expected
    assert any("different mode" in event["message"] for event in ns.load_run(tmp_path).events("note")) == (
        None in expected.values()
    )


def test_without_a_report_a_frozen_normalizer_proves_nothing(tmp_path: Path) -> None:
    model = network()
    frozen(model)
    assert trained(LOSSES["one"][0], tmp_path, model, None) == {"0.weight": None, "3.weight": None}


def test_what_a_nested_backward_pass_shows_is_not_taken_for_the_loss(tmp_path: Path) -> None:
    loop = Loop(lambda: Transformer(checkpointed=True))
    report = ns.symmetries(loop.model, loop.batch()[0])
    for _ in loop.watched(tmp_path, 2, symmetries=report):
        pass
    run = ns.load_run(tmp_path)
    inside = [layer["scale_free"] for layer in run.layers if layer["role"] == "weight" and layer["name"].startswith("blocks")]
    assert inside and True not in inside


def test_a_compiled_model_is_not_judged(tmp_path: Path) -> None:
    loop = Loop(mlp)
    report = ns.symmetries(loop.model, loop.batch()[0])
    loop.forward = torch.compile(loop.model, backend="eager")  # type: ignore[assignment]
    for _ in loop.watched(tmp_path, 2, symmetries=report):
        pass
    assert True not in [layer["scale_free"] for layer in ns.load_run(tmp_path).layers if layer["role"] == "weight"]


def test_a_report_of_another_model_is_refused_and_old_keywords_are_deprecated(tmp_path: Path) -> None:
    loop = Loop(convolutional)
    with pytest.raises(ns.InputError, match="another model"):
        loop.watch(tmp_path, symmetries=ns.symmetries(nn.Linear(3, 2), torch.randn(4, 3)))
    with pytest.raises(ns.InputError, match=r"ns\.symmetries"):
        loop.watch(tmp_path, symmetries=True)
    for old in ({"graph": True}, {"example": loop.batch()[0]}):
        with pytest.deprecated_call():
            loop.watch(tmp_path / "run", **old).close()


class Headed(nn.Module):
    """A weight without a bias, what stands between it and the head, and the head."""

    def __init__(self, between: nn.Module, call: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.between, self.head, self.call = nn.Linear(8, 8, bias=False), between, nn.Linear(8, 3), call

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.between, self.lin(x), x))


def test_no_graph_is_kept_alive(tmp_path: Path) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def noting(norm: nn.Module, h: Tensor, x: Tensor) -> Tensor:
        kept.append(weakref.ref(h))
        return norm(h)

    model, x = Headed(nn.RMSNorm(8), noting), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, run=tmp_path, every=1, quiet=True):
        for _ in range(3):
            model.head(noting(model.between, model.lin(x), x))
            model(x)
            gc.collect()
            assert [activation() for activation in kept] == [None] * len(kept)
            model(x).sum().backward()
            assert [activation() for activation in kept] == [None] * len(kept)
            optimizer.step()


class Gate(nn.Module):
    """A module without children; what it gets as a second argument was computed outside of it."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.relu(x) + other


def test_a_module_is_what_it_computes_not_what_its_arguments_were_computed_with(tmp_path: Path) -> None:
    watched(Headed(Gate(), lambda gate, h, x: gate(h, torch.tanh(h))), torch.randn(16, 8), tmp_path)
    run = ns.load_run(tmp_path)
    assert run.events("note")[0]["message"].endswith("not recorded: tanh")
    assert [layer["role"] for layer in run.layers if layer["name"] == "between"] == ["activation"]
