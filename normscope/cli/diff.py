"""`normscope diff` and `normscope fold`: are two checkpoints the same function; normalization folded into weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.examples import dtype_of, random_example
from normscope.cli.options import INPUT, Batch, HtmlFile, JsonFile, Module, Weights, seed_of
from normscope.cli.output import check_writable, progress, terminal, write_json, writing
from normscope.core.errors import InputError


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A file or directory of weights.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The checkpoint to compare it with.")],
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Say whether two checkpoints are the same function, and what differs. Exit code 1 unless they are the same."""
    check_writable(json, html)
    from normscope._checkpoint.comparing import diff as compare

    with progress("comparing"):
        found = compare(a, b)
    terminal(json).print(found.render())
    write_json(found.to_dict(), json)
    if html is not None:
        with writing(html):
            found.to_html(html)
    if found.same is not True:
        raise typer.Exit(1)


def fold(
    model: Module,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="Where the folded weights go: a .safetensors file.")],
    inputs: Annotated[list[str] | None, INPUT] = None,
    batch: Batch = 4,
    weights: Weights = None,
    seed: Annotated[int, seed_of("the example and a model's random weights")] = 0,
) -> None:
    """Fold normalization into the weights beside it and write the new state dict."""
    if not inputs:
        raise InputError(
            "fold needs the shape of an input, such as: normscope fold models.py:net --input 3x32x32 --to out.safetensors"
        )
    if to.suffix != ".safetensors":
        raise InputError(f"--to must be a .safetensors file, got {to}")
    check_writable(to)
    with progress("folding"):
        import torch
        from safetensors.torch import save_file

        from normscope._checkpoint.folding import fold as folded
        from normscope.cli.models import load_module

        loaded = load_module(model, weights, seed)
        example = random_example(inputs, batch, dtype_of(loaded), torch.Generator().manual_seed(seed))
        made = folded(loaded, example)
        state = {name: value.detach().clone().contiguous() for name, value in made.state_dict().items()}
        with writing(to):
            save_file(state, to)
    console = terminal()
    for path, what in made.folded.done.items():
        console.print(f"{path}: {what}")
    for path, why in made.folded.refused.items():
        console.print(f"{path}: not folded: {why}")
    console.print(f"outputs agree to {made.folded.defect:.1g} in float64; written to {to}")
