"""The bounds that come with normscope, one file per paper; importing them here puts them into the table, in this order."""

from normscope.bounds.theorems import held_out, than2025  # isort: split

from normscope.bounds.table import TABLE
from normscope.bounds.theorems import (
    bartlett2017,
    cisneros2025,
    golowich2018,
    hou2023,
    lyu2022,
    neyshabur2018,
    pac_bayes,
    vc,
)

__all__ = [
    "TABLE", "bartlett2017", "cisneros2025", "golowich2018", "held_out", "hou2023", "lyu2022", "neyshabur2018", "pac_bayes",
    "than2025", "vc",
]  # fmt: skip
