"""Products equal those of the dense matrix, whatever the batches, the tapes and the parameters chosen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import normscope as ns
from normscope.core.errors import InputError
from tests.curvature.models import CASES, Case, dense_hessian

BN = CASES["batch norm"]


def curvature(case: Case, batches=None, **options) -> ns.curvature.Curvature:
    options = {"mode": case.mode, "batch_size": case.batch_size, **options}
    return ns.hessian(case.model(), case.loss, batches if batches is not None else case.data(), **options)


def test_there_are_models_enough():
    assert len(CASES) >= 20


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", CASES)
def test_products_equal_the_dense_hessian(name):
    exact = dense_hessian(CASES[name])
    assert (curvature(CASES[name]).dense() - exact).abs().max() <= 1e-10 * exact.abs().max().clamp(min=1)


@pytest.mark.parametrize("memory", [0, 10_000])  # no tape, and too little for all of them
def test_products_without_tapes_are_the_same(memory):
    for matrix in ("hessian", "gauss-newton"):
        kept, fresh = (curvature(BN, matrix=matrix, memory=size).dense() for size in (2**30, memory))
        assert (kept - fresh).abs().max() <= 1e-14


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", [name for name in CASES if "relu" not in name])
def test_products_are_differences_of_gradients(name):
    """A reference that uses first derivatives alone: torch's second derivatives of some operations are wrong."""
    objective = curvature(CASES[name]).objective
    vector = torch.randn(objective.size, generator=torch.Generator().manual_seed(0)).double()
    vector, step = vector / vector.norm(), 1e-4
    ahead, behind = (objective.gradient(objective.point + sign * step * vector) for sign in (1, -1))
    product = curvature(CASES[name]).product(vector)
    assert (product - (ahead - behind) / (2 * step)).norm() <= 1e-6 * (product.norm() + 1)


@pytest.mark.parametrize("name", ["mlp", "mlp regression", "batch norm", "conv batch norm", "attention", "tied and unused"])
def test_gauss_newton_equals_the_dense_product_of_jacobians(name):
    case = CASES[name]
    made = curvature(case, matrix="gauss-newton")
    objective, exact = made.objective, torch.zeros(made.size, made.size, dtype=torch.float64)
    for term in objective.terms():
        rows = [torch.autograd.grad(value, term.leaves, retain_graph=True, allow_unused=True) for value in term.outputs.reshape(-1)]
        jacobian = torch.stack(
            [
                torch.cat(
                    [
                        torch.zeros(leaf.numel()).double() if part is None else part.reshape(-1)
                        for part, leaf in zip(row, term.leaves, strict=True)
                    ]
                )
                for row in rows
            ]
        )
        inner = torch.autograd.functional.hessian(
            lambda flat, term=term: term.loss_of(flat.reshape(term.outputs.shape)), term.outputs.detach().reshape(-1)
        )
        exact += term.size / 24 * jacobian.mT @ inner @ jacobian
    assert (made.dense() - exact).abs().max() <= 1e-10
    assert torch.linalg.eigvalsh(made.dense()).min() >= -1e-10


def test_gauss_newton_is_the_hessian_of_a_linear_model():
    both = [curvature(CASES["linear"], matrix=kind).dense() for kind in ("hessian", "gauss-newton")]
    assert (both[0] - both[1]).abs().max() <= 1e-12


def test_all_forms_of_batches_are_the_same_matrix():
    x, y = BN.data()
    pairs = list(zip(x.split(14), y.split(14), strict=True))
    exact = dense_hessian(BN)
    forms = {
        "list": pairs,
        "loader": DataLoader(TensorDataset(x, y), batch_size=14),
        "dataset": TensorDataset(x, y),
        "dicts by name of argument": [{"input": a, "label": b} for a, b in pairs],
        "dicts with the input first": [{"image": a, "label": b} for a, b in pairs],
        "inputs as a tuple": [((a,), b) for a, b in pairs],
        "inputs as a dict": [({"input": a}, b) for a, b in pairs],
        "other dtype": [(a.float().double(), b) for a, b in pairs],
    }
    for form, batches in forms.items():
        tolerance = 1e-5 if form == "other dtype" else 1e-10
        assert (curvature(BN, batches).dense() - exact).abs().max() <= tolerance, form


def test_a_shuffled_loader_is_frozen_and_random_state_untouched():
    x, y = BN.data()
    before = torch.random.get_rng_state()
    made = curvature(BN, DataLoader(TensorDataset(x, y), batch_size=14, shuffle=True), memory=0)
    matrix = made.dense()
    assert (matrix - matrix.mT).abs().max() <= 1e-12
    assert torch.equal(before, torch.random.get_rng_state())


