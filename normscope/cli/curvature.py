"""`normscope curvature`: the Hessian's spectrum of a model on data, as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.examples import dtype_of
from normscope.cli.options import DataBatch, JsonFile, Module, Weights, seed_of
from normscope.cli.output import check_writable, progress, terminal, write_json
from normscope.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from normscope.curvature.spectrum import Curvature

LOSSES = ("cross_entropy", "mse", "model")


def curvature(
    model: Module,
    data: Annotated[str, typer.Option(metavar="DATA", help="digits, or a callable that returns a dataset: module:callable.")],
    weights: Weights = None,
    mode: Annotated[str, typer.Option(metavar="train|eval", help="train: BN with the statistics of each batch.")] = "train",
    quotient: Annotated[bool, typer.Option("--quotient", help="Also compute it with the model's symmetries divided out.")] = False,
    matrix: Annotated[str, typer.Option(metavar="hessian|gauss-newton", help="The matrix to analyse.")] = "hessian",
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(LOSSES),
            help="The loss; by default it follows from the targets. model: the model's own, for dict batches.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the largest eigenvalues.")] = 5,
    density: Annotated[bool, typer.Option("--density", help="Also estimate the density of all eigenvalues, for a report.")] = False,
    batch: DataBatch = 256,
    float64: Annotated[bool, typer.Option("--float64", help="Compute in double precision.")] = False,
    json: JsonFile = None,
    seed: Annotated[int, seed_of("a model's random weights, dropout and the estimates")] = 0,
) -> None:
    """Largest and smallest eigenvalues, trace and condition number of a loss's Hessian."""
    check_writable(json)
    with progress("loading") as report:
        import torch

        import normscope as ns
        from normscope.cli.models import load_data, load_module

        loaded = load_module(model, weights, seed, "it has no train mode; name the callable that makes the model")
        batches = load_data(data)
        chosen = loss_named(loss, batches)
        found, interrupted = [], False
        for divided in (False, True) if quotient else (False,):
            made = ns.hessian(
                loaded, chosen, batches, mode=mode, quotient=divided, matrix=matrix, batch_size=batch, seed=seed, progress=report,
                dtype=torch.float64 if float64 else dtype_of(loaded),
            )  # fmt: skip
            found.append(made)
            try:
                measure(made, top, seed, density)
            except KeyboardInterrupt:  # what there is by now is printed
                interrupted = True
                break
        described = "\n\n".join(map(str, found))
    write_json([made.to_dict() for made in found] if quotient else found[0].to_dict(), json)
    terminal(json).print(described, soft_wrap=True)
    if interrupted:
        raise KeyboardInterrupt


def measure(curvature: Curvature, top: int, seed: int, density: bool = False) -> None:
    """Compute what the command prints."""
    import torch

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    curvature.top(min(top, curvature.size), generator=generator())
    curvature.bottom(1, generator=generator())
    curvature.trace(generator=generator())
    curvature.condition(generator=generator())
    if density:
        curvature.density(generator=generator())


def loss_named(name: str | None, batches: Any) -> Callable[[Any, Any], torch.Tensor]:
    """The loss of that name; without a name, the one for the kind of targets."""
    import torch.nn.functional as functional

    losses: dict[str, Any] = {
        "cross_entropy": lambda outputs, targets: functional.cross_entropy(scores(outputs), targets),
        "mse": lambda outputs, targets: functional.mse_loss(*_alike(scores(outputs), targets)),
        "model": lambda outputs, targets: outputs["loss"],
    }
    name = name or usual_loss(batches)
    if name not in losses:
        raise InputError(f"--loss must be one of {', '.join(LOSSES)}, got {name!r}; ns.hessian takes any loss")
    return losses[name]


def usual_loss(batches: Any) -> str:
    """Dicts come with models that compute their own loss; else cross-entropy for classes, mse for real targets."""
    target = batches[1] if isinstance(batches, tuple) and len(batches) == 2 else None
    if target is None:
        first = next(iter(batches), None)
        if isinstance(first, Mapping):
            return "model"
        if not isinstance(first, (tuple, list)) or not first:
            raise InputError(f"a batch is (inputs, targets) or a dict, not a {type(first).__name__}")
        target = first[-1]
    real = getattr(target, "is_floating_point", lambda: isinstance(target, float))()
    return "mse" if real else "cross_entropy"


def _alike(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in one shape, where a last axis of length 1 may be missing; torch would broadcast one over the other."""
    if targets.dim() == outputs.dim() - 1:
        targets = targets.unsqueeze(-1)
    elif outputs.dim() == targets.dim() - 1:
        outputs = outputs.unsqueeze(-1)
    if outputs.shape != targets.shape:
        raise InputError(f"real targets must have the shape of the outputs, {tuple(outputs.shape)}, got {tuple(targets.shape)}")
    return outputs, targets


def scores(outputs: Any) -> Any:
    """What is compared with the targets: the outputs, or their `logits` where a model names its outputs."""
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs
