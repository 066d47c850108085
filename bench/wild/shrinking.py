"""Configurations of networks, made small: the same architecture with narrow layers, few of them, and few tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

WIDTH, HEADS, HEAD_WIDTH, TOKENS = 32, 4, 8, 64

Shrink = Callable[[Any], Any]


def _at_most(most: int) -> Shrink:
    return lambda value: min(value, most) if value > 0 else value


def _scaled(least: int) -> Shrink:
    """Sizes stage by stage in their own proportions, the smallest `least`; one size alone is the common width."""

    def shrink(value: Any) -> Any:
        if isinstance(value, int):
            return value if value <= WIDTH else WIDTH
        smallest = max(1, min(value))
        return [max(1, size * least // smallest) if smallest > least else size for size in value]

    return shrink


def _each(most: int) -> Shrink:
    return lambda value: min(value, most) if isinstance(value, int) else [min(size, most) for size in value]


def _heads(value: Any) -> Any:
    return (HEADS if value > 1 else 1) if isinstance(value, int) else [min(size, 2) for size in value]


# the first pattern that matches a setting's name says what becomes of it; a setting that none matches stays
SETTINGS: tuple[tuple[str, Shrink], ...] = (
    (r"^(vocab_size(_or_config_json_file)?|n_vocab|.*_vocab_size|vocab_size_per_layer_input)$", _at_most(TOKENS)),
    (r"^(type_vocab_size|num_labels)$", _at_most(2)),
    (r"(token_id|token_index)$", lambda value: value % (TOKENS - 4) if value >= TOKENS else value),
    (r"^(max_position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx|max_seq_len)$", _at_most(128)),
    (r"(key_value_heads|kv_heads|kv_n_heads)$", lambda value: 2 if value > 1 else 1),
    (r"(key_value_groups|kv_groups|n_group|topk_group|n_groups|mamba_n_groups|mamba_ngroups)$", _at_most(1)),
    (r"(mamba_n_heads|mamba_num_heads|linear_num_key_heads|linear_num_value_heads|state_size|ssm_state_size)$", _at_most(8)),
    (r"(mamba_d_head|mamba_head_dim|linear_key_head_dim|linear_value_head_dim|d_state|time_step_rank)$", _at_most(8)),
    (r"(attention_heads|num_heads|n_heads?|nhead|_heads)$", _heads),
    (r"^qk_head_dim$", _at_most(12)),
    (r"^qk_rope_head_dim$", _at_most(4)),
    (r"^(.*head_dim|head_size|d_kv|.*head_width|attention_head_size|v_head_dim)$", _at_most(HEAD_WIDTH)),
    (r"(experts_per_tok(en)?|num_experts_per_.*|moe_topk|moe_top_k|top_k|n_activated_experts|experts_top_k)$", _each(2)),
    (r"(experts|n_routed_experts|num_local_experts|moe_num_experts)$", _each(4)),
    (r"(lora_rank|_rank)$", _at_most(8)),
    (r"^(num_feat_extract_layers|num_conv_layers)$", lambda value: value),  # as many as there are kernel sizes
    (r"^attn_layer_period$", _at_most(2)),
    (r"^attn_layer_offset$", _at_most(1)),
    (r"^(depths|layers|num_blocks|blocks|layer_repeats)$", _each(1)),
    (r"(encoder_layers|decoder_layers|hidden_layers|_layers|^n_layers?|^depth|num_layers|^num_stages_layers)$", _each(2)),
    (r"^(hidden_sizes|embed_dims?|embedding_dims|dims|neck_hidden_sizes|encoder_hidden_dims|stem_channels)$", _scaled(8)),
    (r"^(hidden_dim|hidden_size|d_model|n_embd|dim|width|embed_dim|embedding_size|d_embed|emb_dim|embedding_dim)$", _each(WIDTH)),
    (r"(hidden_size|hidden_dim|_dim|_width|hidden_channels)$", _each(WIDTH)),
    (r"(intermediate_size|ffn_dim|d_ff|n_inner|inner_dim|dim_feedforward|mlp_hidden|ffn_hidden_size)$", _at_most(48)),
    (r"^(image_size|img_size|input_size|crop_size)$", _each(32)),
    (r"^(num_frames|frames_per_clip)$", _at_most(8)),
    (r"^(conv_dim)$", _each(16)),
    (r"(num_queries|num_object_queries|image_seq_length|num_query_tokens|num_latents|d_latents)$", _each(16)),
    (r"(chunk_size|chunk_length|mamba_chunk_size|sliding_window|attention_window|block_size)$", _each(4)),
)  # fmt: skip


def shrunk_value(name: str, value: Any) -> Any:
    """A setting of that name, made small; what is no whole number or list of them stays."""
    sizes = value if isinstance(value, (list, tuple)) else [value]
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        return value
    for pattern, shrink in SETTINGS:
        if re.search(pattern, name):
            try:
                return shrink(list(value) if isinstance(value, tuple) else value)
            except TypeError:  # a list where a number is usual, or the reverse
                return [shrink(size) for size in sizes] if len(sizes) > 1 or isinstance(value, (list, tuple)) else value
    return value


def by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting that has a pattern, one layer per distinct kind of layer, rotary sections that fit the head's width."""
    small = {name: shrunk_value(name, value) for name, value in settings.items()}
    kinds = [name for name in ("layer_types", "layers_block_type", "mlp_layer_types") if isinstance(small.get(name), (list, tuple))]
    if kinds:
        places = _one_of_each([settings[name] for name in kinds])
        for name in kinds:
            small[name] = [settings[name][place] for place in places]
        for name in ("num_hidden_layers", "n_layers", "num_layers"):
            if name in small:
                small[name] = len(places)
    if isinstance(small.get("attention_types"), (list, tuple)) and "num_layers" in small:  # of GPT-Neo: [[kinds, how often]]
        small["attention_types"], small["num_layers"] = [[["global", "local"], 1]], 2
    if isinstance(small.get("per_layer_config"), dict):
        small["per_layer_config"] = {}
    count = next((name for name in ("num_hidden_layers", "n_layers", "num_layers") if isinstance(settings.get(name), int)), None)
    if count is not None and "depths" not in settings:  # which are of stages, not of layers
        for name, value in small.items():  # one entry per layer
            if isinstance(value, (list, tuple)) and len(value) == settings[count] > small[count]:
                small[name] = value[: small[count]]
    for name in ("width_coefficient", "depth_coefficient"):  # of EfficientNet
        if isinstance(small.get(name), float):
            small[name] = 0.25
    if isinstance(small.get("rope_parameters"), dict) and "mrope_section" in small["rope_parameters"]:
        small["rope_parameters"] = {**small["rope_parameters"], "mrope_section": [2, 1, 1]}
    return small


