"""For every rule of the doctor a model that breaks it and a near miss that does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normscope._watch.life import Life
from normscope.findings.catalogue import RULES
from normscope.findings.finding import Finding
from normscope.findings.table import Hit
from tests.networks import Function


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@dataclass
class Patient:
    """What is passed to the doctor."""

    model: nn.Module
    example: Any
    settings: dict[str, Any] = field(default_factory=dict)


Maker = Callable[[], Patient]


def dense(*layers: nn.Module, width: int = 4, batch: int = 8) -> Patient:
    return Patient(nn.Sequential(*layers), randn(batch, width))


def image(*layers: nn.Module, channels: int = 3, size: int = 6, batch: int = 8) -> Patient:
    return Patient(nn.Sequential(*layers), randn(batch, channels, size, size))


def conv(*, normalizer: nn.Module | None = None, bias: bool = False) -> Patient:
    return image(nn.Conv2d(3, 8, 3, bias=bias), normalizer or nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))


def with_norm(change: Callable[[Any], None], kind: Callable[[int], nn.Module] = nn.BatchNorm2d) -> Patient:
    """The convolutional patient after a change of its normalizer's state."""
    patient = conv(normalizer=kind(8))
    with torch.no_grad():
        change(patient.model[1])
    return patient


def optimized(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Patient:
    patient = conv()
    patient.settings["optimizer"] = make(patient.model)
    return patient


def apart(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Parameter groups with and without decay, as they should be."""
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


class Twice(nn.Module):
    """One normalizer for two layers, or one each."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.first = nn.BatchNorm1d(4)
        self.second = self.first if shared else nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.b(torch.relu(self.first(self.a(x))))))


class Residual(nn.Module):
    def __init__(self, depth: int, place: str) -> None:
        super().__init__()
        self.place = place
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(4) if place != "none" else nn.Identity() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + torch.relu(layer(x))) if self.place == "after" else x + torch.relu(layer(norm(x)))
        return x


