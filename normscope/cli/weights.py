"""--weights on the command line: state dicts from files that nobody vouches for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from normscope.core.errors import InputError, first_line

SHOWN = 3  # names listed in an error
STATE_KEYS = ("state_dict", "model_state_dict", "model")  # where checkpoints of a training loop keep it
WHOLE = "whole numbers"
WRAPPERS = ("module.", "_orig_mod.")  # what data parallelism and torch.compile put before every name


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Load a state dict into `model`; every key must be there, none left over, and every shape must agree.

    Names may begin with what a wrapper of the trained model put there.
    """
    own = model.state_dict()
    if unmade := [key for key, value in own.items() if isinstance(value, UninitializedBuffer | UninitializedParameter)]:
        raise InputError(f"{some(unmade)} of the model has no shape yet (lazy): run the model on an input before, and save it then")
    given = _unwrapped(read_state(path), own)
    problems = {
        "missing": _missing(own, given),
        "unexpected": [key for key in given if key not in own],
        "of another shape": [
            f"{key} {_shape(value)} instead of {_shape(own[key])}"
            for key, value in given.items()
            if key in own and _shape(value) != _shape(own[key])
        ],
    }
    found = [f"{len(keys)} {what} ({some(keys)})" for what, keys in problems.items() if keys]
    if found:
        raise InputError(f"{path} does not fit the model: {'; '.join(found)}; give the weights of this very model")
    parameters = dict(model.named_parameters())
    unusable = [f"{key} {why}" for key, value in given.items() if (why := _unusable(value, own[key], key in parameters))]
    if unusable:
        raise InputError(f"{path} holds weights that cannot be used: {some(unusable)}; save plain dense tensors")
    try:
        model.load_state_dict(dict(given), strict=False)
    except Exception as error:  # a module's own hooks may raise anything
        raise InputError(f"{path} cannot be loaded into the model: {type(error).__name__}: {first_line(error)}") from error
    if lost := _overwritten(own, given):
        raise InputError(
            f"{path} holds different numbers for {some(lost)} and for what shares its memory: give the weights of this very model"
        )


def read_state(path: Path) -> Mapping[str, Any]:
    """The state dict in a file that nobody vouches for: nothing in it is run, and anything else is refused in one line."""
    if not path.is_file():
        raise InputError(f"no file {path}: --weights is a .safetensors, .pt or .pth file")
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise InputError(f"{path} is not a .safetensors, .pt or .pth file: save the state dict as one of these")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has its own errors, pickle's among them
        raise InputError(f"{path} holds no plain state dict: save model.state_dict(), or use safetensors") from error
    for key in STATE_KEYS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping):
        raise InputError(f"{path} holds a {type(state).__name__}, not a state dict: save model.state_dict()")
    unnamed = [repr(key)[:40] for key in state if not isinstance(key, str)]
    if unnamed:
        raise InputError(f"{path} is not a state dict: its keys are names, not {some(unnamed)}; save model.state_dict()")
    return state


def _unwrapped(given: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same without prefixes of wrappers that the model's own names do not have."""
    for prefix in (*WRAPPERS, *WRAPPERS):  # either may be around the other
        if given and all(key.startswith(prefix) for key in given) and not any(key.startswith(prefix) for key in own):
            given = {key.removeprefix(prefix): value for key, value in given.items()}
    return given


def _missing(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The names that a file leaves out, but for tensors all of whose bytes belong to others that it has: tied weights and views."""
    left = [key for key in own if key not in given]
    places = {_storage(own[key]) for key in left}
    filled: dict[Any, torch.Tensor] = {}  # which bytes of each storage are given
    for key, value in own.items():
        if key in given and (place := _storage(value)) is not None and place in places:
            filled.setdefault(place, torch.zeros(value.untyped_storage().nbytes(), dtype=torch.bool))
            _bytes_of(value, filled[place]).fill_(True)
    return [
        key for key in left if (place := _storage(own[key])) not in filled or not bool(_bytes_of(own[key], filled[place]).all())
    ]


def _overwritten(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The names whose numbers are not those of the file that was loaded: another name for the same memory came after them."""
    places = Counter(_storage(own[key]) for key in given)
    shared = [key for key in given if (place := _storage(own[key])) is not None and places[place] > 1]
    pairs = ((key, _precise(own[key]), _precise(given[key].to(own[key].dtype))) for key in shared)
    return [key for key, mine, its in pairs if not bool(((mine == its) | (mine.isnan() & its.isnan())).all())]


def _storage(value: Any) -> Any:
    """What two tensors have in common if they share memory; None for what has no memory of its own."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout != torch.strided or value.is_nested:
        return None
    return value.device, value.untyped_storage().data_ptr()


def _bytes_of(value: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    """Those of a tensor, each once where it is expanded, among those of its storage."""
    width = value.element_size()
    sizes = [size if step else min(size, 1) for size, step in zip(value.shape, value.stride(), strict=True)]
    return storage.as_strided((*sizes, width), (*(step * width for step in value.stride()), 1), value.storage_offset() * width)


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return "nested" if value.is_nested else "×".join(map(str, value.shape)) or "scalar"


def _unusable(given: Any, own: Any, trained: bool) -> str:
    """Why a tensor cannot take the place of the model's own, of the same shape; empty where it can. trained: a parameter."""
    if not isinstance(given, torch.Tensor) or not isinstance(own, torch.Tensor):
        return ""  # extra state, which the module itself judges
    if given.is_quantized:
        return "is quantized"
    if given.is_meta:
        return "has a shape but no values (device meta)"
    if given.layout != torch.strided:
        return f"is sparse or nested ({str(given.layout).removeprefix('torch.')})"
    if _kind(given) != _kind(own):
        return f"is {_kind(given)} instead of {_kind(own)}"
    try:
        values = _precise(given)
    except Exception:  # PyTorch has types without a single operation
        return f"is {str(given.dtype).removeprefix('torch.')}, which cannot be turned into other numbers"
    if trained and bool(values.isnan().any()):
        return "is not a number (NaN) in places"
    held = values if own.is_quantized else _precise(given.to(own.dtype))
    same = torch.equal(held, values) if _kind(given) == WHOLE else torch.equal(held.isfinite(), values.isfinite())
    return "" if same else f"holds numbers that the model's {str(own.dtype).removeprefix('torch.')} cannot hold"


def _kind(value: torch.Tensor) -> str:
    return "complex" if value.is_complex() else "real" if value.is_floating_point() else WHOLE


def _precise(value: torch.Tensor) -> torch.Tensor:
    """In a type that tells all numbers of a kind apart: complex128, float64, or int64 beside whether it is negative."""
    if value.is_complex() or value.is_floating_point():
        return value.to(torch.complex128 if value.is_complex() else torch.float64)
    return torch.stack([value.to(torch.int64), (value.to(torch.float64) < 0).to(torch.int64)])


def some(names: list[str], separator: str = ", ") -> str:
    """The first few of many names."""
    return separator.join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
