"""`normscope audit`: the bracket and the ledger of a model, as a table, JSON or HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.examples import dtype_of, random_example
from normscope.cli.options import INPUT, MODULE, Batch, HtmlFile, JsonFile, Output, Weights, seed_of
from normscope.cli.output import STDOUT, check_writable, errors, progress, terminal, write_json, writing
from normscope.core.errors import InputError
from normscope.core.text import visible

if TYPE_CHECKING:
    from normscope.certify.robustness import Robustness
    from normscope.core.progress import Report
    from normscope.core.region import Ball, Box


def audit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"file.pt2, {MODULE}")],
    inputs: Annotated[list[str], INPUT],
    batch: Batch = 8,
    weights: Weights = None,
    trust: Annotated[bool, typer.Option("--trust", help="Load a file.pt2: it is inspected, but treat it as code.")] = False,
    mode: Annotated[str, typer.Option(metavar="eval|batch|train", help="batch: the whole batch as one input.")] = "eval",
    output: Output = None,
    region: Annotated[
        str | None,
        typer.Option(
            metavar="ball:R|box:R", help="Bracket only inputs within R of the example's first sample, in l2 or entrywise."
        ),
    ] = None,
    local: Annotated[
        str,
        typer.Option(
            metavar="auto|off|R",
            help="Also bracket the ball around the first sample: if cheap, never, or of radius R. Not with --region.",
        ),
    ] = "auto",
    within: Annotated[
        float | None,
        typer.Option(metavar="FACTOR", help="Also find the largest radius at which upper <= FACTOR * lower, and the curve."),
    ] = None,
    certify_radius: Annotated[
        str | None, typer.Option(metavar="DATA", help="Certified radii of labelled data: digits, or module:callable.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many samples --certify-radius takes.")] = 100,
    effort: Annotated[float, typer.Option(min=0.0, help="How long to search, and how much a bound on a region may cost.")] = 1.0,
    json: JsonFile = None,
    html: HtmlFile = None,
    seed: Annotated[int, seed_of("the example, the search and a model's random weights")] = 0,
) -> None:
    """Bracket a model's Lipschitz constant and say what each layer does to it."""
    check_writable(json, html)
    wanted = local_radius(local)
    with progress("loading") as report:
        import torch

        import normscope as ns
        from normscope.cli.models import load_model

        if trust and model.endswith(".pt2"):
            errors().print(f"normscope: warning: {visible(model)} is loaded as code that you trust; it is inspected, not confined")
        loaded = load_model(model, weights, seed, trust)
        generator = torch.Generator().manual_seed(seed)
        example = random_example(inputs, batch, dtype_of(loaded), generator)
        near = region_around(region, example, mode)
        result = ns.audit(
            loaded, example, region=near, mode=mode, output=output, effort=effort, generator=generator, progress=report,
            local=wanted, within=within,
        )  # fmt: skip
        robustness = certified_radii(loaded, example, certify_radius, samples, output, report) if certify_radius else None
    if html is not None:
        with writing(html):
            result.to_html(html)
    write_json(result.to_dict(), json)
    terminal(json).print(result.render())
    if robustness is not None:
        (errors() if json == STDOUT else terminal()).print(f"robustness: {robustness}")


def local_radius(text: str) -> bool | float:
    """auto, off or a radius."""
    if text in ("auto", "off"):
        return text == "auto"
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--local {text!r} is not a radius: write auto, off or a number such as 0.01") from None


def region_around(text: str | None, example: Any, mode: str) -> Ball | Box | None:
    """`ball:0.1` or `box:0.1` around the first sample of the example (the whole of it in batch mode)."""
    if text is None:
        return None
    from normscope.core.data import Call
    from normscope.core.region import Ball, Box

    kind, _, size = text.partition(":")
    try:
        radius = float(size)
    except ValueError:
        radius = -1.0
    if kind not in ("ball", "box") or not radius >= 0:
        raise InputError(f"--region {text!r} is not a region: write ball:0.1 or box:0.1")
    middle = [part if mode == "batch" else part[0] for part in Call.of(example).floats()]
    return Ball(middle, radius) if kind == "ball" else Box([m - radius for m in middle], [m + radius for m in middle])


def certified_radii(model: Any, example: Any, spec: str, samples: int, output: str | None, report: Report) -> Robustness:
    """Radii of the first samples of labelled data, in the model's dtype and the example's shape."""
    import torch

    import normscope as ns
    from normscope.cli.models import load_data
    from normscope.core.data import Call

    data = load_data(spec)
    if not (isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data)):
        raise InputError(f"{spec} must give a pair of tensors, (inputs, labels)")
    if not len(data[0]):
        raise InputError(f"{spec} is empty: it gives no sample")
    shape = Call.of(example).floats()[0].shape[1:]
    inputs = data[0][:samples].to(Call.of(example).floats()[0].dtype)
    if inputs[0].numel() != shape.numel():
        raise InputError(f"{spec} has samples of shape {tuple(inputs.shape[1:])}, --input says {tuple(shape)}")
    pair = (inputs.reshape(-1, *shape), data[1][:samples])
    return ns.certify.certify_radius(
        model, example, pair, output=output, progress=lambda what, done, _: report(what, done, len(inputs))
    )
