"""A parameter or buffer that the model also keeps under another name is one tensor; what stand-ins alone raise is not swallowed."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.graph import arrays
from normscope.graph.trace import trace
from tests.cases import Function, randn

KEPT_GLOBALLY: dict[str, Tensor] = {}


def bump(x: Tensor) -> Tensor:
    """0 at every point that is compared, with slope 1e5 close to another."""
    return 100 * torch.relu(1 - 1000 * (x - 0.37712).abs())


class Plain:
    """An object that is no module."""

    def __init__(self, content: nn.Module) -> None:
        self.content = content


class Kept(nn.Module):
    """Writes its state by one name and reads it by another."""

    def __init__(self, kind: str, read: str = "") -> None:
        super().__init__()
        self.kind, self.read = kind, read
        if kind == "parameter":
            self.state = nn.Parameter(torch.zeros(1, 4))
        else:
            self.register_buffer("state", torch.zeros(1, 4))
        state, self.identity = self.state, nn.Identity()
        if kind == "closure":
            self.identity.register_forward_hook(lambda module, args, output: output + state)
        elif kind == "global":
            KEPT_GLOBALLY["state"] = state
        elif kind == "hidden module":
            hidden = nn.Module()
            hidden.register_buffer("state", state)
            self.hidden = Plain(hidden)
        elif kind == "two names":
            self.register_buffer("second", state)
        elif kind == "same view":
            self.kept = [state.view(1, 4)]
        else:
            self.kept = [state]

    def other(self) -> Tensor:
        if self.kind == "hidden module":
            return self.hidden.content.state
        return KEPT_GLOBALLY["state"] if self.kind == "global" else self.kept[0]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.state.copy_(bump(x))
        if self.kind == "closure":
            return self.identity(x)
        if self.read == "tolist":
            return x + self.other().tolist()[0][0]
        return x + (self.second if self.kind == "two names" else self.other())


@pytest.mark.parametrize("kind", ["buffer", "parameter", "closure", "global", "hidden module", "two names"])
@pytest.mark.parametrize("mode", ["eval", "batch"])
def test_a_write_is_seen_by_the_other_name(kind, mode):
    assert float(ns.lipschitz(Kept(kind).eval(), randn(1, 4), mode=mode, effort=0.01).upper) >= 99_999


def test_a_write_is_seen_by_the_other_name_in_an_exported_program():
    program = torch.export.export(Kept("buffer").eval(), (randn(1, 4),), strict=False)
    assert float(ns.lipschitz(program, randn(1, 4), effort=0.01).upper) >= 99_999


def test_a_write_to_another_view_is_refused():
    with pytest.raises(ns.Refusal, match="memory that several of its tensors share"):
        trace(Kept("same view"), randn(1, 4))


def test_plain_numbers_of_what_is_kept_twice_are_refused():
    with pytest.raises(ns.Refusal, match="keeps 'state' under another name too"):
        trace(Kept("buffer", "tolist"), randn(1, 4))


class Weights(nn.Module):
    """Reads one weight twice, by two names or by one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.norm, self.name = nn.Parameter(torch.randn(4, 4)), nn.LayerNorm(4, eps=0.0), name
        self.kept = [self.weight, self.weight.detach().t()]
        if name == "registered":
            self.tied = self.weight
        if name == "buffer":
            self.register_buffer("tied", self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        names = {"one": self.weight, "kept": self.kept[0], "view": self.kept[1]}
        return self.norm(x @ self.weight) + x @ (self.tied if hasattr(self, "tied") else names[self.name])


@pytest.mark.parametrize("name", ["kept", "registered", "buffer"])
def test_a_weight_kept_twice_has_the_symmetries_and_bounds_of_one(name):
    x, one, other = randn(3, 4), Weights("one").eval(), Weights(name).eval()
    assert len(ns.symmetries(other, x).groups) == len(ns.symmetries(one, x).groups)
    assert ns.lipschitz(other, x, wrt="weights", effort=0.01).upper == ns.lipschitz(one, x, wrt="weights", effort=0.01).upper
    assert ns.lipschitz(other, x, effort=0.01).upper == ns.lipschitz(one, x, effort=0.01).upper


def test_a_weight_in_a_function_moves_with_its_symmetry():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    first = model[0]
    first.forward = partial(nn.functional.linear, weight=first.weight, bias=first.bias)
    groups = ns.symmetries(model.eval(), randn(3, 4)).groups
    assert groups and all(group.defect < 1e-9 for group in groups)


def test_a_kept_view_of_a_weight_is_refused():
    with pytest.raises(ns.Refusal, match="keeps a view of its parameter 'weight'"):
        ns.symmetries(Weights("view").eval(), randn(3, 4))


class Viewed(nn.Module):
    """Reads a named view of a weight beside it."""

    def __init__(self, keep) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4, eps=0.0)
        keep(self, self.linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) + (x @ self.view.reshape(4, -1)).sum(-1, keepdim=True)


