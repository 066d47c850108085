"""Pairs from the graph: where transformers knows the architecture, its module tree on the meta device tells."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normscope._checkpoint.configurations import known_configuration
from normscope._checkpoint.entries import Entry
from normscope._checkpoint.structure import Pair, Role, Structure, named_role, with_betas
from normscope.core.data import Call
from normscope.core.errors import NormscopeError, first_line
from normscope.core.twins import twin_of
from normscope.graph.graph import Constant, Graph, Node
from normscope.graph.outlining import outline
from normscope.rules.normalizers import completed
from normscope.rules.readings import LinearMap, Normalizer, Reshaping, Scaling, Sum, learned
from normscope.rules.registry import registry

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
          "num_experts", "num_local_experts", "n_routed_experts", "layers", "depth", "depths", "num_blocks",
          "num_stages")  # fmt: skip
TOKENS = 4  # of the example


class Unknown(Exception):
    """Why transformers does not help."""


class Flat(nn.Module):
    """All outputs of a model in a row, so that no reader of a normalizer is left out because it leads to another output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        result = self.inner(*args, **kwargs)
        leaves = torch.utils._pytree.tree_leaves(dict(result) if isinstance(result, Mapping) else result)
        return torch.cat([leaf.flatten() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()])


def from_architecture(config: Mapping[str, Any], entries: Mapping[str, Entry]) -> Structure | str:
    """Roles and pairs found in the graph of the model that `config` describes, or why there are none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = on_meta(config, len(entries))
            prefix = _prefix(model, entries)
            graph = outline(Flat(model), _example(model))
            return Found(model, graph, prefix, entries).structure()
    except Unknown as why:
        return str(why)
    except NormscopeError as error:
        return first_line(error)
    except Exception as error:  # whatever the code of an architecture raises for a strange configuration
        return f"transformers cannot build it: {type(error).__name__}: {first_line(error)[:100]}"


def on_meta(config: Mapping[str, Any], tensors: int) -> nn.Module:
    """The model of a configuration with shapes and without values; only classes of transformers itself, and no code from files."""
    kinds = config.get("architectures")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise Unknown("config.json has no model_type")
    deep = next((f"{name} = {value}" for name, value in _depths(config) if value > tensors), None)
    if deep:
        raise Unknown(f"config.json says {deep}, more than the number of tensors in the file")
    try:
        import transformers
    except ImportError:
        raise Unknown("transformers is not installed: pip install 'normscope[transformers]'") from None
    made = known_configuration(config)
    if made is None:
        raise Unknown(f"transformers does not know the architecture {kind[:40]!r}")
    made.use_cache = False
    cls = getattr(transformers, kinds[0], None) if isinstance(kinds, list) and kinds and isinstance(kinds[0], str) else None
    known = (
        isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and getattr(cls, "config_class", None) is type(made)
    )
    with torch.device("meta"):
        return (cls._from_config(made) if known else transformers.AutoModel.from_config(made)).eval()  # type: ignore[union-attr]


def _depths(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of layers that a configuration asks for, those of nested ones too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _depths(value)
        for one in value if isinstance(value, list) else [value]:
            if name in DEPTHS and isinstance(one, (int, float)):
                yield name, one


def _prefix(model: nn.Module, entries: Mapping[str, Entry]) -> tuple[str, str]:
    """What to take from a name of the model, and what to put there, for the name in the file; shapes must agree."""
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    base = f"{getattr(model, 'base_model_prefix', '')}."
    for removed, added in (("", ""), (base, ""), ("", base)):
        renamed = {added + name.removeprefix(removed): shape for name, shape in own.items()}
        common = [name for name in renamed if name in entries]
        if 2 * len(common) > len(own) and all(renamed[name] == entries[name].shape for name in common):
            return removed, added
    raise Unknown("the tensors do not match the architecture named in config.json")


def _example(model: nn.Module) -> Call:
    config: Any = model.config
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return Call((), {main: torch.zeros(1, getattr(config, "num_channels", 3), height, width, device="meta")})
    if main != "input_ids":
        raise Unknown(f"the architecture takes {main}, and there is no example input for that")
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    extra = {"decoder_input_ids": ids.clone()} if getattr(config, "is_encoder_decoder", False) else {}
    return Call((), {main: ids, **extra})


class Found:
    """What a graph on the meta device says about the tensors of a file."""

    def __init__(self, model: nn.Module, graph: Graph, prefix: tuple[str, str], entries: Mapping[str, Entry]) -> None:
        self.model, self.graph, self.prefix, self.entries = model, graph, prefix, entries
        self.users = graph.users
        named = dict(model.named_parameters(remove_duplicate=False))
        places: dict[int, list[str]] = {}
        for name, value in named.items():
            places.setdefault(id(value), []).append(name)
        self.tied = {name: places[id(value)] for name, value in named.items()}
        self.conventions: dict[type, bool | None] = {}
        self.uses: dict[str, set[Node]] = {}
        for node in graph:
            for constant in node.constants:
                for name in map(self._name, constant.sources):
                    self.uses.setdefault(name, set()).add(node)

    def structure(self) -> Structure:
        roles = with_betas({name: named_role(name, entry.shape, self.entries) for name, entry in self.entries.items()})
        by_hand = "the graph of the architecture"
        pairs, transposed = [], set()
        for node in self.graph:
            reading = registry.reading(node, LinearMap)
            if reading is not None and isinstance(reading.weight, Constant) and reading.kernel is None and reading.outputs == (1,):
                transposed |= {name for name in map(self._name, reading.weight.sources) if name in self.entries}
        for node in self.graph:
            normalizer = completed(node, self.users)
            if normalizer is None or not isinstance(normalizer.gamma, Constant):
                continue
            gammas = [name for name in map(self._name, normalizer.gamma.sources) if name in self.entries]
            if len(gammas) != 1:
                continue
            roles[gammas[0]] = Role("γ", by_hand)
            betas = normalizer.beta.sources if isinstance(normalizer.beta, Constant) else ()
            beta = next((name for name in map(self._name, betas) if name in self.entries), None)
            if beta is not None:
                roles[beta] = Role("β", by_hand)
            readers, complete = self._readers(node, normalizer)
            pairs.append(
                Pair(gammas[0], readers, by_hand, beta, self._plus_one(normalizer), complete and bool(readers),
                     frozenset(transposed & {*readers}), normalizer.kind, normalizer.epsilon)
            )  # fmt: skip
        return Structure(roles, tuple(_merged(pairs)), by_hand, (), frozenset(transposed))

    def _name(self, name: str) -> str:
        """A parameter's name in the file; of tied ones that which the file has."""
        removed, added = self.prefix
        name = name.removeprefix("inner.")
        found = [added + one.removeprefix(removed) for one in self.tied.get(name, [name])]
        return next((one for one in found if one in self.entries), found[0])

    def _readers(self, node: Node, normalizer: Normalizer) -> tuple[tuple[str, ...], bool]:
        """The weights that read what a normalizer gives, and whether nothing else does."""
        waiting, found, complete = [self._last(node, normalizer)], [], True
        while waiting:
            current = waiting.pop()
            complete &= current is not self.graph.output
            for user in self.users[current]:
                reading = registry.reading(user)
                scaled = isinstance(reading, Scaling) and isinstance(reading.factor, (int, float))
                if isinstance(reading, Reshaping) or scaled:
                    waiting.append(user)
                    complete &= not scaled or normalizer.beta is None  # a reader's W β would be scaled as well
                elif isinstance(reading, LinearMap) and reading.input is current and learned(reading.weight):
                    assert isinstance(reading.weight, Constant)
                    names = [name for name in map(self._name, reading.weight.sources) if self._fits(name, reading, normalizer)]
                    found += names
                    complete &= len(names) == 1 and self.uses[names[0]] == {user}  # a tied or shared weight is used elsewhere
                else:
                    complete = False
        return tuple(dict.fromkeys(found)), complete

    def _fits(self, name: str, reading: LinearMap, normalizer: Normalizer) -> bool:
        """Whether each input channel of the weight is one entry of γ, so that it may move there."""
        if name not in self.entries or not isinstance(normalizer.gamma, Constant) or len(reading.outputs) != 1:
            return False
        shape, size = self.entries[name].shape, math.prod(normalizer.gamma.shape)
        if reading.kernel is not None:
            return reading.kernel.groups == 1 and not reading.kernel.transposed and shape[1] == size
        return len(shape) == 2 and reading.input_axis == -1 and shape[1 - reading.outputs[0]] == size

    def _last(self, node: Node, normalizer: Normalizer) -> Node:
        """The node behind the γ and β of a normalizer that is written by hand."""
        kinds: tuple[tuple[type, object], ...] = ((Scaling, normalizer.gamma), (Sum, normalizer.beta))
        for kind, part in kinds:
            behind = self.users[node]
            if normalizer.by_hand and part is not None and len(behind) == 1 and isinstance(registry.reading(behind[0]), kind):
                node = behind[0]
        return node

    def _plus_one(self, normalizer: Normalizer) -> bool | None:
        """Whether the module makes γ = 1 + w of what it stores, tried on the module itself with w = 0."""
        assert isinstance(normalizer.gamma, Constant)
        module = self.model.get_submodule(normalizer.gamma.sources[0].removeprefix("inner.").rpartition(".")[0])
        if type(module) not in self.conventions:
            self.conventions[type(module)] = _adds_one(module)
        return self.conventions[type(module)]


def _adds_one(module: nn.Module) -> bool | None:
    vectors = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    if not vectors or isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)):
        return False if vectors else None
    try:
        twin = twin_of(module).to_empty(device="cpu").float()
        for parameter in twin.parameters():
            nn.init.zeros_(parameter)
        with torch.no_grad():
            made = twin(torch.linspace(-1, 2, len(vectors[0])).expand(1, 2, -1).contiguous())
        return bool((made != 0).any()) if isinstance(made, torch.Tensor) else None
    except Exception:  # a module that takes something else
        return None


def _merged(pairs: list[Pair]) -> list[Pair]:
    """A normalizer that is used twice has one pair, complete only if every use is alike."""
    found: dict[str, Pair] = {}
    for pair in pairs:
        before = found.get(pair.gamma)
        if before is None:
            found[pair.gamma] = pair
        else:
            readers = tuple(dict.fromkeys((*before.readers, *pair.readers)))
            found[pair.gamma] = replace(pair, readers=readers, complete=False, transposed=pair.transposed | before.transposed)
    return list(found.values())
