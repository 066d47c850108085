"""Trained networks: the bracket around real inputs, what their normalizers do by every definition, and what the doctor says.

    python -m bench in_the_wild DIR [--page docs/in-the-wild.md]

DIR holds minilm/ (model.safetensors, vocab.txt), crepe/ (tiny.pth), fcpe/ (fcpe_c_v001.pt) and smollm2/ (one .gguf file), of which
those are used that are there. `--only NAME` takes one of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns

SENTENCE = "the cat sat on the mat and looked at the rain"
PITCH, RATE, FRAME = 440.0, 16_000, 1_024


class Crepe(nn.Module):
    """The network that the state dict of CREPE's tiny model names: 6 × (convolution, ReLU, BN, max-pooling), 360 bins of pitch."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [1, 128, 16, 16, 16, 32, 64]
        for i in range(6):
            kernel, stride = (512, 4) if i == 0 else (64, 1)
            self.add_module(f"conv{i + 1}", nn.Conv2d(sizes[i], sizes[i + 1], (kernel, 1), (stride, 1)))
            self.add_module(f"conv{i + 1}_BN", nn.BatchNorm2d(sizes[i + 1], eps=0.0010000000474974513))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, :, None]
        for i in range(6):
            x = functional.pad(x, (0, 0, 254, 254) if i == 0 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{i + 1}_BN")(self.get_submodule(f"conv{i + 1}")(x).relu())
            x = functional.max_pool2d(x, (2, 1), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 256)).sigmoid()  # type: ignore[no-any-return]


