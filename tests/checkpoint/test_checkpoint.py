"""The report of a checkpoint: numbers of the audit, the same in every format, with workers, from the cache, and in JSON."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import normscope as ns
from normscope._checkpoint import work
from normscope._checkpoint.report import CheckpointReport
from normscope.core.errors import InputError
from tests.checkpoint.files import write
from tests.checkpoint.models import built

PATIENCE = 300  # seconds, for a process that a busy machine may let wait


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.LayerNorm(96), nn.Linear(96, 5)).eval()


def numbers(report: CheckpointReport) -> list[dict]:
    return [{**row.to_dict(), "name": row.name} for row in sorted(report.tensors, key=lambda row: row.name)]


@pytest.mark.parametrize("format", ["safetensors", "shards", "pt"])
def test_numbers_are_those_of_the_audit(tmp_path, format):
    model = small()
    found = ns.checkpoint(write(tmp_path, format, model.state_dict()))
    audit = {row.name: row for row in ns.audit(model, torch.randn(2, 3, 6, 6), local=False).layers}
    for name in ("0", "5"):
        row = found[f"{name}.weight"]
        assert row.spectral_norm == pytest.approx(float(audit[name].matrix_norm), rel=1e-5) and row.certified
        assert row.frobenius_norm == pytest.approx(float(audit[name].frobenius_norm), rel=1e-7)
    assert {row.role for row in found.tensors} == {"weight", "bias", "γ", "β", "running mean", "running variance", "counter"}


def test_workers_cache_and_json_agree(tmp_path):
    path = write(tmp_path, "shards", built("Llama")[0].state_dict(), built("Llama")[1])
    plain = ns.checkpoint(path)
    assert numbers(ns.checkpoint(path, workers=2, cache=tmp_path / "c")) == numbers(plain)
    again = CheckpointReport.from_dict(json.loads(plain.to_json()))
    assert again.tensors == plain.tensors and again.pairs == plain.pairs and again.attention == plain.attention
    assert str(plain) and "proved" in str(plain)
    assert numbers(ns.checkpoint(built("Llama")[0]))[0] == numbers(plain)[0]


def test_what_was_cached_is_not_made_again(tmp_path, monkeypatch):
    path = write(tmp_path, "safetensors", small().state_dict())
    first = ns.checkpoint(path, cache=tmp_path / "cache")
    lines = (tmp_path / "cache").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["key"] for line in lines}) >= 8
    (tmp_path / "cache").write_text("\n".join(lines[:4]) + "\n" + lines[4][:20])  # torn
    made = []
    monkeypatch.setattr(work, "measured", lambda tensor, sample, inner=work.measured: made.append(1) or inner(tensor, sample))
    assert numbers(ns.checkpoint(path, cache=tmp_path / "cache")) == numbers(first)
    assert len(made) == len(lines) - 4  # the same content twice is one result
    made.clear()
    changed = small().state_dict()
    changed["5.weight"][0, 0] += 1
    ns.checkpoint(write(tmp_path, "safetensors", changed), cache=tmp_path / "cache")
    assert made == [1]


def test_pairs_and_logits_are_sound(tmp_path):
    """No token makes a logit or a W γ x̂ larger than the bound says."""
    for name in ("Llama", "Qwen3"):
        model, config = built(name)
        found = ns.checkpoint(write(tmp_path / name, "safetensors", model.state_dict(), config))
        state = {key: value.double() for key, value in model.state_dict().items()}
        for pair in found.pairs:
            truth = float(torch.linalg.matrix_norm(state[pair.reader] * state[pair.gamma], 2))
            assert truth * (1 - 1e-12) <= pair.norm <= truth * (1 + 1e-6)
        assert len(found.attention) == 2 and all(row.key_heads == 2 for row in found.attention)
        for place, row in enumerate(found.attention):
            assert largest_logit(state, f"model.layers.{place}", "q_norm" in str(state.keys())) <= row.bound < math.inf


def largest_logit(state: dict[str, torch.Tensor], layer: str, normed: bool) -> float:
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for which in ("q_proj", "k_proj"):  # also the directions that a head stretches most
        weight = state[f"{layer}.self_attn.{which}.weight"] * state[f"{layer}.input_layernorm.weight"]
        for head in weight.split(4):
            x = torch.cat([x, torch.linalg.svd(head)[2][:1], -torch.linalg.svd(head)[2][:1]])
    x = x / x.square().mean(1, keepdim=True).sqrt() * state[f"{layer}.input_layernorm.weight"]
    q = (x @ state[f"{layer}.self_attn.q_proj.weight"].T).unflatten(1, (4, 4))
    k = (x @ state[f"{layer}.self_attn.k_proj.weight"].T).unflatten(1, (2, 4))
    if normed:
        q, k = (
            value / value.square().mean(2, keepdim=True).sqrt() * state[f"{layer}.self_attn.{name}_norm.weight"]
            for name, value in (("q", q), ("k", k))
        )
    return max(float((q[:, head] @ k[:, head // 2].T).abs().max()) / 2 for head in range(4))


def test_sample_says_estimate(tmp_path):
    path = write(tmp_path, "safetensors", {"a.weight": torch.randn(60, 50)})
    row = ns.checkpoint(path, sample=True)["a.weight"]
    proved = ns.checkpoint(path)["a.weight"]
    assert (
        not row.certified
        and "estimate" in row.note
        and 0.95 * proved.spectral_norm <= row.spectral_norm <= (1 + 1e-5) * proved.spectral_norm
    )


def test_page(tmp_path):
    model, config = built("Llama")
    found = ns.checkpoint(write(tmp_path, "safetensors", model.state_dict(), config))
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "model.layers.0.self_attn.q_proj.weight" in page and "Spectral norms by block" in page


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_layers_come_in_their_order(tmp_path, format):
    state = {name: torch.ones(2) for name in ("output_norm.weight", *(f"blk.{i}.attn_norm.weight" for i in (10, 2, 1)))}
    found = ns.checkpoint(write(tmp_path, format, state))
    order = ["blk.1.attn_norm.weight", "blk.2.attn_norm.weight", "blk.10.attn_norm.weight", "output_norm.weight"]
    assert [row.name for row in found.tensors] == order


def test_wrong_calls_are_one_line(tmp_path):
    for given in (tmp_path, tmp_path / "gone.safetensors", 3, nn.ReLU()):
        with pytest.raises(InputError):
            ns.checkpoint(given)
    with pytest.raises(InputError, match="in this process"):
        ns.checkpoint(small(), workers=1)


def test_an_interrupted_command_goes_on(tmp_path):
    """Ctrl-C loses the tensor at hand; the second call makes only what is left."""
    path = write(tmp_path, "safetensors", {f"layers.{i}.weight": torch.randn(500, 500) for i in range(12)})
    command = [sys.executable, "-m", "normscope", "checkpoint", str(path), "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(ns.__file__).parents[1])}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    cache = tmp_path / "out.json.cache"
    latest = time.monotonic() + PATIENCE
    while process.poll() is None and not (cache.exists() and cache.read_text().count("\n") >= 2) and time.monotonic() < latest:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 130) and b"Traceback" not in errors
    kept = cache.read_text().count("\n")
    assert kept >= 2
    report = ns.checkpoint(path, cache=cache)
    assert cache.read_text().count("\n") == 12 and len(report.tensors) == 12
