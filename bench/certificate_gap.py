"""How far the certified bound on a ball is above what a pair of points reaches, on networks that people train.

    python -m bench certificate_gap [DIRECTORY]
    python -m bench.certificate_gap [DIRECTORY] [effort=E] [radius=R] [work] [names of networks …]

effort: what the forms may cost (certify/forms.py), with relays where that is too little; unlimited unless given. radius: one alone,
in place of 1e-4, 1e-3 and 1e-2. work: only count what one sweep costs, with more and more relays.
Every network is made here, from fixed seeds, and trained where its line says so. Inputs have entries of size about 1.
DIRECTORY may hold crepe/tiny.pth and minilm/model.safetensors (all-MiniLM-L6-v2) as their authors ship them, and
cifar-10-batches-bin, the official binary version, on which ResNet-18 is then trained; its weights are kept under normscope-bench in
the system's directory for temporary files. Seconds are of CPU, and of the forms alone.
"""

from __future__ import annotations

import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.forms import AffineForms, affine_forms
from normscope.certify.known import Known
from normscope.certify.lower import Space, quotient
from normscope.certify.relays import STRIDES, cut_vertices, estimate
from normscope.core.region import Ball
from normscope.graph.graph import Graph
from normscope.lab.datasets.catalogue import load_data
from normscope.lab.models.resnet18 import resnet18

RADII = (1e-4, 1e-3, 1e-2)
KEPT = Path(tempfile.gettempdir()) / "normscope-bench"  # weights that took long to train
Case = tuple[nn.Module, Tensor]  # a network in eval mode, and a batch of one


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.norm2(self.second(functional.relu(self.norm1(self.first(x))))))


def small_residual() -> Case:
    """16 channels, 4 blocks, on 3×16×16, trained for 40 steps."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*stem, *(Block(16) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return trained(model, *images(16, 10), steps=40), images(16, 10)[0][:1]


def small_resnet18(directory: Path) -> Case:
    """The lab's ResNet-18 with the small stem, trained for 2 epochs on the first 1,500 images of CIFAR-10."""
    data = load_data("cifar10", directory)
    train, test = data.train, data.test
    mean, scale = train[0].mean((0, 2, 3), keepdim=True), train[0].std((0, 2, 3), keepdim=True)
    model = resnet18(classes=10, stem="small", generator=torch.Generator().manual_seed(0))
    kept = KEPT / "resnet18.pt"
    if kept.is_file():
        model.load_state_dict(torch.load(kept, weights_only=True))
    else:
        images, labels = (train[0][:1500] - mean) / scale, train[1][:1500]
        trained(model, images, labels, steps=60, rate=1e-3, batch=50)
        KEPT.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), kept)
    shown = (test[0][:200] - mean) / scale
    with torch.no_grad():
        accuracy = (model.eval()(shown).argmax(1) == test[1][:200]).float().mean()
    print(f"resnet18: {accuracy:.0%} of 200 test images", flush=True)
    return model, shown[:1]


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4, patch: int = 4, size: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def vision_transformer() -> Case:
    """4 layers of 64, 65 tokens, on 3×32×32, trained for 40 steps."""
    torch.manual_seed(0)
    return trained(VisionTransformer(), *images(32, 10), steps=40, rate=1e-3), images(32, 10)[0][:1]


class LastToken(nn.Module):
    """Embeddings → the first ten logits of the last token."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 10, bias=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.head(self.body(inputs_embeds=embeddings, use_cache=False).last_hidden_state[:, -1])


def gpt2() -> Case:
    """4 layers of 64, 8 tokens, as initialized; embeddings of size 1."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    body = GPT2Model(GPT2Config(vocab_size=64, n_embd=64, n_layer=4, n_head=4, n_positions=32))
    return LastToken(body, 64).eval(), torch.randn(1, 8, 64)


def llama() -> Case:
    """4 layers of 64, 8 tokens, as initialized; embeddings of size 1."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
    )
    return LastToken(LlamaModel(config), 64).eval(), torch.randn(1, 8, 64)


class Crepe(nn.Module):
    """CREPE's pitch tracker, six times convolution, ReLU, BN and max-pool, as its state dict names them."""

    FILTERS, STRIDES = (128, 16, 16, 16, 32, 64), (4, 1, 1, 1, 1, 1)

    def __init__(self) -> None:
        super().__init__()
        channels = (1, *self.FILTERS)
        for i, (before, after, stride) in enumerate(zip(channels, self.FILTERS, self.STRIDES, strict=False), 1):
            setattr(self, f"conv{i}", nn.Conv2d(before, after, (512 if i == 1 else 64, 1), (stride, 1)))
            setattr(self, f"conv{i}_BN", nn.BatchNorm2d(after, eps=0.0010000000474974513))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for i in range(1, 7):
            x = functional.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{i}_BN")(functional.relu(getattr(self, f"conv{i}")(x)))
            x = functional.max_pool2d(x, (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 256)))


def crepe(directory: Path) -> Case:
    """CREPE tiny with its own weights, 1,024 samples of a normalized tone."""
    model = Crepe()
    model.load_state_dict(torch.load(directory / "crepe" / "tiny.pth", weights_only=True))
    time = torch.arange(1024) / 16000
    wave = sum(torch.sin(2 * torch.pi * 220 * k * time) / k for k in range(1, 6))
    return model.eval(), ((wave - wave.mean()) / wave.std())[None]