class Meeting(nn.Module):
    """Two branches, each behind a normalizer."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.left(self.a(x)) + self.right(self.b(x)))


class Block(nn.Module):
    """A transformer's block: attention, then a layer; norms before them, if at all."""

    def __init__(self, first: nn.Module | None = None, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = first or nn.LayerNorm(4), second or nn.LayerNorm(4)
        self.q, self.k, self.v, self.out, self.layer = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.out(nn.functional.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        return x + torch.nn.functional.gelu(self.layer(self.second(x)))


class Squashing(nn.Module):
    """γ tanh(α x): what stands for a normalizer in "Transformers without Normalization"."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.gamma = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * torch.tanh(self.alpha * x)


def blocks(*last: nn.Module, tied: bool = False, squashing: bool = False) -> Patient:
    one = nn.LayerNorm(4)
    made = [Block(one, one) if tied else Block(*(Squashing(4) for _ in range(2 * squashing))) for _ in range(3)]
    return Patient(nn.Sequential(nn.Linear(4, 4), *made, *last, nn.Linear(4, 2)), randn(2, 5, 4))


def squashed(gamma: float) -> Patient:
    """Deep, and steep but for γ tanh(α x)."""
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [Squashing(4), nn.Linear(4, 4)]
    patient = dense(*layers)
    with torch.no_grad():
        for layer in layers[1::2]:
            layer.weight.copy_(gamma * torch.eye(4))
    return patient


def moved_weight(norm: Callable[[nn.Module], nn.Module], factor: float) -> Patient:
    """A spectral norm whose weight was replaced, as by loading weights without its u and v, or only scaled."""
    layer = norm(nn.Linear(8, 8))
    with torch.no_grad():
        weight = layer.parametrizations.weight.original
        weight.copy_(factor * weight if factor else torch.diag(torch.arange(1.0, 9.0)))
    return dense(layer, nn.ReLU(), width=8)


def schedule(depth: int, warm: bool) -> Patient:
    """Post-norm residuals, and an optimizer that a scheduler may warm up."""
    patient = Patient(Residual(depth, "after"), randn(2, 4))
    optimizer = torch.optim.Adam(patient.model.parameters(), lr=1e-3)
    if warm:
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100)
    patient.settings["optimizer"] = optimizer
    return patient


def small_inputs(scale: float) -> Patient:
    patient = dense(nn.LayerNorm(4), nn.Linear(4, 2))
    patient.settings["data"] = [scale * randn(8, 4)]
    return patient


class Attention(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        with torch.no_grad():
            self.q.weight.copy_(size * torch.eye(4))
            self.k.weight.copy_(size * torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.q(x)[:, None], self.k(x)[:, None], self.v(x)[:, None])[:, 0]


STEPS = 160  # of a recorded run, one sample each
LAYERS = (
    {"name": "first", "role": "weight", "scale_free": True, "in_product": True, "parameter": "first.weight", "epsilon": None},
    {
        "name": "second",
        "role": "normalizer",
        "scale_free": None,
        "in_product": False,
        "parameter": "second.weight",
        "epsilon": 1e-5,
    },
)
HEALTHY: dict[str, Any] = {
    "loss": 1.0, "total_gradient_norm": 1.0, "learning_rate": 0.1, "log10_weight_product": 2.0, "log10_gain_tight": 0.5,
    "spectral_norm": [1.0, np.nan], "gain_tight": [np.nan, 1.0], "frobenius_norm": [3.0, 2.0], "gradient_norm": [0.6, 0.8],
    "input_variance": [np.nan, 1.0], "dead_fraction": [np.nan, 0.1], "effective_lr": [0.1, np.nan],
    "running_divergence": [np.nan, 0.1], "running_shift": [np.nan, 0.1], "update_norm": [0.1, 0.1], "largest_input": [np.nan, 2.5],
    "update_ratio": [0.01, 0.01], "batch_size": [np.nan, 32.0], "update_rms": [0.01, 0.01], "attention_logit": [5.0, np.nan], "attention_entropy": [0.5, np.nan], "write_ratio": [0.5, np.nan],
}  # fmt: skip


@dataclass
class Recorded:
    """A run as `ns.load_run` gives it."""

    held: dict[str, np.ndarray]
    findings: tuple[Finding, ...] = ()
    layers = LAYERS
    judged = {}

    @property
    def life(self) -> Life:
        return Life("finished", int(self.held["step"][-1]))

    @property
    def columns(self) -> list[str]:
        return list(self.held)

    def arrays(self, *columns: str) -> dict[str, np.ndarray]:
        return {name: self.held[name] for name in ("step", *columns)}


APART = RULES["NS515"].finding(Hit("first.weight", "first.weight differs on rank 1"))  # seen between processes, not in rows


def recorded(every: int = 1, seen: tuple[Finding, ...] = (), **changed: Any) -> Patient:
    """A healthy run in which, from sample 120 on, a column has another value: one for each layer, a function of the step, or a number.

    every: steps between samples. seen: findings of the training itself.
    """
    steps = every * np.arange(1, STEPS + 1)
    held = {name: np.tile(np.array(value, float), (STEPS, 1)).squeeze() for name, value in HEALTHY.items()} | {"step": steps}
    for name, value in changed.items():
        late = [value(step) for step in steps[119:]] if callable(value) else [value] * (STEPS - 119)
        held[name] = np.concatenate([held[name][:119], np.array(late, float)])
    patient = conv()
    patient.settings["run"] = Recorded(held, seen)
    return patient


def shifted(by: float) -> Patient:
    patient = conv()
    for _ in range(60):
        patient.model.train()(randn(64, 3, 6, 6))
    labels = patient.model.eval()(randn(64, 3, 6, 6)).argmax(1)
    patient.settings["data"] = (randn(64, 3, 6, 6) * by + (by - 1), labels)
    return patient


def unmoved(dtype: torch.dtype, rate: float) -> Patient:
    """After twelve steps of Adam, which float32 can make and bfloat16 rounds away."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).to(dtype)
    inputs = randn(16, 4).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(12):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return Patient(model, inputs, {"optimizer": optimizer})


def stepped(rate: float) -> Patient:
    patient = shifted(1.0)
    patient.settings["optimizer"] = torch.optim.SGD(apart(patient.model, 1e-4), lr=rate)
    return patient


def accumulated(normalizer: nn.Module) -> Patient:
    patient = conv(normalizer=normalizer)
    patient.settings["accumulation"] = 4
    return patient


def modes(model: bool, norm: bool, gradient: bool) -> Patient:
    """A model of two normalizers, the second in a mode and with gradients of its own."""
    patient = image(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    )
    patient.model.train(model)
    patient.model[4].train(norm).requires_grad_(gradient)
    return patient


def all_modes(norms: bool) -> Patient:
    patient = modes(True, True, True)
    for index in (1, 4):
        patient.model[index].train(norms)
    return patient


def batches(size: int) -> Patient:
    patient = conv()
    patient.settings["data"] = [randn(size, 3, 6, 6) for _ in range(3)]
    return patient


def deep(scale: float, normalized: bool) -> Patient:
    layers: list[nn.Module] = []
    for _ in range(10):
        layer = nn.Linear(4, 4)
        with torch.no_grad():
            layer.weight.copy_(scale * torch.eye(4))
        layers += [layer, nn.LayerNorm(4)] if normalized else [layer]
        layers.append(nn.ReLU())
    return dense(*layers)


def heavy(share: float) -> Patient:
    patient = deep(1.0, normalized=False)
    with torch.no_grad():
        for index, layer in enumerate(part for part in patient.model if isinstance(part, nn.Linear)):
            layer.weight.copy_((100.0 if index == 3 else share) * torch.eye(4))
    return patient


def amplified(variance: float) -> Patient:
    layers: list[nn.Module] = []
    for _ in range(4):
        norm = nn.BatchNorm1d(4)
        norm.running_var.fill_(variance)
        layers += [nn.Linear(4, 4, bias=False), norm, nn.ReLU()]
    return dense(*layers)


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        tensor = getattr(module, name)
        if isinstance(tensor, Tensor):
            tensor[...] = value if not isinstance(value, Tensor) else value.to(tensor.dtype)
        else:
            setattr(module, name, value)

    return change


def trained_without_statistics(module: Any) -> None:
    module.weight.copy_(torch.linspace(0.5, 1.5, 8))


def trained_with_statistics(module: Any) -> None:
    trained_without_statistics(module)
    module.running_var.copy_(torch.linspace(0.5, 1.5, 8))


def tracked(steps: int) -> Callable[[Any], None]:
    return lambda module: module.num_batches_tracked.fill_(steps)


TO_LAST = Function(lambda x: x.permute(0, 2, 3, 1))
TURNED = Function(lambda x: x.mT)

CASES: dict[str, tuple[Maker, Maker]] = {  # rule: (bad, good)
    "NS101": (lambda: conv(bias=True), lambda: conv(normalizer=nn.GroupNorm(2, 8), bias=True)),
    "NS102": (lambda: dense(nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4), nn.ReLU()), lambda: dense(nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4), nn.ReLU())),
    "NS103": (lambda: dense(nn.Linear(4, 2), nn.LayerNorm(2), nn.ReLU()), lambda: dense(nn.Linear(4, 3), nn.LayerNorm(3), nn.ReLU())),
    "NS104": (lambda: Patient(Twice(True), randn(8, 4)), lambda: Patient(Twice(False), randn(8, 4))),
    "NS105": (lambda: dense(nn.Linear(4, 3), nn.LayerNorm(3)), lambda: dense(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 3))),
    "NS106": (lambda: Patient(Residual(40, "after"), randn(2, 4)), lambda: Patient(Residual(40, "inside"), randn(2, 4))),
    "NS107": (lambda: Patient(Residual(6, "none"), randn(2, 4)), lambda: Patient(Residual(6, "inside"), randn(2, 4))),
    "NS108": (lambda: deep(10.0, normalized=False), lambda: deep(1.0, normalized=False)),
    "NS109": (lambda: image(parametrizations.weight_norm(nn.Conv2d(3, 4, 3, bias=False)), nn.BatchNorm2d(4), nn.ReLU()),
              lambda: image(parametrizations.weight_norm(nn.Conv2d(3, 4, 3, bias=False)), nn.ReLU())),
    "NS110": (lambda: conv(normalizer=nn.GroupNorm(8, 8)), lambda: conv(normalizer=nn.GroupNorm(4, 8))),
    "NS111": (lambda: image(nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.ReLU()), lambda: image(nn.Conv2d(3, 4, 3), TO_LAST, nn.LayerNorm(4), nn.ReLU())),
    "NS112": (lambda: Patient(Meeting(nn.BatchNorm1d(4), nn.LayerNorm(4)), randn(8, 4)), lambda: Patient(Meeting(nn.LayerNorm(4), nn.LayerNorm(4)), randn(8, 4))),
    "NS113": (lambda: blocks(nn.LayerNorm(4), tied=True), lambda: blocks(nn.LayerNorm(4))),
    "NS114": (lambda: blocks(), lambda: blocks(nn.LayerNorm(4))),
    "NS115": (lambda: dense(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()),
              lambda: dense(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8))),
    "NS116": (lambda: dense(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1)), lambda: dense(nn.LayerNorm(4), nn.Linear(4, 4), nn.Softmax(-1))),
    "NS201": (lambda: with_norm(trained_without_statistics), lambda: with_norm(trained_with_statistics)),
    "NS202": (lambda: with_norm(set_to("weight", torch.tensor([0.0, 0, 0, 1, 1, 1, 1, 1]))), lambda: with_norm(set_to("weight", 1e-3))),
    "NS203": (lambda: with_norm(set_to("running_var", 1e-6)), lambda: with_norm(set_to("running_var", 1e-3))),
    "NS204": (lambda: with_norm(set_to("running_var", torch.tensor([1e-5, 1, 1, 1, 1, 1, 1, 1])[:8] * torch.tensor([1e-4] + [1.0] * 7))), lambda: with_norm(set_to("running_var", 1e-9))),
    "NS205": (lambda: shifted(20.0), lambda: shifted(1.0)),
    "NS206": (lambda: modes(True, True, False), lambda: modes(True, False, False)),
    "NS207": (lambda: with_norm(set_to("momentum", 0.99)), lambda: with_norm(set_to("momentum", None))),
    "NS208": (lambda: conv(normalizer=nn.BatchNorm2d(8, track_running_stats=False)), lambda: conv()),
    "NS209": (lambda: with_norm(set_to("bias", torch.tensor([float("nan")] + [0.0] * 7))), lambda: with_norm(set_to("bias", 1e30))),
    "NS211": (lambda: small_inputs(1e-3), lambda: small_inputs(0.1)),
    "NS212": (lambda: moved_weight(parametrizations.spectral_norm, 0.0), lambda: moved_weight(parametrizations.spectral_norm, 5.0)),
    "NS213": (lambda: with_norm(set_to("bias", torch.tensor([-5.0] * 3 + [0.0] * 5))), lambda: with_norm(set_to("bias", -3.0))),
    "NS301": (lambda: optimized(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=1e-4)), lambda: optimized(lambda m: torch.optim.SGD(apart(m, 1e-4), lr=0.1))),
    "NS302": (lambda: batches(2), lambda: batches(16)),
    "NS303": (lambda: optimized(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), lambda: optimized(lambda m: torch.optim.SGD(apart(m, 1e-4), lr=0.1))),
    "NS304": (lambda: optimized(lambda m: torch.optim.SGD(apart(m, 1.0), lr=0.1)), lambda: optimized(lambda m: torch.optim.SGD(apart(m, 0.01), lr=0.1))),
    "NS305": (lambda: optimized(lambda m: torch.optim.SGD([p for p in m.parameters() if p.dim() > 1], lr=0.1)), lambda: optimized(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))),
    "NS306": (lambda: Patient(nn.DataParallel(conv().model), conv().example), lambda: Patient(nn.DataParallel(conv(normalizer=nn.SyncBatchNorm(8)).model), conv().example)),
    "NS307": (lambda: Patient(conv().model.bfloat16(), conv().example.bfloat16()), lambda: conv()),
    "NS308": (lambda: all_modes(False), lambda: all_modes(True)),
