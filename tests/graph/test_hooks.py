"""What hooks keep, count and write to is as it was after every call of the model."""

from __future__ import annotations

import functools
import operator
import queue
import random
import weakref
from collections import OrderedDict, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope.graph.restoring import MANY, Snapshot, untouched

SEEN, CALLED = [], []


def keep(output):
    CALLED.append(output)


class Recorder:
    def __init__(self):
        self.seen, self.calls = {}, 0

    def hook(self, module, args, output):
        self.seen[self.calls] = output
        self.calls += 1


def hooks():
    """Where hooks that keep activations put them, and the hooks."""
    kept, recorder, named = [], Recorder(), {}
    inner, wrapped, bound, only, own = defaultdict(list), [], [], [], []

    def closed(module, args, output):
        kept.append(output)

    def with_default(module, args, output, into=[]):  # noqa: B006
        into.append(output)

    def by_name(name, into, module, args, output):
        into[name] = output

    def nested(module, args, output):
        inner["layer"].append(output)

    inner["layer"] = []

    def keeping(module, args, output):
        wrapped.append(output)

    @functools.wraps(keeping)
    def around(*args):
        return keeping(*args)

    def with_keyword(module, args, output, *, into=only):
        into.append(output)

    def with_attribute(module, args, output):
        with_attribute.kept.append(output)

    with_attribute.kept = own

    held = Recorder()

    return {
        "object": (held.seen, lambda module, args, output: held.hook(module, args, output)),
        "called": (CALLED, lambda module, args, output: keep(output)),
        "nested": (inner["layer"], nested),
        "wrapped": (wrapped, around),
        "append": (bound, functools.partial(lambda add, module, args, output: add(output), bound.append)),
        "keyword": (only, with_keyword),
        "attribute": (own, with_attribute),
        "closure": (kept, closed),
        "global": (SEEN, lambda module, args, output: SEEN.append(output)),
        "default": (with_default.__defaults__[0], with_default),
        "partial": (named, functools.partial(by_name, "layer", named)),
        "method": (recorder.seen, recorder.hook),
    }


@pytest.mark.parametrize("name", hooks())
def test_what_hooks_keep_is_as_it_was(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    kept, hook = hooks()[name]
    model[0].register_forward_hook(hook)
    model(torch.randn(2, 4))
    before = list(kept)
    for look in (ns.lipschitz, ns.audit, ns.symmetries):
        look(model, torch.randn(2, 4))
    assert len(before) == 1 and all(map(operator.is_, kept, before)) and len(kept) == 1


CALLS = 0


def test_numbers_that_hooks_count_are_as_they_were():
    calls = 0

    def counted(module, args, output):
        nonlocal calls
        global CALLS
        calls, CALLS = calls + 1, CALLS + 1

    model = nn.Linear(4, 4)
    model.register_forward_hook(counted)
    model(torch.randn(2, 4))
    before = calls, CALLS
    ns.lipschitz(model, torch.randn(2, 4))
    assert before[0] == 1 and (calls, CALLS) == before


def raising(*args):
    raise RuntimeError


@pytest.mark.parametrize("base", [dict, OrderedDict], ids=lambda base: base.__name__)
def test_a_container_with_methods_of_its_own_is_as_it_was(base):
    kept = type("Kept", (base,), dict.fromkeys(("update", "items", "clear", "__iter__"), raising))()
    base.__setitem__(kept, "a", 1)
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: base.__setitem__(kept, "b", output))
    ns.lipschitz(model, torch.randn(2, 4))
    assert list(base.items(kept)) == [("a", 1)]


TOTAL = 0


class Inner:
    def __init__(self):
        self.total, self.numbers = torch.zeros(()), np.zeros(2)


class Slotted:
    __slots__ = ("seen", "total")

    def __init__(self):
        self.total, self.seen = torch.zeros(()), 0

    def __call__(self, module, args, output):
        self.seen += 1
        self.total += 1


def writing_hooks():
    """What hooks write to in place, as a function that shows it, and the hooks."""
    tensor, array, chance, table, held = torch.zeros(2), np.zeros(2), random.Random(0), {"a": torch.zeros(2)}, Inner()
    slotted, meters, outer, raw = Slotted(), {"a": Inner()}, SimpleNamespace(inner=SimpleNamespace(seen=0)), bytearray(b"a")

    def add(module, args, output):
        tensor.add_(1)

    def count(module, args, output):
        array[:] += 1

    def nested(module, args, output):
        def inner():
            global TOTAL
            TOTAL += 1

        inner()

    def created(module, args, output):
        global CREATED
        CREATED = output

    def metered(module, args, output):
        meters["a"].seen = output
        outer.inner.seen += 1

    def both(module, args, output):
        held.total += 1
        held.numbers += 1

    return {
        "tensor": (lambda: tensor.tolist(), add),
        "array": (lambda: array.tolist(), count),
        "generator": (lambda: chance.getstate(), lambda module, args, output: (chance.random(), None)[1]),
        "tensor in a dictionary": (lambda: table["a"].tolist(), lambda module, args, output: (table["a"].add_(1), None)[1]),
        "tensor and array of an object": (lambda: (held.total.item(), held.numbers.tolist()), both),
        "slots": (lambda: (slotted.seen, slotted.total.item()), slotted),
        "objects in objects and dictionaries": (lambda: ([*vars(meters["a"])], outer.inner.seen), metered),
        "bytes": (lambda: bytes(raw), lambda module, args, output: raw.append(1)),
        "global of a function inside": (lambda: TOTAL, nested),
        "new global": (lambda: "CREATED" in globals(), created),
    }


@pytest.mark.parametrize("name", writing_hooks())
def test_what_hooks_write_to_in_place_is_as_it_was(name):
    shown, hook = writing_hooks()[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(hook)
    before = shown()
    with untouched(model):
        model(torch.randn(2, 4))
        assert shown() != before
    for look in (ns.lipschitz, ns.audit, ns.symmetries):
        look(model, torch.randn(2, 4))
    assert shown() == before


def test_what_hooks_only_read_is_left_to_others():
    """A name that no hook assigns, and what threads pass to each other."""
    global SEEN
    filled, before, own = queue.Queue(), SEEN, []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: own.append((SEEN, filled)))
    with untouched(model):
        SEEN = None
        filled.put(1)
        model(torch.randn(2, 4))
    assert SEEN is None and filled.qsize() == 1 and own == []
    SEEN = before


def test_only_what_is_near_is_looked_into():
    """However containers are nested; what is beside a large one is."""
    nested, large, kept = [[[1] for _ in range(300)] for _ in range(300)], [*range(10 * MANY)], []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: (nested, large, kept.append(output))[2])
    assert len(Snapshot(model).kept) < MANY + 100
    with untouched(model):
        model(torch.randn(2, 4))
        assert kept
    assert not kept


class Gone:
    pass


class Odd(list):
    __len__ = __iter__ = raising


def test_objects_that_cannot_be_asked_are_no_reason_to_refuse():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    model.register_buffer("mirrored", torch.ones(3, dtype=torch.complex64).conj().imag)
    gone, odd = weakref.proxy(Gone()), Odd([1])
    model.register_forward_hook(lambda module, args, output: ((gone, odd), None)[1])
    assert ns.lipschitz(model, x).upper.finite
