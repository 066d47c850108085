"""The model as it runs: in its own type, told that it is exported or not, and writing to memory that it shares with itself."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import normscope as ns
from normscope.certify.certifiable import certifiable_graph
from normscope.graph.running import ROW_BY_ROW, share_entries
from normscope.graph.trace import trace
from tests.cases import Function, randn
from tests.graph.test_agreement import Shifted


class Tables(nn.Module):
    """Which buffer is read depends on export, and matters far away alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros(4, 4))
        self.register_buffer("large", 100 * torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.relu(x - 1e6) @ (self.zero if torch.compiler.is_exporting() else self.large)


def beyond(x: Tensor) -> Tensor:
    return x + 1000 * functional.relu(x - 1e6)


ASKING = {
    "export": Function(lambda x: x if torch.compiler.is_exporting() else beyond(x)),
    "export and gradients": Function(lambda x: x if torch.compiler.is_exporting() and torch.is_grad_enabled() else beyond(x)),
    "buffers": Tables(),
}


@pytest.mark.parametrize("name", ASKING)
def test_other_steps_while_exported_are_noted(name):
    assert any("other steps while it is exported" in note for note in trace(ASKING[name], randn(2, 4)).notes)


class AttentionAlone(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


class Profiled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("forward"):
            return super().forward(x)


class MadeAnew(nn.Linear):
    """A parameter and a NaN that every call makes."""

    def forward(self, x: Tensor) -> Tensor:
        nan = torch.tensor(float("nan"))
        return functional.linear(torch.where(nan.isnan(), super().forward(x), nan), nn.Parameter(torch.eye(4)))


class Sparse(nn.Linear):
    """Holds what has no memory of one piece, and does not use it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.mask = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)


ORDINARY = {
    "profiled": Profiled(4, 4),
    "parallel": nn.DataParallel(nn.Linear(4, 4)),
    "made anew": MadeAnew(4, 4),
    "sparse": Sparse(),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_ordinary_is_not_noted(name):
    assert not certifiable_graph(ORDINARY[name].eval(), randn(3, 4), "eval", None).notes


class Drawing(nn.Linear):
    """Its answer does not depend on what it draws."""

    def forward(self, x: Tensor) -> Tensor:
        random.random(), np.random.rand(), torch.manual_seed(0)
        return super().forward(x)


def test_random_states_are_as_they_were():
    model, example = Drawing(4, 4), randn(3, 4)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    ns.lipschitz(model, example)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize(
    "model",
    [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), AttentionAlone(4, 2, batch_first=True), nn.GRU(4, 4, batch_first=True)],
    ids=lambda model: type(model).__name__,
)
def test_what_torch_itself_does_is_not_noted(model):
    notes = certifiable_graph(model.eval(), randn(2, 3, 4), "eval", 0).notes
    assert not [note for note in notes if "steps" in note]


UNDERFLOWING = {  # in float32, in which these models run
    "the output": lambda x: x * 1e-30 * 1e-30,
    "a value on the way": lambda x: x + 1e60 * (1e-30 * (1e-40 * x)),
    "a difference": lambda x: (1e-25 * x) * (1e-25 * x) / 1e-12,
}


@pytest.mark.parametrize("name", UNDERFLOWING)
def test_what_is_lost_below_the_range_of_the_own_type_is_rounding(name):
    assert trace(Function(UNDERFLOWING[name]), randn(2, 4))


PREALLOCATED = {
    "zeros": lambda x: torch.zeros(x.shape[0], 6),
    "empty": lambda x: torch.empty(x.shape[0], 6).fill_(0),
    "new": lambda x: x.new_zeros(x.shape[0], 6),
}


@pytest.mark.parametrize("name", PREALLOCATED)
def test_an_output_that_is_made_first_and_then_written_to(name):
    def written(x: Tensor) -> Tensor:
        out = PREALLOCATED[name](x)
        out[:, :4] = 3 * x
        return out

    assert float(ns.lipschitz(Function(written), randn(3, 4)).upper) == pytest.approx(3)


def test_weights_that_are_lost_in_the_own_type_are_refused():
    """All of them are 0 there, whatever they are in float64."""
    model = Shifted(4, 4)
    model.shift = 1e8
    with pytest.raises(ns.Refusal, match=r"not the model.*own type"):
        trace(model, randn(1, 4))
    assert trace(model.double(), randn(1, 4).double())


class Shared(nn.Module):
    """Two tensors of one memory, of which forward writes to one and reads the other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Linear(4, 4, bias=False)
        self.register_buffer("buffer", torch.ones(4))
        array = np.ones(4, dtype=np.float32)
        if kind == "numpy":
            self.buffer = torch.from_numpy(array)
        self.view = {
            "attribute": self.buffer[:],
            "numpy": torch.from_numpy(array),
            "list": [self.buffer.view(2, 2)],
            "tied": nn.Parameter(self.first.weight.data.t()),
        }[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.kind == "tied":
                self.first.weight.copy_(100 * torch.eye(4))
                return x @ self.view
            (self.view[0] if self.kind == "list" else self.view).fill_(100.0)
            return x * self.buffer


@pytest.mark.parametrize("kind", ["attribute", "list", "tied", "numpy"])
def test_a_write_to_memory_that_tensors_share_is_refused(kind):
    model, x = Shared(kind), torch.randn(2, 4)
    with pytest.raises(ns.Refusal, match="memory that several of its tensors share"):
        ns.lipschitz(model, x)
    assert torch.equal(model(x), 100 * x)


class Slices(nn.Module):
    """Two buffers beside each other in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        first, second = torch.zeros(2, 64, 4)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first[: len(x)] = x.relu()
        self.second[: len(x)] = x.tanh()
        return self.first[: len(x)] + self.second[: len(x)]


def test_a_write_beside_another_tensor_is_not_refused():
    assert float(ns.lipschitz(Slices(), torch.randn(2, 4)).upper) == pytest.approx(2)


def written(write: Callable[[Tensor], object]) -> Function:
    """A model that writes to a copy of its input; ReLU hides the difference at many points."""

    def forward(x: Tensor) -> Tensor:
        y = x.clone()
        write(y)
        return functional.relu(y.sum(1, keepdim=True) - 1e4)

    return Function(forward)


READS_WHAT_IT_WRITES = {
    "a first entry": lambda y: y[:, ::2].add_(y[:, :1]),
    "a shift": lambda y: y[:, 1:].copy_(y[:, :-1]),
    "out": lambda y: torch.mul(y[:, 1:5], y[:, :4], out=y[:, 2:6]),
    "a transpose": lambda y: y[:, :4].view(-1, 2, 2).copy_(y[:, :4].view(-1, 2, 2).mT),
    "several": lambda y: torch._foreach_add_([y[:, :3], y[:, 3:6]], [y[:, 3:6], y[:, :3]]),
    "a product": lambda y: torch.mm(y, torch.full((8, 8), 2.0), out=y),
    "several of the same": lambda y: (lambda a, b: torch._foreach_add_([a, b], [b, a]))(*y.chunk(2, 1)),
    "several that overlap": lambda y: torch._foreach_mul_([y[:, :2], y[:, :6]], 3),
}


@pytest.mark.parametrize("name", READS_WHAT_IT_WRITES)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_memory_that_is_read_while_it_is_written_is_refused(name, mode):
    model = nn.Sequential(nn.Dropout(0.1), written(READS_WHAT_IT_WRITES[name]))
    with pytest.raises(
        ns.Refusal, match=r"reads memory while it writes to it|single memory location"
    ):  # torch raises for some of one sample
        trace(model, randn(2, 8), mode)


def exchanged(y: Tensor) -> None:
    w = torch.zeros_like(y)
    w.data = y
    w.mul_(5)


OTHER_MEMORY = {
    "data": exchanged,
    "set_": lambda y: torch.zeros_like(y).set_(y).mul_(5.0),
    "lift_fresh": lambda y: torch.ops.aten.lift_fresh(y).mul_(5),
    "lift": lambda y: torch.ops.aten.lift(y.view(-1)).mul_(5),
}


@pytest.mark.parametrize("name", OTHER_MEMORY)
def test_a_tensor_that_is_given_the_memory_of_another_is_refused(name):
    with pytest.raises(ns.Refusal, match=r"gives a tensor other memory|lifts a tensor"):
        trace(written(OTHER_MEMORY[name]), randn(2, 8))


def test_constants_are_lifted_and_written_to():
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.tensor([1.0, 2.0, 3.0, 4.0]).mul_(3)
        return x * scale

    assert float(ns.lipschitz(Function(forward), randn(2, 4)).upper) == pytest.approx(12)


def test_entries_of_different_sizes_share_bytes():
    real = torch.zeros(8)
    as_complex = torch.view_as_complex(real.view(4, 2))
    assert share_entries(as_complex[1:2], real[2:3]) and share_entries(real[3:4], as_complex[1:2])
    assert not share_entries(as_complex[::2], real[2:4]) and not share_entries(real[:2], as_complex[1:])


IN_PLACE = {  # operations that may read what they write, as torch does not say: on what is long enough for vectors and threads
    "where": lambda y, out: torch.where(y > 0, 2 * y, y, out=out),
    "tril": lambda y, out: torch.tril(y, out=out),
    "triu": lambda y, out: torch.triu(y, out=out),
    "floor_divide": lambda y, out: torch.floor_divide(y, 0.3, out=out),
    "copysign": lambda y, out: torch.copysign(y.abs(), y, out=out) if out is not y else torch.copysign(y, y, out=out),
    "heaviside": lambda y, out: torch.heaviside(torch.ones_like(y), y, out=out),
    "softmax": lambda y, out: torch.softmax(y, 0, out=out),
    "cumsum": lambda y, out: torch.cumsum(y, 0, out=out),
    "cumprod": lambda y, out: torch.cumprod(y, 1, out=out),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_operations_that_may_read_what_they_write(name):
    assert name in ROW_BY_ROW
    y = torch.randn(300, 500)
    expected = IN_PLACE[name](y, torch.empty_like(y))
    assert torch.equal(IN_PLACE[name](y, y), expected)


APART = {
    "even and odd": lambda y: y[:, ::2].add_(y[:, 1::2]),
    "itself": lambda y: y[:, ::2].mul_(y[:, ::2]),
    "a copy": lambda y: y[:, 1:].copy_(y[:, :-1].clone()),
    "rows": lambda y: torch.softmax(y, 1, out=y),
    "halves": lambda y: torch.mul(y[:, :4], 2.0, out=y[:, 4:]),
    "one of two": lambda y: torch.where(torch.ones(8) > 0, y, 2 * y, out=y),
    "a triangle": lambda y: torch.tril(y, out=y),
    "several, each itself": lambda y: (lambda a, b: torch._foreach_add_([a, b], [a, b]))(*y.chunk(2, 1)),
}


@pytest.mark.parametrize("name", APART)
def test_memory_that_is_not_read_while_it_is_written_is_not(name):
    assert trace(written(APART[name]), randn(2, 8))
