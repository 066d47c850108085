"""What can be known of an audit without normscope: every check yields the contradictions that it finds, as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from normscope.auditing import Audit
from normscope.graph.outputs import chosen_output
from normscope.ledger import LayerRow
from normscope.symmetry.report import SymmetryReport

NEAR = 2e-5  # relative: a row's norm is a bound with a slack of 1e-6, of a float32 weight
# factors on a scale-free weight at which ε no longer matters, however small the signal; powers of two, so that both round alike
FACTORS = {torch.float64: (2.0**100, 2.0**102), torch.float32: (2.0**13, 2.0**15)}


def is_slice(weight: torch.Tensor, norm: float) -> bool:
    """Whether an index or equal chunks along some axis give a tensor of that norm: packed weights, experts."""
    weight = weight.detach().double()
    parts = (
        part for axis in range(weight.dim()) for count in {2, 3, 4, weight.shape[axis]} if weight.shape[axis] % count == 0
        for part in weight.chunk(count, axis)
    )  # fmt: skip
    return any(abs(float(part.norm()) - norm) <= NEAR * norm for part in parts)


class _Listening(TorchFunctionMode):
    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.parameters, self.norms = parameters, list[float]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            matrix = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
            if matrix and id(value) not in self.parameters:
                self.norms.append(float(value.double().norm()))
        return function(*args, **(kwargs or {}))


@dataclass(eq=False)
class Known:
    """A model as it runs on an example, without a graph: its parameters, gradients and what enters its modules."""

    model: nn.Module
    example: dict[str, torch.Tensor]
    output: str | int | None

    def run(self) -> torch.Tensor:
        found: torch.Tensor = chosen_output(self.model(**self.example), self.output)
        return found

    @cached_property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.model.named_parameters(remove_duplicate=False)}

    @cached_property
    def read(self) -> list[str]:
        """Weights of two or more axes with a gradient that is not zero; none where a backward of the model's own raises."""
        floating = [value for value in self.model.parameters() if value.is_floating_point() and value.requires_grad]
        output = self.run().double()
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        try:
            found = torch.autograd.grad((output * weights).sum(), floating, allow_unused=True)
        except (RuntimeError, AssertionError):  # Reformer's, outside of training
            return []
        moved = {
            id(value) for value, gradient in zip(floating, found, strict=True) if gradient is not None and bool(gradient.any())
        }
        named = (name for name, value in self.model.named_parameters() if id(value) in moved and value.dim() > 1)
        return [name for name in named if not name.endswith("bias")]

    @cached_property
    def entering(self) -> dict[str, list[torch.Tensor]]:
        """What entered each module, call by call, on the first sample and the others alike; but for those of several tensors."""
        found: dict[str, list[torch.Tensor]] = {}

        def keep(path: str) -> Any:
            def kept(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
                if len(given) == 1:  # a gate beside it is multiplied in before the variance is taken
                    found.setdefault(path, []).append(given[0].detach().double())

            return kept

        hooks = [
            module.register_forward_pre_hook(keep(path), with_kwargs=True) for path, module in self.model.named_modules() if path
        ]
        with torch.no_grad():
            self.run()
        for hook in hooks:
            hook.remove()
        return found

    @cached_property
    def handed(self) -> list[float]:
        """Frobenius norms of the tensors that functions of torch receive on the first sample, parameters aside."""
        first = {name: value[:1] for name, value in self.example.items()}
        with torch.no_grad(), _Listening({id(value) for value in self.model.parameters()}) as listening:
            self.model(**first)
        return listening.norms

    # checks --------------------------------------------------------------------------------------------------------

    def contradictions(self, audit: Audit) -> Iterator[str]:
        """Every statement of an audit that the model's own tensors contradict."""
        for bracket in (audit.bracket, audit.local):
            if bracket is not None and bracket.upper is not None and bracket.lower > bracket.upper:
                yield f"lower {bracket.lower} above upper {bracket.upper}"
        for row in audit.layers:
            yield from self.wrong_weight(row)
            yield from self.wrong_normalizer(row)
        named, notes = {name for row in audit.layers for name in row.parameters}, " ".join(audit.notes)
        for name in self.read:
            if name not in named and name not in notes:
                yield f"{name} has neither a row nor a note"

    def matrices(self, name: str) -> list[torch.Tensor]:
        """A parameter as (out, everything else) by what its module says; with more axes, with either end as the output."""
        owner = self.model.get_submodule(name.rpartition(".")[0])
        weight = self.parameters[name].double()
        if isinstance(owner, nn.modules.conv._ConvTransposeNd):
            return [torch.cat([part.transpose(0, 1).flatten(1) for part in weight.chunk(owner.groups)])]
        if weight.dim() < 3:
            return [weight if weight.dim() == 2 else weight.reshape(1, -1)]
        blocks = weight.transpose(1, -1).flatten(0, -2)  # (blocks, in, out), each block with outputs of its own
        return [weight.flatten(1), weight.transpose(0, -1).flatten(1), weight.flatten(0, -2), blocks]

    def wrong_weight(self, row: LayerRow) -> Iterator[str]:
        """Norms of a weight that is one parameter, or one slice of it, against the parameter itself."""
        if row.frobenius_norm is None or len(row.parameters) != 1 or row.parameters[0] not in self.parameters:
            return
        name = row.parameters[0]
        candidates, given = self.matrices(name), float(row.frobenius_norm)
        whole = float(candidates[0].norm())
        if abs(given - whole) > NEAR * whole and not is_slice(self.parameters[name], given) and not self.computed(given):
            yield f"{row.name}: ‖W‖_F is {row.frobenius_norm}, of {name} it is {whole:.6g}"
        elif row.matrix_norm is not None and abs(given - whole) <= NEAR * whole:
            norms = [float(torch.linalg.matrix_norm(matrix, 2)) for matrix in candidates]
            if not any(abs(float(row.matrix_norm) - norm) <= NEAR * norm + 1e-12 for norm in norms):
                yield f"{row.name}: ‖W‖ is {row.matrix_norm}, of {name} it is {norms[0]:.6g}"

    def computed(self, norm: float) -> bool:
        """Whether the model computes a weight of that norm as it runs: standardized, or a parameter times positions."""
        return any(abs(found - norm) <= NEAR * norm for found in self.handed)

    def wrong_normalizer(self, row: LayerRow) -> Iterator[str]:
        """max |γ|/√(v + ε) with γ, ε and what entered the module in one of its calls against the row's gain.

        Rows of a module that is called again are numbered in the order of the graph, which need not be that of the calls.
        """
        path = row.name.partition("#")[0]
        inputs = self.entering.get(path, [])
        if row.gain is None or not inputs:
            return
        module = self.model.get_submodule(path)
        if any(name.rpartition(".")[0] != path for name in row.parameters):  # a gate behind it, however computed, counts as γ
            return
        own = getattr(module, "weight", None)
        stored = [own.detach().double()] if own is not None else []
        expected = [gain for value in inputs for gain in _gains(module, value, row.kind, stored)]
        if expected and not any(abs(float(row.gain) - gain) <= 1e-3 * gain for gain in expected):
            yield f"{row.name}: gain is {row.gain}, with the module's γ and ε it is {expected[0]:.6g}"

    def wrong_symmetry(self, report: SymmetryReport) -> Iterator[str]:
        """Weights called scale-free whose length the output sees, in the mode of the report.

        In float64; in float32, with more room for roundoff, where a kernel of the model takes no float64.
        """
        for dtype in (torch.float64, torch.float32):
            twin = self.model.to(dtype).train(report.mode == "train")
            example = {name: value.to(dtype) if value.is_floating_point() else value for name, value in self.example.items()}
            try:
                with torch.no_grad():
                    twin(**example)
                break
            except RuntimeError:
                if dtype == torch.float32:
                    raise
        parameters = dict(twin.named_parameters(remove_duplicate=False))

        def output() -> torch.Tensor:
            torch.manual_seed(0)  # dropout draws the same
            found: torch.Tensor = chosen_output(twin(**example), self.output)
            return found

        with torch.no_grad():
            for name in report.scale_free_weights:
                parameter = parameters[name]
                kept = parameter.clone()
                before, after = ((parameter.copy_(factor * kept), output())[1] for factor in FACTORS[dtype])
                parameter.copy_(kept)
                change = float((after - before).norm() / before.norm().clamp_min(1e-300))
                if change > (1e-3 if dtype == torch.float64 else 1e-2):
                    yield f"{name} is called scale-free, and four times as large it changes the output by {100 * change:.2g} %"


def _gains(module: nn.Module, value: torch.Tensor, kind: str, stored: list[torch.Tensor]) -> list[float]:
    """What max |γ|/√(v + ε) may be: γ = w, or 1 + w as some libraries store it; empty for modules without a known ε."""
    epsilon = next((getattr(module, name) for name in ("eps", "variance_epsilon", "epsilon") if hasattr(module, name)), None)
    if not isinstance(epsilon, float):
        return []
    gammas = [gamma for weight in stored for gamma in (weight, 1 + weight)] or [torch.ones(1).double()]
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module.running_var is None:
            return []
        scales = [(module.running_var.double() + epsilon).rsqrt()]
    elif isinstance(module, nn.GroupNorm):
        groups = value.flatten(2).unflatten(1, (module.num_groups, -1)).flatten(2).var(2, correction=0)  # (samples, groups)
        scales = [(groups.amin(0) + epsilon).rsqrt().repeat_interleave(module.num_channels // module.num_groups)]
    elif kind in ("layer_norm", "rms_norm"):
        axes = tuple(range(-(stored[0].dim() if stored else 1), 0))
        layouts = [value, value.movedim(1, -1)] if value.dim() > 2 else [value]  # channels may come first
        spreads = [part.var(axes, correction=0) if kind == "layer_norm" else part.square().mean(axes) for part in layouts]
        scales = [(spread.min() + epsilon).rsqrt()[None] for spread in spreads]
    else:
        return []
    return [
        float((gamma.flatten() * scale).abs().max())
        for gamma in gammas
        for scale in scales
        if len(gamma.flatten()) == len(scale) or 1 in (gamma.numel(), len(scale))
    ]