"NS309": (lambda: recorded(effective_lr=[0.009, np.nan]), lambda: recorded(effective_lr=[0.02, np.nan])),
    "NS310": (lambda: stepped(1e3), lambda: stepped(1e-3)),
    "NS311": (lambda: accumulated(nn.BatchNorm2d(8)), lambda: accumulated(nn.GroupNorm(2, 8))),
    "NS401": (lambda: heavy(1.05), lambda: heavy(20.0)),
    "NS402": (lambda: amplified(1e-4), lambda: amplified(1.0)),
"NS403": (lambda: recorded(log10_weight_product=lambda step: 2 + 0.1 * (step - 120)), lambda: recorded(log10_weight_product=lambda step: 2 + 0.01 * (step - 120))),
    "NS404": (lambda: Patient(Attention(20.0), randn(2, 5, 4)), lambda: Patient(Attention(1.0), randn(2, 5, 4))),
    "NS210": (lambda: unmoved(torch.bfloat16, 1e-4), lambda: unmoved(torch.float32, 1e-4)),
    "NS501": (lambda: recorded(loss=float("inf")), lambda: recorded(loss=1.1)),
    "NS502": (lambda: recorded(loss=lambda step: 3.0 if step == 140 else 1.0), lambda: recorded(loss=lambda step: 1.03 if step == 140 else 1.0)),
    "NS503": (lambda: recorded(loss=2.0), lambda: recorded(loss=lambda step: 1 - 0.01 * (step - 119))),
    "NS504": (lambda: recorded(total_gradient_norm=150.0), lambda: recorded(total_gradient_norm=50.0)),
    "NS505": (lambda: recorded(gradient_norm=[1e-9, 1.0]), lambda: recorded(gradient_norm=[1e-6, 1.0])),
    "NS506": (lambda: recorded(input_variance=[np.nan, 5e-5]), lambda: recorded(input_variance=[np.nan, 5e-4])),
    "NS507": (lambda: recorded(dead_fraction=[np.nan, 0.6]), lambda: recorded(dead_fraction=[np.nan, 0.4])),
    "NS508": (lambda: recorded(running_divergence=[np.nan, 2.0]), lambda: recorded(running_divergence=[np.nan, 1.0])),
    "NS509": (lambda: recorded(frobenius_norm=[np.inf, 2.0]), lambda: recorded(frobenius_norm=[1e30, 2.0])),
    "NS312": (lambda: unmoved(torch.bfloat16, 1e-4), lambda: unmoved(torch.bfloat16, 1e-2)),
    "NS510": (lambda: recorded(update_norm=[0.1, 0.0]), lambda: recorded(update_norm=[0.0, 1e-9])),
    "NS511": (lambda: recorded(largest_input=[np.nan, 300.0]), lambda: recorded(largest_input=[np.nan, 200.0])),
    "NS512": (lambda: recorded(attention_logit=[101.0, np.nan]), lambda: recorded(attention_logit=[99.0, np.nan])),
    "NS513": (lambda: recorded(update_rms=[0.11, 0.01]), lambda: recorded(update_rms=[0.09, 0.01])),
    "NS514": (lambda: recorded(every=2, write_ratio=[0.002, np.nan]), lambda: recorded(every=2, write_ratio=[0.004, np.nan])),
    "NS515": (lambda: recorded(seen=(APART,)), lambda: recorded()),
    "NS516": (lambda: recorded(spectral_norm=[11.0, np.nan]), lambda: recorded(spectral_norm=[9.0, np.nan])),
    "NS517": (lambda: recorded(largest_input=[np.nan, 26.0]), lambda: recorded(largest_input=[np.nan, 24.0])),
    "NS518": (lambda: recorded(update_ratio=[0.11, 0.01]), lambda: recorded(update_ratio=[0.09, 0.01])),
    "NS519": (lambda: recorded(batch_size=[np.nan, 7.0]), lambda: recorded(batch_size=[np.nan, 8.0])),
}  # fmt: skip

