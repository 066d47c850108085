"""Two models that run: compared by their outputs in float64, symmetries included.

With ε → 0 a symmetry changes no output but by rounding; what ε makes of it is measured and reported as the defect. Equal outputs
say nothing about entries that no input reached: where such entries differ, and no symmetry moves them, the answer is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normscope._checkpoint.aligning import Alignment, aligned
from normscope._checkpoint.causes import MOST_INPUTS, adding, cause_of, enough_inputs, layer_note
from normscope._checkpoint.configurations import configured_apart
from normscope._checkpoint.difference import Difference, DiffRow
from normscope._checkpoint.entries import Held
from normscope._checkpoint.equality import change
from normscope._checkpoint.opening import described
from normscope._checkpoint.running import (
    TOLERANCE,
    Outputs,
    differing_epsilons,
    in_mode,
    inputs_like,
    outputs_apart,
    plain_attention,
    ran,
    set_epsilons,
)
from normscope._checkpoint.views import BUFFERS, View
from normscope.core.data import Call, Example
from normscope.core.errors import InputError, NormscopeError, first_line
from normscope.symmetry.detect import symmetries
from normscope.symmetry.groups import Group, ShiftGroup

MOST_EPSILON = 0.01  # how far ε may move outputs that are called the same
WIDER = 3.0  # the spread of inputs that shall wake units which no input like the example wakes
Masks = dict[str, torch.Tensor]


def compare_models(a: nn.Module, b: nn.Module, example: Example, mode: str) -> Difference:
    """Run both on the example and on random inputs like it."""
    if mode not in ("train", "eval"):
        raise InputError(f"mode must be train or eval, got {mode!r}")
    if any(parameter.is_meta for model in (a, b) for parameter in model.parameters()):
        raise InputError("a model has shapes but no values (device meta): load its weights first")
    one, other = in_mode(a, mode), in_mode(b, mode)
    calls = inputs_like(Call.of(example))
    with torch.no_grad(), plain_attention():
        with_epsilon = outputs_apart([ran(one, call) for call in calls], [ran(other, call) for call in calls])
        differing = differing_epsilons(one, other)
        set_epsilons(one, other)
        outputs = [ran(one, call) for call in calls], [ran(other, call) for call in calls]
        again = outputs_apart([outputs[0][0], outputs[1][0]], [ran(one, calls[0]), ran(other, calls[0])])
    defect = outputs_apart(*outputs)
    rows = _rows(one, other)
    moved = [row.name for row in rows if not row.same]
    groups, notes = _groups(one, calls[0], mode) if moved else ((), ())
    unread = [name for name, _ in other.named_buffers() if name in moved] if mode == "train" else []
    if unread:
        notes = (
            *notes,
            f'{unread[0]} differs ({len(unread)} buffers in all), and train mode may not read it: ask with mode="eval" too',
        )
    shifted = _shifted(groups, one, other, moved)
    blind = _unseen(other, one, calls, moved, shifted, mode) if defect <= TOLERANCE else []
    if blind:
        calls = [*calls, *inputs_like(Call.of(example), MOST_INPUTS, WIDER)[1:]]
        with torch.no_grad(), plain_attention():
            outputs = [ran(one, call) for call in calls], [ran(other, call) for call in calls]
        defect, blind = outputs_apart(*outputs), _unseen(other, one, calls, moved, shifted, mode)
    basis = f"outputs of {sum(len(call.tensors[0]) for call in calls)} inputs in float64, {mode} mode, ε → 0"
    made: dict[str, Any] = {"rows": tuple(rows), "mode": basis, "sources": (type(a).__name__, type(b).__name__)}
    if differing:
        first = differing[0]
        return Difference(
            False, f"not the same function: ε of {first} differs", first=first, defect=with_epsilon, notes=notes, **made
        )
    if all(_any_infinite(found) for found in outputs):
        return Difference(None, "not decided: the outputs of both are not finite", first=None, defect=defect, notes=notes, **made)
    if TOLERANCE < again < math.inf:  # where outputs are not finite, they may be so alike
        said = f"not decided: in {mode} mode outputs differ by {again:.1g} from one run to the next"
        return Difference(None, said, first=None, defect=defect, notes=(*notes, 'ask with mode="eval"'), **made)
    if not defect <= TOLERANCE:
        roundoff = max(_roundoff(a), _roundoff(b))
        found = aligned(groups, _detached(one), _detached(other), roundoff, _stored_alike(a, b))
        exact = _apart(one, found, calls, outputs[0])
        if not found.left and exact <= TOLERANCE and with_epsilon <= MOST_EPSILON and not _buffers_apart(rows, other):
            made["mode"] = f"weights up to symmetry and storage, and {basis}"
            if found.hiding:
                said = f"not decided: {found.hiding} differs by no more than its rounding, which could hide a change of 1 %"
                return Difference(None, said, first=None, defect=max(defect, with_epsilon), notes=notes, **made)
            stored = f"{len(moved)} parameters differ by a symmetry and by how they are stored (unit roundoff {roundoff:.1g})"
            said = (
                f"the same function up to storage: {stored}; outputs differ by {defect:.1g} with ε → 0, {with_epsilon:.1g} with ε"
            )
            made["mode"] = f"weights up to symmetry and storage, and {basis}"
            return Difference(True, said, first=None, defect=max(defect, with_epsilon), notes=notes, **made)
        cause = _cause(one, other, Call.of(example), outputs, found, moved)
        explains = f", which {cause} explains" if cause else ""
        said = f"not the same function: outputs differ by {defect:.2g} of their size{explains}"
        return Difference(False, said, first=cause, defect=defect, notes=(*notes, *layer_note(one, other, calls[0])), **made)
    if blind:
        said = f"not decided: outputs agree to {defect:.1g}, but no input reached every entry of {blind[0]} that differs"
        return Difference(
            None, said, first=None, defect=with_epsilon, notes=(*notes, "pass an example that reaches these entries"), **made
        )
    settings = [said for found in configured_apart(described(a), described(b)) for said in found]
    if settings:
        said = f"not decided: outputs agree to {defect:.1g}, but {settings[0]}, which no input may have shown"
        return Difference(None, said, first=None, defect=with_epsilon, notes=(*notes, *settings), **made)
    if with_epsilon > MOST_EPSILON:
        agree = f"the functions agree as ε → 0 (defect {defect:.1g})"
        said = f"not decided: {agree}, but with the real ε the outputs differ by {with_epsilon:.1g}"
        return Difference(None, said, first=None, defect=with_epsilon, notes=notes, **made)
    changed = f"{len(moved)} parameters differ, but the outputs do not" if moved else "all parameters are equal"
    said = f"the same function: {changed} (defect {defect:.1g} with ε → 0, {with_epsilon:.1g} with ε)"
    return Difference(True, said, first=None, defect=with_epsilon, notes=notes, **made)


def _rows(one: nn.Module, other: nn.Module) -> list[DiffRow]:
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    mine, theirs = {**mine, **_buffers(one)}, {**theirs, **_buffers(other)}
    rows = []
    for name in dict.fromkeys([*mine, *theirs]):
        if name not in mine or name not in theirs:
            rows.append(DiffRow(name, "parameter", None, f"only in {'B' if name not in mine else 'A'}"))
        elif mine[name].shape != theirs[name].shape:
            rows.append(DiffRow(name, "parameter", False, f"{tuple(mine[name].shape)} in A, {tuple(theirs[name].shape)} in B"))
        else:
            same = _equal(mine[name], theirs[name])
            rows.append(
                DiffRow(name, "parameter", same, "equal" if same else "differs", **_changes(name, mine[name], theirs[name]))
            )
    return rows


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """All but counters and the like."""
    return {name: value for name, value in model.named_buffers() if _is_smooth(value) or not BUFFERS.search(name)}


def _is_smooth(value: torch.Tensor) -> bool:
    """Whether outputs have derivatives by it, as they have none by indices and masks."""
    return value.is_floating_point() or value.is_complex()


def _changes(name: str, one: torch.Tensor, other: torch.Tensor) -> dict[str, float | None]:
    sides = [View(name, name, tuple(value.shape), "F64", Held(name, value).tensor) for value in (one, other)]
    return {} if _equal(one, other) or not one.numel() else change(*sides)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN is equal to NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _groups(model: nn.Module, call: Call, mode: str) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """The symmetries of a model, and a note where they cannot be found."""
    try:
        return tuple(symmetries(model, call.args or call.kwargs, mode=mode).groups), ()
    except NormscopeError as error:
        return (), (f"the search for symmetries failed: {first_line(error)}",)


def _shifted(groups: Sequence[Group], one: nn.Module, other: nn.Module, moved: list[str]) -> Masks:
    """Which entries differ by a shift that no output sees: by one number per member."""
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    shifted: Masks = {}
    for group in groups:
        action = group.actions[0]
        name = action.parameter
        free = isinstance(group, ShiftGroup) and group.normal is None
        if free and name in moved and name in theirs and theirs[name].shape == mine[name].shape:
            members = torch.tensor(action.members).expand(action.shape)
            step = (theirs[name] - mine[name]).detach()
            flat, places = step.flatten(), members.flatten().clamp(min=0)
            size = int(places.max()) + 1
            low = torch.full((size,), math.inf, dtype=flat.dtype).scatter_reduce(0, places, flat, "amin")
            high = torch.full((size,), -math.inf, dtype=flat.dtype).scatter_reduce(0, places, flat, "amax")
            alike = (high - low <= 1e-12 * (1 + mine[name].detach().abs().max()))[places].reshape(step.shape)
            shifted[name] = shifted.get(name, torch.zeros_like(alike)) | (alike & (members >= 0))
    return shifted


def _detached(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def _roundoff(model: nn.Module) -> float:
    """The largest unit roundoff among a model's parameters."""
    kinds = {value.dtype for value in model.parameters() if value.is_floating_point()}
    return max((torch.finfo(kind).eps / 2 for kind in kinds), default=0.0)


