"""`ns.doctor`: run every check that can run, and say which could not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from normscope.core.data import Data, Example
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, boundary
from normscope.core.randomness import preserved_random_state
from normscope.findings.catalogue import RULES, chosen_rules, judged
from normscope.findings.finding import SEVERITIES, Findings
from normscope.findings.subject import Subject
from normscope.graph.exporting import check_runs
from normscope.symmetry.report import SymmetryReport, check_report

IGNORE = re.compile(r"#\s*normscope:\s*ignore\s+((?:NS\d+[,\s]*)+)")


@earlier(positional=8)
@boundary
def doctor(
    model: torch.nn.Module,
    example: Example,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    data: Data | None = None,
    run: Any = None,
    output: str | int | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    accumulation: int | None = None,
    micro_batch: int | None = None,
    symmetries: SymmetryReport | None = None,
) -> Findings:
    """Find what is wrong with a model's normalization. Nothing is trained and nothing is changed.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
    >>> [finding.rule for finding in doctor(model, torch.zeros(2, 4))]
    ['NS101']

    example: a tensor, a tuple of arguments or a dict of keyword arguments, with axis 0 the batch; token ids are fine.
    optimizer: as it will train the model, or has trained it.
    data: (inputs, targets), or batches as training sees them.
    run: a recorded run or its directory.
    output: name or position of the output to examine, where the model returns several; without it `logits` or `last_hidden_state`.
    select: ids of the rules to run, or their beginnings ("NS1", "NS203"); all of them if not given.
    ignore: ids of rules to leave out, or their beginnings.
    accumulation: how many micro-batches make a step.
    micro_batch: how many samples a device sees at once in training.
    symmetries: a report of `ns.symmetries`. Without it, the doctor makes one where an optimizer is given and the model has at most
    100 million parameters; the result says what was not checked.

    `# normscope: ignore NS101` beside the line that makes a module silences a rule there.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, count in (("micro_batch", micro_batch), ("accumulation", accumulation)):
        if count is not None and count < 1:
            raise InputError(f"{name} must be at least 1, got {count}")
    chosen = chosen_rules(select, ignore)
    if symmetries is not None:
        check_report(symmetries, model)
        if symmetries.mode != "train":
            raise InputError('symmetries is a report of eval mode: make it with mode="train", as the model trains')
    subject = Subject(model, example, optimizer, data, _loaded(run), output, accumulation, micro_batch, symmetries)
    with preserved_random_state():  # some models draw numbers in eval mode, too
        found, checked, not_checked = judged(subject, chosen)
    if subject.why_no_graph and not found:
        check_runs(model, subject.call)  # nothing found in a model that does not run on the example says nothing
    kept = [finding for finding in found if finding.rule not in silenced(model, finding.where)]
    kept.sort(key=lambda finding: (SEVERITIES.index(finding.severity), finding.rule))
    return Findings(tuple(kept), tuple(checked), not_checked, subject, basis=subject.basis(checked))


def _loaded(run: Any) -> Any:
    if isinstance(run, (str, Path)):
        from normscope._watch.reading import load_run

        return load_run(run)
    return run


def silenced(model: torch.nn.Module, path: str) -> set[str]:
    """Rules that a comment beside the line that makes a module, or one that contains it, switches off."""
    rules: set[str] = set()
    names = path.split(".") if path else []
    for depth in range(len(names)):
        try:
            parent = model.get_submodule(".".join(names[:depth]))
            lines = inspect.getsource(type(parent)).splitlines()
        except (AttributeError, OSError, TypeError):
            continue
        made = re.compile(rf"\bself\.{re.escape(names[depth])}\s*(?::[^=]+)?=[^=]")
        for line in lines:
            if made.search(line) and (comment := IGNORE.search(line)):
                rules.update(re.findall(r"NS\d+", comment[1]))
    return rules


def explanation(rule: str) -> str:
    """Everything that is known about one rule, as text."""
    if rule not in RULES:
        raise InputError(f"no rule {rule!r}: choose from {', '.join(sorted(RULES))}")
    found = RULES[rule]
    needs = f"\n\nNeeds: {', '.join(found.needs)}."
    return f"{rule}: {found.title} ({found.severity})\n\n{found.why}\n\nFix: {found.fix}\n\nReference: {found.reference}.{needs}"