# further ways to break a rule, or to come close to it: (rule, whether it fires, patient)
FURTHER: dict[str, tuple[str, bool, Maker]] = {
    "post-norm without warm-up": ("NS106", True, lambda: schedule(14, warm=False)),
    "post-norm with warm-up": ("NS106", False, lambda: schedule(14, warm=True)),
    "few post-norm layers without warm-up": ("NS106", False, lambda: schedule(10, warm=False)),
    "tanh for normalizers": ("NS108", False, lambda: squashed(10.0)),
    "tanh for normalizers in a transformer": ("NS108", False, lambda: blocks(squashing=True)),
    "LayerNorm along the sequence": ("NS111", True, lambda: Patient(nn.Sequential(nn.Linear(4, 6), TURNED, nn.LayerNorm(5), TURNED, nn.Linear(6, 2)), randn(2, 5, 4))),
    "LayerNorm on turned features": ("NS111", False, lambda: Patient(nn.Sequential(nn.Linear(4, 6), TURNED, nn.Linear(5, 3), TURNED, TURNED, nn.LayerNorm(3)), randn(2, 5, 4))),
    "whole blocks tied": ("NS113", False, lambda: Patient(nn.Sequential(*[Block()] * 3, nn.LayerNorm(4)), randn(2, 5, 4))),
    "another output has the final norm": ("NS114", False, lambda: Patient(Pooled(), randn(2, 5, 4))),
    "two norms in a row, by hand": ("NS102", True, lambda: dense(nn.Linear(4, 4), ByHand(), ByHand(), nn.ReLU())),
    "a norm by hand on the logits": ("NS105", True, lambda: dense(nn.Linear(4, 4), ByHand())),
    "a norm by hand before softmax": ("NS116", True, lambda: dense(nn.Linear(4, 4), ByHand(), nn.Softmax(-1))),
    "little dropout before BN": ("NS115", False, lambda: dense(nn.Dropout(0.05), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU())),
    "γ zero in 49 %": ("NS202", True, lambda: zeros(49)),
    "γ zero in 55 %": ("NS202", True, lambda: zeros(55)),
    "γ zero in 100 %": ("NS202", True, lambda: zeros(100)),
    "NaN in a plain weight": ("NS209", True, lambda: with_part(4, "weight", float("nan"))),
    "a mask of infinities": ("NS209", False, lambda: masked()),
    "old spectral norm, never run": ("NS212", True, lambda: dense(torch.nn.utils.spectral_norm(nn.Linear(64, 64)), width=64)),
    "statistics of three batches": ("NS205", False, lambda: begun(3)),
    "statistics of sixty batches": ("NS205", True, lambda: begun(60)),
    "decay on γ of input norms alone": ("NS301", True, lambda: decayed_inputs()),
    "micro-batches of two": ("NS302", True, lambda: micro(2)),
    "micro-batches of sixteen": ("NS302", False, lambda: micro(16)),
    "Adam with float32 copies": ("NS312", False, lambda: with_master()),
}  # fmt: skip


