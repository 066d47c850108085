"""`ns.diff`: two checkpoints or models, as functions where possible and as numbers where not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from normscope._checkpoint.attention import head_count
from normscope._checkpoint.auditing import ZERO_CENTERED, structured
from normscope._checkpoint.configurations import built_apart, configured_apart, settings_tied
from normscope._checkpoint.difference import Difference, DiffRow
from normscope._checkpoint.equality import change, same_numbers
from normscope._checkpoint.gain_moves import folded
from normscope._checkpoint.hypotheses import (
    Inquiry,
    conventions,
    permuted_heads,
    plainly,
    rotary,
    transposed,
)
from normscope._checkpoint.lora import merged_lora
from normscope._checkpoint.opening import Checkpoint, natural, open_checkpoint
from normscope._checkpoint.structure import UNKNOWN, Pair, Structure
from normscope._checkpoint.views import View, Views, aligned, views
from normscope.core.data import Example
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, boundary

STORED = "weights, read by one architecture"
TIED = (
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "transformer.wte.weight"),
    ("lm_head.weight", "embed_tokens.weight"),
    ("lm_head.weight", "backbone.embeddings.weight"),
    ("embed_out.weight", "gpt_neox.embed_in.weight"),
)


@earlier(positional=1)
@boundary
def diff(
    a: str | Path | torch.nn.Module, b: str | Path | torch.nn.Module, *, example: Example | None = None, mode: str = "train"
) -> Difference:
    """Whether two checkpoints or models are the same function, up to symmetries; by default in train mode, as both train.

    a, b: paths, as of `ns.checkpoint`, or modules.
    example: with two modules, inputs on which both run in float64; then the answer is measured, symmetries included.
    mode: with modules and an example, "train" (batch statistics) or "eval" (running statistics).
    """
    if example is not None:
        if not isinstance(a, torch.nn.Module) or not isinstance(b, torch.nn.Module):
            raise InputError("an example needs two modules to run: pass two modules, or leave out the example to compare files")
        from normscope._checkpoint.models import compare_models

        return compare_models(a, b, example, mode)
    return compare_files(open_checkpoint(a), open_checkpoint(b))


def compare_files(a: Checkpoint, b: Checkpoint) -> Difference:
    """By weights alone: every tensor of both is explained, or the answer is not "the same"."""
    shapes = structured(a), structured(b)
    one, other, said = aligned(views(a), views(b))
    sources = {view.source: name for name, view in one.items()}
    unreal = {name for side in (one, other) for name, view in side.items() if view.kind.is_complex}
    pairs = [
        pair for pair in (_renamed(pair, sources) for pair in shapes[0].pairs)
        if pair is not None and not unreal & {pair.gamma, pair.beta, *pair.readers}
    ]  # fmt: skip
    gammas = {name: reads for name, reads in _gammas(one, other, a, b, shapes).items() if name not in unreal}
    heads = head_count(a.config, a.about) or head_count(b.config, b.about)
    found = Inquiry(a, b, one, other, gammas, pairs, heads, said=said)
    plainly(found)
    for hypothesis in (transposed, conventions, rotary, permuted_heads, folded, merged_lora):
        hypothesis(found)
    return _judged(found, shapes[0])


def _renamed(pair: Pair, names: dict[str, str]) -> Pair | None:
    """A pair under the names of the comparison; None where a part of it was cut or left out."""
    if any(name not in names for name in (pair.gamma, *pair.readers)):
        return None
    return replace(
        pair, gamma=names[pair.gamma], readers=tuple(names[reader] for reader in pair.readers),
        beta=names.get(pair.beta) if pair.beta else None,
        transposed=frozenset(names[name] for name in pair.transposed & {*pair.readers}),
    )  # fmt: skip


def _gammas(
    one: Views, other: Views, a: Checkpoint, b: Checkpoint, shapes: tuple[Structure, Structure]
) -> dict[str, tuple[bool | None, bool | None]]:
    """Every γ in both, and whether A and B read it as 1 + w, as far as formats, configurations and code say."""
    found = {}
    for name in one:
        if name in other and shapes[0].roles[one[name].source].kind == "γ":
            found[name] = (_declared(one[name].source, a, shapes[0]), _declared(other[name].source, b, shapes[1]))
    return found


def _declared(name: str, opened: Checkpoint, structure: Structure) -> bool | None:
    if opened.format == "gguf":
        return False
    pair = structure.gammas.get(name)
    if pair is not None and pair.plus_one is not None:
        return pair.plus_one
    kind = opened.config.get("model_type")
    return kind in ZERO_CENTERED if isinstance(kind, str) else None


def _judged(found: Inquiry, structure: Structure) -> Difference:
    """Rows for everything, and the verdict."""
    _tied(found)
    rows, apart, alone = [], [], []
    for name in sorted({*found.one, *found.other}, key=natural):
        one, other = found.one.get(name), found.other.get(name)
        role = structure.roles[one.source].kind if one is not None and one.source in structure.roles else UNKNOWN
        if name in found.how:
            moved = (
                {} if one is None or other is None or found.how[name] == "equal" or one.shape != other.shape else change(one, other)
            )
            rows.append(DiffRow(name, role, True, found.how[name], **moved))
        elif name in found.contradicted and (one is None or other is None):
            rows.append(DiffRow(name, role, False, found.against[name]))
            apart.append(name)
        elif one is None or other is None:
            rows.append(DiffRow(name, role, None, f"only in {'B' if one is None else 'A'}"))
            alone.append(name)
        else:
            why = found.against.get(name) or (
                "differs" if one.shape == other.shape else f"{_shape(one)} in A, {_shape(other)} in B"
            )
            rows.append(DiffRow(name, role, False, why, **(change(one, other) if one.shape == other.shape else {})))
            apart.append(name)
    certain, possible = configured_apart(found.a, found.b)
    possible = [*possible, *built_apart(found.a.module, found.b.module)]
    notes = [*found.unsaid, *possible]
    if (not found.a.config and not found.a.about) or (not found.b.config and not found.b.about):
        notes.append("one configuration is missing, so the number of heads, ε and rotary bases were not compared")
    first = apart[0] if apart else certain[0].split(" ")[0] if certain else None
    same = False if apart or certain else None if alone or possible or found.unsaid else True
    return Difference(
        same, _sentence(found, same, rows, apart, alone, certain, possible), tuple(rows), first, STORED, found.defect,
        (found.a.source, found.b.source), tuple(notes),
    )  # fmt: skip


def _tied(found: Inquiry) -> None:
    """A head that one side does not read is tied to the embedding; the other's must then be equal to it."""
    ties = [settings_tied(opened) for opened in (found.a, found.b)]
    for side, (own, against) in enumerate(((found.one, found.other), (found.other, found.one))):
        for head, embedding in TIED:
            if head not in own or embedding not in own or embedding not in found.how:
                continue
            unread = head not in against and ties[1 - side] is not False
            equal = same_numbers(own[head], own[embedding])[0]
            if unread and equal:
                found.accept(head, "tied to the embedding", 0.0)
            elif not equal and ties[side] and ties[1 - side] is False:
                found.contradict(head, f"is not read in {'AB'[side]}, which ties the head to the embedding")


