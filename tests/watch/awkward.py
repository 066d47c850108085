"""Models and losses of the kind that a recorder could disturb: closures, hooks, counters, subclasses, modes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

Record = dict[str, Any]  # what the user's code leaves behind
Loss = Callable[[nn.Module, Tensor], Tensor]


class Doubled(torch.autograd.Function):
    """x ↦ 2x, with counters in both directions."""

    calls: list[str] = []

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        Doubled.calls.append("forward")
        return 2 * x

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        Doubled.calls.append("backward")
        return 2 * gradients[0]


class Net(nn.Module):
    """Two layers with a normalizer between; `between` is the user's own code."""

    count = 0  # of the class, not of its objects

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.between = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), between

    def forward(self, x: Tensor) -> Tensor:
        Net.count += 1
        return self.second(torch.relu(self.norm(self.between(self.first(x)))))


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def numpy_generator(record: Record) -> tuple[nn.Module, Loss]:
    generator = np.random.default_rng(0)
    record["state"] = lambda: generator.bit_generator.state["state"]
    return Net(lambda h: h + 0.1 * torch.from_numpy(generator.standard_normal(h.shape)).float()), plain_loss


def torch_generator(record: Record) -> tuple[nn.Module, Loss]:
    generator = torch.Generator().manual_seed(0)
    record["state"] = lambda: generator.get_state().tolist()
    return Net(lambda h: h + 0.1 * torch.randn(h.shape, generator=generator)), plain_loss


def stochastic_depth(record: Record) -> tuple[nn.Module, Loss]:
    generator = np.random.default_rng(0)
    record["state"] = lambda: generator.bit_generator.state["state"]
    return Net(lambda h: h if generator.random() < 0.5 else torch.tanh(h)), plain_loss


def counter_in_forward(record: Record) -> tuple[nn.Module, Loss]:
    ticks = itertools.count()
    record["count"] = lambda: repr(ticks)
    return Net(lambda h: h * (1 + next(ticks))), plain_loss


def activation_kept_by_a_hook(record: Record) -> tuple[nn.Module, Loss]:
    model, kept = Net(), record.setdefault("kept", [])

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output)

    model.first.register_forward_hook(keep)
    record["seen"] = lambda: (len(kept), [type(value).__name__ for value in kept])
    return model, lambda model, x: model(x).square().mean() + kept[-1].square().mean()


def hook_that_changes_what_it_returns(record: Record) -> tuple[nn.Module, Loss]:
    model, ticks = Net(), itertools.count()
    model.first.register_forward_hook(lambda module, args, output: output + 0.01 * next(ticks))
    model.norm.register_full_backward_hook(lambda module, grads, outputs: None)
    record["count"] = lambda: repr(ticks)
    return model, plain_loss


def own_autograd_function(record: Record) -> tuple[nn.Module, Loss]:
    Doubled.calls.clear()
    record["calls"] = lambda: list(Doubled.calls)
    return Net(Doubled.apply), plain_loss


def checkpointed(reentrant: bool) -> Callable[[Record], tuple[nn.Module, Loss]]:
    def make(record: Record) -> tuple[nn.Module, Loss]:
        ticks = itertools.count()
        record["count"] = lambda: repr(ticks)

        def body(h: Tensor) -> Tensor:
            next(ticks)
            return nn.functional.dropout(torch.tanh(h), 0.3)

        return Net(lambda h: checkpoint(body, h, use_reentrant=reentrant)), plain_loss

    return make


class Doubling(nn.Module):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        Doubling.calls += 1
        return 2 * weight


def parametrized(record: Record) -> tuple[nn.Module, Loss]:
    model, Doubling.calls = Net(), 0
    parametrize.register_parametrization(model.first, "weight", Doubling())
    nn.utils.parametrizations.spectral_norm(model.second)
    record["calls"] = lambda: Doubling.calls
    return model, plain_loss


def hooks_on_saved_tensors(record: Record) -> tuple[nn.Module, Loss]:
    counts = {"pack": 0, "unpack": 0}

    def counted(name: str) -> Callable[[Tensor], Tensor]:
        def count(tensor: Tensor) -> Tensor:
            counts[name] += 1
            return tensor

        return count

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(counted("pack"), counted("unpack")):
            return plain_loss(model, x)

    record["counts"] = lambda: dict(counts)
    return Net(), loss


class Counting(TorchDispatchMode):
    """Counts operations, as a counter of FLOPs does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def mode_that_counts_operations(record: Record) -> tuple[nn.Module, Loss]:
    mode = Counting()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with mode:
            return plain_loss(model, x)

    record["count"] = lambda: mode.count
    return Net(), loss


class Marked(Tensor):
    """A tensor whose every operation runs the user's code."""

    calls = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Marked.calls += 1
        return super().__torch_function__(function, types, args, kwargs)


def tensors_of_a_subclass(record: Record) -> tuple[nn.Module, Loss]:
    Marked.calls = 0
    record["calls"] = lambda: Marked.calls
    return Net(), lambda model, x: model(x.as_subclass(Marked)).square().mean()


class Quantized(Tensor):
    """A parameter that is a wrapper and rounds at random in its every operation."""

    inner: Tensor
    calls = 0

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Quantized.calls += 1
        torch.rand(())
        plain = tree_map(lambda value: value.inner if isinstance(value, Quantized) else value, (args, kwargs or {}))
        result = function(*plain[0], **plain[1])
        if function is torch.ops.aten.detach.default:
            return Quantized(result)
        return args[0] if function._schema.is_mutable else result


