"""Networks of `diffusers`, from configurations: convolutions with group norm, adaptive layer norm, attention, time steps."""

from __future__ import annotations

from typing import Any

import torch

from bench.wild.transformers_models import NotBuilt

Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(len(shape)))


TIME = torch.tensor([7, 7])
UNET = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 8}
TWO_DOWN = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
CROSS = {
    **UNET, "cross_attention_dim": 16, "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
IMAGE = {"sample": _random(4, 8, 8), "timestep": TIME}
LATENT = {"hidden_states": _random(4, 8, 8), "timestep": TIME}
TEXT = {"encoder_hidden_states": _random(5, 16)}

# class → (configuration, example)
MODELS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "UNet2DModel": (
        {
            **UNET,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        IMAGE,
    ),
    "UNet2DConditionModel": ({**CROSS, "in_channels": 4, "out_channels": 4}, {**IMAGE, **TEXT}),
    "UNet1DModel": (
        {
            "sample_size": 16,
            "in_channels": 2,
            "out_channels": 2,
            "block_out_channels": (8, 8),
            "layers_per_block": 1,
            "extra_in_channels": 8,
            "time_embedding_type": "fourier",
            "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
        },
        {"sample": _random(2, 16), "timestep": TIME},
    ),
    "UNet3DConditionModel": (
        {
            **UNET,
            "cross_attention_dim": 16,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        {"sample": _random(4, 2, 8, 8), "timestep": TIME, **TEXT},
    ),
    "AutoencoderKL": (
        {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4, "sample_size": 16, **TWO_DOWN},
        {"sample": _random(3, 16, 16)},
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        {"sample": _random(3, 16, 16)},
    ),
    "AutoencoderDC": (
        {
            "in_channels": 3,
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        {"sample": _random(3, 16, 16)},
    ),
    "ConsistencyDecoderVAE": ({}, {"sample": _random(3, 16, 16)}),
    "VQModel": (
        {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4, **TWO_DOWN},
        {"sample": _random(3, 16, 16)},
    ),
    "AsymmetricAutoencoderKL": (
        {
            "down_block_out_channels": (16, 32),
            "up_block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "latent_channels": 4,
            "sample_size": 16,
            **TWO_DOWN,
        },
        {"sample": _random(3, 16, 16)},
    ),
    "ControlNetModel": (
        {
            **{key: value for key, value in CROSS.items() if key not in ("up_block_types", "sample_size")},
            "in_channels": 4,
            "conditioning_embedding_out_channels": (16, 32),
        },
        {**IMAGE, **TEXT, "controlnet_cond": _random(3, 16, 16)},
    ),
    "DiTTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 10,
            "norm_num_groups": 4,
        },
        {**LATENT, "class_labels": torch.tensor([1, 1])},
    ),
    "Transformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": 8,
            "patch_size": 2,
            "norm_type": "ada_norm_zero",
            "num_embeds_ada_norm": 10,
            "norm_num_groups": 4,
        },
        {**LATENT, "class_labels": torch.tensor([1, 1])},
    ),
    "PixArtTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "sample_size": 8,
            "patch_size": 2,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
        {**LATENT, **TEXT},
    ),
    "SD3Transformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": 8,
            "patch_size": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 8,
        },
        {**LATENT, **TEXT, "pooled_projections": _random(16)},
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        {
            "hidden_states": _random(6, 4),
            "timestep": torch.tensor([0.5, 0.5]),
            **TEXT,
            "pooled_projections": _random(16),
            "img_ids": torch.arange(18.0).reshape(6, 3).long(),
            "txt_ids": torch.zeros(5, 3).long(),
        },
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_projection_dim": 16,
            "joint_attention_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 16,
        },
        {**LATENT, **TEXT},
    ),
    "SanaTransformer2DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "sample_size": 8,
        },
        {**LATENT, **TEXT},
    ),
    "HunyuanDiT2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 8,
            "hidden_size": 16,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "cross_attention_dim_t5": 16,
            "pooled_projection_dim": 16,
            "text_len": 5,
            "text_len_t5": 5,
        },
        {
            **LATENT,
            **TEXT,
            "text_embedding_mask": torch.ones(2, 5),
            "encoder_hidden_states_t5": _random(5, 16),
            "text_embedding_mask_t5": torch.ones(2, 5),
            "image_meta_size": torch.ones(2, 6).long(),
            "style": torch.zeros(2).long(),
        },
    ),
    "PriorTransformer": (
        {**HEADS, "embedding_dim": 16, "num_embeddings": 5, "additional_embeddings": 4},
        {"hidden_states": _random(16), "timestep": TIME, "proj_embedding": _random(16), "encoder_hidden_states": _random(5, 16)},
    ),
    "T5FilmDecoder": (
        {"input_dims": 8, "targets_length": 6, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 24},
        {"encodings_and_masks": _random(3)},
    ),
    "CogVideoXTransformer3DModel": (
        {
            **HEADS,
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "patch_size": 2,
            "max_text_seq_length": 5,
        },
        {"hidden_states": _random(2, 4, 8, 8), "timestep": TIME, **TEXT},
    ),
}


def names() -> list[str]:
    return sorted(MODELS)


def build(name: str) -> Built:
    """The network of that class, weights drawn at random (those that start at zero too), and an example that it runs on."""
    import diffusers

    settings, example = MODELS[name]
    try:
        torch.manual_seed(0)
        model = getattr(diffusers, name)(**settings).eval()
        with torch.no_grad():
            for value in model.parameters():
                if not bool(value.any()):  # adaptive norms start as the identity
                    value.normal_(0, 0.02)
            model(**example)
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}") from error
    return model, example