class Transposed(nn.Module):
    """Channels and time change places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class Depthwise(nn.Module):
    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, kernel, padding=kernel // 2, groups=channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


class Conformer(nn.Module):
    """A residual block: LN, a gated pointwise convolution, a depthwise one, SiLU, a pointwise one."""

    def __init__(self, width: int, inner: int, kernel: int) -> None:
        super().__init__()
        self.conformer = nn.Module()
        self.conformer.net = nn.Sequential(
            nn.LayerNorm(width), Transposed(), nn.Conv1d(width, 2 * inner, 1), nn.GLU(dim=1), Depthwise(inner, kernel), nn.SiLU(),
            nn.Conv1d(inner, width, 1), Transposed(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conformer.net(x)  # type: ignore[no-any-return, operator]


class Fcpe(nn.Module):
    """The network that FCPE's state dict names: convolutions with GN between, residual blocks, LN, weight norm."""

    def __init__(self, mels: int, width: int, blocks: int, bins: int) -> None:
        super().__init__()
        self.input_stack = nn.Sequential(
            nn.Conv1d(mels, width, 3, padding=1), nn.GroupNorm(4, width), nn.LeakyReLU(), nn.Conv1d(width, width, 3, padding=1)
        )
        self.net = nn.Module()
        self.net.encoder_layers = nn.ModuleList(Conformer(width, 2 * width, 31) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.output_proj = nn.utils.parametrizations.weight_norm(nn.Linear(width, bins))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input_stack(x.transpose(1, 2)).transpose(1, 2)
        for block in self.net.encoder_layers:  # type: ignore[union-attr]
            x = block(x)
        return self.output_proj(self.norm(x)).sigmoid()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Trained:
    """A network with its weights, an input of the kind that it was trained on, and what both are."""

    name: str
    model: nn.Module
    example: torch.Tensor | dict[str, torch.Tensor]
    about: str


def minilm(folder: Path) -> Trained:
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    stored = {name.removeprefix("bert."): value for name, value in load_file(folder / "model.safetensors").items()}
    words_stored, inner = stored["embeddings.word_embeddings.weight"], stored["encoder.layer.0.intermediate.dense.weight"]
    depth = sum(name.endswith("intermediate.dense.weight") for name in stored)
    config = BertConfig(
        vocab_size=len(words_stored), hidden_size=words_stored.shape[1], intermediate_size=len(inner), num_hidden_layers=depth,
    )  # fmt: skip  # 12 heads and ε = 1e-12, as published, are BERT's own
    model = BertModel(config, add_pooling_layer=False)
    model.load_state_dict({name: value for name, value in stored.items() if name in model.state_dict()})
    words = {word: i for i, word in enumerate((folder / "vocab.txt").read_text().splitlines())}
    ids = torch.tensor([[words[word] for word in ["[CLS]", *SENTENCE.split(), "[SEP]"]]])
    with torch.no_grad():
        example = {"inputs_embeds": model.embeddings.word_embeddings(ids)}
    return Trained("all-MiniLM-L6-v2", model.eval(), example, f'BERT with 6 post-norm layers, on the words of "{SENTENCE}"')


def crepe(folder: Path) -> Trained:
    model = Crepe()
    model.load_state_dict(torch.load(folder / "tiny.pth", weights_only=True))
    frame = torch.sin(2 * torch.pi * PITCH * torch.arange(FRAME) / RATE)[None]
    frame = (frame - frame.mean()) / frame.std()
    return Trained("CREPE tiny", model.eval(), frame, f"six times convolution, ReLU and BN, on a tone of {PITCH:g} Hz")


def fcpe(folder: Path) -> Trained:
    """Layers' own `norm` belongs to attention, which this checkpoint was trained without; its tables are no part of the network."""
    from transformers.audio_utils import mel_filter_bank

    stored = torch.load(folder / "fcpe_c_v001.pt", weights_only=True, map_location="cpu")
    mel, settings, weights = stored["config_dict"]["mel"], stored["config_dict"]["model"], stored["model"]
    model = Fcpe(mel["num_mels"], settings["hidden_dims"], settings["n_layers"], settings["out_dims"])
    named = {name.replace("weight_g", "original0").replace("weight_v", "original1"): value for name, value in weights.items()}
    named = {name.replace("output_proj.original", "output_proj.parametrizations.weight.original"): named[name] for name in named}
    model.load_state_dict({name: named[name] for name in model.state_dict()})
    left = [name for name in named if name not in model.state_dict() and not name.startswith("net.encoder_layers")]
    assert set(left) <= {"cent_table", "gaussian_blurred_cent_mask"}, left
    size, hop = mel["n_fft"], mel["hop_size"]
    tone = 0.5 * torch.sin(2 * torch.pi * PITCH * torch.arange(size + 31 * hop) / RATE)
    spectrum = torch.stft(tone, size, hop, window=torch.hann_window(size), center=False, return_complex=True).abs()
    bank = mel_filter_bank(size // 2 + 1, mel["num_mels"], mel["fmin"], mel["fmax"], mel["sr"], norm="slaney", mel_scale="slaney")
    frames = (spectrum.T @ torch.from_numpy(bank).float()).clamp(min=1e-5).log()[None]
    about = f"GroupNorm, LayerNorm and weight norm in one network of convolutions, on 32 frames of a tone of {PITCH:g} Hz"
    return Trained("FCPE", model.eval(), frames, about)


def smollm2(folder: Path) -> Trained:
    from transformers import AutoModel, AutoTokenizer

    file = next(folder.glob("*.gguf")).name
    model = AutoModel.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder, gguf_file=file)(SENTENCE, return_tensors="pt").input_ids
    with torch.no_grad():
        example = {"inputs_embeds": model.get_input_embeddings()(ids)}
    depth = model.config.num_hidden_layers
    return Trained(
        "SmolLM2-135M-Instruct", model.eval(), example, f'Llama with {depth} pre-norm layers, on the words of "{SENTENCE}"'
    )


NETWORKS: dict[str, Callable[[Path], Trained]] = {"crepe": crepe, "minilm": minilm, "fcpe": fcpe, "smollm2": smollm2}

DEFINITIONS = {
    "weights_spectral": "∏‖W‖, operators",
    "weights_frobenius": "∏‖W‖_F",
    "normalizers_tight": "∏ normalizers, tight: largest γ/√(v+ε)",
    "normalizers_paper": "∏ normalizers, paper: norm of 1/√(v+ε)",
    "normalizers_paper_affine": "∏ normalizers, paper with γ",
    "normalizers_layer": "∏ normalizers, one 1/σ per layer",
}


def section(trained: Trained) -> Iterator[str]:
    """What is known of one network, as Markdown."""
    audit = ns.audit(trained.model, trained.example, effort=0.2)
    yield from (f"## {trained.name}", "", f"{trained.about[0].upper()}{trained.about[1:]}.", "", "```")
    yield from (line for line in str(audit.bracket).splitlines())
    if audit.local is not None:
        yield f"around the input, within {audit.local_radius:.3g}: {audit.local.lower} ≤ L ≤ {audit.local.upper}"
    yield from ("```", "", "| product over layers | log10 | layers | normalizers |", "|---|---:|---:|---|")
    counts = audit.to_dict()["layers_in_products"]
    for name, words in DEFINITIONS.items():
        value = audit.products[name]
        verdict = "" if not name.startswith("normalizers") else "shrink it" if value < 0 else "enlarge it"
        yield f"| {words} | {value:+.1f} | {counts[name]} | {verdict} |"
    gains = [audit.products[name] for name in DEFINITIONS if name.startswith("normalizers")]
    said = "shrink" if max(gains) < 0 else "enlarge" if min(gains) > 0 else ""
    all_agree = f"By every definition the normalizers {said} the product of this network."
    yield from ("", all_agree if said else "Whether the normalizers shrink or enlarge the product depends on the definition.")
    spread = sorted(float(row.gain) for row in audit.layers if row.gain is not None)
    if spread:
        yield from ("", f"Tight gains per layer run from {spread[0]:.3g} to {spread[-1]:.3g}.")
    findings = ns.doctor(trained.model, trained.example)
    yield from (
        "",
        f"The doctor has {len(findings)} finding{'' if len(findings) == 1 else 's'}:"
        if len(findings)
        else "The doctor finds nothing.",
        "",
    )
    for finding in findings:
        yield f"- {finding.rule} ({finding.severity}) at {finding.where or 'the model'}: {finding.evidence}"
    report = ns.symmetries(trained.model, trained.example, mode="eval")
    yield from (
        "",
        f"Symmetry in eval mode: {len(report.groups)} groups, {100 * report.scale_free:.1f} % of the parameters scale-free.",
        "",
    )


def main() -> None:
    given = argparse.ArgumentParser(prog="python -m bench in_the_wild")
    given.add_argument("folder", type=Path)
    given.add_argument("--page", type=Path)
    given.add_argument("--only", choices=tuple(NETWORKS))
    arguments = given.parse_args(sys.argv[sys.argv.index("in_the_wild") + 1 :])
    lines = [
        "# In the wild: trained networks", "",
        "Networks with trained weights, around inputs of the kind that they were trained on.",
        "Written by `python -m bench in_the_wild DIR`.", "",
    ]  # fmt: skip
    for name, load in NETWORKS.items():
        if (arguments.folder / name).is_dir() and arguments.only in (None, name):
            lines += section(load(arguments.folder / name))
            print(f"{name}: done", file=sys.stderr, flush=True)
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if arguments.page:
        arguments.page.write_text(text)
