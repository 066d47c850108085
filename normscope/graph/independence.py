"""A proof that the samples of a batch stay apart: the batch axis, followed through every operation that runs.

The model runs once on fake tensors (shapes without values, as torch.export runs it) whose batch has a symbolic size B. Beside every
tensor goes a `SampleLayout`: which axis holds the samples, so that the part of sample i is g(sample i) with the same g for every i.
`LAYOUTS` says which operations keep that law. Everything else (an operation that is not in the table, one along the batch axis, a
number that depends on B) makes its result `Unproved`; a write of such a value, a branch on B, a value that Python reads or an
operation that fails, even if the model catches the error, ends the proof. What is proved holds for every batch of two samples or
more.
"""

from __future__ import annotations

import builtins
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from normscope.core.data import Call
from normscope.core.errors import Refusal, first_line
from normscope.graph.batch_axis import CONSTANT, Operation, SampleLayout, State, Unproved, laid_out, size_of
from normscope.graph.layouts import LAYOUTS, states_of
from normscope.graph.standins import Observed, numbers_as_they_run

SIZE = sympy.Symbol("size", integer=True, positive=True)  # of the batch, in what is said
HINT = 13  # samples that the fake batch has where the size must be a number
LARGER = (HINT, 16, 65)  # sizes that are tried where the model may branch on the size of the batch unseen
MOST_SIZES = 4096  # among which a size is sought that takes the other side of a branch, beside those near the numbers in it
FEW = 70  # the same where torch decides; among them a condition that holds for one size alone is told from others

# their guards are not of a kernel: what is left of a batch, and in how many parts, is there for the model to see
VISIBLE = (
    "__getitem__", "narrow", "narrow_copy", "select", "select_copy", "slice", "slice_copy", "unbind", "squeeze", "is_same_size",
    "split", "split_copy", "split_with_sizes", "split_with_sizes_copy", "unsafe_split", "unsafe_split_with_sizes",
    "chunk", "unsafe_chunk", "tensor_split", "vsplit", "hsplit", "dsplit", "pad_sequence", "unfold", "topk", "kthvalue",
)  # fmt: skip

HASHED = ("einops", "einops.py")  # it tries whether sizes have a hash, and computes the same where they have none

Choose = Callable[[Any], Any]

ONE_AT_A_TIME = threading.RLock()


class Broken(Exception):
    """The proof has ended; says why."""


class Reason(str):
    """Why there is no proof. sizes: of batches that may tell more than others."""

    sizes: Sequence[int] = (HINT,)


def unproved(
    model: torch.nn.Module,
    call: Call,
    choose: Choose,
    hint: int = HINT,
    fails: Callable[[int], bool] = lambda size: False,
    branches: bool = True,
) -> Reason | None:
    """Why it is not proved that each sample of the chosen output depends on its own sample alone; None where it is.

    Refuses a model that does one thing for some sizes of the batch and another for others: no probe tries all sizes. A branch with
    a side that raises is an assertion. hint: a size that the model takes. fails: whether it raises for a batch of some
    size, on tensors with values. branches: whether the model can have any, which an exported program cannot.
    """
    attempt = _Attempt(model, call, choose, hint)
    taken = [condition for condition in attempt.conditions if branches and condition not in (sympy.Eq(SIZE, hint), sympy.true)]
    for place, condition in enumerate(taken):
        other = _other(condition)
        beyond = None if other is None or not fails(other) else _Attempt(model, call, choose, other)
        if beyond is None or not beyond.raised or beyond.conditions != [*taken[:place], sympy.Not(condition)]:
            raise Refusal(
                "the samples of a batch influence each other, or its size changes the function, so there is no constant per sample",
                [f"the model branches on the size of the batch ({condition})"],
                "Compute the same for batches of every size.",
            )
    if attempt.reason is None:
        return None
    reason = Reason(attempt.reason)
    if sympy.Eq(SIZE, hint) in attempt.conditions:  # what it does with a plain number is not seen
        reason.sizes = LARGER
    else:
        changed = [next((size for size in range(2, MOST_SIZES) if _differs(step, hint, size)), hint) for step in attempt.steps]
        otherwise = [other for condition in attempt.shown if (other := _other(condition, FEW)) is not None]
        further = [size for other in otherwise for size in (other, other + 1, 2 * other + 1)]  # one more sample, or as many again
        reason.sizes = tuple(dict.fromkeys((HINT, *changed, *further)))
    return reason