def _sentence(
    found: Inquiry, same: bool | None, rows: list[DiffRow], apart: list[str], alone: list[str], certain: list[str],
    possible: list[str],
) -> str:  # fmt: skip
    said = "; ".join(found.said)
    if same:
        return f"the same function: {said or 'all tensors are equal'}"
    if apart:
        by_name = {row.name: row for row in rows}
        first = by_name[apart[0]]
        size = "" if first.change is None else f" (‖Δ‖/‖W‖ = {first.change:.2g})"
        rest = f", the first of {len(apart)}" if len(apart) > 1 else ""
        quantized = sorted(
            {view.dtype for view in map(found.other.get, apart) if view is not None and view.precision is None and not view.whole}
        )
        note = f"; B stores weights in blocks of {', '.join(quantized)}" if quantized else ""
        return f"not the same function: {apart[0]} {first.how}{size}{rest}{note}" + (f"; besides, {said}" if said else "")
    if certain:
        return f"not the same function: the weights agree, but {certain[0]}"
    if found.unsaid and not alone:
        return f"not decided: the same function if {' and '.join(found.unsaid)}: {said}"
    what = (
        f"{alone[0]} is on one side only" + (f", and so are {len(alone) - 1} more" if len(alone) > 1 else "")
        if alone
        else possible[0]
    )
    return f"not decided: {what}; everything that is in both agrees" + (f" ({said})" if said else "")


def _shape(view: View) -> str:
    return "×".join(map(str, view.shape)) or "a number"
