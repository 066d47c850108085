"""Every form of data gives the same calls; what cannot be used is said in one message."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from normscope.core.data import Call, calls
from normscope.core.errors import InputError

X, Y = torch.arange(30.0).reshape(10, 3), torch.arange(10)
EXAMPLE = Call.of(torch.zeros(1, 3))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X.split(4))


class Samples(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index]


def test_an_example_is_a_tensor_a_tuple_or_a_dict():
    assert Call.of(X).args == (X,) and Call.of(X).kwargs == {}
    assert Call.of((X, Y)).args == Call.of([X, Y]).args == (X, Y)
    named = Call.of({"x": X, "flag": True})
    assert named.args == () and named.kwargs == {"x": X, "flag": True}
    for wrong in (3, "x", None):
        with pytest.raises(InputError, match=type(wrong).__name__):
            Call.of(wrong)


def test_tensors_and_floats():
    call = Call.of({"x": X, "y": Y, "temperature": torch.tensor(2.0), "flag": True})
    assert [id(tensor) for tensor in call.tensors] == [id(X), id(Y), id(call.kwargs["temperature"])]
    assert [id(tensor) for tensor in call.floats()] == [id(X)]
    assert call.batch_size == 10


@pytest.mark.parametrize("example", [(X, X[:3]), X[:0], torch.tensor(1.0), (), {}, {"flag": True}])
def test_a_batch_has_one_size_above_zero(example):
    with pytest.raises(InputError, match="axis 0"):
        _ = Call.of(example).batch_size


def test_samples_picks_from_every_tensor_and_keeps_the_rest():
    call = Call((X, torch.tensor(2.0)), {"y": Y, "flag": True}).samples(slice(2, 5))
    assert torch.equal(call.args[0], X[2:5]) and call.args[1] == 2 and torch.equal(call.kwargs["y"], Y[2:5]) and call.kwargs["flag"]
    assert torch.equal(Call.of(X).samples(torch.tensor([7, 1])).args[0], X[[7, 1]])


FORMS = {
    "tensor": X,
    "inputs and targets": (X, Y),
    "dataset": TensorDataset(X, Y),
    "dataset of tensors": Samples(),
    "stream": Stream(),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=3),
    "list of batches": list(X.split(4)),
    "list of pairs": list(zip(X.split(4), Y.split(4), strict=True)),
    "generator": (batch for batch in X.split(4)),
    "dicts": [{"x": batch} for batch in X.split(4)],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_walks_through_all_samples_once_in_order(form):
    found = list(calls(FORMS[form], EXAMPLE, batch_size=4))
    assert torch.equal(torch.cat([call.args[0] for call in found]), X)
    assert len(found) > 1 and all(len(call.args) == 1 and not call.kwargs for call in found)  # targets are dropped


def test_dicts_feed_keyword_arguments_by_name():
    example = Call.of({"x": X[:1], "mask": X[:1]})
    (call,) = calls([{"label": Y, "mask": X + 1, "x": X}], example)
    assert not call.args and list(call.kwargs) == ["x", "mask"]
    assert torch.equal(call.kwargs["x"], X) and torch.equal(call.kwargs["mask"], X + 1)


def test_tuples_feed_keyword_arguments_in_order():
    (call,) = calls([(X, X + 1, Y)], Call.of({"x": X[:1], "mask": X[:1]}))
    assert torch.equal(call.kwargs["x"], X) and torch.equal(call.kwargs["mask"], X + 1) and len(call.kwargs) == 2


def test_batches_are_walked_lazily():
    def endless():
        while True:
            yield X

    assert torch.equal(next(calls(endless(), EXAMPLE)).args[0], X)


@pytest.mark.parametrize(
    "data, message",
    [
        (torch.zeros(4, 5), r"\(5,\).*\(3,\)"),
        ([torch.zeros(4, 3), torch.zeros(4, 2)], r"\(2,\).*\(3,\)"),
        ([], "no batch"),
        (iter(()), "no batch"),
        ([3], "int"),
        (3, "int"),
    ],
)
def test_data_of_another_form_is_refused(data, message):
    with pytest.raises(InputError, match=message):
        list(calls(data, EXAMPLE))


def test_batches_that_lack_an_argument_are_refused():
    with pytest.raises(InputError, match="lacks mask"):
        list(calls([{"x": X}], Call.of({"x": X, "mask": X})))
    with pytest.raises(InputError, match="1 entries, the example 2"):
        list(calls([(X,)], Call.of((X, X))))


def test_an_empty_tensor_holds_no_batch():
    with pytest.raises(InputError):
        list(calls(X[:0], EXAMPLE))


def test_dict_batches_of_a_wrong_shape_are_refused():
    with pytest.raises(InputError):
        list(calls([{"x": torch.zeros(4, 5)}], EXAMPLE))


@pytest.mark.parametrize("batch_size", [4, 64])
def test_inputs_and_targets_of_unequal_length_are_refused(batch_size):
    with pytest.raises(InputError):
        list(calls((X, Y[:3]), EXAMPLE, batch_size))
