"""Folding keeps the function, in float64 and in float32, and says why it leaves something."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import normscope as ns
from normscope._checkpoint.running import ran
from normscope.cli import app
from normscope.core.data import Call
from tests.checkpoint.models import built

IDS = {"input_ids": torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(0))}
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2), nn.BatchNorm2d(4)
    )
    for _ in range(3):
        model(3 * X + 1)
    return model.eval()


def error(model: nn.Module, example: object, truth: torch.Tensor) -> float:
    out = model(**example) if isinstance(example, dict) else model(example)
    out = out if isinstance(out, torch.Tensor) else out[0]
    return float((out.double() - truth).norm() / truth.norm())


def test_batch_norms_go_into_convolutions():
    model = cnn()
    before = copy.deepcopy(model.state_dict())
    made = ns.fold(model, X)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in made.modules()) and made.folded.defect < 1e-12
    truth = copy.deepcopy(model).double()(X.double())
    assert error(made, X, truth) <= max(4 * error(model, X, truth), 1e-6)
    one, other = ns.lipschitz(model, X), ns.lipschitz(made, X)
    assert one.lower <= other.upper and other.lower <= one.upper


FOLDED = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "GPT2", "GPTNeoX", "GPTJ", "Phi", "ViT", "StableLm", "Starcoder2",
          "Granite", "OPT", "Bloom", "Olmo2", "Mixtral")  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", FOLDED)
def test_gains_go_into_the_weights_that_read_them(name):
    """The same function in float64, and in float32 no more than four times as far from it as the model itself."""
    model, _ = built(name)
    example = {"pixel_values": X[:2].repeat(1, 1, 2, 2)} if name == "ViT" else IDS
    made = ns.fold(model, example)
    assert made.folded.done and made.folded.defect < 1e-12
    call = Call.of({key: value.double() if value.is_floating_point() else value for key, value in example.items()})
    with torch.no_grad():
        truth = ran(copy.deepcopy(model).double(), call)[0]
        assert error(made, example, truth) <= 4 * error(model, example, truth)


def test_what_something_else_reads_stays_with_the_reason():
    made = ns.fold(built("Gemma2")[0], IDS)
    assert "no weight reads" in made.folded.refused["model.layers.0.post_attention_layernorm"]
    assert "tied" in made.folded.refused["model.norm"]


def test_experts_keep_the_gain_that_a_router_reads_too():
    """torch multiplies groups of rows in float32 and less alone; in float64 they are products one by one."""
    made = ns.fold(built("Mixtral")[0], IDS)
    assert "folded into" in made.folded.done["model.layers.0.input_layernorm"] and made.folded.defect < 1e-12
    assert "something else reads" in made.folded.refused["model.layers.0.post_attention_layernorm"]


def test_what_does_not_run_on_the_example_is_one_line():
    with pytest.raises(ns.InputError, match="does not run on the example in float64"):
        ns.fold(cnn(), torch.randn(2, 4, 8, 8))


def test_a_layer_norm_that_is_given_no_mean_is_rms():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    made = ns.fold(model, torch.randn(4, 6))
    assert isinstance(made[1], nn.RMSNorm) and made.folded.defect < 1e-12


def test_nothing_to_fold_is_a_refusal():
    with pytest.raises(ns.Refusal, match="nothing can be folded"):
        ns.fold(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    with pytest.raises(ns.InputError):
        ns.fold(cnn(), X, kinds=("everything",))


def test_the_command_writes_the_folded_weights(tmp_path):
    source = tmp_path / "models.py"
    source.write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.LayerNorm(216), nn.Linear(216, 2))\n"
    )
    call = ["fold", f"{source}:net", "--input", "3x8x8", "--to", str(tmp_path / "folded.safetensors")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    assert "1: folded into 0" in done.output and "outputs agree to" in done.output
    state = load_file(tmp_path / "folded.safetensors")
    assert "1.weight" not in state and state["0.weight"].shape == (6, 3, 3, 3)
    for wrong, said in ((call[:2] + call[4:], "needs the shape"), ([*call[:-1], "out.pt"], ".safetensors file")):
        refused = CliRunner().invoke(app, wrong)
        assert refused.exit_code != 0 and said in refused.output
