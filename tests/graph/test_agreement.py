"""The law of every trace: the graph in float64 is the model as it runs, or the trace is refused."""

from __future__ import annotations

import copy
import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import normscope as ns
from normscope.core.data import Call
from normscope.graph.agreement import Agreement, float_inputs
from normscope.graph.graph import Constant, Graph
from normscope.graph.outputs import chosen_output
from normscope.graph.trace import trace
from tests.cases import RULE_CASES, VARIANTS, Function, randn
from tests.networks import double

# what is not what torch.export saw ---------------------------------------------------------------------------------------


class Switched(nn.Module):
    """train() and eval() of its own."""

    factor = 1.0

    def train(self, mode: bool = True) -> Switched:
        self.factor = 1.0 if mode else 100.0
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_eval_is_the_models_own():
    model = Switched().train()
    assert float(ns.lipschitz(model, randn(2, 4)).upper) == pytest.approx(100)
    assert model.factor == 1.0 and model.training


class Merging(Switched):
    """An eval() of its own alone, which train(False) does not call."""

    def train(self, mode: bool = True) -> Merging:
        self.factor = 1.0
        return nn.Module.train(self, mode)

    def eval(self) -> Merging:
        super().eval()
        self.factor = 7.0
        return self


def test_eval_is_called_and_not_train():
    model = Merging().train()
    assert float(ns.lipschitz(model, randn(2, 4)).upper) == pytest.approx(7)
    assert model.factor == 1.0 and model.training


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1.0 if self.calls % 2 else 5.0)


def half_exported(x: Tensor) -> Tensor:
    return nn.functional.relu(x) if torch.compiler.is_exporting() else nn.functional.relu(x) * (x > 3)


