"""Checkpoints of networks that nobody here wrote: their numbers against the audit's, and what is said about healthy weights.

    python -m bench checkpoint_wild [--part i/n] [--only NAME,…] [--no-audit] [--trained DIR]

Every architecture of `bench wild` that can be saved is saved with fresh weights. (1) The norms of the file are those of the audit
of the built model, wherever a row of the audit is about one whole parameter. (2) Fresh weights have no fault: an error or a warning
is a false alarm. --trained judges the weights in a directory of trained networks likewise, and runs nothing else.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import normscope as ns
from bench.wild.checks import Known, is_slice
from bench.wild.transformers_models import NotBuilt, build, names
from normscope._checkpoint.report import CheckpointReport
from normscope.core.errors import NormscopeError

NEAR = 2e-6  # relative: both are bounds with slacks of their own, of the same weight
SECONDS = 60  # of a core, per model
ALARMS = ("error", "warning")
TRAINED = ("crepe/tiny.pth", "crepe/full.pth", "fcpe/fcpe_c_v001.pt", "minilm", "smollm2")


class TooSlow(BaseException):
    """A model has had its time; no exception that normscope turns into a refusal."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def compared(model: torch.nn.Module, example: dict[str, torch.Tensor], found: CheckpointReport) -> tuple[int, list[str]]:
    """How many rows of the audit are about one whole parameter that the file has, and those that disagree with it."""
    stored = {row.name: row for row in found.tensors}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    count, wrong = 0, []
    known = Known(model, example, output_of(model, example))
    for row in ns.audit(model, example, effort=0.0, local=False, output=known.output).layers:
        name = row.parameters[0] if len(row.parameters) == 1 else ""
        if row.frobenius_norm is None or name not in parameters or name not in stored or parameters[name].dim() < 2:
            continue
        own = stored[name]
        if abs(own.frobenius_norm - float(row.frobenius_norm)) > NEAR * own.frobenius_norm:
            norm = float(row.frobenius_norm)
            if not is_slice(parameters[name], norm) and not known.computed(norm):
                wrong.append(f"{name}: ‖W‖_F is {own.frobenius_norm:.9g} in the file, {row.frobenius_norm} in the audit")
            continue
        if row.matrix_norm is not None and own.spectral_norm is not None and not transposed(model, name):
            count += 1
            if abs(own.spectral_norm - float(row.matrix_norm)) > NEAR * own.spectral_norm:
                wrong.append(f"{name}: ‖W‖ is {own.spectral_norm:.9g} in the file, {float(row.matrix_norm):.9g} in the audit")
    return count, wrong


def output_of(model: torch.nn.Module, example: dict[str, torch.Tensor]) -> int | None:
    """The first output, where an audit would ask which one is meant."""
    with torch.no_grad():
        result = model(**example)
    return None if isinstance(result, torch.Tensor) or {"logits", "last_hidden_state"} & {*result} else 0


def transposed(model: torch.nn.Module, name: str) -> bool:
    """Whether a kernel's first axis is not its output: the file has (first axis, everything else)."""
    owner = model.get_submodule(name.rpartition(".")[0])
    weight = dict(model.named_parameters(remove_duplicate=False))[name]
    return weight.dim() > 2 and not (isinstance(owner, torch.nn.modules.conv._ConvNd) and not owner.transposed)


def told(found: CheckpointReport) -> list[str]:
    return [f"{finding.rule} {finding.severity} {finding.where}: {finding.message}" for finding in found.findings]


def one(name: str, audited: bool) -> dict[str, Any]:
    """What came of one architecture."""
    try:
        model, example = build(name)
    except (NotBuilt, Exception) as error:
        return {"outcome": "not built", "why": str(error)[:100]}
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)  # type: ignore[operator]
        except Exception as error:
            return {"outcome": "not saved", "why": f"{type(error).__name__}: {str(error)[:100]}"}
        found = ns.checkpoint(folder)
    record: dict[str, Any] = {"outcome": "judged", "alarms": [text for text in told(found) if text.split()[1] in ALARMS]}
    if audited:
        try:
            record["rows"], record["wrong"] = compared(model, example, found)
        except NormscopeError as error:
            record["why"] = f"no audit: {str(error).splitlines()[0][:100]}"
    return record


def fresh(chosen: list[str], audited: bool) -> None:
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    totals: Counter[str] = Counter()
    for name in chosen:
        began = time.process_time()
        try:
            with limited(SECONDS):
                record = one(name, audited)
        except TooSlow:
            record = {"outcome": f"more than {SECONDS} s"}
        except NormscopeError as error:
            record = {"outcome": "WRONG", "why": f"{type(error).__name__}: {str(error)[:200]}"}
        rows, wrong, alarms = record.get("rows", 0), record.get("wrong", []), record.get("alarms", [])
        totals.update({record["outcome"]: 1, "audited": "rows" in record, "rows": rows, "wrong": len(wrong), "alarms": len(alarms)})
        said = "; ".join([*(f"WRONG {text}" for text in wrong), *(f"ALARM {text}" for text in alarms), record.get("why", "")])
        print(f"{name:32} {record['outcome']:10} {rows:4} rows {time.process_time() - began:6.1f} s  {said}", flush=True)
    kinds = ", ".join(f"{count} {kind}" for kind, count in totals.items() if kind not in ("audited", "rows", "wrong", "alarms"))
    print(
        f"{len(chosen)} architectures: {kinds}; {totals['rows']} norms of {totals['audited']} audits compared, "
        f"{totals['wrong']} differ; {totals['alarms']} false alarms"
    )


def trained(folder: Path) -> None:
    for name in TRAINED:
        if (folder / name).exists():
            found = ns.checkpoint(folder / name)
            lines = told(found)
            alarms = sum(text.split()[1] in ALARMS for text in lines)
            print(f"{name}: {len(found.tensors)} tensors, {alarms} alarms" + "".join(f"\n  {text}" for text in lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench checkpoint_wild")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th architecture, from the i-th")
    parser.add_argument("--only", default="", help="names of architectures, with commas between them")
    parser.add_argument("--no-audit", action="store_true", help="judge fresh weights alone")
    parser.add_argument("--trained", type=Path, help="a directory of trained networks")
    given = parser.parse_args(sys.argv[sys.argv.index("checkpoint_wild") + 1 :] if "checkpoint_wild" in sys.argv else None)
    if given.trained:
        trained(given.trained)
        return
    part, parts = map(int, given.part.split("/"))
    fresh(given.only.split(",") if given.only else names()[part - 1 :: parts], not given.no_audit)


if __name__ == "__main__":
    main()
