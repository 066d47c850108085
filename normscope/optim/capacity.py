"""Keep a model's Lipschitz bound in check while it trains: a hard cap on every linear map, or a penalty on their product."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from normscope.core.deprecation import earlier
from normscope.core.errors import InputError
from normscope.core.magnitude import Magnitude
from normscope.core.rounding import above, below, length, times_power_of_two
from normscope.operators.conv import Convolution
from normscope.operators.dense import spectral_norm

ANY_SIZE = 1 << 20  # inputs so large that the bound of a convolution holds for every size
SMALLEST = 1e-6  # norms and gains below this count as this in the penalty, whose slope is 0 there
MOST_TURNS = 100  # of scaling a weight, each of which lowers its norm unless nothing can
MOST_ROUNDING = 1e-4  # above this the norm of a scaled weight is bounded again, rather than the weight scaled further
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
NORMALIZERS = (*STATISTICS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass
class CappedMap:
    """A linear map whose norm is capped, and what was last proved about it: ‖A‖ ≤ `proved` at the weight `seen`."""

    name: str
    module: nn.Module
    limit: float
    proved: float = math.inf
    seen: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def weight(self) -> torch.Tensor:
        return self.module.weight

    def norm(self) -> Magnitude:
        """A certified upper bound; for a convolution, on inputs of any size."""
        if isinstance(self.module, nn.Linear):
            return spectral_norm(self.weight)
        return _convolution(self.module).norm()[0]

    @property
    def rounding(self) -> float:
        """How much a scaled weight's rounding can add to the norm, relatively: √r ‖ΔW‖_F ≤ (ε/2) √(r · rank) ‖A‖."""
        rank = min(len(self.weight), self.weight.numel() // max(1, len(self.weight)))
        return torch.finfo(self.weight.dtype).eps * math.sqrt(reuse(self.module) * rank)

    def within(self) -> bool:
        """Whether what was proved still implies the limit: ‖A‖ ≤ proved + √r ‖W − W_seen‖_F, with r as in `reuse`."""
        if not math.isfinite(self.proved):
            return False
        precise = torch.promote_types(self.weight.dtype, torch.float64)
        moved = length((self.weight.detach().to(precise) - self.seen.to(precise)).abs())
        return self.proved <= self.limit and above(math.sqrt(reuse(self.module)) * float(moved)) <= below(self.limit - self.proved)

    @torch.no_grad()
    def clip(self) -> None:
        """Scale the weight so that the certified norm is at most the limit, unless it is already."""
        if self.within():
            return
        bound = self.norm().ceiling
        if not math.isfinite(bound):
            raise InputError(f"{self.name or 'the model'} has no finite norm: its weight is not finite or too large")
        kind = torch.finfo(self.weight.dtype)
        subnormal = math.sqrt(reuse(self.module) * self.weight.numel()) * kind.smallest_normal  # below it their rounding counts
        covered = self.rounding <= MOST_ROUNDING and self.limit > subnormal
        margin = self.rounding + 2 * kind.eps if covered else 2 * kind.eps  # enough for every entry to move
        for _ in range(MOST_TURNS):
            if bound <= self.limit:
                break
            self._scale(self.limit, bound, 1 - margin)
            bound = self.limit if covered else self.norm().ceiling
        else:
            raise InputError(f"{self.name or 'the model'} cannot be scaled to a norm of {self.limit:g} in {self.weight.dtype}")
        self.proved, self.seen = bound, self.weight.detach().clone()

    def _scale(self, limit: float, bound: float, less: float) -> None:
        """Times less · limit/bound < 1, a power of two apart: the whole may be too small for the weight's type, or for float64."""
        (high, up), (low, down) = math.frexp(limit), math.frexp(bound)
        factor, exponent = math.frexp(high / low * less)
        self.weight.copy_(times_power_of_two(self.weight, up - down + exponent)).mul_(factor)


class SpectralCap:
    """Scales down every linear map of a model whose certified norm exceeds its limit, whenever it is called.

    Work is saved without giving up the proof: a map is bounded again only once its weight has moved so far since the last time that
    the limit no longer follows. The bound of a convolution holds for inputs of every size.

    left_out: the parameters with two or more axes that are not capped, such as those of attention, embeddings or recurrent layers.
    """

    def __init__(self, model: nn.Module, limit: float | Mapping[str, float]) -> None:
        maps = _linear_maps(model)
        limits = limit if isinstance(limit, Mapping) else dict.fromkeys(maps, limit)
        if unknown := set(limits) - set(maps):
            raise InputError(f"{min(unknown)!r} is not a linear map of this model: choose from {', '.join(maps)}")
        for name, value in limits.items():
            _check_cappable(name or "the model", maps[name], value)
        self.layers = tuple(CappedMap(name, maps[name], float(value)) for name, value in limits.items())
        capped = {layer.weight for layer in self.layers}
        self.left_out = tuple(name for name, value in model.named_parameters() if value.dim() > 1 and value not in capped)
        self._handle: Any = None

    def __call__(self, *_: Any) -> None:
        for layer in self.layers:
            layer.clip()

    def follow(self, optimizer: torch.optim.Optimizer) -> SpectralCap:
        """Apply the cap after each of the optimizer's steps."""
        self._handle = optimizer.register_step_post_hook(self)
        return self

    def remove(self) -> None:
        """Stop following the optimizer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


@earlier(positional=1)
def spectral_cap(
    model: nn.Module, limit: float | Mapping[str, float], *, optimizer: torch.optim.Optimizer | None = None
) -> SpectralCap:
    """Cap the certified spectral norm of every linear layer and convolution, now and after each step of `optimizer`.

    >>> layer = nn.Linear(3, 3)
    >>> _ = spectral_cap(layer, limit=0.5)
    >>> float(spectral_norm(layer.weight)) <= 0.5 * (1 + 1e-6)
    True

    limit: one for all, or a mapping from the names of modules to theirs (others are left alone).
    optimizer: the one that trains the model; without it, call the returned cap whenever it is to act.
    """
    cap = SpectralCap(model, limit)
    cap()
    return cap if optimizer is None else cap.follow(optimizer)


class LogCapacity(nn.Module):
    """Σ log ‖A_l‖ over linear maps plus Σ log g_l over normalizers, differentiable: a penalty to add to the loss.

    ‖A‖ is estimated as uᵀWv, with u and v improved by one power iteration at every call; for a convolution W is the kernel as a
    matrix (out, in · taps), times √r with r as in `reuse`. The gain g of a normalizer is max|γ|/√(v + ε) where running statistics
    are kept and max|γ| elsewhere, where it also depends on the data. Values below 1e-6 count as 1e-6. A guide for training, not a
    bound: that is `ns.lipschitz`.
    """

    def __init__(self, model: nn.Module, iterations: int = 20) -> None:
        super().__init__()
        maps = list(_linear_maps(model).values())
        if not maps:
            raise InputError("the model has no linear layer or convolution, so it has no capacity to penalize")
        normalizers = [module for module in model.modules() if isinstance(module, NORMALIZERS) and module.weight is not None]
        self._parts = (maps, normalizers)  # in a tuple, so that they do not become submodules
        generator = torch.Generator().manual_seed(0)
        for index, module in enumerate(maps):
            matrices = _matrices(module)
            start = torch.randn(matrices.shape[:2], generator=generator).to(matrices)
            self.register_buffer(f"left_{index}", nn.functional.normalize(start))
        with torch.no_grad():
            for _ in range(iterations):
                self()

    def forward(self) -> torch.Tensor:
        maps, normalizers = self._parts
        norms = [self._norm(index, module) for index, module in enumerate(maps)]
        return torch.stack([value.clamp(min=SMALLEST).log().float() for value in (*norms, *map(_gain, normalizers))]).sum()

    def _norm(self, index: int, module: nn.Module) -> torch.Tensor:
        matrices, left = _matrices(module), self.get_buffer(f"left_{index}")
        with torch.no_grad():
            right = nn.functional.normalize(torch.einsum("gi,gij->gj", left, matrices))
            left.copy_(nn.functional.normalize(torch.einsum("gij,gj->gi", matrices, right)))
        values = torch.einsum("gi,gij,gj->g", left.clone(), matrices, right)
        return values.amax() * math.sqrt(reuse(module))


def reuse(module: nn.Module) -> int:
    """How often a convolution reads an entry of its input at most, r = ∏ ⌈k/(s/gcd(s, d))⌉; 1 for a linear layer.

    The convolution is its kernel matrix applied to patches, and r is the squared norm of taking patches.
    """
    if isinstance(module, nn.Linear):
        return 1
    triples = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    return math.prod(math.ceil(k / (s // math.gcd(s, d))) for k, s, d in triples)


def _linear_maps(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers and convolutions by name; a weight that two of them share counts in each."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, *CONVOLUTIONS))}


def _check_cappable(name: str, module: nn.Module, limit: float) -> None:
    if not isinstance(limit, (numbers.Real, torch.Tensor)) or not limit > 0:
        raise InputError(f"the limit of a norm must be a positive number, got {limit!r}")
    if is_parametrized(module, "weight"):
        raise InputError(f"the weight of {name} is parametrized, so it cannot be scaled: remove that first, or leave {name} out")
    if isinstance(module, CONVOLUTIONS) and module.padding_mode != "zeros":
        raise InputError(f"{name} pads by {module.padding_mode!r}, which has no bound for inputs of every size: leave {name} out")


def _convolution(module: nn.Module) -> Convolution:
    """The operator of a convolution (of the adjoint, for a transposed one) on inputs so large that none has a larger norm."""
    axes = len(module.stride)
    return Convolution(module.weight, (ANY_SIZE,) * axes, module.stride, ((0, 0),) * axes, module.dilation, module.groups)


def _matrices(module: nn.Module) -> torch.Tensor:
    """The kernel as a matrix for each group: (groups, out, in · taps), or (groups, in, out · taps) where it is transposed."""
    return module.weight.flatten(1).unflatten(0, (getattr(module, "groups", 1), -1))


def _gain(module: nn.Module) -> torch.Tensor:
    scale = module.weight.abs()
    if isinstance(module, STATISTICS) and module.running_var is not None:
        scale = scale * (module.running_var + module.eps).rsqrt()
    return scale.amax()
