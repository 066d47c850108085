"""Slow measurements against dense references, and without a trace."""

from __future__ import annotations

import gc
import itertools
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev

import normscope as ns
from tests.watch.awkward import CASES, Loss
from tests.watch.loops import Loop, Transformer, convolutional
from tests.watch.test_identity import same, state
from tests.watch.test_user_code import train

UNMEASURED = {
    "blocks, checkpointed, reentrant": "incompatible with .grad()",
    "checkpointed, reentrant": "incompatible with .grad()",
    "odd arguments and results": "positional argument",
}
ITERATED = {"counter in forward", "hook that changes what it returns"}  # what they compute depends on an iterator
GOES_ON = {  # of iterators, and of classes that are none of a module, a parameter or the loss
    **dict.fromkeys((*ITERATED, "checkpointed", "checkpointed, reentrant"), "count"),
    **dict.fromkeys((case for case in CASES if "attention" in case or "blocks" in case), "count"),
    "own autograd function": "calls",
    "tensors of a subclass": "calls",
}
DRAWN, CALLS = np.random.default_rng(0), 0


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 5)).double()


def test_numbers_agree_with_dense_matrices() -> None:
    torch.manual_seed(0)
    model, x, y = small(), torch.randn(6, 3, 4, 4).double(), torch.randint(5, (6,))
    loss = nn.functional.cross_entropy
    found = ns.Probe(x, y, loss, iterations=200).measure(model, 0.1)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def value(point: torch.Tensor) -> torch.Tensor:
        parts = point.split([shape.numel() for shape in shapes.values()])
        own = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        hidden = nn.functional.linear(x.flatten(1), own["1.weight"], own["1.bias"])
        normal = nn.functional.batch_norm(hidden, None, None, own["2.weight"], own["2.bias"], True)
        return loss(nn.functional.linear(normal.tanh(), own["4.weight"], own["4.bias"]), y)

    eigenvalues = torch.linalg.eigvalsh(hessian(value)(flat))
    assert found["sharpness"] == pytest.approx(float(eigenvalues[eigenvalues.abs().argmax()]), rel=1e-3)
    gradient = torch.func.grad(value)
    change = gradient(flat - 0.1 * gradient(flat)) - gradient(flat)
    assert found["gradient_predictiveness"] == pytest.approx(float(change.norm() / gradient(flat).norm()), rel=1e-6)
    model.eval()
    jacobians = [jacrev(lambda one: functional_call(model, {}, (one[None],))[0])(sample).flatten(1) for sample in x]
    assert found["jacobian_norm"] == pytest.approx(max(float(torch.linalg.matrix_norm(j, 2)) for j in jacobians), rel=1e-3)


