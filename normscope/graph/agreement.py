"""The law of every trace: the graph, evaluated in float64, equals the model as it runs.

What torch.export saw need not be what runs: a branch on `is_compiling()` or on the batch size, a `train()` of one's own, a
counter. So model and graph are compared on the example, on other points and scales, and in batches of 1, 2, 3 and as many
samples as the example has, sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from normscope.core.data import Call
from normscope.core.errors import EvaluationError, NormscopeError, Refusal
from normscope.core.randomness import preserved_random_state, seed_generators
from normscope.graph.calls import others, part, scaled, together
from normscope.graph.double import InDouble
from normscope.graph.drawing import DrawnAlike
from normscope.graph.exporting import check_runs, in_mode
from normscope.graph.graph import Evaluate, Graph, Node, check_finite
from normscope.graph.parting import Computed, Narrow, Steps, first_left, first_unconfirmed, module_outputs
from normscope.graph.perturbing import Noise, perturbed, roundoff
from normscope.graph.restoring import Snapshot
from normscope.graph.running import Running, as_if_exported
from normscope.graph.undropped import Undropped, dropped

SAFETY = 64  # times what random roundings of the size of the unit roundoff change
LARGE = (
    4_000_000  # entries of all nodes: a model that computes more is compared in float64 on its example alone, else in its own type
)
MANY = 30_000_000  # parameters of a model whose graph, wanted for its structure, is compared on its example alone, in its own type
SEEN = 1e-8  # of a value in float64: what differs by more is another value
BLURRED = 1e-3  # of the output: where roundings change more, nothing can be compared

CIRCUMSTANCES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "in its own type": nullcontext,
    "with gradients enabled": torch.enable_grad,
    "in inference mode": torch.inference_mode,
}

Inputs = Callable[[Call], list[torch.Tensor]]
Select = Callable[[Any], torch.Tensor]

CAUSES = (
    "Likely causes: (a) a branch on torch.compiler.is_compiling(), is_exporting(), requires_grad or a type; (b) state outside "
    "buffers, or random numbers, that change from call to call; (c) an operation that torch.export gets wrong; "
    "(d) weights that lose their digits where the model computes with them in its own type. "
    "Pass a model whose forward depends on its inputs, parameters and buffers alone."
)
ASKS = (
    "the model takes other steps while it is exported, as many transformers do: its graph is of those, and was compared with the "
    "model at some inputs alone"
)
ALONE = 'Use mode="batch" to treat the whole batch as one input, or eval mode if batch statistics do it.'


@dataclass
class Agreement:
    """A graph beside the model that it was traced from; inputs, select: what of a call and of a result belongs to the graph.

    structure: the graph is wanted for its structure, so that samples may influence each other and weights may be NaN; of a large
    model it is compared on the example alone.
    """

    graph: Graph
    model: torch.nn.Module
    mode: str
    inputs: Inputs
    select: Select
    dropout: bool = True
    structure: bool = False
    double: bool = True  # whether the model runs in float64
    narrow: bool = False  # whether it was found to compute in less all the same
    asks: bool = False  # whether it takes other steps where it is told that it is being exported
    compared: int = 0
    shapes: set[tuple[torch.Size, ...]] = field(default_factory=set)  # of calls that were made in the model's own type
    outputs: dict[Call, torch.Tensor] = field(default_factory=dict)  # of the graph
    spreads: dict[tuple[Call, torch.dtype], float] = field(default_factory=dict)  # what rounding in some type makes of them

    def per_sample(self, call: Call) -> Graph:
        """Check one sample at a time, alone and in batches; `call` is the whole example."""
        first = call.samples(slice(0, 1))
        if self._is_large:
            self.double = False
            self.check(first, [first], "the example")
            return self._noted()
        self.check(first, [first], "the example")
        self.check(first, [first], "the example with requires_grad set", needs_gradient=True)
        self._check_running(first)
        if self.is_random:
            return self._noted()
        if _reads_batch(self.graph):  # rules refuse it, with better advice
            return self._noted()
        around, small, large = others(first)
        if self._entries > LARGE and self.graph.dtype == torch.float32:
            self.double, small = False, first
        for name, samples in (("points around it", [around, first]), ("other scales", [large, small, first])):
            if not self.check(together(samples), samples, name):
                for sample in dict.fromkeys(samples[:-1]):
                    self.check(sample, [sample], name)
        if call.batch_size > 3:
            samples = [call.samples(slice(i, i + 1)) for i in range(call.batch_size)]
            fixed = any(not tensor.is_floating_point() and tensor.dim() for tensor in call.tensors)
            samples[0] = first
            self.check(call, samples, "the whole example", {0} if fixed else {0, call.batch_size - 1})
        if not self.compared and self.double:  # values beyond the range of float64 may be within it elsewhere
            tiny = scaled(first, 1e-150)
            self.check(tiny, [tiny], "a point near zero")
        return self._noted()

    def whole(self, call: Call) -> Graph:
        """Check the whole example as one input."""
        large = self._is_large
        self.double = not large
        for name, point in (("the example", call), ("points around it", others(call)[0]))[: 1 if large else 2]:
            self.check(point, [point], name)
        self.check(call, [call], "the example with requires_grad set", needs_gradient=True)
        if not large:
            self._check_running(call)
        return self._noted()

    @cached_property
    def _before(self) -> Snapshot:
        """The model, which is the same before every call."""
        return Snapshot(self.model)

    @cached_property
    def is_random(self) -> bool:
        """Whether something is drawn at random, as in train mode."""
        return any(map(_draws, self.graph))

    def _noted(self) -> Graph:
        if self.compared:
            own = f"part of the model computes in its own type: its graph was compared with it in {str(self.graph.dtype)[6:]} alone"
            notes = (*[own] * self.narrow, *[ASKS] * self.asks)
            return replace(self.graph, notes=(*self.graph.notes, *notes)) if notes else self.graph
        if self.is_random or self.structure:
            why = "no point was found where the model gives numbers: its graph was not compared with it"
            return replace(self.graph, notes=(*self.graph.notes, why))
        check_finite(self.graph)
        raise Refusal(
            "the graph could not be compared with the model",
            ["no point was found where the model gives numbers"],
            "Pass an example around which the model is defined.",
        )

    def check(
        self, call: Call, samples: Sequence[Call], where: str, places: set[int] | None = None, needs_gradient: bool = False
    ) -> bool:
        """Compare the model on a call with the graph on each of its samples; False where the model is not defined."""
        returned = self._eager(call, needs_gradient)
        if returned is None:
            return False
        for place in range(len(samples)) if places is None else sorted(places):
            expected = self._graph_output(samples[place])
            if expected is None or (place and returned.shape == expected.shape):  # it reads the first sample alone
                continue
            found = part(place, len(samples), returned, expected)
            gap = _gap(found, expected)
            if math.isnan(gap):  # where neither gives a number
                continue
            agree = self._agree(gap, expected, samples[place])
            self.compared += agree is True
            if agree is False and self.double and self._narrows(call):
                self.double, self.narrow = False, True
                return self.check(call, samples, where, places, needs_gradient)
            if agree is False and not self._agrees_dropped(call, samples, place, needs_gradient):
                self._refuse(samples[place], where, len(samples), gap)
        return True

    def _check_running(self, call: Call) -> None:
        """Compare them where the model computes in its own type, as it is called: whatever follows float64, this is what runs.

        Roughly, since a constant that the model computes in its own type is folded in float64. Where something is drawn at random,
        only what the model does with its memory is looked at.
        """
        expected = self._graph_output(call)
        if expected is None:
            return
        size = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
        for name, circumstance in CIRCUMSTANCES.items():
            running, steps = Running(), Steps(self.model)
            returned = self._eager(call, double=False, circumstance=circumstance, observers=(running, steps))
            if circumstance is torch.enable_grad:  # as where it is exported
                exported = Steps(self.model)
                self._eager(call, double=False, circumstance=as_if_exported, observers=(exported,))
                self.asks = returned is not None and exported.made != steps.made
            running.check(self.model)
            if self.is_random:
                return
            if returned is None or not bool(returned.isfinite().all()):
                continue
            gap, (unit, least) = _gap(returned, expected), roundoff(running.dtype)
            if gap > BLURRED * size + least and gap > SAFETY * (self._spread(call, expected, running.dtype) + unit * size):
                raise Refusal(
                    "the traced graph is not the model", [f"on the example {name} the outputs differ by {gap:.3g}"], CAUSES
                )

    def _eager(
        self,
        call: Call,
        needs_gradient: bool = False,
        dropout: bool | None = None,
        double: bool | None = None,
        circumstance: Callable[[], AbstractContextManager[Any]] = nullcontext,
        observers: Sequence[TorchDispatchMode] = (),
    ) -> torch.Tensor | None:
        """What the model returns, in float64 where it runs in it; None where it raises. It stays as it was.

        observers: see what it does, and not what puts it back.
        """
        dropout = self.dropout if dropout is None else dropout
        double = self.double if double is None else double
        shapes = tuple(tensor.shape for tensor in call.tensors)
        if double and shapes not in self.shapes:  # what it keeps from its first call, in a function's cache say, is of its own type
            self.shapes.add(shapes)
            self._eager(call, double=False)
        for attempted in (True, False) if double else (False,):
            with in_mode(self.model, self.mode, self._before), ExitStack() as stack:
                for observer in observers:
                    stack.enter_context(observer)
                stack.enter_context(self._alike())
                given = call.copied()
                try:
                    with (
                        InDouble(self.graph.dtype) if attempted else nullcontext() as mode,
                        nullcontext() if dropout else Undropped(),
                        circumstance(),
                    ):
                        if mode is not None:
                            given = Call(*tree_map(mode.double, (given.args, given.kwargs)))
                        for value in given.floats():
                            value.requires_grad_(needs_gradient)
                        returned = self.select(self.model(*given.args, **given.kwargs))
                        if mode is not None:
                            returned = mode.double(returned)  # it may be a tensor that the model made, and then wrote to
                    return returned.detach().to(torch.float64)
                except NormscopeError:
                    return None
                except Exception:  # a model's own code may raise anything, in float64 or elsewhere than on its example
                    if attempted and not self.compared:
                        self.double = False
        return None

    def _agrees_dropped(self, call: Call, samples: Sequence[Call], place: int, needs_gradient: bool) -> bool:
        """Whether they agree where both drop at random: dropout may be in a script, or written as other operations by torch."""
        returned = self._eager(call, needs_gradient, dropout=True) if self.is_random and not self.dropout else None
        expected = None if returned is None else self._graph_output(samples[place], dropped)
        if returned is None or expected is None:
            return False
        gap = _gap(part(place, len(samples), returned, expected), expected)
        agree = self._agree(gap, expected, samples[place])
        self.compared += agree is True
        return agree is not False

    @contextmanager
    def _alike(self) -> Iterator[None]:
        """No gradients, and random numbers that depend neither on what was drawn before nor on who draws them."""
        with torch.no_grad(), preserved_random_state(), DrawnAlike() if self.is_random else nullcontext():
            seed_generators(0)
            yield

    def _narrows(self, call: Call) -> bool:
        """Whether part of the model is computed in less than float64 all the same, or was before."""
        narrow = Narrow((*self.model.parameters(), *self.model.buffers(), *call.tensors))
        self._eager(call, observers=(narrow,))
        return narrow.seen

    def _graph_output(self, call: Call, evaluate: Evaluate = Node.evaluate, capture: Sequence[Node] = ()) -> Any:
        """What the graph gives in float64; None where it is not defined."""
        plain = evaluate is Node.evaluate and not capture
        if plain and call in self.outputs:
            return self.outputs[call]
        with self._alike():
            try:
                result, values = self.graph.run(self.inputs(call), torch.float64, capture, evaluate)
            except EvaluationError as error:
                if self.compared:
                    return None
                with in_mode(self.model, self.mode):
                    check_runs(self.model, call, '; if axis 0 is not the batch, pass mode="batch"' if call.batch_size == 1 else "")
                raise Refusal("the graph cannot be evaluated in float64", error.causes) from error
        if plain:
            self.outputs[call] = result
        return values if capture else result

    def _agree(self, gap: float, expected: torch.Tensor, call: Call) -> bool | None:
        """Whether a difference is rounding; None where rounding could make it but blurs the output, so that it says nothing.

        To first order rounding is a sum over operations: the unit roundoff, times what is computed, times how much of it reaches
        the output. That sum is measured: every operand and every result is perturbed at random by a roundoff of its size. The
        model rounds in float64, or in its own type; kernels that add in another order differ by a multiple of it.
        """
        dtype = torch.float64 if self.double else self.graph.dtype
        unit, least = roundoff(dtype)
        size = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
        if gap <= SAFETY * unit * size + least:
            return True
        spread = self._spread(call, expected, dtype)
        if gap > SAFETY * (spread + unit * size):
            return False
        return True if SAFETY * spread <= BLURRED * max(size, 1e-300) else None

    def _spread(self, call: Call, expected: torch.Tensor, dtype: torch.dtype) -> float:
        """What roundings in some type make of an output."""
        if (call, dtype) not in self.spreads:
            unit, least = roundoff(dtype)
            moved = self._graph_output(call, perturbed(partial(Noise(0).rounding, unit=unit, least=least)))
            self.spreads[call, dtype] = _gap(moved, expected)
        return self.spreads[call, dtype]

    def _refuse(self, sample: Call, where: str, batch: int, gap: float) -> None:
        by = f"by {gap:.3g}" if math.isfinite(gap) else "in shape, or in where there are numbers"
        alone = self._eager(sample)
        expected = self._graph_output(sample)
        if batch > 1 and alone is not None and self._agree(_gap(alone, expected), expected, sample):
            if self.structure:
                return
            raise Refusal(
                "the samples of a batch influence each other, or its size changes the function, so there is no constant per sample",
                [f"the output of one sample in a batch of {batch} differs {by} from that of the sample alone"],
                ALONE,
            )
        raise Refusal(
            "the traced graph is not the model",
            [f"on {where} the outputs differ {by}{self._first_difference(sample)}"],
            CAUSES,
        )

    def _first_difference(self, call: Call) -> str:
        if self._entries > LARGE:
            return ""
        computed = Computed()
        with module_outputs(self.model) as outputs:
            self._eager(call, observers=(computed,))
        values = self._graph_output(call, capture=list(self.graph.nodes))
        tolerance = SEEN if self.double else BLURRED
        node = first_unconfirmed(self.graph, values, computed, tolerance)
        if node is not None:
            return f", first seen to differ at {node.label}"
        node = first_left(self.graph, values, outputs, tolerance)
        return "; the model computes every value of the graph, but goes on in another way" + (
            f" after {node.label}" if node else ""
        )

    @property
    def _is_large(self) -> bool:
        return self.structure and sum(parameter.numel() for parameter in self.model.parameters()) > MANY

    @property
    def _entries(self) -> int:
        return sum(math.prod(node.shape) for node in self.graph)


def float_inputs(call: Call, ids: bool) -> list[torch.Tensor]:
    """The tensors of a call that are inputs of its graph."""
    tensors = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return [tensor for tensor in tensors if tensor.is_floating_point() or ids]


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; infinite where only one is a number, NaN where neither is anywhere."""
    if found.shape != expected.shape:
        return math.inf
    either = ~(found.isnan() & expected.isnan()) & (found != expected)
    if not bool(either.any()):
        return math.nan if expected.numel() and bool(expected.isnan().all()) else 0.0
    return float((found - expected)[either].abs().nan_to_num(math.inf, math.inf, math.inf).max())


def _draws(node: Node) -> bool:
    """Whether a node draws random numbers; attention and rrelu need not."""
    if node.op == "scaled_dot_product_attention":
        return bool(node.argument(4, "dropout_p", 0.0))
    if node.op == "rrelu":
        return bool(node.args[3])
    return node.draws or "dropout" in node.op or node.op == "random"


def _reads_batch(graph: Graph) -> bool:
    """Whether a batch normalization takes its statistics from the batch."""
    return any(node.op == "batch_norm" and (bool(node.args[5]) or node.args[4] is None) for node in graph)
