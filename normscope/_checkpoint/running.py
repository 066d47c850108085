"""Two models that run: compared by their outputs in float64, symmetries included, and the weight that makes the difference named.

With ε → 0 a symmetry changes no output but by rounding; what ε makes of it is measured and reported as the defect. Equal outputs
say nothing about entries that no input reached: where such entries differ, and no symmetry moves them, the answer is None.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from normscope._checkpoint.difference import Difference, DiffRow
from normscope._checkpoint.entries import Held
from normscope._checkpoint.equality import change
from normscope._checkpoint.views import View
from normscope.core.data import Call, Example
from normscope.core.errors import InputError, NormscopeError, first_line
from normscope.symmetry.detect import symmetries
from normscope.symmetry.groups import ShiftGroup

TOLERANCE = 1e-9  # of outputs in float64, relative to their size
EPSILONS = ("eps", "epsilon", "variance_epsilon")  # what normalizers call ε
TINY = 1e-30
MOST_EPSILON = 0.01  # how far ε may move outputs that are called the same
INPUTS, MOST_INPUTS = 4, 40  # random ones beside the example
WIDER = 3.0  # the spread of those that shall wake units which no input like the example wakes
STEPS, ENOUGH = 30, 1e-3  # of conjugate gradients
HOPELESS = (8, 0.7)  # steps after which a cause must explain so much
MOST_SOLVED = 2_000_000  # entries of a parameter that is tried as the cause
ADDS = 1e-7

HALVED = (torch.float32, torch.float16, torch.bfloat16)
Outputs = list[torch.Tensor]


class InDouble(TorchDispatchMode):
    """Casts to less than float64, as normalizers of transformers make them, keep float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in HALVED and args[0].dtype == torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def compare_models(a: nn.Module, b: nn.Module, example: Example, mode: str) -> Difference:
    """Run both on the example and on random inputs like it."""
    if mode not in ("train", "eval"):
        raise InputError(f"mode is train or eval, not {mode!r}")
    if any(parameter.is_meta for model in (a, b) for parameter in model.parameters()):
        raise InputError("a model has shapes but no values (device meta): load its weights first")
    one, other = _ready(a, mode), _ready(b, mode)
    calls = inputs_like(Call.of(example))
    with torch.no_grad(), _plain_attention():
        with_epsilon = outputs_apart([ran(one, call) for call in calls], [ran(other, call) for call in calls])
        differing = _epsilons(one, other)
        for model in (one, other):
            _set_epsilon(model)
        outputs = [ran(one, call) for call in calls], [ran(other, call) for call in calls]
    defect = outputs_apart(*outputs)
    rows = _rows(one, other)
    moved = [row.name for row in rows if not row.same]
    covered, shifted, notes = _covered(one, other, calls[0], mode, moved)
    blind = _unseen(other, one, calls, moved, shifted) if defect <= TOLERANCE else []
    if blind:
        calls = [*calls, *inputs_like(Call.of(example), MOST_INPUTS, WIDER)[1:]]
        with torch.no_grad(), _plain_attention():
            outputs = [ran(one, call) for call in calls], [ran(other, call) for call in calls]
        defect, blind = outputs_apart(*outputs), _unseen(other, one, calls, moved, shifted)
    basis = f"outputs of {sum(len(call.tensors[0]) for call in calls)} inputs in float64, {mode} mode, ε → 0"
    made: dict[str, Any] = {"rows": tuple(rows), "mode": basis, "sources": (type(a).__name__, type(b).__name__)}
    if differing:
        first = differing[0]
        return Difference(
            False, f"not the same function: ε of {first} differs", first=first, defect=with_epsilon, notes=notes, **made
        )
    if not defect <= TOLERANCE:
        calls, outputs = _enough(one, other, Call.of(example), outputs, moved)
        cause = _cause(other, calls, outputs, moved, covered) or _adding(one, other, calls[0])
        explains = f", which {cause} explains best" if cause else ""
        said = f"not the same function: outputs differ by {defect:.2g} of their size{explains}"
        return Difference(False, said, first=cause, defect=defect, notes=(*notes, *_layer_note(one, other, calls[0])), **made)
    if blind:
        said = f"not decided: outputs agree to {defect:.1g}, but no input reached all entries of {blind[0]} that differ"
        return Difference(None, said, first=None, defect=with_epsilon, notes=(*notes, "pass an example that reaches them"), **made)
    if with_epsilon > MOST_EPSILON:
        said = (
            f"not decided: the same function with ε → 0 (defect {defect:.1g}), but with ε the outputs differ by {with_epsilon:.1g}"
        )
        return Difference(None, said, first=None, defect=with_epsilon, notes=notes, **made)
    changed = f"{len(moved)} parameters differ, and no output sees it" if moved else "all parameters are equal"
    said = f"the same function: {changed} (defect {defect:.1g} with ε → 0, {with_epsilon:.1g} with ε)"
    return Difference(True, said, first=None, defect=with_epsilon, notes=notes, **made)


