"""What the tensors of a checkpoint are: a role for each, with the rule that decided, and pairs of γ and weights that read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from normscope._checkpoint.entries import COMPLEX, Entry

UNKNOWN = "unknown"
MATRICES = ("weight", "query", "key", "value", "qkv", "output", "gate", "up", "gate and up", "down", "router", "head", "embedding",
            "lora a", "lora b")  # fmt: skip


@dataclass(frozen=True)
class Role:
    """What a tensor is, and the rule that says so."""

    kind: str
    rule: str


@dataclass(frozen=True)
class Pair:
    """γ (and β) of a normalizer and the weights that read its output.

    plus_one: whether γ = 1 + w with w stored; None where nobody says. complete: whether nothing else reads the output, so that
    γ may move into the weights. transposed: readers stored as (in, out). kind: layer, rms, batch, …, "" where it is not known.
    """

    gamma: str
    readers: tuple[str, ...]
    rule: str
    beta: str | None = None
    plus_one: bool | None = None
    complete: bool = False
    transposed: frozenset[str] = frozenset()
    kind: str = ""
    epsilon: float | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer: the weights of queries and keys, the normalizers before and behind them, and its heads."""

    path: str
    query: str
    key: str
    heads: int
    key_heads: int
    scale: float
    pair: Pair | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    key_pair: Pair | None = None


@dataclass(frozen=True)
class Structure:
    """Roles by name, pairs, attention layers; `basis` says where they come from."""

    roles: Mapping[str, Role]
    pairs: tuple[Pair, ...] = ()
    basis: str = "names"
    notes: tuple[str, ...] = ()
    transposed: frozenset[str] = field(default_factory=frozenset)

    def without_complex(self, entries: Mapping[str, Entry]) -> Structure:
        """Complex tensors have no role: what the rules say of γ, β and weights is said of real numbers."""
        left = {name for name in self.roles if entries[name].dtype in COMPLEX}
        roles = {name: Role(UNKNOWN, "complex numbers") if name in left else role for name, role in self.roles.items()}
        pairs = tuple(pair for pair in self.pairs if not left & {pair.gamma, pair.beta, *pair.readers})
        return replace(self, roles=roles, pairs=pairs)

    @property
    def gammas(self) -> dict[str, Pair | None]:
        """Every γ, with its pair where it has one."""
        found: dict[str, Pair | None] = {name: None for name, role in self.roles.items() if role.kind == "γ"}
        return {**found, **{pair.gamma: pair for pair in self.pairs}}


# names -----------------------------------------------------------------------------------------------------------------------

