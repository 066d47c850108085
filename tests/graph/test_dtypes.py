"""Types: a model in any floating-point type is certified as the function of its stored weights, in float64, and casts are listed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import normscope as ns
from tests.networks import Function, randn

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHT = randn(4, 4)

# each computes in float32 and returns the type that it was given
IN_FLOAT32 = {
    "softmax": lambda x: functional.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "log_softmax": lambda x: functional.log_softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "sum": lambda x: x.sum(-1, dtype=torch.float32).to(x.dtype),
    "mean": lambda x: x.mean(-1, dtype=torch.float32).to(x.dtype),
    "prod": lambda x: torch.tanh(x).prod(-1, dtype=torch.float32).to(x.dtype),
    "cumsum": lambda x: x.cumsum(-1, dtype=torch.float32).to(x.dtype),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).to(x.dtype),
    "product": lambda x: (x.float() @ WEIGHT).type_as(x),
}  # fmt: skip
INTEGER = {
    "to integers": lambda x: x.long().to(x.dtype),
    "times an integer": lambda x: x * x.int(),
    "to truth values": lambda x: x.bool().to(x.dtype),
    "a mask": lambda x: x * (x > 0).to(x.dtype),
    "a sum of integers": lambda x: x.sum(-1, dtype=torch.int64).to(x.dtype),
    "a running sum of integers": lambda x: x.cumsum(-1, dtype=torch.int64).to(x.dtype),
}
REGIONS = {"everywhere": None, "a ball": ns.Ball(torch.linspace(0.03, 1.03, 4), 0.05)}  # which holds 0 and 1


def casts(notes: tuple[str, ...]) -> set[str]:
    return {note.split()[2] for note in notes if note.startswith("casts to")}


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_computing_in_another_type_changes_no_bound(name, dtype):
    model, example = Function(IN_FLOAT32[name]), randn(2, 4).to(TYPES[dtype])
    for region in REGIONS.values():
        found = ns.audit(model, example, region=region, effort=0.05)
        exact = ns.lipschitz(model, example.float(), region=region, effort=0.05)
        assert casts(found.notes) == (set() if dtype == "float32" else {"float32", dtype})
        assert math.isclose(found.bracket.upper.log, exact.upper.log, rel_tol=1e-2 if dtype != "float32" else 1e-9, abs_tol=1e-2)
        assert found.bracket.lower <= exact.upper * 1.01


@pytest.mark.quick(5)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", INTEGER)
def test_casts_to_integers_are_what_they_are(name, region):
    """They jump, or may: no finite bound, with that reason, and no note calls them identities."""
    for dtype in TYPES.values():
        found = ns.audit(Function(INTEGER[name]), randn(2, 4).to(dtype), region=REGIONS[region], effort=0.05)
        said = " ".join([found.bracket.reason, *found.bracket.certificate.causes])
        assert found.bracket.upper in (None, math.inf) and "jump" in said and not casts(found.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_function_is_that_of_the_stored_weights(dtype):
    """The same network with its stored numbers in float64 has the same bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(dtype)
    stored = copy.deepcopy(model).double()
    bounds = [
        ns.lipschitz(one, x, effort=0.05).upper for one, x in ((model, randn(2, 4).to(dtype)), (stored, randn(2, 4).double()))
    ]
    assert math.isclose(bounds[0].log, bounds[1].log, abs_tol=1e-9)


# attention as transformers writes it, with eager attention -----------------------------------------------------------------


def transformer(kind: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    config = getattr(transformers, f"{kind}Config")(
        intermediate_size=8, vocab_size=9, use_cache=False, attn_implementation="eager", **settings
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}Model")(config).eval().to(dtype)
    return model, {"inputs_embeds": randn(2, 3, 8).to(dtype)}


KINDS = [
    pytest.param(kind, dtype, marks=() if dtype == "bfloat16" else pytest.mark.full)
    for kind in ("Llama", "Qwen2", "Gemma2")
    for dtype in TYPES
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_eager_attention_is_audited_in_every_type(kind, dtype):
    model, example = transformer(kind, TYPES[dtype])
    found = ns.audit(model, example, effort=0.02)
    assert found.bracket.upper is not None and found.bracket.upper.finite and found.bracket.lower > 0
    assert {"float32", dtype} >= casts(found.notes) >= ({"float32", dtype} if dtype != "float32" else set())
    assert not [
        reason for reason in ns.doctor(model, example).not_checked.values() if not reason.startswith(("pass ", "it is about files"))
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_eager_attention_has_symmetries_and_curvature_in_every_type(kind, dtype):
    model, example = transformer(kind, TYPES[dtype])
    assert len(ns.symmetries(model, example).groups) == len(ns.symmetries(*transformer(kind, torch.float32)).groups) > 0

    def loss(outputs: object, targets: Tensor) -> Tensor:
        return (outputs.last_hidden_state.float() - targets).square().mean()  # type: ignore[attr-defined]

    (largest,) = ns.hessian(model, loss, [(example, torch.zeros(2, 3, 8))]).top(1)
    assert math.isfinite(largest.value)
