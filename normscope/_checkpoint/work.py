"""The work on one tensor, wherever it is done: its numbers, with each γ before it, and of its heads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from normscope._checkpoint.entries import Entry, content_hash, real
from normscope._checkpoint.norms import Matrix, Numbers, head_norms, measured, scaled_norm
from normscope.core.errors import InputError

VERSION = 1  # of results: another one makes all of them anew
Result = dict[str, Any]


@dataclass(frozen=True)
class Gamma:
    """A γ that stands before a weight, with its β."""

    gamma: Entry
    plus_one: bool = False
    beta: Entry | None = None

    def values(self) -> torch.Tensor:
        stored = self.gamma.tensor().to(torch.float64).flatten()
        return 1 + stored if self.plus_one else stored


@dataclass(frozen=True)
class Work:
    """One tensor and what else its numbers depend on. heads: of queries or keys, 0 for anything else; bias: theirs."""

    entry: Entry
    gains: tuple[Gamma, ...] = ()
    transposed: bool = False
    heads: int = 0
    bias: Entry | None = None
    sample: bool = False

    def key(self, tensor: torch.Tensor) -> str:
        """Of the content of everything that the result depends on."""
        others = [entry for gain in self.gains for entry in (gain.gamma, gain.beta) if entry is not None]
        others += [] if self.bias is None else [self.bias]
        made = hashlib.sha256(content_hash(tensor).encode())
        for entry in others:
            made.update(content_hash(entry.tensor()).encode())
        made.update(repr((VERSION, self.transposed, self.heads, self.sample, [gain.plus_one for gain in self.gains])).encode())
        return made.hexdigest()

    def run(self, known: Mapping[str, Result]) -> tuple[str, Result]:
        """(key, result)."""
        try:
            tensor = self.entry.tensor()
        except InputError as error:
            return "", {"numbers": asdict(Numbers(certified=False, note=str(error))), "pairs": [], "heads": []}
        key = self.key(tensor)
        if key in known:
            return key, known[key]
        matrix = Matrix(tensor)
        numbers = measured(matrix, self.sample)
        pairs: list[float | None] = []
        heads: list[list[list[float]]] = []
        usable = numbers.not_finite == 0 and tensor.dim() >= 2 and not self.sample
        for gain in self.gains:
            values = gain.values()
            pairs.append(scaled_norm(matrix, values, self.transposed) if usable and bool(values.isfinite().all()) else None)
        if self.heads and usable:
            bias = None if self.bias is None else real(self.bias.tensor())
            for gain in self.gains:
                shift = None if gain.beta is None else gain.beta.tensor().to(torch.float64).flatten()
                parts = [part for part in (gain.values(), shift, bias) if part is not None]
                if not all(bool(part.isfinite().all()) for part in parts):
                    continue
                heads.append([list(pair) for pair in head_norms(tensor, self.heads, gain.values(), shift, bias)])
        return key, {"numbers": asdict(numbers), "pairs": pairs, "heads": heads}

    @property
    def cost(self) -> int:
        """About how long it takes, for the order: a matrix before anything that is only read."""
        narrow = min(self.entry.shape) if len(self.entry.shape) > 1 else 1
        return self.entry.nbytes * (1 + narrow)


class Cache:
    """Results by content, in a file that grows line by line: an interrupted audit loses the tensor at hand."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, Result] = {}
        if path is not None and path.is_file():
            content = path.read_text(encoding="utf-8", errors="replace")
            if content and not content.endswith("\n"):  # torn: what comes next begins a line of its own
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")
            for line in content.splitlines():
                try:
                    row = json.loads(line)
                    self.known[row["key"]] = {
                        "numbers": asdict(Numbers(**row["numbers"])),
                        "pairs": row["pairs"],
                        "heads": row["heads"],
                    }
                except (ValueError, TypeError, LookupError):
                    continue  # torn, or of another version

    def keep(self, key: str, result: Result) -> None:
        if not key or key in self.known:
            return
        self.known[key] = result
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **result}) + "\n")
