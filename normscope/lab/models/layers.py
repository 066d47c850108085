"""Linear maps and convolutions with weights from a generator, and what is done to them instead of a normalization layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

from normscope.lab.models.normalizers import has_layer


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the size up to its stride; its weights are not yet set."""
    layer: nn.Conv2d = nn.utils.skip_init(
        nn.Conv2d, inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias
    )
    return layer


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear map; its weights are not yet set."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias)
    return layer


def follows_bias(normalizer: str) -> bool:
    """Whether a layer before the normalizer keeps its bias: a normalization layer has one of its own."""
    return not has_layer(normalizer)


def initialize(model: nn.Module, normalizer: str, generator: torch.Generator | None) -> None:
    """He-normal weights (convolutions by fan-out, linear maps with unit gain), zero biases; then what a normalizer does to weights.

    weight, spectral: a parametrization of every layer but the last, where none normalizes either. scaled: the last layer of each
    of n residual branches is divided by √n, so that variance grows at most by e over the depth; chains stay as they are.
    """
    generator = generator or torch.Generator().manual_seed(0)
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear, nn.Embedding))]
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            with torch.no_grad():
                layer.weight.mul_(layer.groups**0.5)  # an output channel feeds those of its own group alone
        elif isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear", generator=generator)
        else:
            nn.init.normal_(layer.weight, generator=generator)
        if getattr(layer, "bias", None) is not None:
            nn.init.zeros_(layer.bias)
    normalize_weights(model, normalizer, generator)


def normalize_weights(model: nn.Module, normalizer: str, generator: torch.Generator) -> None:
    """Apply a normalizer that is not a layer to weights that are already set."""
    if normalizer == "scaled":
        ends = [module.branch_end for module in model.modules() if hasattr(module, "branch_end")]
        with torch.no_grad():
            for end in ends:
                end.weight.div_(len(ends) ** 0.5)
    elif normalizer in ("weight", "spectral"):
        hidden = [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))][:-1]
        seed = int(torch.randint(2**31, (), generator=generator))
        with torch.random.fork_rng(devices=[]):  # the first vectors of spectral norm come from the global state
            torch.manual_seed(seed)
            for layer in hidden:
                parametrizations.weight_norm(layer) if normalizer == "weight" else parametrizations.spectral_norm(layer)