# running ----------------------------------------------------------------------------------------------------------------------


def _ready(model: nn.Module, mode: str) -> nn.Module:
    """A copy in float64 in the mode, without what is random."""
    return without_dropout(copy.deepcopy(model).double().requires_grad_(True).train(mode == "train"))


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    return model


def inputs_like(call: Call, fresh: int = INPUTS, wide: float = 1.0) -> list[Call]:
    """The example and random inputs like it: of the same mean, `wide` times its spread, ids of the same range."""
    generator = torch.Generator().manual_seed(0)

    def like(value: Any, fresh: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach().cpu()
        if not value.is_floating_point():
            if not fresh or value.dtype == torch.bool or value.is_complex():
                return value
            return torch.randint(int(value.min()), int(value.max()) + 1, value.shape, generator=generator).to(value.dtype)
        value = value.double()
        spread = float(value.std()) if value.numel() > 1 else 0.0
        return (
            value
            if not fresh
            else torch.randn(value.shape, generator=generator, dtype=torch.float64) * wide * (spread or 1.0) + value.mean()
        )

    def of(fresh: bool) -> Call:
        return Call(tuple(like(arg, fresh) for arg in call.args), {name: like(arg, fresh) for name, arg in call.kwargs.items()})

    return [of(False), *(of(True) for _ in range(fresh))]


def ran(model: nn.Module, call: Call, state: Mapping[str, torch.Tensor] | None = None) -> Outputs:
    """Every floating-point output, buffers left as they are; state: other values for some parameters."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    values = {**dict(model.named_parameters()), **buffers, **(state or {})}
    with InDouble():
        result = functional_call(model, values, call.args, call.kwargs)
    leaves = torch.utils._pytree.tree_leaves(dict(result) if isinstance(result, Mapping) else result)
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not found:
        raise InputError("a model returns no floating-point tensor: there is nothing to compare")
    return found


def outputs_apart(one: list[Outputs], other: list[Outputs]) -> float:
    """The largest difference, relative to the size of the output; infinite where shapes or NaN differ."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        if [x.shape for x in mine] != [y.shape for y in theirs]:
            return math.inf
        for x, y in zip(mine, theirs, strict=True):
            if not bool(x.isfinite().all()) or not bool(y.isfinite().all()):
                return math.inf
            worst = max(worst, float((x - y).detach().norm()) / max(float(x.detach().norm()), 1e-300))
    return worst


@contextmanager
def _plain_attention() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def _epsilons(one: nn.Module, other: nn.Module) -> list[str]:
    """Modules of both whose ε differ."""
    theirs = dict(other.named_modules())
    return [
        path
        for path, module in one.named_modules()
        for name in EPSILONS
        if path in theirs
        and isinstance(getattr(module, name, None), float)
        and getattr(theirs[path], name, None) != getattr(module, name)
    ]


def _set_epsilon(model: nn.Module) -> None:
    for module in model.modules():
        for name in EPSILONS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, TINY)


# what differs ------------------------------------------------------------------------------------------------------------------


def _rows(one: nn.Module, other: nn.Module) -> list[DiffRow]:
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    mine |= {name: value for name, value in one.named_buffers() if value.is_floating_point()}
    theirs |= {name: value for name, value in other.named_buffers() if value.is_floating_point()}
    rows = []
    for name in dict.fromkeys([*mine, *theirs]):
        if name not in mine or name not in theirs:
            rows.append(DiffRow(name, "parameter", None, f"in {'B' if name not in mine else 'A'} alone"))
        elif mine[name].shape != theirs[name].shape:
            rows.append(DiffRow(name, "parameter", False, f"{tuple(mine[name].shape)} in A, {tuple(theirs[name].shape)} in B"))
        else:
            same = torch.equal(mine[name], theirs[name])
            rows.append(
                DiffRow(name, "parameter", same, "equal" if same else "differs", **_changes(name, mine[name], theirs[name]))
            )
    return rows


