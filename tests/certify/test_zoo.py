"""Models nobody here wrote, from `transformers` configs: traced, certified, and above every sampled quotient."""

import pytest
import torch

import normscope as ns

transformers = pytest.importorskip("transformers")


def images(size: int) -> torch.Tensor:
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))


def embeddings(width: int) -> dict[str, torch.Tensor]:
    return {"inputs_embeds": torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0))}


def small(**more):  # the settings that most transformer configs share
    return {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, **more}


GLOBAL = {
    "ResNet": (
        "ResNet",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "embedding_size": 8, "layer_type": "basic"},
        images(32),
    ),
    "ConvNeXt": ("ConvNext", {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]}, images(64)),
    "MobileNetV2": ("MobileNetV2", {"depth_multiplier": 0.35, "image_size": 32}, images(32)),
    "RegNet": (
        "RegNet",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "embedding_size": 8, "groups_width": 8, "layer_type": "x"},
        images(32),
    ),
    "ViT": ("ViT", small(image_size=16, patch_size=4), images(16)),
    "Swin": (
        "Swin",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4},
        images(16),
    ),
    "BERT": ("Bert", small(), embeddings(16)),
    "GPT-2": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 4, "use_cache": False}, embeddings(16)),
    "LLaMA": ("Llama", small(num_key_value_heads=2, vocab_size=50, use_cache=False), embeddings(16)),
    "Qwen2": ("Qwen2", small(num_key_value_heads=2, vocab_size=50, use_cache=False), embeddings(16)),
    "T5 encoder": (
        "T5Encoder",
        {"d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 32, "d_kv": 4, "vocab_size": 50},
        embeddings(16),
    ),
}
LOCAL_ONLY = {
    "EfficientNet": (
        "EfficientNet",
        {"width_coefficient": 0.5, "depth_coefficient": 0.3, "image_size": 32, "hidden_dim": 640},
        images(32),
    )
}


def model_of(kind: str, settings: dict) -> torch.nn.Module:
    config = getattr(transformers, "T5Config" if kind == "T5Encoder" else f"{kind}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}Model")(config).eval()


def check_pairs(model, example, bracket: ns.Bracket, scale: float) -> None:
    """Random pairs, with the model itself in double precision."""
    model = model.double()
    generator = torch.Generator().manual_seed(1)
    point = example["inputs_embeds"] if isinstance(example, dict) else example
    for _ in range(4):
        ends = [
            point.double() + 0.5 * scale * step / step.norm() for step in torch.randn(2, *point.shape, generator=generator).double()
        ]
        with torch.no_grad():
            outputs = [model(inputs_embeds=end) if isinstance(example, dict) else model(end) for end in ends]
        change = (outputs[0].last_hidden_state - outputs[1].last_hidden_state).norm() / (ends[0] - ends[1]).norm()
        assert float(change) <= float(bracket.upper)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", GLOBAL)
def test_finite_everywhere(name):
    kind, settings, example = GLOBAL[name]
    model = model_of(kind, settings)
    bracket = ns.lipschitz(model, example, output="last_hidden_state", effort=0.1)
    assert bracket.upper.finite and 0 < bracket.lower <= bracket.upper
    check_pairs(model, example, bracket, 1.0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [*GLOBAL, *LOCAL_ONLY])
def test_finite_on_a_ball(name):
    kind, settings, example = {**GLOBAL, **LOCAL_ONLY}[name]
    model = model_of(kind, settings)
    center = (example["inputs_embeds"] if isinstance(example, dict) else example)[0]
    bracket = ns.lipschitz(model, example, region=ns.Ball(center, 0.01), output="last_hidden_state", effort=0.1)
    assert bracket.upper.finite and bracket.lower <= bracket.upper
    check_pairs(model, example, bracket, 0.01)


@pytest.mark.full
def test_squeeze_and_excite_needs_a_region_and_says_so():
    kind, settings, example = LOCAL_ONLY["EfficientNet"]
    with pytest.raises(ns.Refusal, match="region"):  # its outputs are so small that no growth shows
        ns.lipschitz(model_of(kind, settings), example, output="last_hidden_state", effort=0.1)


def test_token_ids_are_refused_with_advice():
    with pytest.raises(ns.InputError, match="inputs_embeds"):
        ns.lipschitz(model_of("GPT2", GLOBAL["GPT-2"][1]), {"input_ids": torch.zeros(1, 5, dtype=torch.long)})
