"""The ledger: a row shows the norms of the parameter that it names, and no weight is passed over in silence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import normscope as ns
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.upper import upper
from normscope.core.data import Call
from normscope.ledger import GAIN_COLUMNS, LayerRow, ledger, weights_without_row
from normscope.rules.affine import weight_of
from normscope.rules.normalizers import completed
from normscope.rules.readings import LinearMap
from normscope.rules.registry import Gain, Rule, registry
from tests.cases import RULE_CASES, VARIANTS, randn

CLOSE = {"rel": 1e-5}


class Holding(nn.Module):
    """A function of the input and of the parameters of the given shapes, called w, v, …, b last where there is one."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.held = [f"w{i}" for i in range(len(shapes))]
        for i, (name, shape) in enumerate(zip(self.held, shapes, strict=True)):
            self.register_parameter(name, nn.Parameter(randn(*shape, seed=i + 1) * (i + 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *(self.get_parameter(name) for name in self.held))


class Transposed(nn.Module):
    """x W + b, the weight stored as (in, out), as in the Conv1D of transformers."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(before, after) / 10), nn.Parameter(5 * randn(after, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


# module → (input shape, the matrix (out, everything else) of every row)
LINEAR: dict[str, tuple[nn.Module, tuple[int, ...], Callable[[nn.Module], list[Tensor]]]] = {
    "addmm": (Transposed(4, 3), (1, 4), lambda m: [m.weight.T]),
    "addmm with α and β": (
        Holding(lambda x, w, b: torch.addmm(b, x, w, alpha=3, beta=0.5), (4, 3), (3,)), (1, 4), lambda m: [m.w0.T]),
    "mm": (Holding(torch.mm, (4, 3)), (1, 4), lambda m: [m.w0.T]),
    "constant on the left": (Holding(lambda x, w: w @ x, (5, 4)), (1, 4, 2), lambda m: [m.w0]),
    "a vector": (Holding(lambda x, w: x @ w, (4,)), (1, 4), lambda m: [m.w0[None]]),
    "bmm": (Holding(torch.bmm, (1, 4, 3)), (1, 2, 4), lambda m: [m.w0[0].T]),
    "heads": (Holding(torch.matmul, (3, 4, 2)), (1, 3, 5, 4), lambda m: [m.w0.mT.reshape(6, 4)]),
    "baddbmm": (
        Holding(lambda x, w, b: torch.baddbmm(b, x, w, alpha=2, beta=3), (1, 4, 3), (1, 2, 3)), (1, 2, 4), lambda m: [m.w0[0].T]),
    "einsum": (Holding(lambda x, w: torch.einsum("bsi,io->bso", x, w), (4, 3)), (1, 5, 4), lambda m: [m.w0.T]),
    "einsum into heads": (
        Holding(lambda x, w: torch.einsum("bsi,hid->bhsd", x, w), (2, 4, 3)), (1, 5, 4), lambda m: [m.w0.mT.reshape(6, 4)]),
    "einsum with a mask": (
        Holding(lambda x, w: torch.einsum("bi,io,o->bo", x, w, torch.tensor([1.0, 0, 1])), (4, 3)), (1, 4), lambda m: [m.w0.T]),
    "inner": (Holding(torch.inner, (3, 4)), (1, 2, 4), lambda m: [m.w0]),
    "fixed weight": (Holding(lambda x, b: functional.linear(x, 7 * torch.eye(4, dtype=x.dtype), b), (4,)), (1, 4), lambda m: [7 * torch.eye(4)]),
    "transposed": (Holding(lambda x, w: functional.linear(x, w.t()), (4, 3)), (1, 4), lambda m: [m.w0.T]),
    "reshaped": (Holding(lambda x, w: functional.linear(x, w.reshape(3, 4)), (12,)), (1, 4), lambda m: [m.w0.reshape(3, 4)]),
    "half of a weight": (Holding(lambda x, w: functional.linear(x, w.chunk(2)[1]), (6, 4)), (1, 4), lambda m: [m.w0[3:]]),
    "weight norm": (parametrizations.weight_norm(nn.Linear(4, 3)), (1, 4), lambda m: [m.weight]),
    "shared": (shared(), (1, 4), lambda m: [m[0].weight, m[2].weight]),
    "conv": (nn.Conv2d(4, 6, 3, groups=2), (1, 4, 5, 5), lambda m: [m.weight.flatten(1)]),
    "conv transposed": (
        nn.ConvTranspose2d(4, 6, 3), (1, 4, 5, 5), lambda m: [m.weight.transpose(0, 1).flatten(1)]),
    "conv transposed in groups": (
        nn.ConvTranspose1d(4, 6, 3, groups=2), (1, 4, 5),
        lambda m: [torch.cat([part.transpose(0, 1).flatten(1) for part in m.weight.chunk(2)])]),
}  # fmt: skip


def rows_of(model: nn.Module, example: Tensor | dict[str, Tensor], mode: str = "eval", output: str | None = None) -> list[LayerRow]:
    graph = certifiable_graph(model, example, mode, output)
    return ledger(graph, upper(graph), [Call.of(example)])


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", LINEAR)
def test_a_row_has_the_norms_of_the_weight_whatever_its_layout(name):
    model, shape, matrices = LINEAR[name]
    rows = rows_of(model, randn(*shape))
    expected = [matrix.detach().double() for matrix in matrices(model)]
    assert len(rows) == len(expected)
    for row, matrix in zip(rows, expected, strict=True):
        assert float(row.matrix_norm) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), **CLOSE)
        assert float(row.frobenius_norm) == pytest.approx(float(matrix.norm()), **CLOSE)
        assert row.spectral_norm.finite


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", LINEAR)
def test_the_norm_of_the_operator_is_that_of_its_matrix(name):
    """The Jacobian is the operator, factors and further constants included; of shared layers the product bounds it."""
    model, shape, _ = LINEAR[name]
    if name == "shared":
        return
    (row,) = rows_of(model, randn(*shape))
    point = randn(*shape).double()
    flat = torch.func.jacrev(model.double())(point).detach().reshape(-1, point.numel())
    assert float(row.spectral_norm) == pytest.approx(float(torch.linalg.matrix_norm(flat, 2)), rel=1e-5)


def test_a_tied_weight_goes_by_the_first_of_its_names():
    """As in `named_parameters()`; torch.export calls it by the last one."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    assert [row.parameters for row in rows_of(model, randn(1, 3))] == [("0.weight",), ("0.weight",)]


# every model of the tables, and those of transformers -----------------------------------------------------------------


def own_matrix(model: nn.Module, name: str) -> Tensor:
    """A parameter as (out, everything else), by what the module that holds it says."""
    owner = model.get_submodule(name.rpartition(".")[0])
    weight = model.get_parameter(name).detach().double()
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):
        return torch.cat([part.transpose(0, 1).flatten(1) for part in weight.chunk(owner.groups)])
    if type(owner).__name__ == "Conv1D":  # of transformers
        return weight.T
    return weight.flatten(1) if weight.dim() > 1 else weight[None]


def check_rows(model: nn.Module, example: Tensor | dict[str, Tensor], mode: str = "eval", output: str | None = None) -> None:
    graph = certifiable_graph(model, example, mode, output)
    rows, unlisted = ledger(graph, upper(graph), [Call.of(example)]), weights_without_row(graph)
    for row in rows:
        if row.frobenius_norm is not None and len(row.parameters) == 1:
            matrix = own_matrix(model, row.parameters[0])
            assert float(row.frobenius_norm) == pytest.approx(float(matrix.norm()), **CLOSE)
            assert float(row.matrix_norm) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), **CLOSE)
    shown = {name for row in rows for name in row.parameters}
    read = {name for node in graph for name in node.parameters}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and name in read:
            assert name in shown or name in unlisted, f"{name} has neither a row nor a note"
    check_normalizers(model, graph)