class MeanPooled(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.body(inputs_embeds=embeddings).last_hidden_state.mean(1)


def minilm(directory: Path) -> Case:
    """all-MiniLM-L6 with its own weights, 8 tokens of its own embeddings (entries of size 0.05), mean-pooled."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    body = BertModel(BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536))
    weights = load_file(directory / "minilm" / "model.safetensors")
    body.load_state_dict({name: value for name, value in weights.items() if "position_ids" not in name})
    tokens = torch.tensor([101, 2023, 2003, 1037, 7099, 6251, 1012, 102])
    return MeanPooled(body).eval(), body.embeddings.word_embeddings.weight.detach()[tokens][None]


MADE: dict[str, Callable[[], Case]] = {
    "small residual": small_residual, "vision transformer": vision_transformer, "gpt2": gpt2, "llama": llama,
}  # fmt: skip
GIVEN: dict[str, tuple[str, Callable[[Path], Case]]] = {
    "crepe": ("crepe", crepe), "minilm": ("minilm", minilm), "resnet18": ("cifar-10-batches-bin", small_resnet18),
}  # fmt: skip


def images(size: int, classes: int, count: int = 512) -> tuple[Tensor, Tensor]:
    """Smooth patterns, one per class, with noise; entries of size about 1."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(classes, 3, 4, 4, generator=generator)
    patterns = functional.interpolate(coarse, size=size, mode="bilinear")
    labels = torch.randint(classes, (count,), generator=generator)
    return patterns[labels] + 0.5 * torch.randn(count, 3, size, size, generator=generator), labels


def trained(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int, rate: float = 3e-3, batch: int = 64) -> nn.Module:
    """Some steps of Adam on cross-entropy."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    generator = torch.Generator().manual_seed(2)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(inputs), (batch,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model.eval()


def count(name: str, model: nn.Module, example: Tensor) -> None:
    graph = certifiable_graph(model, example, "eval", None)
    cuts = cut_vertices(graph)
    plans = [cuts[stride - 1 :: stride] if stride else [] for stride in STRIDES]
    work = ", ".join(f"{estimate(graph, relays):.2g} ({len(relays)})" for relays in plans)
    print(f"{name:>20} work of a sweep (relays): {work}", flush=True)


def measure(name: str, model: nn.Module, example: Tensor, effort: float, radii: Sequence[float] = RADII) -> None:
    graph = certifiable_graph(model, example, "eval", None)
    known = Known()
    for radius in reversed(radii):  # the largest first: J, made once, then has all rows that the others need
        region = Ball(example[0].double(), radius)
        began = time.process_time()
        forms = affine_forms(graph, region, known, effort=effort)
        seconds = time.process_time() - began
        witness = reached(graph, region, forms)
        ratio = float(forms.bound) / witness
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        worst = sorted(forms.parts, key=lambda part: -part.bound)[:3]
        together = sum(part.bound for part in forms.parts) or 1.0
        shares = ", ".join(f"{part.bound / together:.0%} {part.node.label}" for part in worst)
        print(
            f"{name:>20} {radius:8.0e} {witness:12.5g} {float(forms.bound):12.5g} {ratio:10{'.4f' if ratio < 1e4 else '.1e'}} "
            f"{forms.symbols:8} {forms.left / forms.straight:8.1e} {seconds:8.1f} {memory:6.2f}   {shares}",
            flush=True,
        )


def reached(graph: Graph, region: Ball, forms: AffineForms) -> float:
    """The largest quotient of pairs through the middle, along the direction that J stretches most."""
    space, middle = Space(graph), region.middle[0].reshape(-1)
    assert forms.away is not None and forms.away.jacobian.matrix is not None
    jacobian = forms.away.jacobian.matrix
    direction = torch.linalg.svd(jacobian, full_matrices=False).Vh[0]
    steps = [share * region.radius * direction for share in (0.999, 0.1, 1e-2)]
    return max(float(quotient(graph, space, middle - step, middle + step)) for step in steps)


def main() -> None:
    given = [argument for argument in sys.argv[1:] if argument != "certificate_gap"]
    directories = [Path(argument) for argument in given if Path(argument).is_dir()]
    efforts, radii = (
        [float(argument.removeprefix(name)) for argument in given if argument.startswith(name)] for name in ("effort=", "radius=")
    )
    wanted = [argument for argument in given if not Path(argument).is_dir() and argument != "work" and "=" not in argument]
    titles = f"{'network':>20} {'radius':>8} {'witness':>12} {'certified':>12} {'ratio':>10}"
    print(f"{titles} {'symbols':>8} {'κ/‖J‖':>8} {'CPU s':>8} {'GB':>6}   nodes that cost most")
    cases = dict(MADE)
    for directory in directories:
        cases |= {name: partial(make, directory) for name, (needed, make) in GIVEN.items() if (directory / needed).is_dir()}
    for name, make in cases.items():
        if not wanted or name in wanted:
            count(name, *make()) if "work" in given else measure(name, *make(), (efforts or [math.inf])[0], radii or RADII)


if __name__ == "__main__":
    main()
