"""Models moved by random elements of their symmetry groups are the same function; one weight changed by 1 % is named."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import normscope as ns
from normscope._checkpoint.aligning import aligned
from normscope._checkpoint.running import in_mode, outputs_apart, ran
from normscope.core.data import Call
from normscope.symmetry.groups import ScaleGroup
from tests.checkpoint.models import built

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
V = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))


def seeded(*layers: nn.Module) -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


MODELS = {
    "conv BN": (lambda: seeded(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)), X),
    "conv GN": (lambda: seeded(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)), X),
    "conv IN": (lambda: seeded(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)), X),
    "LN": (lambda: seeded(nn.Linear(12, 20), nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, 3)), V),
    "RMS": (lambda: seeded(nn.Linear(12, 20), nn.RMSNorm(20, eps=1e-6), nn.Linear(20, 3)), V),
    "BN1d": (lambda: seeded(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 3)), V),
    "leaky ReLU": (lambda: seeded(nn.Linear(12, 20), nn.LeakyReLU(), nn.Linear(20, 20), nn.LeakyReLU(), nn.Linear(20, 3)), V),
    "residual": (lambda: seeded(nn.Linear(12, 12), Residual(), Residual(), nn.LayerNorm(12), nn.Linear(12, 3)), V),
    "Llama": (lambda: copy.deepcopy(built("Llama")[0]), {"inputs_embeds": torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))}),
    "GPT2": (lambda: copy.deepcopy(built("GPT2")[0]), {"inputs_embeds": torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))}),
    "Qwen3": (lambda: copy.deepcopy(built("Qwen3")[0]), {"inputs_embeds": torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))}),
}  # fmt: skip


def moved(model: nn.Module, example: object, seed: int) -> tuple[nn.Module, bool]:
    """A copy moved by a random element of every group, scales in [½, 2]; whether anything moved."""
    report = ns.symmetries(model, example, mode="train")
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(model).double()
    parameters = {name: value.detach() for name, value in twin.named_parameters()}
    for group in report.groups:
        if isinstance(group, ScaleGroup):
            logs = (2 * torch.rand(group.count, generator=generator, dtype=torch.float64) - 1) * math.log(2)
            parameters = {**parameters, **group.scaled(parameters, logs)}
        else:
            parameters = {**parameters, **group.transform(parameters, generator)}
    with torch.no_grad():
        for name, value in twin.named_parameters():
            value.copy_(parameters[name])
    return twin, len(report.groups) > 0


def slow(*names: str) -> list:
    return [pytest.param(name, marks=pytest.mark.full) if name in names else name for name in MODELS]


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", slow("GPT2", "Qwen3"))
def test_symmetric_models_are_the_same_and_a_changed_weight_is_named(name):
    make, example = MODELS[name]
    model = make().train()
    twin, any_moved = moved(model, example, 1)
    found = ns.diff(model.double(), twin, example=example, mode="train")
    assert any_moved and found.same is True and found.first is None, found.explanation
    assert "train" in found.mode and found.defect < 0.01
    weights = [
        key
        for key, value in twin.named_parameters()
        if value.dim() >= 2 and "embed" not in key and "wte" not in key and "wpe" not in key
    ]
    chosen = weights[len(weights) // 2]
    with torch.no_grad():
        value = dict(twin.named_parameters())[chosen].view(-1)
        value[int(value.abs().argmax())] *= 1.01
    changed = ns.diff(model, twin, example=example, mode="train")
    assert changed.same is False and changed.first == chosen, (chosen, changed.explanation)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", slow("GPT2", "Qwen3", "Llama", "residual"))
def test_whichever_weight_changes_it_alone_is_left(name):
    """q, k, v, o, up, down, head, γ, β and biases, beside a random symmetry: the largest entry, any entry or, of matrices, all by 1 %.

    All entries of a bias may be a change of β before it, up to a symmetry.
    """
    make, example = MODELS[name]
    model = make().train()
    twin, _ = moved(model, example, 2)
    groups = ns.symmetries(model, example, mode="train").groups
    one = {key: value.detach().double() for key, value in model.named_parameters()}
    other = {key: value.detach() for key, value in twin.named_parameters()}
    free = {group.parameters[0] for group in groups if group.kind == "shift" and len(group.actions) == 1}  # biases before a norm
    assert aligned(groups, one, other).left == ()
    generator = torch.Generator().manual_seed(0)
    for number, victim in enumerate(other):
        flat = other[victim].clone().flatten()
        place = int(flat.abs().argmax()) if number % 3 == 0 else int(torch.randint(len(flat), (1,), generator=generator))
        noise = torch.randn(flat.shape, generator=generator, dtype=flat.dtype) * flat.square().mean().sqrt()
        whole = number % 3 == 2 and other[victim].dim() > 1
        flat = flat + 0.01 * noise if whole else flat.index_fill(0, torch.tensor([place]), 1.01 * float(flat[place]))
        found = aligned(groups, one, {**other, victim: flat.reshape(other[victim].shape)})
        assert found.left == (victim,) or (victim in free and found.left == ()), (victim, found.left)


class Tokens(nn.Module):
    """A class token and positions, whose sum alone is read."""

    def __init__(self):
        super().__init__()
        self.cls, self.position = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(10 * torch.randn(1, 4, 6))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position))


@pytest.mark.parametrize("entries", [1, 6])
@pytest.mark.parametrize("victim", ["cls", "position"])
def test_of_equivalent_changes_the_one_that_was_made_is_named(victim, entries):
    torch.manual_seed(0)
    model, example = Tokens().double(), torch.randn(2, 3, 6).double()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        getattr(twin, victim)[0, 0, :entries] *= 1.01
    found = ns.diff(model, twin, example=example)
    assert found.same is False and found.first == victim, found.explanation


@pytest.mark.parametrize(("dtype", "same"), [(torch.float32, True), (torch.float16, True), (torch.bfloat16, None)])
def test_weights_rescaled_in_their_stored_type_are_the_same_and_one_percent_is_not(dtype, same):
    """3 W rounds where W is stored in few bits: outputs differ by that, and the answer says so. In bfloat16 1 % is a rounding."""
    model = MODELS["conv BN"][0]().to(dtype)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight *= 3
        twin[3].weight *= 3
    found = ns.diff(model, twin, example=X, mode="train")
    assert found.same is same and "storage" in found.mode and 1e-9 < found.defect < 0.01, found.explanation
    for place in (0, 7, 100):
        changed = copy.deepcopy(twin)
        with torch.no_grad():
            changed[3].weight.view(-1)[place] *= 1.01
        found = ns.diff(model, changed, example=X, mode="train")
        assert found.same is not True and (not same or found.first == "3.weight"), found.explanation


@pytest.mark.parametrize(("dtype", "same"), [(torch.float32, True), (torch.float16, None)])
def test_a_rounding_that_could_hide_a_change_is_not_called_the_same(dtype, same):
    """β moves into the next bias, a sum: in few bits its rounding is larger than 1 % of a small entry."""
    model = seeded(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 3)).to(dtype)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[1].bias += 0.3
        twin[2].bias -= 0.3 * twin[2].weight.sum(1)
    found = ns.diff(model, twin, example=V, mode="train")
    assert found.same is same and found.first is None, found.explanation


def test_attention_that_drops_by_itself_does_not_make_a_difference():
    """GPT-2's attention reads p of a dropout layer that it never calls."""
    model = in_mode(built("GPT2")[0], "train")
    call = Call.of({"inputs_embeds": torch.randn(2, 5, 16, dtype=torch.float64)})
    with torch.no_grad():
        assert outputs_apart([ran(model, call)], [ran(model, call)]) < 1e-14