def check_normalizers(model: nn.Module, graph) -> None:
    """γ, β and ε are those of the module."""
    for node in graph:
        normalizer = completed(node, graph.users)
        if normalizer is None:
            continue
        module = model.get_submodule(node.path)
        epsilon = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        if epsilon is not None:
            assert normalizer.epsilon == pytest.approx(epsilon)
        for own, found in ((getattr(module, "weight", None), normalizer.weight), (getattr(module, "bias", None), normalizer.bias)):
            if own is not None and found is not None:
                assert torch.equal(found.reshape(own.shape), own.detach().double())
            if not normalizer.by_hand:
                assert (own is None) == (found is None)


MODULES = {
    name: case
    for name, case in {**RULE_CASES, **VARIANTS}.items()
    if any(p.dim() > 1 or "norm" in name for p in case.module.parameters())
}


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", MODULES)
def test_rows_are_those_of_the_parameters(name):
    check_rows(MODULES[name].module, MODULES[name].example, MODULES[name].mode)


QUICK = ("GPT-2", "ViT", "Swin", "LLaMA")


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", QUICK)
def test_rows_of_models_nobody_here_wrote(name):
    zoo = pytest.importorskip("tests.certify.test_zoo")
    kind, settings, example = zoo.GLOBAL[name]
    check_rows(zoo.model_of(kind, settings), example, output="last_hidden_state")