VIEWS = {
    "buffer": lambda model, weight: model.register_buffer("view", weight[:2]),
    "attribute": lambda model, weight: setattr(model, "view", weight[:2]),
    "transposed": lambda model, weight: model.register_buffer("view", weight.t()),
    "parameter": lambda model, weight: setattr(model, "view", nn.Parameter(weight[:2])),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_named_view_of_a_weight_is_refused(name):
    with pytest.raises(ns.Refusal, match="keeps a view of its parameter"):
        ns.symmetries(Viewed(VIEWS[name]).eval(), randn(3, 4))
    assert ns.lipschitz(Viewed(VIEWS[name]).eval(), randn(3, 4), region=ns.Ball(randn(1, 4)[0], 0.01), effort=0.01)


class Spectral(nn.Module):
    """Multiplies spectra with a buffer and with its conjugate, which torch keeps as the same memory with a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.tensor([1 + 2j, 3 - 1j, 2j, 1 - 1j], dtype=torch.complex64))
        self.kept = [self.factors.conj()]

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x)
        return (spectrum * self.factors).real + 3 * (spectrum * self.kept[0]).imag


def test_a_conjugate_is_another_tensor():
    model, x = Spectral().eval(), randn(1, 4)
    jacobian = torch.autograd.functional.jacobian(lambda row: model(row[None])[0], x[0])
    bracket = ns.lipschitz(model, x)
    assert float(bracket.lower) <= float(torch.linalg.matrix_norm(jacobian, 2)) * (1 + 1e-5)
    assert float(bracket.upper) >= float(torch.linalg.matrix_norm(jacobian, 2)) * (1 - 1e-5)


class Array(nn.Module):
    """Reads an array that has the memory of its buffer, or a copy of it, beside many other objects."""

    def __init__(self, state: Tensor, array: np.ndarray, others: int = 0) -> None:
        super().__init__()
        self.register_buffer("state", state)
        self.kept, self.others = [[[array]]], [[number] for number in range(others)]

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(bump(x))
        return x + float(self.kept[0][0][0][0, 0])


def of_array(others: int = 0) -> Array:
    array = np.zeros((1, 4), dtype=np.float32)
    return Array(torch.from_numpy(array), array, others)


def exchanged() -> Array:
    state = torch.zeros(1, 4)
    return Array(state, np.from_dlpack(state))


@pytest.mark.parametrize("make", [of_array, exchanged, lambda: of_array(2000)])
def test_a_write_that_an_array_shows_is_refused(make, monkeypatch):
    monkeypatch.setattr(arrays, "MANY", 1000)
    with pytest.raises(ns.Refusal, match="shares with an array"):
        trace(make(), randn(1, 4))


@pytest.mark.parametrize("others", [0, 2000])
def test_a_write_beside_a_copy_of_an_array_is_not_refused(others, monkeypatch):
    monkeypatch.setattr(arrays, "MANY", 1000)
    model = Array(torch.zeros(1, 4), np.zeros((1, 4), dtype=np.float32), others)
    assert trace(model, randn(1, 4))
    assert model.state.untyped_storage().resizable()


@torch.library.custom_op("normscope_tests::fast", mutates_args=())
def fast(x: Tensor) -> Tensor:
    return x + bump(x)


def guarded(attempt):
    def forward(x: Tensor) -> Tensor:
        try:
            return attempt(x)
        except Exception:
            return x * 1

    return Function(forward)


SWALLOWED = {
    "operation": fast,
    "branch": lambda x: x + bump(x) if x.abs().max() < 1e9 else x,
    "branch on a number": lambda x: x + bump(x) if x.abs().max().item() < 1e9 else x,
    "numpy": lambda x: x + torch.from_numpy(bump(x.detach()).numpy()),
    "address": lambda x: x + bump(x) if x.data_ptr() else x,
}


@pytest.mark.parametrize("mode", ["eval", "batch"])
@pytest.mark.parametrize("name", SWALLOWED)
def test_an_exception_of_export_alone_that_the_model_catches_is_refused(name, mode):
    with pytest.raises(ns.Refusal, match="catches an exception that is raised while it is exported alone"):
        trace(guarded(SWALLOWED[name]), randn(2, 4), mode=mode)


def in_another_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


POOL = ThreadPoolExecutor(1)
ELSEWHERE = {"thread": in_another_thread, "pool": lambda work: POOL.submit(work).result()}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_another_thread_computes_is_refused(name):
    def forward(x: Tensor) -> Tensor:
        y, v = torch.zeros_like(x), 100 * torch.relu(x.detach() - 1e4)
        ELSEWHERE[name](lambda: y.add_(v))
        return x + y

    POOL.submit(int).result()  # its thread is there
    with torch.inference_mode(False), pytest.raises(ns.Refusal, match=r"another thread.*aten\.add_"):
        trace(Function(forward), randn(2, 4))


def test_a_thread_without_tensors_is_not_refused():
    def forward(x: Tensor) -> Tensor:
        POOL.submit(int).result()
        return x * 2

    assert trace(Function(forward), randn(2, 4)).output.op == "mul"


def peak(x: Tensor) -> Tensor:
    return x.detach().abs().max()


class OwnCall(Function):
    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


def in_a_later_line(x: Tensor) -> Tensor:
    y = x + bump(x) if peak(x) < 1e9 else x
    return y * float(torch.zeros(2))


LOOKING = {
    "table": lambda x: x * {0.3: 1e5}.get(round(peak(x).item(), 1), 1),
    "digits": lambda x: x * {"0.3": 1e5}.get(f"{peak(x).item():.1f}", 1),
    "text": lambda x: x * {"0.3": 1e5}.get(str(peak(x).item())[:3], 1),
    "text of a tensor": lambda x: x * {"tensor(0.3": 1e5}.get(str(peak(x))[:10], 1),
    "JSON": lambda x: x * (1e5 if 0.37 < json.loads(json.dumps(peak(x).item())) < 0.38 else 1),
    "class": lambda x: x * (1e5 if isinstance(v := peak(x).item(), float) and 0.37 < v < 0.38 else 1),
}


@pytest.mark.parametrize("name", LOOKING)
def test_what_looks_at_a_number_that_a_graph_does_not_know_is_refused(name):
    with pytest.raises(ns.Refusal, match=r"while it is exported alone|looks at numbers of tensors"):
        trace(guarded(LOOKING[name]), randn(2, 4))


@pytest.mark.parametrize("name", ["text", "text of a tensor", "class"])
def test_what_looks_at_a_number_gets_no_graph_where_it_catches_nothing(name):
    with pytest.raises(ns.NormscopeError):
        trace(Function(LOOKING[name]), randn(2, 4))


def test_a_model_with_a_call_of_its_own_is_observed():
    with pytest.raises(ns.Refusal, match="while it is exported alone"):
        trace(OwnCall(guarded(SWALLOWED["branch"])), randn(2, 4))
    assert OwnCall.__call__.__qualname__ == "OwnCall.__call__"


def test_an_exception_counts_in_its_own_line():
    with pytest.raises(ns.Refusal, match="Data"):
        trace(guarded(in_a_later_line), randn(2, 4))


def test_the_exception_that_export_alone_raises_is_named():
    model = nn.Sequential(guarded(lambda x: x.view(3, 5)), guarded(SWALLOWED["address"]))
    with pytest.raises(ns.Refusal, match="data_ptr raised"):
        trace(model, randn(2, 4))


def test_numbers_that_are_only_kept_or_logged_are_no_reason_to_refuse(caplog):
    log = []

    def keeping(x: Tensor) -> Tensor:
        log.append(peak(x).item())
        print(log, log[0], x)
        logging.getLogger("tests").error("%s of %s", log[0], x)
        return x * log.pop()

    assert trace(Function(keeping), randn(2, 4), mode="batch")


def test_an_exception_that_is_raised_as_it_runs_too_is_not_refused():
    assert trace(guarded(lambda x: x @ torch.ones(3, 3)), randn(2, 4))


class Table(nn.Module):
    """Keeps a parameter and a buffer of places in a table too, as a configuration does."""

    def __init__(self, use) -> None:
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.ones(4)), use
        self.register_buffer("places", torch.tensor([0, 2]))
        self.kept = {"weight": self.weight, "places": self.places}

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        self.use(y, self.kept)
        return y * self.weight


NO_NUMBERS = {
    "entries": lambda y, kept: y.__setitem__(slice(0, 0), kept["weight"]),
    "places": lambda y, kept: y.__setitem__((..., kept["places"]), 0.0),
    "frozen": lambda y, kept: setattr(kept["weight"], "requires_grad", False),
    "no gradient": lambda y, kept: setattr(kept["weight"], "grad", None),
    "type": lambda y, kept: torch.result_type(y, kept["weight"]),
    "in place": lambda y, kept: torch._foreach_add_([y], [kept["weight"].detach()]),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_takes_no_numbers_of_a_tensor_kept_twice_is_not_refused(name):
    assert trace(Table(NO_NUMBERS[name]), randn(2, 4))