def test_a_language_model_has_all_but_the_norm_of_a_jacobian(tmp_path: Path) -> None:
    """Tokens are whole numbers: there is no derivative in them, and every other number is measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Tanh(), nn.Linear(12, 5))
    tokens, targets = torch.randint(7, (6, 3)), torch.randint(5, (6,))
    probe = ns.Probe(tokens, targets, nn.functional.cross_entropy, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, run=tmp_path / "run", every=1, probe=probe):
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), targets).backward()
            optimizer.step()
    run = ns.load_run(tmp_path / "run")
    assert not run.events("error") and [event["step"] for event in run.events("probe")] == [2, 4, 6]
    table = run.table()
    measured = np.isfinite(table["sharpness"].to_numpy())
    assert measured.sum() >= 2 and (np.isfinite(table["gradient_predictiveness"].to_numpy()) == measured).all()
    assert np.isnan(table["jacobian_norm"].to_numpy()).all()


def test_an_output_that_is_not_one_tensor_has_no_jacobian() -> None:
    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": super().forward(x)}

    probe = ns.Probe(torch.randn(4, 3), torch.randn(4, 2), lambda outputs, y: nn.functional.mse_loss(outputs["logits"], y))
    found = probe.measure(Two(3, 2), 0.1)
    assert np.isfinite([found["sharpness"], found["gradient_predictiveness"]]).all() and np.isnan(found["jacobian_norm"])


def test_checkpointed_parts_are_measured_as_others_are() -> None:
    torch.manual_seed(0)
    plain, again, x, y = (
        Transformer().double(),
        Transformer(checkpointed=False).double(),
        torch.randn(8, 3, 4, 4).double(),
        torch.arange(8) % 5,
    )
    again.load_state_dict(plain.state_dict())
    expected, found = (ns.Probe(x, y, nn.functional.cross_entropy).measure(model, 0.5) for model in (plain, again))
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_probed_training_is_bit_identical(tmp_path: Path) -> None:
    plain = Loop(convolutional)
    for _ in range(12):
        plain.step()
    expected = state(plain)
    probed = Loop(convolutional)
    probe = ns.Probe(*plain.batch(), nn.functional.cross_entropy, every=4, iterations=3)
    for _ in probed.watched(tmp_path / "run", 12, every=2, probe=probe):
        pass
    assert same(state(probed)[:-1], expected[:-1])
    run = ns.load_run(tmp_path / "run")
    assert "a probe runs the model" in run.events("note")[0]["message"] and run.manifest["config"]["runs_the_model"]
    assert [event["step"] for event in run.events("probe")] == [4, 8, 12] and not run.events("error")
    assert np.isfinite(run.table()["sharpness"].to_numpy()).tolist() == [False, False, False, True, False, True, False]
    assert probe.cost > 0 and run.events("closed")[0]["probe_seconds"] == pytest.approx(probe.cost)


def test_a_probe_that_fails_ends_only_itself(tmp_path: Path) -> None:
    loop = Loop(convolutional)
    with pytest.warns(UserWarning, match="no longer records probe"):
        for _ in loop.watched(tmp_path / "run", 4, probe=ns.Probe(torch.zeros(1), torch.zeros(1), nn.functional.mse_loss, every=1)):
            pass
    assert len(ns.load_run(tmp_path / "run").table()) == 4
    with pytest.raises(ns.InputError, match="at least 1"):
        ns.Probe(torch.zeros(1), torch.zeros(1), nn.functional.mse_loss, every=0)


def test_parameters_that_the_loss_does_not_read_have_no_curvature() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(6, 3)), torch.randn(8, 6), torch.randn(8, 3)
    expected = ns.Probe(x, y, nn.functional.mse_loss, iterations=200).measure(model, 0.1)
    model.unused = nn.Parameter(torch.ones(2))
    found = ns.Probe(x, y, nn.functional.mse_loss, iterations=200).measure(model, 0.1)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_a_loss_that_is_linear_has_no_curvature(bias: bool) -> None:
    probe = ns.Probe(torch.randn(8, 6), torch.randn(8, 3), lambda outputs, targets: (outputs * targets).sum(), iterations=2)
    found = probe.measure(nn.Linear(6, 3, bias), 0.1)
    assert found["sharpness"] == 0 and found["gradient_predictiveness"] == pytest.approx(0, abs=1e-6)


def scripted(*layers: nn.Module) -> nn.Module:
    return torch.jit.script(nn.Sequential(*layers))


@pytest.mark.parametrize("model", [
    scripted(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
    nn.Sequential(scripted(nn.Linear(6, 8), nn.Dropout(0.5)), nn.Linear(8, 5)),
], ids=["whole", "a part"])  # fmt: skip
def test_torchscript_is_left_as_it_is_and_not_probed(model: nn.Module, tmp_path: Path) -> None:
    x, y = torch.randn(8, 6), torch.randint(5, (8,))
    optimizer = torch.optim.SGD(model.train().parameters(), 0.1)
    probe = ns.Probe(x, y, nn.functional.cross_entropy, every=1)
    with (
        pytest.warns(UserWarning, match="cannot put back what TorchScript changes"),
        ns.watch(model, optimizer, run=tmp_path / "run", probe=probe, quiet=True),
    ):
        for _ in range(2):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(part.training for part in model.modules())
    assert len(ns.load_run(tmp_path / "run").table()) == 2


def probe_of(model: nn.Module, loss_of: Loss) -> ns.Probe:
    """With the case's own loss, which runs the model once more."""
    return ns.Probe(
        torch.ones(8, 6),
        torch.linspace(-1, 1, 48).reshape(8, 6),
        lambda output, x: output.square().mean() + loss_of(model, x),
        2,
        2,
    )


@pytest.mark.parametrize("case", CASES)
def test_a_probe_leaves_no_trace_on_code_of_any_kind(case: str, tmp_path: Path) -> None:
    expected, counted = train(case, None)
    with pytest.warns(UserWarning, match="no longer records probe") if case in UNMEASURED else nullcontext():
        tensors, found = train(case, tmp_path, probe_of, every=1)
    gone_on = GOES_ON.get(case)
    assert {name: value for name, value in found.items() if name != gone_on} == {n: v for n, v in counted.items() if n != gone_on}
    assert (gone_on is None) == (found == counted), "the table above is out of date"
    assert same(tensors, expected) == (case not in ITERATED)
    run = ns.load_run(tmp_path)
    errors = [event["message"] for event in run.events("error")]
    assert len(errors) == (case in UNMEASURED) and all(UNMEASURED[case] in message for message in errors)
    assert len(run.events("probe")) == (0 if errors else 3)


class Counter:
    def __init__(self) -> None:
        self.count = 0