def test_batches_that_change_are_refused():
    x, y = BN.data()
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(x, y), batch_size=14, shuffle=True, generator=generator)
    with pytest.raises(InputError, match="differ from pass to pass"):
        curvature(BN, loader, memory=0).dense()
    with pytest.raises(InputError, match="walked only once"):
        curvature(BN, iter([(x, y)]))


def test_microbatches_where_they_change_nothing_and_an_error_where_they_do():
    case = CASES["layer norm"]
    assert (curvature(case, microbatch=5).dense() - dense_hessian(case)).abs().max() <= 1e-12
    with pytest.raises(InputError, match="microbatches change the loss"):
        curvature(BN, microbatch=5)
    assert (curvature(BN, mode="eval", microbatch=3).dense() - curvature(BN, mode="eval").dense()).abs().max() <= 1e-12


def test_several_losses_add_up():
    def penalty(outputs, targets):
        return outputs.pow(4).mean()

    one, other, both = (
        ns.hessian(BN.model(), losses, BN.data(), batch_size=14).dense()
        for losses in (functional.cross_entropy, penalty, [functional.cross_entropy, penalty])
    )
    assert other.abs().max() > 0.1 and (both - one - other).abs().max() <= 1e-12


class TwoInputs(nn.Module):
    """A model and losses as they come with dict batches: two inputs, two targets."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(3, 5), nn.Linear(1, 5), nn.LayerNorm(5)
        self.classes, self.height = nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, image, mask):
        hidden = torch.tanh(self.norm(self.left(image) + self.right(mask)))
        return {"classes": self.classes(hidden), "height": self.height(hidden)}


@pytest.mark.parametrize("microbatch", [None, 4])
@pytest.mark.parametrize("memory", [0, 2**30])
def test_dicts_with_several_inputs_and_targets_and_several_losses(microbatch, memory):
    x, y = BN.data()
    whole = {"mask": x[:, 3:], "label": y, "image": x[:, :3], "height": x[:, :1].square()}
    losses = [
        lambda outputs, batch: functional.cross_entropy(outputs["classes"], batch["label"]),
        lambda outputs, batch: functional.mse_loss(outputs["height"], batch["height"]),
    ]
    batches = [{name: value[start:stop] for name, value in whole.items()} for start, stop in ((0, 14), (14, 24))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TwoInputs().double()
    made = ns.hessian(model, losses, batches, microbatch=microbatch, memory=memory)

    def total(*values):
        outputs = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (whole["image"], whole["mask"]))
        return sum(loss(outputs, whole) for loss in losses)

    names, values = zip(*((name, value.detach()) for name, value in model.named_parameters()), strict=True)
    rows = torch.autograd.functional.hessian(total, values)
    exact = torch.cat(
        [torch.cat([part.flatten(0, a.dim() - 1).flatten(1) for part in row], 1) for a, row in zip(values, rows, strict=True)]
    )
    assert made.grouping == (14, 10) and (made.dense() - exact).abs().max() <= 1e-12


def test_parameters_by_name_and_blocks_are_parts_of_the_whole():
    exact = dense_hessian(BN)
    made = curvature(BN)
    first = made.objective.layout.sizes[0] + made.objective.layout.sizes[1]
    assert (curvature(BN, parameters="0").dense() - exact[:first, :first]).abs().max() <= 1e-12
    assert (curvature(BN, parameters=["0.bias", "0.weight"]).dense() - exact[:first, :first]).abs().max() <= 1e-12
    start = 0
    for name, block in made.blocks().items():
        assert (block.dense() - exact[start : start + block.size, start : start + block.size]).abs().max() <= 1e-12, name
        start += block.size
    assert start == made.size


def test_frozen_parameters_are_left_out_unless_named():
    model = BN.model()
    model[0].weight.requires_grad_(False)
    made = ns.hessian(model, BN.loss, BN.data())
    assert "0.weight" not in made.objective.layout.shapes
    assert ns.hessian(model, BN.loss, BN.data(), parameters="0.weight").size == 24
    model.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        ns.hessian(model, BN.loss, BN.data())


def test_float64_on_request_and_products_of_named_vectors():
    model = BN.model().float()
    x, y = BN.data()
    exact = ns.hessian(model, BN.loss, (x.float(), y), dtype=torch.float64)
    single = ns.hessian(model, BN.loss, (x.float(), y))
    assert exact.objective.point.dtype == torch.float64
    assert 1e-9 < (exact.dense() - single.dense()).abs().max() < 1e-4
    vector = {name: torch.ones(shape).double() for name, shape in exact.objective.layout.shapes.items()}
    product = exact.product(vector)
    assert torch.allclose(
        torch.cat([part.reshape(-1) for part in product.values()]), exact.product(torch.ones(exact.size).double())
    )


class Noisy(nn.Module):
    """Everything that a careless tool would change: running statistics, a counter, dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layers(x) * (1 + 0.001 * self.calls)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("memory", [0, 2**30])
