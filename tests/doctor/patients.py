"""Models with what the doctor is told about them: data, an optimizer, a recorded run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


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
