"""A checkpoint as its files say: tensors by name, not yet read, the configuration beside them, and the format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from normscope._checkpoint.entries import Entry, Held, read_bytes
from normscope._checkpoint.gguf_files import read_gguf
from normscope._checkpoint.headers import AGAIN, MOST_HEADER, file_size, parsed, read_safetensors
from normscope._checkpoint.pickles import read_pickled
from normscope.core.errors import InputError

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = ("module.", "_orig_mod.")  # what data parallelism and torch.compile put before every name
INDEX = ".index.json"
CONFIG = "config.json"
MOST_CONFIG = 4 << 20
SPLIT = re.compile(r"-\d{5}-of-(\d{5})$")
FIRST = re.compile(r"embed|embd|wte|wpe")
LAST = re.compile(r"^(?:\w+\.)?(?:norm|ln_f|lm_head|final|classifier|pooler|output_norm\.|output\.)")
FORMS = "a .safetensors, .gguf, .pt, .pth or .bin file, an index of shards, or a directory of these"


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name. config: of config.json; about: the keys and values of a GGUF. source: as the user named it."""

    source: str
    format: str
    entries: Mapping[str, Entry]
    config: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    module: torch.nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


def open_checkpoint(source: str | Path | torch.nn.Module) -> Checkpoint:
    """What a path or a module holds; nothing but headers is read."""
    if isinstance(source, torch.nn.Module):
        return _of_module(source)
    if not isinstance(source, (str, Path)):
        raise InputError(f"a checkpoint is a path or a module, got {type(source).__name__}: give {FORMS}")
    path = Path(source)
    return _of_directory(path) if path.is_dir() else _of_file(path)


def _of_module(module: torch.nn.Module) -> Checkpoint:
    state = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    if not state:
        raise InputError(f"{type(module).__name__} has no parameters and no buffers: there is nothing to audit")
    unusable = [name for name, value in state.items() if value.is_meta]
    if unusable:
        raise InputError(f"{unusable[0]} has a shape but no values (device meta): load the model's weights first")
    return described(module, {name: Held(name, value) for name, value in state.items()})


def described(module: torch.nn.Module, entries: Mapping[str, Entry] = {}) -> Checkpoint:
    """A module with the configuration that it carries, if it does."""
    described = getattr(getattr(module, "config", None), "to_dict", None)
    return Checkpoint(type(module).__name__, "module", entries, described() if callable(described) else {}, {}, module)


def _of_file(path: Path) -> Checkpoint:
    if not path.is_file():
        raise InputError(f"there is no file or directory {path}: give {FORMS}")
    if path.name.endswith(INDEX):
        return _of_index(path)
    config = _config(path.parent / CONFIG)
    if path.suffix == ".safetensors":
        return _made(path, "safetensors", read_safetensors(path), config)
    if path.suffix == ".gguf":
        return _of_gguf(path)
    if path.suffix in PICKLED:
        return _made(path, "torch", read_pickled(path), config)
    raise InputError(f"{path} is not a kind of file that normscope knows: give {FORMS}")


def _of_directory(path: Path) -> Checkpoint:
    """Its index, else its only file, else all shards; safetensors before what torch saved."""
    for suffixes in ((".safetensors",), PICKLED, (".gguf",)):
        files = sorted(found for found in path.iterdir() if found.suffix in suffixes and found.is_file())
        indices = sorted(found for found in path.iterdir() if found.name.endswith(f"{suffixes[0]}{INDEX}"))
        if suffixes == PICKLED:
            indices = sorted(found for found in path.iterdir() if found.name.endswith(f".bin{INDEX}"))
            files = [
                found for found in files if not found.name.startswith(("training_args", "optimizer", "scheduler", "rng_state"))
            ]
        if len(indices) > 1:
            raise InputError(f"{path} has several indices ({indices[0].name}, {indices[1].name}): name one of them")
        if indices:
            return _of_index(indices[0], path)
        if len(files) == 1 or (files and all(SPLIT.search(found.stem) for found in files)):
            opened = [_of_file(found) for found in (files[:1] if suffixes == (".gguf",) else files)]
            return _joined(path, opened)
        if files:
            raise InputError(f"{path} has {len(files)} files of weights ({files[0].name}, {files[1].name}, …): name one of them")
    raise InputError(f"{path} has no weights: give {FORMS}")


