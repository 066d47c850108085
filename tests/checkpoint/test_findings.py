"""Faults planted in files are found by the rule that is meant for them; healthy files, fresh or trained, give none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import normscope as ns
from tests.checkpoint.files import write

State = dict[str, torch.Tensor]
LAYERS = 7


def healthy(trained: bool = True) -> State:
    """A Llama of seven small blocks; trained: γ moved, and each matrix has a direction that stands out."""
    generator = torch.Generator().manual_seed(0)
    state: State = {}

    def matrix(rows: int, columns: int) -> torch.Tensor:
        value = 0.02 * torch.randn(rows, columns, generator=generator)
        outer = torch.randn(rows, 1, generator=generator) @ torch.randn(1, columns, generator=generator)
        return value + (0.02 * outer / outer.norm() * 4 * rows**0.5 if trained else 0)

    def gamma(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator) if trained else torch.ones(size)

    for i in range(LAYERS):
        block = f"model.layers.{i}."
        state |= {f"{block}self_attn.{x}_proj.weight": matrix(64, 64) for x in "qkvo"}
        state |= {f"{block}mlp.gate_proj.weight": matrix(96, 64), f"{block}mlp.up_proj.weight": matrix(96, 64)}
        state[f"{block}mlp.down_proj.weight"] = matrix(64, 96)
        state |= {f"{block}{name}.weight": gamma(64) for name in ("input_layernorm", "post_attention_layernorm")}
    state |= {"model.norm.weight": gamma(64), "model.embed_tokens.weight": matrix(100, 64), "lm_head.weight": matrix(100, 64)}
    return state


CONFIG = {
    "model_type": "x-llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
}  # known by its names alone
Q = "model.layers.3.self_attn.q_proj.weight"
G = "model.layers.3.input_layernorm.weight"


def changed(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda state: {**state, name: how(state[name].clone())}


def norms(how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda state: {name: how(value) if "norm" in name else value for name, value in state.items()}


def put(value: float, place: int = 5) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[place] = value
        return tensor

    return change


FAULTS: dict[str, tuple[str, Callable[[State], State], dict]] = {
    "γ − 1 where γ is read": ("NS601", norms(lambda value: value - 1), CONFIG),
    "γ where 1 + w is read": ("NS601", lambda state: state, {**CONFIG, "model_type": "gemma"}),
    "NaN in a weight": ("NS209", changed(Q, put(float("nan"))), CONFIG),
    "infinity in a weight": ("NS209", changed(Q, put(float("inf"))), CONFIG),
    "NaN in γ": ("NS209", changed(G, put(float("nan"))), CONFIG),
    "all γ still 1": ("NS210", norms(torch.ones_like), CONFIG),
    "all γ still 1 in bfloat16": ("NS210", norms(lambda value: torch.ones_like(value).bfloat16()), CONFIG),
    "one γ still 1": ("NS210", changed(G, torch.ones_like), CONFIG),
    "a γ of zeros": ("NS202", changed(G, torch.zeros_like), CONFIG),
    "half of a γ is off": ("NS202", changed(G, lambda value: torch.cat([torch.zeros(32), value[32:]])), CONFIG),
    "a weight a hundred times as large": ("NS602", changed(Q, lambda value: 100 * value), CONFIG),
    "a weight a hundredth as large": ("NS602", changed(Q, lambda value: value / 100), CONFIG),
    "a weight of zeros": ("NS602", changed(Q, torch.zeros_like), CONFIG),
    "an entry that exploded": ("NS602", changed(Q, put(1e4)), CONFIG),
    "logits beyond float16": ("NS603", lambda state: {n: (v * 300 if "q_proj" in n or "k_proj" in n else v).half() for n, v in state.items()}, CONFIG),
    "ε that float16 loses": ("NS604", lambda state: {name: value.half() for name, value in state.items()}, {**CONFIG, "rms_norm_eps": 1e-12}),
}  # fmt: skip
BATCH = {
    "running variance NaN": ("NS201", {"running_var": torch.full((8,), float("nan"))}),
    "running variance zero": ("NS201", {"running_var": torch.zeros(8)}),
    "running variance negative": ("NS201", {"running_var": torch.linspace(-1, 1, 8)}),
    "running statistics never set": ("NS201", {"running_var": torch.ones(8), "running_mean": torch.zeros(8)}),
    "one dead channel": ("NS204", {"running_var": torch.tensor([1e-12, *[1.0] * 7])}),
}


def rules(tmp_path, state: State, config: dict) -> set[str]:
    return {finding.rule for finding in ns.checkpoint(write(tmp_path, "safetensors", state, config)).findings}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    rule, plant, config = FAULTS[fault]
    assert rule in rules(tmp_path, plant(healthy()), config)


@pytest.mark.parametrize("fault", BATCH)
def test_faults_of_running_statistics_are_found(tmp_path, fault):
    rule, change = BATCH[fault]
    generator = torch.Generator().manual_seed(0)
    bn = {"weight": 1 + 0.1 * torch.randn(8, generator=generator), "bias": torch.randn(8, generator=generator),
          "running_mean": torch.randn(8, generator=generator), "running_var": 0.5 + torch.rand(8, generator=generator)}  # fmt: skip
    state = {f"bn.{name}": value for name, value in bn.items()} | {"conv.weight": torch.randn(8, 3, 3, 3, generator=generator)}
    assert not rules(tmp_path / "healthy", state, {})
    assert rule in rules(tmp_path / "bad", {**state, **{f"bn.{name}": value for name, value in change.items()}}, {})


@pytest.mark.parametrize("trained", [True, False])
def test_healthy_files_give_none(tmp_path, trained):
    assert not rules(tmp_path, healthy(trained), CONFIG)


def test_normalizers_that_nothing_trained_are_information(tmp_path):
    """γ = 1 and β = 0 beside others that moved: frozen, or not used; γ that stood still while its β moved is a warning."""
    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{i}.norm.weight": 1 + 0.1 * torch.randn(8, generator=generator) for i in range(3)}
    state |= {f"layers.{i}.norm.bias": torch.randn(8, generator=generator) for i in range(3)}
    still = {**state, "layers.1.norm.weight": torch.ones(8)}
    unused = {**still, "layers.1.norm.bias": torch.zeros(8)}
    for name, given, severity in (("still", still, "warning"), ("unused", unused, "info")):
        found = ns.checkpoint(write(tmp_path / name, "safetensors", given)).findings
        assert [(finding.rule, finding.severity, finding.where) for finding in found] == [("NS210", severity, "layers.1.norm")]


def test_gains_drawn_around_zero_are_an_initialization(tmp_path):
    generator = torch.Generator().manual_seed(0)
    state = {"conv.weight": torch.randn(8, 3, 3, 3, generator=generator)}
    for i in range(3):
        state |= {f"bn{i}.weight": 0.02 * torch.randn(8, generator=generator), f"bn{i}.bias": torch.zeros(8),
                  f"bn{i}.running_mean": torch.zeros(8), f"bn{i}.running_var": torch.ones(8)}  # fmt: skip
    assert "NS201" not in rules(tmp_path / "fresh", state, {})
    assert "NS201" in rules(tmp_path / "trained", {**state, "bn1.weight": 1 + 0.1 * torch.randn(8, generator=generator)}, {})


def test_gains_of_batch_norms_have_one_convention(tmp_path):
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[2], layer_type="basic")
    state, generator = ResNetModel(config).state_dict(), torch.Generator().manual_seed(0)
    drawn = {
        name: 0.02 * torch.randn(value.shape, generator=generator) for name, value in state.items() if "ization.weight" in name
    }
    assert len(drawn) > 3 and "NS601" not in rules(tmp_path, {**state, **drawn}, config.to_dict())


def test_other_constants_are_no_sign_of_training(tmp_path):
    state, other = {f"{i}.weight": torch.full((8,), float(1 + i % 2)) for i in range(4)}, torch.linspace(0.5, 1.5, 8)
    config = {"model_type": "nobody-knows"}
    named = {name.replace(".weight", ".norm.weight"): value for name, value in state.items()}
    assert "NS210" not in rules(tmp_path / "fresh", named, config)
    assert "NS210" in rules(tmp_path / "trained", {**named, "1.norm.weight": other}, config)
