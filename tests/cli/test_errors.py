"""Mistakes of the user, for every command: exit code 2, nothing on stdout, and one line on stderr that says what is wrong."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.commands import normscope

SOURCE = """
from torch import nn
from normscope.lab.models import mlp
print("printed on import")

def make():
    return mlp(inputs=64, width=8, depth=3, normalizer="batch")

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(3, 2)
    def forward(self, left, right):
        return {"sum": self.first(left) + self.second(right), "left": self.first(left)}

def broken():
    raise RuntimeError("no data today")

def words():
    return nn.Embedding(5, 4)
"""

MISTAKES = {  # command line → what the error says
    "audit network.py:made --input 64": "has no 'made': did you mean make?",
    "audit network.py:make --input 6,2": "is not a shape",
    "audit network.py:make --input 7": "does not run on inputs of shape",
    "audit network.py:words --input 3": "ids must be integers",
    "audit network.py:words --input input:3:int": "--input inputs_embeds=TOKENSxWIDTH",
    "audit network.py:make --input 64 --mode test": "mode must be one of",
    "audit network.py:make": "--input",
    "audit network.py:make --input 64 --batch 0": "--batch",
    "audit network.py:make --input 64 --color": "--color",
    "audit network.py:Two --input 4 --input 3": "choose one",
    "audit network.py:make --input 64 --weights none.pt": "no file none.pt",
    "audit network.py:make --input 64 --json none/audit.json": "cannot write none/audit.json",
    "audit network.py:make --input 64 --html .": "cannot write .: it is a directory",
    "audit network.py:make --input 64 --effort 0.1 --html /proc/self/audit.html": "cannot write /proc/self/audit.html",
    "audit network.py:make --input 64 --region sphere": "is not a region",
    "audti": "No such command",
    "claims --only T-X": "no claim 'T-X'",
    "claims --explain nothing": "no claim 'nothing'",
    "claims --only A-WD --json missing/claims.json": "no directory",
    "claims --seed x": "claims --help",
    f"claims --seed {2**64}": "claims --help",
    "curvature network.py:make": "--data",
    "curvature network.py:make --data nothing": "not of a known form",
    "curvature network.py:make --data digits --mode test": "mode must be one of",
    "curvature network.py:make --data digits --matrix x": "matrix must be one of",
    "curvature network.py:make --data digits --loss x": "--loss must be one of",
    "curvature normscope.lab.models:mlp --data digits": "does not run on inputs of shape (256, 1, 8, 8)",
    "curvature network.py:make --data digits --json none/x.json": "cannot write",
    "data check cifar10 --dir .": "lacks data_batch_1.bin",
    "doctor network.py:make": "--input",
    "doctor network.py:make --input 64 --explain NS9": "NS9",
    "doctor network.py:make --input 64 --select NS9": "NS9",
    "doctor network.py:make --input 64 --fail-on often": "--fail-on",
    "doctor network.py:make --input 64 --baseline missing.json": "baseline",
    "doctor network.py:make --input 64 --sarif none/x.sarif": "cannot write",
    "export nowhere --to csv": "no run in nowhere",
    "export nowhere --to excel": "no form 'excel'",
    "generalization network.py:make": "--train",
    "generalization network.py:make --train nothing": "not of a known form",
    "generalization network.py:make --train network.py:broken": "no data today",
    "generalization network.py:make --train digits --loss x": "--loss must be one of",
    "generalization network.py:make --train digits --only x": "no bound 'x'",
    "generalization network.py:make --train digits --delta 2": "delta",
    "generalization network.py:make --train digits --json none/x.json": "cannot write",
    "generalization network.py:make --train digits --html none/x.html": "cannot write",
    "lab run nothing": "no experiment 'nothing'",
    "lab run weight-norms --set epochs": "--set takes NAME=VALUE",
    "lab run weight-norms --data cifar10": "cifar10 is read from files",
    "lab run weight-norms --on moon": "--on takes ray or ray:ADDRESS",
    "lab show weight-norms": "run it first",
    "report nowhere": "no run in nowhere",
    "report network.py": "network.py",
    "report nowhere --out none/x.html": "cannot write none/x.html",
    "serve nowhere": "no directory nowhere",
    "serve network.py": "no directory network.py",
    "serve . --host 0.0.0.0": "add --token",
    "serve . --host example.org": "add --token",
    "serve . --token short": "at least 16 characters",
    "serve . --host 256.1.1.1 --token twenty-letters-secret": "cannot listen on 256.1.1.1",
}


def error(*words: str) -> str:
    """What is said against a command."""
    result = normscope(*words)
    lines = [line for line in result.stderr.splitlines() if line != "printed on import"]
    assert result.exit_code == 2 and result.stdout == "" and len(lines) == 1 and lines[0].startswith("normscope: "), result.stderr
    return lines[0]


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_on_stderr(command: str, place: Path) -> None:
    assert MISTAKES[command] in error(*command.split())


def test_a_port_in_use_is_one_line(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another --port" in error("serve", ".", "--port", str(taken.getsockname()[1]))
