"""What a model holds is as it was, of whatever type it is; what cannot be looked at is left alone."""

from __future__ import annotations

import array
import collections
import io
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import normscope as ns
from normscope.graph.restoring import untouched
from normscope.graph.states import opened, states


class Slotted:
    __slots__ = ("__private", "value")

    def fill(self):
        self.value = self.__private = 1

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


class Key:
    def __init__(self):
        self.seen = []


class Frozen:
    def __setattr__(self, name, value):
        raise AttributeError


class OtherFrozen(Frozen):
    pass


def weight():
    return nn.Parameter(torch.ones(2))


def square():
    return torch.arange(9.0).view(3, 3)


def numbered():
    marked = weight()
    marked.register_hook(abs)
    marked.tag, marked.log = 0, [0]
    return marked


def place(tensor):
    return tensor.device, tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes(), tensor.tolist()


def seen_at(tensor):
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return [list(found or ()) for found in hooks], {name: str(value) for name, value in vars(tensor).items()}


def deepened(count):
    outer = SimpleNamespace(value=0)
    for _ in range(count):
        outer = SimpleNamespace(inner=[[[outer]]])
    return outer


def innermost(outer):
    while hasattr(outer, "inner"):
        outer = outer.inner[0][0][0]
    return outer


def with_grad(tensor):
    with torch.enable_grad():
        tensor.add_(weight())


def stood_in(held):
    with FakeTensorMode():
        held.data = torch.empty(3, 3)


WRITTEN = {  # what makes it, writes to it and shows it
    "transposed": (square, lambda held: held.t_(), place),
    "transposed parameter": (lambda: nn.Parameter(square()), lambda held: held.detach_().t_(), place),
    "data of another shape": (square, lambda held: setattr(held, "data", torch.ones(2)), place),
    "data of another type": (square, lambda held: setattr(held, "data", held.data.view(torch.int32)), place),
    "data of a stand-in": (square, stood_in, place),
    "larger storage": (square, lambda held: held.untyped_storage().resize_(64), place),
    "no storage": (square, lambda held: held.untyped_storage().resize_(0), place),
    "expanded": (lambda: torch.zeros(1).expand(4), lambda held: held[0].add_(1), place),
    "windows": (lambda: torch.zeros(6).unfold(0, 4, 1), lambda held: held[0].add_(1), place),
    "history": (lambda: torch.ones(2), with_grad, lambda held: (held.is_leaf, held.requires_grad, held.tolist())),
    "hook at a parameter": (weight, lambda held: held.register_hook(abs), seen_at),
    "another hook": (numbered, lambda held: held.register_hook(abs), seen_at),
    "hook after gradients": (weight, lambda held: held.register_post_accumulate_grad_hook(abs), seen_at),
    "attribute of a parameter": (weight, lambda held: setattr(held, "tag", 1), seen_at),
    "list at a parameter": (numbered, lambda held: held.log.append(1), seen_at),
    "no attribute left": (numbered, lambda held: vars(held).clear(), seen_at),
    "empty slots": (Slotted, lambda held: held.fill(), lambda held: [hasattr(held, s) for s in ("value", "_Slotted__private")]),
    "class of a frozen object": (Frozen, lambda held: object.__setattr__(held, "__class__", OtherFrozen), type),
    "attributes as a whole": (Key, lambda held: setattr(held, "__dict__", {"seen": 1}), lambda held: vars(held)),
    "key of a dictionary": (lambda: {Key(): 0}, lambda held: next(iter(held)).seen.append(1), lambda held: next(iter(held)).seen),
    "four objects deep": (lambda: deepened(3), lambda held: setattr(innermost(held), "value", 1), lambda held: innermost(held).value),
    "resized array": (lambda: np.zeros(4), lambda held: held.resize((5,), refcheck=False), lambda held: (held.shape, held.sum())),
    "reshaped array": (lambda: np.zeros((2, 3)), lambda held: held.resize((3, 2), refcheck=False), lambda held: held.shape),
    "array of lists": (lambda: np.array([[1], None], dtype=object), lambda held: held[0].append(1), lambda held: list(held[0])),
    "bits": (lambda: np.random.PCG64(0), lambda held: held.random_raw(), lambda held: held.state),
    "seeds": (lambda: np.random.SeedSequence(0), lambda held: held.spawn(1), lambda held: held.n_children_spawned),
    "children": (lambda: np.random.default_rng(0), lambda held: held.spawn(1), lambda held: held.bit_generator.seed_seq.n_children_spawned),
    "array of numbers": (lambda: array.array("i", [0]), lambda held: held.append(1), list),
    "text": (io.StringIO, lambda held: held.write("x"), lambda held: (held.getvalue(), held.tell())),
    "bytes": (lambda: io.BytesIO(b"abc"), lambda held: held.read(2), lambda held: held.tell()),
    "iterator": (lambda: iter([1, 2, 3]), next, lambda held: held.__length_hint__()),
    "storage": (lambda: torch.zeros(2).untyped_storage(), lambda held: held.fill_(1), lambda held: held.tolist()),
    "chained": (lambda: collections.ChainMap({}, {"a": [1]}), lambda held: held["a"].append(1), str),
    "default type": (object, lambda held: torch.set_default_dtype(torch.float64), lambda held: torch.get_default_dtype()),
}  # fmt: skip


