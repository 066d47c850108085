"""What the configurations of two checkpoints say about their functions, and where they disagree."""

from __future__ import annotations

import re
from typing import Any

from normscope._checkpoint.opening import Checkpoint

IRRELEVANT = re.compile(
    r"^(?:_.*|architectures|transformers_version|torch_dtype|dtype|use_cache|.*token_id|.*token_ids|id2label|label2id|.*dropout.*|"
    r"initializer_.*|max_length|min_length|output_.*|return_dict.*|tie_word_embeddings|max_position_embeddings|pretraining_tp|"
    r"problem_type|gradient_checkpointing|attn_implementation|task_specific_params|auto_map|quantization_config|vocab_size|chunk_.*|"
    r"bos.*|eos.*|pad.*|sep.*|name_or_path|is_decoder|add_cross_attention|pruned_heads|summary_.*|scale_attn.*|model_type)$"
)
MEANS = re.compile(r"eps|epsilon|theta|rope|rotary|heads?$|head_dim|activation|hidden_act|window|multiplier|scalar|softcap")
GGUF_KEYS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
}  # fmt: skip


def settings(opened: Checkpoint) -> dict[str, Any]:
    """What a configuration says about the function, under the names of config.json."""
    if opened.format == "gguf":
        arch = opened.about.get("general.architecture")
        given = {name: opened.about.get(f"{arch}.{key}") for key, name in GGUF_KEYS.items()}
        return {name: value for name, value in given.items() if value is not None}
    found = {name: value for name, value in opened.config.items() if not IRRELEVANT.match(name) and value is not None}
    nested = found.get("rope_parameters")
    if isinstance(nested, dict) and "rope_theta" in nested:
        found.setdefault("rope_theta", nested["rope_theta"])
    return found


def configured_apart(a: Checkpoint, b: Checkpoint) -> tuple[list[str], list[str]]:
    """Settings that make another function, and others that differ and may."""
    one, other = settings(a), settings(b)
    certain: list[str] = []
    possible: list[str] = []
    for name in sorted(one.keys() & other.keys()):
        x, y = one[name], other[name]
        close = isinstance(x, (int, float)) and isinstance(y, (int, float)) and abs(x - y) <= 1e-6 * max(abs(x), abs(y))
        if x != y and not close:
            (certain if MEANS.search(name) else possible).append(f"{name} is {str(x)[:40]} in A and {str(y)[:40]} in B")
    return certain, possible
