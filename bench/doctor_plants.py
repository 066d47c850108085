"""Models from `transformers` configurations, and mistakes to plant in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BatchNorm = nn.modules.batchnorm._BatchNorm
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "embedding_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "ResNet": {**STAGES, "layer_type": "basic"},
    "RegNet": {**STAGES, "groups_width": 8, "layer_type": "x"},
    "MobileNetV2": {"depth_multiplier": 0.35, "image_size": 32},
    "ConvNext": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]},
    "ViT": {**SMALL, "image_size": 16, "patch_size": 4},
    "Bert": dict(SMALL),
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "use_cache": False, "vocab_size": 50},
    "Llama": {**SMALL, "num_key_value_heads": 2, "vocab_size": 50, "use_cache": False},
    "T5Encoder": {"d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 32, "d_kv": 4, "vocab_size": 50},
}
IMAGES = {"ResNet": 64, "RegNet": 64, "MobileNetV2": 32, "ConvNext": 64, "ViT": 16}


@dataclass
class Patient:
    """A model with what is passed along: an optimizer, data."""

    model: nn.Module
    example: Any
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> str:
        return "logits" if hasattr(self.model, "classifier") else "last_hidden_state"


def healthy(kind: str, head: bool = False, **changes: Any) -> Patient:
    """A model as its configuration makes it, with random weights, in train mode."""
    import transformers

    config = getattr(transformers, "T5Config" if kind == "T5Encoder" else f"{kind}Config")(**{**CONFIGS[kind], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForImageClassification" if head else f"{kind}Model")(config)
    generator = torch.Generator().manual_seed(0)
    if kind in IMAGES:
        size = IMAGES[kind]
        return Patient(model.train(), torch.randn(8, 3, size, size, generator=generator))
    return Patient(model.train(), {"inputs_embeds": torch.randn(8, 5, config.hidden_size, generator=generator)})


# planting ------------------------------------------------------------------------------------------------------------------


def norms(patient: Patient, kind: Any = BatchNorm) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in patient.model.named_modules() if isinstance(module, kind)]


def replace(patient: Patient, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(patient.model.get_submodule(parent), name, module.train())


def biased(patient: Patient, place: int = 1) -> None:
    """A bias in the convolution before a normalizer."""
    _, norm = norms(patient)[place]
    path, old = [(n, m) for n, m in patient.model.named_modules() if isinstance(m, nn.Conv2d)][place]
    assert old.out_channels == norm.num_features
    new = copy.deepcopy(old)
    new.bias = nn.Parameter(0.1 * torch.ones(old.out_channels))
    replace(patient, path, new)


def doubled(patient: Patient, suffix: str) -> None:
    path, old = next((n, m) for n, m in patient.model.named_modules() if n.endswith(suffix))
    replace(patient, path, nn.Sequential(old, copy.deepcopy(old)))


def swapped(place: int, make: Callable[[int], nn.Module]) -> Callable[[Patient], None]:
    """Another module in the place of a batch normalizer."""

    def plant(patient: Patient) -> None:
        path, norm = norms(patient)[place]
        replace(patient, path, make(norm.num_features))

    return plant


def single_elements(patient: Patient) -> None:
    """One channel per group, on a picture so small that the last maps are 1×1."""
    swapped(-1, lambda channels: nn.GroupNorm(channels, channels))(patient)
    patient.example = patient.example[:, :, :32, :32]


def mixed(patient: Patient) -> None:
    """GroupNorm in a shortcut, BN in the branch that it meets."""
    path, norm = next((path, norm) for path, norm in norms(patient) if "shortcut" in path)
    replace(patient, path, nn.GroupNorm(2, norm.num_features))


def shared(patient: Patient) -> None:
    """One batch normalizer in two places of the same width."""
    listed = norms(patient)
    first, second = next((a, b) for i, a in enumerate(listed) for b in listed[i + 1 :] if a[1].num_features == b[1].num_features)
    replace(patient, second[0], first[1])


def removed(*suffixes: str) -> Callable[[Patient], None]:
    def plant(patient: Patient) -> None:
        for path, _ in list(patient.model.named_modules()):
            if path.endswith(suffixes):
                replace(patient, path, nn.Identity())

    return plant


def normalized_classifier(make: Callable[[int], nn.Module]) -> Callable[[Patient], None]:
    def plant(patient: Patient) -> None:
        path, old = [(n, m) for n, m in patient.model.named_modules() if isinstance(m, nn.Linear) and n.startswith("classifier")][
            -1
        ]
        replace(patient, path, nn.Sequential(old, make(old.out_features)))

    return plant


def parametrized(by: Callable[[nn.Module], nn.Module]) -> Callable[[Patient], None]:
    return lambda patient: by([m for m in patient.model.modules() if isinstance(m, nn.Conv2d)][1]) and None


def on_norms(change: Callable[[Any], None], kind: Any = BatchNorm, place: int | None = 1) -> Callable[[Patient], None]:
    """A change of the state of one normalizer, or of all."""

    def plant(patient: Patient) -> None:
        chosen = norms(patient, kind) if place is None else [norms(patient, kind)[place]]
        with torch.no_grad():
            for _, module in chosen:
                change(module)

    return plant


def trained_without_statistics(module: Any) -> None:
    module.weight.copy_(torch.linspace(0.5, 1.5, len(module.weight)))


def half_off(module: Any) -> None:
    module.weight[: len(module.weight) // 2 - 1] = 0


def one_dead(module: Any) -> None:
    module.running_var[0] = 1e-12
    module.eps = 1e-12


def frozen(module: Any) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def token_statistics(patient: Patient) -> None:
    layer = patient.model.layers[0].mlp
    layer.gate_proj = nn.Sequential(layer.gate_proj, nn.BatchNorm1d(5))


def sharp(names: tuple[str, ...], factor: float) -> Callable[[Patient], None]:
    def plant(patient: Patient) -> None:
        with torch.no_grad():
            for name, parameter in patient.model.named_parameters():
                if any(part in name for part in names) and name.endswith("weight"):
                    parameter.mul_(factor)

    return plant


def optimized(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[Patient], None]:
    return lambda patient: patient.settings.update(optimizer=make(patient.model))


def apart(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def without_scales(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(apart(model, 1e-4)[:1], lr=0.1)


def tiny_batches(patient: Patient) -> None:
    patient.settings["data"] = [patient.example[:2]] * 3


def settled(patient: Patient) -> None:
    """Running statistics of the data, as training leaves them."""
    with torch.no_grad():
        for _ in range(40):
            patient.model(patient.example)


def unscaled_pictures(patient: Patient) -> None:
    settled(patient)
    patient.settings["data"] = [(patient.example + 2).clamp(0, 4) * 60]


def parallel(patient: Patient) -> None:
    patient.model = nn.DataParallel(patient.model)


def half(dtype: torch.dtype) -> Callable[[Patient], None]:
    def plant(patient: Patient) -> None:
        patient.model.to(dtype)
        patient.example = patient.example.to(dtype)

    return plant


def all_frozen(patient: Patient) -> None:
    for _, module in norms(patient):
        module.eval()


def both(*plants: Callable[[Patient], None]) -> Callable[[Patient], None]:
    def plant(patient: Patient) -> None:
        for one in plants:
            one(patient)

    return plant


class Turned(nn.Module):
    """A module on tokens and features in the other's place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x.mT).mT


