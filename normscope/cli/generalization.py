"""`normscope generalization`: every bound and measure for a model on its data, side by side, as text, JSON or figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.options import DataBatch, JsonFile, Module, Weights, seed_of
from normscope.cli.output import check_writable, progress, terminal, write_json, writing
from normscope.core.errors import InputError

LOSSES = ("zero-one", "ramp", "l1")


def generalization(
    model: Module,
    train: Annotated[str, typer.Option(metavar="DATA", help="Training data: digits, or a callable: module:callable.")],
    held_out: Annotated[str | None, typer.Option(metavar="DATA", help="Data that training has not seen, in the same form.")] = None,
    weights: Weights = None,
    initial: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights before training, for the prior of PAC-Bayes.")
    ] = None,
    loss: Annotated[str, typer.Option(metavar="|".join(LOSSES), help="The loss that the bounds are about.")] = "ramp",
    delta: Annotated[float, typer.Option(help="Each bound fails with at most this probability.")] = 0.05,
    select: Annotated[
        list[str] | None, typer.Option("--select", "--only", metavar="NAME", help="Compute only this bound; may be repeated.")
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Print every ingredient and assumption of every bound.")] = False,
    batch: DataBatch = 256,
    json: JsonFile = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Bounds, margins and flatness as figures on one page.")] = None,
    seed: Annotated[int, seed_of("a model's random weights, partitions and noise")] = 0,
) -> None:
    """What theory guarantees about unseen data, and whether it says anything."""
    check_writable(json, html)
    if loss not in LOSSES:
        raise InputError(f"--loss must be one of {', '.join(LOSSES)}, got {loss!r}; ns.generalization takes any loss")
    with progress("loading") as report:
        import torch

        import normscope as ns
        from normscope.cli.models import load_data, load_module
        from normscope.report.results import result_page

        loaded = load_module(model, weights, seed, "it has no parameters to fold; name the callable that makes the model")
        before = load_module(model, initial, seed) if initial is not None else None
        data, unseen = load_data(train, train=True), None if held_out is None else load_data(held_out)
        found = ns.generalization(
            loaded, loss, data, held_out=unseen, delta=delta, select=select, batch_size=batch, progress=report, initial=before,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        if html is not None:
            shown = data if unseen is None else unseen
            page = result_page(found, ns.bounds.margins(loaded, shown), ns.bounds.flatness(loaded, shown, seed=seed))
            with writing(html):
                html.write_text(page, encoding="utf-8")
    write_json(found.to_dict(), json)
    terminal(json).print(found.render())
    for bound in found if details else ():
        terminal(json).print("", bound.render())
