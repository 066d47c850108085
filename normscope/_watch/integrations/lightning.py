"""`WatchCallback` for Lightning: `Trainer(callbacks=[WatchCallback("runs/name")])`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normscope._watch.recording import Watch
from normscope._watch.watch import watch
from normscope.core.errors import InputError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("lightning is not installed: pip install 'normscope[lightning]'") from error


class WatchCallback(Callback):
    """Watches the module while it trains; options are those of `ns.watch`. `watch` holds the recording."""

    def __init__(self, run: str | Path, **options: Any) -> None:
        self.run, self.options = run, options
        self.watch: Watch | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise InputError(f"WatchCallback follows one optimizer, this module has {len(trainer.optimizers)}: use ns.watch")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options = {"start_step": trainer.global_step, "scaler": scaler, **self.options}
        self.watch = watch(module, trainer.optimizers[0], run=self.run, **options)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.watch is not None and loss is not None:
            self.watch.step(loss=loss)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._close(exception)

    def _close(self, error: BaseException | None = None) -> None:
        if self.watch is not None:
            self.watch.close(error)
