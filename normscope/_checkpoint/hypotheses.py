"""Ways in which two checkpoints can be the same function though their numbers differ; each is proved on the numbers of every layer.

A hypothesis rewrites the views of B so that they should be those of A, and says what that means. What a configuration declares
(how γ is read, how rotary embeddings pair dimensions) is held against it: equal numbers under different readings are not the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from scipy.optimize import linear_sum_assignment

from normscope._checkpoint.equality import rounded_alike, same_numbers, too_coarse
from normscope._checkpoint.opening import Checkpoint
from normscope._checkpoint.structure import Pair
from normscope._checkpoint.views import View, Views

PLAUSIBLE = 0.5  # the largest median |w| of a γ that is stored as w, γ = 1 + w
INTERLEAVED = ("gptj", "codegen", "cohere", "cohere2", "glm", "glm4")  # of HF: neighbours are paired, not halves
GGUF_INTERLEAVED = ("llama",)  # llama.cpp permutes q and k of these
LLAMA_BLOCK = re.compile(r"^(.*\.?layers\.\d+\.)")
OUTPUTS = ("o_proj", "out_proj", "dense")  # what reads all heads
HEADED = frozenset(
    f"{module}.{kind}" for module in (*(f"{x}_proj" for x in "qkv"), *OUTPUTS, "q_norm", "k_norm") for kind in ("weight", "bias")
)
PROMPTS = re.compile(r"prompt|prefix")  # learned keys and values, head by head, wherever they are kept


@dataclass
class Inquiry:
    """Two checkpoints under comparison: what is left to explain, what was explained and how, and what contradicts."""

    a: Checkpoint
    b: Checkpoint
    one: Views
    other: Views
    gammas: Mapping[str, tuple[bool | None, bool | None]]  # γ by name: whether A and B read it as 1 + w
    pairs: Sequence[Pair]
    heads: int | None = None
    how: dict[str, str] = field(default_factory=dict)  # name → why it is the same
    against: dict[str, str] = field(default_factory=dict)  # name → why equal numbers are not the same
    contradicted: set[str] = field(default_factory=set)  # equal numbers that both sides read differently: nothing explains them
    said: list[str] = field(default_factory=list)
    unsaid: list[str] = field(default_factory=list)  # conditions that no configuration confirms: without them nothing is decided
    defect: float = 0.0

    @property
    def left(self) -> list[str]:
        """Names in both that nothing explains yet."""
        return [name for name in self.one if name in self.other and name not in self.how and name not in self.contradicted]

    def contradict(self, name: str, why: str) -> None:
        if self.how.pop(name, None) is not None:
            self.contradicted.add(name)
            self.against[name] = why

    def accept(self, name: str, why: str, defect: float) -> None:
        if name in self.contradicted:
            return
        self.how[name] = why
        self.against.pop(name, None)
        self.defect = max(self.defect, defect)


def plainly(found: Inquiry) -> None:
    """Equal numbers, or the other's as its type stores them."""
    rounded: dict[str, int] = {}
    for name in found.left:
        one, other = found.one[name], found.other[name]
        same, defect = rounded_alike(one, other)
        if same and defect and too_coarse(one, other, defect):
            found.against[name] = f"is stored as {one.dtype} in A and {other.dtype} in B, which is too coarse"
        elif same:
            found.accept(name, "equal" if not defect else f"rounded: {one.dtype} in A, {other.dtype} in B", defect)
            if defect:
                rounded[f"{one.dtype} in A and {other.dtype} in B"] = rounded.get(f"{one.dtype} in A and {other.dtype} in B", 0) + 1
    found.said += [f"{count} tensors are stored as {how}" for how, count in rounded.items()]