def _other(condition: sympy.Expr, most: int = MOST_SIZES) -> int | None:
    """A size for which it does not hold."""
    return next((size for size in _sizes(condition, most) if _at(condition, size) == sympy.false), None)


def _sizes(condition: sympy.Expr, most: int) -> Iterator[int]:
    yield from range(2, most)
    numbers = {1, *(abs(int(number)) for number in condition.atoms(sympy.Integer))} - {0}
    near = {top // bottom + step for top in numbers for bottom in numbers for step in (-1, 0, 1)}
    yield from sorted(size for size in near if size >= most)


def _differs(expression: sympy.Expr, one: int, other: int) -> bool:
    return bool(_at(expression, one) != _at(expression, other))


def _at(expression: sympy.Expr, size: int) -> sympy.Basic | None:
    """Its value at a size, or None where it has none, as 1/(B − 2) at 2."""
    try:
        return expression.subs(SIZE, size)
    except (ArithmeticError, ValueError, AssertionError):  # of torch's functions of sizes
        return None


class _Attempt:
    """The model on fake tensors once. reason: why nothing is proved; conditions: on the size, on which its path depends.

    shown: likewise, but decided by torch and seen by the model, as in how many parts a batch is split.
    steps: numbers that the model computes of the size with divisions, remainders or the like, as B // 100.
    """

    def __init__(self, model: torch.nn.Module, call: Call, choose: Choose, size: int) -> None:
        self.size, self.env, self.raised = size, ShapeEnv(), False
        with FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True) as fake:
            proof = _Proof(self.env)
            args, kwargs = tree_map(partial(self._batch, fake, proof), (call.args, call.kwargs))
            looked = Observed()
            looked.failures.append([])
            try:
                with enable_python_dispatcher(), _symbolic_len(), numbers_as_they_run(looked), proof, _OwnChoices(proof):
                    output = choose(model(*args, **kwargs))
                self.reason = proof.end(output)
                caught = (failure.why for failure in looked.failures[-1] if Path(failure.line[0]).parts[-2:] != HASHED)
                seen = [*looked.shown, *caught]
                if seen:
                    self.reason = f"the model's own code looks at a number that depends on the size of the batch: {seen[0]}"
            except Exception as error:  # a model's own code may raise anything on fake tensors
                self.reason, self.raised = _told(error), not isinstance(error, Broken)
        decided = [guard.expr for guard in self.env.guards if id(guard) not in proof.own]
        decided += [sympy.Eq(symbol, value) for symbol, value in self.env.replacements.items()]
        on_size = _in_size([expr for expr in decided if any(symbol in self.env.backed_var_to_val for symbol in expr.free_symbols)])
        self.conditions = [sympy.Eq(SIZE, size) if _fixes(expr, size) else expr for expr in on_size]
        self.shown, self.steps = (
            _in_size([guard.expr for guard in self.env.guards if id(guard) in proof.shown]),
            _in_size(proof.steps),
        )
        if sympy.Eq(SIZE, size) in self.conditions:
            self.reason = "the model makes a plain number of the size of the batch"
        elif self.reason is None and not self.env.var_to_range.keys() <= self.env.backed_var_to_val.keys():
            self.reason = "the model makes a plain number of a value"
        elif self.reason is None and self.shown:
            self.reason = "what is left of a batch, or in how many parts, depends on its size"

    def _batch(self, fake: FakeTensorMode, proof: _Proof, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        dynamic = [DimDynamic.DUCK, *[DimDynamic.STATIC] * (value.dim() - 1)]
        with unset_fake_temporarily():
            real = laid_out(value, self.size)
        made = fake.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
        proof.keep(made, SampleLayout(0))
        return made


def _in_size(expressions: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    return list(dict.fromkeys(expression.subs(dict.fromkeys(expression.free_symbols, SIZE)) for expression in expressions))


def _fixes(condition: sympy.Expr, size: int) -> bool:
    """Whether it holds for one size alone, as far as is looked: so does `int(B / 2) == 6`."""
    return isinstance(condition, sympy.Eq) and all(_at(condition, other) == sympy.false for other in range(2, FEW) if other != size)


@contextmanager
def _symbolic_len() -> Iterator[None]:
    """len(x) is x.shape[0], a symbol, which Python's own `len` would make a number of; one proof at a time."""
    with ONE_AT_A_TIME:
        own = builtins.len
        builtins.len = lambda value: value.shape[0] if isinstance(value, FakeTensor) and value.dim() else own(value)  # type: ignore[assignment]
        try:
            yield
        finally:
            builtins.len = own


class _Proof(TorchDispatchMode):
    """What is known of every tensor, kept beside it while the model runs."""

    def __init__(self, env: ShapeEnv) -> None:
        super().__init__()
        self.env = env
        self.own: set[int] = set()  # guards of torch's own kernels
        self.shown: set[int] = set()  # those among them that the model sees
        self.steps: list[sympy.Expr] = []
        self.known: dict[int, tuple[torch.Tensor, int, State]] = {}  # the tensor is kept, so that no other gets its id
        self.repeated: set[int] = set()  # storages in which samples share memory
        self.failure: str | None = None  # of an operation on fake tensors: a model that catches it may do otherwise on real ones

    def end(self, output: Any) -> str | None:
        """Why the output is not proved to be a batch of samples that stayed apart."""
        if self.failure is not None:
            return self.failure
        state = self.state(output) if isinstance(output, torch.Tensor) else Unproved("no tensor is returned")
        if isinstance(state, Unproved):
            return state.reason
        whole = isinstance(state, SampleLayout) and state.axis == 0 and state.outer == 1
        return None if whole else "axis 0 of the output is not the batch"

    def keep(self, tensor: torch.Tensor, state: State) -> None:
        self.known[id(tensor)] = (tensor, _storage(tensor), state)

    def state(self, tensor: torch.Tensor) -> State:
        if not isinstance(tensor, FakeTensor):
            return CONSTANT  # a parameter, a buffer or another tensor of the model's own
        _, storage, state = self.known.get(id(tensor), (None, -1, CONSTANT))
        return state if storage == _storage(tensor) else Unproved("a tensor that no operation has made")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._noting_failures():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, and keeps what is known of its results."""
        if not isinstance(func, torch._ops.OpOverload):
            raise Broken(f"{func} is not in the table")
        states = {id(leaf): self.state(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = self.called(func, args, kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        operation = Operation(func, args, kwargs, states, results)
        made = states_of(operation)
        for written in operation.written:
            self._check_write(operation, written, states[id(written)], made)
        for tensor, state in zip(results, made, strict=True):
            if not any(tensor is written for written in operation.written):
                self.keep(tensor, _consistent(tensor, state, operation.name))
            if operation.name in ("expand", "unfold"):
                self.repeated.add(_storage(tensor))
        return result

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What torch chooses by the size of the batch is a kernel: what it computes is the same.

        So it narrows the sizes of which a branch of the model's own may be one: what it learned of them is forgotten.
        """
        env = self.env
        guards, ranges, axioms = len(env.guards), dict(env.var_to_range), dict(env.axioms)
        with self._noting_failures():
            result = func(*args, **kwargs)
        if len(env.guards) > guards:
            self.own |= set(map(id, env.guards[guards:]))
            env.var_to_range.update(ranges)
            env.axioms = axioms
            env._update_version_counter()
        return result

    def stepped(self, values: Any) -> bool:
        """Whether the model gives torch a number that it computed of the size in another way than by sums and products."""
        leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, (torch.SymInt, torch.SymFloat))]
        found = [leaf.node.expr for leaf in leaves if not leaf.node.expr.is_polynomial()]
        self.steps += found
        return bool(found)

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # what torch or the table raises, which the model's own code may catch
            self.failure = self.failure or _told(error)
            raise

    def _check_write(self, operation: Operation, written: torch.Tensor, before: State, made: Sequence[State]) -> None:
        """What is written must leave the law true in the tensor, and so in everything that shares its memory."""
        known = operation.name in LAYOUTS or operation.entrywise
        inplace_view = torch.Tag.inplace_view in operation.func.tags
        if not known or inplace_view or isinstance(before, Unproved) or any(state != before for state in made) or not made:
            raise Broken(f"{operation.name} writes to a tensor")
        if isinstance(written, FakeTensor) and _storage(written) in self.repeated:
            raise Broken(f"{operation.name} writes to memory that samples share")


