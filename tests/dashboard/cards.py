"""What tests of the dashboard share: layers, a finding, and all cards of a catalogue."""

from __future__ import annotations

from normscope.dashboard.card import Card
from normscope.dashboard.listing import Catalogue

NAMES = ["first", "norm", "head"]
FINDING = {
    "rule": "variance-collapse", "step": 2, "layer": "norm", "evidence": {"affected": 1, "layers": ["norm"]},
    "message": "the variance is close to ε", "fix": "raise it",
}  # fmt: skip


def cards(catalogue: Catalogue) -> dict[str, Card]:
    """All cards, once everything is read."""
    found: dict[str, Card] = {}
    for _ in range(200):
        catalogue._last = -1e9
        changes = catalogue.changes()
        found = {card.id: card for card in changes.cards}
        if not changes.more:
            return found
    raise AssertionError("never done")