DIFFERENT = {  # and words of the refusal
    "compiled": (Function(lambda x: x if torch.compiler.is_compiling() else 100 * x), ["not the model", "(a)", "(c)"]),
    "in a module": (nn.Sequential(nn.Linear(4, 4), Function(half_exported), nn.ReLU()), ["not the model"]),
    "batch size": (Function(lambda x: x * (100.0 if x.shape[0] > 1 else 1.0)), ["samples", "batch of 2"]),
    "three samples": (Function(lambda x: x * (100.0 if x.shape[0] == 3 else 1.0)), ["samples", "batch of 3"]),
    "the example's size": (Function(lambda x: x * (100.0 if x.shape[0] == 7 else 1.0)), ["samples", "batch of 7"]),
    "Python's random numbers": (Function(lambda x: x * random.random()), ["not the model", "random"]),
    "the own type": (Function(lambda x: x if x.element_size() == 8 or torch.compiler.is_exporting() else 100 * x), ["own type"]),
    "gradients": (Function(lambda x: 100 * x if torch.is_grad_enabled() and not torch.compiler.is_exporting() else x), ["gradients"]),
    "inference mode": (Function(lambda x: 100 * x if torch.is_inference_mode_enabled() else x), ["inference mode"]),
    "never a number": (Function(lambda x: x.abs().neg().sub(1).sqrt()), ["compared"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_runs_differently_is_refused(name):
    model, words = DIFFERENT[name]
    with pytest.raises(ns.Refusal) as caught:
        trace(model, 4 * randn(7, 4))
    assert [word for word in words if word not in str(caught.value)] == [] and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_runs_differently_is_refused_in_large_models_too(monkeypatch, name):
    monkeypatch.setattr("normscope.graph.agreement.LARGE", 1)
    model, words = DIFFERENT[name]
    with pytest.raises(ns.Refusal) as caught:
        trace(model, 4 * randn(7, 4))
    assert [word for word in words if word not in str(caught.value)] == []


class Tripled(nn.Module):
    """Many operations, of which export sees one in another way."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(torch.tanh(x), (4,))
        x = x * (3.0 if torch.compiler.is_compiling() else 2.0)
        return (x @ x.mT).softmax(-1).sin()


def test_the_first_node_that_differs_is_named():
    """What follows it differs as well; what comes before does not, though a graph may write it in other operations."""
    line = Tripled.forward.__code__.co_firstlineno + 2
    with pytest.raises(ns.Refusal, match=rf"first seen to differ at mul at 1 \(test_agreement.py:{line}\)"):
        trace(nn.Sequential(nn.Linear(4, 4), Tripled(), nn.ReLU()), randn(1, 3, 4))


def test_a_module_that_goes_on_where_its_part_of_the_graph_ends_is_named():
    model = nn.Sequential(nn.Linear(4, 4), Function(half_exported), nn.ReLU())
    with pytest.raises(ns.Refusal, match="computes every value of the graph, but goes on in another way after relu at 1"):
        trace(model, 4 * randn(1, 4))


def test_a_model_that_goes_on_where_its_graph_ends_is_said_to():
    def longer(x):
        y = torch.tanh(x)
        return y if torch.compiler.is_compiling() else 2 * y

    with pytest.raises(ns.Refusal, match="computes every value of the graph, but goes on"):
        trace(Function(longer), randn(1, 4))


def test_a_model_is_left_as_it_was():
    model = nn.Sequential(Counting(), nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    drawn = torch.get_rng_state()
    for mode in ("eval", "batch"):
        trace(model, randn(5, 4), mode)
    assert model[0].calls == 0 and model[0].training and torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_no_exception_of_torch_leaves_a_trace():
    class Raising(nn.Module):
        def train(self, mode: bool = True) -> nn.Module:
            raise OSError("no such mode")

    with pytest.raises(ns.ExportError, match="no such mode"):
        trace(Raising(), randn(1, 4))


def test_a_list_of_tensors_is_refused():
    with pytest.raises(ns.InputError, match="argument 1"):
        trace(Function(lambda x, more: x + more[0]), (randn(1, 4), [randn(1, 4)]))


# types -------------------------------------------------------------------------------------------------------------------


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return (x + 1) * torch.sigmoid(x)


TYPED = {
    "softmax": lambda x: functional.softmax(x, 1, dtype=torch.float32) @ torch.arange(16.0).view(4, 4),
    "mean": lambda x: x.mean(1, keepdim=True, dtype=torch.float32),
    "sum": lambda x: x.sum(1, dtype=torch.float64).float(),
    "cumulative sum": lambda x: x.cumsum(1, dtype=torch.float32),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float64),
    "a factory": lambda x: x * torch.linspace(0.1, 1, 4),
    "a filled factory": lambda x: x * torch.full((4,), 0.1, dtype=torch.float32),
    "half and back": lambda x: (x.half() * 3).float(),
    "a table in another type": lambda x: x * torch.arange(4).to(torch.bfloat16).type_as(x),
    "a literal": lambda x: x * torch.tensor(0.1, dtype=torch.float32),
    "the least number": lambda x: x.clamp(min=torch.finfo(x.dtype).min),
    "the unit of its type": lambda x: x * (1 + 1e3 * torch.finfo(x.dtype).eps),
    "a scripted function": lambda x: scripted(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TYPED)
def test_types_do_not_round(name, dtype):
    """Neighbours 1e-12 apart have different outputs: nothing on the way is rounded to float32."""
    graph = trace(Function(TYPED[name]), randn(1, 4).to(dtype))
    x = randn(1, 4).double()
    outputs = [graph.run([point], torch.float64)[0] for point in (x, x + 1e-12)]
    assert outputs[0].dtype == torch.float64 and not torch.equal(*outputs)
    assert graph.run([x], dtype)[0].dtype == dtype


def test_casts_are_told():
    assert any("float16" in note for note in trace(Function(TYPED["half and back"]), randn(1, 4)).notes)
    assert not trace(nn.Linear(4, 3), randn(1, 4)).notes


class Remembering(nn.Module):
    """Keeps a table from its first call, as a cached function does, but computes it anew while it is traced."""

    def __init__(self, forgetful: float = 1.0) -> None:
        super().__init__()
        self.tables, self.forgetful = [], forgetful

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(1, 5, device=x.device, dtype=x.dtype) / 7
        if torch.compiler.is_compiling():
            return x * table
        self.tables = self.tables or [table]
        return x * self.tables[0] * self.forgetful


def test_a_table_kept_in_the_own_type_is_compared_in_it():
    model, x = Remembering(), randn(2, 4)
    model(x)
    found = ns.lipschitz(model, x, effort=0.2)
    assert float(found.upper) == pytest.approx(4 / 7, rel=1e-6)
    assert any("float32 alone" in note for note in trace(model, x).notes)


def test_a_table_kept_that_is_another_is_refused():
    model, x = Remembering(1.0001), randn(2, 4)
    model(x)
    with pytest.raises(ns.Refusal, match="not the model"):
        trace(model, x)


def counted(x: Tensor) -> Tensor:
    sizes = (x > 0).view(2, -1).sum(1).tolist()
    return torch.cat([2 * piece for piece in x.flatten()[: sum(sizes)].split(sizes)])


REFUSED = {
    "bits": (lambda x: x.half().view(torch.bfloat16).float(), "bits"),
    "memory of another tensor": (lambda x: x[:, 2:].as_strided((x.shape[0], 2), (4, 1), 0), "as_strided"),
    "a number that is none": (lambda x: x * float("nan"), "NaN"),
    "no entries": (lambda x: x[:, :0], "no entries"),
    "entries chosen by values": (lambda x: x[x > 0].sum().expand(1) + x, "how many entries"),
    "pieces of a counted size": (counted, "how many entries"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_shows_is_refused(name):
    function, word = REFUSED[name]
    with pytest.raises((ns.Refusal, ns.InputError, ns.ExportError), match=word):
        trace(Function(function), randn(2, 4))


MASK = torch.tensor([True, False, True, True])
CHOSEN = {
    "a mask": (lambda x: x[:, MASK], 1.0),
    "a mask, reshaped": (lambda x: x[:, MASK].reshape(x.shape[0], 3, 1), 1.0),
    "repeats": (lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1]), 1), 2**0.5),
    "its own memory": (lambda x: x.relu().as_strided((x.shape[0], 2), (4, 1), 1), 1.0),
    "a vector": (lambda x: functional.linear(x, torch.ones(4)), 2.0),
    "no padding": (lambda x: functional.pad(x, []), 1.0),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_choices_by_constants(name):
    function, constant = CHOSEN[name]
    assert float(ns.lipschitz(Function(function), randn(2, 4), effort=0.2).upper) == pytest.approx(constant)


class Shifted(nn.Linear):
    shift = 1e3

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.weight + self.shift) - self.shift)


def test_constants_are_folded_in_double_precision():
    torch.manual_seed(0)
    model = Shifted(4, 4)
    (node,) = [node for node in trace(model, randn(1, 4)) if node.op == "linear"]
    assert torch.allclose(node.args[1].double(), model.weight.double(), rtol=0, atol=1e-7) and node.args[1].learned


def test_a_view_of_a_weight_is_still_the_weight():
    model = nn.Linear(4, 3)
    (node,) = [node for node in trace(Function(lambda x: x @ model.weight.t()), randn(1, 4)) if node.op == "matmul"]
    assert node.constants[0].value.data_ptr() == model.weight.data_ptr()


# graphs that are wrong by little -------------------------------------------------------------------------------------------


def moved(graph: Graph, factor: float) -> Graph:
    """The graph with its last constant changed."""
    node = next(node for node in reversed(graph.nodes) if node.constants)
    args = [Constant(arg.double() * factor) if isinstance(arg, Constant) else arg for arg in node.args]
    return graph.replace({node: replace(node, args=tuple(args))})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_graph_that_is_wrong_by_little_is_noticed(monkeypatch, dtype):
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(dtype)
    example = randn(3, 4).to(dtype)
    graph = trace(model, example)
    call = Call.of(example)

    def agreement(changed: Graph) -> Agreement:
        return Agreement(changed, model, "eval", partial(float_inputs, ids=False), partial(chosen_output, wanted=None))

    assert agreement(graph).per_sample(call) is graph
    for large in (10**9, 1):  # entries of the graph; a large one is seen on the example in float64
        monkeypatch.setattr("normscope.graph.agreement.LARGE", large)
        with pytest.raises(ns.Refusal, match="not the model"):
            agreement(moved(graph, 1 + 1e-9)).per_sample(call)


# every case ----------------------------------------------------------------------------------------------------------------


def check_equal(model: nn.Module, example: Tensor, mode: str) -> None:
    """Against a copy in double precision, which is not how the trace compares; in the model's own where its literals are single."""
    graph, twin = trace(model, example, mode), double(model, mode)
    point, tolerance = example if graph.whole_batch else example[:1], 1e-6
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        try:
            expected = twin(point.double())
        except RuntimeError as error:
            assert re.search("dtype|scalar type|float", str(error)), error
            expected, tolerance = model(point), 1e-5
    found = graph.run([point], torch.float64)[0]
    assert torch.allclose(found, expected.double(), rtol=tolerance, atol=tolerance * float(expected.abs().max()), equal_nan=True)


ALL = {**RULE_CASES, **VARIANTS}


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_every_case_is_its_graph(name):
    case = ALL[name]
    check_equal(case.module, case.example, case.mode)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, attention", [("Llama", "eager"), ("Llama", "sdpa"), ("Qwen2", "eager"), ("Qwen2", "sdpa"), ("Gemma2", "eager")]
)
def test_attention_in_other_types(kind, attention):
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(intermediate_size=24, vocab_size=9, attn_implementation=attention, **settings)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    found = ns.lipschitz(model, {"inputs_embeds": randn(1, 4, 16)}, output="last_hidden_state", effort=0.1)
    assert found.upper.finite and found.lower <= found.upper


def test_softplus_beyond_its_threshold_is_smooth_in_float32_and_jumps_in_float64():
    smooth = trace(nn.Softplus(), torch.full((1, 2), 25.0))
    jumping = trace(nn.Softplus(), torch.full((1, 2), 25.0, dtype=torch.float64))
    assert (smooth.output.args[2], jumping.output.args[2]) == (40, 20)


@pytest.mark.filterwarnings("ignore")
def test_what_a_script_computes_in_float32_is_compared_in_that_type():
    @torch.jit.script
    def root(x: Tensor) -> Tensor:
        return torch.sqrt(torch.tensor(3.0)) * x

    class Scripted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(root(x))

    assert float(ns.lipschitz(Scripted(), torch.randn(2, 3)).upper) == pytest.approx(3**0.5, rel=1e-6)