@pytest.mark.full
@pytest.mark.parametrize("name", ["ConvNeXt", "ResNet", "MobileNetV2", "RegNet", "BERT", "Qwen2", "T5 encoder", "EfficientNet"])
def test_rows_of_more_models_nobody_here_wrote(name):
    zoo = pytest.importorskip("tests.certify.test_zoo")
    kind, settings, example = {**zoo.GLOBAL, **zoo.LOCAL_ONLY}[name]
    check_rows(zoo.model_of(kind, settings), example, output="last_hidden_state")


# what has no row has a note -------------------------------------------------------------------------------------------


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.token = nn.Parameter(randn(1, 3, 4)), nn.Parameter(randn(1, 1, 4))
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([self.token.expand(len(x), 1, 4), x + self.positions], 1))


def test_weights_that_are_no_layers_are_named():
    audit = ns.audit(Positions(), randn(1, 3, 4))
    note = next(note for note in audit.notes if note.startswith("in no row"))
    assert "positions" in note and "token" in note and "layer.weight" not in note
    assert note in " ".join(str(audit).split())


UNLISTED = {
    "an einsum with two weights": Holding(lambda x, w, v: torch.einsum("bi,ij,jk->bk", x, w, v), (4, 3), (3, 2)),
    "a row of a matrix": Holding(lambda x, w, v: x + w[0] + v.sum(0), (3, 4), (2, 4)),
    "a product of two weights": Holding(lambda x, w, v: x * (w @ v), (4, 2), (2, 4)),
    "a bias that depends on the input": Holding(lambda x, w, v: nn.functional.linear(x, w, x * v.sum(0)), (4, 4), (4, 4)),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_every_weight_that_no_row_shows_is_found(name):
    graph = certifiable_graph(UNLISTED[name], randn(1, 4), "eval", None)
    assert set(weights_without_row(graph)) == {"w0", "w1"} and not any(weight_of(node) for node in graph)


def test_the_matrix_of_an_update_that_is_added_has_a_row():
    """As in low-rank adapters: `addmm` of what depends on the input is a sum and a product."""
    model = Holding(lambda x, w, v: torch.addmm(x * v.sum(0), x, w), (4, 4), (4, 4))
    graph = certifiable_graph(model, randn(1, 4), "eval", None)
    assert set(weights_without_row(graph)) == {"w1"} and sum(weight_of(node) is not None for node in graph) == 1


def test_products_say_over_how_many_layers_they_run():
    text = str(ns.audit(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), randn(1, 4)))
    assert "∏‖W‖ over 2 layers: operators 10^" in text
    assert "∏ gain" not in text, "there is no normalizer"
    assert "10^" not in str(ns.audit(nn.ReLU(), randn(1, 4)))