class Holding(nn.Linear):
    """Writes to what it holds in every call."""

    def __init__(self, held, write):
        super().__init__(4, 4)
        object.__setattr__(self, "held", held)
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.held)
        return super().forward(x)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_held_is_as_it_was(name):
    make, write, shown = WRITTEN[name]
    model = Holding(make(), write)
    before = repr(shown(model.held))
    with untouched(model):
        model(torch.zeros(2, 4))
    assert repr(shown(model.held)) == before


@pytest.mark.parametrize("name", ["data of a stand-in", "hook at a parameter", "attribute of a parameter", "data of another shape"])
def test_what_changes_while_a_graph_is_made_is_as_it_was(name):
    make, write, shown = WRITTEN[name]
    model = Holding(make(), write)
    before = repr(shown(model.held))
    with untouched(model, tensors=False):
        model(torch.zeros(2, 4))
    assert repr(shown(model.held)) == before


class Written(nn.Linear):
    """Gives a tensor other memory, which is a stand-in's while the model is exported."""

    def __init__(self):
        super().__init__(4, 4)
        self.kept = torch.zeros(1, 4)

    def forward(self, x):
        y = super().forward(x) + self.kept
        self.kept.data = torch.ones(1, 4)
        return y


def test_no_stand_in_stays_in_a_tensor():
    model = Written()
    with pytest.raises(ns.NormscopeError):
        ns.lipschitz(model, torch.ones(2, 4))
    assert torch.equal(model.kept, torch.zeros(1, 4))


def test_a_variable_that_was_empty_is_empty():
    model, calls = nn.Linear(4, 4), 0

    def counted(module, args):
        nonlocal calls
        calls = 1

    (cell,) = counted.__closure__
    del calls
    model.register_forward_pre_hook(counted)
    with untouched(model):
        model(torch.zeros(2, 4))
        assert cell.cell_contents == 1
    with pytest.raises(ValueError, match="empty"):
        cell.cell_contents  # noqa: B018


class Raising(list):
    def __iter__(self):
        raise RuntimeError("not to be looked at")


class Asked:
    def __getattribute__(self, name):
        raise RuntimeError("not to be looked at")


UNSEEN = {
    "system's generator": random.SystemRandom,
    "list": lambda: Raising([1]),
    "tuple": lambda: type("Tuple", (tuple,), {"__iter__": Raising.__iter__})([1]),
    "frozenset": lambda: type("Set", (frozenset,), {"__iter__": Raising.__iter__})([1]),
    "object": lambda: [Asked()],
    "closed file": lambda: closed(io.StringIO()),
    "count": itertools.count,
}


def closed(file):
    file.close()
    return file


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_looked_at_is_left_alone(name):
    assert ns.lipschitz(Holding(UNSEEN[name](), lambda held: None), torch.ones(2, 4)).upper.finite


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        *(lambda dtype=dtype: torch.empty(4, dtype=dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(3).to_mkldnn(),
        lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
    ],
)
def test_no_tensor_is_a_reason_to_refuse(make):
    try:
        held = make()
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch makes none")
    assert ns.lipschitz(Holding(held, lambda held: None), torch.ones(2, 4), effort=0.01).upper.finite


def test_one_value_that_cannot_be_put_back_ends_no_other():
    model = Holding([io.StringIO()], lambda held: (held[0].close(), held.append(1)))
    model.register_buffer("count", torch.zeros(()))
    model.register_forward_hook(lambda module, args, output: module.count.add_(1) * output)
    with pytest.raises(ns.Refusal, match="could not be put back: StringIO: I/O operation on closed file"), untouched(model):
        model(torch.zeros(2, 4))
    assert len(model.held) == 1 and model.count == 0
    with pytest.raises(KeyboardInterrupt), untouched(model):  # which is never replaced
        model.held[:] = [io.StringIO()]
        raise KeyboardInterrupt


def counts(module, args, output):
    module.plain.calls = 1


def test_objects_of_modules_are_seen_however_deep_these_are():
    inner = nn.Linear(4, 4)
    inner.plain = SimpleNamespace(calls=0)
    inner.register_forward_hook(counts)
    model = inner
    for _ in range(9):
        model = nn.Sequential(nn.ModuleList([model])[0])
    with untouched(model):
        model(torch.zeros(2, 4))
    assert inner.plain.calls == 0


def test_the_nearest_way_to_an_object_counts():
    model = Holding(deepened(3), lambda held: setattr(innermost(held).value, "calls", 1))
    shared = SimpleNamespace(calls=0)
    innermost(model.held).value = shared  # too deep
    model.near = shared
    for _ in range(20):
        model.near = [model.near]
    with untouched(model):
        model(torch.zeros(2, 4))
    assert shared.calls == 0


def test_numbers_are_not_looked_into_one_by_one():
    inner = [1]
    assert opened([1, "a", (1, 2.0), None, torch.float32, inner, (inner,)]) == [inner, (inner,)]


def test_an_ordinary_tensor_is_one_value_and_comes_back_as_a_whole():
    model = Holding(torch.arange(6.0).reshape(2, 3), print)
    tensor, version = model.held, model.held._version
    assert len([*states(tensor)]) == 1
    with untouched(model):
        tensor.data = torch.ones(4)
        tensor.requires_grad_(True)
        tensor.grad, tensor.note = torch.ones(4), "changed"
        tensor.register_hook(print)
        tensor.data.add_(1)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (tensor.grad, tensor._backward_hooks, vars(tensor), tensor._version) == (None, None, {}, version)
