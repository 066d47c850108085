"""The size of a batch: what holds for every size, what a model does for some sizes alone, and models that take no batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._sympy.functions import FloatPow, ToFloat

import normscope as ns
from normscope.core.data import Call
from normscope.core.errors import Refusal
from normscope.graph import samples
from normscope.graph.batch_axis import laid_out
from normscope.graph.independence import SIZE, _differs
from normscope.graph.samples import _is_same_program, _Run, check_samples_independent
from tests.graph.test_samples import WIDE, Net, example, exported


def asserted(x):
    assert x.shape[0] <= 1000, "too many samples"
    if len(x) > 500:
        raise ValueError("far too many")
    return x.tanh()


def distances(x):
    """torch chooses another kernel where there are more than 25 of either."""
    return torch.cdist(x.flatten(1), WIDE)


def farther_from_a_crowd(x):
    def distance(a, b):
        apart = (a - b).flatten(1).norm(dim=-1)
        return apart - apart.mean() if len(a) > 70 else apart

    return torch.nn.functional.triplet_margin_with_distance_loss(x, 2 * x, 4 * x, distance_function=distance, reduction="none")


def raised_late(x):
    if len(x) > 500:
        if len(x) > 600:
            return x.flip(0)
        raise ValueError("neither few nor many")
    return x.tanh()


def few(x):
    assert x.shape[0] <= 8, "too many samples"
    return x.tanh()


def thousands(x):
    assert x.shape[0] <= 5000, "too many samples"
    return x.tanh()


def behind_a_convolution(x):
    """torch chooses a kernel by the size of the batch, 16 and more, and so does the model."""
    y = torch.conv2d(x.reshape(len(x), 1, 1, -1), torch.ones(1, 1, 1, 3), padding=(0, 1)).reshape(x.shape)
    return y - y.mean(0) if x.shape[0] >= 16 else y


def on_values(x):
    return x.flip(0) if x.shape[0] > 64 and bool((x > 1).any()) else x


def caught(x):
    """Fewer than thirteen samples have no thirteenth largest."""
    try:
        x.topk(13, 0)
    except RuntimeError:
        return 3 * x
    return x


def from_nine(x):
    return x + x.flip(0) if x.shape[0] >= 9 else x


@pytest.mark.parametrize(
    "step",
    [
        asserted,
        few,
        thousands,
        lambda x: x.view(len(x), -1).tanh(),
        lambda x: x if x.shape[0] > 0 else -x,
        lambda x: x[: len(x)].tanh(),
    ],
)
def test_what_holds_for_every_size_is_no_branch(step):
    assert check_samples_independent(Net(step), example(), "eval") is None


def test_what_torch_chooses_by_the_size_is_no_branch():
    assert check_samples_independent(Net(distances), example(), "eval") is not None
    assert ns.lipschitz(Net(distances), example()).upper.finite


@pytest.mark.parametrize(
    "step",
    [
        from_nine,
        raised_late,
        behind_a_convolution,
        on_values,
        lambda x: x.cumsum(1 - x.shape[0] // 100),
        caught,
        lambda x: x - x.mean(0) if x[17:].numel() > 0 else x,
        lambda x: x - x.mean(0) if len(torch.unsafe_split(x, 16)) > 1 else x,
        lambda x: x - x.mean(0) if torch.ops.aten.slice.Tensor(x, 0, 0, 20).shape[0] != x.shape[0] else x,
        lambda x: x - x.mean(0) if len(x.split(17)) > 1 else x,
        lambda x: x - x.mean(0) if x[:5000].shape[0] != x.shape[0] else x,
        lambda x: x - x.mean(0) if len(x.tensor_split([17, 34])[1]) > 0 else x,
        lambda x: x - x.mean(0) if torch.zeros(20)[: x.shape[0]].numel() < x.shape[0] else x,
        lambda x: x * (1 + x.shape[0] // 100),
        lambda x: x.roll(x.shape[0] // 16, 0),
        lambda x: x * (100.0 if x.shape[0] >= 9 else 1),
        lambda x: x * (100.0 if len(x) >= 9 else 1),
        lambda x: x * (100.0 if int(x.shape[0]) >= 9 else 1),
        lambda x: x * (100.0 if x.shape[0] == 13 else 1),
        lambda x: x * (100.0 if x.shape[0] == 7777 else 1),
        lambda x: x * (100.0 if x.numel() > 1000 else 1),
        lambda x: x - x.mean(0) if isinstance(x.shape[0], int) and x.shape[0] > 70 else x,
        lambda x: x - x.mean(0) if x.is_contiguous() and x.shape[0] > 70 else x,
        lambda x: x - x.mean(0) if x.stride(0) and x.shape[0] > 70 else x,
        lambda x: x + torch.relu(x.mean(0) - 1e3) if x.is_contiguous() else x,
        lambda x: x + torch.relu(x.mean(0) - 1e3) if x.contiguous() is x and x._base is None else x,
        farther_from_a_crowd,
    ],
)
def test_a_branch_on_the_size_of_the_batch_is_refused(step):
    with pytest.raises(Refusal, match="influence each other"):
        ns.lipschitz(Net(step), example())


@pytest.mark.parametrize("text", [lambda x: f"{x.shape[0]}x", lambda x: str(x.shape[0]), lambda x: repr(x.shape)[12:]])
def test_a_text_that_holds_the_size_of_the_batch_ends_the_proof(text):
    note = check_samples_independent(Net(lambda x: x - x.mean(0) if text(x).startswith("100") else x), example(), "eval")
    assert note is not None and "looks at a number that depends on the size of the batch" in note


def test_what_runs_is_tried_once_more_where_another_program_is_proved(monkeypatch):
    """As if the proof had taken another way than the model."""
    monkeypatch.setattr(samples, "unproved", lambda *_: None)
    with pytest.raises(Refusal, match="other samples of its batch"):
        check_samples_independent(Net(lambda x: x + torch.relu(x.mean(0) - 1e3)), example(), "eval")


@pytest.mark.parametrize(
    ("made", "strides"),
    [
        (torch.zeros(2, 3, 4), (12, 4, 1)),
        (torch.zeros(1, 3, 4).transpose(1, 2), (12, 1, 4)),
        (torch.zeros(4, 2).T, (1, 7)),
        (torch.zeros(3, 2, 4).transpose(0, 1), (4, 28, 1)),
        (torch.zeros(2, 3, 5, 6).to(memory_format=torch.channels_last), (90, 1, 18, 3)),
        (torch.zeros(2, 8)[:, ::2], (8, 2)),
        (torch.zeros(2, 1).expand(2, 3), (3, 1)),
        (torch.zeros(3), (1,)),
    ],
)
def test_batches_lie_in_memory_as_the_example_does(made, strides):
    batch = laid_out(made, 7)
    assert batch.shape == (7, *made.shape[1:]) and batch.stride() == strides
    assert 0 in made.stride() or laid_out(made, len(made)).stride() == made.stride()


@pytest.mark.parametrize("mixed", [lambda x: x.roll(1, 0), lambda x: x + torch.relu(x.mean(0) - 1e3)])
def test_a_model_that_mixes_samples_in_one_layout_alone_is_refused(mixed):
    rows = torch.randn(3, 3, 4, dtype=torch.float64).transpose(1, 2)
    for wanted in (True, False):
        with pytest.raises(Refusal):
            ns.lipschitz(Net(lambda x, wanted=wanted: mixed(x) if x.is_contiguous() == wanted else x), rows)


class Distance:
    def __new__(cls, a, b):
        apart = (a - b).flatten(1).norm(dim=-1)
        return apart - apart.mean() if len(a) > 70 else apart


class Crowded(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear and len(args[0]) > 70:
            args = (args[0] - args[0].mean(0), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


CROWDED = Crowded(torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.nn.functional.triplet_margin_with_distance_loss(
            x, 2 * x, 4 * x, distance_function=Distance, reduction="none"
        ),
        lambda x: torch.nn.functional.linear(x, CROWDED),
    ],
)
def test_code_that_torch_calls_is_not_torch_s_own(step):
    with pytest.raises(Refusal, match="branches on the size of the batch"):
        check_samples_independent(Net(step), example(), "eval")


def test_a_failure_on_the_size_that_the_model_catches_ends_the_proof():
    def step(x):
        try:
            crowd = {100: True}.get(x.shape[0], False)
        except TypeError:
            crowd = False
        return x - x.mean(0) if crowd else x

    note = check_samples_independent(Net(step), example(), "eval")
    assert note is not None and "hash raised TypeError" in note


def test_other_steps_for_one_sample_are_noted():
    """They differ far away alone."""
    step = Net(lambda x: x.tanh() if x.shape[0] == 1 else (x + (x - 1e6).relu()).tanh())
    assert "other steps for one sample" in check_samples_independent(step, example(), "eval")


def one_or_many(x):
    if 1 < len(x) < 9:
        raise ValueError("one sample, or nine and more")
    return x.flip(0)


def one_alone(x):
    if len(x) > 1:
        raise ValueError("one sample at a time")
    return x.tanh()


@pytest.mark.parametrize("size", [1, 4])
def test_batches_are_found_that_a_model_takes(size):
    with pytest.raises(Refusal, match="influence each other"):
        ns.lipschitz(Net(one_or_many), example(size=size))


@pytest.mark.parametrize("size", [1, 4])
def test_a_model_that_takes_no_batch_is_noted(size):
    (note,) = ns.lipschitz(Net(one_alone), example(size=size)).notes
    assert "neither proved nor probed" in note and "one sample at a time" in note


def test_a_program_that_was_exported_for_one_sample_has_no_batch():
    x = example(size=1)
    assert check_samples_independent(exported(Net(torch.tanh), x, dynamic=False), x, "eval") is None


TABLES = [torch.ones(4), torch.full((4,), 2.0)]

PROGRAMS = {  # whether one sample and several take the very same steps
    "the same": (lambda x: (3 * x).tanh().roll(1, 1), True),
    "another number": (lambda x: x * (1.0 if len(x) == 1 else 2.0), False),
    "another number in a list": (lambda x: x.roll([0 if len(x) == 1 else 1], [1]), False),
    "another table": (lambda x: x * TABLES[len(x) == 1], False),
    "another result": (lambda x: (x.tanh(), x.sin())[len(x) == 1], False),
    "another operand": (lambda x: (a := x.tanh(), b := x.sin(), a if len(x) == 1 else b)[2].exp(), False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_for_one_sample_and_for_several_are_compared_with_all_that_they_are_given(name):
    step, same = PROGRAMS[name]
    assert _is_same_program(_Run(Net(step), Call.of(example()), lambda returned: returned), 13) is same


def test_a_batch_in_parts_is_probed_beyond_one_part():
    note = check_samples_independent(Net(lambda x: torch.cat([part.tanh() for part in x.split(64)])), example(), "eval")
    assert "probed, not proved" in note


def windows(x):
    """The number of samples out of the number of windows, as a float."""
    parts = x.reshape(2 * x.shape[0], -1).tanh()
    return parts.reshape(int(parts.shape[0] / 2.0), -1)


def test_a_size_that_is_computed_as_a_float_is_probed():
    assert "plain number" in check_samples_independent(Net(windows), example(), "eval")


def test_large_samples_are_probed_in_larger_batches_too():
    step = Net(lambda x: x * (100.0 if int(x.shape[0]) >= 9 else 1))
    with pytest.raises(Refusal, match="influence each other"):
        check_samples_independent(step, torch.ones(1, 100_000), "eval")


def test_a_step_without_a_value_at_some_size_differs_there():
    """The scale of attention whose width is the size of the batch less 2."""
    scale = FloatPow(ToFloat(SIZE - 2), -0.5)
    assert _differs(scale, 3, 2) and _differs(scale, 2, 3) and not _differs(scale, 3, 3)
