"""Files compared: storage and symmetries are the same function, anything else is named; equal numbers under other readings are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import normscope as ns
from normscope._checkpoint.difference import Difference
from normscope._checkpoint.views import GGUF
from normscope.cli import app
from tests.checkpoint.files import gguf_bytes, write
from tests.checkpoint.models import built

State = dict[str, torch.Tensor]
HEADS, KEYS, SIZE = 4, 2, 4


def llama() -> tuple[State, dict]:
    model, config = built("Llama")
    return {name: value.clone() for name, value in model.state_dict().items()}, config


def layer(i: int, rest: str) -> str:
    return f"model.layers.{i}.{rest}.weight"


def compared(tmp_path: Path, one: State, other: State, config: dict | None = None, config_b: dict | None = None) -> Difference:
    a = write(tmp_path / "a", "safetensors", one, config).parent
    b = write(tmp_path / "b", "safetensors", other, config if config_b is None else config_b).parent
    return ns.diff(a, b)


# changes that keep the function, each with a random choice ---------------------------------------------------------------------


def fold(state: State, choice: random.Random) -> State:
    """γ moved into what reads it, in whole or by a random part."""
    made = dict(state)
    generator = torch.Generator().manual_seed(choice.randrange(1000))
    for i in range(2):
        for gamma, readers in (("input_layernorm", ("q", "k", "v")), ("post_attention_layernorm", ("gate", "up"))):
            old = made[layer(i, gamma)]
            new = torch.ones_like(old) if choice.random() < 0.5 else old * (0.5 + 1.5 * torch.rand(old.shape, generator=generator))
            for reader in readers:
                name = layer(i, f"self_attn.{reader}_proj" if reader in "qkv" else f"mlp.{reader}_proj")
                made[name] = (made[name].double() * old.double() / new.double()).float()
            made[layer(i, gamma)] = new
    return made


def heads(state: State, choice: random.Random) -> State:
    made = dict(state)
    for i in range(2):
        keys = choice.sample(range(KEYS), KEYS)
        queries = [key * 2 + inner for key in keys for inner in choice.sample(range(2), 2)]
        for letter, order in (("q", queries), ("k", keys), ("v", keys)):
            rows = made[layer(i, f"self_attn.{letter}_proj")].unflatten(0, (-1, SIZE))
            made[layer(i, f"self_attn.{letter}_proj")] = rows[order].flatten(0, 1)
        columns = made[layer(i, "self_attn.o_proj")].unflatten(1, (-1, SIZE))
        made[layer(i, "self_attn.o_proj")] = columns[:, queries].flatten(1)
    return made


def merged(state: State, choice: random.Random) -> State:
    made = dict(state)
    for i in range(2):
        made[layer(i, "self_attn.qkv_proj")] = torch.cat([made.pop(layer(i, f"self_attn.{x}_proj")) for x in "qkv"])
        if choice.random() < 0.5:
            made[layer(i, "mlp.gate_up_proj")] = torch.cat([made.pop(layer(i, f"mlp.{x}_proj")) for x in ("gate", "up")])
    return made


def transposed(state: State, choice: random.Random) -> State:
    return {name: value.T.contiguous() if "proj" in name else value for name, value in state.items()}


def prefixed(state: State, choice: random.Random) -> State:
    return {f"module._orig_mod.{name}": value for name, value in state.items()}


def narrow(state: State, choice: random.Random) -> State:
    dtype = choice.choice([torch.bfloat16, torch.float16])
    return {name: value.to(dtype) for name, value in state.items()}


SAME: dict[str, Callable[[State, random.Random], State]] = {
    "fold": fold, "heads": heads, "merged": merged, "transposed": transposed, "prefixed": prefixed, "narrow": narrow,
}  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", SAME)
def test_the_same_function(tmp_path, name):
    state, config = llama()
    found = compared(tmp_path, state, SAME[name](state, random.Random(0)), config)
    assert found.same is True and found.first is None, found.explanation
    assert ns.diff(tmp_path / "b", tmp_path / "a").same is True or name in (
        "fold",
        "merged",
    )  # B's architecture may have no template
    assert Difference.from_dict(found.to_dict()) == found and str(found)


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", range(200))
def test_one_weight_changed_by_one_percent_is_named(tmp_path, seed):
    """Whatever else was done to the file."""
    choice = random.Random(seed)
    state, config = llama()
    names = [name for name in state if "proj" in name or "norm" in name]
    victim = choice.choice(names)
    how = choice.choice(["equal", "fold", "heads", "prefixed", "narrow", "merged"])
    other = {name: value.clone() for name, value in state.items()}
    if how == "fold" and "norm" in victim:
        victim = choice.choice([name for name in names if "proj" in name])
    flat = other[victim].view(-1)
    place = choice.choice([int(flat.abs().argmax()), *flat.abs().topk(min(8, len(flat))).indices.tolist()])
    flat[place] *= 1.01
    other = SAME[how](other, choice) if how != "equal" else other
    found = compared(tmp_path, state, other, config)
    assert found.same is False, (victim, how, found.explanation)
    assert found.first == victim, (how, found.explanation)


@pytest.mark.parametrize("victim, entry", [("model.norm.weight", 2), (layer(1, "post_attention_layernorm"), 6)])
def test_a_changed_gamma_has_not_moved_where_its_readers_agree(tmp_path, victim, entry):
    """In bfloat16 a change of 1 % is not far beyond rounding, so that some products of γ and its readers agree."""
    state, config = llama()
    other = {name: value.clone() for name, value in state.items()}
    other[victim][entry] *= 1.01
    found = compared(tmp_path, state, {name: value.bfloat16() for name, value in other.items()}, config)
    assert found.same is False and found.first == victim, found.explanation


def test_gamma_conventions(tmp_path):
    """As the configurations say; without any, as a condition that is printed."""
    state, config = llama()
    zero = {name: value - 1 if "norm" in name else value for name, value in state.items()}
    gemma = {**config, "model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": SIZE, "tie_word_embeddings": False}
    assert compared(tmp_path / "1", state, zero, config).same is False
    assert "exactly 1" in compared(tmp_path / "1", state, zero, config).explanation
    port = tmp_path / "gemma.gguf"
    about = {"general.architecture": "gemma", "gemma.attention.head_count": HEADS, "gemma.attention.head_count_kv": KEYS}
    port.write_bytes(gguf_bytes({gguf_name(name): value for name, value in state.items()}, about))
    agreed = ns.diff(port, write(tmp_path / "2", "safetensors", zero, gemma).parent)
    assert agreed.same is True and "γ of 5 norms is stored as 1 + w in A and w in B" in agreed.explanation
    other_architecture = compared(tmp_path / "5", state, zero, config, gemma)  # which multiplies embeddings too
    assert other_architecture.same is None and "model_type is llama in A and gemma in B" in other_architecture.explanation
    forgotten = compared(tmp_path / "3", state, state, config, gemma)
    assert forgotten.same is False and "equal numbers" in forgotten.explanation
    unsaid = compared(tmp_path / "4", state, zero)
    assert unsaid.same is None and "the same function if B is read with γ = 1 + w" in unsaid.explanation


def test_a_port_to_gguf(tmp_path):
    """Names, permuted rotary dimensions, float16; a port that forgets to permute is not the same."""
    state, config = llama()
    a = write(tmp_path / "a", "safetensors", state, config).parent
    about = {"general.architecture": "llama", "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KEYS,
             "llama.attention.layer_norm_rms_epsilon": 1e-6}  # fmt: skip

    def port(permute: bool) -> Path:
        made = {}
        for name, value in state.items():
            if permute and ("q_proj" in name or "k_proj" in name):
                value = value.unflatten(0, (-1, 2, SIZE // 2)).transpose(1, 2).flatten(0, 2)
            made[gguf_name(name)] = value.half()
        path = tmp_path / f"{permute}.gguf"
        path.write_bytes(gguf_bytes(made, about))
        return path

    right, wrong = ns.diff(a, port(True)), ns.diff(a, port(False))
    assert right.same is True and "rotary" in right.explanation, right.explanation
    assert wrong.same is False and "self_attn" in str(wrong.first)


def gguf_name(name: str) -> str:
    table = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output", "model.layers": "blk"}  # fmt: skip
    for old, new in table.items():
        name = name.replace(old, new)
    for letter in "qkv":
        name = name.replace(f"self_attn.{letter}_proj", f"attn_{letter}")
    for part in ("gate", "up", "down"):
        name = name.replace(f"mlp.{part}_proj", f"ffn_{part}")
    return name


def test_names_of_gguf_are_a_table():
    assert len(GGUF) >= 10


def test_a_lora_merge(tmp_path):
    state, _ = llama()
    generator = torch.Generator().manual_seed(0)
    adapted, merged_state = {}, dict(state)
    for name, value in state.items():
        if "q_proj" in name or "v_proj" in name:
            module = name.removesuffix(".weight")
            down, up = torch.randn(2, value.shape[1], generator=generator), torch.randn(value.shape[0], 2, generator=generator)
            adapted |= {
                f"{module}.base_layer.weight": value,
                f"{module}.lora_A.default.weight": down,
                f"{module}.lora_B.default.weight": up,
            }
            merged_state[name] = (value.double() + 0.5 * up.double() @ down.double()).float()
        else:
            adapted[name] = value
    found = compared(tmp_path / "1", adapted, merged_state, None)
    assert found.same is None and "the same function if A is read with lora_alpha / r = 0.5" in found.explanation, found.explanation
    merged_state[layer(1, "self_attn.q_proj")] = merged_state[layer(1, "self_attn.q_proj")] * 1.01
    assert compared(tmp_path / "2", adapted, merged_state, None).same is not True


def test_fine_tuning_ema_and_quantization_differ_with_numbers(tmp_path):
    state, config = llama()
    tuned = {
        name: value + 1e-3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) for name, value in state.items()
    }
    found = compared(tmp_path, state, tuned, config)
    assert found.same is False and found.first == "model.embed_tokens.weight"
    row = next(row for row in found.rows if row.name == layer(0, "mlp.up_proj"))
    step = tuned[row.name].double() - state[row.name].double()
    assert row.change == pytest.approx(float(step.norm() / state[row.name].double().norm()), rel=1e-9)
    truth = float(torch.linalg.matrix_norm(step, 2))
    assert truth * (1 - 1e-12) <= row.spectral_change <= truth * (1 + 1e-6)
    average = {name: 0.9 * value + 0.1 * tuned[name] for name, value in state.items()}
    followed = compared(tmp_path / "ema", state, average, config)
    moved = {row.name: row.change for row in followed.rows}
    assert followed.same is False and all(moved[row.name] == pytest.approx(0.1 * row.change, rel=1e-3) for row in found.rows)
    eighth = {name: value.to(torch.float8_e4m3fn) for name, value in state.items()}
    quantized = compared(tmp_path / "q", state, eighth, config)
    assert quantized.same is False and all(row.change <= 2.0**-4 for row in quantized.rows)  # e4m3 keeps three bits


def test_a_missing_tensor_is_not_decided_and_a_tied_head_is(tmp_path):
    state, config = llama()
    without = {name: value for name, value in state.items() if name != layer(1, "mlp.up_proj")}
    assert compared(tmp_path / "1", state, without, config).same is None
    tied = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    head = {name: value for name, value in tied.items() if name != "lm_head.weight"}
    assert compared(tmp_path / "2", tied, head, {**config, "tie_word_embeddings": True}).same is True
    assert compared(tmp_path / "3", state, head, config).same is None


def test_settings_that_make_another_function(tmp_path):
    state, config = llama()
    for change in (
        {"rms_norm_eps": 1e-3},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        {"hidden_act": "gelu"},
    ):
        found = compared(tmp_path / str(len(str(change))), state, state, config, {**config, **change})
        assert found.same is False, change


def test_one_transposed_square_matrix_is_a_difference(tmp_path):
    state, config = llama()
    other = {**state, layer(1, "self_attn.q_proj"): state[layer(1, "self_attn.q_proj")].T.contiguous()}
    found = compared(tmp_path, state, other, config)
    assert found.same is False and found.first == layer(1, "self_attn.q_proj")


def test_an_overflow_is_not_a_rounding(tmp_path):
    state, config = llama()
    state[layer(0, "mlp.up_proj")][0, 0] = 1e6
    assert compared(tmp_path, state, {name: value.half() for name, value in state.items()}, config).same is False


def test_modules_are_accepted(tmp_path):
    model, config = built("Llama")
    path = write(tmp_path, "safetensors", model.state_dict(), config).parent
    assert ns.diff(model, path).same is True


def test_the_command_writes_a_page_with_a_row_per_tensor(tmp_path):
    state, config = llama()
    a = write(tmp_path / "a", "safetensors", state, config).parent
    changed = {**state, layer(1, "mlp.up_proj"): 1.5 * state[layer(1, "mlp.up_proj")]}
    b = write(tmp_path / "b", "safetensors", changed, config).parent
    done = CliRunner().invoke(app, ["diff", str(a), str(b), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 1, done.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f'<th scope="row">{layer(1, "mlp.up_proj")}</th>' in page and f"{len(state) - 1} tensors agree" in page
    assert page.count('<th scope="row">') == len(state) and "<td>0.5</td>" in page
