"""Examples and data in every form a user may have them: a tensor, a tuple, a dict, a Dataset, an iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from normscope.core.errors import InputError

Example = Union[torch.Tensor, Sequence[Any], Mapping[str, Any]]
Data = Union[torch.Tensor, Sequence[Any], Dataset, Iterable[Any]]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a model: positional and keyword arguments, with axis 0 of every tensor the batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example: Example) -> Call:
        if isinstance(example, torch.Tensor):
            return cls((check_dense(example),), {})
        if isinstance(example, Mapping):
            return cls((), {name: check_dense(value) for name, value in example.items()})
        if isinstance(example, (tuple, list)):
            return cls(tuple(map(check_dense, example)), {})
        raise InputError(
            f"an example must be a tensor, a tuple of arguments or a dict of keyword arguments, got {type(example).__name__}"
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, torch.Tensor)]

    @property
    def batch_size(self) -> int:
        sizes = {tensor.shape[0] for tensor in self.tensors if tensor.dim() > 0}
        if len(sizes) != 1 or 0 in sizes:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors) or "no tensor"
            raise InputError(f"axis 0 of every example tensor is the batch, of one size above 0; got {shapes}")
        return sizes.pop()

    def samples(self, index: slice | torch.Tensor) -> Call:
        """The same call on some of its samples."""

        def pick(value: Any) -> Any:
            return value[index] if isinstance(value, torch.Tensor) and value.dim() > 0 else value

        return Call(tuple(map(pick, self.args)), {key: pick(value) for key, value in self.kwargs.items()})

    def copied(self) -> Call:
        """The same call with tensors of its own, which whoever is called may change."""

        def copy(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, torch.Tensor) else value

        return Call(tuple(map(copy, self.args)), {key: copy(value) for key, value in self.kwargs.items()})

    def check_fixed(self, example: Call) -> None:
        """Refuse arguments in which no distance is measured, such as ids and masks, unless every sample has those of the example.

        A graph holds them fixed at the example's first sample.
        """
        given, held = ({**dict(enumerate(call.args)), **call.kwargs} for call in (self, example))
        for name, value in held.items():
            other = given.get(name)
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
                if value.is_floating_point() and value.dim():
                    continue
                first = value[:1] if value.dim() else value
                same = first.shape[1:] == other.shape[1:] and bool((other == first.to(other.device)).all())
            else:
                same = value is other or bool(value == other)
            if not same:
                what = f"argument {name}" if isinstance(name, int) else name
                raise InputError(
                    f"the data has another {what} than the example's first sample, and a graph holds it fixed there: "
                    "take samples with the same one, and an example that has it"
                )

    def floats(self) -> list[torch.Tensor]:
        """The tensors that a distance is measured in."""
        return [tensor for tensor in self.tensors if tensor.is_floating_point() and tensor.dim() > 0]


def check_dense(value: Any) -> Any:
    """Raise for a tensor that is not a plain grid of numbers."""
    if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_nested):
        kind = "nested" if value.is_nested else _short(value.layout)
        raise InputError(f"a tensor of the example or the data is {kind}: make it dense, for example with .to_dense()")
    return value


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def calls(data: Data, example: Call, batch_size: int = 64) -> Iterator[Call]:
    """Walk through `data` once, batch by batch, as calls of the shape of `example`; targets are dropped.

    A tuple of tensors is (inputs, targets); a batch is a tensor, a tuple whose first entries are the inputs, or a dict.
    """
    if isinstance(data, torch.Tensor):
        batches: Iterable[Any] = check_dense(data).split(batch_size)
    elif isinstance(data, (tuple, list)) and data and all(isinstance(item, torch.Tensor) for item in data):
        batches = _aligned(data, example, batch_size) if isinstance(data, tuple) else data
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        batches = DataLoader(data, batch_size=batch_size)
    elif isinstance(data, Iterable):
        batches = data
    else:
        raise InputError(f"data must be a tensor, (inputs, targets), a Dataset or batches, got {type(data).__name__}")
    empty = True
    for batch in batches:
        call = _like(batch, example)
        if all(len(tensor) for tensor in call.floats()):
            empty = False
            yield call
    if empty:
        raise InputError("the data holds no batch with a sample in it")


def calls_of_graph(data: Data | None, example: Call) -> Iterator[Call]:
    """Calls for the graph of an example, which holds ids, masks and numbers fixed at the example's first sample.

    Without data the example, or its first sample alone where the others have other ids.
    """
    if data is not None:
        for call in calls(data, example):
            call.check_fixed(example)
            yield call
        return
    try:
        example.check_fixed(example)
    except InputError:
        example = example.samples(slice(0, 1))
    yield example


def _aligned(tensors: Sequence[torch.Tensor], example: Call, batch_size: int) -> Iterable[tuple[torch.Tensor, ...]]:
    """(inputs, targets) cut into batches."""
    if len({len(tensor) for tensor in tensors}) != 1 or len(tensors) > len(example.tensors) + 1:
        lengths = ", ".join(str(len(tensor)) for tensor in tensors[:4])
        raise InputError(
            f"a tuple must be (inputs, targets) of one length, got {len(tensors)} of lengths {lengths}; put batches in a list"
        )
    return zip(*(tensor.split(batch_size) for tensor in tensors), strict=True)


def _like(batch: Any, example: Call) -> Call:
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if isinstance(batch, Mapping):
        names = list(example.kwargs)
        if not names and len(example.tensors) == 1 and len(batch) >= 1:  # a dict batch for a one-argument model
            batch = dict.fromkeys([""], next(iter(batch.values())))
            names = [""]
        missing = [name for name in names if name not in batch]
        if missing:
            raise InputError(f"a batch lacks {', '.join(missing)}, which the example has")
        call = Call((batch[""],), {}) if names == [""] else Call((), {name: batch[name] for name in names})
    elif isinstance(batch, (tuple, list)):
        wanted = len(example.args) or len(example.kwargs)
        if len(batch) < wanted:
            raise InputError(f"a batch has {len(batch)} entries, the example {wanted}")
        call = Call(tuple(batch[:wanted]), {}) if example.args else Call((), dict(zip(example.kwargs, batch, strict=False)))
    else:
        raise InputError(f"a batch must be a tensor, a tuple or a dict, got {type(batch).__name__}")
    kinds = [[value.dtype for value in side.tensors if value.dim()] for side in (call, example)]
    for found, wanted in zip(*kinds, strict=False):
        if wanted.is_floating_point and not found.is_floating_point:
            raise InputError(
                f"a batch holds {_short(found)} where the example holds {_short(wanted)}: convert it with .to({wanted})"
            )
    for given, shown in zip(call.floats(), example.floats(), strict=False):
        if given.shape[1:] != shown.shape[1:]:
            raise InputError(f"a batch has samples of shape {tuple(given.shape[1:])}, the example {tuple(shown.shape[1:])}")
    return call
