"""Whether the samples of a batch stay apart: only then is there a constant per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from normscope.core.data import Call, Example
from normscope.core.errors import Refusal, first_line
from normscope.core.randomness import preserved_random_state
from normscope.graph.exporting import in_mode

TOLERANCE = 1e-4  # relative: what rounding may change in one sample when another one changes

Change = Callable[[torch.Tensor], torch.Tensor]


def _reach(sample: torch.Tensor) -> torch.Tensor:
    return 1 + 2 * sample.abs().max() if sample.numel() else torch.zeros(())


# What is put beside a sample: NaN spreads through whatever reads it; order statistics pass NaN over, but not both of the others.
NEIGHBOURS: dict[str, Change] = {
    "NaN": lambda x: x * torch.nan,
    "larger values": lambda x: x + _reach(x),
    "smaller values": lambda x: x - _reach(x),
}


def check_samples_independent(model: torch.nn.Module, example: Example, mode: str) -> None:
    """Refuse a model whose output for one sample depends on the other samples of the batch.

    A constant per sample is then meaningless. Each of two samples is kept while the other is replaced: its output must stay.
    """
    sample = Call.of(example).samples(slice(0, 1))
    with in_mode(model, mode), torch.no_grad(), preserved_random_state():
        try:
            alone, together = _outputs(model, sample, 1), _outputs(model, sample, 2)
        except Exception:  # a model that takes one sample only has no batch to mix
            return
        for name, change in NEIGHBOURS.items():
            for kept in (0, 1):
                try:
                    beside = _outputs(model, sample, 2, 1 - kept, change)
                except Exception as error:  # a model's own code may raise anything
                    if name == "NaN":  # which it need not take
                        continue
                    raise Refusal(
                        "whether the samples of a batch influence each other cannot be told",
                        [f"the model fails for a sample of {name}: {first_line(error)}"],
                        "Pass an example around which the model is defined.",
                    ) from error
                _check_kept(kept, alone, together, beside)


def _outputs(model: torch.nn.Module, sample: Call, copies: int, changed: int = -1, change: Change | None = None) -> dict[str, Any]:
    """All that the model returns for copies of a sample, one of them changed; the model's own state stays as it is."""

    def batch(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        value = value.nan_to_num(0, 0, 0) if value.is_floating_point() else value  # else nothing would be seen to change
        other = value if change is None or not value.is_floating_point() else change(value)
        return torch.cat([other if place == changed else value for place in range(copies)])

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        returned = model(*tree_map(batch, sample.args), **tree_map(batch, sample.kwargs))
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return {keystr(path): value for path, value in tree_flatten_with_path(returned)[0]}


def _check_kept(kept: int, alone: dict[str, Any], together: dict[str, Any], beside: dict[str, Any]) -> None:
    for path, one in alone.items():
        if not isinstance(one, torch.Tensor) or not one.is_floating_point():
            continue
        if kept and together[path].shape == one.shape:  # it reads the first sample alone, or all of them together
            continue
        expected, found = (_of_sample(kept, both[path], one) for both in (together, beside))
        size = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
        if not torch.allclose(found, expected, rtol=0, atol=TOLERANCE * size, equal_nan=True):
            raise Refusal(
                "the samples of a batch influence each other, so there is no constant per sample",
                [f"output{path} of one sample changes with another sample"],
                'Use mode="batch" to treat the whole batch as one input, or eval mode if batch statistics do it.',
            )


def _of_sample(place: int, both: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """The part of an output for two samples that belongs to one of them; all of it where axis 0 is not the batch."""
    count = alone.shape[0] if alone.dim() else 0
    return both[place * count : (place + 1) * count] if alone.dim() and both.shape[0] == 2 * count else both