def parameter_of_a_subclass(record: Record) -> tuple[nn.Module, Loss]:
    model, Quantized.calls = Net(), 0
    model.second.weight = nn.Parameter(Quantized(model.second.weight.detach().clone()))
    record["calls"], record["weight"] = (lambda: Quantized.calls), (lambda: model.second.weight.inner.tolist())
    model.state_dict = dict  # type: ignore[method-assign, assignment]
    return model, plain_loss


class Derived(nn.BatchNorm1d):
    """Computes what torch's class has as an attribute."""

    calls = 0

    @property
    def eps(self) -> float:
        Derived.calls += 1
        return 1e-3

    @eps.setter
    def eps(self, value: float) -> None:
        pass


def normalizer_with_a_property(record: Record) -> tuple[nn.Module, Loss]:
    model, Derived.calls = Net(), 0
    model.norm = Derived(8)
    record["calls"] = lambda: Derived.calls
    return model, plain_loss


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8, dtype=torch.cfloat), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x.to(torch.cfloat)).abs()))


def complex_weights(record: Record) -> tuple[nn.Module, Loss]:
    return Spectral(), plain_loss


def lazy_modules(record: Record) -> tuple[nn.Module, Loss]:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3)), plain_loss


class Odd(nn.Module):
    """Returns what is no tensor; takes a tensor by name; calls its normalizer on a list of views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(4)

    def forward(self, *, x: Tensor) -> Any:
        halves = [self.norm(input=half) for half in self.first(x).chunk(2, 1)]
        return type("Result", (), {"parts": {"halves": halves}})()


def odd_arguments_and_results(record: Record) -> tuple[nn.Module, Loss]:
    return Odd(), lambda model, x: sum(half.square().mean() for half in model(x=x).parts["halves"])


class Attending(nn.Module):
    """Two residual blocks with attention; `around` is the user's own way to call one."""

    def __init__(self, around: Callable[..., Tensor], written_out: bool = False, in_place: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.around = nn.Linear(6, 8), nn.Linear(8, 3), around
        self.blocks = nn.ModuleList(Attention(written_out, in_place) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        Net.count += 1
        h = self.embed(x)[:, None] + torch.arange(4.0)[:, None]
        for block in self.blocks:
            h = self.around(block, h)
        return self.head(h.mean(1))


class Attention(nn.Module):
    def __init__(self, written_out: bool, in_place: bool) -> None:
        super().__init__()
        self.norm, self.mix, self.written_out, self.in_place = nn.LayerNorm(8), nn.Linear(8, 24), written_out, in_place

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x * 1.0)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.written_out:
            mixed = torch.softmax(q @ k.mT / 2.0, -1) @ v
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        return x.add_(mixed) if self.in_place else x + mixed


def attention(
    around: Callable[..., Tensor] = lambda block, h: block(h), **options: bool
) -> Callable[[Record], tuple[nn.Module, Loss]]:
    return lambda record: (Attending(around, **options), plain_loss)


def attention_with_packed_tensors(record: Record) -> tuple[nn.Module, Loss]:
    """Queries and keys are packed by the user's own hooks: unpacked once each, by the backward pass."""
    counted = {"packed": 0, "unpacked": 0}

    def pack(tensor: Tensor) -> Tensor:
        counted["packed"] += 1
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        counted["unpacked"] += 1
        return tensor

    def around(block: nn.Module, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return block(h)

    record["counted"] = lambda: dict(counted)
    return Attending(around), plain_loss


def hooks_on_gradients(record: Record) -> tuple[nn.Module, Loss]:
    """The user's own hooks on the tensors between blocks see each gradient once, in the same order."""
    seen = record.setdefault("seen gradients", [])

    def around(block: nn.Module, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: seen.append(float(gradient.norm())))
        return block(h)

    record["gradients"] = lambda: list(seen)
    return Attending(around), plain_loss


CASES: dict[str, Callable[[Record], tuple[nn.Module, Loss]]] = {
    "fused attention": attention(),
    "written-out attention": attention(written_out=True),
    "blocks that write into their input": attention(in_place=True),
    "blocks, checkpointed": attention(lambda block, h: checkpoint(block, h, use_reentrant=False)),
    "blocks, checkpointed, reentrant": attention(lambda block, h: checkpoint(block, h, use_reentrant=True)),
    "attention with packed tensors": attention_with_packed_tensors,
    "hooks on gradients between blocks": hooks_on_gradients,
    "numpy generator in a closure": numpy_generator,
    "torch generator in a closure": torch_generator,
    "stochastic depth": stochastic_depth,
    "counter in forward": counter_in_forward,
    "activation kept by a hook": activation_kept_by_a_hook,
    "hook that changes what it returns": hook_that_changes_what_it_returns,
    "own autograd function": own_autograd_function,
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
    "parametrized": parametrized,
    "hooks on saved tensors": hooks_on_saved_tensors,
    "mode that counts operations": mode_that_counts_operations,
    "tensors of a subclass": tensors_of_a_subclass,
    "a parameter of a subclass": parameter_of_a_subclass,
    "a normalizer with a property": normalizer_with_a_property,
    "complex weights": complex_weights,
    "lazy modules": lazy_modules,
    "odd arguments and results": odd_arguments_and_results,
}
