"""`normscope audit`: the bracket and the ledger of a model, as a table, JSON or HTML."""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from normscope.cli.options import seed_of
from normscope.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.export import ExportedProgram

    from normscope.certify.robustness import Robustness
    from normscope.core.region import Ball, Box

WIDTH = 100  # of what is printed into a file or a pipe
SHAPE = re.compile(r"(?:([A-Za-z_]\w*)=)?([1-9]\d*(?:[x×][1-9]\d*)*)")


def audit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="package.module:callable, file.py:callable or file.pt2.")],
    inputs: Annotated[
        list[str], typer.Option("--input", metavar="SHAPE", help="One sample: 3x32x32, or name=3x32x32; once per input.")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Samples in the random example.")] = 8,
    weights: Annotated[Path | None, typer.Option(metavar="FILE", help="Weights: .safetensors, .pt or .pth.")] = None,
    mode: Annotated[str, typer.Option(metavar="eval|batch|train", help="batch: the whole batch as one input.")] = "eval",
    output: Annotated[str | None, typer.Option(metavar="NAME", help="Which output, if the model has several.")] = None,
    region: Annotated[
        str | None, typer.Option(metavar="ball:R|box:R", help="Only near the example's first sample: within R, in l2 or entrywise.")
    ] = None,
    certify_radius: Annotated[
        str | None, typer.Option(metavar="DATA", help="Certified radii of labelled data: digits, or module:callable.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many samples --certify-radius takes.")] = 100,
    effort: Annotated[float, typer.Option(min=0.0, help="How long to search for the lower bound.")] = 1.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JSON; - prints it, and nothing else.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as a web page.")] = None,
    seed: Annotated[int, seed_of("the example, the search and a model's random weights")] = 0,
) -> None:
    """Bracket a model's Lipschitz constant and say what each layer does to it."""
    to_stdout = json == Path("-")
    for path in (None if to_stdout else json, html):
        check_writable(path)
    with redirect_stdout(sys.stderr), progress_bar() as bar:  # what the model's own code prints is not the report
        task = bar.add_task("loading", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        import torch

        import normscope as ns
        from normscope.cli.models import load_model

        loaded = load_model(model, weights, seed)
        generator = torch.Generator().manual_seed(seed)
        example = random_example(inputs, batch, dtype_of(loaded), generator)
        near = region_around(region, example, mode)
        result = ns.audit(loaded, example, region=near, mode=mode, output=output, effort=effort, generator=generator, report=report)
        robustness = certified_radii(loaded, example, certify_radius, samples, output, report) if certify_radius else None
    try:
        if html is not None:
            result.to_html(html)
        if json is not None and not to_stdout:
            result.to_json(json)
    except OSError as error:
        raise InputError(f"cannot write {error.filename or html or json}: {error.strerror}") from error
    if to_stdout:
        print(result.to_json())
    else:
        terminal().print(result.render())
    if robustness is not None:
        Console(stderr=to_stdout, highlight=False).print(f"robustness: {robustness}")


def random_example(shapes: list[str], batch: int, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Normal random inputs of the given shapes: a tuple of arguments, or a dict where every shape has a name."""
    import torch

    matches = [SHAPE.fullmatch(shape) for shape in shapes]
    named: dict[str, torch.Tensor] = {}
    plain: list[torch.Tensor] = []
    for text, match in zip(shapes, matches, strict=True):
        if match is None:
            raise InputError(f"--input {text!r} is not a shape: write that of one sample as 3x32x32, or name=3x32x32")
        sizes = [int(size) for size in re.split("[x×]", match[2])]
        value = torch.randn(batch, *sizes, generator=generator, dtype=dtype)
        if match[1] is None:
            plain.append(value)
        elif match[1] in named:
            raise InputError(f"--input {match[1]} is given twice: give each name once")
        else:
            named[match[1]] = value
    if named and plain:
        raise InputError("some --input have a name and some have none: name all of them or none")
    return named or tuple(plain)


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


def certified_radii(
    model: Any, example: Any, spec: str, samples: int, output: str | None, report: Callable[[str, int, int], None]
) -> Robustness:
    """Radii of the first samples of labelled data, in the model's dtype and the example's shape."""
    import torch

    import normscope as ns
    from normscope.cli.models import load_data
    from normscope.core.data import Call

    data = load_data(spec)
    if not (isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data)):
        raise InputError(f"{spec} gives no (inputs, labels) pair of tensors")
    if not len(data[0]):
        raise InputError(f"{spec} gives no sample")
    shape = Call.of(example).floats()[0].shape[1:]
    inputs = data[0][:samples].to(Call.of(example).floats()[0].dtype)
    if inputs[0].numel() != shape.numel():
        raise InputError(f"{spec} has samples of shape {tuple(inputs.shape[1:])}, --input says {tuple(shape)}")
    pair = (inputs.reshape(-1, *shape), data[1][:samples])
    return ns.certify_radius(
        model, example, pair, output=output, progress=lambda done: report("certifying radii", done, len(inputs))
    )


def dtype_of(model: torch.nn.Module | ExportedProgram) -> torch.dtype:
    """The type of a model's floating-point parameters, float32 where it has none."""
    import torch

    state = model.state_dict if isinstance(model, torch.export.ExportedProgram) else model.state_dict()
    tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
    return next((value.dtype for value in tensors if value.is_floating_point()), torch.float32)


def check_writable(path: Path | None) -> None:
    """Refuse at once a file that could not be written after minutes of work."""
    if path is not None and path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no directory {path.parent}")


def terminal() -> Console:
    """Standard output, 100 columns wide where it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def progress_bar() -> Progress:
    """A bar on stderr that leaves nothing behind; none where stderr is a file or a pipe."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
