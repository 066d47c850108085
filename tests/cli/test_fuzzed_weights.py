"""Files of weights with damaged headers, lengths and bytes: each is loaded, or refused in one line of ours."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from normscope.cli.weights import load_weights
from normscope.core.errors import InputError

STATE = {"0.weight": torch.ones(4, 3), "0.bias": torch.ones(4), "1.weight": torch.ones(2, 4), "1.bias": torch.ones(2)}
WORDS = (
    b"F32",
    b"F64",
    b"C64",
    b"I8",
    b"BF16",
    b"[4,3]",
    b"[-1]",
    b"[9999999999]",
    b"null",
    b"{",
    b"}",
    b"\xff",
    b'"',
    b"__metadata__",
    b"\0" * 9,
)
HEAD = 500  # bytes that mutations prefer: where headers are


def mutated(content: bytes, choice: random.Random) -> bytes:
    """One to four of: a byte changed, a word put in, a part cut out, the end cut off, another length."""
    made = bytearray(content)
    for _ in range(choice.randint(1, 4)):
        place = choice.randrange(min(len(made), choice.choice((8, HEAD, len(content)))) or 1)
        kind = choice.randrange(5)
        if kind == 0:
            made[place : place + 1] = bytes([choice.randrange(256)])
        elif kind == 1:
            word = choice.choice(WORDS)
            made[place : place + len(word)] = word
        elif kind == 2:
            del made[place : place + choice.randint(1, 40)]
        elif kind == 3:
            del made[choice.randrange(len(made) + 1) :]
        else:
            made[:8] = struct.pack("<Q", choice.choice((0, 1, 2**31, 2**63, len(made), choice.randrange(2**16))))
    return bytes(made)


def attack(cases: int, directory: Path, suffix: str) -> None:
    path = directory / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=suffix == ".pt")
    content = path.read_bytes()
    choice = random.Random(0)
    refused = 0
    for _ in range(cases):
        path.write_bytes(mutated(content, choice))
        try:
            load_weights(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), path)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > cases / 4


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_damaged_weights_are_refused_in_one_line(tmp_path: Path, suffix: str) -> None:
    attack(400, tmp_path, suffix)


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_damaged_weights_are_refused_in_one_line_at_length(tmp_path: Path, suffix: str) -> None:
    attack(10_000, tmp_path, suffix)
