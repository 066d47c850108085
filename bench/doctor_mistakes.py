"""Forty mistakes planted in `transformers` models: which of them the doctor and torch-audit catch.

A mistake is caught if the tool says something about the model with it that it does not say about the model without it; of the
doctor the rule that is meant for the mistake is demanded. torch-audit gets its static and initial phases and a training step.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

import normscope as ns

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


def unscaled_pictures(patient: Patient) -> None:
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


@dataclass(frozen=True)
class Mistake:
    """What is wrong, in which model, the doctor's rule for it, and how it is planted."""

    what: str
    kind: str
    rule: str
    plant: Callable[[Patient], None]
    settings: dict[str, Any] = field(default_factory=dict)

    def patients(self) -> tuple[Patient, Patient]:
        """(without, with) the mistake."""
        sick = healthy(self.kind, **self.settings)
        self.plant(sick)
        settings = {name: value for name, value in self.settings.items() if name == "head"}
        well = healthy(self.kind, **settings)
        if "optimizer" in sick.settings:
            well.settings["optimizer"] = torch.optim.SGD(apart(well.model, 1e-4), lr=0.1)
        return well, sick


HEAD = {"head": True, "num_labels": 5}
MISTAKES = (
    Mistake("bias before BN", "ResNet", "NS101", biased),
    Mistake("bias before BN", "RegNet", "NS101", lambda p: biased(p, 1)),
    Mistake("bias before BN", "MobileNetV2", "NS101", lambda p: biased(p, 0)),
    Mistake("two LayerNorms in a row", "ViT", "NS102", lambda p: doubled(p, "layernorm_before")),
    Mistake("two LayerNorms in a row", "GPT2", "NS102", lambda p: doubled(p, "ln_f")),
    Mistake("one channel per group at 1×1", "ResNet", "NS103", single_elements),
    Mistake("one BN in two places", "ResNet", "NS104", shared),
    Mistake("one BN in two places", "MobileNetV2", "NS104", shared),
    Mistake("LayerNorm on the logits", "ViT", "NS105", normalized_classifier(nn.LayerNorm), HEAD),
    Mistake("BN on the logits", "ResNet", "NS105", normalized_classifier(nn.BatchNorm1d), HEAD),
    Mistake("20 post-norm layers", "Bert", "NS106", lambda p: None, {"num_hidden_layers": 20}),
    Mistake("branches without LayerNorm", "GPT2", "NS107", removed("ln_1", "ln_2"), {"n_layer": 4}),
    Mistake("branches without RMSNorm", "Llama", "NS107", removed("input_layernorm", "post_attention_layernorm")),
    Mistake("branches without LayerNorm", "ViT", "NS107", removed("layernorm_before", "layernorm_after")),
    Mistake("branches without RMSNorm", "T5Encoder", "NS107", removed("layer_norm")),
    Mistake("weight norm under BN", "ResNet", "NS109", parametrized(parametrizations.weight_norm)),
    Mistake("spectral norm under BN", "RegNet", "NS109", parametrized(parametrizations.spectral_norm)),
    Mistake("as many groups as channels", "ResNet", "NS110", swapped(1, lambda c: nn.GroupNorm(c, c))),
    Mistake("LayerNorm along the width", "ResNet", "NS111", swapped(0, lambda c: nn.LayerNorm(32))),
    Mistake("BN over token positions", "Llama", "NS111", token_statistics),
    Mistake("BN and GroupNorm meet in a sum", "ResNet", "NS112", mixed),
    Mistake("trained, statistics never set", "ResNet", "NS201", on_norms(trained_without_statistics)),
    Mistake("running variance zero", "MobileNetV2", "NS201", on_norms(lambda m: m.running_var.zero_())),
    Mistake("running variance NaN", "RegNet", "NS201", on_norms(lambda m: m.running_var.fill_(float("nan")))),
    Mistake("half of γ zero", "ResNet", "NS202", on_norms(half_off)),
    Mistake("half of γ zero", "ViT", "NS202", on_norms(half_off, nn.LayerNorm)),
    Mistake("variance below ε", "ResNet", "NS203", on_norms(lambda m: m.running_var.fill_(1e-7))),
    Mistake("ε of 1e-12 in float16", "ViT", "NS203", half(torch.float16)),
    Mistake("a channel without variance", "RegNet", "NS204", on_norms(one_dead)),
    Mistake("pictures in 0…255 after training on unit scale", "ResNet", "NS205", unscaled_pictures),
    Mistake("γ, β frozen, statistics not", "ResNet", "NS206", on_norms(frozen)),
    Mistake("momentum zero", "ResNet", "NS207", on_norms(lambda m: setattr(m, "momentum", 0.0))),
    Mistake("no running statistics", "RegNet", "NS208",
            swapped(1, lambda c: nn.BatchNorm2d(c, track_running_stats=False))),
    Mistake("β NaN", "GPT2", "NS209", on_norms(lambda m: m.bias[:1].fill_(float("nan")), nn.LayerNorm)),
    Mistake("weight decay on everything", "Bert", "NS301", optimized(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))),
    Mistake("batches of two", "ResNet", "NS302", tiny_batches),
    Mistake("no weight decay at all", "ResNet", "NS303", optimized(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))),
    Mistake("lr · weight decay of 0.1", "ResNet", "NS304", optimized(lambda m: torch.optim.SGD(apart(m, 0.1), lr=1.0))),
    Mistake("γ forgotten by the optimizer", "Llama", "NS305", optimized(without_scales)),
    Mistake("BN under DataParallel", "ResNet", "NS306", parallel),
    Mistake("BN in bfloat16", "ResNet", "NS307", half(torch.bfloat16)),
    Mistake("all BN in eval mode while training", "ResNet", "NS308", all_frozen),
    Mistake("query and key weights grown", "GPT2", "NS404", sharp(("c_attn",), 60.0)),
    Mistake("query and key weights grown", "Llama", "NS404", sharp(("q_proj", "k_proj"), 60.0)),
)  # fmt: skip


