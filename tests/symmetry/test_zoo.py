"""Models nobody here wrote, from `transformers` configs: every group holds, and those that theory knows are there."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import normscope as ns

pytest.importorskip("transformers")

from tests.certify.test_zoo import GLOBAL, LOCAL_ONLY, model_of

MODELS = {**GLOBAL, **LOCAL_ONLY}
QUICK = ("ResNet", "ViT", "Swin", "BERT", "GPT-2", "LLaMA", "Qwen2", "T5 encoder", "ConvNeXt", "RegNet")


@cache
def report(name: str, mode: str) -> ns.SymmetryReport:
    kind, settings, example = MODELS[name]
    return ns.symmetries(model_of(kind, settings), example, mode=mode)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", QUICK)
def test_no_group_is_refuted(name):
    assert report(name, "eval").check() == []


@pytest.mark.full
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_no_group_is_refuted_in_either_mode(name, mode):
    assert report(name, mode).check() == []


def test_every_convolution_before_batch_normalization_is_scale_free():
    found = report("ResNet", "train")
    convolutions = {name for name in found.sizes if "convolution.weight" in name}
    assert {group.parameters[0] for group in found.of_kind("scale")} == convolutions
    assert not report("ResNet", "eval").of_kind("scale", "joint-scale")


ATTENTION = {  # dimension of the query–key and of the value–output group of a layer: width 16 in 4 heads
    "ViT": (4 * 4 * 4, 4 * 4 * 4),
    "BERT": (4 * 4 * 4, 4 * 4 * 4),
    "GPT-2": (4 * 4 * 4, 4 * 4 * 4),
    "T5 encoder": (4 * 4 * 4, 4 * 4 * 4),
    "LLaMA": (2 * 4, 2 * 4 * 4),  # rotary, two key-value heads: complex numbers a plane, and values shared by two heads
    "Qwen2": (2 * 4, 2 * 4 * 4),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_has_its_linear_groups(name):
    counts = [group.count for group in report(name, "eval").of_kind("linear")]
    assert sorted(counts) == sorted(ATTENTION[name] * 2)


@pytest.mark.parametrize("name", ["ViT", "BERT", "GPT-2"])
def test_key_biases_are_redundant(name):
    found = report(name, "eval")
    keys = [n for n in found.sizes if n.endswith(("key.bias", "k_proj.bias", "c_attn.bias"))]
    shifts = {group.parameters[0]: group for group in found.of_kind("shift") if len(group.parameters) == 1}
    assert keys and all(shifts[name].count == 16 for name in keys)


def test_what_is_written_to_a_pre_norm_stream_may_shift_along_ones():
    found = report("GPT-2", "eval")
    assert {f"h.{i}.{layer}.c_proj.weight" for i in range(2) for layer in ("attn", "mlp")} <= {
        group.parameters[0] for group in found.of_kind("weight-shift")
    }


def test_rms_norm_has_no_shifts():
    assert not report("LLaMA", "eval").of_kind("shift", "weight-shift")


def test_a_small_transformer_is_complete():
    from transformers import ViTConfig, ViTModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = ViTConfig(
            hidden_size=6, num_hidden_layers=1, num_attention_heads=2, intermediate_size=5, image_size=4, patch_size=2
        )
        model = ViTModel(config, add_pooling_layer=False).eval()
    found = ns.symmetries(model, torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(0)), mode="eval")
    assert found.check() == [] and found.completeness().complete
