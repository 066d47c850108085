"""Options that several commands have."""

from __future__ import annotations

from typing import Any

import typer

MODULE = "package.module:callable or file.py:callable. Its code is run."


def seed_of(what: str) -> Any:
    """--seed, in the range that every generator takes."""
    return typer.Option(min=0, max=2**63 - 1, help=f"Of {what}.")