def by_group(names: Sequence[str]) -> dict[str, list[str]]:
    """Names that differ in their numbers alone: the same tensor in every layer."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return groups


def transposed(found: Inquiry) -> None:
    """Stored as (in, out) in one and (out, in) in the other, in every layer; square ones only beside others that show it."""
    tried: dict[str, View] = {}
    for name in found.left:
        one, other = found.one[name], found.other[name]
        if len(one.shape) == 2 and one.shape == other.shape[::-1]:
            turned = other.changed("transposed", one.shape, lambda value: value.T)
            if same_numbers(one, turned)[0]:
                tried[name] = turned
    groups = by_group([name for name in found.one if name in found.other])
    whole = {name for names in groups.values() if all(name in tried for name in names) for name in names}
    if any(found.one[name].shape[0] != found.one[name].shape[1] for name in whole):
        for name in whole:
            found.other[name] = tried[name]
            found.accept(name, "stored transposed", same_numbers(found.one[name], tried[name])[1])
        found.said.append(f"{len(whole)} matrices are stored transposed")


def conventions(found: Inquiry) -> None:
    """γ stored as w in one and as 1 + w in the other: in every layer, and as the configurations say, where they do."""
    shared = [name for name in found.gammas if name in found.one and name in found.other]
    for name in shared:
        reads = found.gammas[name]
        if name in found.how and None not in reads and reads[0] != reads[1]:
            said = ["1 + w" if read else "w" for read in reads]
            found.contradict(name, f"holds equal numbers, but A reads γ = {said[0]} and B reads γ = {said[1]}")
    moved: dict[int, list[str]] = {1: [], -1: []}
    for names in by_group(shared).values():
        for shift in (1, -1):
            outcomes = [same_numbers(found.one[name], found.other[name], float(shift)) for name in names]
            if not all(same for same, _ in outcomes):
                continue
            if not all(_allowed(found, name, shift) for name in names):
                alike = "γ differs by exactly 1, but both sides read it the same way: one side mistakes w for 1 + w"
                found.against |= {name: alike for name in names if name not in found.how}
            else:
                moved[shift] += names
                for name, (_, defect) in zip(names, outcomes, strict=True):
                    found.accept(name, f"γ is stored as {_forms(shift)}", defect)
                    found.other[name] = found.other[name].changed("γ", found.one[name].shape, _shifted(shift))
    for shift, names in moved.items():
        if names:
            found.said.append(f"γ of {len(names)} norms is stored as {_forms(shift)}")
            if any(None in found.gammas[name] for name in names):
                zero, plain = ("B", "A") if shift > 0 else ("A", "B")
                found.unsaid.append(f"{zero} is read with γ = 1 + w and {plain} with γ = w, which no configuration confirms")


def _forms(shift: int) -> str:
    return "1 + w in A and w in B" if shift > 0 else "w in A and 1 + w in B"


def _shifted(shift: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value.to(torch.float64) + shift


def _allowed(found: Inquiry, name: str, shift: int) -> bool:
    """Whether A = B + shift can be a convention: the side that is smaller by 1 is read as 1 + w, the other as w."""
    reads = found.gammas[name]
    expected = (False, True) if shift > 0 else (True, False)
    if any(read is not None and read != wanted for read, wanted in zip(reads, expected, strict=True)):
        return False
    zero_centered = (found.other if shift > 0 else found.one)[name].value()
    return None not in reads or float(zero_centered.abs().median()) <= PLAUSIBLE


def rotary(found: Inquiry) -> None:
    """Rows of q and k permuted between halves and neighbours, in every layer, with their biases and norms."""
    names = [
        name for name in found.one if name in found.other and re.search(r"self_attn\.[qk]_(?:proj|norm)\.(?:weight|bias)$", name)
    ]
    reads = _pairing(found.a), _pairing(found.b)
    if not names or not found.heads:
        return
    size = _head_size(found)
    if size is None or size % 2:
        return
    for to_halves in (True, False):
        turned = {name: _permuted(found.other[name], size, to_halves) for name in names if found.other[name].shape[0] % size == 0}
        outcomes = {name: same_numbers(found.one[name], view) for name, view in turned.items()}
        if len(turned) < len(names) or not all(same for same, _ in outcomes.values()):
            continue
        expected = ("halves", "neighbours") if to_halves else ("neighbours", "halves")
        if any(read is not None and read != wanted for read, wanted in zip(reads, expected, strict=True)):
            break
        if all(name in found.how for name in names) and None in reads:
            return  # both ways are the same numbers, and nobody asks for the other
        for name, view in turned.items():
            found.other[name] = view
            found.accept(name, f"rotary dimensions are {expected[0]} in A and {expected[1]} in B", outcomes[name][1])
        found.said.append(f"rotary dimensions of {len(names)} tensors are paired as {expected[0]} in A and {expected[1]} in B")
        if None in reads:
            found.unsaid.append("each is read with its own pairing of rotary dimensions, which no configuration confirms")
        return
    if None not in reads and reads[0] != reads[1]:
        for name in names:
            found.contradict(name, f"holds equal numbers, but A pairs rotary dimensions as {reads[0]} and B as {reads[1]}")


def _pairing(opened: Checkpoint) -> str | None:
    """How rotary embeddings pair the dimensions of a head, as far as the format or the configuration says."""
    if opened.format == "gguf":
        return "neighbours" if opened.about.get("general.architecture") in GGUF_INTERLEAVED else None
    kind = opened.config.get("model_type")
    return None if not isinstance(kind, str) else "neighbours" if kind in INTERLEAVED else "halves"


def _head_size(found: Inquiry) -> int | None:
    query = next((view for name, view in found.one.items() if name.endswith("self_attn.q_proj.weight")), None)
    return query.shape[0] // found.heads if query is not None and found.heads and query.shape[0] % found.heads == 0 else None


def _permuted(view: View, size: int, to_halves: bool) -> View:
    def turn(value: torch.Tensor) -> torch.Tensor:
        shape = (-1, size // 2, 2) if to_halves else (-1, 2, size // 2)
        return value.reshape(*shape, *value.shape[1:]).transpose(1, 2).reshape(value.shape)

    return view.changed("rotary", view.shape, turn)


def permuted_heads(found: Inquiry) -> None:
    """Heads in another order: rows of q, k and v, and columns of o, by one permutation that keeps groups of queries together."""
    size = _head_size(found)
    if size is None or any(PROMPTS.search(name) for name in (*found.one, *found.other)):
        return
    blocks = {match[1] for name in found.left if "self_attn." in name and (match := LLAMA_BLOCK.match(name))}
    explained = 0
    for block in sorted(blocks):
        path = f"{block}self_attn."
        members = {name.removeprefix(path) for name in (*found.one, *found.other) if name.startswith(path)}
        if not members <= HEADED:  # anything else beside the heads may tell them apart
            continue
        made = _ordered(found, path, size)
        outcomes = {name: same_numbers(found.one[name], view) for name, view in made.items()}
        apart = [name for name, (same, _) in outcomes.items() if not same]
        if not outcomes or len(apart) >= sum(name in found.left for name in outcomes):
            continue
        explained += 1
        for name, (same, defect) in outcomes.items():
            found.other[name] = made[name]
            if same:
                found.accept(name, "heads are permuted", defect)
            else:
                found.how.pop(name, None)
                found.against[name] = "differs, even with the heads of its layer permuted"
    if explained:
        found.said.append(f"the heads of {explained} layers are permuted")


def _ordered(found: Inquiry, path: str, size: int) -> Views:
    """The views of B in A's order of heads: that in which they are nearest, if it keeps groups of queries together."""
    if any(found.one[n].shape != (size,) for n in (f"{path}q_norm.weight", f"{path}k_norm.weight") if n in found.one):
        return {}
    output = [name for name in OUTPUTS if f"{path}{name}.weight" in found.one]
    if len(output) != 1:
        return {}
    modules = {**{letter: f"{path}{letter}_proj" for letter in "qkv"}, "o": f"{path}{output[0]}"}
    weights = {letter: (found.one.get(f"{name}.weight"), found.other.get(f"{name}.weight")) for letter, name in modules.items()}
    rows: dict[str, list[int]] = {}
    for letter, (one, other) in weights.items():
        if one is None or other is None or one.shape != other.shape or len(one.shape) != 2 or one.shape[letter == "o"] % size:
            return {}
        if one.kind.is_complex or other.kind.is_complex:
            return {}
        if letter != "o":
            mine, theirs = (view.value().reshape(-1, size * view.shape[1]) for view in (one, other))
            apart = torch.cdist(mine, theirs)
            if not bool(apart.isfinite().all()):
                return {}
            rows[letter] = linear_sum_assignment(apart.numpy())[1].tolist()
    shared = len(rows["q"]) // len(rows["k"])
    groups = [rows["k"][place // shared] for place in range(len(rows["q"]))]
    if rows["k"] != rows["v"] or [head // shared for head in rows["q"]] != groups:
        return {}
    made = {}
    for letter, module in modules.items():
        for kind in ("weight", "bias") if letter != "o" else ("weight",):
            name = f"{module}.{kind}"
            if name in found.one and name in found.other and found.one[name].shape == found.other[name].shape:
                made[name] = _reordered(found.other[name], rows["q" if letter == "o" else letter], size, int(letter == "o"))
    return made


def _reordered(view: View, order: list[int], size: int, axis: int) -> View:
    places = torch.tensor([head * size + i for head in order for i in range(size)])
    return view.changed("heads", view.shape, lambda value: value.index_select(axis, places))