# a user's own operation -----------------------------------------------------------------------------------------------


@torch.library.custom_op("normscope_tests::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@project.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-1])


class Projecting(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(randn(*shape)), nn.Linear(shape[-1], 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(project(x, self.weight)))


class Projection(Rule):
    def gain(self, node, context):
        return Gain.of(float(torch.linalg.matrix_norm(node.args[1].double(), 2).max()) * (1 + 1e-9))

    def linear(self, node):
        return True


class Read(Projection):
    def reading(self, node):
        return LinearMap(node.args[0], node.args[1], outputs=(1,))


class Misread(Projection):
    def reading(self, node):
        return LinearMap(node.args[0], node.args[1])


RULES = {"linear": Projection(), "read": Read(), "a number": 20.0, "a function": lambda node: 20.0}
NAME = "normscope_tests.project"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("region", [None, ns.Ball(torch.zeros(4), 0.1)], ids=["everywhere", "in a ball"])
def test_a_linear_operation_of_the_user_has_a_row(rule, region, monkeypatch):
    monkeypatch.delitem(registry.rules, NAME, raising=False)
    monkeypatch.setitem(registry.rules, NAME, registry.rules.get(NAME))
    registry.register(NAME, RULES[rule], overwrite=True)
    model = Projecting(4, 4)
    audit = ns.audit(model, randn(1, 4), region=region, effort=0.1)
    assert audit.bracket.lower <= audit.bracket.upper
    own, last = audit.layers
    assert own.parameters == ("weight",) and own.kind == NAME and last.parameters == ("last.weight",)
    assert float(own.matrix_norm) == pytest.approx(float(torch.linalg.matrix_norm(model.weight.detach(), 2)), **CLOSE)
    assert math.isfinite(audit.products["weights_spectral"])


def test_a_reading_tightens_the_bound(monkeypatch):
    model, found = Projecting(4, 4), {}
    for rule in ("linear", "read"):
        monkeypatch.setitem(registry.rules, NAME, RULES[rule])
        found[rule] = ns.lipschitz(model, randn(1, 4)).upper
    assert found["read"] < found["linear"]


def test_a_reading_that_is_wrong_is_refused(monkeypatch):
    monkeypatch.setitem(registry.rules, NAME, Misread())
    with pytest.raises(ns.InputError, match=re.escape(NAME)):
        ns.lipschitz(Projecting(4, 4), randn(1, 4))


def test_a_weight_of_more_axes_has_no_matrix_unless_its_rule_says_which(monkeypatch):
    monkeypatch.setitem(registry.rules, NAME, Projection())
    (own, _) = ns.audit(Projecting(1, 4, 4), randn(1, 3, 4), effort=0.1).layers
    assert own.matrix_norm is None and own.frobenius_norm is not None


class OneByOne(nn.Module):
    """Every sample by itself, without a batch axis."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.whole(sample) for sample in x])


def test_vectors_without_a_batch_axis_have_the_same_rows():
    model, data = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(20, 4)
    for row, expected in zip(ns.audit(OneByOne(model), data).layers, ns.audit(model, data).layers, strict=True):
        assert row.input_std == pytest.approx(expected.input_std, **CLOSE)
        for gain in GAIN_COLUMNS:
            assert (getattr(row, gain) is None) == (getattr(expected, gain) is None)
            if getattr(row, gain) is not None:
                assert float(getattr(row, gain)) == pytest.approx(float(getattr(expected, gain)), **CLOSE)


def test_the_gain_at_an_input_beyond_all_numbers_is_none():
    model = Holding(lambda x: functional.layer_norm(x * 1e30 * 1e30, (4,)))
    (row,) = ns.audit(model, torch.randn(2, 4)).layers
    assert row.kind == "layer_norm" and row.gain is None
