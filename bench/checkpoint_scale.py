"""Synthetic Llamas in bfloat16 shards: what `normscope checkpoint` costs, against reading, against torch's norm, and as they grow.

python -m bench checkpoint_scale                   # one width at two depths, then twice the width
LLAMA=20M,60M,240M python -m bench checkpoint_scale # sizes of your choice
LLAMA=7B python -m bench checkpoint_scale          # 7 billion: 13.5 GB on disk, about 20 minutes of a core
LLAMA=7B LLAMA_DIR=D python -m bench …             # in D, which is kept: an interrupted run goes on with the norms that it lacks

The ratios to reading and to torch's norm, on the first shard, are printed before the long run, which may be cut.

A norm is one Gram matrix, some products with it and one Cholesky factorization; each γ takes the last two once more. For an m × n
matrix, n ≤ m, that is m n² + (1 + γs) (n³/3 + 2 n² steps) operations for 2 m n bytes: seconds per gigabyte are the same for every
depth, and grow with the width n. Every proof that we know multiplies matrices of that size.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from normscope._checkpoint.norms import Matrix
from normscope._checkpoint.norms import measured as ours

SIZES = {  # hidden, layers, intermediate, heads, key heads, vocabulary
    "20M": (512, 4, 1376, 8, 8, 4_000),
    "30M": (512, 8, 1376, 8, 8, 4_000),
    "60M": (512, 16, 1376, 8, 8, 4_000),
    "120M": (1024, 8, 2752, 16, 16, 8_000),
    "240M": (1024, 16, 2752, 16, 16, 8_000),
    "460M": (1024, 32, 2752, 16, 16, 8_000),
    "1B": (2048, 16, 8192, 32, 8, 32_000),
    "7B": (4096, 32, 11008, 32, 32, 32_000),
}
GROWING = ("20M", "60M", "240M")  # one width at two depths, then twice the width
STEPS = 100  # of Lanczos, about
COMPARED = 2.0e10  # m n² up to which torch's norm is taken of every tensor of a shard; of larger ones, of the smallest alone


def write(folder: Path, size: str) -> int:
    """A Llama with random weights, one shard per layer; its bytes."""
    hidden, layers, inner, heads, keys, words = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    listed: dict[str, str] = {}

    def shard(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        made = {}
        for key, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            made[key] = (1 + 0.1 * noise if len(shape) == 1 else 0.02 * noise).to(torch.bfloat16)
        save_file(made, folder / name)
        listed.update(dict.fromkeys(made, name))

    kv = hidden * keys // heads
    for i in range(layers):
        block = f"model.layers.{i}."
        shard(f"model-{i:05}.safetensors", {
            f"{block}input_layernorm.weight": (hidden,), f"{block}post_attention_layernorm.weight": (hidden,),
            f"{block}self_attn.q_proj.weight": (hidden, hidden), f"{block}self_attn.k_proj.weight": (kv, hidden),
            f"{block}self_attn.v_proj.weight": (kv, hidden), f"{block}self_attn.o_proj.weight": (hidden, hidden),
            f"{block}mlp.gate_proj.weight": (inner, hidden), f"{block}mlp.up_proj.weight": (inner, hidden),
            f"{block}mlp.down_proj.weight": (hidden, inner),
        })  # fmt: skip
    shard("model-head.safetensors", {
        "model.embed_tokens.weight": (words, hidden), "lm_head.weight": (words, hidden), "model.norm.weight": (hidden,),
    })  # fmt: skip
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "num_hidden_layers": layers,
              "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": keys,
              "vocab_size": words}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_through(files: list[Path]) -> float:
    """Seconds of a core to read files once."""
    began = time.process_time()
    for path in files:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    return time.process_time() - began


def measured(size: str, folder: Path) -> None:
    """What the command takes for all files, once without and once with known norms."""
    files = sorted(folder.glob("*.safetensors"))
    gigabytes = sum(path.stat().st_size for path in files) / 1e9
    cache = folder / "norms.cache"
    known = len(cache.read_text().splitlines()) if cache.exists() else 0
    command = [sys.executable, "-m", "normscope", "checkpoint", str(folder), "--json", str(folder / "report.json")]
    command += ["--cache", str(cache)]
    began = time.perf_counter()
    whole = children(command)
    passed = time.perf_counter() - began
    report = json.loads((folder / "report.json").read_text())
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    proved = sum(row["certified"] and row["spectral_norm"] is not None for row in report["tensors"])
    pairs = sum(row["norm"] is not None for row in report["pairs"])
    print(
        f"{size}: {gigabytes:.2f} GB, {whole:.1f} s of a core ({passed:.1f} s passed), {whole / gigabytes:.1f} s per GB, at most "
        f"{largest:.2f} GiB resident; {proved} of {len(report['tensors'])} norms, {pairs} of {len(report['pairs'])} pairs proved",
        flush=True,
    )
    if known:
        print(f"{size}: {known} norms were known from an earlier run; times are those of the rest")
        return
    rest = children(command)  # all norms are in the cache: what is left is imports, the graph, reading and hashing
    reading = read_through(files)
    norms, work = whole - rest, operations(report)
    print(
        f"{size}: norms take {norms:.1f} s of a core: {norms / gigabytes:.1f} s per GB, {norms / reading:.0f} × reading; "
        f"{work / 1e12:.2f}e12 operations, {work / gigabytes / 1e9:.0f} per byte, {work / norms / 1e9:.0f}e9 per second",
        flush=True,
    )


def operations(report: dict[str, Any]) -> float:
    """What the table at the top counts, over all matrices."""
    gains: dict[str, int] = {}
    for pair in report["pairs"]:
        gains[pair["reader"]] = gains.get(pair["reader"], 0) + 1
    total = 0.0
    for row in report["tensors"]:
        if len(row["shape"]) == 2:
            narrow, wide = sorted(row["shape"])
            total += wide * narrow**2 + (1 + gains.get(row["name"], 0)) * (narrow**3 / 3 + 2 * narrow**2 * STEPS)
    return total


def compared(size: str, folder: Path) -> None:
    """Seconds of a core for spectral norms, ours and torch's, and for reading, on tensors of the first shard."""
    shard = sorted(folder.glob("*.safetensors"))[0]
    reading = read_through([shard]) / shard.stat().st_size
    matrices = {n: v for n, v in load_file(shard).items() if v.dim() == 2}
    cost = {name: max(value.shape) * min(value.shape) ** 2 for name, value in matrices.items()}
    chosen = [name for name in matrices if cost[name] <= COMPARED] or [min(cost, key=cost.__getitem__)]
    began = time.process_time()
    proved = [ours(Matrix(matrices[name])).spectral_norm for name in chosen]
    mine = time.process_time() - began
    began = time.process_time()
    theirs = [float(torch.linalg.matrix_norm(matrices[name].double(), 2)) for name in chosen]
    their = time.process_time() - began
    apart = max(one / other - 1 for one, other in zip(proved, theirs, strict=True) if one is not None)
    which = f"{len(chosen)} of the {len(matrices)} matrices of the first shard"
    print(
        f"{size}: on {which}: {mine:.1f} s of a core, torch.linalg.matrix_norm {their:.1f} s: {mine / their:.2f} × that, "
        f"{mine / max(reading * sum(matrices[name].nbytes for name in chosen), 1e-9):.0f} × reading; "
        f"proved bounds are at most {apart:.1e} above torch's values",
        flush=True,
    )


def children(command: list[str]) -> float:
    """Seconds of a core that a command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    for size in os.environ["LLAMA"].split(",") if "LLAMA" in os.environ else GROWING:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(os.environ.get("LLAMA_DIR", name))
            if not (folder / "model.safetensors.index.json").exists():
                write(folder, size)
            compared(size, folder)
            measured(size, folder)


if __name__ == "__main__":
    main()