NAMED: tuple[tuple[str, str, str], ...] = (  # (role, what the name ends with, axes): the first that fits decides
    ("running mean", r"running_mean$", "1"),
    ("running variance", r"running_var$", "1"),
    ("counter", r"num_batches_tracked$", "0"),
    ("lora a", r"lora_[aA](?:\.\w+)?(?:\.weight)?$", "2"),
    ("lora b", r"lora_[bB](?:\.\w+)?(?:\.weight)?$", "2"),
    ("scale of a quantized weight", r"(?:weight_scale(?:_inv)?|scales|input_scale)$", "0123"),
    ("codes of a quantized weight", r"(?:qweight|qzeros|g_idx)$", "123"),
    ("magnitude of a weight", r"(?:weight_g|parametrizations\.weight\.original0)$", "0123"),
    ("direction of a weight", r"(?:weight_v|parametrizations\.weight\.original1)$", "2345"),
    ("embedding", r"(?:embed_tokens|wte|wpe|tok_embeddings|token_embd|word_embeddings|position_embeddings|token_type_embeddings|"
                  r"embed_positions|shared|patch_embd|position_embd)\.weight$", "2"),
    ("head", r"(?:^|\.)(?:lm_head|output|embed_out)\.weight$", "2"),
    ("router", r"(?:router|mlp\.gate|block_sparse_moe\.gate|ffn_gate_inp)\.weight$", "2"),
    ("qkv", r"(?:qkv|qkv_proj|query_key_value|c_attn|attn_qkv|Wqkv|in_proj_weight)(?:\.weight)?$", "2"),
    ("query", r"(?:q_proj|attn_q|query|wq|SelfAttention\.q|EncDecAttention\.q|q_lin)\.weight$", "2"),
    ("key", r"(?:k_proj|attn_k|key|wk|SelfAttention\.k|EncDecAttention\.k|k_lin)\.weight$", "2"),
    ("value", r"(?:v_proj|attn_v|value|wv|SelfAttention\.v|EncDecAttention\.v|v_lin)\.weight$", "2"),
    ("output", r"(?:o_proj|attn_output|wo|attention\.dense|attention\.output\.dense|attn\.c_proj|SelfAttention\.o|out_proj|out_lin)"
               r"\.weight$", "2"),
    ("gate and up", r"(?:gate_up_proj)(?:\.weight)?$", "23"),
    ("gate", r"(?:gate_proj|ffn_gate|w1|wi_0)\.weight$", "23"),
    ("up", r"(?:up_proj|ffn_up|w3|wi_1|c_fc|fc1|intermediate\.dense|dense_h_to_4h|wi)\.weight$", "23"),
    ("down", r"(?:down_proj|ffn_down|w2|wo|mlp\.c_proj|fc2|dense_4h_to_h)\.weight$", "23"),
    ("γ", r"(?:norm|norm[0-9]+|layernorm|layer_norm|LayerNorm|_norm|Norm|ln|ln_[0-9a-z]+|ln[0-9]+|bn|bn[0-9]+|_BN|_bn|BatchNorm)"
          r"(?:\.|_)?(?:weight|gamma|scale|g)$", "1"),
    ("β", r"(?:norm|norm[0-9]+|layernorm|layer_norm|LayerNorm|_norm|Norm|ln|ln_[0-9a-z]+|ln[0-9]+|bn|bn[0-9]+|_BN|_bn|BatchNorm)"
          r"(?:\.|_)?(?:bias|beta)$", "1"),
    ("layer scale", r"(?:layer_scale_?\d*(?:_parameter|\.weight)?|lambda_?[12]|gamma_[12]|ls[12]\.gamma)$", "1"),
    ("bias", r"(?:^|\.|_)bias$", "1"),
    ("weight", r"(?:^|\.)weight$", "2345"),
)  # fmt: skip
PATTERNS = tuple((role, re.compile(pattern), axes) for role, pattern, axes in NAMED)


def named_role(name: str, shape: Sequence[int], siblings: Iterable[str] = ()) -> Role:
    """The role that a tensor's name, number of axes and neighbours give it.

    siblings: the names of all tensors; a vector called weight beside running statistics is a γ, whatever its module is called.
    """
    module, _, last = name.rpartition(".")
    beside = set(siblings)
    if len(shape) == 1 and last in ("weight", "bias") and f"{module}.running_var" in beside:
        return Role("γ" if last == "weight" else "β", "stands beside running statistics")
    for role, pattern, axes in PATTERNS:
        if str(len(shape)) in axes and pattern.search(name):
            return Role(
                role, f"the name ends like that of a {role}" if role not in ("γ", "β") else f"the name is that of a norm's {role}"
            )
    if len(shape) == 1 and last == "weight":
        return Role("γ", "a vector called weight scales channels")
    return Role(UNKNOWN, "no rule fits its name and shape")


def with_betas(roles: dict[str, Role]) -> dict[str, Role]:
    """A bias beside a γ is a β."""
    found = dict(roles)
    for name, role in roles.items():
        beside = name.removesuffix("weight") + "bias"
        if role.kind == "γ" and name.endswith("weight") and beside in roles and roles[beside].kind == "bias":
            found[beside] = Role("β", "a bias beside a γ")
    return found


@dataclass(frozen=True)
class Template:
    """A kind of block whose tensors are all known, so that the readers of each γ are known to be all of them.

    reads: from γ to the weights that read it. others: what else may stand in the block. final: the same outside of blocks.
    """

    name: str
    block: str
    reads: Mapping[str, tuple[str, ...]]
    others: tuple[str, ...]
    final: Mapping[str, tuple[str, ...]]
    transposed: bool = False


