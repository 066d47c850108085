"""The one training loop of the lab: Than 2025's recipe by default, resumable at every epoch, the same numbers every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from normscope._watch.layers import NORMALIZING
from normscope._watch.watch import watch
from normscope.core.answers import right_answers
from normscope.core.errors import InputError, NormscopeError
from normscope.core.randomness import preserved_random_state
from normscope.lab.datasets import Labelled, Split
from normscope.lab.experiment import Numbers, Settings
from normscope.lab.measurements import LayerMeter, audited
from normscope.lab.models import build
from normscope.lab.workspace import Workspace
from normscope.optim import SGDG, AdamG
from normscope.symmetry.detect import symmetries
from normscope.symmetry.report import SymmetryReport

Meter = Callable[[nn.Module, Tensor], Callable[[nn.Module], Numbers]]
Penalty = Callable[[nn.Module], Callable[[], Tensor]]  # model → what is added to the loss
Batches = Callable[[Tensor, int, torch.Generator], Iterator[Tensor]]  # classes, batch size, random stream → indices of each batch

RECIPE = (  # of a training, settings of an experiment
    "images", "unit_ball", "epochs", "batch_size", "optimizer", "learning_rate", "weight_decay",
)  # fmt: skip
FROZEN = {"scale": "weight", "shift": "bias"}  # parts of a normalizer
EVALUATED = 1000  # samples per forward pass
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda model, rate, decay: torch.optim.Adam(model.parameters(), rate, weight_decay=decay, fused=True),
    "sgd": lambda model, rate, decay: torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=decay),
    "plain-sgd": lambda model, rate, decay: torch.optim.SGD(model.parameters(), rate, weight_decay=decay),
    "adamg": lambda model, rate, decay: AdamG(model, rate, weight_decay=decay),
    "sgdg": lambda model, rate, decay: SGDG(model, rate, momentum=0.9, weight_decay=decay),
}


@dataclass(frozen=True)
class Training:
    """One training, completely: network, data and recipe. options: of the network, such as its width.

    initial_scale: multiplies every initial weight. frozen: parts of the normalizers that stay as they start, "scale" (γ = 1)
    and "shift" (β = 0).
    """

    network: str
    normalizer: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    data: str = "digits"
    images: int | None = None
    unit_ball: bool = True
    epochs: int = 100
    batch_size: int = 128
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    initial_scale: float = 1.0
    frozen: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"images": 1, "epochs": 0, "batch_size": 1, "learning_rate": 0, "weight_decay": 0}
        for name, least in limits.items():
            value = getattr(self, name)
            kinds = (int, float) if name in ("learning_rate", "weight_decay") else (int,)
            if value is not None and (type(value) not in kinds or not least <= value):
                raise InputError(f"{name} must be a {'number' if float in kinds else 'whole number'} from {least}, got {value}")


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """Settings of experiments that train: the recipe of Than 2025, Appendix E, on networks with and without normalizers.

    networks: name → options of the network, or of its own recipe, such as epochs. images: of the training part, None for all.
    unit_ball: inputs scaled to ‖x‖ ≤ 1.
    """

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 512, "depth": 10}})
    normalizers: tuple[str, ...] = ("none", "batch")
    images: int | None = None
    unit_ball: bool = True
    epochs: int = 100
    batch_size: int = 128
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4

    def changed(self, changes: Mapping[str, str]) -> Settings:
        """As for all settings; one of the recipe holds for every network, also where the experiment gives a network its own."""
        networks = {
            network: {name: value for name, value in given.items() if name not in changes}
            for network, given in self.networks.items()
        }
        return super(TrainingSettings, replace(self, networks=networks)).changed(changes)

    def training(self, network: str, normalizer: str, seed: int, **changes: Any) -> Training:
        """The training of one of the networks, with what an experiment varies in `changes`: of the recipe, or of the network."""
        given = self.networks[network]
        if not isinstance(given, Mapping):
            raise InputError(f"networks must give {network} its options, such as {{}}, got {given}")
        options = {name: value for name, value in given.items() if name not in RECIPE}
        recipe = {name: given.get(name, getattr(self, name)) for name in RECIPE}
        options |= {name: changes.pop(name) for name in [*changes] if name not in Training.__dataclass_fields__}
        return Training(network, normalizer, **{"options": options, "data": self.data, **recipe, "seed": seed, **changes})


def with_and_without(
    settings: TrainingSettings, seed: int, variations: Mapping[str, Mapping[str, Any]] = MappingProxyType({"": {}})
) -> dict[str, Training]:
    """Every network with every normalizer, in every variation (end of the label → changes); nothing else differs."""
    return {
        f"{network} {normalizer}{label}": settings.training(network, normalizer, seed, **changes)
        for network in settings.networks
        for normalizer in settings.normalizers
        for label, changes in variations.items()
    }


@dataclass
class TrainedNetwork:
    """A network after its training. history: one record per epoch, the first before any step."""

    model: nn.Module
    split: Split
    history: list[Numbers]
    diverged: bool


def prepared_data(training: Training, workspace: Workspace) -> Split:
    """The data, cut and scaled as the training says."""
    split = workspace.data(training.data).subset(training.images, workspace.generator("subset"))
    return split.in_unit_ball() if training.unit_ball else split


def network_for(split: Split, training: Training, workspace: Workspace) -> tuple[nn.Module, Split]:
    """The network, not yet trained, and the data as it takes them."""
    model, split = build(training.network, split, training.normalizer, workspace.generator("weights"), **training.options)
    if training.initial_scale != 1:
        _scale_weights(model, training.initial_scale)
    for layer in model.modules():
        if isinstance(layer, NORMALIZING):
            for part in training.frozen:
                getattr(layer, FROZEN[part]).requires_grad_(False)
    return model, split


@torch.no_grad()
def _scale_weights(model: nn.Module, factor: float) -> None:
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, _ConvNd)):
            scaled = factor * layer.weight
            layer.weight = scaled if is_parametrized(layer, "weight") else nn.Parameter(scaled)


def prepare(training: Training, workspace: Workspace) -> tuple[nn.Module, Split]:
    """The network, not yet trained, and its data, scaled and cut as the training says."""
    return network_for(prepared_data(training, workspace), training, workspace)


def shuffled(classes: Tensor, size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Batches in a fresh random order; a last batch of one is left out, for batch statistics need two."""
    batches = torch.randperm(len(classes), generator=order).split(size)
    yield from (batch for batch in batches if len(batch) > 1 or len(batches) == 1)


