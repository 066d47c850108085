"""What it costs to begin: `import normscope` and the commands that answer at once, against `import torch`, and a wheel's size.

Seconds of CPU (user and system) of a fresh process, the median of several rounds; in each round every command runs once.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROUNDS = 7
TORCH = "import torch"
COMMANDS = {
    "python": ["-c", ""],
    TORCH: ["-c", TORCH],
    "import normscope": ["-c", "import normscope"],
    "import normscope, torch": ["-c", "import normscope, torch"],
    "normscope --version": ["-m", "normscope", "--version"],
    "normscope --help": ["-m", "normscope", "--help"],
    "normscope audit --help": ["-m", "normscope", "audit", "--help"],
}


def main() -> None:
    spent: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, words in COMMANDS.items():
            spent[name].append(_cpu_seconds([sys.executable, *words]))
    usual = {name: median(seconds) for name, seconds in spent.items()}
    print(f"{'':<26}{'CPU s':>8}{'× import torch':>16}")
    for name, seconds in usual.items():
        print(f"{name:<26}{seconds:>8.2f}{seconds / usual[TORCH]:>16.2f}")
    print(f"wheel: {_wheel_bytes() / 1e6:.2f} MB")


def _cpu_seconds(words: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _wheel_bytes() -> int:
    """Built from a copy of what git tracks, so that nothing is left in the tree."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        source.mkdir()
        tree = subprocess.run(["git", "archive", "HEAD"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(source)], input=tree, check=True)
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, str(source)]
        subprocess.run(wheel, check=True, stdout=subprocess.DEVNULL)
        return next(Path(place).glob("*.whl")).stat().st_size


if __name__ == "__main__":
    main()
