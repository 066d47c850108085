"""The graph is the model: the same function, with only what matters left in it."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, distributed, nn
from torch.nn.utils import parametrizations

import normscope as ns
from normscope.core.errors import ExportError, InputError
from normscope.graph.exporting import in_mode
from normscope.graph.graph import Constant, Graph
from normscope.graph.trace import trace
from tests.cases import Function, network, randn
from tests.networks import Tied, is_deep


def operations(graph: Graph) -> list[str]:
    return [node.op for node in graph if node.op != "input"]


class Positions(nn.Module):
    """Position embeddings, a causal mask and a buffer: all of them constants once the shape is known."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        mask = torch.tril(torch.ones(x.shape[1], x.shape[1])).bool().any(0)
        kept = torch.where(mask[:, None], 1.0, 0.0) * self.scale.sqrt()
        return (x + self.embedding(positions)) * kept


class Casts(nn.Module):
    """Everything that returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x.clone().contiguous()).double().to(torch.float32)
        with torch.no_grad():
            x = x.detach()
        return nn.Identity()(self.linear(functional.dropout(x, 0.3, self.training)).type_as(x))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.relu_().add_(1)
    y += 3
    return y.mul_(0.5)


def in_place_on_a_slice(x: Tensor) -> Tensor:
    y = x * 2
    y[:, :2] += 1
    y[:, 2:].relu_()
    y[:, 0] = 7.0
    return y


def in_place_on_a_view(x: Tensor) -> Tensor:
    y = x * 1.0
    y.view(-1, 4)[:, 1:3].mul_(5)
    y.t()[0].zero_()
    return y


def in_place_with_a_reader(x: Tensor) -> Tensor:
    y = x * 2
    z = y + 1
    y.relu_()
    return y + z


def written_into(x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 6)
    out[:, 1:5] = x
    out[:, 0] = x[:, 0] * 2
    return out


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(randn(3, 4)), nn.Parameter(randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(functional.linear(x, self.matrix, self.shift)).flatten(1)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


MODELS = {  # how to make a module, and the operations that are left of it
    "sequential": (sequential, ["linear", "relu", "linear"]),
    "functional": (Functional, ["linear", "relu", "flatten"]),
    "shared": (shared, ["linear", "tanh", "linear"]),
    "tied": (lambda: Tied(4, 3, nn.ReLU()), ["linear", "relu", "linear"]),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)).double(), ["linear"]),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).double(), ["linear"]),
    "old weight norm": (lambda: torch.nn.utils.weight_norm(nn.Linear(4, 3)).double(), ["linear"]),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)).double(), ["linear"]),
    "casts": (Casts, ["linear"]),
    "nested": (Nested, ["linear", "linear", "tanh", "add", "linear", "tanh", "add"]),
    "in place": (lambda: Function(in_place), ["mul", "relu", "add", "add", "mul"]),
    "in place on a slice": (lambda: Function(in_place_on_a_slice), None),
    "in place on a view": (lambda: Function(in_place_on_a_view), None),
    "in place with a reader": (lambda: Function(in_place_with_a_reader), None),
    "written into": (lambda: Function(written_into), None),
    "in place activations": (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(True), nn.ELU(1.0, True)), ["linear", "relu", "elu"]),
    "alpha dropout": (lambda: nn.Sequential(nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Tanh()), ["tanh"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_function(name):
    make, expected = MODELS[name]
    model = make()
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    graph = trace(model, randn(1, 4).to(dtype))
    assert expected is None or operations(graph) == expected
    for seed in range(3):
        x = randn(1, 4, seed=seed).to(dtype)
        with torch.no_grad():
            value = model.eval()(x.clone()).double()
        assert torch.allclose(graph.run([x], torch.float64)[0], value, rtol=1e-5, atol=1e-6)


@pytest.mark.quick(8)
@pytest.mark.parametrize("seed", [seed for seed in range(18) if not is_deep(seed)])
def test_batched_is_one_by_one(seed):
    module, example, mode = network(seed)
    graph = trace(module, example, mode)
    points = torch.randn(
        3, *(example.shape if mode == "batch" else example.shape[1:]), generator=torch.Generator().manual_seed(0)
    ).double()
    together = graph.batched(torch.float64)(points)
    for point, value in zip(points, together, strict=True):
        alone = graph.run([point if mode == "batch" else point[None]], torch.float64)[0]
        assert torch.allclose(alone, value, rtol=1e-9, atol=1e-9 * float(alone.abs().max()))


def test_constants_are_folded():
    graph = trace(Positions(), randn(1, 5, 4))
    assert operations(graph) == ["add", "mul"]
    assert graph.nodes[1].parameters == ("embedding.weight",) and graph.nodes[2].parameters == ("scale",)


def test_parametrized_weights_name_their_parameters_and_keep_their_value():
    model = parametrizations.weight_norm(nn.Linear(4, 3))
    (node,) = [node for node in trace(model, randn(1, 4)) if node.op == "linear"]
    assert torch.equal(node.args[1].value, copy.deepcopy(model).double().weight)  # in float64, on the numbers as stored
    assert {"parametrizations.weight.original0", "parametrizations.weight.original1"} <= set(node.parameters)


def test_a_shared_module_keeps_one_parameter():
    first, second = (node for node in trace(shared(), randn(1, 4)) if node.op == "linear")
    assert first.parameters == second.parameters and first is not second


def test_module_paths_and_source_lines():
    graph = trace(Nested(), randn(1, 4))
    assert [node.path for node in graph if node.op == "linear"] == ["stem", "blocks.0.0", "blocks.1.0"]
    assert all("test_trace.py" in node.source for node in graph if node.op == "add")


# models of many kinds --------------------------------------------------------------------------------------------------


def test_a_distributed_model_keeps_its_names(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        assert [node.path for node in trace(model, randn(1, 4))] == ["", "module.0", "module.1"]
        assert ns.symmetries(model, randn(5, 4)).of_kind("scale")[0].parameters == ("module.0.weight",)
    finally:
        distributed.destroy_process_group()


def test_random_operations_that_draw_nothing_are_constants():
    def forward(x: Tensor) -> Tensor:
        constant = functional.dropout(torch.ones(1, 2, 3, 4), 0.5, training=False)
        return x + functional.scaled_dot_product_attention(constant, constant, constant)[0, 0, 0]

    assert operations(trace(Function(forward), randn(1, 4))) == ["add"]


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("read_again", [True, False])
def test_in_place_dropout_leaves_batch_norm_as_it_is(tracked, read_again):
    """With a second reader the graph is made functional, and batch normalization is another operation there."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=tracked)

        def forward(self, x: Tensor) -> Tensor:
            features = self.norm(self.conv(x)).flatten(1)
            dropped = functional.dropout(features, 0.5, self.training, inplace=True)
            return dropped + features if read_again else dropped

    report = ns.symmetries(Model(), randn(4, 3, 2, 2))
    assert [group.parameters for group in report.of_kind("scale")] == [("conv.weight",)]
    assert not report.check() or read_again


