"""Mistakes planted in `transformers` models: which of them the doctor and torch-audit catch.

A mistake is caught if the tool says something about the model with it that it does not say about the model without it; of the
doctor the rule that is meant for the mistake is demanded. torch-audit gets its static and initial phases and a training step.

    python -m bench doctor_mistakes [--part i/n]
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

import normscope as ns
from bench.doctor_plants import (
    Patient,
    Turned,
    all_frozen,
    along_tokens,
    apart,
    before,
    behind,
    biased,
    both,
    doubled,
    frozen,
    half,
    half_off,
    healthy,
    labelled,
    loaded_weight,
    mixed,
    normalized_classifier,
    on_first,
    on_norms,
    on_parts,
    one_dead,
    optimized,
    parallel,
    parametrized,
    removed,
    replace,
    scaled,
    share_off,
    shared,
    sharp,
    single_elements,
    swapped,
    tied,
    tiny_batches,
    token_statistics,
    trained,
    trained_without_statistics,
    unscaled_pictures,
    with_data,
    with_settings,
    without_scales,
)


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
        data = sick.settings.get("data")
        if data is not None:
            well.settings["data"] = data if isinstance(data, tuple) else [well.example]
        return well, sick


PART = re.compile(r"\d+/\d+")
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
    Mistake("bias before instance norm", "ResNet", "NS101", both(biased, swapped(1, nn.InstanceNorm2d))),
    Mistake("two RMSNorms in a row", "Llama", "NS102", lambda p: doubled(p, "input_layernorm")),
    Mistake("two LayerNorms in a row", "Bert", "NS102", lambda p: doubled(p, "output.LayerNorm")),
    Mistake("instance norm at 1×1", "ResNet", "NS103",
            both(swapped(-1, nn.InstanceNorm2d), lambda p: setattr(p, "example", p.example[:, :, :32, :32]))),
    Mistake("one BN in two places", "RegNet", "NS104", shared),
    Mistake("LayerNorm on the logits", "ConvNext", "NS105", normalized_classifier(nn.LayerNorm), HEAD),
    Mistake("6 post-norm layers without warm-up", "Bert", "NS106",
            optimized(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)), {"num_hidden_layers": 6}),
    Mistake("all BN removed", "ResNet", "NS108", removed("normalization")),
    Mistake("all BN removed", "RegNet", "NS108", removed("normalization")),
    Mistake("weight norm under BN", "MobileNetV2", "NS109", parametrized(parametrizations.weight_norm)),
    Mistake("as many groups as channels", "RegNet", "NS110", swapped(1, lambda c: nn.GroupNorm(c, c))),
    Mistake("LayerNorm along the sequence", "ViT", "NS111", along_tokens("layernorm_before", 17)),
    Mistake("LayerNorm along the sequence", "Llama", "NS111", behind("up_proj", lambda: Turned(nn.LayerNorm(5)))),
    Mistake("LayerNorm along the width", "RegNet", "NS111", swapped(0, lambda c: nn.LayerNorm(32))),
    Mistake("BN and GroupNorm meet in a sum", "RegNet", "NS112", mixed),
    Mistake("one LayerNorm in all blocks", "ViT", "NS113", tied("layernorm_before")),
    Mistake("one LayerNorm in all blocks", "GPT2", "NS113", tied("ln_1")),
    Mistake("one RMSNorm in all blocks", "Llama", "NS113", tied("input_layernorm")),
    Mistake("no final LayerNorm", "ViT", "NS114", lambda p: replace(p, "layernorm", nn.Identity())),
    Mistake("no final LayerNorm", "GPT2", "NS114", lambda p: replace(p, "ln_f", nn.Identity())),
    Mistake("no final RMSNorm", "Llama", "NS114", lambda p: replace(p, "norm", nn.Identity())),
    Mistake("dropout before BN", "ResNet", "NS115", before(2, lambda: nn.Dropout(0.3))),
    Mistake("dropout before BN", "RegNet", "NS115", before(2, lambda: nn.Dropout2d(0.2))),
    Mistake("dropout before BN", "ResNet", "NS115", before(1, lambda: nn.Dropout2d(0.5))),
    Mistake("LayerNorm before softmax", "ViT", "NS116",
            normalized_classifier(lambda c: nn.Sequential(nn.LayerNorm(c), nn.Softmax(-1))), HEAD),
    Mistake("running mean infinite", "ResNet", "NS201", on_norms(lambda m: m.running_mean.fill_(float("inf")))),
    Mistake("55 % of γ zero", "ResNet", "NS202", on_norms(share_off(0.55), place=-1)),
    Mistake("all of γ zero", "RegNet", "NS202", on_norms(share_off(1.0))),
    Mistake("all of γ zero", "Llama", "NS202", on_first("input_layernorm", share_off(1.0))),
    Mistake("ε of 10", "RegNet", "NS203", on_norms(lambda m: setattr(m, "eps", 10.0))),
    Mistake("a channel without variance", "ResNet", "NS204", on_norms(one_dead)),
    Mistake("pictures in 0…255 after training on unit scale", "RegNet", "NS205", unscaled_pictures),
    Mistake("one BN in eval mode, γ and β trainable", "RegNet", "NS206", on_norms(lambda m: m.eval())),
    Mistake("momentum of another framework", "RegNet", "NS207", on_norms(lambda m: setattr(m, "momentum", 0.99))),
    Mistake("statistics of five batches", "ResNet", "NS207", on_norms(lambda m: m.num_batches_tracked.fill_(5))),
    Mistake("no running statistics", "ResNet", "NS208", swapped(1, lambda c: nn.BatchNorm2d(c, track_running_stats=False))),
    Mistake("a weight NaN", "Llama", "NS209", on_first("q_proj", lambda m: m.weight[:1, :1].fill_(float("nan")))),
    Mistake("a weight infinite", "ViT", "NS209", on_first("q_proj", lambda m: m.weight[:1, :1].fill_(float("inf")))),
    Mistake("γ not moved by training in bfloat16", "Llama", "NS210", trained(torch.bfloat16, 1e-4)),
    Mistake("γ not moved by training in bfloat16", "GPT2", "NS210", trained(torch.bfloat16, 1e-4)),
    Mistake("ε of 10 on data", "ViT", "NS211", both(on_parts("layernorm_before", lambda m: setattr(m, "eps", 10.0)), with_data)),
    Mistake("ε of 10 on data", "Llama", "NS211", both(
        on_parts("layernorm", lambda m: setattr(m, "variance_epsilon", 10.0)), with_data)),
    Mistake("spectral norm without its u and v", "Llama", "NS212", both(
        on_first("q_proj", parametrizations.spectral_norm), on_first("q_proj", loaded_weight))),
    Mistake("old spectral norm, never run", "ViT", "NS212", on_first("q_proj", nn.utils.spectral_norm)),
    Mistake("β far below zero before ReLU", "ResNet", "NS213", on_norms(lambda m: m.bias.fill_(-6.0), place=0)),
    Mistake("β far below zero before ReLU", "RegNet", "NS213", on_norms(lambda m: m.bias[:3].fill_(-6.0), place=0)),
    Mistake("weight decay on everything", "GPT2", "NS301", optimized(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))),
    Mistake("weight decay on everything", "ResNet", "NS301",
            optimized(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=1e-4))),
    Mistake("micro-batches of two", "RegNet", "NS302", with_settings(micro_batch=2)),
    Mistake("no weight decay at all", "RegNet", "NS303", optimized(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))),
    Mistake("lr · weight decay of 0.1", "RegNet", "NS304", optimized(lambda m: torch.optim.SGD(apart(m, 0.1), lr=1.0))),
    Mistake("γ and β forgotten by the optimizer", "GPT2", "NS305", optimized(without_scales)),
    Mistake("BN under DataParallel", "RegNet", "NS306", parallel),
    Mistake("BN in float16", "RegNet", "NS307", half(torch.float16)),
    Mistake("all BN in eval mode while training", "RegNet", "NS308", all_frozen),
    Mistake("BN and gradient accumulation", "ResNet", "NS311", with_settings(accumulation=8)),
    Mistake("γ in bfloat16 with AdamW at lr 1e-4", "Llama", "NS312", trained(torch.bfloat16, 1e-4, steps=1)),
    Mistake("γ in bfloat16 with AdamW at lr 1e-4", "Bert", "NS312", trained(torch.bfloat16, 1e-4, steps=1)),
    Mistake("one layer a million times too large", "ViT", "NS401", on_first("v_proj", scaled(1e6))),
    Mistake("variances near zero in a row", "ResNet", "NS402", on_norms(lambda m: m.running_var.fill_(1e-4), place=None)),
    Mistake("query and key weights grown", "Bert", "NS404", sharp(("query", "key"), 60.0)),
    Mistake("query and key weights grown", "ViT", "NS404", sharp(("q_proj", "k_proj"), 60.0)),
    Mistake("learning rate of 1000", "ResNet", "NS310", labelled(1e3), HEAD),
    Mistake("learning rate of 1000", "ViT", "NS310", labelled(1e3), HEAD),
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
    part, parts = next((map(int, word.split("/")) for word in sys.argv if PART.fullmatch(word)), (1, 1))
    chosen = MISTAKES[part - 1 :: parts]
    print(f"{'mistake':<48} {'model':<12} {'doctor':<8} {'torch-audit' if peer else ''}")
    ours = theirs = 0
    for mistake in chosen:
        own = found(mistake)
        other = sorted(caught(peer_says, mistake)) if peer else []
        ours, theirs = ours + own, theirs + bool(other)
        row = f"{mistake.what:<48} {mistake.kind:<12} {mistake.rule if own else '-':<8} {', '.join(other) or '-' if peer else ''}"
        print(row.rstrip(), flush=True)
    print(f"{len(chosen)} mistakes: doctor {ours}" + (f", torch-audit {theirs}" if peer else " (torch-audit is not installed)"))


if __name__ == "__main__":
    main()
