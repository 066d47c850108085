"""MODEL on the command line: `package.module:callable`, `file.py:callable` or `file.pt2`, and weights for it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram

from normscope.core.errors import InputError

FORMS = "package.module:callable, file.py:callable or file.pt2, for example normscope.lab.models:resnet18"
SHOWN = 3  # names listed in an error
STATE_KEYS = ("state_dict", "model_state_dict", "model")  # where checkpoints of a training loop keep it
WRAPPERS = ("module.", "_orig_mod.")  # what data parallelism and torch.compile put before every name


def load_model(spec: str, weights: Path | None = None, seed: int = 0) -> torch.nn.Module | ExportedProgram:
    """The model that `spec` names, with `weights` loaded; what its code draws from global random state comes from `seed`."""
    if spec.endswith(".pt2"):
        if weights is not None:
            raise InputError("an exported program has its own weights: leave out --weights, or give the callable that made it")
        return _exported_program(Path(spec))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _call(_named(spec, f"MODEL {spec!r} is not of a known form: write {FORMS}"), spec)
    if weights is not None:
        load_weights(model, weights)
    return model


def load_data(spec: str, train: bool = False) -> Any:
    """Labelled data: `digits`, of which there are two parts, or what the callable that `spec` names returns.

    That is (inputs, labels) or batches of them.
    """
    if spec == "digits":
        from normscope.lab.datasets import digits

        return digits().train if train else digits().test
    make = _named(spec, f"data {spec!r} is not of a known form: write digits, package.module:callable or file.py:callable")
    if not callable(make):
        raise InputError(f"{spec} is {make!r:.40}: name a callable that returns (inputs, labels)")
    try:
        return make()
    except Exception as error:  # a user's own code may raise anything
        raise InputError(f"{spec} failed: {_what(error)}") from error


def _named(spec: str, unknown: str) -> Any:
    """What `place:name` names."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise InputError(unknown)
    return _attribute(_file(Path(place)) if place.endswith(".py") else _import(place), place, name)


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Load a state dict into `model`; every key must be there, none left over, and every shape must agree.

    Names may begin with what a wrapper of the trained model put there.
    """
    own = model.state_dict()
    given = _unwrapped(_state(path), own)
    places = {key: value.data_ptr() for key, value in own.items() if isinstance(value, torch.Tensor)}
    filled = {places.get(key) for key in given}  # a tied weight is saved once
    problems = {
        "missing": [key for key in own if key not in given and places.get(key) not in filled],
        "unexpected": [key for key in given if key not in own],
        "of another shape": [
            f"{key} {_shape(value)} instead of {_shape(own[key])}"
            for key, value in given.items()
            if key in own and _shape(value) != _shape(own[key])
        ],
    }
    found = [f"{len(keys)} {what} ({_some(keys)})" for what, keys in problems.items() if keys]
    if found:
        raise InputError(f"{path} does not fit the model: {'; '.join(found)}; give the weights of this very model")
    model.load_state_dict(dict(given), strict=False)


def _import(place: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise InputError(f"no module {error.name!r}: install it, or run where it can be imported from") from error
        raise InputError(f"importing {place} failed: {_what(error)}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"importing {place} failed: {_what(error)}") from error


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"no file {path}: MODEL is {FORMS}")
    sys.path.insert(0, str(path.parent.resolve()))  # what lies beside it can be imported, as when python runs it
    name = f"normscope_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"running {path} failed: {_what(error)}") from error
    return module


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = get_close_matches(name, public, SHOWN) or sorted(public)
        advice = f"did you mean {_some(close, ' or ')}?" if close else "it has nothing that can be called"
        raise InputError(f"{place} has no {name!r}: {advice}") from error


def _call(target: Any, spec: str) -> torch.nn.Module:
    if isinstance(target, torch.nn.Module):
        return target.cpu()
    if not callable(target):
        raise InputError(f"{spec} is {target!r:.40}: name a callable that returns a torch.nn.Module")
    needed = _needed_arguments(target)
    if needed:
        raise InputError(f"{spec} needs arguments ({_some(needed)}): name a function that takes none and returns the model")
    try:
        model = target()
    except (Exception, SystemExit) as error:
        raise InputError(f"calling {spec} failed: {_what(error)}") from error
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{spec} returned {model!r:.40}: it must return a torch.nn.Module")
    return model.cpu()


def _needed_arguments(target: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature: calling them will tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in optional]


def _exported_program(path: Path) -> ExportedProgram:
    if not path.is_file():
        raise InputError(f"no file {path}: MODEL is {FORMS}")
    try:
        return torch.export.load(path)
    except Exception as error:  # zip, JSON and torch errors of many kinds
        raise InputError(f"{path} is not an exported program of torch.export.save: {_what(error)}") from error


def _state(path: Path) -> Mapping[str, Any]:
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
    return state


def _unwrapped(given: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same without prefixes of wrappers that the model's own names do not have."""
    for prefix in (*WRAPPERS, *WRAPPERS):  # either may be around the other
        if given and all(key.startswith(prefix) for key in given) and not any(key.startswith(prefix) for key in own):
            given = {key.removeprefix(prefix): value for key, value in given.items()}
    return given


def _shape(value: Any) -> str:
    return "×".join(map(str, value.shape)) or "scalar" if isinstance(value, torch.Tensor) else type(value).__name__


def _some(names: list[str], separator: str = ", ") -> str:
    return separator.join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _what(error: BaseException) -> str:
    """The error's type, the first line of its message, and the line that raised it."""
    text = str(error).strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"