def test_a_batch_is_as_good_as_a_sample():
    model = sequential()
    alone, together = trace(model, randn(1, 4)), trace(model, randn(5, 4))
    assert [node.shape for node in alone] == [node.shape for node in together]
    assert ns.lipschitz(model, randn(5, 4)).upper == ns.lipschitz(model, randn(1, 4)).upper


def test_the_whole_batch_is_one_input_in_batch_mode():
    graph = trace(nn.Sequential(nn.BatchNorm1d(3, affine=False, track_running_stats=False)), randn(5, 3), "batch")
    assert graph.whole_batch and graph.inputs[0].shape == (5, 3)


def test_exported_programs():
    model = sequential()
    program = torch.export.export(model, (randn(1, 4),))
    assert ns.lipschitz(program, randn(1, 4)).upper == ns.lipschitz(model, randn(1, 4)).upper
    with pytest.raises(InputError, match="shape"):
        ns.lipschitz(program, randn(1, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)).to(dtype)
    graph = trace(model, randn(1, 4).to(dtype))
    assert graph.dtype == dtype and graph.compute_dtype == (dtype if dtype == torch.float64 else torch.float32)
    exact = ns.lipschitz(copy.deepcopy(model).double(), randn(1, 4).double())
    assert float(ns.lipschitz(model, randn(1, 4).to(dtype)).upper) == pytest.approx(float(exact.upper), rel=1e-9)


def test_default_epsilon_is_that_of_the_models_precision():
    for dtype, epsilon in ((torch.float32, 2.0**-23), (torch.float64, 2.0**-52)):
        found = ns.lipschitz(nn.RMSNorm(4).to(dtype), randn(1, 4).to(dtype))
        assert float(found.upper) == pytest.approx(epsilon**-0.5)


def test_autocast_and_no_grad_blocks_are_inlined():
    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x * 2
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x)

    assert operations(trace(Function(run), randn(1, 4))) == ["mul", "tanh"]


# what tracing leaves alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_training_flags_come_back(mode):
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Sequential(nn.ReLU()))
    model.train()
    model[1].eval()
    trace(model, randn(1, 4), mode)
    assert [module.training for module in model.modules()] == [True, True, False, True, True]


@pytest.mark.parametrize("fails", [False, True])
def test_training_flags_of_torchscript_come_back(fails):
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Dropout())), nn.ReLU()).train()
    model[0][1].eval()
    before = [module.training for module in model.modules()]
    with suppress(KeyError), in_mode(model, "eval"):
        assert not any(module.training for module in model.modules())
        if fails:
            raise KeyError
    assert [module.training for module in model.modules()] == before


def test_training_flags_come_back_after_a_failure():
    model = nn.Sequential(Function(lambda x: x if x.sum() > 0 else -x)).train()
    with pytest.raises(ExportError):
        trace(model, randn(1, 4))
    assert all(module.training for module in model.modules())


def test_a_graph_that_reads_ahead_is_invalid():
    graph = trace(sequential(), randn(1, 4))
    with pytest.raises(AssertionError, match="before"):
        Graph(graph.nodes[::-1], graph.inputs, graph.output).validate()


def test_constants_print_their_parameters():
    assert repr(Constant(torch.zeros(2, 3), ("weight",))) == "Constant(weight: (2, 3))"


class Spread(nn.Linear):
    """What a graph network does: the features of neighbours are added up by a sparse matrix."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(4, 4)
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        return (self.matrix @ super().forward(x).T).T


@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=lambda sparse: sparse.__name__)
def test_a_sparse_matrix_is_the_matrix(sparse):
    matrix = torch.diag(torch.tensor([1.0, 2.0, 0.0, 3.0]))
    model, dense = Spread(sparse(matrix)), Spread(matrix)
    dense.load_state_dict({**model.state_dict(), "matrix": matrix})
    assert float(ns.lipschitz(model, randn(2, 4)).upper) == float(ns.lipschitz(dense, randn(2, 4)).upper)
