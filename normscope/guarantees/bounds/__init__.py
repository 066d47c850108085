"""The bounds that come with normscope, one file a paper; importing them here puts them into the table, in this order."""

from normscope.guarantees.bounds import held_out
from normscope.guarantees.table import TABLE

__all__ = ["TABLE", "held_out"]
