"""`normscope serve`: one line when it cannot start, an address when it can, and an end when it is told to."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normscope.cli import app

REFUSALS = {
    "no directory": (["nowhere"], "no directory nowhere"),
    "a file": (["file"], "no directory file"),
    "every address without a token": ([".", "--host", "0.0.0.0"], "add --token"),
    "a name elsewhere without a token": ([".", "--host", "example.org"], "add --token"),
    "a short token": ([".", "--token", "short"], "at least 16 characters"),
    "a host that is none": ([".", "--host", "256.1.1.1", "--token", "x" * 20], "cannot listen on 256.1.1.1"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    arguments, message = REFUSALS[case]
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", str(port)])
    assert result.exit_code == 2 and "choose another --port" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_told_to_stop(how: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "normscope", "serve", str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split(" at ")[1].split()[0]
        with urllib.request.urlopen(f"{address}api/runs", timeout=20) as answer:
            assert b'"cards": []' in answer.read()
        process.send_signal(how)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode in ((0,) if how == signal.SIGINT else (0, -how)) and errors == ""
