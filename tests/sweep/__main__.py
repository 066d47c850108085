"""`python -m tests.sweep [--part I/N] [--networks 20000] [--seeds A B …]`: judge random programs and print what came of them."""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter

import torch

from tests.sweep.judge import judge


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="which part of how many, for example 3/10")
    parser.add_argument("--networks", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="*", help="these alone")
    parser.add_argument("--refusals", action="store_true", help="count refusals by their first line")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # parts run side by side
    seeds = options.seeds or range(part - 1, options.networks, parts)
    start, outcomes, refusals, wrong = time.time(), Counter(), Counter(), 0
    for seed in seeds:
        judged = judge(seed)
        outcomes[judged.outcome] += 1
        refusals[judged.why[:120]] += bool(judged.why)
        wrong += bool(judged.wrong)
        for line in judged.wrong:
            print(line, flush=True)
    print(f"{sum(outcomes.values())} programs: {dict(outcomes)}; {wrong} wrong; {time.time() - start:.0f} s")
    if options.refusals:
        for why, count in refusals.most_common(60):
            print(f"{count:6d}  {why}")
    return 1 if wrong else 0


raise SystemExit(main())
