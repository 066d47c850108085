"""What the configurations of two checkpoints say about their functions, and where they disagree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from normscope._checkpoint.opening import Checkpoint

IRRELEVANT = re.compile(
    r"^(?:_.*|architectures|transformers_version|torch_dtype|dtype|use_cache|id2label|label2id|initializer_.*|max_length|min_length|"
    r"(?:bos|eos|sep|cls|unk|decoder_start|forced_bos|forced_eos)_token_id|.*dropout.*|.*layerdrop|.*drop_path.*|.*pdrop|"
    r"output_(?:attentions|hidden_states|past|scores|router_logits)|return_dict.*|tie_word_embeddings|pretraining_tp|problem_type|"
    r"gradient_checkpointing|attn_implementation|task_specific_params|auto_map|quantization_config|vocab_size|"
    r"chunk_size_feed_forward|name_or_path|add_cross_attention|pruned_heads)$"
)
ROTATED = ("max_position_embeddings", "pad_token_id")  # say nothing where positions are rotations that do not depend on them
FIXED_ROTATIONS = ("default", "linear", "llama3")
MEANS = re.compile(
    r"eps|epsilon|theta|rope|rotary|heads?$|head_dim|activation|hidden_act|window|multiplier|scalar|softcap|scale_attn|is_decoder"
)
NOT_OF_FUNCTIONS = ("auto_map", "quantization_config", "torch_dtype", "dtype")
GGUF_KEYS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta", "attention.sliding_window": "sliding_window",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def known_configuration(config: Mapping[str, Any]) -> Any:
    """What transformers makes of a config.json, its defaults included; None where it does not know the architecture.

    Raises ImportError without transformers, and whatever an architecture raises for a strange configuration.
    """
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[kind].from_dict({name: value for name, value in config.items() if name not in NOT_OF_FUNCTIONS})


def completed(opened: Checkpoint) -> Mapping[str, Any]:
    """A configuration with the defaults of its architecture, where transformers knows it."""
    try:
        known = known_configuration(opened.config)
    except Exception:  # no transformers, or a configuration that its architecture refuses
        known = None
    return opened.config if known is None else known.to_dict()


def settings_tied(opened: Checkpoint) -> bool | None:
    """Whether the head is the embedding, as far as a configuration says."""
    tied = completed(opened).get("tie_word_embeddings")
    return tied if isinstance(tied, bool) else None


def settings(opened: Checkpoint) -> dict[str, Any]:
    """What a configuration says about the function, under the names of config.json, those of nested ones with dots."""
    if opened.format == "gguf":
        arch = opened.about.get("general.architecture")
        given = {name: opened.about.get(f"{arch}.{key}") for key, name in GGUF_KEYS.items()}
        return {name: value for name, value in given.items() if value is not None}
    found = _flat(completed(opened))
    if "rope_parameters.rope_theta" in found:
        found["rope_theta"] = found.pop("rope_parameters.rope_theta")
    rotations = [value for name, value in found.items() if name.endswith("rope_type")]
    if rotations and all(value in FIXED_ROTATIONS for value in rotations):
        found = {name: value for name, value in found.items() if name not in ROTATED}
    return found


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        if IRRELEVANT.match(str(name)):
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = list(value) if isinstance(value, tuple) else value
    return found


def configured_apart(a: Checkpoint, b: Checkpoint) -> tuple[list[str], list[str]]:
    """Settings that make another function, and others that differ and may.

    A setting that one side does not have may have any default there. GGUF says little: what it leaves out is not held against it.
    """
    one, other = settings(a), settings(b)
    certain: list[str] = []
    possible: list[str] = []
    partial = "gguf" in (a.format, b.format) or not one or not other
    for name in sorted(one.keys() & other.keys() if partial else one.keys() | other.keys()):
        x, y = one.get(name), other.get(name)
        close = isinstance(x, (int, float)) and isinstance(y, (int, float)) and abs(x - y) <= 1e-6 * max(abs(x), abs(y))
        if x != y and not close:
            in_both = name in one and name in other
            (certain if in_both and MEANS.search(name) else possible).append(f"{name} is {_said(x)} in A and {_said(y)} in B")
    rotations = [value for found in (one, other) for name, value in found.items() if name.endswith("rope_type")]
    if partial and one and other and any(value != "default" for value in rotations):
        possible.append(f"rope_type is {rotations[0]} in config.json, which was not compared with GGUF")
    return certain, possible


def _said(value: object) -> str:
    return "not set" if value is None else str(value)[:40]


def built_apart(a: nn.Module | None, b: nn.Module | None) -> list[str]:
    """Where two modules are built differently, dropout aside: layers of another kind, or with other settings."""
    if a is None or b is None:
        return []
    mine, theirs = (
        {path: _layer(module) for path, module in model.named_modules() if not isinstance(module, _DropoutNd | nn.Identity)}
        for model in (a, b)
    )
    apart = [path for path in dict.fromkeys([*mine, *theirs]) if mine.get(path) != theirs.get(path)]
    return [f"{path or 'the model'} is {mine.get(path, 'missing')} in A and {theirs.get(path, 'missing')} in B" for path in apart]


def _layer(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"
