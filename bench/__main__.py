"""Run one benchmark, or all that have what they need."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

NAMES = (
    "chain_tightness", "depth", "memory", "local_cost", "local_tightness", "doctor_mistakes", "doctor_healthy", "doctor_speed",
    "optim_speed", "optim_training", "watch_overhead", "curvature_speed", "audit_speed", "symmetries", "dashboard",
    "dashboard_scale", "generalization_scale", "bound_ranking", "certificate_gap", "checkpoint_scale", "failures", "startup",
)  # fmt: skip
ASKED_FOR = (
    "wild",
    "wild_cost",
    "wild_scale",
    "in_the_wild",
    "checkpoint_wild",
    "folding",
)  # which take hours, memory or a directory


def main() -> None:
    given = list(itertools.takewhile(lambda name: not name.startswith("--"), sys.argv[1:]))  # options belong to a benchmark
    wanted = [name for name in given if not Path(name).is_dir()] or NAMES  # and so do directories
    for name in wanted:
        if name not in (*NAMES, *ASKED_FOR):
            sys.exit(f"no benchmark {name}: choose from {', '.join((*NAMES, *ASKED_FOR))}")
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
