"""What the four optimizers share: families of scale-free vectors beside plain parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypedDict

import torch

from normscope.core.errors import InputError
from normscope.geometry.families import Family, Symmetries, scale_free_families
from normscope.optim.family_rows import Rows
from normscope.optim.first_example import FirstExample
from normscope.optim.plain import States

Parameters: TypeAlias = torch.nn.Module | Iterable[Any]  # what torch's optimizers take, or the model itself
Settings = Mapping[str, Any]  # a parameter group
Matrices = list[torch.Tensor]  # one for each family, with one vector per row


class Detection(TypedDict, total=False):
    """From where an optimizer knows which vectors are scale-free; see ScaleFreeOptimizer."""

    symmetries: Symmetries | None
    model: torch.nn.Module | None
    example: Any


class ScaleFreeOptimizer(torch.optim.Optimizer):
    """Moves scale-free vectors in a way of its own and every other parameter as torch does.

    symmetries: a report of `ns.symmetries`, matched by the names of the parameters. Without it the symmetries are found in
    `model` (or in `params`, if that is the model) on `example`, or on the inputs of its first forward pass in training mode.

    A family takes the settings of the parameter group of its first parameter. It moves as a family when all of its parameters
    have gradients; else those that have one make plain steps.
    """

    _step_plain: Callable[[States, Settings, list[torch.Tensor]], None]  # of the parameters that no scale symmetry touches
    _families: tuple[Family, ...] | None = None
    _symmetries: Symmetries | None = None
    _first: FirstExample | None = None
    left_out: tuple[str, ...] = ()  # one line for every scale group that makes plain steps, with the reason

    def __init__(
        self,
        params: Parameters,
        defaults: dict[str, Any],
        symmetries: Symmetries | None = None,
        model: torch.nn.Module | None = None,
        example: Any = None,
    ) -> None:
        if isinstance(params, torch.nn.Module):
            model, params = params, params.named_parameters()
        if symmetries is None and model is None:
            raise InputError(
                "scale-free weights cannot be told from the parameters alone: pass symmetries=ns.symmetries(model, example), or "
                "the model in place of its parameters"
            )
        _check_settings(defaults)
        super().__init__(params, defaults)
        self._model = model
        if symmetries is not None:
            self._symmetries = symmetries
            self._match()
        elif example is not None:
            self._detect(example)
        elif model is not None:
            self._first = FirstExample(model)

    @property
    def scale_free(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of every family."""
        return tuple(family.names for family in self._known_families())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; parameters that the report knows join their families."""
        super().add_param_group(param_group)
        _check_settings(self.param_groups[-1])
        if self._symmetries is not None:
            self._match()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_families": self._known_families(), "left_out": self.left_out, "_model": None}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a closure computes the loss and its gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        families = [family for family in self._known_families() if all(p.grad is not None for p in family.parameters)]
        inside = {parameter for family in families for parameter in family.parameters}
        for group in self.param_groups:
            own = set(group["params"])
            plain = [p for p in group["params"] if p.grad is not None and p not in inside]
            if plain:
                self._step_plain(self.state, group, plain)
            self._step_families(group, [family for family in families if family.parameters[0] in own])
        return loss

    def _known_families(self) -> tuple[Family, ...]:
        if self._families is None:
            if self._first is None or self._first.inputs is None:
                raise InputError(
                    "the symmetries are not known yet, as no forward pass in training mode has shown the model's inputs: call "
                    "the model first, or pass symmetries=ns.symmetries(model, example)"
                )
            self._detect(self._first.inputs)
        assert self._families is not None
        return self._families

    def _detect(self, example: Any) -> None:
        from normscope.symmetry.detect import symmetries

        with torch.enable_grad():
            self._symmetries = symmetries(self._model, example, mode="train")
        self._first = None
        self._match()

    def _match(self) -> None:
        assert self._symmetries is not None
        self._families, self.left_out = scale_free_families(self._symmetries, self._named_parameters())

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that can move, by the names that they have in the model."""
        own = {parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad}
        if self._model is not None:
            return {name: parameter for name, parameter in self._model.named_parameters() if parameter in own}
        if any("param_names" not in group for group in self.param_groups):
            raise InputError("a report is matched by names: pass model.named_parameters(), or model=… beside the parameters")
        pairs = (pair for group in self.param_groups for pair in zip(group["param_names"], group["params"], strict=True))
        return {name: parameter for name, parameter in pairs if parameter in own}

    def _step_families(self, group: Settings, families: list[Family]) -> None:
        """Families at the same step are moved together with `foreach`, else one by one and piece by piece."""
        by_number: dict[float, list[Family]] = defaultdict(list)
        for family in families:
            by_number[self._count_step(family)].append(family)
        for number, members in by_number.items():
            for batch in _batches(group, members):
                every = [self._rows(group, family) for family in batch]
                together = [[list(each) for each in zip(*(rows.matrices for rows in every), strict=True)]]
                alone = ([[matrix] for matrix in piece] for piece in every[0].pieces())
                for matrices in together if len(every) > 1 else alone:
                    self._move(group, number, *matrices)
                for rows in every:
                    rows.store()

    def _rows(self, group: Settings, family: Family) -> Rows:
        """The parameters, their gradients, and the states in the order in which `_move` takes them."""
        rows = Rows(family.vectors, family.parameters[0].dtype)
        rows.add_entries(family.parameters)
        rows.add_gradients([parameter.grad for parameter in family.parameters])
        self._add_states(group, family, rows)
        return rows

    def _entry_state(self, family: Family, name: str) -> list[torch.Tensor]:
        """A state with an entry for each entry of the parameters, zero at first."""
        for parameter in family.parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in family.parameters]

    def _count_step(self, family: Family) -> float:
        """The number of this step; kept on the CPU as torch does, so that reading it never waits for a device."""
        for parameter in family.parameters:
            counter = self.state[parameter].setdefault("step", torch.zeros(()))
            counter += 1
        return float(counter)

    @abstractmethod
    def _add_states(self, group: Settings, family: Family, rows: Rows) -> None:
        """Add the states of a family to its rows."""

    @abstractmethod
    def _move(self, group: Settings, number: float, points: Matrices, gradients: Matrices, *states: Matrices) -> None:
        """Step number `number` of the vectors, in place."""


def _batches(group: Settings, families: list[Family]) -> Iterator[list[Family]]:
    """All at once with `foreach`, which by default is used where all parameters are on the same accelerator."""
    foreach = group["foreach"]
    if foreach is None:
        foreach = all(parameter.device.type == "cuda" for family in families for parameter in family.parameters)
    if foreach:
        yield families
    else:
        yield from ([family] for family in families)


BOUNDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": ("at least 0", lambda value: value >= 0),
    "momentum": ("in [0, 1)", lambda value: 0 <= value < 1),
    "betas": ("two numbers in [0, 1)", lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value)),
    "eps": ("at least 0", lambda value: value >= 0),
    "weight_decay": ("at least 0", lambda value: value >= 0),
    "decay_ratio": ("at least 0", lambda value: value >= 0),
    "sphere_ratio": ("at least 0", lambda value: value >= 0),
    "clip": ("positive, or None", lambda value: value is None or value > 0),
    "orthogonality": ("at least 0", lambda value: value >= 0),
}


def _check_settings(settings: Settings) -> None:
    for name, (wanted, holds) in BOUNDS.items():
        if name in settings and not holds(settings[name]):
            raise InputError(f"{name} must be {wanted}, got {settings[name]}")
    if settings.get("nesterov") and settings.get("momentum") == 0:
        raise InputError("nesterov needs momentum > 0")
