"""`normscope data`: whether a data set's files are there and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data = typer.Typer(help="Data sets of the lab.", no_args_is_help=True)


@data.callback()
def _data() -> None:
    """Data sets of the lab."""


@data.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="cifar10, fashion-mnist, digits, …")],
    dir: Annotated[Path | None, typer.Option(metavar="DIR", help="The directory of its files.")] = None,
) -> None:
    """Read a data set as the experiments do, and say what it holds."""
    from normscope.lab.datasets import load_data

    split = load_data(name, dir)
    shape = "×".join(map(str, split.sample_shape))
    print(f"{name}: {len(split.train[0])} training and {len(split.test[0])} test samples of {shape}, {split.classes} classes")
    for part, (inputs, classes) in (("training", split.train), ("test", split.test)):
        counts = classes.bincount(minlength=split.classes).tolist()
        low, high, mean = float(inputs.min()), float(inputs.max()), float(inputs.mean())
        print(f"  {part}: values in [{low:.3g}, {high:.3g}], mean {mean:.4f}; samples per class: {', '.join(map(str, counts))}")
