"""Folding keeps the function, in float64 and in float32, and says why it leaves something."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normscope as ns
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


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma", "GPT2", "GPTNeoX", "Mistral", "Phi"])
def test_gains_go_into_the_weights_that_read_them(name):
    model, _ = built(name)
    made = ns.fold(model, IDS)
    assert made.folded.done and made.folded.defect < 1e-12
    with torch.no_grad():
        truth = ns.fold(copy.deepcopy(model).double(), IDS, kinds=("affine",))(**IDS)[0].double()
        assert error(made, IDS, truth) < 1e-5


def test_what_something_else_reads_stays_with_the_reason():
    made = ns.fold(built("Gemma2")[0], IDS)
    assert "no weight reads" in made.folded.refused["model.layers.0.post_attention_layernorm"]
    assert "tied" in made.folded.refused["model.norm"]


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
