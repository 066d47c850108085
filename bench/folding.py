"""Folding normalizers into weights: the same function in float64, how float32 takes it, and the brackets before and after.

    python -m bench folding [DIR] [--no-brackets]

Small networks of transformers with random weights, and the trained ones in DIR (crepe/, fcpe/, minilm/, smollm2/) that are there.
One line per network: the defect in float64, relative; the error of float32 outputs after folding over that before; whether both
brackets of the Lipschitz constant on a small ball around the input overlap (of the small networks).
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import normscope as ns
from bench.in_the_wild import crepe, minilm
from normscope._checkpoint.running import outputs_apart, ran
from normscope.core.data import Call, Example
from normscope.core.errors import NormscopeError
from tests.checkpoint.models import ARCHITECTURES, built

RADIUS = 1e-3
MOST = 4.0  # times the float32 error of the model as it was


class Conformer(nn.Module):
    """One layer of FCPE: LN, a gated convolution, a depthwise one, and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Conv1d(width, 4 * width, 1), nn.Conv1d(2 * width, width, 1)
        self.depthwise = nn.Conv1d(2 * width, 2 * width, 31, padding=15, groups=2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.glu(self.up(self.norm(x).transpose(1, 2)), dim=1)
        return x + self.down(nn.functional.silu(self.depthwise(inner))).transpose(1, 2)


class Fcpe(nn.Module):
    """The network that FCPE's state dict names: two convolutions with GN, six conformers, LN and 360 bins of pitch."""

    def __init__(self, bands: int, width: int, layers: int) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv1d(bands, width, 3, padding=1), nn.GroupNorm(4, width)
        self.second, self.last = nn.Conv1d(width, width, 3, padding=1), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Conformer(width) for _ in range(layers))
        self.out = nn.Linear(width, 360)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(nn.functional.leaky_relu(self.norm(self.enter(x.transpose(1, 2))))).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.last(x)).sigmoid()  # type: ignore[no-any-return]


def fcpe(folder: Path) -> tuple[nn.Module, Example]:
    held = torch.load(next(folder.glob("*.pt")), map_location="cpu", weights_only=True)
    stored = held.get("model", held)
    depth = sum(name.endswith("conformer.net.0.weight") for name in stored)
    model = Fcpe(stored["input_stack.0.weight"].shape[1], stored["norm.weight"].numel(), depth)
    names = {"enter": "input_stack.0", "norm": "input_stack.1", "second": "input_stack.3", "last": "norm"}
    for i in range(depth):
        parts = {"norm": "0", "up": "2", "depthwise": "4.conv", "down": "6"}
        names |= {f"layers.{i}.{own}": f"net.encoder_layers.{i}.conformer.net.{place}" for own, place in parts.items()}
    state = {f"{own}.{kind}": stored[f"{theirs}.{kind}"] for own, theirs in names.items() for kind in ("weight", "bias")}
    direction = stored["output_proj.weight_v"]
    state |= {"out.weight": stored["output_proj.weight_g"] * direction / direction.norm(dim=1, keepdim=True)}
    model.load_state_dict({**state, "out.bias": stored["output_proj.bias"]})
    return model.eval(), torch.randn(1, 16, model.enter.in_channels, generator=torch.Generator().manual_seed(0))


def smollm2(folder: Path) -> tuple[nn.Module, Example]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name, dtype=torch.float32)
    return model.eval(), {"input_ids": torch.tensor([[1, 338, 1098, 288, 4, 257]])}


def trained(folder: Path) -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Example]]]]:
    loaders: dict[str, Callable[[], tuple[nn.Module, Example]]] = {
        "crepe": lambda: (lambda found: (found.model, found.example))(crepe(folder / "crepe")),
        "minilm": lambda: (lambda found: (found.model, found.example))(minilm(folder / "minilm")),
        "fcpe": lambda: fcpe(folder / "fcpe"),
        "smollm2": lambda: smollm2(folder / "smollm2"),
    }
    yield from ((name, load) for name, load in loaders.items() if (folder / name).is_dir())


def small(name: str) -> tuple[nn.Module, Example]:
    model, _ = built(name)
    generator = torch.Generator().manual_seed(0)
    if name == "ViT":
        return model, {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    return model, {"inputs_embeds": torch.randn(1, 5, 16, generator=generator)}


def told(name: str, load: Callable[[], tuple[nn.Module, Example]], brackets: bool) -> str:
    model, example = load()
    try:
        made = ns.fold(model, example)
    except NormscopeError as error:
        return f"{name:12} refused: {'; '.join(str(error).splitlines())[:300]}"
    call = Call.of(example)
    wide = Call(tuple(map(_double, call.args)), {key: _double(value) for key, value in call.kwargs.items()})
    with torch.no_grad():
        truth = [ran(copy.deepcopy(model).double(), wide)]
        before, after = (outputs_apart(truth, [_single(one, call)]) for one in (model, made))
    ratio = after / before
    folded = made.folded
    said = f"{name:12} {len(folded.done)} folded, {len(folded.refused)} stay; defect {folded.defect:.1e}; "  # type: ignore[arg-type,union-attr]
    said += f"float32 {before:.1e} → {after:.1e}, {ratio:.2f} ×{'' if ratio <= MOST else ' TOO MUCH'}"
    return said + (f"; {overlap(model, made, example)}" if brackets else "")


def _double(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def _single(model: nn.Module, call: Call) -> list[torch.Tensor]:
    result = model(*call.args, **call.kwargs)
    leaves = torch.utils._pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [leaf.double() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def overlap(model: nn.Module, made: nn.Module, example: Example) -> str:
    center = next(iter(example.values())) if isinstance(example, dict) else example
    try:
        one, other = (ns.lipschitz(each, example, region=ns.Ball(center[0], RADIUS)) for each in (model, made))  # type: ignore[arg-type]
    except NormscopeError as error:
        return f"no brackets: {str(error).splitlines()[0][:100]}"
    if one.upper is None or other.upper is None:
        return "no upper bound"
    both = one.lower <= other.upper and other.lower <= one.upper
    shown = f"[{one.lower}, {one.upper}] and [{other.lower}, {other.upper}]"
    return f"brackets {shown} {'overlap' if both else 'DO NOT OVERLAP'}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench folding")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--no-brackets", action="store_true")
    parser.add_argument("--only", default="", help="names of networks, with commas between them")
    given = parser.parse_args(sys.argv[sys.argv.index("folding") + 1 :] if "folding" in sys.argv else None)
    warnings.simplefilter("ignore")
    networks = [(name, lambda name=name: small(name), not given.no_brackets) for name in ARCHITECTURES]
    networks += [(name, load, False) for name, load in (trained(given.folder) if given.folder else ())]
    for name, load, brackets in networks:
        if not given.only or name in given.only.split(","):
            print(told(name, load, brackets), flush=True)


if __name__ == "__main__":
    main()