def along_tokens(suffix: str, tokens: int) -> Callable[[Patient], None]:
    """A normalizer along the sequence in the place of one along the features."""

    def plant(patient: Patient) -> None:
        path = next(n for n, _ in patient.model.named_modules() if n.endswith(suffix))
        replace(patient, path, Turned(nn.LayerNorm(tokens)))

    return plant


def behind(suffix: str, module: Callable[[], nn.Module]) -> Callable[[Patient], None]:
    """One more module behind one."""

    def plant(patient: Patient) -> None:
        path, old = next((n, m) for n, m in patient.model.named_modules() if n.endswith(suffix))
        replace(patient, path, nn.Sequential(old, module()))

    return plant


def before(place: int, module: Callable[[], nn.Module]) -> Callable[[Patient], None]:
    """One more module before a convolution."""

    def plant(patient: Patient) -> None:
        path, old = [(n, m) for n, m in patient.model.named_modules() if isinstance(m, nn.Conv2d)][place]
        replace(patient, path, nn.Sequential(module(), old))

    return plant


def tied(suffix: str) -> Callable[[Patient], None]:
    """The same normalizer in every block."""

    def plant(patient: Patient) -> None:
        first, *others = [n for n, _ in patient.model.named_modules() if n.endswith(suffix)]
        for path in others:
            replace(patient, path, patient.model.get_submodule(first))

    return plant


def on_parts(suffix: str, change: Callable[[Any], None]) -> Callable[[Patient], None]:
    """A change of every module with such a name, without gradients."""

    def plant(patient: Patient) -> None:
        with torch.no_grad():
            for name, module in patient.model.named_modules():
                if name.endswith(suffix):
                    change(module)

    return plant


def on_first(suffix: str, change: Callable[[Any], None]) -> Callable[[Patient], None]:
    def plant(patient: Patient) -> None:
        with torch.no_grad():
            change(next(m for n, m in patient.model.named_modules() if n.endswith(suffix)))

    return plant


def with_data(patient: Patient) -> None:
    patient.settings["data"] = [patient.example]


def with_settings(**settings: Any) -> Callable[[Patient], None]:
    return lambda patient: patient.settings.update(settings)


def trained(dtype: torch.dtype, rate: float, steps: int = 12) -> Callable[[Patient], None]:
    """Some steps of AdamW, all in one type."""

    def plant(patient: Patient) -> None:
        model = patient.model.to(dtype)
        patient.example = {name: value.to(dtype) for name, value in patient.example.items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for _ in range(steps):
            optimizer.zero_grad()
            model(**patient.example)[0].float().square().mean().backward()
            optimizer.step()
        patient.settings["optimizer"] = optimizer

    return plant


def loaded_weight(module: Any) -> None:
    """Weights that came without u and v."""
    module.parametrizations.weight.original.copy_(torch.diag(torch.arange(1.0, 17.0)))


def scaled(factor: float) -> Callable[[Any], None]:
    return lambda module: module.weight.mul_(factor)


def share_off(share: float) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        module.weight[: round(share * len(module.weight))] = 0

    return change


def labelled(rate: float) -> Callable[[Patient], None]:
    """Pictures with labels, and plain SGD at a rate."""

    def plant(patient: Patient) -> None:
        labels = torch.randint(2, (len(patient.example),), generator=torch.Generator().manual_seed(1))
        patient.settings |= {"data": (patient.example, labels), "optimizer": torch.optim.SGD(apart(patient.model, 1e-4), lr=rate)}

    return plant
