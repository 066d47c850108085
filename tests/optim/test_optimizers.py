"""What torch's optimizers can do, these can: equal to them without symmetries, and the rest of the contract."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.optim import SGDG, SGDP, AdamG, AdamP
from tests.optim.standin import ALL, DENSE, MODELS, Group, Report, batch, dense, each, joint, parameters_equal, train

EMPTY = Report()


@pytest.mark.quick(9)
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


@pytest.mark.quick(8)
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
def test_a_learning_rate_may_be_a_tensor(kind, settings):
    models, data = [dense(), dense()], batch("dense")
    for model, lr in zip(models, (1e-3, torch.tensor(1e-3, dtype=torch.float64)), strict=True):
        train(model, kind(model, lr=lr, symmetries=DENSE, **settings), data, 3)
    assert parameters_equal(*models)


@each(ALL)
@pytest.mark.parametrize("foreach", [True, False])
def test_nothing_waits_for_the_device(kind, settings, foreach):
    """Tensors of the meta device have no values: reading one, as a wait for a device would, raises."""
    model = dense().to("meta")
    optimizer = kind(model, symmetries=DENSE, foreach=foreach, **settings)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    for _ in range(2):
        optimizer.step()


@each(ALL)
def test_gradient_scaling_skips_steps_that_overflowed(kind, settings):
    model, data = dense(), batch("dense")
    optimizer, scaler = kind(model, symmetries=DENSE, **settings), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model)
    for overflow in (True, False):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        scaler.scale(loss * (torch.inf if overflow else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameters_equal(model, before) == overflow


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
        ({"lr": -1}, "lr must be at least 0"), ({"weight_decay": -1}, "weight_decay"), ({"momentum": 1.0}, "momentum must be in"),
        ({"nesterov": True}, "needs momentum"), ({"clip": 0.0}, "clip must be positive"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            SGDG(model.named_parameters(), symmetries=DENSE, **settings)
    with pytest.raises(InputError, match="betas"):
        AdamG([{"params": model.named_parameters(), "betas": (0.9, 1.0)}], symmetries=DENSE)
