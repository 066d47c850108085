"""Trained networks: the bracket around real inputs, what their normalizers do by every definition, and what the doctor says.

    python -m bench in_the_wild DIR [--page docs/in-the-wild.md] [--only NAME] [--effort 3]

DIR holds minilm/ (model.safetensors, vocab.txt), crepe/ (tiny.pth, full.pth), fcpe/ (fcpe_c_v001.pt) and smollm2/ (one .gguf file),
of which those are used that are there. Sections of the page that are not made anew stay as they are.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns
from normscope.ledger import PRODUCTS

SENTENCE = "the cat sat on the mat and looked at the rain"
PITCH, RATE, FRAME, FRAMES = 440.0, 16_000, 1_024, 8


class Crepe(nn.Module):
    """The network that CREPE's state dicts name: 6 × (convolution, ReLU, BN, max-pooling), 360 bins of pitch."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        sizes = [1, *sizes]
        for i in range(6):
            kernel, stride = (512, 4) if i == 0 else (64, 1)
            self.add_module(f"conv{i + 1}", nn.Conv2d(sizes[i], sizes[i + 1], (kernel, 1), (stride, 1)))
            self.add_module(f"conv{i + 1}_BN", nn.BatchNorm2d(sizes[i + 1], eps=0.0010000000474974513))
        self.classifier = nn.Linear(4 * sizes[-1], 360)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, :, None]
        for i in range(6):
            x = functional.pad(x, (0, 0, 254, 254) if i == 0 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{i + 1}_BN")(self.get_submodule(f"conv{i + 1}")(x).relu())
            x = functional.max_pool2d(x, (2, 1), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()  # type: ignore[no-any-return]


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


def crepe(folder: Path, size: str = "tiny") -> Trained:
    stored = torch.load(folder / f"{size}.pth", weights_only=True)
    model = Crepe([len(stored[f"conv{i + 1}.weight"]) for i in range(6)])
    model.load_state_dict(stored)
    frame = torch.sin(2 * torch.pi * PITCH * torch.arange(FRAME) / RATE)[None]
    frame = (frame - frame.mean()) / frame.std()
    return Trained(f"CREPE {size}", model.eval(), frame, f"six blocks of convolution, ReLU and BN, on a tone of {PITCH:g} Hz")


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
    tone = 0.5 * torch.sin(2 * torch.pi * PITCH * torch.arange(size + (FRAMES - 1) * hop) / RATE)
    spectrum = torch.stft(tone, size, hop, window=torch.hann_window(size), center=False, return_complex=True).abs()
    bank = mel_filter_bank(size // 2 + 1, mel["num_mels"], mel["fmin"], mel["fmax"], mel["sr"], norm="slaney", mel_scale="slaney")
    frames = (spectrum.T @ torch.from_numpy(bank).float()).clamp(min=1e-5).log()[None]
    about = f"GroupNorm, LayerNorm and weight norm in one network of convolutions, on {FRAMES} frames of a tone of {PITCH:g} Hz"
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


NETWORKS: dict[str, tuple[str, Callable[[Path], Trained]]] = {  # the folder of each, and what loads it
    "crepe-tiny": ("crepe", crepe),
    "crepe-full": ("crepe", partial(crepe, size="full")),
    "fcpe": ("fcpe", fcpe),
    "minilm": ("minilm", minilm),
    "smollm2": ("smollm2", smollm2),
}
NEAR = (1e-5, 1e-4)  # of the example's norm: radii of balls around it
LOOSE = 1e3  # times what two inputs show: a bound that says nothing

DEFINITIONS = {
    "weights_spectral": "∏‖W‖, operators",
    "weights_frobenius": "∏‖W‖_F",
    "normalizers_tight": "∏ normalizers, tight: largest γ/√(v+ε)",
    "normalizers_paper": "∏ normalizers, paper: norm of 1/√(v+ε)",
    "normalizers_paper_affine": "∏ normalizers, paper with γ",
    "normalizers_layer": "∏ normalizers, one 1/σ per layer",
}


def section(trained: Trained, effort: float) -> Iterator[str]:
    """What is known of one network, as Markdown."""
    audit = ns.audit(trained.model, trained.example, effort=0.2, local=False)
    inputs = [trained.example] if isinstance(trained.example, torch.Tensor) else [*trained.example.values()]
    norm = math.hypot(*(float(value[0].norm()) for value in inputs))
    balls = [ns.Ball([value[0] for value in inputs], share * norm) for share in NEAR]
    near = [ns.lipschitz(trained.model, trained.example, region=ball, effort=effort) for ball in balls]
    yield from (f"## {trained.name}", "", f"{trained.about[0].upper()}{trained.about[1:]}.", "")
    yield from ("| inputs | two of them show | certified |", "|---|---:|---:|")
    yield f"| all | {audit.bracket.lower} | {audit.bracket.upper} |"
    for share, ball, bracket in zip(NEAR, balls, near, strict=True):
        yield f"| within {ball.radius:.2g} of this one, {share:g} of its norm | {bracket.lower} | {bracket.upper} |"
    yield from ("", *learned(audit.bracket, near), "")
    yield from ("| product over layers | log10 | layers | one layer |", "|---|---:|---:|---|")
    for name, words in DEFINITIONS.items():
        own = sorted(value.log10 for row in audit.layers if (value := getattr(row, PRODUCTS[name])) is not None)
        if own:
            yield f"| {words} | {sum(own):+.1f} | {len(own)} | {round(own[0], 1) + 0.0:+.1f} to {round(own[-1], 1) + 0.0:+.1f} |"
    yield from ("", normalizing(audit), "")
    findings = ns.doctor(trained.model, trained.example)
    yield f"The doctor has {len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}."
    yield from ("", *(f"- {told.rule}, {told.severity}, {told.where}: {told.message}" for told in findings), *[""] * bool(findings))
    report = ns.symmetries(trained.model, trained.example, mode="eval")
    kinds = Counter(group.kind for group in report.groups).most_common()
    named = ", ".join(f"{count} of kind {kind}" for kind, count in kinds) or "none"
    yield f"Symmetries in eval mode: {named}; {100 * report.scale_free:.1f} % of the parameters are scale-free."


def learned(everywhere: ns.Bracket, near: Sequence[ns.Bracket]) -> Iterator[str]:
    """What these numbers mean for somebody who has this network."""
    if everywhere.upper is None or not everywhere.upper.finite:
        yield "Over all inputs there is no finite certificate."
    elif everywhere.upper > everywhere.lower * LOOSE:
        yield f"Over all inputs the certificate says nothing: no pair that was found comes within a factor of {LOOSE:g} of it."
    telling = [(share, bracket) for share, bracket in zip(NEAR, near, strict=True) if bracket.upper <= bracket.lower * LOOSE]
    if telling:
        share, bracket = telling[-1]
        ratio = float(bracket.upper / bracket.lower)
        yield f"Within {share:g} of its norm around this input it is {ratio:.3g} × what two inputs show."
    else:
        yield "Around this input it says nothing either."
    yield from (f"({note[0].upper()}{note[1:]}.)" for note in dict.fromkeys(note for bracket in near for note in bracket.notes))


def normalizing(audit: ns.Audit) -> str:
    """Whether the normalizers shrink or enlarge the product, and by which definition."""
    gains = {name: value for name, value in audit.products.items() if name.startswith("normalizers")}
    below = [DEFINITIONS[name].removeprefix("∏ normalizers, ") for name in DEFINITIONS if gains.get(name, 0.0) < 0]
    above = [DEFINITIONS[name].removeprefix("∏ normalizers, ") for name in DEFINITIONS if gains.get(name, 0.0) > 0]
    if below and above:
        return f"The normalizers shrink the product by {_listed(below)}; they enlarge it by {_listed(above)}."
    return f"By every definition the normalizers {'shrink' if below else 'enlarge'} the product of this network."


def _listed(definitions: Sequence[str]) -> str:
    return " and ".join(f'"{words}"' for words in definitions)


def main() -> None:
    given = argparse.ArgumentParser(prog="python -m bench in_the_wild")
    given.add_argument("folder", type=Path)
    given.add_argument("--page", type=Path)
    given.add_argument("--only", choices=tuple(NETWORKS))
    given.add_argument("--effort", type=float, default=3.0)
    arguments = given.parse_args(sys.argv[sys.argv.index("in_the_wild") + 1 :])
    made = sections(arguments.page.read_text()) if arguments.page and arguments.page.exists() else {}
    for name, (folder, load) in NETWORKS.items():
        if (arguments.folder / folder).is_dir() and arguments.only in (None, name):
            trained, began = load(arguments.folder / folder), time.process_time()
            made[trained.name] = "\n".join(section(trained, arguments.effort)).rstrip()
            print(made[trained.name], f"\n{name}: {time.process_time() - began:.0f} s of CPU", flush=True)
    if arguments.page:
        arguments.page.write_text("\n\n".join([HEAD, *made.values()]) + "\n")


def sections(text: str) -> dict[str, str]:
    """The sections of a page, by title."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0]: f"## {part}".rstrip() for part in parts}


HEAD = """# In the wild: trained networks

What does normscope say about networks that people use? Here are some with trained weights, each around an input of the kind that it
was trained on. `python -m bench in_the_wild DIR` writes this page. "Two of them show" is the largest difference quotient that was
found, "certified" a bound on all of them."""
