"""The lab's networks are the standard ones, differ in nothing but the normalizer, and leave global random state alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.lab.models import NORMALIZERS, mlp, normalizer, resnet18

LAYERS = {
    "none": nn.Identity,
    "batch": nn.BatchNorm2d,
    "layer": nn.GroupNorm,
    "group": nn.GroupNorm,
    "instance": nn.InstanceNorm2d,
}


def test_resnet18_is_the_standard_one() -> None:
    model = resnet18()
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_689_512
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 20
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 1000)
    assert not any(module.inplace for module in model.modules() if isinstance(module, nn.ReLU))


def test_resnet18_has_the_names_of_torchvision() -> None:
    names = set(resnet18().state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer4.1.bn2.bias", "fc.weight"} <= names
    assert {"layer2.0.downsample.0.weight", "layer2.0.downsample.1.weight"} <= names
    assert len(names) == 122


def test_stems_differ_in_resolution() -> None:
    image = torch.randn(1, 3, 32, 32)
    for stem, size in {"imagenet": 8, "small": 32}.items():
        model = resnet18(10, stem=stem)
        features = nn.Sequential(
            *(module for name, module in model.named_children() if name in ("conv1", "bn1", "relu", "maxpool"))
        )
        assert features.eval()(image).shape == (1, 64, size, size)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_resnet18_runs_with_every_normalizer(name: str) -> None:
    model = resnet18(10, name, "small")
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    biased = [module.bias is not None for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(biased) == 20 and all(biased) == any(biased) == (name == "none")


@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "instance"])
def test_mlp_runs_with_every_normalizer(name: str) -> None:
    model = mlp(32, 4, inputs=64, classes=5, normalizer=name)
    output = model(torch.randn(6, 1, 8, 8))
    output.square().sum().backward()
    assert output.shape == (6, 5)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert sum(isinstance(module, nn.Linear) for module in model) == 4
    assert len(model) == (1 + 4 + 3 if name == "none" else 1 + 4 + 2 * 3)


def test_the_normalizer_is_the_only_difference() -> None:
    def weights(name: str) -> list[torch.Tensor]:
        model = mlp(16, 3, 8, normalizer=name, generator=torch.Generator().manual_seed(3))
        return [module.weight for module in model if isinstance(module, nn.Linear)]

    for name in ("batch", "layer", "rms"):
        assert all(torch.equal(a, b) for a, b in zip(weights("none"), weights(name), strict=True))


def test_weights_have_the_he_variance() -> None:
    model = mlp(400, 3, 300)
    deviations = [float(module.weight.detach().std()) for module in model if isinstance(module, nn.Linear)]
    assert deviations == pytest.approx([(2 / 300) ** 0.5, (2 / 400) ** 0.5, (1 / 400) ** 0.5], rel=0.05)


@pytest.mark.parametrize(
    ("name", "axes"),
    [(name, axes) for name in NORMALIZERS for axes in range(4) if name != "none" and (name, axes) != ("instance", 0)],
)
def test_normalizers_normalize(name: str, axes: int) -> None:
    x = 5 + 3 * torch.randn(16, 64, *[6] * axes, generator=torch.Generator().manual_seed(0))
    y = normalizer(name, 64, axes)(x).detach()
    assert y.shape == x.shape
    assert float(y.square().mean()) == pytest.approx(1, rel=0.02)
    assert name == "rms" or abs(float(y.mean())) < 1e-3


@pytest.mark.parametrize("name", LAYERS)
def test_convolutional_features_get_the_layer_of_that_name(name: str) -> None:
    assert type(normalizer(name, 64, 2)) is LAYERS[name]


def test_layer_normalization_of_features_is_one_group() -> None:
    made = {name: normalizer(name, 64, 2) for name in ("layer", "group")}
    assert [module.num_groups for module in made.values() if isinstance(module, nn.GroupNorm)] == [1, 32]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: normalizer("bath", 8), "'bath': choose from none, batch, layer, group, instance, rms"),
        (lambda: resnet18(normalizer="bn"), "'bn': choose from none, batch"),
        (lambda: mlp(8, 3, 4, normalizer="instance"), "needs spatial axes"),
        (lambda: normalizer("batch", 8, 4), "0 to 3 spatial axes, not 4"),
        (lambda: resnet18(stem="large"), "'large': choose from imagenet, small"),
        (lambda: mlp(depth=0), "at least 1"),
    ],
)
def test_errors_are_one_line_that_lists_the_choices(call: object, words: str) -> None:
    with pytest.raises(InputError) as caught:
        call()  # type: ignore[operator]
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_global_random_state_is_untouched() -> None:
    before = torch.random.get_rng_state()
    first, second = mlp(8, 3, 4), mlp(8, 3, 4)
    resnet18(3, stem="small")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first[1].weight, second[1].weight)
