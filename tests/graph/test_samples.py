"""Samples of a batch: networks that keep them apart are certified, networks that mix them are not, whatever they mix them with."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normscope as ns
from normscope.core.data import Call
from normscope.core.errors import InputError, Refusal
from normscope.graph.independence import unproved
from normscope.graph.samples import check_samples_independent

SHAPE = (4, 3)
WEIGHT = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3) + torch.eye(3, dtype=torch.float64)
WIDE = torch.linspace(-1, 1, 144, dtype=torch.float64).reshape(12, 12) + torch.eye(12, dtype=torch.float64)
KERNEL = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(4, 4, 3)
TOKEN = torch.linspace(0, 1, 3, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, *steps) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


def written(x):
    y = x.clone()
    y[:, 0] += 1
    y[:, 1:].mul_(2)
    y.select(1, 2).copy_(x[:, 3])
    return y


def through_view(x):
    y = x.clone(memory_format=torch.contiguous_format)
    for part in y.flatten(1).chunk(2, 1):
        part.tanh_()
    return y


def attention(x):
    query, key, value = (F.linear(x, WEIGHT * scale).unsqueeze(1) for scale in (1, 0.5, 2))
    return x + F.scaled_dot_product_attention(query, key, value).squeeze(1)


def with_token(x):
    tokens = TOKEN.expand(x.shape[0], 1, -1)
    return F.linear(torch.cat([tokens, x], 1), WEIGHT)[:, 1:] + tokens


APART = [
    torch.tanh,
    written,
    through_view,
    attention,
    with_token,
    lambda x: F.linear(x, WEIGHT),
    lambda x: F.linear(x.flatten(1), WIDE).view(-1, *SHAPE),
    lambda x: F.linear(x.transpose(0, 1), WEIGHT).transpose(0, 1),
    lambda x: (x.reshape(-1, 3) @ WEIGHT).reshape(x.shape),
    lambda x: x.permute(2, 0, 1).flip(0).permute(1, 2, 0),
    lambda x: torch.einsum("bij,jk->bik", x, WEIGHT) + torch.einsum("bij,bkj->bik", x, x).sum(2, keepdim=True),
    lambda x: x + torch.bmm(x, x.transpose(1, 2)).softmax(-1) @ x,
    lambda x: x.cumsum(1) + x.roll(1, 2),
    lambda x: F.layer_norm(x, (3,)) + x,
    lambda x: F.group_norm(x, 2) + x,
    lambda x: F.instance_norm(x) + x,
    lambda x: F.batch_norm(x, torch.ones(4, dtype=x.dtype), torch.full((4,), 2.0, dtype=x.dtype)),
    lambda x: F.conv1d(x, KERNEL, padding=1),
    lambda x: F.max_pool1d(F.pad(x, (1, 1)), 3, 1) + x,
    lambda x: F.pad(x, (0, 1, 2, 0, 0, 0))[:, :4, :3] + x,
    lambda x: x.sort(1).values + x,
    lambda x: x[:, [3, 1, 0, 2]],
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: x + x.gather(1, x.argsort(1)),
    lambda x: torch.stack(x.unbind(1)[::-1], 1),
    lambda x: x + x.mean((1, 2), keepdim=True) / x.norm(dim=2, keepdim=True).clamp(min=1),
    lambda x: torch.cat([x[:, 2:], x.new_zeros(x.size(0), 2, 3)], 1) + x,
    lambda x: x.repeat(1, 2, 1)[:, 2:6],
    lambda x: torch.cat([torch.tensor([], dtype=x.dtype), x], 1),  # how caches begin
    lambda x: torch._safe_softmax(x, -1),
]  # fmt: skip


def written_to_next(x):
    y = x.clone()
    y[1:] += x[:-1]
    return y


def written_flat(x):
    y = x.clone()
    y.view(-1)[12:] = x.reshape(-1)[:-12]
    return y + x


def written_through_buffer(x):
    memory = torch.zeros(3, dtype=x.dtype)
    memory.add_(x.sum((0, 1)))
    return x + memory


def written_to_a_view_or_a_copy(x):
    """Flattened, a transposed batch is a copy, and one sample a view: what is written is lost in a batch alone."""
    y = x.transpose(0, 1).contiguous().transpose(0, 1)
    y.flatten(1).tanh_()
    return y


def from_python(x):
    return x + x.new_tensor(x.flip(0).tolist())


@torch.jit.script
def other_at_forty(x: torch.Tensor):
    rows = [x[i] * (1.001 if i == 40 else 1.0) for i in range(x.shape[0])]
    return torch.stack(rows)


MIXED = [
    other_at_forty,
    written_to_next,
    written_flat,
    written_through_buffer,
    written_to_a_view_or_a_copy,
    from_python,
    lambda x: x + F.pad(x, (0, 0, 0, 0, 1, 0))[:-1],
    *(lambda x, k=k: x + x.roll(k, 0) for k in (1, 2, 3, 4, 60)),
    *(lambda x, w=w: x + w * x.mean(0) for w in (1.0, 1e-3, 1e-6, 1e-9)),
    lambda x: x.flip(0),
    lambda x: x.cumsum(0),
    lambda x: x.sort(0).values,
    lambda x: x + 1e-3 * x.amax(0),
    lambda x: 1e9 + x + 50 * torch.fmax(x, x.flip(0)),
    lambda x: x + x.softmax(0),
    lambda x: x + torch.einsum("bij,cij->bc", x, x).sum(1)[:, None, None],
    lambda x: x.reshape(-1).roll(12).view_as(x),
    lambda x: x.reshape(-1).flip(0).view_as(x),
    lambda x: x.permute(1, 0, 2).reshape(x.shape),
    lambda x: x.reshape(4, -1, 3).permute(1, 0, 2),
    lambda x: x.reshape(3, -1, 4).permute(1, 2, 0),
    lambda x: torch.cat([x[-1:], x[:-1]]),
    lambda x: torch.cat([torch.tensor([], dtype=x.dtype), x[-1:], x[:-1]]),
    lambda x: x + torch._safe_softmax(x, 0),
    lambda x: x[torch.arange(x.shape[0]).flip(0)],
    lambda x: x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1)),
    lambda x: x.index_add(0, torch.arange(x.shape[0]), x.flip(0)),
    lambda x: x.as_strided(x.shape, x.stride()).roll(1, 0) + x,
    lambda x: F.batch_norm(x, None, None, training=True),
    lambda x: F.layer_norm(x.transpose(0, 2), (x.shape[0],)).transpose(0, 2),
    lambda x: F.conv1d(x.permute(1, 2, 0), torch.ones(3, 3, 3, dtype=x.dtype), padding=1).permute(2, 0, 1),
    lambda x: x * float(x.mean()),
    lambda x: x / x.shape[0],
    lambda x: x * torch.arange(1, 1 + x.shape[0])[:, None, None],
    lambda x: x if x.shape[0] < 5 else x.flip(0),
    lambda x: x.roll(1, 0) if x.shape[0] == 3 else x,
    lambda x: x * (2 if x.shape[0] > 1 else 1),
    lambda x: x[:1] + x,
    lambda x: x + torch.from_numpy(x.detach().numpy()[::-1].copy()),
    lambda x: x - x.mean(),
]  # fmt: skip


def example(seed: int = 0, size: int = 4) -> torch.Tensor:
    return torch.randn(size, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# of contiguous batches alone: no part of a chain
VIEWS = [lambda x: x.view(-1, 3).tanh().view(x.shape), lambda x: (x.view(len(x) * 4, 3) @ WEIGHT).view(-1, 4, 3)]


@pytest.mark.quick(14)
@pytest.mark.parametrize("step", VIEWS + APART)
def test_an_operation_on_every_sample_by_itself_is_proved(step):
    assert unproved(Net(step), Call.of(example()), lambda output: output) is None
    assert check_samples_independent(Net(step), example(), "eval") is None


@pytest.mark.parametrize("step", MIXED)
def test_an_operation_on_several_samples_is_neither_proved_nor_passed(step):
    with pytest.raises(Refusal, match=r"samples of a batch influence each other|from call to call"):
        check_samples_independent(Net(step), example(), "eval")


def chain(seed: int, mixed: bool) -> Net:
    """A few operations, one of them on several samples where that is wanted; most of them lose no direction."""
    choice = random.Random(seed)
    steps = [choice.choice(APART) for _ in range(choice.randint(1, 4))]
    if mixed:
        steps.insert(choice.randint(0, len(steps)), choice.choice(MIXED))
    return Net(*steps)


def mixes(net: Net, x: torch.Tensor) -> bool:
    """Whether it can be seen at all: behind tanh(1e9 + x) it cannot, nor where the network takes no batch."""
    others = (torch.cat([x[:1], example(seed, 3)]) for seed in range(20))
    with contextlib.suppress(RuntimeError):
        return not all(torch.equal(net(other)[:1], net(x)[:1]) for other in others)
    return False


def check_chains(seeds) -> None:
    for seed in seeds:
        assert unproved(chain(seed, False), Call.of(example(seed)), lambda output: output) is None, seed
        assert check_samples_independent(chain(seed, False), example(seed), "eval") is None, seed
        note = "refused"
        with contextlib.suppress(Refusal):
            note = check_samples_independent(chain(seed, True), example(seed), "eval")
        assert note is not None, f"seed {seed}: proved for a network that mixes samples"
        assert note == "refused" or not mixes(chain(seed, True), example(seed)), f"seed {seed}: {note}"


def test_chains_of_operations():
    check_chains((*range(8), 1359))  # the last: one sample and several are multiplied by other kernels


@pytest.mark.full
def test_many_chains_of_operations():
    check_chains(range(1000, 2000))


def caught(read):
    """Real tensors have values to read, fake ones raise."""

    def step(x):
        try:
            read(x)
        except Exception:
            return x.tanh()
        return other_at_forty(x).tanh()

    return step


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.detach().numpy(),
        lambda x: float(x.mean()),
        lambda x: int(x.nonzero().shape[0]),
        lambda x: x.detach().reshape(-1)[:1].mul_(1),
        lambda x: torch.equal(x, x),
    ],
)
def test_an_error_that_a_model_catches_ends_the_proof(read):
    net = Net(caught(read))
    assert unproved(net, Call.of(example()), lambda output: output) is not None
    assert torch.equal(net(example(0, 39)), example(0, 39).tanh()) and not torch.equal(net(example(0, 41)), example(0, 41).tanh())


def exported(net: nn.Module, x: torch.Tensor, dynamic: bool):
    shapes = ({0: torch.export.Dim("batch", min=1, max=99)},) if dynamic else None
    return torch.export.export(net, (x,), dynamic_shapes=shapes, strict=False)


def test_an_exported_program_is_checked_like_a_module():
    x = example()
    for step in (lambda x: x - x.mean(0, keepdim=True), lambda x: x.roll(2, 0)):
        with pytest.raises(Refusal, match="influence each other"):
            ns.lipschitz(exported(Net(step), x, dynamic=True), x)
        with pytest.raises((Refusal, InputError)):
            ns.lipschitz(exported(Net(step), x, dynamic=False), x)
    assert float(ns.lipschitz(exported(Net(torch.tanh), x, dynamic=True), x).upper) == pytest.approx(1)


def test_groups_of_one_element_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(4, 4)).eval()
    with pytest.raises(Refusal, match=r"one element per group.*GroupNorm at 1"):
        ns.lipschitz(model, torch.randn(3, 4))


def test_batch_statistics_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(Refusal, match=r"batch statistics make every sample depend on the others.*in eval mode.*tracks running"):
        ns.lipschitz(model, torch.randn(3, 4))


def test_an_output_whose_shape_grows_with_the_batch_is_refused():
    with pytest.raises(Refusal, match="changes with the size of its batch"):
        ns.lipschitz(Net(lambda x: torch.relu(x.clone().view(-1)[None] - 1e4)), torch.randn(3, 4))


def test_what_was_probed_is_noted_and_what_was_proved_is_not():
    x = torch.randn(3, 4)
    assert not any("probed" in note for note in ns.audit(nn.Linear(4, 4), x).notes)
    probed = Net(lambda x: torch.stack([row.tanh() for row in x]))
    assert any("probed, not proved" in note for note in ns.audit(probed, x).notes)
    assert any("probed, not proved" in note for note in ns.lipschitz(probed, x).notes)
    assert all(
        "probed, not proved" in str(bracket.render()) for bracket in ns.certify.local_brackets(probed, x, x, radius=0.1).brackets
    )


def test_rounding_that_a_model_amplifies_is_no_influence():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), Net(lambda x: torch.sin(1e6 * x))), torch.randn(5, 64)
    assert ns.lipschitz(model, x).upper.finite  # kernels for one row and for several may round differently


FACTORS = [nn.Parameter(torch.full((4,), size)) for size in (1.0, 2.0)]


@torch.jit.script
def centered_in_float32(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0) if x.dtype == torch.float32 and x.size(0) > 8 else x


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize(
    "step",
    [
        lambda x: 2 * x if len(x) > 1 and x.element_size() < 8 else x,
        lambda x: 2 * x if len(x) > 1 and isinstance(x, torch.FloatTensor) else x,
        lambda x: x * torch.tensor(2.0 if len(x) > 1 and x.element_size() < 8 else 1.0),
        lambda x: x * FACTORS[len(x) > 1 and x.element_size() < 8],
        lambda x: x - x.mean(0) if len(x) > 8 and x.type() == "torch.FloatTensor" else x,
        centered_in_float32,
    ],
)
def test_a_branch_that_only_float32_takes_is_no_rounding(step, batch):
    with pytest.raises(Refusal, match="influence each other"):
        ns.lipschitz(Net(step), torch.randn(batch, 4))


def test_what_a_model_writes_to_its_input_stays_there():
    x = example()
    before = x.clone()
    assert float(ns.lipschitz(Net(lambda x: x.mul_(2) + 1), x).upper) == pytest.approx(2)
    assert torch.equal(x, before)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_branch_on_requires_grad_is_refused(needs_gradient):
    x = example().requires_grad_(needs_gradient)
    assert float(ns.lipschitz(Net(torch.tanh), x).upper) == pytest.approx(1)
    with pytest.raises(Refusal, match="requires_grad"):
        ns.lipschitz(Net(lambda x: 100 * x if x.requires_grad else x), x)


def test_only_the_chosen_output_counts():
    class Two(nn.Module):
        def forward(self, x):
            return 2 * x, x.mean(0)

    x = torch.randn(3, 4)
    assert float(ns.lipschitz(Two(), x, output=0).upper) == pytest.approx(2)
    with pytest.raises(Refusal, match="influence each other"):
        ns.lipschitz(Two(), x, output=1)