TEMPLATES = (
    Template(
        "Llama's blocks", r"^(?:.*\.)?layers\.\d+\.",
        {"input_layernorm.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
         "post_attention_layernorm.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")},
        ("self_attn.o_proj.weight", "mlp.down_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.bias",
         "self_attn.v_proj.bias", "self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.rotary_emb.inv_freq"),
        {"model.norm.weight": ("lm_head.weight", "model.embed_tokens.weight"), "norm.weight": ()},
    ),
    Template(
        "Llama's blocks with merged weights", r"^(?:.*\.)?layers\.\d+\.",
        {"input_layernorm.weight": ("self_attn.qkv_proj.weight",), "post_attention_layernorm.weight": ("mlp.gate_up_proj.weight",)},
        ("self_attn.o_proj.weight", "mlp.down_proj.weight", "self_attn.qkv_proj.bias", "self_attn.q_norm.weight",
         "self_attn.k_norm.weight"),
        {"model.norm.weight": ("lm_head.weight", "model.embed_tokens.weight"), "norm.weight": ()},
    ),
    Template(
        "Llama's blocks in GGUF", r"^blk\.\d+\.",
        {"attn_norm.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
         "ffn_norm.weight": ("ffn_gate.weight", "ffn_up.weight")},
        ("attn_output.weight", "ffn_down.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_q_norm.weight",
         "attn_k_norm.weight"),
        {"output_norm.weight": ("output.weight", "token_embd.weight")},
    ),
    Template(
        "GPT-2's blocks", r"^(?:.*\.)?h\.\d+\.",
        {"ln_1.weight": ("attn.c_attn.weight",), "ln_2.weight": ("mlp.c_fc.weight",)},
        ("ln_1.bias", "ln_2.bias", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias", "mlp.c_fc.bias",
         "mlp.c_proj.weight", "mlp.c_proj.bias", "attn.bias", "attn.masked_bias"),
        {"transformer.ln_f.weight": ("lm_head.weight", "transformer.wte.weight"), "ln_f.weight": ()},
        transposed=True,
    ),
)  # fmt: skip


def from_names(entries: Mapping[str, Entry], plus_one: bool | None = None) -> Structure:
    """Roles and pairs by the tables above; blocks that no template describes in full have no pairs."""
    roles = with_betas({name: named_role(name, entry.shape, entries) for name, entry in entries.items()})
    pairs: list[Pair] = []
    notes: list[str] = []
    for template in TEMPLATES:
        blocks: dict[str, set[str]] = {}
        for name in entries:
            if found := re.match(template.block, name):
                blocks.setdefault(found[0], set()).add(name[found.end() :])
        needed = {*template.reads, *(reader for readers in template.reads.values() for reader in readers)}
        for block, members in blocks.items():
            if needed <= members <= needed | {*template.others}:
                for gamma, readers in template.reads.items():
                    pairs.append(_pair(block, gamma, readers, template, entries, plus_one))
        if any(pair.rule == template.name for pair in pairs):
            for gamma, readers in template.final.items():
                own = [reader for reader in readers if reader in entries][:1]  # without a head of its own it is tied
                if gamma in entries and own:
                    made = _pair("", gamma, tuple(own), template, entries, plus_one)
                    untied = own == ["output.weight"]  # GGUF has a head only where it is not tied; elsewhere names do not tell
                    pairs.append(replace(made, transposed=frozenset(), complete=untied))
    if not pairs and any(role.kind == "γ" for role in roles.values()):
        notes.append("which weights read which γ is not known: no architecture in config.json, and no template fits the names")
    transposed = frozenset().union(*(pair.transposed for pair in pairs)) if pairs else frozenset()
    return Structure(roles, tuple(pairs), "names", tuple(notes), transposed)


def _pair(
    block: str, gamma: str, readers: Sequence[str], template: Template, entries: Mapping[str, Entry], plus_one: bool | None
) -> Pair:
    beta = (block + gamma).removesuffix("weight") + "bias"
    names = tuple(block + reader for reader in readers)
    return Pair(
        block + gamma, names, template.name, beta if beta in entries else None, plus_one,
        complete=not any("embed" in name or "embd" in name or "wte" in name for name in names),  # tied: used elsewhere
        transposed=frozenset(names) if template.transposed else frozenset(),
    )  # fmt: skip