class _OwnChoices(TorchFunctionMode):
    """torch's functions that are made of several operations, such as `cdist`, choose between them before any is dispatched."""

    def __init__(self, proof: _Proof) -> None:
        super().__init__()
        self.proof = proof

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = _is_of_torch(func) and not any(map(_is_code, (*types, *tree_leaves((args, kwargs)))))
        guards = len(self.proof.env.guards)
        result = self.proof.called(func, args, kwargs) if own else func(*args, **kwargs)
        chosen = set(map(id, self.proof.env.guards[guards:]))
        if self.proof.stepped((args, kwargs)):  # then it is the model that chooses
            self.proof.own -= chosen
        elif getattr(func, "__name__", "").partition(".")[0] in VISIBLE:
            self.proof.shown |= chosen
        return result


def _is_of_torch(func: Any) -> bool:
    """An operation of somebody else's is in a namespace of torch's, too."""
    name = (
        getattr(func, "_qualified_op_name", "aten::") if isinstance(func, OpOverloadPacket) else getattr(func, "namespace", "aten")
    )
    module = getattr(func, "__module__", None) or "torch"
    return str(name).partition("::")[0] in ("aten", "prim", "prims") and str(module).partition(".")[0] == "torch"


def _is_code(value: Any) -> bool:
    """Whether torch may call code of the model's own by it: a function, such as a distance, or a class of tensors."""
    if isinstance(value, type):
        kinds = (kind for kind in value.__mro__ if not issubclass(value, torch.Tensor) or "__torch_function__" in vars(kind))
        return next((kind.__module__.partition(".")[0] not in ("torch", "builtins") for kind in kinds), False)
    return callable(value) and not isinstance(value, (torch.Tensor, torch.device))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {first_line(error)}"


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _consistent(tensor: torch.Tensor, state: State, name: str) -> State:
    """The state, if the tensor's shape has B where the state says, and nowhere else."""
    sizes = [size_of(size) for size in tensor.shape]
    if isinstance(state, Unproved):
        return state
    wanted = [
        (state.outer * state.inner, 1) if isinstance(state, SampleLayout) and axis == state.axis else None
        for axis in range(len(sizes))
    ]
    fits = all(
        size is not None and (size == want if want is not None else size[1] == 0) for size, want in zip(sizes, wanted, strict=True)
    )
    misplaced = isinstance(state, SampleLayout) and (not 0 <= state.axis < len(sizes) or math.prod(s[0] for s in sizes if s) == 0)
    if not fits or misplaced:
        return Unproved(f"{name} makes shape {tuple(tensor.shape)} of the batch")
    return state
