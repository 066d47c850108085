"""Labelled data as a fixed sequence of batches: the same batches, in the same order, on every pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset

from normscope.core.data import Call, Data
from normscope.core.errors import InputError

FORMS = "(inputs, targets), a Dataset of such pairs, or an iterable of batches, each (inputs, targets) or a dict"


@dataclass(frozen=True)
class Batch:
    """One call of the model, and what the loss is given beside the outputs."""

    call: Call
    target: Any

    @property
    def size(self) -> int:
        return self.call.batch_size

    def split(self, size: int) -> Iterator[Batch]:
        """The same samples, `size` at a time."""
        whole = self.size
        for start in range(0, whole, size):
            part = slice(start, start + size)
            target = tree_map_only(torch.Tensor, lambda tensor, part=part: tensor[part] if tensor.dim() else tensor, self.target)
            yield Batch(self.call.samples(part), target)

    def fingerprint(self) -> tuple[Any, ...]:
        """What tells this batch from another without keeping it."""
        return tuple((tuple(tensor.shape), float(tensor.double().sum())) for tensor in self.call.tensors)


class Batches:
    """The batches of `data` for a model whose forward is `forward`, on its device and in its dtype.

    (inputs, targets) and a Dataset are cut into batches of `batch_size`, in order. In a batch, inputs are a tensor, a tuple of
    arguments or a dict of keyword arguments; of three entries or more the last is the target. In a dict batch the model is given
    the entries that its forward names (the first entry, if it names none), and the loss what is left: the entry itself if it is
    one, else the whole dict. microbatch: batches are computed so many samples at a time.
    """

    def __init__(
        self,
        data: Data,
        forward: Callable[..., Any],
        batch_size: int,
        microbatch: int | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        for name, value in {"batch_size": batch_size, "microbatch": microbatch}.items():
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        self.source = _walkable(data, batch_size)
        self.accepted = _accepted(forward)
        self.microbatch, self.device, self.dtype = microbatch, device, dtype
        self._seen: list[tuple[Any, ...]] | None = None

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.groups():
            yield from batch.split(self.microbatch) if self.microbatch else (batch,)

    def groups(self) -> Iterator[Batch]:
        """Whole batches: what batch statistics are taken over."""
        seen = []
        for number, raw in enumerate(self.source):
            batch = self._placed(self._read(raw))
            seen.append(batch.fingerprint())
            if self._seen is not None and (number >= len(self._seen) or self._seen[number] != seen[-1]):
                raise InputError("the batches differ from pass to pass: switch off shuffling and augmentation, or give a list")
            yield batch
        if not seen:
            raise InputError("the data holds no batch with a sample in it")
        self._seen = seen

    def _read(self, raw: Any) -> Batch:
        if isinstance(raw, Mapping):
            return self._read_dict(raw)
        if not isinstance(raw, (tuple, list)) or len(raw) < 2:
            raise InputError(f"a batch must be (inputs, targets) or a dict, got {_described(raw)}")
        *inputs, target = raw
        return Batch(Call.of(inputs[0] if len(inputs) == 1 else tuple(inputs)), target)

    def _read_dict(self, raw: Mapping[str, Any]) -> Batch:
        names = [name for name in raw if self.accepted is None or name in self.accepted]
        if names:
            call = Call((), {name: raw[name] for name in names})
        else:
            names = list(raw)[:1]
            call = Call(tuple(raw[name] for name in names), {})
        rest = [name for name in raw if name not in names]
        return Batch(call, raw[rest[0]] if len(rest) == 1 else dict(raw))

    def _placed(self, batch: Batch) -> Batch:
        def place(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

        args, kwargs, target = tree_map_only(torch.Tensor, place, (batch.call.args, batch.call.kwargs, batch.target))
        return Batch(Call(args, kwargs), target)


def _walkable(data: Data, batch_size: int) -> Iterable[Any]:
    """An iterable of raw batches that can be walked again and again."""
    if isinstance(data, tuple) and len(data) >= 2 and isinstance(data[-1], torch.Tensor):
        *inputs, target = data
        whole = Batch(Call.of(inputs[0] if len(inputs) == 1 else tuple(inputs)), target)
        if whole.size != len(target):
            raise InputError(f"inputs and targets must have one length, got {whole.size} and {len(target)}; batches go in a list")
        return _Cut(whole, batch_size)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=batch_size)
    if isinstance(data, Iterator):
        raise InputError("an iterator can be walked only once, and every product is a pass: give list(batches) or a DataLoader")
    if isinstance(data, Iterable) and not isinstance(data, (torch.Tensor, Mapping, str)):
        return data
    raise InputError(f"batches are {FORMS}; not {_described(data)}")


@dataclass(frozen=True)
class _Cut:
    """A data set in memory, cut into batches on every pass."""

    whole: Batch
    batch_size: int

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.whole.split(self.batch_size):
            yield batch.call.kwargs or batch.call.args, batch.target


def _accepted(forward: Callable[..., Any]) -> set[str] | None:
    """The names of arguments that a forward takes; None if it takes any."""
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _described(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")