def train(training: Training, workspace: Workspace, meter: Meter | None = None) -> TrainedNetwork:
    """Train the network that the training names, or go on from the checkpoint; see `fit`."""
    return fit(*prepare(training, workspace), training, workspace, meter)


def _symmetries(model: nn.Module, example: Tensor) -> SymmetryReport | None:
    """Which weights are scale-free, for the recording; None of a model that cannot be traced, where the recording says so."""
    with preserved_random_state(), suppress(NormscopeError):
        return symmetries(model, example)
    return None


def fit(
    model: nn.Module,
    split: Split,
    training: Training,
    workspace: Workspace,
    meter: Meter | None = None,
    batches: Batches = shuffled,
    penalty: Penalty | None = None,
) -> TrainedNetwork:
    """Train this network on this data by the recipe, or go on from the checkpoint.

    meter: given the model and a fixed batch, makes what measures after every epoch. batches: how an epoch is cut. penalty: given
    the model, makes what is added to the loss; it is made anew for every epoch, so that a resumed training ends the same.
    """
    if training.optimizer not in OPTIMIZERS:
        raise InputError(f"no optimizer {training.optimizer!r}: choose from {', '.join(OPTIMIZERS)}")
    measure = meter(model, split.train[0][: training.batch_size]) if meter else lambda model: {}
    optimizer = OPTIMIZERS[training.optimizer](model, training.learning_rate, training.weight_decay)
    order = workspace.generator("order")
    history: list[Numbers] = []
    state = workspace.load()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order.set_state(state["order"])
        history = state["history"]
    else:
        history.append({"epoch": 0, **evaluated(model, split.test, "test"), **measure(model)})
    diverged = bool(history[-1].get("diverged"))
    steps = len(list(batches(split.train[1], training.batch_size, torch.Generator())))
    known = _symmetries(model, split.train[0][:2])
    started = history[-1]["epoch"] * steps
    with watch(
        model,
        optimizer,
        run=workspace.run,
        every=steps,
        start_step=started,
        symmetries=known,
        quiet=True,
        resume=started > 0,
        overwrite=started == 0,
    ) as recording:
        for epoch in range(history[-1]["epoch"] + 1, training.epochs + 1):
            if diverged:
                break

            def stepped(step: int, loss: Tensor, epoch: int = epoch) -> None:
                recording.step(loss=loss)
                workspace.progress(epoch - 1 + step / steps, training.epochs)

            cut = batches(split.train[1], training.batch_size, order)
            record = {"epoch": epoch, **_epoch(model, optimizer, split.train, cut, stepped, penalty)}
            diverged = bool(record.get("diverged"))
            history.append({**record, **evaluated(model, split.test, "test"), **measure(model)})
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "order": order.get_state()}
            workspace.save({**states, "history": history})
    return TrainedNetwork(model.eval(), split, history, diverged)