def _changes(name: str, one: torch.Tensor, other: torch.Tensor) -> dict[str, float | None]:
    sides = [View(name, name, tuple(value.shape), "F64", Held(name, value).tensor) for value in (one, other)]
    return {} if torch.equal(one, other) or not one.numel() else change(*sides)


Masks = dict[str, torch.Tensor]


def _covered(one: nn.Module, other: nn.Module, call: Call, mode: str, moved: list[str]) -> tuple[Masks, Masks, tuple[str, ...]]:
    """Which entries some symmetry of A moves, and which of them differ by a shift that no output sees: by one number per member."""
    if not moved:
        return {}, {}, ()
    try:
        report = symmetries(one, call.args or call.kwargs, mode=mode)
    except NormscopeError as error:
        return {}, {}, (f"symmetries were not looked for: {first_line(error)}",)
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    found: Masks = {}
    shifted: Masks = {}
    for group in report.groups:
        for action in group.actions:
            name = action.parameter
            members = torch.tensor(action.members).expand(action.shape).clone()
            found[name] = found.get(name, torch.zeros(action.shape, dtype=torch.bool)) | (members >= 0)
            first = isinstance(group, ShiftGroup) and group.normal is None and action is group.actions[0]
            if first and name in moved and name in theirs and theirs[name].shape == mine[name].shape:
                step = (theirs[name] - mine[name]).detach()
                flat, places = step.flatten(), members.flatten().clamp(min=0)
                size = int(places.max()) + 1
                low = torch.full((size,), math.inf, dtype=flat.dtype).scatter_reduce(0, places, flat, "amin")
                high = torch.full((size,), -math.inf, dtype=flat.dtype).scatter_reduce(0, places, flat, "amax")
                alike = (high - low <= 1e-12 * (1 + mine[name].detach().abs().max()))[places].reshape(step.shape)
                shifted[name] = shifted.get(name, torch.zeros_like(alike)) | (alike & (members >= 0))
    return found, shifted, ()


def _unseen(model: nn.Module, against: nn.Module, calls: list[Call], moved: list[str], shifted: Masks) -> list[str]:
    """Parameters with entries that differ, by no shift that is a symmetry, and that no output of any input depends on.

    All entries of a parameter that stands on one side alone, or has another shape there, count as different.
    """
    own, theirs = dict(model.named_parameters()), dict(against.named_parameters())
    paired = {name for name in own if name in theirs and own[name].shape == theirs[name].shape}
    names = [name for name in moved if name in paired]
    blind = []
    for name, reached in _reached(model, names, calls).items():
        free = shifted.get(name, torch.zeros_like(reached))
        if bool(((own[name] != theirs[name]) & ~reached & ~free).any()):
            blind.append(name)
    for side, parameters in ((model, own), (against, theirs)):
        alone = [name for name in parameters if name not in paired]
        blind += [name for name, reached in _reached(side, alone, calls).items() if not bool(reached.all())]
    return blind


