"""Small models of transformers, with random weights whose γ differ from 1."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 50}
GROUPED = {**SMALL, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {**GROUPED, **TOKENS}),
    "Mistral": ("MistralForCausalLM", {**GROUPED, **TOKENS}),
    "Qwen2": ("Qwen2ForCausalLM", {**GROUPED, **TOKENS}),
    "Gemma": ("GemmaForCausalLM", {**GROUPED, **TOKENS, "head_dim": 4}),
    "Gemma2": ("Gemma2ForCausalLM", {**GROUPED, **TOKENS, "head_dim": 4}),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, **TOKENS, "head_dim": 4}),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 50, **TOKENS}),
    "GPTNeoX": ("GPTNeoXForCausalLM", {**SMALL, **TOKENS}),
    "Bert": ("BertModel", {**SMALL, **TOKENS}),
    "ViT": ("ViTModel", {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 16, "patch_size": 4}),
    "Mixtral": ("MixtralForCausalLM", {**GROUPED, **TOKENS, "num_local_experts": 2}),
    "Phi": ("PhiForCausalLM", {**GROUPED, **TOKENS}),
    "StableLm": ("StableLmForCausalLM", {**GROUPED, **TOKENS}),
    "Starcoder2": ("Starcoder2ForCausalLM", {**GROUPED, **TOKENS}),
    "Granite": ("GraniteForCausalLM", {**GROUPED, **TOKENS}),
    "OPT": ("OPTForCausalLM", {**{k: v for k, v in SMALL.items() if k != "intermediate_size"}, "ffn_dim": 32, "word_embed_proj_dim": 16, **TOKENS}),
    "Falcon": ("FalconForCausalLM", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, **TOKENS}),
    "Bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": 50, **TOKENS}),
    "GPTJ": ("GPTJForCausalLM", {"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 50, **TOKENS}),
    "Olmo2": ("Olmo2ForCausalLM", {**GROUPED, **TOKENS}),
}  # fmt: skip


@cache
def _made(name: str, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    kind, settings = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model, {**model.config.to_dict(), "architectures": [kind]}


def built(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A model, in eval mode, and its configuration as config.json has it; not to be changed."""
    return _made(name, seed)