def test_rows_of_a_vocabulary_that_no_input_reads_are_not_called_the_same():
    """The example's ids reach few rows of an embedding: others may hold anything."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight[40] += torch.randn(8)
    ids = torch.arange(10).reshape(2, 5)
    assert ns.diff(model, twin, example=ids).same is not True
    twin = copy.deepcopy(model)
    assert ns.diff(model, twin, example=ids).same is True


def test_a_dead_unit_is_not_called_the_same():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].bias[0] = -100.0
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[2].weight[:, 0] += 1.0
    assert ns.diff(model, twin, example=torch.randn(4, 4)).same is not True


def test_another_epsilon_is_another_function():
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    twin = copy.deepcopy(model)
    twin[1].eps = 1e-3
    found = ns.diff(model, twin, example=torch.randn(4, 4))
    assert found.same is False and found.first == "1"


def test_the_first_layer_that_adds_an_error_is_named():
    model = seeded(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[2].weight += 1e-3
    found = ns.diff(model, twin, example=torch.randn(4, 4), mode="eval")
    assert found.first == "2.weight" and any("adds an error" in note and note.endswith("2") for note in found.notes)


def test_an_example_is_for_modules(tmp_path):
    with pytest.raises(ns.InputError, match="two modules"):
        ns.diff(tmp_path, tmp_path, example=torch.randn(1, 4))


def normalized_by_batch() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_outputs_that_are_not_finite_decide_nothing(bad):
    model, x = normalized_by_batch(), torch.randn(4, 5, dtype=torch.float64)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken[0].weight[0, 0] = bad
    assert ns.diff(broken, copy.deepcopy(broken), example=x).same is None
    assert ns.diff(model, broken, example=x).same is ns.diff(broken, model, example=x).same is False


@pytest.mark.quick(1)
@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e200])
def test_weights_of_any_size_are_compared(scale):
    model, x = normalized_by_batch(), torch.randn(4, 5, dtype=torch.float64)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(scale)
    for pair in ((model, other), (other, model)):
        assert ns.diff(*pair, example=x).same is not True


def test_running_statistics_that_train_mode_does_not_read_are_noted():
    model, x = normalized_by_batch(), torch.randn(4, 5, dtype=torch.float64)
    other = copy.deepcopy(model)
    other[4].running_var.mul_(2)
    found = ns.diff(model, other, example=x)
    assert found.same and any("4.running_var" in note and 'mode="eval"' in note for note in found.notes)
    assert ns.diff(model, other, example=x, mode="eval").first == "4.running_var"


def test_an_epsilon_that_was_folded_away_is_no_difference():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(16, 4)
    for _ in range(5):
        model(x)
    found = ns.diff(model.eval(), ns.fold(model, example=x), example=x, mode="eval")
    assert "ε" not in found.explanation and found.defect < 1e-6


def test_equal_weights_with_nan_are_equal_and_others_differ():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    same, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        other.weight[1, 1] += 1
    for against, said in ((same, "equal"), (other, "differs")):
        found = ns.diff(model, against, example=torch.randn(4, 3), mode="eval")
        assert found.same is None and [row.how for row in found.rows] == [said, "equal"]
