"""Compiled products are the same products."""

from __future__ import annotations

import pytest
import torch

import normscope as ns
from normscope.core.errors import InputError
from normscope.curvature.compilation import without_tape
from tests.curvature.models import CASES, Case, dense_hessian


def compiled(case: Case, **options) -> ns.curvature.Curvature:
    return ns.hessian(case.model(), case.loss, case.data(), mode=case.mode, batch_size=case.batch_size, compiled=True, **options)


def assert_same(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert (found - exact).abs().max() <= 1e-10 * exact.abs().max().clamp(min=1)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "matrix"), [("weight norm", "hessian"), ("tied and unused", "gauss-newton")])
def test_the_flat_graph_is_the_product(name, matrix, monkeypatch):
    """All but the code generator, which takes its time."""
    monkeypatch.setattr("normscope.curvature.matrices.without_tape", lambda *given: without_tape(*given, backend="eager"))
    case = CASES[name]
    plain = ns.hessian(case.model(), case.loss, case.data(), mode=case.mode, matrix=matrix, batch_size=case.batch_size)
    assert_same(compiled(case, matrix=matrix).dense(), plain.dense())


@pytest.mark.full  # a code generator takes seconds per graph
def test_the_compiled_products_of_a_linear_model():
    case = CASES["linear"]
    assert_same(compiled(case).dense(), dense_hessian(case))


@pytest.mark.full
def test_the_compiled_products_of_a_batch_norm_network():
    case = CASES["batch norm"]
    exact, made = dense_hessian(case), compiled(case)
    assert_same(made.dense(), exact)
    assert made.top(1, tolerance=1e-8)[0].value == pytest.approx(float(torch.linalg.eigvalsh(exact)[-1]), rel=1e-6)
    block = made.blocks()["3"]
    assert_same(block.dense(), exact[-block.size :, -block.size :])


@pytest.mark.full
@pytest.mark.parametrize("matrix", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_products_of_every_model(name, matrix):
    case = CASES[name]
    plain = ns.hessian(case.model(), case.loss, case.data(), mode=case.mode, matrix=matrix, batch_size=case.batch_size)
    assert_same(compiled(case, matrix=matrix).dense(), plain.dense())


@pytest.mark.full
def test_the_compiled_quotient():
    case = CASES["conv batch norm"]
    plain = ns.hessian(case.model(), case.loss, case.data(), batch_size=case.batch_size, quotient=True)
    assert_same(compiled(case, quotient=True).dense(), plain.dense())


def test_what_cannot_be_compiled_is_one_line():
    case = CASES["mlp"]
    for memory in (0, 100):
        with pytest.raises(InputError, match="take more than memory"):
            compiled(case, memory=memory).dense()

    def curious(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part * 2 if part.sum().item() > 0 else part for part in parts]

    with pytest.raises(InputError, match="cannot be compiled") as caught:
        without_tape(curious, [torch.ones(3)])
    assert "\n" not in str(caught.value)


def test_a_missing_compiler_is_said_in_one_line(monkeypatch):
    import torch._inductor.config as config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(config, "force_disable_caches", True)
    with pytest.raises(InputError, match="cannot be compiled") as caught:
        compiled(CASES["linear"]).dense()
    assert "\n" not in str(caught.value)
