"""`ns.checkpoint`: what the files of a model hold, proved one tensor at a time."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from normscope._checkpoint.architecture import from_architecture
from normscope._checkpoint.attention import attention_layers, logit_bound
from normscope._checkpoint.cluster import execute
from normscope._checkpoint.norms import Numbers
from normscope._checkpoint.opening import Checkpoint, open_checkpoint
from normscope._checkpoint.report import CheckpointReport
from normscope._checkpoint.rows import AttentionRow, PairRow, TensorRow, blocks
from normscope._checkpoint.structure import MATRICES, AttentionLayer, Structure, from_names
from normscope._checkpoint.work import Cache, Gamma, Result, Work
from normscope.core.errors import InputError, boundary
from normscope.core.progress import Progress, shown
from normscope.core.rounding import above, length

ZERO_CENTERED = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "recurrent_gemma",
    "qwen3_next",
    "nemotron",
)  # γ = 1 + w, of HF's files


@boundary
def checkpoint(
    path: str | Path | torch.nn.Module,
    *,
    sample: bool = False,
    cache: str | Path | None = None,
    workers: int = 0,
    ray: str | None = None,
    progress: Progress = None,
) -> CheckpointReport:
    """What is in a checkpoint: every tensor's role and proved norms, pairs of γ and weights, bounds on logits, findings.

    path: a .safetensors, .gguf, .pt, .pth or .bin file, an index of shards, or a directory of these; or a module.
    sample: spectral norms are estimated by a few products instead of proved, and say so.
    cache: a file that keeps results by content, so that an interrupted call goes on where it stopped.
    workers: processes that work beside each other; 0 works in this one.
    ray: the address of a Ray cluster whose nodes see the files under the same path; "" starts one on this machine.
    progress: True for a bar on stderr, or a callable (what, done, total), in bytes.
    """
    if type(workers) is not int or workers < 0:
        raise InputError(f"workers must be a number of processes, 0 or more, got {workers!r}")
    opened = open_checkpoint(path)
    structure = structured(opened)
    layers = attention_layers(structure, opened.entries, opened.config, opened.about)
    works = planned(opened, structure, layers, sample)
    kept = Cache(None if cache is None else Path(cache))
    results: dict[str, Result] = {}
    with shown("tensors", progress, opened.nbytes) as meter:
        for place, key, result in execute(works, kept.known, workers, ray):
            kept.keep(key, result)
            name = list(opened.entries)[place]
            results[name] = result
            meter.done += opened.entries[name].nbytes
            meter.at(name)
    return _report(opened, structure, layers, works, results, sample)


def structured(opened: Checkpoint) -> Structure:
    """Roles and pairs: from the graph where transformers knows the architecture, else from names."""
    return _structured(opened).without_complex(opened.entries)


def _structured(opened: Checkpoint) -> Structure:
    kind = opened.config.get("model_type")
    why = "there is no config.json"
    if opened.format != "gguf" and opened.config:
        found = from_architecture(opened.config, opened.entries)
        if isinstance(found, Structure):
            return found
        why = found
    plus_one = False if opened.format == "gguf" else kind in ZERO_CENTERED if isinstance(kind, str) else None
    made = from_names(opened.entries, plus_one)
    note = "roles come from names" + ("" if opened.format == "gguf" else f": {why}")
    return Structure(made.roles, made.pairs, made.basis, (note, *made.notes), made.transposed)


def planned(opened: Checkpoint, structure: Structure, layers: list[AttentionLayer], sample: bool) -> list[Work]:
    """One work per tensor, in the order of the file."""
    gains: dict[str, list[Gamma]] = {}
    for pair in structure.pairs:
        beta = None if pair.beta is None else opened.entries[pair.beta]
        for reader in pair.readers:
            gains.setdefault(reader, []).append(Gamma(opened.entries[pair.gamma], bool(pair.plus_one), beta))
    heads = {name: count for layer in layers for name, count in ((layer.query, layer.heads), (layer.key, layer.key_heads))}
    return [
        Work(
            entry, tuple(gains.get(name, ())), name in structure.transposed, heads.get(name, 0),
            opened.entries.get(name.removesuffix("weight") + "bias") if name in heads else None, sample,
        )
        for name, entry in opened.entries.items()
    ]  # fmt: skip


def _report(
    opened: Checkpoint,
    structure: Structure,
    layers: list[AttentionLayer],
    works: list[Work],
    results: dict[str, Result],
    sample: bool,
) -> CheckpointReport:
    tensors = tuple(
        TensorRow(name, structure.roles[name].kind, entry.shape, entry.dtype, structure.roles[name].rule, entry.nbytes,
                  Numbers(**results[name]["numbers"]))
        for name, entry in opened.entries.items()
    )  # fmt: skip
    norms = {
        (gain.gamma.name, work.entry.name): norm
        for name, work in zip(opened.entries, works, strict=True)
        for gain, norm in zip(work.gains, results[name]["pairs"], strict=False)
    }
    pairs = tuple(
        PairRow(pair.gamma, reader, norms.get((opened.entries[pair.gamma].name, opened.entries[reader].name)), pair.plus_one,
                pair.complete, pair.rule)
        for pair in structure.pairs for reader in pair.readers
    )  # fmt: skip
    attention = tuple(_logits(layer, opened, results, structure) for layer in layers) if not sample else ()
    made = CheckpointReport(
        opened.source, opened.format, structure.basis, tensors, pairs, attention, blocks(tensors, MATRICES), structure.notes, sample
    )
    from normscope._checkpoint.judging import judge

    return made.with_findings(judge(opened, structure, made))


def _logits(layer: AttentionLayer, opened: Checkpoint, results: dict[str, Result], structure: Structure) -> AttentionRow:
    normed = [None if name is None else _normed(name, opened, structure) for name in (layer.query_norm, layer.key_norm)]
    sides = [results[name]["heads"] for name in (layer.query, layer.key)]
    bound = logit_bound(
        layer, sides[0][0] if len(sides[0]) == 1 else (), sides[1][0] if len(sides[1]) == 1 else (),
        opened.entries[layer.query].shape[1], opened.entries[layer.key].shape[1], (normed[0], normed[1]),
    )  # fmt: skip
    basis = "norms of queries and keys" if layer.query_norm and layer.key_norm else "‖W_q diag γ‖‖W_k diag γ‖ per head"
    return AttentionRow(layer.path, bound, layer.heads, layer.key_heads, basis if bound is not None else "no γ before it is known")


def _normed(name: str, opened: Checkpoint, structure: Structure) -> float | None:
    """The largest ‖γ x̂ + β‖ for ‖x̂‖ ≤ √n, where a normalizer of queries or keys has n entries."""
    pair = structure.gammas.get(name)
    values = opened.entries[name].tensor().to(torch.float64)
    values = 1 + values if pair is not None and pair.plus_one else values
    if not bool(values.isfinite().all()):
        return None
    beta = name.removesuffix("weight") + "bias"
    moved = float(length(opened.entries[beta].tensor())) if beta in opened.entries else 0.0
    return above(float(values.abs().max()) * math.sqrt(len(values)) + moved)
