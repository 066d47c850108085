"""Print docs/experiments.md, made from the experiments."""

from normscope.lab.experiment import experiments

BAR = "\\|"
INTRODUCTION = """\
# Experiments

What `normscope lab run NAME` can run ([lab](lab.md)): the statement that is tested, and whose it is. The verdict follows from what
is measured. This page is made by `python -m normscope.lab`; a test fails when it is stale.

| experiment | statement | source | data |
| --- | --- | --- | --- |
"""


def documentation() -> str:
    """One row per experiment."""
    rows = ([f"`{e.name}`", e.statement, e.source, e.quick.data] for e in experiments().values())
    return INTRODUCTION + "".join(f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |\n" for row in rows)


if __name__ == "__main__":
    print(documentation(), end="")
