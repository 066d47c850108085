"""What looks the same and is not, and what looks different and is the same: found by attacks, each with its smallest case."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope._checkpoint.configurations import configured_apart
from normscope._checkpoint.opening import Checkpoint
from tests.checkpoint.models import built
from tests.checkpoint.test_diff import SIZE, compared, layer, llama

PLAIN = {"a.weight": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), "norm.weight": torch.ones(4)}


# weights ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h.0.attn.c_attn.bias", "pool.attn.bias"])
def test_a_bias_of_attention_is_no_mask(tmp_path, name):
    one, other = ({**PLAIN, name: torch.full((4,), value)} for value in (0.0, 1.0))
    found = compared(tmp_path, one, other)
    assert found.same is False and found.first == name, found.explanation
    assert compared(tmp_path, PLAIN, one).same is None


def test_masks_and_counters_are_left_out(tmp_path):
    stored = {**PLAIN, "h.0.attn.bias": torch.ones(1, 1, 8, 8).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert compared(tmp_path, PLAIN, stored).same is True


@pytest.mark.parametrize(("one", "other"), [
    (torch.tensor([[1 + 2j, 3 - 1j]]), torch.tensor([[1 - 6j, 3 + 3j]])),
    (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
    (torch.tensor([2**63 + 1], dtype=torch.uint64), torch.tensor([2**63 + 2], dtype=torch.uint64)),
    (torch.tensor([True]), torch.tensor([False])),
], ids=["imaginary parts", "int64", "uint64", "bool"])  # fmt: skip
def test_numbers_that_float64_does_not_hold_are_told_apart(tmp_path, one, other):
    found = compared(tmp_path, {"w": one}, {"w": other})
    assert found.same is False and found.rows[0].change > 0 and "blocks" not in found.explanation
    assert compared(tmp_path, {"w": one}, {"w": one.clone()}).explanation == "the same function: all tensors are equal"


def test_the_change_of_complex_numbers(tmp_path):
    one, other = torch.randn(2, 3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    row = compared(tmp_path, {"w": one}, {"w": other}).rows[0]
    step = (other - one).to(torch.complex128)
    assert row.spectral_change == pytest.approx(float(torch.linalg.matrix_norm(step, 2)))
    assert row.largest_change == pytest.approx(float(step.abs().max()))
    assert row.change == pytest.approx(float(step.norm() / one.norm()))


def test_complex_numbers_are_rounded_and_transposed_as_others_are(tmp_path):
    one = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    torch.save({"h.0.weight": one.to(torch.complex128) / 3}, tmp_path / "a.pt")
    torch.save({"h.0.weight": one.to(torch.complex128).div(3).to(torch.complex64)}, tmp_path / "b.pt")
    assert ns.diff(tmp_path / "a.pt", tmp_path / "b.pt").same is True
    assert compared(tmp_path, {"h.0.weight": one}, {"h.0.weight": one.T.contiguous()}).same is True


def test_complex_gains_are_no_gains_of_a_real_normalizer(tmp_path):
    state, config = llama()
    gain = layer(0, "input_layernorm")
    complex_state = {**state, gain: state[gain] * (1 + 1j)}
    assert compared(tmp_path, state, complex_state, config).same is False
    report = ns.checkpoint(tmp_path / "b")
    assert gain not in {pair.gamma for pair in report.pairs} and report.pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.complex64])
def test_tensors_of_nan_are_equal_to_themselves(tmp_path, dtype):
    state = {"w": torch.full((3,), float("nan")).to(dtype)}
    assert compared(tmp_path, state, state).explanation == "the same function: all tensors are equal"


@pytest.mark.parametrize(("size", "dtype"), [(1e-9, torch.float16), (1e-7, torch.float16), (1e-44, torch.bfloat16)])
def test_numbers_too_small_for_a_type_are_not_rounded_but_lost(tmp_path, size, dtype):
    one = {**PLAIN, "a.weight": size * PLAIN["a.weight"]}
    found = compared(tmp_path, one, {name: value.to(dtype) for name, value in one.items()})
    assert found.same is False and found.first == "a.weight", found.explanation


def test_matrices_transposed_into_eight_bits_are_another_function(tmp_path):
    one = {**PLAIN, "a.weight": torch.randn(4, 6, generator=torch.Generator().manual_seed(1))}
    assert compared(tmp_path, one, {**one, "a.weight": one["a.weight"].T.to(torch.float8_e4m3fn)}).same is False


def test_gains_that_changed_in_the_last_bit_have_not_moved(tmp_path):
    """In bfloat16 the last bit is up to 0.8 %: as much as products of γ and its readers may be apart by two roundings."""
    state, _ = llama()
    one = {name: value.bfloat16() for name, value in state.items()}
    other = {
        name: (value.view(torch.int16) + 1).view(torch.bfloat16) if "layernorm" in name else value for name, value in one.items()
    }
    found = compared(tmp_path, one, other)
    assert found.same is False and found.first == layer(0, "input_layernorm"), found.explanation


@pytest.mark.parametrize(("partly", "same"), [(False, True), (True, None)])
def test_gains_moved_in_bfloat16_are_told_where_one_rounding_explains_them(tmp_path, partly, same):
    state, _ = llama()
    one = {name: value.bfloat16() for name, value in state.items()}
    other, gamma = dict(one), one[layer(0, "post_attention_layernorm")].double()
    new = (gamma * torch.linspace(0.6, 1.7, len(gamma))).bfloat16() if partly else torch.ones_like(gamma).bfloat16()
    other[layer(0, "post_attention_layernorm")] = new
    scale = torch.linspace(0.6, 1.7, len(gamma)) if partly else 1 / gamma
    for part in ("gate", "up"):
        other[layer(0, f"mlp.{part}_proj")] = (one[layer(0, f"mlp.{part}_proj")].double() / scale).bfloat16()
    found = compared(tmp_path, one, other)
    assert found.same is same, found.explanation


@pytest.mark.parametrize("name", [pytest.param("Gemma", marks=pytest.mark.full), "GPT2"])
def test_gains_moved_with_two_roundings_each_are_the_same(tmp_path, name):
    """Whoever works in float32 rounds 1/s, W (1/s), 1 + w, (1 + w) s and this minus 1."""
    model, config = built(name)
    one = {key: value.clone() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    other = dict(one)
    scale = torch.linspace(0.5, 2, 16)
    if name == "Gemma":
        other[layer(1, "post_attention_layernorm")] = (1 + one[layer(1, "post_attention_layernorm")]) * scale - 1
        for part in ("gate", "up"):
            other[layer(1, f"mlp.{part}_proj")] = one[layer(1, f"mlp.{part}_proj")] * (1 / scale)
    else:
        for part in ("weight", "bias"):
            other[f"transformer.h.1.ln_2.{part}"] = one[f"transformer.h.1.ln_2.{part}"] * scale
        other["transformer.h.1.mlp.c_fc.weight"] = one["transformer.h.1.mlp.c_fc.weight"] * (1 / scale)[:, None]
    found = compared(tmp_path, one, other, config if name == "Gemma" else None)
    assert found.same is True, found.explanation


@pytest.mark.parametrize("victim", ["ln_2.bias", "mlp.c_fc.bias", "mlp.c_fc.weight"])
def test_beside_a_moved_gain_the_part_that_changed_is_named(tmp_path, victim):
    one = {key: value.clone() for key, value in built("GPT2")[0].state_dict().items() if key != "lm_head.weight"}
    other, path, scale = dict(one), "transformer.h.1.", torch.linspace(0.5, 2, 16)
    for part in ("ln_2.weight", "ln_2.bias"):
        other[path + part] = one[path + part] * scale
    other[path + "mlp.c_fc.weight"] = one[path + "mlp.c_fc.weight"] / scale[:, None]
    other[path + victim] = other[path + victim].clone()
    other[path + victim].view(-1)[3] *= 1.01
    found = compared(tmp_path, one, other)
    assert found.same is False and found.first == path + victim, found.explanation


@pytest.mark.parametrize(("name", "path", "output"), [("Mixtral", "model.layers.0.self_attn.", "o_proj"),
                                                      ("Phi", "model.layers.0.self_attn.", "dense"),
                                                      ("OPT", "model.decoder.layers.0.self_attn.", "out_proj")])  # fmt: skip
def test_heads_may_be_permuted_whatever_stands_beside_attention(tmp_path, name, path, output):
    model, config = built(name)[0], {"num_attention_heads": 4}
    one = {key: value.clone() for key, value in model.state_dict().items()}
    other, order = dict(one), [1, 0, 2, 3]
    for key in (f"{path}{letter}_proj.{kind}" for letter in ("qkv" if name == "OPT" else "q") for kind in ("weight", "bias")):
        if key in one:
            other[key] = one[key].unflatten(0, (-1, SIZE))[order].flatten(0, 1)
    other[f"{path}{output}.weight"] = one[f"{path}{output}.weight"].unflatten(1, (-1, SIZE))[:, order].flatten(1)
    assert compared(tmp_path, one, other, config).same is True
    assert compared(tmp_path, one, {**other, f"{path}{output}.weight": one[f"{path}{output}.weight"]}, config).same is False
    for more in (f"{path}sinks", "prompt.keys"):
        assert compared(tmp_path, {**one, more: torch.arange(4.0)}, {**other, more: torch.arange(4.0)}, config).same is False


def test_a_low_rank_update_of_a_convolution_is_not_decided(tmp_path):
    one = {"c.base_layer.weight": torch.ones(4, 3, 3, 3), "c.lora_A.default.weight": torch.ones(2, 3, 3, 3)}
    one["c.lora_B.default.weight"] = torch.ones(4, 2, 1, 1)
    assert compared(tmp_path, one, {"c.weight": torch.ones(4, 3, 3, 3)}).same is None


class Adapted(nn.Module):
    """A linear layer with a low-rank update, as peft names its parts."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.base_layer, self.scaling = nn.Linear(4, 3, bias=False), {"default": scale}
        self.lora_A, self.lora_B = (nn.ModuleDict({"default": nn.Linear(a, b, bias=False)}) for a, b in ((4, 2), (2, 3)))


