"""A random program as a module: steps that run on the example, one after another, on one tensor or on two."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.networks import Draw
from tests.sweep.choices import Joint, Step
from tests.sweep.operations import JOINTS, MAKERS, MIXING

SHAPES = ((4,), (1,), (6,), (9,), (2, 6), (3, 4), (1, 5), (4, 3, 5), (2, 4, 4), (1, 6, 6), (3, 2, 2))
MOST_ENTRIES, MOST_TRIES = 400, 60


class Program(nn.Module):
    """x → steps → output. A joint step reads an earlier value of the same shape, or the last one twice."""

    def __init__(self, dtype: torch.dtype, draw: Draw) -> None:
        super().__init__()
        self.kept, self.dtype, self.draw = nn.ParameterList(), dtype, draw
        self.parts, self.learned = nn.ModuleList(), draw.chance(0.5)  # without gradients torch allows more in-place writes
        self.steps: list[tuple[Step | Joint, int | None]] = []  # a function, and which earlier value it reads beside the last

    def parameter(self, *shape: int) -> Callable[[], Tensor]:
        values = torch.randn(shape, generator=self.draw.generator, dtype=torch.float64)
        size = self.draw(1.0, 1.0, 1.0, self.draw.power_of_ten(-3, 3), 0.0 if self.draw.chance(0.1) else 1.0)
        place = len(self.kept)
        self.kept.append(nn.Parameter((values * size / math.sqrt(max(shape[-1:] or (1,)))).to(self.dtype), self.learned))
        return lambda: self.kept[place]

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step, other in self.steps:
            values.append(step(values[-1]) if other is None else step(values[-1], values[other]))
        return values[-1]

    def __deepcopy__(self, memo: dict[int, object]) -> Program:
        """Steps are closures over this module, so a copy is a program made anew from the same seed."""
        twin = program(self.draw.seed)[0]
        twin.load_state_dict(self.state_dict())
        memo[id(self)] = twin
        return twin

    def __str__(self) -> str:
        return " → ".join(_name(step) for step, _ in self.steps)


def _name(step: Callable[..., Tensor]) -> str:
    code = getattr(step, "__code__", None)
    return (
        f"{getattr(step, '__qualname__', type(step).__name__).split('.')[0]}:{code.co_firstlineno}"
        if code
        else getattr(step, "__name__", type(step).__name__)
    )


def program(seed: int) -> tuple[Program, Tensor]:
    """The program of one seed, and a batch to trace it on."""
    draw = Draw(seed)
    draw.seed = seed
    dtype = torch.float64 if draw.chance(0.5) else torch.float32
    made = Program(dtype, draw).eval()
    scale = draw(
        1.0, 1.0, 1.0, 1.0, 10.0, 1e-3, draw.power_of_ten(-300, 300) if dtype == torch.float64 else draw.power_of_ten(-30, 30)
    )
    x = torch.randn(draw(1, 2, 4), *draw(*SHAPES), generator=draw.generator, dtype=dtype) * scale
    if draw.chance(0.1):
        x = x.round()  # kinks and ties
    mixing = draw.chance(0.04)
    length = draw.integer(2, 9)
    values = [x]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(MOST_TRIES):
            step, other = _next(draw, made, values)
            if len(made.steps) >= length:
                break
            if (value := _tried(step, other, values)) is not None:
                made.steps.append((step, other))
                values.append(value)
                if isinstance(step, nn.Module):
                    made.parts.append(step)
        if mixing and values[-1].dim() > 1:
            step = draw(*MIXING)
            if _tried(step, None, values) is not None:
                made.steps.append((step, None))
    return made, x


def _next(draw: Draw, made: Program, values: list[Tensor]) -> tuple[Step | Joint, int | None]:
    alike = [place for place, value in enumerate(values) if value.shape == values[-1].shape]
    if draw.chance(0.2):
        return draw(*JOINTS), draw(*alike)
    maker = draw.random.choices([maker for _, maker in MAKERS], [weight for weight, _ in MAKERS])[0]
    try:
        return maker(draw, values[-1], made.parameter), None
    except (ValueError, IndexError, RuntimeError, TypeError):  # not for tensors of this shape
        return torch.relu, None


def _tried(step: Step | Joint, other: int | None, values: list[Tensor]) -> Tensor | None:
    """The value after a step, unless it does not run, loses the batch, grows too large or leaves the numbers."""
    try:
        value = step(values[-1]) if other is None else step(values[-1], values[other])
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError):
        return None
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype != values[0].dtype or value.dim() < 2:
        return None
    good = value.shape[0] == values[0].shape[0] and 0 < value[0].numel() <= MOST_ENTRIES and bool(value.isfinite().all())
    return value if good else None


def mixes(twin: Program, x: Tensor) -> bool:
    """Whether one sample's output changes with the others, or with how many there are; seen in float64 on four samples.

    False where the program does not take one sample alone, or four.
    """
    generator = torch.Generator().manual_seed(0)
    batch = x[:1] * (1 + 0.1 * torch.randn(4, *x.shape[1:], generator=generator, dtype=x.dtype))
    with torch.no_grad():
        try:
            together = twin(batch.clone())
            alone = torch.cat([twin(row.clone()) for row in batch.split(1)])
        except (RuntimeError, ValueError, IndexError):
            return False
    if together.shape != alone.shape:
        return True
    return not torch.allclose(together, alone, rtol=1e-9, atol=1e-9 * float(alone.abs().max().nan_to_num(0, 0, 0)), equal_nan=True)


def twin_in_double(made: Program) -> Program:
    return copy.deepcopy(made).double().eval()