class ByHand(nn.Module):
    """A root mean square norm, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Pooled(nn.Module):
    """The stream is one output, its normalized mean another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.Sequential(Block(), Block(), Block()), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.blocks(x)
        return {"last_hidden_state": x, "pooler_output": self.norm(x.mean(1))}


def zeros(share: int) -> Patient:
    patient = conv(normalizer=nn.BatchNorm2d(100))
    patient.model[0], patient.model[4] = nn.Conv2d(3, 100, 3, bias=False), nn.Linear(1600, 2)
    with torch.no_grad():
        patient.model[1].weight[:share] = 0
    return patient


def with_part(index: int, name: str, value: float) -> Patient:
    patient = conv()
    with torch.no_grad():
        getattr(patient.model[index], name)[0, 0] = value
    return patient


def masked() -> Patient:
    patient = conv()
    patient.model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    return patient


def begun(steps: int) -> Patient:
    """A network that has seen some batches, on data unlike them."""
    patient = conv()
    for _ in range(steps):
        patient.model.train()(randn(64, 3, 6, 6))
    patient.settings["data"] = randn(64, 3, 6, 6) * 20
    return patient


def decayed_inputs() -> Patient:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
    groups = [{"params": [model[0].weight, model[1].weight], "weight_decay": 0.1}, {"params": [model[0].bias], "weight_decay": 0.0}]
    return Patient(model, randn(2, 4), {"optimizer": torch.optim.AdamW(groups, lr=1e-3)})


def micro(size: int) -> Patient:
    patient = conv()
    patient.settings["micro_batch"] = size
    return patient


def with_master() -> Patient:
    patient = unmoved(torch.bfloat16, 1e-4)
    optimizer = patient.settings["optimizer"]
    for parameter in patient.model.parameters():
        optimizer.state[parameter]["master"] = parameter.detach().float() * (1 + 2**-12)
    return patient
