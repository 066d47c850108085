"""`normscope serve`: an address when it can start, and an end when it is told to."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cli.commands import normscope


def test_a_token_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short\n")
    for file, words in (("none", "cannot read the token in"), ("short", "at least 16 characters")):
        result = normscope("serve", str(tmp_path), "--token-file", str(tmp_path / file))
        assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.quick(1)
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
        place, token = address.split("?token=")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{place}api/runs", timeout=120)
        request = urllib.request.Request(f"{place}api/runs", headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert b'"cards": []' in answer.read()
        process.send_signal(how)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode in ((0,) if how == signal.SIGINT else (0, -how)) and errors == ""


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    for name in [name for name in sys.modules if name.startswith(("normscope.dashboard.", "starlette."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("normscope.dashboard.server", raising=False)
    result = normscope("serve", str(tmp_path))
    assert result.exit_code == 2 and "pip install 'normscope[dashboard]'" in result.stderr and result.stderr.count("\n") == 1