def test_dropout_and_buffers_are_fixed_and_the_model_comes_back_as_it_was(mode, memory):
    model = Noisy().double()
    model.layers[1].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes, random = [part.training for part in model.modules()], torch.random.get_rng_state()
    matrix = ns.hessian(model, functional.cross_entropy, BN.data(), mode=mode, memory=memory).dense()
    assert (matrix - matrix.mT).abs().max() <= 1e-12
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes and torch.equal(random, torch.random.get_rng_state())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_the_model_may_change_afterwards():
    model = BN.model()
    made = ns.hessian(model, BN.loss, BN.data(), batch_size=14, memory=0)
    with torch.no_grad():
        model[0].weight.zero_()
    assert (made.dense() - dense_hessian(BN)).abs().max() <= 1e-10


@pytest.mark.parametrize("wrapper", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_wrapped_model_is_the_model(wrapper):
    case = CASES["batch norm"]
    plain, wrapped = (
        ns.hessian(model, case.loss, case.data(), mode=case.mode, batch_size=case.batch_size)
        for model in (case.model(), wrapper(case.model()))
    )
    torch.testing.assert_close(wrapped.dense(), plain.dense())


def test_under_no_grad_the_answer_is_the_same():
    with torch.no_grad():
        assert (curvature(BN).dense() - dense_hessian(BN)).abs().max() <= 1e-10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "test"}, "mode must be one of"),
        ({"matrix": "fisher"}, "matrix must be one of"),
        ({"parameters": "9"}, "no parameter or module '9'"),
        ({"parameters": []}, "empty"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 23}, "Expected more than 1 value per channel"),
        ({"batches": torch.ones(3)}, "batches are"),
        ({"batches": []}, "no batch"),
        ({"batches": (torch.ones(0, 4), torch.zeros(0).long())}, "size above 0"),
        ({"batches": [torch.ones(3, 4)]}, "a batch must be"),
        ({"batches": (torch.ones(3, 4), torch.ones(4))}, "one length"),
        ({"batches": (torch.ones(3, 5), torch.zeros(3).long())}, "does not run on inputs of shape"),
        ({"batches": (torch.full((3, 4), torch.nan), torch.zeros(3).long())}, "the loss of batch 0 is nan"),
    ],
)
def test_mistakes_are_one_line(options, said):
    with pytest.raises(InputError) as caught:
        curvature(BN, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(InputError, match="must return one number"):
        ns.hessian(BN.model(), lambda outputs, targets: outputs, BN.data())


def of(*layers: nn.Module, loss=functional.cross_entropy, data=None, **options) -> ns.curvature.Curvature:
    x, y = BN.data()
    return ns.hessian(nn.Sequential(*layers), loss, data or (x.float(), y), **options)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.cfloat))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


class Distances(nn.Module):
    """torch.cdist has no second derivative."""

    def __init__(self):
        super().__init__()
        self.points = nn.Parameter(torch.arange(12.0).reshape(3, 4))

    def forward(self, x):
        return -torch.cdist(x, self.points)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: of(nn.Tanh()), "no parameter that requires a gradient"),
        (lambda: of(nn.Linear(4, 3), dtype=torch.int64), "dtype must be real"),
        (lambda: of(Complex()), "is complex"),
        (lambda: of(nn.LazyLinear(3)), "no shape yet"),
        (lambda: of(nn.Linear(4, 3, device="meta")), "no values"),
        (lambda: of(nn.Linear(4, 2)), "Target 2 is out of bounds"),
        (lambda: of(nn.Linear(4, 3), loss=None), "not callable"),
        (lambda: of(Distances()).top(1), "cannot be differentiated twice"),
    ],
)
def test_models_and_losses_that_have_no_hessian_are_refused_in_one_line(call, said):
    with pytest.raises(InputError) as caught:
        call()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_sparse_embeddings_are_as_dense_ones():
    tokens, classes = torch.randint(10, (24, 2), generator=torch.Generator().manual_seed(0)), BN.data()[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3)]
    dense = of(*layers, data=(tokens, classes)).dense()
    layers[0].sparse = True
    assert torch.equal(of(*layers, data=(tokens, classes)).dense(), dense) and layers[0].sparse


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_as_it_is_and_in_float64_on_request(dtype):
    model, data = BN.model().to(dtype), BN.data()
    exact = ns.hessian(model, BN.loss, data, dtype=torch.float64).dense()
    rough = ns.hessian(model, BN.loss, data).dense()
    unrounded = ns.hessian(model.double(), BN.loss, data).dense()
    assert (exact - unrounded).abs().max() <= 1e-10
    assert (rough - exact).norm() <= 0.05 * exact.norm()
