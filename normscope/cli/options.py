"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

MODULE = "package.module:callable or file.py:callable. Its code is run."

Batch = Annotated[int, typer.Option(min=1, help="Samples in the random example.")]
DataBatch = Annotated[int, typer.Option(min=1, help="Samples per batch, if the data are tensors or a Dataset.")]
FailOn = Annotated[
    str, typer.Option(metavar="error|warning|info|never", help="Exit with code 1 if a finding is at least this severe.")
]
HtmlFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as a web page.")]
INPUT = typer.Option("--input", metavar="SHAPE", help="One sample: 3x32x32, name=3x32x32, or input_ids:16:int; once per input.")
JsonFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write JSON; - prints it and nothing else.")]
Module = Annotated[str, typer.Argument(metavar="MODEL", help=MODULE)]
Output = Annotated[str | None, typer.Option(metavar="NAME", help="Which output, if the model has several.")]
SarifFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write SARIF 2.1.0.")]
Weights = Annotated[Path | None, typer.Option(metavar="FILE", help="Weights: .safetensors, .pt or .pth.")]


def seed_of(what: str) -> Any:
    """--seed, in the range that every generator takes."""
    return typer.Option(min=0, max=2**63 - 1, help=f"Seed of {what}.")
