"""Small models of every kind, each with data, a loss and a mode, and the dense reference of its Hessian."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from normscope.curvature.twice import twice_differentiable

CLASSES = 3


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one sample
    mode: str = "train"
    loss: Callable[[Any, Any], Tensor] = functional.cross_entropy
    batch_size: int = 14  # of 24 samples: batches of 14 and 10

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make().double()
            for part in model.modules():  # running statistics and affine parameters that are nothing special
                for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                    if tensor.is_floating_point() and tensor.dim() == 1:
                        tensor.data.add_(0.3 * torch.rand(tensor.shape))
        return model

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(24, *self.shape, generator=generator, dtype=torch.float64)
        if self.loss is functional.mse_loss:
            return inputs, torch.randn(24, CLASSES, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(CLASSES, (24,), generator=generator)


class Attention(nn.Module):
    def __init__(self, normalizer: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.attention, self.norm, self.head = nn.MultiheadAttention(4, 2, batch_first=True), normalizer(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.second(functional.silu(self.norm(self.first(x))))).mean((2, 3)))


class Tied(nn.Module):
    """One weight in two places, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.unused = nn.Linear(4, 4), nn.Linear(4, CLASSES), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def mlp(*normalizers: nn.Module, activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), *normalizers, activation or nn.Tanh(), nn.Linear(6, CLASSES))


def conv(normalizer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), normalizer, nn.GELU(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, CLASSES))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 3, batch_first=True), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


IMAGE = (2, 5, 5)
CASES = {
    "linear": Case(lambda: nn.Linear(4, CLASSES), (4,)),
    "mlp": Case(mlp, (4,)),
    "mlp regression": Case(mlp, (4,), loss=functional.mse_loss),
    "mlp relu": Case(lambda: mlp(activation=nn.ReLU()), (4,)),
    "batch norm": Case(lambda: mlp(nn.BatchNorm1d(6)), (4,)),
    "batch norm, eval": Case(lambda: mlp(nn.BatchNorm1d(6)), (4,), "eval"),
    "batch norm, relu": Case(lambda: mlp(nn.BatchNorm1d(6), activation=nn.ReLU()), (4,)),
    "batch norm, regression": Case(lambda: mlp(nn.BatchNorm1d(6)), (4,), loss=functional.mse_loss),
    "batch norm, no running statistics": Case(lambda: mlp(nn.BatchNorm1d(6, track_running_stats=False)), (4,), "eval"),
    "two batch norms": Case(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)
        ),
        (4,),
    ),
    "layer norm": Case(lambda: mlp(nn.LayerNorm(6)), (4,)),
    "rms norm": Case(lambda: mlp(nn.RMSNorm(6, eps=1e-5)), (4,)),
    "dropout": Case(lambda: mlp(nn.Dropout(0.0)), (4,)),
    "conv batch norm": Case(lambda: conv(nn.BatchNorm2d(4)), IMAGE),
    "conv batch norm, eval": Case(lambda: conv(nn.BatchNorm2d(4)), IMAGE, "eval"),
    "conv group norm": Case(lambda: conv(nn.GroupNorm(2, 4)), IMAGE),
    "conv instance norm": Case(lambda: conv(nn.InstanceNorm2d(4, affine=True)), IMAGE),
    "residual": Case(Residual, (2, 4, 4)),
    "residual, eval": Case(Residual, (2, 4, 4), "eval"),
    "attention": Case(Attention, (3, 4)),
    "attention, eval": Case(Attention, (3, 4), "eval"),
    "attention, rms norm": Case(lambda: Attention(nn.RMSNorm), (3, 4)),
    "weight norm": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, CLASSES)), (4,)
    ),
    "weight norm of a whole": Case(lambda: parametrizations.weight_norm(nn.Linear(4, CLASSES), dim=None), (4,)),
    "tied and unused": Case(Tied, (4,)),
    "recurrent": Case(Recurrent, (3, 3)),
}


def dense_hessian(case: Case) -> Tensor:
    """The Hessian by torch.autograd.functional, of the batches' losses weighted by size."""
    model = copy.deepcopy(case.model()).train(case.mode == "train")
    inputs, targets = case.data()
    shapes = {name: value.shape for name, value in model.named_parameters()}
    start = torch.cat([value.detach().reshape(-1) for value in model.parameters()])

    def total(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        state = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
        losses = [
            len(x) / len(inputs) * case.loss(functional_call(model, state, (x,)), y)
            for x, y in zip(inputs.split(case.batch_size), targets.split(case.batch_size), strict=True)
        ]
        return torch.stack(losses).sum()

    with twice_differentiable():
        return torch.autograd.functional.hessian(total, start)