def _stored_alike(a: nn.Module, b: nn.Module) -> set[str]:
    """Parameters of which one side is the other's, as its type stores it."""
    mine, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    paired = [name for name in mine if name in theirs and mine[name].shape == theirs[name].shape]
    return {
        name
        for name in paired
        if any(torch.equal(x.detach().to(y), y.detach()) for x, y in ((mine[name], theirs[name]), (theirs[name], mine[name])))
    }


def _apart(model: nn.Module, found: Alignment, calls: list[Call], outputs: list[Outputs]) -> float:
    """How far a model's outputs move when its parameters are replaced by those that a symmetry makes of them."""
    with torch.no_grad(), plain_attention():
        return outputs_apart(outputs, [ran(model, call, found.values) for call in calls])


def _buffers_apart(rows: list[DiffRow], other: nn.Module) -> bool:
    parameters = {name for name, _ in other.named_parameters()}
    return any(not row.same and row.name not in parameters for row in rows)


def _cause(
    one: nn.Module, other: nn.Module, call: Call, outputs: tuple[list[Outputs], list[Outputs]], found: Alignment, moved: list[str]
) -> str | None:
    """The parameter that no symmetry explains; of several, the one whose change explains the difference of outputs best."""
    candidates = list(found.left) or moved
    if len(candidates) == 1:
        return candidates[0]
    calls, outputs = enough_inputs(one, other, call, outputs, candidates)
    return cause_of(other, calls, outputs, candidates) or adding(one, other, calls[0])