def _of_index(index: Path, named: Path | None = None) -> Checkpoint:
    size = file_size(index)
    if size > MOST_HEADER:
        raise InputError(f"{index} has {size:,} bytes, too many for an index; {AGAIN}")
    listed = parsed(bytes(read_bytes(index, 0, size)), index, 32).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise InputError(f"{index} has no weight_map from names to files; {AGAIN}")
    files = sorted(set(listed.values()))
    outside = [file for file in files if not file or Path(file).name != file or file in (".", "..") or "\0" in file]
    if outside:
        raise InputError(f"{index} names {outside[0][:80]!r}, which is not a file beside it; {AGAIN}")
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise InputError(f"{index} names {missing[0][:80]}, which is missing: fetch it too")
    made = _joined(named or index, [_of_file(index.parent / file) for file in files])
    for name, file in listed.items():
        if name not in made.entries or getattr(made.entries[name], "path", None) != index.parent / file:
            raise InputError(f"{index} says that {name[:80]!r} is in {file[:80]}, but it is not there; {AGAIN}")
    extra = next((name for name in made.entries if name not in listed), None)
    if extra is not None:
        raise InputError(f"{index} does not list {extra[:80]!r}, but a shard contains it; {AGAIN}")
    return made


def _of_gguf(path: Path) -> Checkpoint:
    found = SPLIT.search(path.stem)
    files = [path]
    if found:
        count = int(found[1])
        stem = path.stem[: found.start()]
        if count > 1000:
            raise InputError(f"{path} claims to be one of {count} parts, more than the 1,000 that are possible: fetch it again")
        files = [path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    entries: list[Entry] = []
    about: dict[str, Any] = {}
    for file in files:
        read, keys = read_gguf(file)
        entries += read
        about = {**keys, **about}
    return _made(path, "gguf", entries, _config(path.parent / CONFIG), about)


def _made(
    path: Path, format: str, entries: Sequence[Entry], config: Mapping[str, Any], about: Mapping[str, Any] = {}
) -> Checkpoint:
    if not entries:
        raise InputError(f"{path} holds no tensors")
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{twice[:80]!r} appears in several parts of {path}; {AGAIN}")
    named = dict(zip(unwrapped(names), entries, strict=True))
    if format != "torch":  # whose files keep the model's order; others sort, layer 10 before layer 2
        named = {name: named[name] for name in sorted(named, key=natural)}
    return Checkpoint(str(path), format, named, config, about)


def _joined(path: Path, parts: Sequence[Checkpoint]) -> Checkpoint:
    entries = [entry for part in parts for entry in part.entries.values()]
    return _made(path, parts[0].format, entries, parts[0].config, parts[0].about)


def natural(name: str) -> tuple[object, ...]:
    """A key that sorts layer 2 before layer 10, embeddings first and heads last.

    >>> sorted(["output.weight", "blk.10.weight", "blk.2.weight", "token_embd.weight"], key=natural)
    ['token_embd.weight', 'blk.2.weight', 'blk.10.weight', 'output.weight']
    """
    place = 0 if FIRST.search(name) else 2 if LAST.search(name) else 1
    return (place, *((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)))


def unwrapped(names: Sequence[str]) -> list[str]:
    """Names without what a wrapper of the trained model put before every one of them.

    >>> unwrapped(["module.0.weight", "module.0.bias"])
    ['0.weight', '0.bias']
    """
    found = list(names)
    for prefix in (*WRAPPERS, *WRAPPERS):  # either may be around the other
        if found and all(name.startswith(prefix) for name in found):
            found = [name.removeprefix(prefix) for name in found]
    return found


def _config(path: Path) -> dict[str, Any]:
    """The configuration in a file beside the weights, if there is one."""
    if not path.is_file():
        return {}
    size = file_size(path)
    if size > MOST_CONFIG:
        raise InputError(f"{path} has {size:,} bytes, too many for a configuration; {AGAIN}")
    content = bytes(read_bytes(path, 0, size))
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON; {AGAIN}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a configuration but a {type(found).__name__}; {AGAIN}")
    return found