def trained_numbers(training: Training, workspace: Workspace) -> Numbers:
    """A training as the figures of Than 2025 look at it: layers every epoch, and at the end the audit and both parts' losses."""
    trained = train(training, workspace, LayerMeter)
    probe = trained.split.train[0][: training.batch_size]
    return {**ends(trained), "audit": audited(trained.model, probe, workspace.generator("audit"))}


def accuracy_numbers(training: Training, workspace: Workspace) -> Numbers:
    """A training as its losses and accuracies alone."""
    return ends(train(training, workspace))


def ends(trained: TrainedNetwork) -> Numbers:
    """Losses and accuracies on both parts at the end, their gaps, and how it went."""
    found = {**evaluated(trained.model, trained.split.train, "train"), **evaluated(trained.model, trained.split.test, "test")}
    return {
        **found,
        "gap_loss": found["test_loss"] - found["train_loss"],
        "gap_accuracy": found["train_accuracy"] - found["test_accuracy"],
        "diverged": trained.diverged,
        "history": trained.history,
    }


def _epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Labelled,
    batches: Iterator[Tensor],
    stepped: Callable[[int, Tensor], None],
    penalty: Penalty | None,
) -> Numbers:
    """One pass over the data; loss and accuracy are those of the batches as they were trained on."""
    model.train()
    inputs, classes = data
    total, right, seen = 0.0, 0, 0
    added = penalty(model) if penalty else None
    for step, chosen in enumerate(batches, start=1):
        optimizer.zero_grad()
        outputs = model(inputs[chosen])
        loss = cross_entropy(outputs, classes[chosen])
        if not loss.isfinite():
            return {"train_loss": math.nan, "train_accuracy": right / max(seen, 1), "diverged": True}
        (loss if added is None else loss + added()).backward()
        optimizer.step()
        stepped(step, loss)
        total += float(loss.detach()) * len(chosen)
        right += int(right_answers(outputs, classes[chosen]).sum())
        seen += len(chosen)
    return {"train_loss": total / seen, "train_accuracy": right / seen}


def evaluated(model: nn.Module, data: Labelled, part: str) -> Numbers:
    """Mean cross-entropy and accuracy in eval mode."""
    training, right, total = model.training, 0, 0.0
    model.eval()
    with torch.no_grad():
        for inputs, classes in zip(data[0].split(EVALUATED), data[1].split(EVALUATED), strict=True):
            outputs = model(inputs)
            total += float(cross_entropy(outputs, classes, reduction="sum"))
            right += int(right_answers(outputs, classes).sum())
    model.train(training)
    return {f"{part}_loss": total / len(data[0]), f"{part}_accuracy": right / len(data[0])}
