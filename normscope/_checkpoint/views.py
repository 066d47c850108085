"""The tensors of a checkpoint under the names that another one may use, whatever way they are stored.

Names of GGUF become those of Hugging Face, prefixes of wrappers go, merged q/k/v and gate/up are cut, buffers that hold no weights
are left out. Nothing is read before it is compared, and then one tensor at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from normscope._checkpoint.entries import DTYPES, Entry
from normscope._checkpoint.opening import Checkpoint
from normscope.core.errors import InputError

GGUF = (
    (r"^token_embd\.", "model.embed_tokens."), (r"^output_norm\.", "model.norm."), (r"^output\.", "lm_head."),
    (r"^blk\.(\d+)\.attn_norm\.", r"model.layers.\1.input_layernorm."),
    (r"^blk\.(\d+)\.ffn_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"^blk\.(\d+)\.attn_output\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^blk\.(\d+)\.attn_([qkv])\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^blk\.(\d+)\.attn_qkv\.", r"model.layers.\1.self_attn.qkv_proj."),
    (r"^blk\.(\d+)\.attn_([qk])_norm\.", r"model.layers.\1.self_attn.\2_norm."),
    (r"^blk\.(\d+)\.ffn_(gate|up|down)\.", r"model.layers.\1.mlp.\2_proj."),
)  # fmt: skip
BUFFERS = re.compile(r"(?:^|\.)(?:rotary_emb\.inv_freq|position_ids|num_batches_tracked|masked_bias)$")
MASKS = re.compile(r"(?:^|\.)attn\.(?:attention\.)?bias$")  # of GPT-2 and its kin, (1, 1, n, n): a layer called attn has a bias too
PREFIXES = ("model.", "transformer.", "bert.", "gpt_neox.", "module.", "_orig_mod.", "base_model.model.")
MERGED = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
MERGED_NAMES = {"qkv_proj": "qkv", "query_key_value": "qkv", "Wqkv": "qkv", "gate_up_proj": "gate_up"}


@dataclass(frozen=True)
class View:
    """A tensor as another checkpoint may hold it. source: its name in the file; steps: what was done to it, in words."""

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], torch.Tensor]
    steps: tuple[str, ...] = ()

    def value(self) -> torch.Tensor:
        """In float64 or complex128, which hold every number but the lowest bits of large integers."""
        stored = self.make()
        try:
            return stored.to(torch.complex128 if stored.is_complex() else torch.float64)
        except NotImplementedError as error:  # PyTorch has types without a single operation
            raise InputError(
                f"{self.source} is stored as {self.dtype}, which PyTorch cannot convert: convert it to BF16 or F32"
            ) from error

    @property
    def kind(self) -> torch.dtype:
        """The type of the numbers; float32 for blocks of quantized ones."""
        return DTYPES.get(self.dtype, torch.float32)

    @property
    def whole(self) -> bool:
        return not self.kind.is_floating_point and not self.kind.is_complex

    @property
    def precision(self) -> torch.dtype | None:
        """The type of a number, or of either part of a complex one; None for integers and blocks of quantized numbers."""
        return None if self.dtype not in DTYPES or self.whole else self.kind.to_real()

    @property
    def roundoff(self) -> float:
        """How far a number may move, relatively, when it is stored like this; NaN for blocks of quantized numbers."""
        return torch.finfo(self.precision).eps / 2 if self.precision is not None else float("nan")

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Real numbers, or parts of complex ones, as this tensor would store them, in float64."""
        return values.to(self.precision).to(torch.float64) if self.precision is not None else values

    def changed(self, step: str, shape: tuple[int, ...], make: Callable[[torch.Tensor], torch.Tensor], name: str = "") -> View:
        inner = self.make
        return replace(self, name=name or self.name, shape=shape, make=lambda: make(inner()), steps=(*self.steps, step))


Views = dict[str, View]


def views(opened: Checkpoint) -> Views:
    """By names of Hugging Face, without entries that are not weights."""
    found: Views = {}
    for name, entry in opened.entries.items():
        mask = MASKS.search(name) and len(entry.shape) == 4 and entry.shape[:2] == (1, 1)
        if not mask and not BUFFERS.search(name):
            new = _renamed(name) if opened.format == "gguf" else name
            found[new] = View(new, name, entry.shape, entry.dtype, _reader(entry))
    return found


def _reader(entry: Entry) -> Callable[[], torch.Tensor]:
    return entry.tensor


def _renamed(name: str) -> str:
    for pattern, new in GGUF:
        if re.match(pattern, name):
            return re.sub(pattern, new, name)
    return name


def aligned(one: Views, other: Views) -> tuple[Views, Views, list[str]]:
    """Both with the same names as far as prefixes and merged weights allow, and what was done, in words."""
    said: list[str] = []
    for prefix in PREFIXES:
        for side, (own, against) in enumerate(((one, other), (other, one))):
            stripped = {name.removeprefix(prefix): view for name, view in own.items()}
            more = len(stripped.keys() & against.keys()) - len(own.keys() & against.keys())
            if len(stripped) == len(own) and more > 0:
                renamed = {name: replace(view, name=name) for name, view in stripped.items()}
                one, other = (renamed, other) if side == 0 else (one, renamed)
                said.append(f"names in {'A' if side == 0 else 'B'} begin with {prefix}")
    one, cut = _cut(one, other, "A")
    other, cut_too = _cut(other, one, "B")
    return one, other, [*said, *cut, *cut_too]


def _cut(own: Views, against: Views, letter: str) -> tuple[Views, list[str]]:
    """Merged weights and biases cut where the other checkpoint has them apart."""
    found: Views = {}
    counted: dict[str, int] = {}
    for name, view in own.items():
        parts = _parts(name, view, against) if name not in against else None
        if parts is None:
            found[name] = view
            continue
        counted[parts[0]] = counted.get(parts[0], 0) + 1
        found.update(parts[1])
    return found, [f"{what} in {count} places in {letter}" for what, count in counted.items()]


def _parts(name: str, view: View, against: Mapping[str, View]) -> tuple[str, Views] | None:
    module, _, last = name.rpartition(".")
    parent, _, merged = module.rpartition(".")
    kind = MERGED_NAMES.get(merged)
    if kind is None or last not in ("weight", "bias"):
        return None
    names = [f"{parent}.{part}.{last}" for part in MERGED[kind]]
    if not all(part in against for part in names):
        return None
    sizes = [against[part].shape[0] for part in names]
    if not view.shape or sum(sizes) != view.shape[0] or any(against[part].shape[1:] != view.shape[1:] for part in names):
        return None
    what = "q, k and v are merged" if kind == "qkv" else "gate and up are merged"
    made: Views = {}
    start = 0
    for part, size in zip(names, sizes, strict=True):
        made[part] = view.changed(what, (size, *view.shape[1:]), _slice(start, size), part)
        start += size
    return what, made


def _slice(start: int, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda whole: whole[start : start + size]
