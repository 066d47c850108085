"""Small checkpoints in every format, written by hand where no library writes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


def gguf_bytes(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any] = {}) -> bytes:
    """A GGUF file of plain tensors; values of `about` are strings, whole numbers or lists of strings."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def value(given: Any) -> bytes:
        if isinstance(given, str):
            return struct.pack("<I", 8) + text(given)
        if isinstance(given, list):
            return struct.pack("<IIQ", 9, 8, len(given)) + b"".join(map(text, given))
        return struct.pack("<If", 6, given) if isinstance(given, float) else struct.pack("<II", 4, given)

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(about))
    head += b"".join(text(name) + value(given) for name, given in about.items())
    data = b""
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % 32)
        head += text(name) + struct.pack("<I", tensor.dim()) + b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", KINDS[tensor.dtype], len(data))
        data += tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return head + b"\0" * (-len(head) % 32) + data


def write(folder: Path, format: str, state: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """The path of a checkpoint in a format: safetensors, shards, pt, gguf."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    state = {name: value.contiguous() for name, value in state.items()}
    if format == "safetensors":
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    if format == "pt":
        torch.save(state, folder / "model.pt")
        return folder / "model.pt"
    if format == "gguf":
        (folder / "model.gguf").write_bytes(gguf_bytes(state, {"general.architecture": "llama"}))
        return folder / "model.gguf"
    names = sorted(state)
    placed = {}
    for part, chosen in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({name: state[name] for name in chosen}, folder / file)
        placed.update(dict.fromkeys(chosen, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder
