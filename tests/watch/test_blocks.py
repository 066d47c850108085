"""What is measured of blocks and attention agrees with a plain computation, and is left out where it cannot be known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normscope as ns
from normscope._watch.attention import ModuleCall, _chosen, attentions

WIDTH, HEADS, TOKENS, BATCH = 8, 2, 6, 2


class Block(nn.Module):
    """Keeps what it computed, and the gradients at its ends, for the test to compare with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mix, self.kind = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), kind
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        logits = q @ k.mT / math.sqrt(WIDTH // HEADS)
        self.kept |= {"x": x.detach().clone(), "logits": logits.detach().clone()}
        if self.kind == "causal":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "masked":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        elif self.kind == "whole":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = torch.softmax(logits.masked_fill(~causal, -math.inf), -1) @ v
        y = x + mixed.transpose(1, 2).flatten(2)
        self.kept["y"] = y.detach().clone()
        for name, tensor in (("dx", x), ("dy", y)):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, name=name: self.kept.__setitem__(name, gradient.detach().clone()))
        return y


class Net(nn.Module):
    def __init__(self, kind: str, call: Callable[[nn.Module, Tensor], Tensor] = lambda block, h: block(h)) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks, self.call = nn.ModuleList(Block(kind) for _ in range(3)), call

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = self.call(block, h)
        return self.head(h.mean(1))


def recorded(
    model: nn.Module, path: Path, steps: int = 3, change: Callable[[int], None] = lambda step: None, **options: Any
) -> ns.Run:
    data, optimizer = torch.Generator().manual_seed(0), torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ns.watch(model, optimizer, run=path, quiet=True, **{"every": 1, **options}) as watch:
        for step in range(1, steps + 1):
            change(step)
            optimizer.zero_grad()
            loss = model(torch.randn(BATCH, TOKENS, 3, generator=data)).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    run = ns.load_run(path)
    assert not run.events("error")
    return run


def last(run: ns.Run, metric: str, layer: str) -> float:
    return float(run.matrix(metric)[-1][run.layer_names.index(layer)])


@pytest.mark.parametrize("kind", ["causal", "masked", "whole", "written out"])
def test_blocks_and_attention_agree_with_a_plain_computation(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    run = recorded(model, tmp_path)
    assert {layer["name"] for layer in run.layers if layer["role"] in ("block", "attention")} == {
        f"blocks.{index}:{role}" for index in range(3) for role in ("block", "attention")
    }
    for index, block in enumerate(model.blocks):
        kept = {name: value.double() for name, value in block.kept.items()}
        x, y, name = kept["x"], kept["y"], f"blocks.{index}:block"
        assert last(run, "stream_rms", name) == pytest.approx(x.square().mean().sqrt().item(), rel=1e-4)
        assert last(run, "write_ratio", name) == pytest.approx(((y - x).norm() / x.norm()).item(), rel=1e-4)
        assert last(run, "backward_gain", name) == pytest.approx((kept["dx"].norm() / kept["dy"].norm()).item(), rel=1e-4)
        assert last(run, "largest_input", name) == pytest.approx(x.abs().max().item(), rel=1e-5)
        seen = (
            torch.ones(TOKENS, TOKENS, dtype=torch.bool) if kind == "whole" else torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        )
        logits, name = kept["logits"], f"blocks.{index}:attention"
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
        entropy = -torch.xlogy(weights, weights).sum(-1) / seen.sum(-1).clamp(min=2).log()
        assert last(run, "attention_logit", name) == pytest.approx(logits[..., seen].abs().max().item(), rel=1e-4)
        several = seen.sum(-1) > 1
        assert last(run, "attention_entropy", name) == pytest.approx(entropy[..., several].mean(-1).min().item(), rel=1e-4)


def test_a_block_that_writes_into_its_input_has_no_write_ratio(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x.add_(self.linear(x.clone()))

    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * TOKENS, WIDTH), InPlace(), nn.Linear(WIDTH, 2))
    loss = model(torch.randn(BATCH, TOKENS, 3)).sum()
    loss.backward()
    run = recorded(nn.Sequential(*model, nn.Unflatten(1, (1, 2))), tmp_path)
    assert not any(layer["role"] == "block" for layer in run.layers)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_packs_is_not_unpacked(reentrant: bool, tmp_path: Path) -> None:
    model = Net("causal", lambda block, h: checkpoint(block, h, use_reentrant=reentrant))
    run = recorded(model, tmp_path)
    assert [layer["role"] for layer in run.layers].count("block") == 3
    assert not any(layer["role"] == "attention" for layer in run.layers)
    assert np.isfinite(last(run, "write_ratio", "blocks.1:block"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_type_does_not_change_which_positions_are_read(dtype: torch.dtype) -> None:
    expected = _chosen(2049, "cpu")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(_chosen(2049, "cpu"), expected) and expected[-1] == 2048
    finally:
        torch.set_default_dtype(before)


def test_a_freed_graph_gives_nothing() -> None:
    model = Net("causal")
    output = model(torch.randn(BATCH, TOKENS, 3))
    root = output.grad_fn
    output.sum().backward()
    assert attentions([root], [ModuleCall("", 1, 0, 10**12)]) == {}


def test_no_graph_is_kept_alive(tmp_path: Path) -> None:
    import gc
    import weakref

    model, kept = Net("causal"), []
    recorded(model, tmp_path, change=lambda step: model.register_forward_hook(lambda m, a, o: kept.append(weakref.ref(o))))
    gc.collect()
    assert kept and not any(one() is not None for one in kept)


def test_attention_is_found_saturated_in_its_block(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net("causal")

    def change(step: int) -> None:
        if step == 12:
            with torch.no_grad():
                model.blocks[1].mix.weight[: 2 * WIDTH].mul_(40.0)

    run = recorded(model, tmp_path, 15, change)
    (found,) = [
        finding for finding in run.findings if finding.name == "attention-saturation" and finding.where.startswith("blocks.1")
    ]
    assert found.where == "blocks.1:attention" and found.first_step == 12


@pytest.mark.parametrize(
    ("rule", "layer", "change"),
    [
        ("weight-jump", "blocks.1.mix", lambda model: model.blocks[1].mix.weight.mul_(20.0)),
        ("input-jump", "blocks.1:block", lambda model: model.blocks[0].mix.bias[2 * WIDTH :].add_(100.0)),
    ],
)
def test_a_layer_that_leaves_its_own_line_is_named(rule: str, layer: str, change: Callable[[Any], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net("causal")

    def at_twelve(step: int) -> None:
        if step == 12:
            with torch.no_grad():
                change(model)

    found = [finding for finding in recorded(model, tmp_path, 14, at_twelve).findings if finding.name == rule]
    assert found and found[0].first_step == 12 and layer in {finding.where for finding in found}


def test_a_block_that_does_nothing_is_idle_after_200_steps(tmp_path: Path) -> None:
    model = Net("whole")
    with torch.no_grad():
        for parameter in (model.blocks[2].mix.weight, model.blocks[2].mix.bias):
            parameter.zero_()
    model.blocks[2].mix.requires_grad_(False)
    run = recorded(model, tmp_path, 210, every=5)
    (found,) = [finding for finding in run.findings if finding.name == "idle-block"]
    assert found.where == "blocks.2:block" and 200 <= (found.first_step or 0) <= 210


def test_the_share_of_scales_that_moved(tmp_path: Path) -> None:
    """In bfloat16 next to 1, a step of 1e-3 is rounded away; entries that are smaller move."""
    model = Net("whole").bfloat16()
    with torch.no_grad():
        model.blocks[0].norm.weight[: WIDTH // 2] = 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ns.watch(model, optimizer, run=tmp_path, quiet=True, every=1):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(BATCH, TOKENS, 3, dtype=torch.bfloat16)).float().square().mean().backward()
            model.blocks[0].norm.weight.grad = torch.full((WIDTH,), 1.0, dtype=torch.bfloat16)
            optimizer.step()
    run = ns.load_run(tmp_path)
    place = run.layer_names.index("blocks.0.norm")
    assert math.isnan(run.matrix("gamma_moved")[0][place])
    for metric in ("gamma_moved", "gamma_moved_from_start"):
        assert run.matrix(metric)[-1][place] == 0.5
