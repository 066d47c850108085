"""Which weights are scale-free: what the live pass says is what `ns.symmetries` says, or it says nothing."""

from __future__ import annotations

import gc
import weakref
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
    "division by a norm of high order": (lambda h, norm: h / (h.abs() ** 49).mean((1, 2, 3), keepdim=True) ** (1 / 49), True),
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


class Headed(nn.Module):
    """A weight without a bias, what stands between it and the head, and the head."""

    def __init__(self, between: nn.Module, call: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda b, h, x: b(h)) -> None:
        super().__init__()
        self.lin, self.between, self.head, self.call = nn.Linear(8, 8, bias=False), between, nn.Linear(8, 3), call

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.between, self.lin(x), x))


class Residual(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class AddAndNorm(nn.LayerNorm):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x + other)


class Bypassed(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Frozen(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Conditional(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(8, affine=False)
        self.gain = nn.Linear(8, 8)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return super().forward(x) * self.gain(condition)


class Named(nn.LayerNorm):
    """Its forward is torch's."""


def hooked(module: nn.Module, before: bool, everywhere: bool = False) -> nn.Module:
    """A module with a hook that adds a constant to what enters it, or doubles what leaves it and adds what entered."""
    if before:
        module.register_forward_pre_hook(lambda m, args: (args[0] + torch.ones(8).cumsum(0),))
    else:
        module.register_forward_hook(lambda m, args, output: output + args[0])
    return module


def replaced(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x  # type: ignore[method-assign, assignment]
    return module


def computed_gamma(norm: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    return functional.layer_norm(h, (8,), weight=h.mean(0))


def given_gamma(norm: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    norm._parameters.pop("weight", None)
    norm.weight = h.mean(0)  # type: ignore[assignment]
    return norm(h)


def floored(norm: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    return norm(torch.div(h, 0.5, rounding_mode="floor") + 0 * h)


def counted(norm: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    return h / torch.linalg.vector_norm(h, 0)


def attended(norm: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    q = x[None, None]
    return functional.scaled_dot_product_attention(q, q, q, attn_mask=(h @ h.mT)[None, None])[0, 0]


BETWEEN: dict[str, tuple[Callable[[], nn.Module], bool | None]] = {
    "torch's own": (lambda: Headed(nn.LayerNorm(8)), True),
    "torch's own, of several operations": (lambda: Headed(nn.RMSNorm(8)), True),
    "a subclass with torch's forward": (lambda: Headed(Named(8)), True),
    "a subclass that adds its input": (lambda: Headed(Residual(8)), False),
    "a subclass that adds another value": (lambda: Headed(AddAndNorm(8), lambda b, h, x: b(h, x)), None),
    "a subclass that adds another value before, of the same weight": (lambda: Headed(AddAndNorm(8), lambda b, h, x: b(h, h)), True),
    "a subclass that returns its input": (lambda: Headed(Bypassed(8)), False),
    "a subclass that uses running statistics": (lambda: Headed(Frozen(8)), False),
    "a subclass that multiplies by the weight's output": (lambda: Headed(Conditional(), lambda b, h, x: b(h, h)), False),
    "a forward that was put in place": (lambda: Headed(replaced(nn.LayerNorm(8))), False),
    "a hook that changes what enters": (lambda: Headed(hooked(nn.LayerNorm(8), True)), None),
    "a hook that changes what enters, several operations": (lambda: Headed(hooked(nn.RMSNorm(8), True)), None),
    "a hook that changes what leaves": (lambda: Headed(hooked(nn.LayerNorm(8), False)), False),
    "a γ that the weight computes": (lambda: Headed(nn.LayerNorm(8), computed_gamma), None),
    "a γ that the weight computes, in a module": (lambda: Headed(nn.LayerNorm(8), given_gamma), None),
    "a γ that the weight computes, several operations": (lambda: Headed(nn.RMSNorm(8), given_gamma), None),
    "a quotient that is rounded": (lambda: Headed(nn.LayerNorm(8), floored), None),
    "a count of entries": (lambda: Headed(nn.LayerNorm(8), counted), None),
    "a mask of attention": (lambda: Headed(nn.LayerNorm(8), attended), False),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_only_what_torch_computes_counts_as_a_normalizer(name: str, tmp_path: Path) -> None:
    make, expected = BETWEEN[name]
    assert judged(make(), torch.randn(16, 8), tmp_path)["lin.weight"] is expected


def test_a_hook_of_all_modules_that_changes_what_leaves_counts(tmp_path: Path) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, args, output: output + args[0] if isinstance(m, nn.LayerNorm) else None
    )
    try:
        assert judged(Headed(nn.LayerNorm(8)), torch.randn(16, 8), tmp_path)["lin.weight"] is False
    finally:
        handle.remove()


def spectral_penalty(model: nn.Module) -> Tensor:
    return torch.linalg.matrix_norm(model.lin.weight, 2)


def squared(model: nn.Module) -> Tensor:
    return model.lin.weight.square().sum()


PASSES: dict[str, tuple[Callable[[nn.Module, Tensor], list[Tensor]], bool | None, bool | None]] = {  # live, with a report
    "one": (lambda m, x: [m(x).square().mean()], True, True),
    "one for each part of the batch": (lambda m, x: [m(x[:8]).square().mean(), m(x[8:]).square().mean()], True, True),
    "a penalty in the loss": (lambda m, x: [m(x).square().mean() + squared(m)], False, None),
    "a penalty of its own": (lambda m, x: [m(x).square().mean(), squared(m)], False, None),
    "a penalty first": (lambda m, x: [squared(m), m(x).square().mean()], False, None),
    "a penalty without a rule": (lambda m, x: [m(x).square().mean() + spectral_penalty(m)], None, None),
    "a penalty without a rule, of its own": (lambda m, x: [m(x).square().mean(), spectral_penalty(m)], None, None),
    "the output, without a rule": (lambda m, x: [m(x).cummax(0).values.square().mean()], True, True),
}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_every_backward_pass_counts_and_a_report_speaks_of_the_output_only(
    name: str, norm: Callable[[int], nn.Module], tmp_path: Path
) -> None:
    losses, *expected = PASSES[name]
    for number, want in enumerate(expected):
        model, x = Headed(norm(8)), torch.randn(16, 8)
        report = ns.symmetries(model, x) if number else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ns.watch(model, optimizer, tmp_path / str(number), every=1, quiet=True, symmetries=report):
            for loss in losses(model, x):
                loss.backward()
            optimizer.step()
        layers = {layer["parameter"]: layer["scale_free"] for layer in ns.load_run(tmp_path / str(number)).layers}
        assert layers["lin.weight"] is want


def test_a_penalty_on_the_bias_alone_says_nothing_of_the_weight(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, tmp_path, every=1, quiet=True):
        (model(torch.randn(16, 8)).square().mean() + model[0].bias.sum()).backward()
        optimizer.step()
    assert [layer["scale_free"] for layer in ns.load_run(tmp_path).layers if layer["role"] == "weight"] == [None, False]


def test_no_graph_is_kept_alive(tmp_path: Path) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def noting(norm: nn.Module, h: Tensor, x: Tensor) -> Tensor:
        kept.append(weakref.ref(h))
        return norm(h)

    model, x = Headed(nn.RMSNorm(8), noting), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, tmp_path, every=1, quiet=True):
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
    judged(Headed(Gate(), lambda gate, h, x: gate(h, torch.tanh(h))), torch.randn(16, 8), tmp_path)
    run = ns.load_run(tmp_path)
    assert run.events("note")[0]["message"].endswith("not recorded: tanh")
    assert [layer["role"] for layer in run.layers if layer["name"] == "between"] == ["activation"]
