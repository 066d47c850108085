"""Run one benchmark, or all that have what they need."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "chain_tightness", "depth", "memory", "local_cost", "local_tightness", "doctor_mistakes", "doctor_speed",
    "optim_speed", "optim_training", "watch_overhead", "curvature_speed", "audit_speed", "symmetries", "dashboard",
    "dashboard_scale", "generalization_scale", "bound_ranking",
)  # fmt: skip


def main() -> None:
    wanted = sys.argv[1:] or NAMES
    for name in wanted:
        if name not in NAMES:
            sys.exit(f"no benchmark {name}: choose from {', '.join(NAMES)}")
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
