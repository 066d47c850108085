"""What an audit of a small model spends, in float64 passes of its graph: every n-th architecture of `transformers`.

    python -m bench wild_cost [--every 24]

Seconds are of processor time on one thread, of a second audit in the same process, so that imports and first calls do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.wild import _quiet
from bench.wild import transformers_models as models
from normscope import ledger
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.known import Known
from normscope.certify.lipschitz import bracket
from normscope.certify.nearby import nearby
from normscope.certify.upper import upper
from normscope.core.data import Call
from normscope.core.errors import NormscopeError

PARTS = ("tracing", "a pass", "upper", "lower", "local", "ledger")
EFFORT = 0.2


def parts(model: torch.nn.Module, example: dict[str, torch.Tensor]) -> dict[str, float]:
    """Seconds of every part of an audit, and of one pass of the graph."""
    spent: dict[str, float] = {}

    def timed(name: str, part: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = part()
        spent[name] = time.process_time() - start
        return result

    call, known = Call.of(example), Known()
    graph = timed("tracing", lambda: certifiable_graph(model, example, "eval", None))
    above = timed("upper", lambda: upper(graph, known=known, partial=True, effort=EFFORT))
    found = timed("lower", lambda: bracket(graph, above, call, None, None, EFFORT, None, known))
    generator = torch.Generator().manual_seed(0)
    timed("local", lambda: nearby(graph, above, call, True, EFFORT, generator, known, False, None))
    timed("ledger", lambda: ledger.ledger(graph, above, [call], found.witness))
    sample = [tensor[:1] for tensor in call.floats()]
    passes = []
    for _ in range(5):
        timed("a pass", lambda: graph.run(sample, torch.float64))
        passes.append(spent["a pass"])
    return {**spent, "a pass": statistics.median(passes)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench wild_cost")
    parser.add_argument("--every", type=int, default=24)
    given = parser.parse_args(sys.argv[sys.argv.index("wild_cost") + 1 :] if "wild_cost" in sys.argv else [])
    torch.set_num_threads(1)
    _quiet("transformers")
    print(f"{'seconds of':>24} {'in units of a pass':>52}")
    print(f"{'model':>24} " + " ".join(f"{name:>9}" for name in PARTS))
    rows = []
    for name in models.names()[:: given.every]:
        try:
            model, example = models.build(name)
            parts(model, example)
            row = parts(model, example)
        except (models.NotBuilt, NormscopeError, IndexError):  # not built, refused, or with inputs that are not samples
            continue
        rows.append([row["tracing"], row["a pass"], *(row[part] / row["a pass"] for part in PARTS[2:])])
        print(line(name, rows[-1]), flush=True)
    print(line(f"median of {len(rows)}", [statistics.median(column) for column in zip(*rows, strict=True)]))


def line(name: str, row: Sequence[float]) -> str:
    return f"{name:>24} {row[0]:9.2f} {row[1]:9.4f} " + " ".join(f"{value:9.1f}" for value in row[2:])


if __name__ == "__main__":
    main()
