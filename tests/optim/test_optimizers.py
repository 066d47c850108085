"""Laws of the optimizers: norms kept, scale forgotten, plain elsewhere, and everything that torch's own can do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.geometry.sphere import Spheres
from normscope.geometry.vectors import Vectors
from normscope.optim import SGDG, SGDP, AdamG, AdamP
from tests.optim.standin import DENSE, MODELS, Group, Report, batch, dense, joint, parameters_equal, train

SPHERICAL = [(SGDG, {"momentum": 0.9}), (AdamG, {})]
PROJECTED = [(SGDP, {"momentum": 0.9}), (AdamP, {})]
ALL = SPHERICAL + PROJECTED
EMPTY = Report()


def each(pairs):
    return pytest.mark.parametrize("kind, settings", pairs, ids=[pair[0].__name__ for pair in pairs])


def norms(model, report):
    named = dict(model.named_parameters())
    rows = []
    for group in report.groups:
        if group.kind != "shift":
            tensors = [named[name].detach().double() for name in group.parameters]
            rows.append(Vectors.of(tensors, group.axes, group.blocks).gather(tensors).norm(dim=1))
    return torch.cat(rows)


@each(SPHERICAL)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_stay_constant_over_a_thousand_steps(kind, settings, name, dtype):
    make, report = MODELS[name]
    model = make(dtype)
    before = norms(model, report)
    losses = train(model, kind(model.named_parameters(), symmetries=report, **settings), batch(name, dtype), 1000)
    assert float((norms(model, report) / before - 1).abs().max()) <= 1e-6
    assert losses[-1] < 0.1 * losses[0]


@each(SPHERICAL)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_training_forgets_the_scale_of_initial_weights(kind, settings, name, factor):
    make, report = MODELS[name]
    functions = []
    for scale in (1.0, factor):
        model = make(torch.float64, epsilon=1e-12 * min(1, factor**2))
        named = dict(model.named_parameters())
        with torch.no_grad():
            for group in report.groups:
                for parameter in group.parameters if group.kind != "shift" else ():
                    named[parameter].mul_(scale)
        data = batch(name, torch.float64)
        train(model, kind(model.named_parameters(), symmetries=report, orthogonality=0.1, **settings), data, 100)
        functions.append(model(data[0]).detach())
    assert float((functions[0] - functions[1]).abs().max()) <= 1e-4


@each(SPHERICAL)
def test_the_angle_of_a_step_is_rate_times_gradient(kind, settings):
    model, data = dense(torch.float64), batch("dense", torch.float64)
    optimizer = kind(model.named_parameters(), lr=0.01, sphere_ratio=2.0, clip=None, symmetries=DENSE)
    before = model[0].weight.detach().clone()
    train(model, optimizer, data, 1)
    after, gradient = model[0].weight.detach(), model[0].weight.grad
    on_sphere = gradient.norm(dim=1) * before.norm(dim=1)
    expected = 0.02 * on_sphere if kind is SGDG else 0.02 * on_sphere / (on_sphere + 1e-8)
    torch.testing.assert_close(Spheres((0,)).distance(before, after), expected, rtol=1e-5, atol=1e-9)


def test_clipping_bounds_the_angle():
    model = dense(torch.float64)
    with torch.no_grad():
        model[0].weight.mul_(100)  # nothing changes for the sphere
    before = model[0].weight.detach().clone()
    train(
        model,
        SGDG(model.named_parameters(), lr=1.0, sphere_ratio=1.0, clip=1e-3, symmetries=DENSE),
        batch("dense", torch.float64),
        1,
    )
    assert float(Spheres((0,)).distance(before, model[0].weight.detach()).max()) == pytest.approx(1e-3, rel=1e-9)


def test_the_orthogonality_penalty_makes_rows_orthogonal():
    layer = nn.Linear(8, 5, bias=False).double()
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    report = Report((Group("scale", ("weight",), ((0,),)),))
    optimizer = SGDG(layer.named_parameters(), lr=0.05, sphere_ratio=1, clip=None, orthogonality=1.0, symmetries=report)
    layer.weight.grad = torch.zeros_like(layer.weight)
    for _ in range(300):
        optimizer.step()
    unit = nn.functional.normalize(layer.weight.detach())
    torch.testing.assert_close(unit @ unit.T, torch.eye(5, dtype=torch.float64), atol=1e-8, rtol=0)


@each(PROJECTED)
@pytest.mark.parametrize("name", MODELS)
def test_projected_steps_have_no_radial_part(kind, settings, name):
    make, report = MODELS[name]
    model, data = make(torch.float64), batch(name, torch.float64)
    optimizer = kind(model.named_parameters(), lr=0.05, symmetries=report, **settings)
    train(model, optimizer, data, 5)
    named = dict(model.named_parameters())
    before = {key: value.detach().clone() for key, value in named.items()}
    train(model, optimizer, data, 1)
    for group in report.groups:
        if group.kind == "shift":
            continue
        tensors = [before[key] for key in group.parameters]
        vectors = Vectors.of(tensors, group.axes, group.blocks)
        old, new = vectors.gather(tensors), vectors.gather([named[key].detach() for key in group.parameters])
        torch.testing.assert_close((old * (new - old)).sum(1), torch.zeros(vectors.count, dtype=torch.float64), atol=1e-14, rtol=0)
        assert (new - old).norm() > 1e-6


@pytest.mark.parametrize(
    "ours, theirs, settings",
    [
        (SGDP, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        (SGDP, torch.optim.SGD, {"lr": 0.1}),
        (SGDG, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (AdamP, torch.optim.Adam, {}),
        (AdamP, torch.optim.AdamW, {"weight_decay": 0.01, "betas": (0.8, 0.99), "eps": 1e-6}),
        (AdamG, torch.optim.AdamW, {"weight_decay": 0.1}),
    ],
)
@pytest.mark.parametrize("foreach", [True, False, None])
def test_without_symmetries_they_are_torchs_bit_for_bit(ours, theirs, settings, foreach):
    models = [dense(), dense()]
    for model, optimizer in zip(
        models,
        (
            ours(models[0].named_parameters(), symmetries=EMPTY, foreach=foreach, **settings),
            theirs(models[1].parameters(), foreach=foreach, **{"lr": 1e-2 if ours is SGDG else 1e-3} | settings),
        ),
        strict=True,
    ):
        train(model, optimizer, batch("dense"), 20)
    assert parameters_equal(*models)


@pytest.mark.parametrize(
    "kind, settings, theirs", [(SGDP, {"momentum": 0.9, "lr": 0.1}, torch.optim.SGD), (AdamP, {}, torch.optim.AdamW)]
)
def test_the_rest_of_a_model_moves_as_in_torch(kind, settings, theirs):
    """The classifier of a model with symmetries, given the same gradients."""
    model = dense()
    optimizer = kind(model.named_parameters(), symmetries=DENSE, weight_decay=0.01, **settings)
    copied = nn.Parameter(model[6].weight.detach().clone())
    other = theirs([copied], weight_decay=0.01, **settings)
    for _ in range(10):
        train(model, optimizer, batch("dense"), 1)
        copied.grad = model[6].weight.grad.clone()
        other.step()
    assert torch.equal(copied, model[6].weight)


@each(PROJECTED)
def test_scale_free_vectors_decay_by_their_share(kind, settings):
    layer = nn.Linear(4, 3, bias=False)
    before = layer.weight.detach().clone()
    report = Report((Group("scale", ("weight",), ((0,),)),))
    optimizer = kind(layer.named_parameters(), lr=0.1, weight_decay=0.5, decay_ratio=0.2, symmetries=report, **settings)
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before * (1 - 0.1 * 0.5 * 0.2 / (1 - settings.get("momentum", 0))))


@each(ALL)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_foreach_changes_nothing(kind, settings, name, dtype):
    make, report = MODELS[name]
    models = [make(dtype) for _ in range(3)]
    for model, foreach in zip(models, (True, False, None), strict=True):
        train(model, kind(model.named_parameters(), symmetries=report, foreach=foreach, **settings), batch(name, dtype), 5)
    for other in models[1:]:
        for first, second in zip(models[0].parameters(), other.parameters(), strict=True):
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


@each(ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_continues_identically(kind, settings, dtype, tmp_path):
    data = batch("dense", dtype)
    model = dense(dtype)
    optimizer = kind(model.named_parameters(), symmetries=DENSE, **settings)
    train(model, optimizer, data, 7)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    resumed = dense(dtype, seed=5)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    continued = kind(resumed.named_parameters(), symmetries=DENSE)
    continued.load_state_dict(saved["optimizer"])
    for each_model, each_optimizer in ((model, optimizer), (resumed, continued)):
        train(each_model, each_optimizer, data, 7)
    assert parameters_equal(model, resumed)


@each(ALL)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_copies_continue_identically(kind, settings, how):
    data = batch("dense")
    model = dense()
    optimizer = kind(model.named_parameters(), symmetries=DENSE, **settings)
    train(model, optimizer, data, 4)
    twin, other = how((model, optimizer))
    assert other.scale_free == optimizer.scale_free
    for each_model, each_optimizer in ((model, optimizer), (twin, other)):
        train(each_model, each_optimizer, data, 4)
    assert parameters_equal(model, twin)


@each(ALL)
def test_closures_and_schedulers(kind, settings):
    models, data = [dense(), dense()], batch("dense")
    optimizers = [kind(model.named_parameters(), symmetries=DENSE, **settings) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    losses = train(models[0], optimizers[0], data, 6, schedulers[0])

    def closure():
        optimizers[1].zero_grad()
        loss = nn.functional.cross_entropy(models[1](data[0]).double(), data[1])
        loss.backward()
        return loss

    for expected in losses:
        assert float(optimizers[1].step(closure).detach()) == expected
        schedulers[1].step()
    assert parameters_equal(*models)
    still = copy.deepcopy(models[0])
    for group in optimizers[0].param_groups:
        group["lr"] = 0.0
    train(models[0], optimizers[0], data, 2)
    for before, after in zip(still.parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-7)


@each(ALL)
def test_parameter_groups_have_their_own_settings(kind, settings):
    model, data = dense(), batch("dense")
    first, others = ([pair for pair in model.named_parameters() if (pair[0][0] == "0") == wanted] for wanted in (True, False))
    groups = [{"params": first, "lr": 0.0}, {"params": others}]
    before = copy.deepcopy(model)
    train(model, kind(groups, symmetries=DENSE, **settings), data, 3)
    torch.testing.assert_close(model[0].weight, before[0].weight, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(model[3].weight, before[3].weight)


@each(ALL)
def test_a_family_across_parameter_groups_takes_the_first_ones_settings(kind, settings):
    data = batch("dense")
    models = [dense(), dense()]
    report = Report((DENSE.groups[2],))
    weights, biases = ([p for p in models[0].parameters() if (p.dim() > 1) == many] for many in (True, False))
    split = kind([{"params": weights}, {"params": biases}], symmetries=report, model=models[0], **settings)
    whole = kind(models[1], symmetries=report, **settings)
    train(models[0], split, data, 5)
    train(models[1], whole, data, 5)
    assert split.scale_free == (("3.weight", "3.bias"),)
    assert parameters_equal(*models)


@each(ALL)
def test_added_parameter_groups_join_their_families(kind, settings):
    model, data = dense(), batch("dense")
    named = list(model.named_parameters())
    optimizer = kind([named[0], *named[4:]], symmetries=DENSE, **settings)
    assert ("0.weight",) in optimizer.scale_free and not optimizer.left_out
    partial = kind(named[:5], symmetries=DENSE, **settings)
    assert partial.scale_free == (("0.weight",),) and "3.bias is not among" in partial.left_out[0]
    partial.add_param_group({"params": named[5:]})
    assert partial.scale_free == (("0.weight",), ("3.weight", "3.bias")) and not partial.left_out
    train(model, partial, data, 2)


@each(ALL)
def test_channels_last_changes_nothing(kind, settings):
    make, report = MODELS["convolutional"]
    models = [make(torch.float64), make(torch.float64).to(memory_format=torch.channels_last)]
    for model in models:
        train(model, kind(model.named_parameters(), symmetries=report, **settings), batch("convolutional", torch.float64), 10)
    assert models[1][3].weight.is_contiguous(memory_format=torch.channels_last)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


@each(ALL)
def test_gradients_and_states_of_other_strides(kind, settings):
    """A model made channels_last after some steps: states are contiguous, parameters are not."""
    make, report = MODELS["convolutional"]
    models = [make(torch.float64), make(torch.float64)]
    for number, model in enumerate(models):
        optimizer = kind(model.named_parameters(), symmetries=report, **settings)
        for _ in range(3):
            train(model, optimizer, batch("convolutional", torch.float64), 2)
            if number:
                model.to(memory_format=torch.channels_last)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


@each(ALL)
def test_half_precision_moves_and_keeps_its_dtype(kind, settings):
    make, report = MODELS["convolutional"]
    model = make(torch.bfloat16)
    losses = train(model, kind(model.named_parameters(), symmetries=report, **settings), batch("convolutional", torch.bfloat16), 50)
    assert losses[-1] < losses[0] and all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())


@each(ALL)
def test_missing_gradients(kind, settings):
    model = dense()
    optimizer = kind(model.named_parameters(), symmetries=DENSE, **settings)
    before = copy.deepcopy(model)
    optimizer.step()  # no gradient at all
    assert parameters_equal(model, before)
    model[3].weight.grad = torch.ones_like(model[3].weight)
    optimizer.step()  # half of a joint family: a plain step, and nothing else moves
    assert torch.equal(model[3].bias, before[3].bias) and not torch.equal(model[3].weight, before[3].weight)
    assert torch.equal(model[0].weight, before[0].weight)


@each(ALL)
def test_frozen_parameters_never_move(kind, settings):
    model, data = dense(), batch("dense")
    model[3].bias.requires_grad_(False)
    before = model[3].bias.clone()
    optimizer = kind(model, symmetries=DENSE, **settings)
    train(model, optimizer, data, 3)
    assert torch.equal(model[3].bias, before) and optimizer.scale_free == (("0.weight",),)


@each(ALL)
def test_sparse_gradients_of_scale_free_embeddings(kind, settings):
    results = []
    for sparse in (False, True):
        table = nn.Embedding(6, 4, sparse=sparse)
        nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(0))
        optimizer = kind(table.named_parameters(), symmetries=Report((Group("scale", ("weight",), ((0,),)),)), **settings)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.layer_norm(table(torch.tensor([0, 2, 2, 5])), (4,))[:, 0].sum().backward()
            optimizer.step()
        results.append(table.weight.detach())
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_sparse_gradients_of_the_rest():
    table = nn.Embedding(6, 4, sparse=True)
    for kind, settings in ((SGDP, {}), (AdamP, {})):
        table.zero_grad()
        table(torch.tensor([1])).sum().backward()
        optimizer = kind(table.named_parameters(), symmetries=EMPTY, **settings)
        if kind is SGDP:
            optimizer.step()
        else:
            with pytest.raises(InputError, match="dense gradients"):
                optimizer.step()


@each(ALL)
def test_zero_vectors_and_zero_gradients(kind, settings):
    layer = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        layer.weight[1] = 0
    optimizer = kind(layer.named_parameters(), symmetries=Report((Group("scale", ("weight",), ((0,),)),)), **settings)
    layer.weight.grad = torch.zeros_like(layer.weight)
    before = layer.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before)
    layer.weight.grad[1] = 0.01
    for _ in range(3):
        optimizer.step()
    assert layer.weight.isfinite().all() and (layer.weight[1] < 0).all()
    torch.testing.assert_close(layer.weight.detach()[[0, 2]], before[[0, 2]])


@each(ALL)
def test_nan_gradients_stay_in_their_own_vectors(kind, settings):
    layer = nn.Linear(4, 3, bias=False)
    optimizer = kind(layer.named_parameters(), symmetries=Report((Group("scale", ("weight",), ((0,),)),)), **settings)
    layer.weight.grad = torch.ones(3, 4)
    layer.weight.grad[1, 2] = torch.nan
    optimizer.step()
    assert layer.weight[[0, 2]].isfinite().all() and layer.weight[1].isnan().any()


@pytest.mark.parametrize("scale", [1e-15, 1e15])
@each(ALL)
def test_extreme_scales_in_float32(kind, settings, scale):
    """The gradient of a scale-free weight is as small as the weight is large, and the other way round."""
    weight = nn.Parameter(scale * torch.randn(3, 50, generator=torch.Generator().manual_seed(0)))
    size = weight.detach().norm(dim=1)
    settings = settings | ({} if kind in (SGDG, AdamG) else {"lr": 1e-3 * scale * (scale if kind is SGDP else 1)})
    settings = settings | ({"eps": 0.0} if kind is AdamP else {})
    optimizer = kind([("w", weight)], symmetries=Report((Group("scale", ("w",), ((0,),)),)), **settings)
    for _ in range(5):
        direction = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
        weight.grad = Spheres((0,)).project(weight.detach(), direction) * 0.01 / scale
        before = weight.detach().clone()
        optimizer.step()
        assert weight.isfinite().all() and not torch.equal(weight, before)
    if kind in (SGDG, AdamG):
        assert float((weight.detach().norm(dim=1) / size - 1).abs().max()) < 1e-6


def test_shapes_that_are_odd():
    model = nn.ParameterDict({
        "scalar": nn.Parameter(torch.tensor(2.0)), "empty": nn.Parameter(torch.zeros(0, 3)), "middle": nn.Parameter(torch.randn(3, 4, 5)),
        "wide": nn.Parameter(torch.randn(2, 300_000)),
    })  # fmt: skip
    report = Report((
        Group("scale", ("scalar",), ((),)), Group("scale", ("empty",), ((0,),)), Group("scale", ("middle",), ((2, 0),)),
        Group("scale", ("wide",), ((0,),)),
    ))  # fmt: skip
    for kind, settings in ALL:
        copied = copy.deepcopy(model)
        optimizer = kind(copied.named_parameters(), symmetries=report, **settings)
        for parameter in copied.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert all(p.isfinite().all() for p in copied.values())
        torch.testing.assert_close(copied["scalar"].detach(), torch.tensor(2.0))  # a sphere in one dimension is two points


def test_groups_that_cannot_be_spheres_are_named():
    model = dense()
    report = Report((
        joint("6.weight", "3.weight", axes=((), ()), degrees=(1.0, 2.0)), Group("scale", ("0.weight",), ((),)),
        Group("scale", ("0.weight",), ((0,),), count=16), joint("gone", "0.bias", axes=((), ())),
        Group("rescale", ("0.weight", "3.weight"), ((0,), (1,)), (1, 1), (1.0, -1.0)),
    ))  # fmt: skip
    optimizer = AdamP(model, symmetries=report)
    assert optimizer.scale_free == (("0.weight",),)
    reasons = "\n".join(optimizer.left_out)
    assert len(optimizer.left_out) == 3
    assert optimizer._known_families()[0].vectors.count == 16  # the finer of two
    assert "already turns with 0.weight" in reasons and "gone is not among" in reasons and "different powers" in reasons


def test_vectors_that_are_no_runs_along_an_axis_make_plain_steps():
    @dataclass(frozen=True)
    class Partial(Group):
        @property
        def members(self):
            return (torch.tensor([0] * 8 + [-1] * 8)[:, None],)

    optimizer = AdamP(dense(), symmetries=Report((Partial("scale", ("0.weight",), ((0,),)),)))
    assert optimizer.scale_free == () and "not runs of equal length" in optimizer.left_out[0]


def test_errors_say_what_to_do():
    model = dense()
    with pytest.raises(InputError, match=r"pass symmetries=ns\.symmetries"):
        AdamP(model.parameters())
    with pytest.raises(InputError, match="named_parameters"):
        AdamP(model.parameters(), symmetries=DENSE)
    with pytest.raises(InputError, match="DistributedDataParallel"):
        AdamP([(f"module.{name}", p) for name, p in model.named_parameters()], symmetries=DENSE)
    optimizer = AdamP(model)
    with pytest.raises(InputError, match="no forward pass"):
        optimizer.step()
    for settings, words in (
        ({"lr": -1}, "lr is at least 0"), ({"weight_decay": -1}, "weight_decay"), ({"momentum": 1.0}, "momentum is in"),
        ({"nesterov": True}, "needs momentum"), ({"clip": 0.0}, "clip is positive"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            SGDG(model.named_parameters(), symmetries=DENSE, **settings)
    with pytest.raises(InputError, match="betas"):
        AdamG([{"params": model.named_parameters(), "betas": (0.9, 1.0)}], symmetries=DENSE)