@pytest.mark.parametrize(("read", "same"), [(2.0, True), (3.0, False)])
def test_a_low_rank_update_is_read_as_its_module_says(tmp_path, read, same):
    torch.manual_seed(0)
    model = nn.ModuleDict({"c": Adapted(read)})
    adapted = model["c"]
    merged = adapted.base_layer.weight + 2.0 * adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    torch.save({"c.weight": merged.detach()}, tmp_path / "m.pt")
    found = ns.diff(model, tmp_path / "m.pt")
    assert found.same is same, found.explanation


# settings ---------------------------------------------------------------------------------------------------------------------


def decided(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether settings leave nothing to doubt."""
    sides = [Checkpoint(letter, "safetensors", {}, config) for letter, config in (("a", one), ("b", other))]
    return configured_apart(sides[0], sides[1]) == ([], [])


SETTINGS = [
    ("Mistral", {"sliding_window": None}, {"sliding_window": 4}),
    ("Gemma2", {}, {"final_logit_softcapping": None}),
    ("GPT2", {}, {"scale_attn_weights": False}),
    ("GPT2", {}, {"scale_attn_by_inverse_layer_idx": True}),
    ("Bert", {}, {"is_decoder": True}),
    ("Bert", {}, {"pad_token_id": 1}),  # from which RoBERTa counts positions
    ("Llama", {"rope_parameters": None, "rope_scaling": None}, {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("Llama", {"rope_parameters": None}, {"rope_parameters": None, "rope_theta": 5e5}),
    ("Llama", {}, {"model_type": "helium"}),
    ("Mixtral", {}, {"num_experts_per_tok": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "one", "other"), SETTINGS)
def test_settings_that_make_another_function_are_never_passed_over(name, one, other):
    _, config = built(name)
    sides = [{key: value for key, value in {**config, **change}.items() if key not in change or change[key] is not None or key != "rope_parameters"}
             for change in (one, other)]  # fmt: skip
    assert not decided(*sides) and not decided(*reversed(sides))


def test_settings_that_only_one_side_has_may_have_another_default():
    assert not decided({"model_type": "mine", "rope_theta": 5e5}, {"model_type": "mine"})
    assert not decided({"model_type": "mine", "scaling": {"factor": 2}}, {"model_type": "mine", "scaling": {"factor": 3}})


@pytest.mark.parametrize("change", [{"use_cache": False}, {"attention_dropout": 0.1}, {"bos_token_id": 7}, {"pad_token_id": 3},
                                    {"max_position_embeddings": 64}, {"transformers_version": "4"}])  # fmt: skip
def test_settings_without_a_meaning_for_the_function(change):
    _, config = built("Llama")
    assert decided(config, {**config, **change})


def test_defaults_that_one_file_writes_and_another_does_not():
    _, config = built("Llama")
    short = {name: config[name] for name in ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads",
                                             "intermediate_size", "num_hidden_layers")}  # fmt: skip
    assert decided(config, short)


def test_a_head_that_one_side_ties_is_not_read_there(tmp_path):
    (state, _), config = llama(), {"tie_word_embeddings": False}
    found = compared(tmp_path / "1", state, state, config, {"tie_word_embeddings": True})
    assert found.same is False and found.first == "lm_head.weight", found.explanation
    equal = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    assert compared(tmp_path / "2", equal, equal, config, {"tie_word_embeddings": True}).same is True
    without = {name: value for name, value in equal.items() if name != "lm_head.weight"}
    assert compared(tmp_path / "3", equal, without, config).same is None  # where no head is stored and none is tied


# modules ----------------------------------------------------------------------------------------------------------------------


def test_modules_built_differently_are_not_called_the_same():
    one = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Dropout(0.1))
    other = copy.deepcopy(one)
    other[3].p = 0.5
    assert ns.diff(one, other).same is True
    other[2].eps = 0.5
    assert ns.diff(one, other).same is None
    other = copy.deepcopy(one)
    other[1] = nn.GELU()
    found = ns.diff(one, other)
    assert found.same is None and "1 is ReLU() in A and GELU(" in found.explanation


class Random(nn.Module):
    """Dropout without a layer, and a branch that is left out at times."""

    def __init__(self, numpy: bool = False) -> None:
        super().__init__()
        self.linear, self.numpy = nn.Linear(4, 4), numpy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = np.random.rand() if self.numpy else torch.rand(len(x), 1) < 0.7
        return x + kept * nn.functional.dropout(self.linear(x), 0.2, self.training)


def test_what_is_random_is_so_alike_on_both_sides_or_nothing_is_decided():
    model, x, before = Random(), torch.randn(4, 4), torch.get_rng_state()
    assert ns.diff(model, copy.deepcopy(model), example=x).same is True
    assert torch.equal(before, torch.get_rng_state())
    found = ns.diff(Random(numpy=True), Random(numpy=True), example=x)
    assert found.same is None and "from one run to the next" in found.explanation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_last_bit_of_a_weight_is_no_storage(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).to(dtype)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight[0, 0] = torch.nextafter(model[0].weight[0, 0].float(), torch.tensor(9.0)) if dtype == torch.float32 else (
            model[0].weight[0, 0].reshape(1).view(torch.int16) + 1).view(torch.float16)[0]  # fmt: skip
        twin[0].weight[1] *= 1 + 4 * torch.finfo(dtype).eps
    found = ns.diff(model, twin, example=torch.randn(3, 4))
    assert found.same is False and found.first == "0.weight", found.explanation


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(9, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.table[: x.shape[1]])


def test_entries_of_a_table_that_no_input_reads_are_not_called_the_same():
    model = Positions()
    twin = copy.deepcopy(model)
    twin.table[7] += 1
    found = ns.diff(model, twin, example=torch.randn(2, 5, 4), mode="eval")
    assert found.same is None and "table" in found.explanation
    assert ns.diff(model, twin, example=torch.randn(2, 9, 4), mode="eval").same is False


class Indexed(nn.Module):
    """Reads its table at the places of a buffer, and its phases by size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("places", torch.arange(8))
        self.register_buffer("phases", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        return (x * self.table[self.places[:size]]).sum(-1) * self.phases[:size].imag


@pytest.mark.parametrize("name", ["places", "phases"])
def test_entries_of_indices_and_complex_buffers_that_no_input_reads_are_not_called_the_same(name):
    model = Indexed()
    twin = copy.deepcopy(model)
    getattr(twin, name)[7] = 0
    found = ns.diff(model, twin, example=torch.randn(2, 5, 4), mode="eval")
    assert found.same is None and name in found.explanation
    assert ns.diff(model, twin, example=torch.randn(2, 8, 4), mode="eval").same is False
    noted = ns.diff(model, twin, example=torch.randn(2, 5, 4), mode="train")
    assert any(name in note for note in noted.notes)


class Spectrum(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.fft.fft(super().forward(x)), x.sum(-1)


def test_complex_outputs_are_compared():
    model = Spectrum(4, 4)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight *= 2
    found = ns.diff(model, twin, example=torch.randn(3, 4))
    assert found.same is False and found.first == "weight"


def test_a_window_longer_than_the_example_is_not_decided():
    transformers = pytest.importorskip("transformers")
    one, config = built("Mistral")
    other = transformers.MistralForCausalLM(transformers.MistralConfig(**{**config, "sliding_window": 8}))
    other.load_state_dict(one.state_dict())
    found = ns.diff(one, other, example={"input_ids": torch.randint(0, 50, (1, 4))}, mode="eval")
    assert found.same is None and "sliding_window" in found.explanation
