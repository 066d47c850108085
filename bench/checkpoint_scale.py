"""A synthetic Llama in bfloat16 shards: seconds of a core per gigabyte of `normscope checkpoint`,
against reading and against torch's norm.

python -m bench checkpoint_scale                 # two sizes, up to 0.1 billion parameters, and how time grows with bytes
LLAMA=7B python -m bench checkpoint_scale        # 7 billion: 13.5 GB on disk, in LLAMA_DIR if it is given
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

import torch
from safetensors.torch import load_file, save_file

SIZES = {  # hidden, layers, intermediate, heads, key heads, vocabulary
    "20M": (512, 4, 1376, 8, 8, 8_000),
    "100M": (768, 10, 2048, 12, 12, 16_000),
    "1B": (2048, 16, 8192, 32, 8, 32_000),
    "7B": (4096, 32, 11008, 32, 32, 32_000),
}


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


def measured(size: str) -> None:
    chosen = os.environ.get("LLAMA_DIR")
    with tempfile.TemporaryDirectory(dir=chosen) as name:
        folder = Path(name)
        total = write(folder, size)
        began = time.process_time()
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
        reading = time.process_time() - began
        command = [sys.executable, "-m", "normscope", "checkpoint", str(folder), "--json", str(folder / "report.json")]
        began = time.perf_counter()
        whole = children(command)
        passed = time.perf_counter() - began
        rest = children(command)  # all norms are in the cache: what is left is imports, the graph, reading and hashing
        report = json.loads((folder / "report.json").read_text())
        proved = sum(row["certified"] and row["spectral_norm"] is not None for row in report["tensors"])
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        norms = whole - rest
        print(
            f"{size}: {total / 1e9:.2f} GB, {whole:.1f} s of a core ({passed:.1f} s passed), {norms:.1f} s of them for norms: "
            f"{norms / (total / 1e9):.1f} s per GB, {norms / reading:.0f} × reading; at most {largest:.2f} GiB resident; "
            f"{proved} of {len(report['tensors'])} norms and {len(report['pairs'])} pairs proved",
            flush=True,
        )
        if size in ("20M", "100M"):
            began = time.process_time()
            for path in folder.glob("*.safetensors"):
                for value in load_file(path).values():
                    if value.dim() == 2:
                        torch.linalg.matrix_norm(value.double(), 2)
            theirs = time.process_time() - began
            print(
                f"{size}: torch.linalg.matrix_norm takes {theirs:.1f} s of a core: ours {norms / theirs:.2f} × that, pairs included"
            )


def children(command: list[str]) -> float:
    """Seconds of a core that a command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    for size in [os.environ["LLAMA"]] if "LLAMA" in os.environ else ["20M", "100M"]:
        measured(size)


if __name__ == "__main__":
    main()
