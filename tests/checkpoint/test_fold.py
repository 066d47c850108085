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


# modules that look as if they could be folded ----------------------------------------------------------------------------------


class Written(nn.Module):
    """Layers by name and what is done with them."""

    def __init__(self, forward, **layers: nn.Module) -> None:
        super().__init__()
        self.forward_with = forward
        for name, layer in layers.items():
            self.add_module(name, layer)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        return self.forward_with(self, x)


IDS_OF_PADDING = torch.zeros(2, 5, dtype=torch.long)


def beside_a_table():
    """Row 0 is 0, as padding is, and so centered; others are not, and something else reads them."""
    model = Written(
        lambda m, x: m.l(m.n(m.e(x))) + m.e(x).sum(-1, keepdim=True), e=nn.Embedding(10, 6), n=nn.LayerNorm(6), l=nn.Linear(6, 3)
    )
    with torch.no_grad():
        model.e.weight[0] = 0
    return model


UNSEEN = {
    "a row that is zero": (beside_a_table, IDS_OF_PADDING, torch.arange(10).reshape(2, 5)),
    "a branch that sleeps": (lambda: Written(
        lambda m, x: m.l(m.n(m.a(x) + torch.relu(m.b(x) - 30))), a=nn.Linear(6, 6), b=nn.Linear(6, 6), n=nn.LayerNorm(6), l=nn.Linear(6, 3)),
        torch.randn(2, 6), 100 * torch.randn(2, 6)),
    "an input that is zero": (lambda: Written(lambda m, x: m.l(m.n(torch.relu(x - 50))), n=nn.LayerNorm(6), l=nn.Linear(6, 3)),
                              torch.randn(2, 6), 100 * torch.rand(2, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_a_mean_that_no_tested_input_has_is_not_removed(name):
    make, example, other = UNSEEN[name]
    model = make().eval()
    made = ns.fold(model, example)
    assert isinstance(made.n, nn.LayerNorm) and "its mean stays" in made.folded.refused["n"]
    torch.testing.assert_close(made(other), model(other), rtol=1e-4, atol=1e-4)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


V, T = torch.randn(4, 6), torch.randn(2, 5, 6)
REFUSED = {
    "BN used twice": (lambda: Written(lambda m, x: m.n(m.b(m.n(m.a(x)))), a=nn.Linear(6, 6), b=nn.Linear(6, 6), n=nn.BatchNorm1d(6)), V, "used elsewhere"),
    "a hook": (lambda: Written(lambda m, x: m.n(m.a(x)), a=nn.Linear(6, 6), n=hooked(nn.BatchNorm1d(6))), V, "hooks"),
    "statistics read": (lambda: Written(lambda m, x: m.n(m.a(x)) + m.n.running_mean, a=nn.Linear(6, 6), n=nn.BatchNorm1d(6)), V, "used elsewhere"),
    "bias before BN read": (lambda: Written(lambda m, x: m.n(m.a(x)) * m.a.bias, a=nn.Linear(6, 6), n=nn.BatchNorm1d(6)), V, "of its own"),
    "bias read": (lambda: Written(lambda m, x: m.a(m.n(x)) * m.a.bias, a=nn.Linear(6, 6), n=nn.LayerNorm(6)), T, "bias beside a.weight"),
    "γ read": (lambda: Written(lambda m, x: m.a(m.n(x)) * m.n.weight.sum(), a=nn.Linear(6, 6), n=nn.LayerNorm(6)), T, "γ or β is used"),
    "β read": (lambda: Written(lambda m, x: m.a(m.n(x)) + m.n.bias.sum(), a=nn.Linear(6, 6), n=nn.LayerNorm(6)), T, "γ or β is used"),
    "β scaled": (lambda: Written(lambda m, x: m.a(3 * m.n(x)), a=nn.Linear(6, 6), n=nn.LayerNorm(6)), T, "scales it"),
    "batch statistics": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)), X, "statistics of its input"),
    "groups": (lambda: Written(lambda m, x: m.n(m.a(x)), a=nn.Linear(6, 6), n=nn.GroupNorm(2, 6)), V, "statistics of its input"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_folded_is_refused_with_the_reason(name):
    make, example, why = REFUSED[name]
    with pytest.raises(ns.Refusal, match=why):
        ns.fold(make().eval(), example)


def test_layer_norms_without_gains_lose_their_mean_too():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)).eval()
    assert isinstance(ns.fold(model, T)[1], nn.RMSNorm)


def test_modes_are_kept_module_by_module():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6)).train()
    model[3].eval()
    assert [module.training for module in ns.fold(model, V)] == [True, True, True, False]
