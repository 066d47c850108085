"""What is examined: a model with its graph, and what data, an optimizer or a recorded run add to it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from normscope.certify.known import Known
from normscope.certify.upper import upper
from normscope.core.data import Call, Data, Example, calls
from normscope.core.errors import NormscopeError, first_line
from normscope.core.magnitude import Magnitude
from normscope.core.randomness import preserved_random_state
from normscope.core.statistics import RunningVariance
from normscope.core.twins import twin_of
from normscope.findings.finding import Finding
from normscope.findings.over_time import Chronicle, Judged
from normscope.findings.rows import replayed
from normscope.findings.table import NEEDS, RULES
from normscope.findings.weights import FEW_STEPS, ModelWeights
from normscope.graph.graph import Constant, Graph, Node, check_finite
from normscope.graph.outputs import chosen_output
from normscope.graph.trace import trace
from normscope.operators.dense import spectral_norm
from normscope.rules.normalizers import completed, leaving, set_variances
from normscope.rules.readings import LinearMap, Normalizer, Operand, Permuting, Reshaping, learned
from normscope.rules.registry import Gain, registry
from normscope.symmetry.detect import symmetries
from normscope.symmetry.report import SymmetryReport

BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm
TORCH_NORMALIZERS = (BatchNorm, InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
MOST_BATCHES = 16  # of the data, for statistics
MOST_PARAMETERS, MOST_MODULES = 100_000_000, 2_000  # of a model whose symmetries are looked for unasked


@dataclass(eq=False)
class Subject:
    """A model and everything that checks may ask about it; nothing here changes the model or random state."""

    model: nn.Module
    example: Example
    optimizer: torch.optim.Optimizer | None = None
    data: Data | None = None
    run: Any = None
    output: str | int | None = None
    accumulation: int | None = None
    micro_batch: int | None = None
    given: SymmetryReport | None = None
    why_no_graph: str = ""
    why_no_train_graph: str = ""
    why_no_symmetries: str = ""

    # the graph -----------------------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> Graph | None:
        """The model in eval mode, on token ids too; or None with `why_no_graph`."""
        try:
            return trace(self.model, self.example, "eval", self.output, ids=True)
        except NormscopeError as error:
            self.why_no_graph = str(error).splitlines()[0]
            return None

    @cached_property
    def train_graph(self) -> Graph | None:
        """The model in train mode on the whole example, if it has batch normalizers and draws random numbers; else None.

        In eval mode dropout is gone. `why_no_train_graph` says what failed.
        """
        if not self.batch_norms:
            return None
        try:
            with preserved_random_state(), torch.no_grad():
                before, twin = torch.get_rng_state(), twin_of(self.model).train()
                twin(*self.call.args, **self.call.kwargs)
                if torch.equal(torch.get_rng_state(), before):
                    return None
            return trace(self.model, self.example, "batch", self.output, ids=True)
        except Exception as error:  # of the model's own code, or of torch: a batch of one sample, say, has no variance
            self.why_no_train_graph = first_line(error)
            return None

    @cached_property
    def readers(self) -> dict[Node, list[Node]]:
        assert self.graph is not None
        return self.graph.users

    @cached_property
    def normalizers(self) -> list[tuple[Node, Normalizer]]:
        """Every use of a normalizer, as far as the model could be traced; those written by hand have the γ and β behind them."""
        return [(node, found) for node in self.graph or () if (found := completed(node, self.readers)) is not None]

    @cached_property
    def left(self) -> dict[Node, Node]:
        """Where the output of each normalizer is complete, γ and β of one written by hand included → the normalizer."""
        return {leaving(node, self.readers): node for node, _ in self.normalizers}

    @cached_property
    def input_scales(self) -> set[str]:
        """γ of normalizers that linear layers alone read: such a γ could be a part of their weights."""
        found = (
            (normalizer.gamma, _passed(leaving(node, self.readers), self.readers))
            for node, normalizer in self.normalizers
            if isinstance(normalizer.gamma, Constant)
        )
        return {
            name for gamma, behind in found for name in gamma.sources if behind and all(node in self.weighted for node in behind)
        }

    @cached_property
    def weighted(self) -> dict[Node, LinearMap]:
        """Every use of a linear layer or convolution with a learned weight."""
        assert self.graph is not None
        maps = ((node, registry.reading(node, LinearMap)) for node in self.graph)
        return {node: found for node, found in maps if found is not None and found.fixed and learned(found.weight)}

    @cached_property
    def weight_norms(self) -> dict[Node, Magnitude]:
        """Spectral norms of the weights as matrices (out, everything else); quick, and no bound for a convolution by itself."""
        return {node: spectral_norm(found.matrix(), slack=1e-3) for node, found in self.weighted.items()}

    @cached_property
    def bound(self) -> Magnitude | None:
        """A certified bound from quick norms; None without rules for all operations.

        Each tap of a zero-padded kernel reads an entry at most once, so its norm is at most √taps that of its matrix; other
        padding may repeat entries and is left to the rule itself.
        """
        assert self.graph is not None
        quick = Known()
        for node, found in self.weighted.items():
            if found.plain and (found.kernel is None or found.kernel.pad is None):
                quick[found.key] = Gain((self.weight_norms[node] * math.sqrt(found.taps),), "quick")
        try:
            check_finite(self.graph)
            return upper(self.graph, known=quick).bound
        except NormscopeError:
            return None

    # modules and parameters --------------------------------------------------------------------------------------------

    @property
    def call(self) -> Call:
        return Call.of(self.example)

    @cached_property
    def batch_norms(self) -> dict[str, Any]:
        return {path: module for path, module in self.model.named_modules() if isinstance(module, BatchNorm)}

    @cached_property
    def torch_normalizers(self) -> dict[str, Any]:
        return {path: module for path, module in self.model.named_modules() if isinstance(module, TORCH_NORMALIZERS)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of what enters each of torch's normalizers on the example, up to where the model fails, if it does."""
        found: dict[str, tuple[int, ...]] = {}
        with contextlib.suppress(RuntimeError, ValueError):
            self._run([self.call], self.torch_normalizers, lambda path, value: found.update({path: tuple(value.shape)}))
        return found

    @torch.no_grad()
    def _run(self, calls: Iterable[Call], paths: Iterable[str], see: Callable[[str, torch.Tensor], None]) -> None:
        """Run a copy of the model in eval mode, and see what enters the modules at these paths."""

        def hook(module: nn.Module, args: Any, kwargs: Any, path: str) -> None:
            see(path, next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)))

        twin = twin_of(self.model).eval()
        for path in paths:
            twin.get_submodule(path).register_forward_pre_hook(partial(hook, path=path), with_kwargs=True)
        for call in calls:
            twin(*call.args, **call.kwargs)

    @cached_property
    def normalizer_parameters(self) -> dict[str, nn.Parameter]:
        """γ and β of every normalizer, by name; those of hand-written ones from the graph."""
        found = {
            f"{path}.{name}" if path else name: parameter
            for path, module in self.torch_normalizers.items()
            for name, parameter in module.named_parameters(recurse=False)
        }
        return found | self._read(part for _, normalizer in self.normalizers for part in (normalizer.gamma, normalizer.beta))

    def _read(self, operands: Iterable[Operand | None]) -> dict[str, nn.Parameter]:
        """The parameters that operands of the graph are made of, by name."""
        parameters = dict(self.model.named_parameters())
        names = (name for part in operands if isinstance(part, Constant) for name in part.sources if name in parameters)
        return {name: parameters[name] for name in names}

    @cached_property
    def handwritten_scales(self) -> dict[str, torch.Tensor]:
        """γ of normalizers that are not modules of torch, as it is applied (1 + w where w is stored), by the parameter's name."""
        own = {id(p) for module in self.torch_normalizers.values() for p in module.parameters(recurse=False)}
        return {
            name: normalizer.gamma.value.detach().flatten().to(parameter.dtype)
            for _, normalizer in self.normalizers
            if isinstance(normalizer.gamma, Constant)
            for name, parameter in self._read([normalizer.gamma]).items()
            if id(parameter) not in own
        }

    @property
    def forgotten(self) -> list[str]:
        """Trainable γ and β that no parameter group of the optimizer holds, by name."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        return [
            name for name, parameter in self.normalizer_parameters.items() if parameter.requires_grad and id(parameter) not in held
        ]

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has made steps that count as training."""
        states = () if self.optimizer is None else self.optimizer.state.values()
        return any(_steps(state) >= FEW_STEPS for state in states)

    @cached_property
    def symmetries(self) -> SymmetryReport | None:
        """Of the model in train mode, as given or found once; or None with `why_no_symmetries`."""
        if self.given is not None:
            return self.given
        size = sum(parameter.numel() for parameter in self.model.parameters())
        count = sum(1 for _ in self.model.modules())
        if size > MOST_PARAMETERS or count > MOST_MODULES:
            what = f"{size:,} parameters in {count:,} modules"
            self.why_no_symmetries = f"it may take minutes for {what}: pass symmetries=ns.symmetries(model, example)"
            return None
        try:
            return symmetries(self.model, self.example)
        except NormscopeError as error:
            self.why_no_symmetries = first_line(error)
            return None

    @cached_property
    def scale_free(self) -> dict[str, nn.Parameter]:
        """Weights whose length no output sees in training."""
        assert self.symmetries is not None
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name] for name in self.symmetries.scale_free_weights}

    # data ------------------------------------------------------------------------------------------------------------

    def batches(self) -> list[Call]:
        assert self.data is not None
        return list(itertools.islice(calls(self.data, self.call), MOST_BATCHES))

    @property
    def labelled(self) -> bool:
        return isinstance(self.data, tuple) and len(self.data) > len(self.call.tensors)

    def chosen(self, outputs: Any) -> torch.Tensor:
        """Of what the model returned, the output that is examined."""
        found: torch.Tensor = chosen_output(outputs, self.output)
        return found

    def cross_entropy(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.chosen(outputs), labels)

    @cached_property
    def entering(self) -> dict[str, RunningVariance]:
        """Mean and variance, channel by channel, of what enters each BN on the data, the model in eval mode."""
        found = {path: RunningVariance() for path in self.batch_norms}
        self._run(self.batches(), self.batch_norms, lambda path, value: found[path].update(value, 1))
        return found

    @cached_property
    def spreads(self) -> dict[str, tuple[float, float]]:
        """By path of each normalizer with statistics of its own input: its ε, and the median of what ε is added to, on the data."""
        found: dict[str, list[torch.Tensor]] = {}
        kinds = {path: read for path, module in self.torch_normalizers.items() if (read := _read(module)) is not None}
        for node, normalizer in self.normalizers:  # a module of its own that normalizes by hand what it is given
            outside = node.inputs[0].is_input or not f"{node.inputs[0].path}.".startswith(f"{node.path}.")
            if normalizer.by_hand and normalizer.kind != "l2" and node.path and outside:
                kinds.setdefault(node.path, normalizer)

        def see(path: str, value: torch.Tensor) -> None:
            variances = set_variances(kinds[path], value).flatten()
            found.setdefault(path, []).append(variances[variances > 0])  # a branch that starts at zero has no scale

        self._run(self.batches(), kinds, see)
        seen = {path: torch.cat(values) for path, values in found.items()}
        return {path: (kinds[path].epsilon, float(values.median())) for path, values in seen.items() if len(values)}

    # a recorded run ----------------------------------------------------------------------------------------------------

    @cached_property
    def _replayed(self) -> Chronicle:
        return replayed(self.run)

    @cached_property
    def judged(self) -> dict[str, Judged]:
        """By rule on rows: in how many steps it judged, as it trained, else by the rows that are on record."""
        return self._replayed.judged | self.run.judged

    def unjudged(self, rule: str) -> str:
        """Why nothing can be said of what a rule on rows did not find, or an empty string."""
        steps = self.run.life.step or 0
        if self.over_time(rule) or (rule in self.judged and self.judged[rule].enough(steps)):
            return ""
        if rule not in self.judged:
            return "the run has nothing on record that it reads"
        return f"the run has too little on record: {self.judged[rule].of(steps)}"

    def basis(self, rules: Iterable[str]) -> dict[str, str]:
        """What the answer of each rule on rows rests on."""
        return {
            rule: self.judged[rule].of(self.run.life.step or 0) for rule in rules if self.run is not None and rule in self.judged
        }

    @cached_property
    def _over_time(self) -> dict[str, list[Finding]]:
        """By rule: what its rows show, and what was seen as it trained, which counts where both say something of a place."""
        found = {(finding.rule, finding.where): finding for finding in self._replayed.findings}
        found |= {(finding.rule, finding.where): finding for finding in self.run.findings if finding.rule in RULES}
        return {rule: [finding for (id, _), finding in found.items() if id == rule] for rule in RULES}

    def over_time(self, rule: str) -> list[Finding]:
        """What a rule on rows found in the run."""
        return self._over_time[rule]

    @cached_property
    def weights(self) -> ModelWeights:
        return ModelWeights(self)

    def missing(self, needs: tuple[str, ...]) -> str:
        """Why a check with these needs cannot run, or an empty string."""
        have = {
            "files": False,
            "data": self.data is not None,
            "labels": self.labelled,
            "optimizer": self.optimizer is not None,
            "rows": self.run is not None,
            "judged weights": self.run is not None
            and any(layer["role"] == "weight" and layer["scale_free"] is not None for layer in self.run.layers),
            "accumulation": self.accumulation is not None,
            "batch size": self.micro_batch is not None or self.data is not None,
        }
        for need in needs:
            if need == "graph" and self.graph is None:
                return f"{NEEDS[need]}: {self.why_no_graph}"
            if need == "train graph" and self.train_graph is None and self.why_no_train_graph:
                return f"{NEEDS[need]}: {self.why_no_train_graph}"
            if need == "symmetries" and self.symmetries is None:
                return f"{NEEDS[need]}: {self.why_no_symmetries}"
            if not have.get(need, True):
                return NEEDS[need]
        return ""


def _passed(node: Node, readers: Mapping[Node, list[Node]]) -> list[Node]:
    """Who reads a value, through what only moves its entries."""
    found: list[Node] = []
    for reader in readers[node]:
        found += _passed(reader, readers) if isinstance(registry.reading(reader), (Reshaping, Permuting)) else [reader]
    return found


def _read(module: nn.Module) -> Normalizer | None:
    """What one of torch's normalizers is, without its γ and β; None for one with running statistics."""
    if isinstance(module, nn.GroupNorm):
        return Normalizer("group", module.eps, None, None, (), module.num_groups)
    if isinstance(module, InstanceNorm) and module.running_var is None:
        return Normalizer("group", module.eps, None, None, (), module.num_features)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        axes = tuple(range(-len(module.normalized_shape), 0))
        epsilon = torch.finfo(torch.float32).eps if module.eps is None else module.eps
        return Normalizer("layer" if isinstance(module, nn.LayerNorm) else "rms", epsilon, None, None, axes)
    return None


def _steps(state: Mapping[str, Any]) -> int:
    return int(state["step"]) if "step" in state else FEW_STEPS if state.get("momentum_buffer") is not None else 0
