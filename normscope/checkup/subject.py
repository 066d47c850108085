"""What is examined: a model with its graph, and what data, an optimizer or a recorded run add to it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from normscope.certify.upper import signature, upper
from normscope.core.data import Call, Data, Example, calls
from normscope.core.errors import NormscopeError
from normscope.core.magnitude import Magnitude
from normscope.core.statistics import RunningVariance
from normscope.graph.graph import Graph, Node, check_finite
from normscope.graph.trace import trace
from normscope.operators.dense import spectral_norm
from normscope.rules.normalizers import Normalizer, normalizer_of
from normscope.rules.registry import Gain

BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm
TORCH_NORMALIZERS = (BatchNorm, InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
WEIGHTED = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
MOST_BATCHES = 16  # of the data, for statistics


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
    why_no_graph: str = ""

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
    def readers(self) -> dict[Node, list[Node]]:
        assert self.graph is not None
        return self.graph.users

    @cached_property
    def normalizers(self) -> list[tuple[Node, Normalizer]]:
        """Every use of a normalizer, hand-written ones included."""
        assert self.graph is not None
        return [(node, found) for node in self.graph if (found := normalizer_of(node)) is not None]

    @cached_property
    def weighted(self) -> list[Node]:
        """Every use of a linear layer or convolution with a learned weight."""
        assert self.graph is not None
        return [node for node in self.graph if node.op in WEIGHTED and len(node.inputs) == 1 and node.args[1].learned]

    @cached_property
    def weight_norms(self) -> dict[Node, Magnitude]:
        """Spectral norms of the weights as matrices (out, everything else); quick, and no bound for a convolution by itself."""
        return {node: spectral_norm(node.args[1].double().flatten(1), slack=1e-3) for node in self.weighted}

    @cached_property
    def bound(self) -> Magnitude | None:
        """A certified bound from quick norms; None without rules for all operations.

        A zero-padded kernel reads an entry at most once a tap, so its norm is at most √taps that of its matrix; other padding may
        repeat entries and is left to the rule itself.
        """
        assert self.graph is not None
        quick: dict[object, Gain] = {}
        for node, norm in self.weight_norms.items():
            if node.input.op != "pad" and signature(node) is not None:
                taps = math.prod(node.args[1].shape[2:])
                quick[signature(node)] = Gain((norm * math.sqrt(taps),), "quick")
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
        twin = copy.deepcopy(self.model).eval()
        found: dict[str, tuple[int, ...]] = {}

        def observe(path: str) -> Any:
            return lambda module, args: found.update({path: tuple(args[0].shape)})

        for path in self.torch_normalizers:
            twin.get_submodule(path).register_forward_pre_hook(observe(path))
        with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError):
            twin(*self.call.args, **self.call.kwargs)
        return found

    @cached_property
    def normalizer_parameters(self) -> dict[str, nn.Parameter]:
        """γ and β of every normalizer, by name; those of hand-written ones from the graph."""
        found = {
            f"{path}.{name}" if path else name: parameter
            for path, module in self.torch_normalizers.items()
            for name, parameter in module.named_parameters(recurse=False)
        }
        parameters = dict(self.model.named_parameters())
        if self.graph is not None:
            for node, _ in self.normalizers:
                for reader in self.readers[node] if node.op == "standardize" else ():
                    for constant in reader.constants if reader.op in ("mul", "add") else ():
                        found.update({name: parameters[name] for name in constant.sources if name in parameters})
        return found

    @cached_property
    def scale_free(self) -> dict[str, nn.Parameter]:
        """Weights that a normalizer directly behind them makes scale-free in training."""
        parameters = dict(self.model.named_parameters())
        found = {}
        for node in self.weighted if self.graph is not None else ():
            readers, name = self.readers[node], node.args[1].sources[0]
            if readers and name in parameters and all(normalizer_of(reader) is not None for reader in readers):
                found[name] = parameters[name]
        return found

    # data ------------------------------------------------------------------------------------------------------------

    def batches(self) -> list[Call]:
        assert self.data is not None
        return list(itertools.islice(calls(self.data, self.call), MOST_BATCHES))

    @property
    def labelled(self) -> bool:
        return isinstance(self.data, tuple) and len(self.data) > len(self.call.tensors)

    @cached_property
    def entering(self) -> dict[str, RunningVariance]:
        """Mean and variance, channel by channel, of what enters each BN on the data, the model in eval mode."""
        twin = copy.deepcopy(self.model).eval()
        found = {path: RunningVariance() for path in self.batch_norms}

        def observe(path: str) -> Any:
            return lambda module, args: found[path].update(args[0], 1)

        hooks = [twin.get_submodule(path).register_forward_pre_hook(observe(path)) for path in self.batch_norms]
        with torch.no_grad():
            for call in self.batches():
                twin(*call.args, **call.kwargs)
        for hook in hooks:
            hook.remove()
        return found

    # a recorded run ----------------------------------------------------------------------------------------------------

    def series(self, metric: str) -> list[tuple[str, list[float]]]:
        """(layer, values over the sampled steps) of a metric of the run."""
        values = self.run.matrix(metric)
        return [(name, values[:, i].tolist()) for i, name in enumerate(self.run.layer_names)]

    def scalar(self, metric: str) -> tuple[list[int], list[float | None]]:
        """(steps, values) of a metric that has one value a step."""
        table = self.run.table([metric])
        return table["step"].to_pylist(), table[metric].to_pylist()

    def missing(self, needs: tuple[str, ...]) -> str:
        """Why a check with these needs cannot run, or an empty string."""
        from normscope.checkup.checks import NEEDS

        have = {
            "data": self.data is not None,
            "labels": self.labelled,
            "optimizer": self.optimizer is not None,
            "run": self.run is not None,
            "accumulation": self.accumulation is not None,
        }
        for need in needs:
            if need == "graph" and self.graph is None:
                return f"{NEEDS[need]}: {self.why_no_graph}"
            if not have.get(need, True):
                return NEEDS[need]
        return ""
