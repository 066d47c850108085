"""`WatchCallback` for transformers: `Trainer(callbacks=[WatchCallback("runs/name")])`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normscope._watch.recording import Watch
from normscope._watch.watch import watch

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("transformers is not installed: pip install 'normscope[transformers]'") from error


class WatchCallback(TrainerCallback):
    """Watches the model while it trains; options are those of `ns.watch`. `watch` holds the recording.

    The Trainer hands out its loss only when it logs (`logging_steps`), as the mean since the last time.
    """

    def __init__(self, run: str | Path, **options: Any) -> None:
        self.run, self.options = run, options
        self.watch: Watch | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        options = {"start_step": state.global_step, **self.options}
        self.watch = watch(kwargs["model"], kwargs["optimizer"], run=self.run, **options)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.watch is not None and logs and "loss" in logs:
            self.watch.step(loss=logs["loss"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.watch is not None:
            self.watch.close()
