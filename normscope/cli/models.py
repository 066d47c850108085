"""MODEL on the command line: `package.module:callable`, `file.py:callable` or `file.pt2`. Each of them is code, which runs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram

from normscope.cli.archive import inspected
from normscope.cli.weights import SHOWN, load_weights, some
from normscope.core.errors import InputError

FORMS = "package.module:callable, file.py:callable or file.pt2, for example normscope.lab.models:resnet18"


def load_model(spec: str, weights: Path | None = None, seed: int = 0, trust: bool = False) -> torch.nn.Module | ExportedProgram:
    """The model that `spec` names: that of `load_module`, or an exported program, if it is trusted.

    A .pt2 file is code: what of it reaches `torch.export.load` is told in `cli/archive.py`.
    """
    if not _is_program(spec):
        return load_module(spec, weights, seed)
    if weights is not None:
        raise InputError("an exported program has its own weights: leave out --weights, or give the callable that made it")
    path = Path(spec)
    if not path.is_file():
        raise InputError(f"no file {path}: MODEL is {FORMS}")
    if not trust:
        raise InputError(
            f"{path} could run any code while it is loaded, as every .pt2 file could: add --trust if you trust whoever made it, "
            "or name the callable that makes the model"
        )
    return _exported_program(path)


def load_module(
    spec: str, weights: Path | None = None, seed: int = 0, no_program: str = "name a callable that returns the model"
) -> torch.nn.Module:
    """What the callable that `spec` names returns, with `weights` loaded; its global random state comes from `seed`.

    no_program: what to say of an exported program, which is refused before anything of it is loaded.
    """
    if _is_program(spec):
        raise InputError(f"{spec} is an exported program: {no_program}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _call(_named(spec, f"MODEL {spec!r} is not of a known form: write {FORMS}"), spec)
    if weights is not None:
        load_weights(model, weights)
    return model


def load_data(spec: str, train: bool = False) -> Any:
    """Labelled data: `digits`, which has two parts, or what the callable that `spec` names returns.

    That is (inputs, labels) or batches of them.
    """
    if spec == "digits":
        from normscope.digits import digits

        return digits()[0 if train else 1]
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
        public = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
        own = [key for key, value in public.items() if getattr(value, "__module__", "") == module.__name__]
        close = get_close_matches(name, public, SHOWN) or sorted(own or public)
        advice = f"did you mean {some(close, ' or ')}?" if close else "it has nothing that can be called"
        raise InputError(f"{place} has no {name!r}: {advice}") from error


def _call(target: Any, spec: str) -> torch.nn.Module:
    if isinstance(target, torch.nn.Module):
        return target.cpu()
    if not callable(target):
        raise InputError(f"{spec} is {target!r:.40}: name a callable that returns a torch.nn.Module")
    needed = _needed_arguments(target)
    if needed:
        raise InputError(f"{spec} needs arguments ({some(needed)}): name a function that takes none and returns the model")
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


def _is_program(spec: str) -> bool:
    return spec.endswith(".pt2")


def _exported_program(path: Path) -> ExportedProgram:
    try:
        archive = inspected(path)
    except InputError as error:
        raise InputError(f"{path} is not loaded, even with --trust: {error}") from error
    try:
        return torch.export.load(archive)
    except Exception as error:  # zip, JSON and torch errors of many kinds
        raise InputError(f"{path} is not an exported program of torch.export.save: {_what(error)}") from error


def _what(error: BaseException) -> str:
    """The error's type, the first line of its message, and the line that raised it."""
    text = str(error).strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"
