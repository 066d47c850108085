"""The callbacks, with the real libraries."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import normscope as ns
from tests.watch.loops import Transformer, mlp

DATA = TensorDataset(torch.randn(32, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 5)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from normscope._watch.integrations.lightning import WatchCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = mlp()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(*callbacks: Any) -> Module:
        module = Module()
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=list(callbacks), accumulate_grad_batches=2, gradient_clip_val=0.5, **options
        )
        trainer.fit(module, DataLoader(DATA, batch_size=4))
        return module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, watched = trained(), trained(WatchCallback(tmp_path / "run", every=1, quiet=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    run = ns.load_run(tmp_path / "run")
    assert run.table()["step"].to_pylist() == list(range(1, 9)) and not run.events("error")
    assert np.isfinite(run.table()["loss"].to_numpy()).all()
    rows = {layer["role"]: i for i, layer in enumerate(run.layers)}
    assert np.isfinite(run.matrix("gradient_norm")[:, rows["weight"]]).all()
    assert np.isfinite(run.matrix("input_variance")[:, [rows["normalizer"], rows["activation"]]]).all()


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from normscope._watch.integrations.transformers import WatchCallback

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    tokens = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def trained(*callbacks: Any) -> nn.Module:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks)).train()
        return model

    plain, watched = trained(), trained(WatchCallback(tmp_path / "run", every=1, quiet=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    run = ns.load_run(tmp_path / "run")
    assert run.table()["step"].to_pylist() == list(range(1, 9)) and not run.events("error")
    weights = [i for i, layer in enumerate(run.layers) if layer["in_product"]]
    assert len(weights) == 15 and np.isfinite(run.matrix("gradient_norm")[:, weights]).all()
    assert np.isfinite(run.table()["loss"].to_numpy()).any()


def test_accelerate(tmp_path: Path) -> None:
    """The optimizer that `prepare` returns is a wrapper without hooks: what it wraps is watched."""
    accelerate = pytest.importorskip("accelerate")

    def trained(path: Path | None) -> nn.Module:
        torch.manual_seed(0)
        model = Transformer()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        batches = DataLoader(DATA, batch_size=4)
        model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches)
        with ns.watch(model, optimizer, run=path, every=1, quiet=True) if path else nullcontext() as watch:
            for x, y in batches:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                if watch is not None and accelerator.sync_gradients:
                    watch.step(loss=loss)
        return model

    plain, watched = trained(None), trained(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    run = ns.load_run(tmp_path / "run")
    assert run.table()["step"].to_pylist() == [1, 2, 3, 4] and not run.events("error")
    assert np.isfinite(run.table()["loss"].to_numpy()).all()
    for name in ("gradient_norm", "update_norm", "write_ratio", "backward_gain", "attention_logit"):
        assert np.isfinite(run.matrix(name)[-1]).any(), name
