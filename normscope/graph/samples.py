"""Whether the samples of a batch stay apart: only then is there a constant per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map, tree_map_only

from normscope.core.data import Call, Example
from normscope.core.errors import Refusal, first_line
from normscope.core.randomness import preserved_random_state, random_states
from normscope.core.twins import twin_of
from normscope.graph.batch_axis import laid_out
from normscope.graph.double import InDouble
from normscope.graph.exporting import in_mode, module_of, quiet
from normscope.graph.independence import HINT, LARGER, unproved
from normscope.graph.outputs import chosen_output
from normscope.graph.parting import Narrow, Program, Steps
from normscope.graph.restoring import untouched

SIZES = (5, 2, 3)  # of the batches that are tried, beside the example's own
MOST_ENTRIES = 1_000_000  # of a batch that is tried for what the model does with its size
MOST_KEPT = 5  # samples of a batch that are kept in turn while all others change
FAR = 1e6  # how far away samples are put, in units of the example's
ROUNDING = 1e4  # in units of the precision: what a kernel for another size of batch may change, relative to a sample's output
SAME_KERNEL = (1e3, 1.0)  # likewise for equal sizes, where rounding is the same: relative to an entry, and to a sample's largest

PLACED = "the size of its batch, or its place in it"
OTHERWISE = (
    "the model takes other steps for one sample than for several: that both compute the same was compared at some inputs alone"
)
UNTRIED = "that samples do not influence each other was neither proved nor probed: the model took one sample, but no batch ({})"

Change = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def _reach(value: torch.Tensor) -> torch.Tensor:
    return 1 + 2 * value.abs().max() if value.numel() else torch.zeros(())


def _random(scale: float) -> Change:
    return lambda value, generator: (
        value + scale * torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
    )


# What is put beside a sample. A model's own code must take REQUIRED alone.
NEIGHBOURS: dict[str, Change] = {
    "other values": _random(1.0),
    "larger values": lambda x, _: x + _reach(x),
    "smaller values": lambda x, _: x - _reach(x),
    "slightly other values": _random(1e-3),
    "values far away": _random(FAR),
    "NaN": lambda x, _: x * torch.nan,
    "infinity": lambda x, _: torch.full_like(x, torch.inf),
}
REQUIRED = ("other values", "larger values", "smaller values")
EXTREME = ("NaN", "infinity")
FADED = 2.0**-20  # of an error of rounding in float32 or less is left in float64: at most 2^-29, times what differs between kernels


def check_samples_independent(
    model: torch.nn.Module | ExportedProgram, example: Example, mode: str, output: str | int | None = None
) -> str | None:
    """Refuse a model whose output for one sample depends on the other samples: a constant per sample is then meaningless.

    Returns None where independence is proved (see graph/independence.py), else a note that it was probed, and why, or that no batch
    was found that the model takes.
    """
    call = Call.of(example)
    contiguous = Call(*tree_map_only(torch.Tensor, torch.Tensor.contiguous, (call.args, call.kwargs)))
    as_given = all(map(torch.Tensor.is_contiguous, call.tensors))
    notes = [_checked(model, each, mode, output) for each in ([call] if as_given else [call, contiguous])]
    return next(filter(None, notes), None)


def _checked(model: torch.nn.Module | ExportedProgram, call: Call, mode: str, output: str | int | None) -> str | None:
    """The same for batches that lie in memory as this one does."""
    module = module_of(model)

    def choose(returned: Any) -> Any:
        return chosen_output(returned, output)

    with in_mode(module, mode), torch.no_grad(), preserved_random_state():
        run = _Run(module, call, choose)
        if mode == "eval":
            _check_steady(run)
        sizes = run.taken((*SIZES, call.batch_size)) or run.taken(LARGER)
        if not sizes:
            if (failure := run.fails(1)) is not None:
                raise _untold(f"the model fails on its own example: {failure}")
            if isinstance(model, ExportedProgram) and not model.range_constraints:  # its shapes are fixed: it has no batch to mix
                return None
            return UNTRIED.format(run.fails(max(2, call.batch_size)))
        hint = HINT if run.fails(HINT) is None else sizes[0]
        # without gradients some of torch's layers take a fused path, which is not what is traced
        with torch.enable_grad(), untouched(module, tensors=False), quiet():
            branches = not isinstance(model, ExportedProgram)
            reason = unproved(module, call, choose, hint, run.asserts, branches)
        if reason is None:
            _check_neighbours(run, min(sizes), [0], EXTREME)  # of what runs, should it be another program than the proof's
            if _is_same_program(run, hint):
                return None
            _check_alone(run, hint)
            return None if _same_steps(run, hint) else OTHERWISE
        larger = run.taken([size for size in reason.sizes if size in LARGER or run.is_small(size)])
        double = _in_double(run, [*sizes, *larger])
        for size in larger:
            _check_alone(run, size)
            _check_place(double, size)
        for probed in dict.fromkeys((double, run)):
            for size in sizes:
                _probe(probed, size)
    return f"that samples do not influence each other was probed, not proved ({reason})"


class _Run:
    """Calls of a model on batches made from the example's samples, as many as wanted and no two of them equal."""

    def __init__(
        self,
        module: torch.nn.Module,
        call: Call,
        choose: Callable[[Any], Any],
        dtype: torch.dtype | None = None,
        narrow: torch.dtype | None = None,
    ) -> None:
        """dtype: of what it is given. narrow: the own type of a model in which float64 takes the place of every other type."""
        self.module, self.call, self.choose, self.dtype, self.narrow = module, call, choose, dtype, narrow

    def batch(self, size: int, spread: bool = True) -> Call:
        """The example's samples, again and again; random numbers make all but the first one distinct."""
        generator = torch.Generator().manual_seed(size)

        def made(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return value
            laid = laid_out(value, size).copy_(value[torch.arange(size) % len(value)])
            if not value.is_floating_point():
                return laid
            laid = laid.to(self.dtype or value.dtype)
            laid.nan_to_num_(0, 0, 0)  # else nothing would be seen to change
            laid[1:] = _random(1.0)(laid[1:], generator) if spread else laid[1:]
            return laid

        return Call(*tree_map(made, (self.call.args, self.call.kwargs)))

    def __call__(self, call: Call) -> torch.Tensor:
        given = call.copied()  # the model may write to what it is given
        with nullcontext() if self.narrow is None else InDouble(self.narrow) as mode:
            found: torch.Tensor = self.choose(self.module(*given.args, **given.kwargs))
        return (found if mode is None else mode.double(found)).clone()

    def fails(self, size: int) -> str | None:
        """What the model says of a batch of some size, if it does not take it."""
        try:
            self(self.batch(size))
        except Exception as error:  # a model's own code may raise anything
            return first_line(error)
        return None

    def asserts(self, size: int) -> bool:
        """Whether the model raises for a batch of some size; not where that is too large to be tried."""
        return self.is_small(size) and self.fails(size) is not None

    def is_small(self, size: int) -> bool:
        return size * sum(value[0].numel() for value in self.call.tensors if value.dim()) <= MOST_ENTRIES

    def taken(self, sizes: Sequence[int]) -> list[int]:
        """Those of several samples that the model takes."""
        return [size for size in dict.fromkeys(sizes) if size > 1 and self.fails(size) is None]


def _untold(cause: str) -> Refusal:
    headline = "whether the samples of a batch influence each other cannot be told"
    return Refusal(headline, [cause], "Pass an example around which the model is defined.")


def _in_double(run: _Run, sizes: Sequence[int]) -> _Run:
    """The same in float64, where small influences are seen; as it is, where the model does not allow it."""
    for narrow in (next((value.dtype for value in run.call.floats()), None), None):
        try:
            module = run.module if narrow else twin_of(run.module).double()
            double = _Run(module, run.call, run.choose, torch.float64, narrow)
            batches = [double.batch(size) for size in sizes]
            with Narrow() as narrowed:
                found = [double(batch).dtype for batch in batches]
            if {*found} == {torch.float64} and not narrowed.seen:
                return double
        except Exception:  # a model's own code may raise anything
            pass
    return run


def _probe(run: _Run, size: int) -> None:
    """Every sample is kept while all others change: its output must stay."""
    _check_neighbours(run, size, sorted({round(i * (size - 1) / (MOST_KEPT - 1)) for i in range(MOST_KEPT)}), [*NEIGHBOURS])
    _check_place(run, size)


def _check_neighbours(run: _Run, size: int, places: Sequence[int], names: Sequence[str]) -> None:
    """The samples at these places are kept in turn while all others change to these NEIGHBOURS."""
    generator = torch.Generator().manual_seed(0)
    batch = run.batch(size)
    before = run(batch)
    alone = _alone(run, before)
    joint = before.shape == alone.shape  # it reads the first sample alone, or all of them together
    for name in names:
        for kept in [0] if joint else places:
            try:
                beside = run(_replaced(batch, kept, NEIGHBOURS[name], generator))
            except Exception as error:  # a model's own code may raise anything
                if name not in REQUIRED:
                    continue
                raise _untold(f"the model fails for a sample of {name}: {first_line(error)}") from error
            _check_kept(_of_sample(kept, before, alone, size), _of_sample(kept, beside, alone, size), *SAME_KERNEL)


def _alone(run: _Run, before: torch.Tensor) -> torch.Tensor:
    return run(run.batch(1)) if run.fails(1) is None else before[:1]  # batch statistics do not take one sample


def _check_place(run: _Run, size: int) -> None:
    """A sample's output depends neither on the size of the batch nor on its place in it."""
    _check_alone(run, size)
    batch, order = run.batch(size), torch.randperm(size, generator=torch.Generator().manual_seed(0))
    before, permuted = run(batch), run(batch.samples(order))
    alone = _alone(run, before)
    if before.shape != alone.shape:
        for place, source in enumerate(order.tolist()):
            _check_kept(_of_sample(source, before, alone, size), _of_sample(place, permuted, alone, size), 0.0, ROUNDING, PLACED)


def _check_alone(run: _Run, size: int) -> None:
    """A sample's output is the same alone as in a batch."""
    batch = run.batch(size)
    together = run(batch)
    for place in (0, size - 1):
        try:
            alone = run(batch.samples(slice(place, place + 1)))
        except Exception:  # an exported program may take one size of batch only
            return
        if place and together.shape == alone.shape:
            continue
        try:
            _check_kept(alone, _of_sample(place, together, alone, size), 0.0, ROUNDING, PLACED)
        except Refusal:
            if not _is_rounding(run, size, place):
                raise


def _is_same_program(run: _Run, size: int) -> bool:
    """Whether the model takes the very same steps for one sample as for several: then both differ by rounding alone."""
    if run.fails(1) is not None:
        return False
    steps = []
    for batch in (run.batch(1), run.batch(size)):
        with Program(batch.tensors) as program:
            run(batch)
        steps.append(program.steps)
    return bool(steps[0] == steps[1])


def _same_steps(run: _Run, size: int) -> bool:
    """Whether the model computes the same of one sample as of several, up to views and copies."""
    if run.fails(1) is not None:
        return True
    steps = []
    for batch in (run.batch(1), run.batch(size)):
        with Steps(run.module) as taken, torch.enable_grad():  # else torch's own layers take other ways
            run(batch)
        steps.append(taken.computed())
    return bool(steps[0] == steps[1])


def _is_rounding(run: _Run, size: int, place: int) -> bool:
    """Whether a sample alone and in a batch differs by rounding alone.

    The model takes the same steps for both, and float64 makes the difference as small as it makes errors of rounding.
    """
    double, differences, steps = _in_double(run, [size]), [], []
    if double is run:
        return False
    for each in (run, double):
        batch = each.batch(size)
        sample = batch.samples(slice(place, place + 1))
        try:
            with Steps(each.module) as alone_steps:
                alone = each(sample)
            with Steps(each.module) as batch_steps:
                together = each(batch)
        except Exception:  # a model's own code may raise anything
            return False
        found = _of_sample(place, together, alone, size)
        if found.shape != alone.shape:
            return False
        steps.append(alone_steps.made == batch_steps.made)
        differences.append(float((found - alone).abs().max()))
    return all(steps) and differences[1] <= FADED * differences[0] < math.inf


def _replaced(batch: Call, kept: int, change: Change, generator: torch.Generator) -> Call:
    def replaced(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or not value.is_floating_point():
            return value
        other = change(value, generator).to(value)
        other[kept] = value[kept]
        return other

    return Call(*tree_map(replaced, (batch.args, batch.kwargs)))


def _check_kept(
    expected: torch.Tensor, found: torch.Tensor, entry: float, largest: float, cause: str = "the other samples of its batch"
) -> None:
    """Equal up to rounding: `entry` units of precision relative to every entry, `largest` relative to the sample's largest."""
    if not expected.is_floating_point():
        return
    same = expected.shape == found.shape
    if same and expected.numel():
        size = expected.abs().nan_to_num(0, 0, 0)
        allowed = torch.finfo(expected.dtype).eps * (entry * size + largest * size.max())
        same = bool(((found == expected) | ((found - expected).abs() <= allowed) | (found.isnan() & expected.isnan())).all())
    if not same:
        raise Refusal(
            "the samples of a batch influence each other, so there is no constant per sample",
            [f"the output for one sample changes with {cause}"],
            'Use mode="batch" to treat the whole batch as one input, or eval mode if batch statistics do it.',
        )


def _of_sample(place: int, together: torch.Tensor, alone: torch.Tensor, size: int) -> torch.Tensor:
    """The part of an output for a batch that belongs to one sample; all of it where axis 0 is not the batch."""
    count = alone.shape[0] if alone.dim() else 0
    return together[place * count : (place + 1) * count] if alone.dim() and together.shape[0] == size * count else together


# a model that is a function -----------------------------------------------------------------------------------------------


def _check_steady(run: _Run) -> None:
    """Refuse a model that answers the same input differently, after another input or none."""
    call, other = run.batch(1, spread=False), run.batch(2).samples(slice(1, 2))
    random, state = random_states(), _state(run.module)
    try:
        first = run(call)
    except Exception:  # a model's own code may raise anything: batch statistics do not take one sample
        return
    drawn = not all(map(torch.equal, random, random_states()))
    changed = [name for name, value in _state(run.module).items() if not _equal(value, state.get(name))]
    answers = [run(call)]
    try:
        run(other)
        answers.append(run(call))
    except Exception:  # a model's own code may raise anything
        pass
    for answer in answers:
        try:
            _check_kept(first, answer, 0.0, 0.0 if changed else ROUNDING)  # what drifts may drift by little
        except Refusal:
            causes = ["it draws random numbers"] * drawn + [f"a call changes {name}" for name in changed]
            raise Refusal(
                "the model's answer changes from call to call, so it is not a function of its input",
                causes or ["random numbers, or state outside its modules"],
                "Switch off what is random in eval mode, and what the model keeps from one call for the next.",
            ) from None


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """What a module keeps beside its parameters, by name; types that torch cannot copy and compare are left out."""
    held: dict[str, Any] = {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, (bool, int, float, str, torch.Tensor)):
                held[f"attribute {path}.{name}" if path else f"attribute {name}"] = value
    for name, value in [*held.items()]:
        if isinstance(value, torch.Tensor):
            del held[name]
            with suppress(Exception):  # torch raises whatever it does not know
                if _equal(kept := value.clone(), value):
                    held[name] = kept
    return held


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_meta or one.is_nested or one.layout != torch.strided:  # not looked into
            return one.is_nested or one.shape == other.shape
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    return type(one) is type(other) and one == other
