"""`normscope doctor`: what is wrong with a model's normalization, for people, for code scanning and for hooks."""

from __future__ import annotations

import json as json_format
from ast import literal_eval
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.examples import dtype_of, ids_of, random_example
from normscope.cli.options import INPUT, Batch, FailOn, JsonFile, Module, Output, SarifFile, Weights, seed_of
from normscope.cli.output import STDOUT, check_writable, progress, terminal, write_json, write_json_file
from normscope.core.errors import InputError

if TYPE_CHECKING:
    import torch

    from normscope.findings.finding import Findings

SEVERITIES = ("error", "warning", "info", "never")


def doctor(
    model: Module = "",
    inputs: Annotated[list[str] | None, INPUT] = None,
    batch: Batch = 8,
    weights: Weights = None,
    data: Annotated[str | None, typer.Option(metavar="DATA", help="Data: digits, or module:callable that returns some.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="The optimizer that will train it: adamw:lr=1e-3,weight_decay=0.1 (any of torch.optim)."),
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Samples per device and forward pass in training.")] = None,
    accumulation: Annotated[int | None, typer.Option(min=1, help="How many micro-batches are accumulated per step.")] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="A recorded run.")] = None,
    output: Output = None,
    select: Annotated[str, typer.Option(metavar="IDS", help="Run only these rules: NS1,NS203.")] = "",
    ignore: Annotated[str, typer.Option(metavar="IDS", help="Leave out these rules.")] = "",
    explain: Annotated[str | None, typer.Option(metavar="ID", help="Explain one rule and stop.")] = None,
    choose: Annotated[bool, typer.Option("--choose", help="Advise which normalizer suits the model and stop.")] = False,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file of known findings, which are not reported again.")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all findings to a file of known findings.")
    ] = None,
    json: JsonFile = None,
    sarif: SarifFile = None,
    format: Annotated[str, typer.Option(metavar="text|github", help="The format of printed findings.")] = "text",
    fail_on: FailOn = "error",
    seed: Annotated[int, seed_of("the example and a model's random weights")] = 0,
) -> None:
    """Find what is wrong with a model's normalization and say how to fix it."""
    from normscope._doctor.doctor import explanation

    if explain is not None:
        print(explanation(explain))
        return
    if fail_on not in SEVERITIES or format not in ("text", "github"):
        raise InputError("--fail-on must be error, warning, info or never; --format must be text or github")
    if not model or not inputs:
        raise InputError("doctor needs a MODEL and its --input, such as: normscope doctor models.py:net --input 3x32x32")
    check_writable(json, sarif, write_baseline)
    known = read_baseline(baseline)
    with progress("examining"):
        import torch

        import normscope as ns
        from normscope._doctor.choice import choice
        from normscope.cli.models import load_data, load_module

        loaded = load_module(model, weights, seed, "the doctor examines modules; name a callable that returns one")
        example = random_example(inputs, batch, dtype_of(loaded), torch.Generator().manual_seed(seed), ids_of(loaded))
        advice = choice(loaded, example, batch) if choose else ""
        findings = None if choose else ns.doctor(
            loaded, example, optimizer=optimizer_of(optimizer, loaded) if optimizer else None, accumulation=accumulation,
            micro_batch=micro_batch,
            data=load_data(data) if data else None, run=run, output=output,
            select=_ids(select), ignore=_ids(ignore),
        )  # fmt: skip
    if findings is None:
        print(advice)
        return
    if write_baseline is not None:
        write_json_file(sorted({finding.key for finding in findings}), write_baseline)
    report(findings.without(known), model, json, sarif, format)
    if fails(findings.without(known), fail_on):
        raise typer.Exit(1)


def optimizer_of(text: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer of torch.optim on all parameters, from its name and settings: adamw:lr=1e-3,weight_decay=0.1."""
    import torch

    name, _, settings = text.partition(":")
    kinds = {kind.lower(): getattr(torch.optim, kind) for kind in dir(torch.optim) if kind[0].isupper() and kind != "Optimizer"}
    if name.lower() not in kinds:
        raise InputError(f"no optimizer {name!r} in torch.optim: choose from {', '.join(sorted(kinds))}")
    try:
        given = {key.strip(): literal_eval(value) for key, value in (part.split("=", 1) for part in settings.split(",") if part)}
        made: torch.optim.Optimizer = kinds[name.lower()]([p for p in model.parameters() if p.requires_grad], **given)
        return made
    except (ValueError, TypeError, SyntaxError) as error:
        raise InputError(f"--optimizer {text!r}: {error}; write it as adamw:lr=1e-3,weight_decay=0.1") from error


def report(findings: Findings, model: str, json: Path | None, sarif: Path | None, format: str) -> None:
    """The findings in every form that was asked for."""
    from normscope.findings.sarif import to_github, to_sarif

    if sarif is not None:
        write_json_file(to_sarif(findings, model), sarif)
    write_json(findings.to_dict(), json)
    if format == "github":
        if json != STDOUT:
            print("\n".join(to_github(findings)))
    else:
        terminal(json).print(findings.render())


def fails(findings: Findings, fail_on: str) -> bool:
    """Whether the worst finding is at least as severe as `fail_on`."""
    return findings.worst is not None and SEVERITIES.index(findings.worst) <= SEVERITIES.index(fail_on) and fail_on != "never"


def read_baseline(path: Path | None) -> set[str]:
    """The keys of the findings that a file lists as known."""
    if path is None:
        return set()
    try:
        known = json_format.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the baseline {path}: {error}; make one with --write-baseline") from error
    if not isinstance(known, list) or not all(isinstance(key, str) for key in known):
        raise InputError(f"{path} is not a baseline: make one with --write-baseline")
    return set(known)


def _ids(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
