"""The table with every rule in it: importing a file of rules registers them."""

from normscope.findings import capacity, residual, rows, state, stored, streams, structure, training  # noqa: F401
from normscope.findings.table import RULES as RULES
from normscope.findings.table import chosen_rules as chosen_rules
from normscope.findings.table import judged as judged
