"""Labels that can be read from batch-mates alone: a batch comes from one of two groups, and blank samples are to say from which."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from normscope.core.answers import right_answers
from normscope.core.errors import InputError
from normscope.lab.datasets import Labelled, Split
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.training import Training, TrainingSettings, ends, evaluated, fit, network_for, prepared_data, with_and_without
from normscope.lab.workspace import Workspace

GROUPS = 2
NOTICEABLE = 0.05  # of accuracy, above chance
USUAL = TrainingSettings(
    networks={"mlp": {"width": 64, "depth": 4}}, normalizers=("none", "batch", "layer"), epochs=10, batch_size=32, seeds=(0, 1, 2)
)


def measure(trial: Training, workspace: Workspace) -> Numbers:
    """Accuracy on blank samples, whose group only their batch-mates show: in such batches in training mode, and in eval mode."""
    plain, noise = prepared_data(trial, workspace), workspace.generator("blanks")
    split = Split(blanked(plain.train, plain.classes, noise), blanked(plain.test, plain.classes, noise))

    def meter(model: nn.Module, batch: Tensor) -> Callable[[nn.Module], Numbers]:
        return lambda model: {"blank_accuracy": blank_accuracy(model, split.test, trial.batch_size)}

    trained = fit(*network_for(split, trial, workspace), trial, workspace, meter, one_group)
    numbers = ends(trained)
    inputs, classes = (part[len(plain.test[0]) :] for part in trained.split.test)
    alone = evaluated(trained.model, (inputs, classes), "blank_eval")
    return {**numbers, **alone, "blank_accuracy": trained.history[-1]["blank_accuracy"], "chance": 1 / GROUPS}


def blanked(data: Labelled, classes: int, noise: torch.Generator) -> Labelled:
    """The samples with their classes, then as many of pure noise: their class is the group, `classes` or `classes` + 1.

    Groups are the first half of the classes and the second: as where data come from one of two hospitals.
    """
    inputs, labels = data
    if not inputs.is_floating_point():
        raise InputError("blank samples are noise, which token ids cannot be: choose other data, such as digits")
    blanks = inputs.std() * torch.randn(inputs.shape, generator=noise)
    return torch.cat([inputs, blanks]), torch.cat([labels, classes + GROUPS * labels // classes])


def one_group(classes: Tensor, size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Batches of samples and blanks of one group, half and half, in random order."""
    blanks = len(classes) // 2
    batches = []
    for group in classes[blanks:].unique():
        members = (classes[blanks:] == group).nonzero()[:, 0]
        clear, blank = (members[torch.randperm(len(members), generator=order)].split(size // 2) for _ in range(2))
        batches += [torch.cat([first, blanks + second]) for first, second in zip(clear, blank, strict=True)]
    yield from (batches[index] for index in torch.randperm(len(batches), generator=order).tolist())


def blank_accuracy(model: nn.Module, data: Labelled, batch_size: int) -> float:
    """On the blank half of batches of one group, in training mode; the model is left as it was."""
    inputs, classes = data
    copied = copy.deepcopy(model).train()
    right = []
    with torch.no_grad():
        for batch in one_group(classes, batch_size, torch.Generator().manual_seed(0)):
            right.append(right_answers(copied(inputs[batch]), classes[batch])[batch >= len(classes) // 2])
    return float(torch.cat(right).double().mean())


def judge(results: Results) -> Iterator[Comparison]:
    for (normalizer,), group in results.groups("normalizer").items():
        chance, leaked = group.mean("chance"), group.mean("blank_accuracy")
        read = less(chance, leaked, by=NOTICEABLE)
        paper, agrees = ("can leak", read) if normalizer == "batch" else ("no leak", None if read is None else not read)
        yield Comparison(f"{normalizer}: accuracy on blank samples in their batch", paper, f"{leaked:.3f}", agrees)
        if normalizer == "batch":
            small = less(leaked, chance, by=-NOTICEABLE)
            yield Comparison("batch: size of the effect, above chance", "rare or small", f"{leaked - chance:+.3f}", small)
        alone = group.mean("blank_eval_accuracy")
        yield Comparison(f"{normalizer}: accuracy on blank samples in eval mode", "", f"{alone:.3f}")


def plots(results: Results) -> dict[str, Plot]:
    groups = results.groups("normalizer")
    series = {normalizer: group.track("blank_accuracy") for (normalizer,), group in groups.items()}
    title = "Blank samples, whose group only their batch-mates show"
    return {"leakage": Plot(title, "epoch", "test accuracy", series, levels={"chance": results.mean("chance")})}


EXPERIMENT = Experiment(
    name="batch-leakage",
    source="Akbar, Sections 7.2 and 9.4",
    statement="BN can leak information where batch composition matters, albeit a rare or small effect; LN does not.",
    quick=USUAL,
    full=replace(USUAL, networks={"mlp": {"width": 512, "depth": 10}}, epochs=50, seeds=(0, 1, 2, 3, 4)),
    trials=with_and_without,
    measure=measure,
    judge=judge,
    plots=plots,
)