def _unseen(model: nn.Module, against: nn.Module, calls: list[Call], moved: list[str], shifted: Masks, mode: str) -> list[str]:
    """Parameters with entries that differ, by no shift that is a symmetry, and that no output of any input depends on.

    All entries of a parameter that stands on one side alone, or has another shape there, count as different.
    """
    own, theirs = _read(model, mode), _read(against, mode)
    paired = {name for name in own if name in theirs and own[name].shape == theirs[name].shape}
    names = [name for name in moved if name in paired]
    indices = {name: value for name, value in _buffers(model).items() if mode == "eval" and not _is_smooth(value)}
    others = _buffers(against)
    blind = [name for name in moved if name in indices and name in others and indices[name].shape == others[name].shape]
    for name, reached in _reached(model, {name: own[name] for name in names}, calls).items():
        free = shifted.get(name, torch.zeros_like(reached))
        if bool(((own[name] != theirs[name]) & ~reached & ~free).any()):
            blind.append(name)
    for side, parameters in ((model, own), (against, theirs)):
        alone = {name: value for name, value in parameters.items() if name not in paired}
        blind += [name for name, reached in _reached(side, alone, calls).items() if not bool(reached.all())]
    return blind


def _read(model: nn.Module, mode: str) -> dict[str, torch.Tensor]:
    """Parameters, and in eval mode buffers of real numbers but for running statistics, which have no derivatives."""
    if mode == "train":  # in which a forward pass may write to buffers
        return dict(model.named_parameters())
    statistics = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for name in ("running_mean", "running_var")
    }
    buffers = {name: value for name, value in _buffers(model).items() if _is_smooth(value) and name not in statistics}
    return {**dict(model.named_parameters()), **buffers}


def _reached(model: nn.Module, values: Mapping[str, torch.Tensor], calls: list[Call]) -> Masks:
    """Which entries of some parameters or buffers some output of some input depends on."""
    own = {name: value.detach().requires_grad_() for name, value in values.items()}
    found = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in own.items()}
    generator = torch.Generator().manual_seed(1)
    with plain_attention():
        for call in calls if own else ():
            total = sum((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in ran(model, call, own))
            if not total.requires_grad:
                continue
            for name, grad in zip(own, torch.autograd.grad(total, list(own.values()), allow_unused=True), strict=True):
                if grad is not None:
                    found[name] |= grad != 0
    return found


def _any_infinite(outputs: list[Outputs]) -> bool:
    return any(not bool(value.isfinite().all()) for values in outputs for value in values)
