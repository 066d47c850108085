"""Roles and pairs: from the graph where transformers knows the architecture, else from names, else unknown."""

from __future__ import annotations

import pytest
import torch

from normscope._checkpoint.architecture import from_architecture
from normscope._checkpoint.entries import Held
from normscope._checkpoint.structure import Structure, from_names, named_role
from tests.checkpoint.models import ARCHITECTURES, built

transformers = pytest.importorskip("transformers")

# architecture: a γ, the weights that read it, whether γ = 1 + w, whether it may move into them
EXPECTED = {
    "Llama": ("model.layers.0.input_layernorm.weight", ("q_proj", "k_proj", "v_proj"), False, True),
    "Gemma": ("model.layers.1.post_attention_layernorm.weight", ("gate_proj", "up_proj"), True, True),
    "Gemma2": ("model.layers.0.post_attention_layernorm.weight", (), True, False),
    "Qwen3": ("model.layers.0.self_attn.q_norm.weight", (), False, False),
    "GPT2": ("transformer.h.0.ln_1.weight", ("c_attn",), False, True),
    "Bert": ("encoder.layer.0.output.LayerNorm.weight", ("query", "key", "value"), False, False),
    "ViT": ("layers.0.layernorm_after.weight", ("fc1",), False, True),
    "Mixtral": ("model.layers.0.post_attention_layernorm.weight", ("gate",), False, False),
    "Phi": ("model.layers.0.input_layernorm.weight", ("q_proj", "k_proj", "v_proj", "fc1"), False, True),
}


def structure_of(name: str) -> Structure | str:
    model, config = built(name)
    return from_architecture(config, {key: Held(key, value) for key, value in model.state_dict().items()})


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", EXPECTED)
def test_pairs_are_found_in_the_graph(name):
    gamma, readers, plus_one, complete = EXPECTED[name]
    found = structure_of(name)
    assert isinstance(found, Structure), found
    (pair,) = (pair for pair in found.pairs if pair.gamma == gamma)
    assert {reader.split(".")[-2] for reader in pair.readers} == set(readers)
    assert pair.plus_one == plus_one and pair.complete == complete
    assert found.roles[gamma].kind == "γ"


def test_a_tied_head_is_not_complete():
    found = structure_of("Gemma")
    assert isinstance(found, Structure)
    (final,) = (pair for pair in found.pairs if pair.gamma == "model.norm.weight")
    assert final.readers == ("model.embed_tokens.weight",) and not final.complete


def test_conv1d_is_stored_transposed():
    found = structure_of("GPT2")
    assert isinstance(found, Structure) and "transformer.h.0.mlp.c_fc.weight" in found.transposed


def test_names_agree_with_the_graph_where_both_speak():
    for name in ("Llama", "Qwen3", "GPT2"):
        model, _ = built(name)
        entries = {key: Held(key, value) for key, value in model.state_dict().items()}
        graph, names = structure_of(name), from_names(entries)
        assert isinstance(graph, Structure)
        ours = {
            pair.gamma: (set(pair.readers), pair.complete)
            for pair in graph.pairs
            if pair.complete and "head" not in str(pair.readers)
        }
        theirs = {pair.gamma: (set(pair.readers), pair.complete) for pair in names.pairs if pair.complete}
        assert ours == theirs and ours


def test_a_block_that_no_template_knows_has_no_pairs():
    model, _ = built("Gemma2")
    entries = {key: Held(key, value) for key, value in model.state_dict().items()}
    assert not [pair for pair in from_names(entries).pairs if "layers" in pair.gamma]


CASES = {
    "strange.thing": ((3, 4), "unknown"),
    "conv1_BN.weight": ((8,), "γ"),
    "features.1.weight": ((8,), "γ"),
    "a.lora_A.default.weight": ((4, 16), "lora a"),
    "x.running_var": ((8,), "running variance"),
    "model.layers.0.mlp.gate.weight": ((4, 16), "router"),
    "blk.0.ffn_down.weight": ((16, 32), "down"),
    "stages.0.layers.0.layer_scale_parameter": ((16,), "layer scale"),
    "encoder.layer.0.layer_scale1.lambda1": ((16,), "layer scale"),
    "encoder.layer.0.lambda_2": ((16,), "layer scale"),
    "layer.weight_scale_inv": ((1, 1), "scale of a quantized weight"),
}


@pytest.mark.parametrize("name", CASES)
def test_roles_by_name(name):
    shape, role = CASES[name]
    assert named_role(name, shape).kind == role


HOSTILE = {
    "no type": {},
    "unknown": {"model_type": "nobody-knows"},
    "code": {"model_type": "custom", "auto_map": {"AutoModel": "evil.py--Model"}},
    "endless": {"model_type": "llama", "num_hidden_layers": 10**9},
    "endless inside": {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 10**9}},
    "nonsense": {"model_type": "llama", "hidden_size": "wide"},
    "another model": {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 5,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 4,
    },
    "not a class": {"model_type": "bert", "architectures": ["os"]},
}


@pytest.mark.parametrize("config", HOSTILE.values(), ids=HOSTILE)
def test_a_strange_configuration_is_a_reason_not_an_error(config):
    entries = {"a.weight": Held("a.weight", torch.ones(3, 3)), "b.weight": Held("b.weight", torch.ones(3))}
    assert isinstance(from_architecture(config, entries), str)


def test_architectures_are_many():
    assert len(ARCHITECTURES) >= 10
