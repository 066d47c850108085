"""Folding normalizers into weights: the same function in float64, how float32 takes it, and the brackets before and after.

    python -m bench folding [DIR] [--no-brackets]

Small networks of transformers with random weights, and the trained ones in DIR (crepe/, fcpe/, minilm/, smollm2/) that are there.
One line per network: the defect in float64, relative; the error of float32 outputs after folding over that before; whether both
brackets of the Lipschitz constant on a small ball around the input overlap.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.parametrize import remove_parametrizations

import normscope as ns
from bench.in_the_wild import NETWORKS, Trained
from normscope._checkpoint.running import outputs_apart, ran
from normscope.core.data import Call, Example
from normscope.core.errors import NormscopeError
from tests.checkpoint.models import ARCHITECTURES, built

RADIUS = 1e-3
MOST = 4.0  # times the float32 error of the model as it was


def trained(folder: Path, load: Callable[[Path], Trained]) -> tuple[nn.Module, Example]:
    """A trained network with plain weights: what computes a weight cannot be folded into."""
    found = load(folder)
    for module in found.model.modules():
        for name in [*getattr(module, "parametrizations", ())]:
            remove_parametrizations(module, name)
    return found.model, found.example


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
    networks: dict[str, Callable[[], tuple[nn.Module, Example]]] = {name: partial(small, name) for name in ARCHITECTURES}
    for name, (inside, load) in NETWORKS.items() if given.folder else ():
        if (given.folder / inside).is_dir():
            networks[name] = partial(trained, given.folder / inside, load)
    for name, made in networks.items():
        if not given.only or name in given.only.split(","):
            print(told(name, made, not given.no_brackets), flush=True)


if __name__ == "__main__":
    main()