def _one_of_each(lists: list[list[Any]]) -> list[int]:
    """Positions that show every combination of kinds once, two at least."""
    combinations = list(zip(*lists, strict=False))
    first = sorted({combination: place for place, combination in reversed(list(enumerate(combinations)))}.values())
    return first if len(first) > 1 else list(range(min(2, len(combinations))))


def few_layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As it is published but for the number of layers and words."""
    kept = r"(layers?|depths?|^n_layers?|vocab_size|token_id|token_index|layer_types|chunk_size)$"
    small = by_name(settings)
    return {name: small[name] if re.search(kept, name) else value for name, value in settings.items()}


def narrow(settings: Mapping[str, Any], factor: int = 16) -> dict[str, Any]:
    """Every width divided by one factor, which keeps their proportions; layers and words as above."""
    widths = r"(size|dim|dims|width|channels|d_model|n_embd|d_ff|d_kv|ffn|rank|filters|sizes|features|planes)$"
    fixed = r"(vocab|patch|image|kernel|window|num_channels|crop|stride|in_channels|batch|chunk|grid|input_size|merge)"

    def divided(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [divided(name, size) for size in value]
        if isinstance(value, bool) or not isinstance(value, int) or value < 2 * factor:
            return value
        return value // factor

    return {
        name: divided(name, value) if re.search(widths, name) and not re.search(fixed, name) else value
        for name, value in few_layers(settings).items()
    }


def with_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """By name, with sections of rotary angles that the configuration leaves to the model."""
    small = by_name(settings)
    if isinstance(rotary := small.get("rope_parameters"), dict):
        small["rope_parameters"] = {**rotary, "mrope_section": [2, 1, 1]}
    return small


WAYS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "by name": by_name, "with sections": with_sections, "narrow": narrow, "few layers": few_layers
}  # fmt: skip


def ways() -> Iterator[tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]]:
    """Ways to shrink, the smallest networks first."""
    yield from WAYS.items()
