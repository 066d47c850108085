"""The lab's networks are the standard ones, differ in nothing but the normalizer, and leave global random state alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.lab.datasets import load_data
from normscope.lab.models import NETWORKS, NORMALIZERS, build, efficientnet_b3, gpt, mlp, normalizer, resnet18, vgg, vit
from normscope.lab.models.normalizers import BatchRenorm, has_layer, token_normalizer

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


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_resnet18_runs_with_every_normalizer(name: str) -> None:
    model = resnet18(10, name, "small")
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    biased = [module.bias is not None for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(biased) == 20 and all(biased) == any(biased) == (not has_layer(name))


@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "instance"])
def test_mlp_runs_with_every_normalizer(name: str) -> None:
    model = mlp(32, 4, inputs=64, classes=5, normalizer=name)
    output = model(torch.randn(6, 1, 8, 8))
    output.square().sum().backward()
    assert output.shape == (6, 5)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert sum(isinstance(module, nn.Linear) for module in model) == 4
    assert len(model) == (1 + 4 + 2 * 3 if has_layer(name) else 1 + 4 + 3)


def test_the_normalizer_is_the_only_difference() -> None:
    def weights(name: str) -> list[torch.Tensor]:
        model = mlp(16, 3, 8, normalizer=name, generator=torch.Generator().manual_seed(3))
        return [module.weight for module in model if isinstance(module, nn.Linear)]

    for name in ("batch", "layer", "rms", "renorm", "scaled"):
        assert all(torch.equal(a, b) for a, b in zip(weights("none"), weights(name), strict=True))


def test_weights_have_the_he_variance() -> None:
    model = mlp(400, 3, 300)
    deviations = [float(module.weight.detach().std()) for module in model if isinstance(module, nn.Linear)]
    assert deviations == pytest.approx([(2 / 300) ** 0.5, (2 / 400) ** 0.5, (1 / 400) ** 0.5], rel=0.05)


@pytest.mark.quick(12)
@pytest.mark.parametrize(
    ("name", "axes"),
    [(name, axes) for name in NORMALIZERS for axes in range(4) if has_layer(name) and (name, axes) != ("instance", 0)],
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
        (
            lambda: normalizer("bath", 8),
            "'bath': choose from none, batch, layer, group, instance, rms, renorm, weight, spectral, scaled",
        ),
        (lambda: resnet18(normalizer="bn"), "'bn': choose from none, batch"),
        (lambda: mlp(8, 3, 4, normalizer="instance"), "needs spatial axes"),
        (lambda: normalizer("batch", 8, 4), "0 to 3 spatial axes, got 4"),
        (lambda: resnet18(stem="large"), "'large': choose from imagenet, small"),
        (lambda: mlp(depth=0), "at least 1"),
        (lambda: mlp(8, 3, 4, normalizer="batch", normalized=3), "from 0 to 2, the hidden layers"),
        (lambda: vit(size=10, patch=4), "patches of 4×4: choose a divisor of 10"),
        (lambda: gpt(width=10, heads=4), "a width of 10 cannot be shared by 4 heads"),
        (lambda: build("lenet", load_data("digits"), "none"), "no network 'lenet': choose from mlp"),
        (lambda: build("mlp", load_data("digits"), "none", deep=3), "mlp has no option deep: choose from width, depth"),
        (lambda: build("gpt", load_data("digits"), "none"), "choose data like that, such as markov"),
        (lambda: build("resnet18", load_data("gaussians"), "none"), "are not images"),
        (lambda: build("resnet18", load_data("digits"), "instance", stem="small"), "cannot take samples of 3×8×8"),
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
    efficientnet_b3(3, "spectral")


def test_efficientnet_b3_is_the_standard_one() -> None:
    model = efficientnet_b3()
    assert sum(parameter.numel() for parameter in model.parameters()) == 12_233_232
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 78
    names = set(model.state_dict())
    assert {"features.0.0.weight", "features.1.0.block.1.fc1.bias", "features.2.0.block.3.0.weight", "classifier.1.bias"} <= names
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 1000)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "instance"])
def test_other_networks_run_with_every_normalizer(name: str) -> None:
    images, ids = torch.rand(4, 3, 8, 8), torch.randint(16, (4, 6))
    models = {vgg(widths=((8,), (16,)), normalizer=name): images, vit(normalizer=name, size=8, patch=2, width=16, depth=2): images}
    models[gpt(normalizer=name, width=16, depth=2)] = ids
    for model, batch in models.items():
        model(batch).square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "instance"])
def test_efficientnet_runs_with_every_normalizer(name: str) -> None:
    assert efficientnet_b3(10, name).train()(torch.rand(2, 3, 8, 8)).isfinite().all()


@pytest.mark.quick(2)
@pytest.mark.parametrize("network", ["mlp", "vgg", "vit"])
@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "instance"])
def test_networks_are_certified_or_refused_with_a_reason(network: str, name: str) -> None:
    import normscope as ns

    options = {
        "mlp": {"width": 8, "depth": 3},
        "vgg": {"widths": [[4], [8]]},
        "vit": {"patch": 4, "width": 8, "depth": 1, "heads": 2},
    }
    model, split = build(network, load_data("digits"), name, **options[network])
    found = ns.lipschitz(model.eval(), split.train[0][:2])
    assert found.lower <= found.upper and (found.upper.log10 < 300 or "attention is not Lipschitz" in (found.reason or ""))


def test_a_network_on_ids_is_refused_and_on_embeddings_certified() -> None:
    import normscope as ns

    model = gpt(width=8, depth=1, heads=2).eval()
    with pytest.raises(InputError, match="pass embeddings"):
        ns.lipschitz(model, torch.randint(16, (2, 6)))
    assert ns.lipschitz(model, torch.randn(2, 6, 8)).upper.log10 < 300


def test_weight_and_spectral_normalization_hold_all_layers_but_the_last() -> None:
    x = torch.rand(6, 1, 8, 8)
    plain, weighted = (mlp(16, 4, 64, normalizer=name, generator=torch.Generator().manual_seed(1)) for name in ("none", "weight"))
    assert torch.allclose(plain(x), weighted(x), atol=1e-5)  # the start is the same function
    spectral = mlp(16, 4, 64, normalizer="spectral").eval()
    norms = [float(torch.linalg.matrix_norm(module.weight.detach(), 2)) for module in spectral if isinstance(module, nn.Linear)]
    assert norms[:-1] == pytest.approx([1.0] * 3, rel=0.05) and norms[-1] > 1.05


def test_scaled_initial_weights_keep_the_variance_of_residual_networks() -> None:
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    sizes = {name: float(resnet18(10, name, "small")(x).detach().std()) for name in ("none", "scaled")}
    assert sizes["scaled"] < sizes["none"] / 3


def test_causal_attention_does_not_see_the_future() -> None:
    model = gpt(width=16, depth=2).eval()
    model.head = nn.Identity()
    ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    inner = nn.Sequential(model.blocks)
    x = model.embedding(ids)
    changed = x.clone()
    changed[:, 5:] += 1
    assert torch.allclose(inner(x)[:, :5], inner(changed)[:, :5], atol=1e-6)


def test_batch_renormalization_starts_as_batch_normalization_and_ends_with_running_statistics() -> None:
    x = 2 + 3 * torch.randn(64, 5, 4, generator=torch.Generator().manual_seed(0))
    renorm, plain = BatchRenorm(5), nn.BatchNorm1d(5)
    assert torch.allclose(renorm(x), plain(x), atol=1e-5)
    for _ in range(200):
        renorm(x)
    renorm.num_batches_tracked.fill_(BatchRenorm.warm_up)
    train = renorm(x + 0.5)  # a shift of the batch is seen, for the running mean does not follow at once
    renorm.running_mean.copy_(x.mean((0, 2)))
    assert abs(float(train.detach().mean()) - 0.5 / 3) < 0.05
    assert torch.allclose(renorm.eval()(x), plain.train()(x), atol=1e-2)


@pytest.mark.parametrize("name", ["batch", "layer", "group", "rms", "renorm"])
def test_token_normalizers_normalize(name: str) -> None:
    x = 5 + 3 * torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(0))
    y = token_normalizer(name, 64)(x).detach()
    assert y.shape == x.shape and float(y.square().mean()) == pytest.approx(1, rel=0.02)


def test_every_network_is_built_for_data() -> None:
    for name in NETWORKS:
        options = {"mlp": {"width": 8}, "vit": {"patch": 2, "width": 16, "depth": 1}, "gpt": {"width": 16, "depth": 1}}
        model, split = build(name, load_data("markov" if name == "gpt" else "digits"), "batch", **options.get(name, {}))
        assert model(split.train[0][:3]).shape == (3, split.classes)