# measuring -----------------------------------------------------------------------------------------------------------------


def doctor_says(patient: Patient, select: tuple[str, ...] = ()) -> set[str]:
    base = patient.model.module if isinstance(patient.model, nn.DataParallel) else patient.model
    output = Patient(base, patient.example).output
    return {f.rule for f in ns.doctor(patient.model, patient.example, output=output, select=select, **patient.settings)}


def peer_says(patient: Patient) -> set[str]:
    """Rule ids of torch-audit after a static, an initial and one dynamic pass."""
    from torch_audit import autopatch

    optimizer = patient.settings.get("optimizer") or torch.optim.SGD(apart(patient.model, 1e-4), lr=0.1)
    batch = patient.settings.get("data", [patient.example])[0]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        auditor = autopatch(patient.model, optimizer=optimizer, every_n_steps=1, reporters=[])
        try:
            outputs = patient.model(**batch) if isinstance(batch, dict) else patient.model(batch)
            outputs[0].float().square().mean().backward()
            optimizer.step()
        except (RuntimeError, ValueError):
            pass  # the model itself fails, as some mistakes make it
        result = auditor.finish(report=False)
        auditor.unpatch()
    return {finding.rule_id for finding in result.findings}


def caught(says: Callable[[Patient], set[str]], mistake: Mistake) -> set[str]:
    well, sick = mistake.patients()
    return says(sick) - says(well)


def found(mistake: Mistake) -> bool:
    """Whether the doctor's rule for a mistake fires with it and not without."""
    well, sick = mistake.patients()
    return bool(doctor_says(sick, (mistake.rule,))) and not doctor_says(well, (mistake.rule,))


def main() -> None:
    peer = importlib.util.find_spec("torch_audit") is not None
    print(f"{'mistake':<48} {'model':<12} {'doctor':<8} {'torch-audit' if peer else ''}")
    ours = theirs = 0
    for mistake in MISTAKES:
        own = found(mistake)
        other = sorted(caught(peer_says, mistake)) if peer else []
        ours, theirs = ours + own, theirs + bool(other)
        print(f"{mistake.what:<48} {mistake.kind:<12} {mistake.rule if own else '-':<8} {', '.join(other) or '-' if peer else ''}")
    print(f"{len(MISTAKES)} mistakes: doctor {ours}" + (f", torch-audit {theirs}" if peer else " (torch-audit is not installed)"))


if __name__ == "__main__":
    main()
