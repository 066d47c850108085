"""The symbols of a node on their way: together while its tokens have not met, then one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from normscope.certify.bundles import Together
from normscope.certify.columns import AttentionMap, Linearized, Visit
from normscope.certify.symbols import Symbols
from normscope.graph.graph import Node


@dataclass
class Tokens:
    """frames: (tokens, width, width), the columns of each token's symbols. owned: owners of entries, while tokens have not met.

    sizes, limits: as in `Together`. starts: the columns at those nodes, as far as others read them.
    """

    frames: torch.Tensor
    sizes: torch.Tensor
    limits: torch.Tensor
    owned: Mapping[Node, torch.Tensor]
    starts: dict[Node, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, symbols: Symbols, width: int, owned: Mapping[Node, torch.Tensor]) -> Tokens:
        frames = torch.diag_embed(symbols.scale.reshape(-1, width)) if symbols.frames is None else symbols.frames
        shape = (len(frames), width) if symbols.single else (len(frames),)
        return cls(frames, symbols.sizes.reshape(-1, width), symbols.group_sizes.reshape(shape), owned)

    def columns(self, node: Node) -> torch.Tensor:
        """At the node itself."""
        return self.frames.permute(2, 0, 1).reshape(-1, *node.shape)

    def at(self, node: Node) -> Together:
        return Together(self.sizes, self.limits, self.owned[node].reshape(-1))

    def apart(self, linearized: Linearized, rest: Collection[Node], chunk: slice, visit: Visit) -> dict[Node, torch.Tensor]:
        """The columns of some symbols, one each, where the rest of the nodes begins: at what those read, or behind attention."""
        symbols, width = torch.arange(chunk.start, chunk.stop), self.sizes.shape[1]
        token, entry = symbols // width, symbols % width
        some: dict[Node, torch.Tensor] = {}
        for node in rest:
            attended, sources = linearized.maps[node], list(dict.fromkeys(node.inputs))
            if not isinstance(attended, AttentionMap) or not all(source in self.starts for source in sources):
                continue
            if attended.takes([self.owned[source] for source in sources]):
                some[node], logits = attended.by_token([self.starts[source] for source in sources], token, entry)
                visit(attended.logits, logits)
                visit(node, some[node])
        read = {source for node in rest if node not in some for source in node.inputs}
        for node, columns in self.starts.items():
            if node in read:
                some[node] = self.at(node).apart(columns, token, entry)
        return some