class Untidy(nn.Module):
    """Draws from, writes to and counts in whatever it can reach; raises in a call of one's choice."""

    calls, kept = 0, []  # type: ignore[var-annotated]

    def __init__(self, fails: BaseException | None = None, when: int = 0) -> None:
        super().__init__()
        self.first, self.norm, self.head, self.fails, self.when = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), fails, when
        self.begun = itertools.count()  # goes on
        self.own, self.outputs = torch.Generator().manual_seed(0), list[torch.Tensor]()
        self.register_buffer("average", torch.zeros(8))
        self.deep = nn.Module()
        self.deep.counter = Counter()
        for _ in range(6):
            self.deep = nn.Sequential(self.deep)
        self.head.register_forward_hook(lambda module, args, output: self.outputs.append(output))

    @property
    def inner(self) -> nn.Module:
        return list(self.deep.modules())[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        Untidy.calls += 1
        Untidy.kept.append(x)
        self.inner.counter.count += 1
        self.last = x.mul_(1 + random.random() + np.random.rand() + DRAWN.random())
        hidden = self.norm(self.first(x))
        self.average.mul_(0.9).add_(hidden.mean(0))
        if self.fails is not None and next(self.begun) == self.when:
            raise self.fails
        return self.head(hidden.tanh() * torch.rand(8, generator=self.own).to(hidden) + torch.rand(8).to(hidden))


class Noisy:
    """A loss that counts, draws, and writes into the targets and into the parameters' gradients."""

    def __init__(self, model: Untidy) -> None:
        self.model, self.count, self.drawn = model, 0, torch.Generator().manual_seed(0)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.count += 1
        outputs.sum().backward(retain_graph=True)
        self.model.first.weight.data.add_(1)
        return (outputs - targets.add_(torch.rand(3, generator=self.drawn).to(targets))).square().mean()


def traces(model: Untidy, probe: ns.Probe) -> list[Any]:
    """Everything that may change, as values to compare."""
    tensors = [*model.parameters(), *model.buffers(), probe.inputs, probe.targets]
    gradients = [p.grad for p in model.parameters()]
    return [
        CALLS, Untidy.calls, len(Untidy.kept), len(model.outputs), model.inner.counter.count, "last" in vars(model), probe.loss.count,
        [t.detach().clone().double().tolist() for t in tensors], [None if g is None else g.tolist() for g in gradients],
        [(id(t), t.requires_grad, t.is_leaf, None if t.is_inference() else t._version) for t in tensors],
        [part.training for part in model.modules()], random.getstate(), np.random.get_state()[1].tolist(), DRAWN.bit_generator.state,
        [g.get_state().tolist() for g in (model.own, probe.loss.drawn, torch.default_generator)], torch.is_grad_enabled(),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "surroundings", [nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_changed_wherever_a_probe_runs(training: bool, surroundings: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Untidy().to(dtype).train(training)
    model.head.weight.requires_grad_(False)
    with surroundings():
        probe = ns.Probe(torch.randn(4, 6).to(dtype), torch.randn(4, 3).to(dtype), Noisy(model), iterations=2)
        before = traces(model, probe)
        found = probe.measure(model, 0.1)
        assert traces(model, probe) == before
        assert probe.measure(model, 0.1)["gradient_predictiveness"] == found["gradient_predictiveness"]  # the same noise again
    assert np.isfinite(list(found.values())).all()


@pytest.mark.parametrize("fails", [RuntimeError("stop here"), KeyboardInterrupt("stop here")], ids=["error", "interrupt"])
@pytest.mark.parametrize("when", [0, 1, 2], ids=["curvature", "gradient", "jacobian"])
def test_nothing_is_changed_by_a_probe_that_ends_in_the_middle(when: int, fails: BaseException) -> None:
    model = Untidy(fails, when)
    probe = ns.Probe(torch.randn(4, 6), torch.randn(4, 3), Noisy(model), iterations=2)
    before = traces(model, probe)
    with pytest.raises(type(fails), match="stop here"):
        probe.measure(model, 0.1)
    assert traces(model, probe) == before


def test_no_copy_outlives_a_measurement() -> None:
    model, loss = nn.Linear(6, 3), nn.functional.mse_loss
    probe = ns.Probe(torch.randn(4, 6), torch.randn(4, 3), loss, iterations=2)

    def tensors() -> int:
        return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())

    probe.measure(model, 0.1)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        probe.measure(model, 0.1)
        assert tensors() == before
    finally:
        gc.enable()


class _Amplitudes(nn.Module):
    """|W x| with W of complex numbers, or of their real and imaginary parts."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (x.to(weight.dtype) @ weight.T).abs()


def test_a_complex_weight_is_measured_as_its_two_parts() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 8, dtype=torch.complex128)
    inputs, labels = torch.randn(16, 8, dtype=torch.float64), torch.randint(0, 4, (16,))
    found, expected = (
        ns.Probe(inputs, labels, nn.functional.cross_entropy, iterations=300).measure(_Amplitudes(value), 0.1)
        for value in (weight, torch.view_as_real(weight).clone())
    )
    assert found == pytest.approx(expected, rel=1e-6)


def test_layers_may_be_frozen_and_freed_between_measurements() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    inputs, labels = torch.randn(8, 4), torch.randint(0, 3, (8,))
    followed = ns.Probe(inputs, labels, nn.functional.cross_entropy, iterations=300)
    for trained in (False, True, False):
        model[0].requires_grad_(trained)
        anew = ns.Probe(inputs, labels, nn.functional.cross_entropy, iterations=300)
        assert followed.measure(model, 0.1) == pytest.approx(anew.measure(model, 0.1), rel=1e-3)
