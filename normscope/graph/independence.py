"""A proof that the samples of a batch stay apart: the batch axis, followed through every operation that runs.

The model runs once on fake tensors (shapes without values, as torch.export runs it) whose batch has a symbolic size B. Beside every
tensor goes a `Layout`: which axis holds the samples, so that the part of sample i is g(sample i) with the same g for every i.
`LAYOUTS` says which operations keep that law. Everything else (an operation that is not in the table, one along the batch axis, a
number that depends on B) makes its result `Unproved`; a write of such a value, a branch on B or a value that Python reads ends the
proof. What is proved holds for every batch of two samples or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from normscope.core.data import Call
from normscope.core.errors import first_line
from normscope.graph.layouts import CONSTANT, LAYOUTS, Layout, Operation, State, Unproved, size_of

HINT = 7  # samples that branches on the size of the batch see; each such branch ends the proof anyway


class Broken(Exception):
    """The proof has ended; says why."""


def unproved(model: torch.nn.Module, call: Call, choose: Callable[[Any], Any]) -> str | None:
    """Why it is not proved that each sample of the chosen output depends on its own sample alone; None where it is."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) as fake:
        proof = _Proof(env)

        def batch(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return value
            dynamic = [DimDynamic.DUCK, *[DimDynamic.STATIC] * (value.dim() - 1)]
            with unset_fake_temporarily():
                real = torch.empty((HINT, *value.shape[1:]), dtype=value.dtype, device=value.device)
            made = fake.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
            proof.keep(made, Layout(0))
            return made

        args, kwargs = tree_map(batch, (call.args, call.kwargs))
        try:
            with enable_python_dispatcher(), proof:
                output = choose(model(*args, **kwargs))
        except Exception as error:  # a model's own code may raise anything on fake tensors
            return f"{type(error).__name__}: {first_line(error)}" if not isinstance(error, Broken) else str(error)
        if len(env.guards) > proof.own_guards or env.replacements:
            return "the model branches on the size of the batch"
        state = proof.state(output) if isinstance(output, torch.Tensor) else Unproved("no tensor is returned")
    if isinstance(state, Unproved):
        return state.reason
    return None if isinstance(state, Layout) and state.axis == 0 and state.outer == 1 else "axis 0 of the output is not the batch"


class _Proof(TorchDispatchMode):
    """What is known of every tensor, kept beside it while the model runs."""

    def __init__(self, env: ShapeEnv) -> None:
        super().__init__()
        self.env, self.own_guards = env, 0
        self.known: dict[int, tuple[torch.Tensor, int, State]] = {}  # the tensor is kept, so that no other gets its id
        self.repeated: set[int] = set()  # storages in which samples share memory

    def keep(self, tensor: torch.Tensor, state: State) -> None:
        self.known[id(tensor)] = (tensor, _storage(tensor), state)

    def state(self, tensor: torch.Tensor) -> State:
        if not isinstance(tensor, FakeTensor):
            return CONSTANT  # a parameter, a buffer or another tensor of the model's own
        _, storage, state = self.known.get(id(tensor), (None, -1, CONSTANT))
        return state if storage == _storage(tensor) else Unproved("a tensor that no operation has made")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise Broken(f"{func} is not in the table")
        states = {id(leaf): self.state(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        guards = len(self.env.guards)
        result = func(*args, **kwargs)
        self.own_guards += (
            len(self.env.guards) - guards
        )  # torch's choice of a kernel: what it computes is in the table all the same
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        operation = Operation(func, args, kwargs, states, results)
        made = operation.states()
        for written in operation.written:
            self._check_write(operation, written, states[id(written)], made)
        for tensor, state in zip(results, made, strict=True):
            if not any(tensor is written for written in operation.written):
                self.keep(tensor, _consistent(tensor, state, operation.name))
            if operation.name in ("expand", "unfold"):
                self.repeated.add(_storage(tensor))
        return result

    def _check_write(self, operation: Operation, written: torch.Tensor, before: State, made: Sequence[State]) -> None:
        """What is written must leave the law true in the tensor, and so in everything that shares its memory."""
        known = operation.name in LAYOUTS or operation.entrywise
        inplace_view = torch.Tag.inplace_view in operation.func.tags
        if not known or inplace_view or isinstance(before, Unproved) or any(state != before for state in made) or not made:
            raise Broken(f"{operation.name} writes to a tensor")
        if isinstance(written, FakeTensor) and _storage(written) in self.repeated:
            raise Broken(f"{operation.name} writes to memory that samples share")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _consistent(tensor: torch.Tensor, state: State, name: str) -> State:
    """The state, if the tensor's shape has B where the state says, and nowhere else."""
    sizes = [size_of(size) for size in tensor.shape]
    if isinstance(state, Unproved):
        return state
    wanted = [
        (state.outer * state.inner, 1) if isinstance(state, Layout) and axis == state.axis else None for axis in range(len(sizes))
    ]
    fits = all(
        size is not None and (size == want if want is not None else size[1] == 0) for size, want in zip(sizes, wanted, strict=True)
    )
    if not fits or (isinstance(state, Layout) and not 0 <= state.axis < len(sizes)) or math.prod(s[0] for s in sizes if s) == 0:
        return Unproved(f"{name} makes shape {tuple(tensor.shape)} of the batch")
    return state