def _reached(model: nn.Module, names: list[str], calls: list[Call]) -> Masks:
    """Which entries some output of some input depends on."""
    own = dict(model.named_parameters())
    found = {name: torch.zeros_like(own[name], dtype=torch.bool) for name in names}
    generator = torch.Generator().manual_seed(1)
    with _plain_attention():
        for call in calls if names else ():
            total = sum((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in ran(model, call))
            for name, grad in zip(names, torch.autograd.grad(total, [own[n] for n in names], allow_unused=True), strict=True):
                if grad is not None:
                    found[name] |= grad != 0
    return found


# the cause ---------------------------------------------------------------------------------------------------------------------


def _enough(
    one: nn.Module, other: nn.Module, call: Call, outputs: tuple[list[Outputs], list[Outputs]], moved: list[str]
) -> tuple[list[Call], tuple[list[Outputs], list[Outputs]]]:
    """So many inputs that outputs outnumber the entries of every parameter that may be the cause, as far as that is cheap."""
    sizes = [value.numel() for name, value in other.named_parameters() if name in moved and value.numel() <= MOST_SOLVED]
    each = sum(out.numel() for out in outputs[0][0])
    calls = inputs_like(call, min(MOST_INPUTS, max(INPUTS, 3 * max(sizes, default=0) // max(each, 1))))
    with torch.no_grad(), _plain_attention():
        return calls, ([ran(one, one_call) for one_call in calls], [ran(other, one_call) for one_call in calls])


def _cause(
    model: nn.Module,
    calls: list[Call],
    outputs: tuple[list[Outputs], list[Outputs]],
    moved: list[str],
    covered: Mapping[str, torch.Tensor],
) -> str | None:
    """The parameter of B whose change alone explains the difference of outputs best.

    A parameter that differs though no symmetry moves it is the cause; else min ‖J δ − d‖ over changes δ of each that differs, d the
    difference of outputs and J their derivative, by conjugate gradients; of those that explain it, the one that moves least.
    """
    own = dict(model.named_parameters())
    listed = [name for name in moved if name in own]
    outright = [name for name in listed if name not in covered]
    if len(outright) == 1:
        return outright[0]
    wanted = torch.cat([(x - y).flatten() for one, other in zip(*outputs, strict=True) for x, y in zip(one, other, strict=True)])
    if not bool(wanted.isfinite().all()) or not len(wanted):
        return None
    scored = []
    for name in outright or listed:
        if own[name].numel() <= MOST_SOLVED:
            residual, size = _explained(model, calls, name, wanted)
            scored.append((residual, size, name))
    if not scored:
        return None
    best = min(scored)[0]
    return min((size, name) for residual, size, name in scored if residual <= max(1.5 * best, 0.02))[1]


def _explained(model: nn.Module, calls: list[Call], name: str, wanted: torch.Tensor) -> tuple[float, float]:
    """(‖J δ − d‖/‖d‖, ‖δ‖/‖θ‖) of the best δ that was found."""
    value = dict(model.named_parameters())[name].detach()
    scale = float(value.norm()) or 1.0

    def forward(at: torch.Tensor) -> torch.Tensor:
        return torch.cat([out.flatten() for call in calls for out in ran(model, call, {name: at})])

    def product(step: torch.Tensor) -> torch.Tensor:
        size = float(step.norm())
        width = 1e-5 * scale / size
        with torch.no_grad():
            return (forward(value + width * step) - forward(value - width * step)) / (2 * width)

    with _plain_attention():
        point = value.clone().requires_grad_(True)
        graph = forward(point)

        def adjoint(vector: torch.Tensor) -> torch.Tensor:
            (grad,) = torch.autograd.grad(graph, point, vector, retain_graph=True, allow_unused=True)
            return torch.zeros_like(value) if grad is None else grad

        step, residual = torch.zeros_like(value), wanted.clone()
        gradient = adjoint(residual)
        direction, square = gradient.clone(), float(gradient.square().sum())
        for done in range(STEPS):
            left = float(residual.norm()) / float(wanted.norm())
            if square == 0 or left <= ENOUGH or (done >= HOPELESS[0] and left > HOPELESS[1]):
                break
            image = product(direction)
            length = square / float(image.square().sum())
            step, residual = step + length * direction, residual - length * image
            gradient = adjoint(residual)
            new = float(gradient.square().sum())
            direction, square = gradient + new / square * direction, new
    return float(residual.norm() / wanted.norm()), float(step.norm()) / scale


# layers -----------------------------------------------------------------------------------------------------------------------


def _layer_note(one: nn.Module, other: nn.Module, call: Call) -> tuple[str, ...]:
    found = _adding(one, other, call)
    return (f"the first layer that adds an error of its own to what it inherits: {found}",) if found else ()


def _adding(one: nn.Module, other: nn.Module, call: Call) -> str | None:
    """The first layer whose output differs more than the difference of its input explains: B's own against A's on B's input."""
    mine = {path: module for path, module in one.named_modules() if path and not list(module.children())}
    theirs = {path: module for path, module in other.named_modules() if path and not list(module.children())}
    if mine.keys() != theirs.keys():
        return None
    found: list[str] = []

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if found or not isinstance(output, torch.Tensor) or not output.is_floating_point():
                return
            again = copy.deepcopy(mine[path])(*args, **kwargs)
            if float((again - output).norm()) > ADDS * max(float(output.norm()), 1e-300):
                found.append(path)

        return hook

    handles = [module.register_forward_hook(watch(path), with_kwargs=True) for path, module in theirs.items()]
    try:
        with torch.no_grad():
            ran(other, call)
    except Exception:  # a layer of A that takes something else
        return None
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
